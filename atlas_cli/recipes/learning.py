"""What the learning commands are told: frozen dataclasses, and what makes no sense in them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from atlas_cli.errors import UsageError
from atlas_cli.recipes.reading import parse_bytes

GRANULARITY = r"block|vector|qkv|partition:[1-9]\d{0,4}"
FORGETTING = ("unlikelihood", "ascent", "uniform")
BLIND = ("ufm", "entropy", "balanced-entropy", "sar", "simclr")
_SELECT = {"last", "same", "holdout", "kfold"}


@dataclass(frozen=True, kw_only=True)
class LearnRecipe:
    """What every learning command is told: a base, vectors, and how coefficients are found."""

    model: str
    vectors: list[str]
    shots: str | int | float = "all"
    split: str | None = None
    templates: list[str] = dataclasses.field(default_factory=list)
    method: str = "learned"
    select: str = "last"
    granularity: str = "block"
    groups: list[str] = dataclasses.field(default_factory=list)
    epochs: int = 10
    lr: float = 0.1
    schedule: str = "cosine"
    weight_decay: float = 0.1
    batch_size: int = 128
    accumulate: int = 1
    min_steps: int = 10
    clip: float = 1.0
    penalty: str | None = None
    augment: str = "flip"
    linearised: bool = False
    memory: str = "2GiB"
    arch: str | None = None
    text: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FitRecipe(LearnRecipe):
    """What `atlas fit` learns from: a few labelled images of one task."""

    data: str
    allow_target: bool = False


@dataclass(frozen=True, kw_only=True)
class NegateRecipe(LearnRecipe):
    """What `atlas negate` forgets: target tasks, beside a control task that has to stay."""

    data: list[str]
    control: str
    keep: float = 0.95
    forget: str = "unlikelihood"
    select: str = "same"


@dataclass(frozen=True, kw_only=True)
class AddRecipe(LearnRecipe):
    """What `atlas add` combines: tasks that one set of coefficients has to serve."""

    data: list[str]
    objective: str = "labels"
    init: float = 0.0
    clamp: str | None = None
    ties: float | None = None
    individual: list[str] = dataclasses.field(default_factory=list)
    select: str = "same"


@dataclass(frozen=True, kw_only=True)
class TtaRecipe(LearnRecipe):
    """What `atlas tta` adapts to: images that nobody labelled, and the names of their classes."""

    data: str
    vectors: list[str] = dataclasses.field(default_factory=list)
    classes: list[str] = dataclasses.field(default_factory=list)
    objective: str = "ufm"
    tune: str = "coefficients"
    trusted_per_class: int | None = None
    power: float = 0.5
    threshold: str = "0.9:1"
    prior: str = "uniform"
    select: str = "guard"
    epochs: int = 4
    lr: float = 0.03
    batch_size: int = 64
    min_steps: int = 1
    augment: str = "mild"


# Layer-wise AdaMerging: 16 images of every task in each step, Adam, coefficients within 0 and 1.
ADAMERGING: Mapping[str, Any] = {
    "init": 0.3,
    "clamp": "0:1",
    "lr": 1e-3,
    "schedule": "constant",
    "weight_decay": 0.0,
    "clip": math.inf,
    "augment": "none",
    "select": "last",
    "epochs": 16,
}

Learning = TypeVar("Learning", bound=LearnRecipe)


def learning_recipe(schema: type[Learning], found: Mapping[str, Any], where: str = "") -> Learning:
    """A recipe of keys whose types are right. Raises UsageError with every problem found."""
    recipe = schema(**{**_preset(schema, found), **found})
    if isinstance(recipe, AddRecipe) and recipe.method == "isotropic":
        recipe = dataclasses.replace(recipe, granularity="vector")
    if lines := list(_problems(recipe, where)):
        raise UsageError("\n".join(lines))
    return recipe


def _preset(schema: type[LearnRecipe], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Other defaults that a choice brings with it."""
    if schema is AddRecipe and found.get("objective") == "entropy":
        return ADAMERGING
    if schema is TtaRecipe and found.get("tune") == "layernorm":
        return {"lr": 0.003}
    if schema is TtaRecipe and found.get("objective") == "sar":
        return {"lr": 0.3, "weight_decay": 0.0}
    return {}


