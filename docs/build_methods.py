"""Write the tables of merge methods in docs/merging.md and recipes/README.md from the registry.

python docs/build_methods.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from atlas_cli.merge_methods.method import MergeMethod, Parameter
from atlas_cli.registry import MERGE_METHODS, POST_STEPS

ROOT = Path(__file__).parent.parent
START = "<!-- written by docs/build_methods.py -->\n\n"
END = "\n<!-- until here -->\n"
_BASES = {"no": "no", "may": "if given", "must": "yes"}


def formulas() -> str:
    """What each method computes, and of what."""
    lines = ["| method | merged weights | base | models |", "| --- | --- | --- | --- |"]
    for name, method in MERGE_METHODS.items():
        said = method.formula.replace("|", "\\|").removesuffix(".")
        link = f"[{name}](../recipes/merge/{name}.yaml)"
        lines.append(f"| {link} | {said} | {_BASES[method.base]} | {_count(method)} |")
    lines += ["", "Steps after a method, by their names under `post`, change merged matrices:", ""]
    lines += ["| step | merged weights |", "| --- | --- |"]
    for name, step in POST_STEPS.items():
        said = step.formula.replace("|", "\\|").removesuffix(".")
        lines.append(f"| [{name}](../recipes/merge/{name}.yaml) | {said} |")
    return "\n".join(lines) + "\n"


def parameters() -> str:
    """The parameters of each method, with their defaults."""
    lines = [
        "| method | base | parameters of a model | parameters of the merge | recipe |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, method in MERGE_METHODS.items():
        cells = (_BASES[method.base], _listed(method.per_model), _listed(method.per_merge))
        lines.append(f"| `{name}` | {' | '.join(cells)} | [{name}](merge/{name}.yaml) |")
    for name, step in POST_STEPS.items():
        cells = ("yes", "", _listed(step.parameters))
        lines.append(f"| `post: {name}` | {' | '.join(cells)} | [{name}](merge/{name}.yaml) |")
    return "\n".join(lines) + "\n"


def _count(method: MergeMethod) -> str:
    least, most = method.models
    if most == 0:
        return "task vectors"
    return str(least) if most == least else f"{least} or more"


def _listed(table: Mapping[str, Parameter]) -> str:
    return ", ".join(f"`{key}` ({_default(parameter)})" for key, parameter in table.items())


def _default(parameter: Parameter) -> str:
    if parameter.default is None:
        return "required"
    found = parameter.default
    return str(found).lower() if isinstance(found, bool) else f"{found}"


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs/merging.md": formulas,
    ROOT / "recipes/README.md": parameters,
}


def page(path: Path) -> str:
    """The text of a page with the table that the registry gives."""
    before, start, rest = path.read_text("utf-8").partition(START)
    _, end, after = rest.partition(END)
    return before + start + PAGES[path]() + end + after


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
