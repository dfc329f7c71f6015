"""What a run comes to: what a verb reports of it, and what whoever called the verb gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from atlas_cli.recipes.model import as_percent

if TYPE_CHECKING:
    from atlas_cli.learning.selection import TestScore
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.text import Table

_OLD_KEYS = {
    "accuracy": "top1_percent",
    "val_accuracy": "val_top1_percent",
    "agreement": "agreement_percent",
}
SAYS_LITTLE = "training top-1 says little; atlas eval measures the merged model on other images"
Cell = str | float | None  # of a table; a number is in percent


@dataclass(frozen=True)
class Report:
    """What a verb says of its result: for the recipe's comment, for people, and as JSON."""

    comment: str
    notes: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Cell]] = ()
    failed: str | None = None
    details: tuple[str, ...] = ()  # for those who ask why


@dataclass(frozen=True)
class LearningResult:
    """What was learned. Shown as the recipe that merges it.

    `recipe` is that recipe and `text` its YAML; `coefficients` is None if there are too many of
    them for a text, or if none scale task vectors. `facts` is the result for JSON, `notes` and
    `rows` are for people, `details` for those who ask why. `tests` are scores on test images, and
    `failed` says why the result is of no use, if it is not.
    """

    recipe: LearnedRecipe
    text: str
    coefficients: Table | None
    improved: bool
    before: Mapping[str, float] | None
    after: Mapping[str, float] | None
    facts: Mapping[str, object]
    notes: tuple[str, ...]
    details: tuple[str, ...]
    tests: tuple[TestScore, ...]
    rows: Sequence[Mapping[str, Cell]]
    failed: str | None
    folder: Path | None
    stopped: bool

    def __str__(self) -> str:
        return self.text


class ClassAccuracy(TypedDict):
    """A class: how many images it has, and how many percent of them are recognised."""

    images: int
    zero_shot: float
    learned: float


class TaskClasses(TypedDict):
    """The classes of a task, and in words which images were looked at."""

    task: str
    on: str
    classes: dict[str, ClassAccuracy]


def with_units(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics as it is written now. Earlier versions wrote shares, and named no unit."""
    found = {}
    for key, value in row.items():
        name = _OLD_KEYS.get(key)
        is_share = name is not None and isinstance(value, int | float)
        found[name or key] = as_percent(value) if is_share else value
    return found