def _problems(recipe: LearnRecipe, where: str) -> Iterator[str]:
    yield from told(recipe, {**_shared_checks(recipe), **_own_checks(recipe)}, where)
    above = ("epochs", "batch_size", "accumulate", "min_steps", "lr", "clip")
    yield from number_problems(recipe, above, ("weight_decay", "seed"), where)


Checks = dict[str, tuple[bool, str]]


def told(recipe: object, checks: Checks, where: str) -> Iterator[str]:
    """A line for every check that failed."""
    for key, (good, message) in checks.items():
        if not good:
            yield f"{where}{key}: {message}, found {getattr(recipe, key)!r}"


def number_problems(
    recipe: object, above: Sequence[str], least: Sequence[str], where: str
) -> Iterator[str]:
    """A line for every number of keys `above` that is not more than 0, or of `least` below it."""
    for key in above:
        if not getattr(recipe, key) > 0:
            yield f"{where}{key}: expected more than 0, found {getattr(recipe, key)}"
    for key in least:
        if not getattr(recipe, key) >= 0:
            yield f"{where}{key}: expected 0 or more, found {getattr(recipe, key)}"
    for key in ("lr", "weight_decay"):
        if getattr(recipe, key) == math.inf:
            yield f"{where}{key}: expected a finite number, found inf"


def _shared_checks(recipe: LearnRecipe) -> Checks:
    return {
        "vectors": (bool(recipe.vectors), "names no task vector"),
        "shots": (parse_shots(recipe.shots) != 0, "expected a number of images, a fraction or all"),
        "method": _check_method(recipe),
        "select": _check_select(recipe),
        "granularity": (
            bool(re.fullmatch(GRANULARITY, recipe.granularity)),
            "expected block, vector, qkv or partition:K",
        ),
        "schedule": (recipe.schedule in ("cosine", "constant"), "expected cosine or constant"),
        "augment": _check_augment(recipe),
        "groups": (all(map(_is_pattern, recipe.groups)), "not a regular expression"),
        "penalty": (
            recipe.penalty is None or parse_penalty(recipe.penalty)[0] > 0,
            "expected l1:WEIGHT or l2:WEIGHT",
        ),
        "memory": (parse_bytes(recipe.memory) is not None, "expected a size such as 2GiB or 500MB"),
    }


def _check_method(recipe: LearnRecipe) -> tuple[bool, str]:
    if isinstance(recipe, AddRecipe):
        methods = ("learned", "isotropic", "search")
        return recipe.method in methods, "expected learned, isotropic or search"
    if isinstance(recipe, TtaRecipe) and recipe.tune == "layernorm":
        return recipe.method == "learned", "LayerNorms have no scale to search"
    return recipe.method in ("learned", "search"), "expected learned or search"


def _check_select(recipe: LearnRecipe) -> tuple[bool, str]:
    if isinstance(recipe, FitRecipe):
        good = recipe.select in _SELECT - {"same"} or _names_data(recipe.select)
        return good, "expected last, holdout, kfold or val:DATA"
    if isinstance(recipe, TtaRecipe):
        return recipe.select in ("guard", "last"), "expected guard or last"
    return recipe.select in _SELECT | {"val"}, "expected same, val, last, holdout or kfold"


def _check_augment(recipe: LearnRecipe) -> tuple[bool, str]:
    if isinstance(recipe, TtaRecipe):
        return recipe.augment in ("mild", "flip", "crop"), "expected mild, flip or crop"
    return recipe.augment in ("flip", "crop", "none"), "expected flip, crop or none"


def _names_data(text: str) -> bool:
    return text.startswith("val:") and len(text) > 4


