"""What stands beside merged weights: the files of the base, and a model card."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli import __version__
from atlas_cli.merge_recipe import Merge
from atlas_cli.merging.evaluation import Evaluated, Result, evaluation_text, model_index
from atlas_cli.merging.inputs import Located
from atlas_cli.recipe import write_mapping
from atlas_cli.sources import Source

COPIED = (
    *("*.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
    *("LICENSE*", "NOTICE*"),
)
_LEFT = ("*.index.json", "adapter_config.json", "trainer_state.json", "training_args*", "*.bin")
_DTYPE_KEYS = ("torch_dtype", "dtype")


# Files of the base ----------------------------------------------------------------------------


def files_beside(source: Source) -> list[Path]:
    """Configuration, tokenizer and preprocessing of a model, in the order of their names."""
    return sorted(
        path
        for path in source.folder.iterdir()
        if path.is_file()
        and path not in source.weights
        and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in COPIED)
        and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT)
    )


def copy_beside(source: Source, folder: Path, dtype: str | None) -> None:
    """Copy them; config.json says the dtype of the weights, if that is another now."""
    for path in files_beside(source):
        text = _with_dtype(path, dtype) if path.name == "config.json" and dtype else None
        if text is None:
            shutil.copyfile(path, folder / path.name)
        else:
            (folder / path.name).write_text(text, "utf-8")


def _with_dtype(path: Path, dtype: str) -> str | None:
    found = json.loads(path.read_text("utf-8"))
    changed = {key: dtype for key in _DTYPE_KEYS if found.get(key) not in (None, dtype)}
    return json.dumps(found | changed, indent=2) + "\n" if changed else None


# The card -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """An evaluation for the card of a model: its name, and the digests of its weights."""

    found: Evaluated
    name: str
    digests: tuple[str, ...]

    @property
    def own(self) -> list[Result]:
        """The results that are of this model."""
        return self.found.of(self.digests)


def card_text(
    merge: Merge,
    recipe: dict[str, Any],
    located: Mapping[str, Located],
    shown: Shown | None = None,
) -> str:
    """A model card: front matter that the Hub reads, what was merged, results, and the recipe."""
    on_hub = [
        found.model.reference.name
        for found in located.values()
        if found.model.reference.kind == "hub"
    ]
    front: dict[str, Any] = {"tags": ["merge", "atlas", merge.method]}
    if on_hub:
        front = {"base_model": on_hub, **front}
    if shown and shown.own:
        front["model-index"] = model_index(shown.name, shown.own)
    steps = {key: value for key, value in recipe.items() if key != "locked"}
    if isinstance(steps.get("coefficients"), dict):
        steps["coefficients"] = "(see atlas_recipe.lock.yaml)"
    results = evaluation_text(shown.found, shown.own) if shown else ""
    listed = "\n".join(f"- `{name}`" for name in recipe["locked"])
    return (
        f"---\n{write_mapping(front, '')}---\n\n# Merged by {merge.method}\n\n"
        f"Made with atlas {__version__} by the method `{merge.method}` from:\n\n{listed}\n\n"
        "The licences of all these sources hold for this model too; look them up before you pass "
        f"it on.\n\n{results}## Recipe\n\n"
        f"```yaml\n{write_mapping(steps, '')}```\n\n"
        "`atlas_recipe.lock.yaml` holds the same with the sha256 of every input: "
        "`atlas merge atlas_recipe.lock.yaml -o DIR` gives this model again, to the byte.\n"
    )
