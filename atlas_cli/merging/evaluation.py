"""What `atlas eval --json` found, as a model card shows it: a table, and results for the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from atlas_cli.errors import UsageError


@dataclass(frozen=True)
class Result:
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
    results: tuple[Result, ...]
    weights: Mapping[str, frozenset[str]]

    def of(self, digests: Iterable[str]) -> list[Result]:
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


def _result(row: Mapping[str, Any]) -> Result:
    kinds = get_type_hints(Result)
    values = {field.name: row[field.name] for field in fields(Result)}
    for name, value in values.items():
        if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
            raise TypeError(name)
    return Result(**values)


# In the card ----------------------------------------------------------------------------------


def evaluation_text(found: Evaluated, own: Iterable[Result]) -> str:
    """A section of the card; the results of this very model are marked."""
    mine = set(own)
    return (
        f"## Evaluation\n\nZero-shot accuracy in percent, by `atlas eval` {found.atlas}, with 95 % "
        "intervals. Rows in bold are of these weights.\n\n"
        "| model | data | split | images | top-1 | 95 % |\n| --- | --- | --- | --- | --- | --- |\n"
        + "".join(_line(result, bold=result in mine) for result in found.results)
        + "\n"
    )


def _line(result: Result, *, bold: bool) -> str:
    name, score = _cell(result.model), f"{100 * result.top1:.2f}"
    name, score = (f"**{name}**", f"**{score}**") if bold else (name, score)
    interval = f"{100 * result.low:.1f}-{100 * result.high:.1f}"
    cells = (name, _cell(result.data), _cell(result.split), str(result.images), score, interval)
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def model_index(name: str, own: Iterable[Result]) -> list[dict[str, Any]]:
    """The front matter that the Hub shows beside a model."""
    return [{"name": name, "results": list(_entries(own))}]


def _entries(own: Iterable[Result]) -> Iterator[dict[str, Any]]:
    for result in own:
        yield {
            "task": {"type": "zero-shot-image-classification"},
            "dataset": {"name": result.data, "type": result.data, "split": result.split},
            "metrics": [{"type": "accuracy", "name": "top-1", "value": round(result.top1, 6)}],
        }