def _own_checks(recipe: LearnRecipe) -> Checks:
    if isinstance(recipe, NegateRecipe):
        return {
            "data": (bool(recipe.data), "names no task to forget"),
            "keep": (0 < recipe.keep < math.inf, "expected more than 0, such as 0.95"),
            "forget": (recipe.forget in FORGETTING, f"expected {', '.join(FORGETTING)}"),
        }
    if isinstance(recipe, AddRecipe):
        return {
            "data": (bool(recipe.data), "names no task"),
            "objective": (recipe.objective in ("labels", "entropy"), "expected labels or entropy"),
            "init": (math.isfinite(recipe.init), "expected a finite number"),
            "clamp": (
                recipe.clamp is None or parse_clamp(recipe.clamp) is not None,
                "expected LOW:HIGH, such as 0:1",
            ),
            "ties": (recipe.ties is None or 0 < recipe.ties <= 1, "expected a share such as 0.2"),
            "individual": (
                all(parse_individual(text) is not None for text in recipe.individual),
                "expected DATA=ACCURACY in percent, such as builtin:digits=98.5",
            ),
        }
    if isinstance(recipe, TtaRecipe):
        tuned = ("coefficients", "layernorm")
        return {
            "vectors": (
                bool(recipe.vectors) or recipe.tune == "layernorm",
                "names no task vector",
            ),
            "shots": (recipe.shots == "all", "nothing is drawn by class without labels"),
            "linearised": (
                not recipe.linearised or recipe.tune == "coefficients",
                "LayerNorms are not composed",
            ),
            "objective": (recipe.objective in BLIND, f"expected {', '.join(BLIND)}"),
            "tune": (recipe.tune in tuned, "expected coefficients or layernorm"),
            "trusted_per_class": (
                recipe.trusted_per_class is None or recipe.trusted_per_class > 0,
                "expected 1 or more",
            ),
            "power": (0 < recipe.power < math.inf, "expected more than 0, such as 0.5"),
            "prior": (
                recipe.prior == "uniform" or parse_shares(recipe.prior) is not None,
                "expected uniform, or a share for every class such as 0.9,0.1",
            ),
            "threshold": (
                parse_schedule(recipe.threshold) is not None,
                "expected START:END within 0 and 1, such as 0.9:1",
            ),
        }
    return {}


# Values that are written as text --------------------------------------------------------------


def parse_shots(text: str | int | float) -> int | float | None:
    """Images per class, a fraction of each class, or None for all; 0 if it is none of these."""
    if text == "all":
        return None
    try:
        number = float(text)
    except ValueError:
        return 0
    if 0 < number < 1:
        return number
    return int(number) if number >= 1 and number.is_integer() else 0


def parse_penalty(text: str) -> tuple[int, float]:
    """The order of a norm and its weight; order 0 if the text is not l1:WEIGHT or l2:WEIGHT."""
    found = re.fullmatch(r"l([12]):(\d*\.?\d+(?:e-?\d+)?)", text)
    return (int(found[1]), float(found[2])) if found else (0, 0.0)


def parse_clamp(text: str) -> tuple[float, float] | None:
    """Two bounds from text such as 0:1; None if it is none."""
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return found if found[0] < found[1] else None


def parse_schedule(text: str) -> tuple[float, float] | None:
    """Two numbers within 0 and 1 from text such as 0.9:1, or the same twice; None if it is none."""
    start, _, end = text.partition(":")
    try:
        found = float(start), float(end or start)
    except ValueError:
        return None
    return found if all(0 <= value <= 1 for value in found) else None


def parse_shares(text: str) -> list[float] | None:
    """Positive numbers from text such as 0.9,0.1; None if it is none."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return found if all(0 < share < math.inf for share in found) else None


def parse_individual(text: str) -> tuple[str, float] | None:
    """A data reference and an accuracy between 0 and 1 from DATA=PERCENT; None if it is none."""
    name, _, percent = text.rpartition("=")
    try:
        found = float(percent) / 100
    except ValueError:
        return None
    return (name, found) if name and 0 < found <= 1 else None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
