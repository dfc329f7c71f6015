"""The model card of a merge: what was merged, how it was evaluated, and the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from atlas_cli import __version__
from atlas_cli.errors import UsageError
from atlas_cli.recipes.reading import write_mapping

if TYPE_CHECKING:
    from atlas_cli.merging.inputs import Located
    from atlas_cli.recipes.merge import Merge


@dataclass(frozen=True)
class EvaluationResult:
    """A model on a dataset, as `atlas eval` tells it; fractions, not percent."""

    model: str
    data: str
    split: str
    images: int
    top1: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: its results, and the digests of the weights of every model in it."""

    atlas: str
    results: tuple[EvaluationResult, ...]
    weights: Mapping[str, frozenset[str]]

    def of(self, digests: Iterable[str]) -> list[EvaluationResult]:
        """The results of the model whose weight files have these digests."""
        wanted = frozenset(digests)
        return [result for result in self.results if self.weights.get(result.model) == wanted]


def read_evaluation(text: str, where: str) -> Evaluated:
    """Read what `atlas eval --json` printed. Raises UsageError if it is anything else."""
    try:
        found = json.loads(text)
        results = tuple(_result(row) for row in found["results"])
        weights = {one["reference"]: frozenset(one["sha256"].values()) for one in found["models"]}
        version = str(found["atlas"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise UsageError(f"{where}: is not what `atlas eval --json` prints") from problem
    if not results:
        raise UsageError(f"{where}: holds no results")
    return Evaluated(version, results, weights)


def _result(row: Mapping[str, Any]) -> EvaluationResult:
    kinds = get_type_hints(EvaluationResult)
    values = {field.name: row[field.name] for field in fields(EvaluationResult)}
    for name, value in values.items():
        if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
            raise TypeError(name)
    return EvaluationResult(**values)


# In the card ----------------------------------------------------------------------------------


def evaluation_text(found: Evaluated, own: Iterable[EvaluationResult]) -> str:
    """A section of the card; the results of this very model are marked."""
    mine = set(own)
    return (
        f"## Evaluation\n\nZero-shot accuracy in percent, by `atlas eval` {found.atlas}, with 95 % "
        "intervals. Rows in bold are of these weights.\n\n"
        "| model | data | split | images | top-1 | 95 % |\n| --- | --- | --- | --- | --- | --- |\n"
        + "".join(_line(result, bold=result in mine) for result in found.results)
        + "\n"
    )


def _line(result: EvaluationResult, *, bold: bool) -> str:
    name, score = _cell(result.model), f"{100 * result.top1:.2f}"
    name, score = (f"**{name}**", f"**{score}**") if bold else (name, score)
    interval = f"{100 * result.low:.1f}-{100 * result.high:.1f}"
    cells = (name, _cell(result.data), _cell(result.split), str(result.images), score, interval)
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def model_index(name: str, own: Iterable[EvaluationResult]) -> list[dict[str, Any]]:
    """The front matter that the Hub shows beside a model."""
    return [{"name": name, "results": list(_entries(own))}]


def _entries(own: Iterable[EvaluationResult]) -> Iterator[dict[str, Any]]:
    for result in own:
        yield {
            "task": {"type": "zero-shot-image-classification"},
            "dataset": {"name": result.data, "type": result.data, "split": result.split},
            "metrics": [{"type": "accuracy", "name": "top-1", "value": round(result.top1, 6)}],
        }


# The card -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """An evaluation for the card of a model: its name, and the digests of its weights."""

    found: Evaluated
    name: str
    digests: tuple[str, ...]

    @property
    def own(self) -> list[EvaluationResult]:
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
