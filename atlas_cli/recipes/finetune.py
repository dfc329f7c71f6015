"""What `atlas finetune` is told, and for how long the published task vectors were trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atlas_cli.datasets.dataset import plain_name
from atlas_cli.errors import UsageError
from atlas_cli.recipes.learning import Checks, number_problems, parse_shots, told

TUNED = ("all", "layernorm", "projection")
AUGMENTS = ("slight", "flip", "crop", "none")
WARMUP = 500  # steps, or a tenth of all if that is less
LORA_RATE = 1e-3
_OTHERWISE = 10  # epochs

# Epochs of the published task vectors, by the names of their datasets.
EPOCHS: Mapping[str, int] = {
    "caltech101": 10,
    "caltech256": 8,
    "cars": 35,
    "cifar10": 5,
    "cifar100": 6,
    "country211": 15,
    "cub200": 20,
    "dtd": 76,
    "eurosat": 12,
    "fgvcaircraft": 60,
    "flowers102": 40,
    "food101": 15,
    "gtsrb": 11,
    "imagenet": 10,
    "mnist": 5,
    "oxfordiiitpet": 5,
    "pascalvoc": 10,
    "resisc45": 15,
    "stl10": 4,
    "sun397": 14,
    "svhn": 4,
    "ucf101": 20,
}


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """What `atlas finetune` trains: the image tower of a model, on each of some tasks."""

    data: list[str]
    model: str
    shots: str | int | float = "all"
    split: str | None = None
    templates: list[str] = dataclasses.field(default_factory=list)
    tune: str = "all"
    lora: int | None = None
    linearised: bool = False
    select: str = "last"
    epochs: int | None = None
    steps: int | None = None
    lr: float = 1e-5
    schedule: str = "cosine"
    warmup: int | None = None
    weight_decay: float = 0.1
    batch_size: int = 128
    accumulate: int = 1
    checkpoint_activations: bool = False
    clip: float = 1.0
    augment: str = "slight"
    arch: str | None = None
    text: str | None = None
    seed: int = 0


def finetune_recipe(found: Mapping[str, Any], where: str = "") -> FinetuneRecipe:
    """A recipe of keys whose types are right. Raises UsageError with every problem found."""
    preset = {"lr": LORA_RATE} if found.get("lora") else {}
    recipe = FinetuneRecipe(**{**preset, **found})
    if lines := list(_problems(recipe, where)):
        raise UsageError("\n".join(lines))
    return recipe


def epochs_of(recipe: FinetuneRecipe, task: str) -> int:
    """Passes over the images: as told, as the published vector of that name had, or ten."""
    return recipe.epochs or EPOCHS.get(plain_name(task), _OTHERWISE)


def warmup_of(recipe: FinetuneRecipe, steps: int) -> int:
    """Steps over which the rate rises."""
    wanted = min(WARMUP, steps // 10) if recipe.warmup is None else recipe.warmup
    return min(wanted, steps)


def _problems(recipe: FinetuneRecipe, where: str) -> Iterator[str]:
    yield from told(recipe, _checks(recipe), where)
    given = [key for key in ("epochs", "steps", "lora") if getattr(recipe, key) is not None]
    above = ("batch_size", "accumulate", "lr", "clip", *given)
    least = ("weight_decay", "seed", *(["warmup"] if recipe.warmup is not None else []))
    yield from number_problems(recipe, above, least, where)


def _checks(recipe: FinetuneRecipe) -> Checks:
    return {
        "data": (bool(recipe.data), "names no task"),
        "shots": (parse_shots(recipe.shots) != 0, "expected a number of images, a fraction or all"),
        "tune": (recipe.tune in TUNED, f"expected {', '.join(TUNED)}"),
        "lora": (
            recipe.lora is None or (recipe.tune == "all" and not recipe.linearised),
            "an adapter goes neither with tune nor with linearised",
        ),
        "select": (recipe.select in ("last", "best"), "expected last or best"),
        "steps": (
            recipe.steps is None or recipe.epochs is None,
            "epochs and steps both say how long; give one of them",
        ),
        "schedule": (recipe.schedule in ("cosine", "constant"), "expected cosine or constant"),
        "augment": (recipe.augment in AUGMENTS, f"expected {', '.join(AUGMENTS)}"),
    }
