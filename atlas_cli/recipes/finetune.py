"""The recipe of `atlas finetune`, and for how long the published task vectors were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from atlas_cli.recipes.model import (
    AT_LEAST_0,
    Accumulate,
    Architecture,
    Clip,
    ModelName,
    Positive,
    RandomSeed,
    Rate,
    Recipe,
    Schedule,
    Shots,
    Templates,
    TextModel,
    WeightDecay,
    about,
    expect,
    one_of,
)

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


class FinetuneRecipe(Recipe):
    """What `atlas finetune` trains: the image tower of a model, on each of some tasks."""

    order = (
        *("data", "shots", "tune", "lora", "select", "steps", "schedule", "augment"),
        *("batch_size", "accumulate", "lr", "clip", "epochs", "steps", "lora"),
        *("weight_decay", "seed", "warmup"),
    )

    data: Annotated[
        list[str],
        expect(bool, "names no task", minItems=1),
        about("Labelled images of every task; each is trained on for itself, from the base."),
    ]
    model: ModelName
    shots: Shots = "all"
    split: Annotated[
        str | None,
        about("`train`, `val` or `test`. Without it: `train`, or the folder as it is."),
    ] = None
    templates: Templates = []
    tune: Annotated[
        str,
        one_of("all", "layernorm", "projection", last=", "),
        about("What is trained in the image tower: `all`, `layernorm` or `projection`."),
    ] = "all"
    lora: Annotated[
        Positive | None,
        about("Train an adapter of this rank instead, with a scale of 32 / rank."),
    ] = None
    linearised: Annotated[
        bool, about("Train the first-order expansion of the model at the base.")
    ] = False
    select: Annotated[
        str,
        one_of("last", "best"),
        about(
            "`last`: the weights of the last step, as the papers have it; `best`: of the best "
            "epoch on images that are not trained on."
        ),
    ] = "last"
    epochs: Annotated[
        Positive | None,
        about(
            "Passes over the images; those of the published task vectors by the name of the data, "
            "else 10."
        ),
    ] = None
    steps: Annotated[Positive | None, about("Steps in all, instead of `epochs`.")] = None
    lr: Annotated[Rate, about("Learning rate of AdamW; 1e-5, with `lora` 1e-3.")] = 1e-5
    schedule: Schedule = "cosine"
    warmup: Annotated[
        Annotated[int, AT_LEAST_0] | None,
        about("Steps while the rate rises; 500, but a tenth of all steps at most."),
    ] = None
    weight_decay: WeightDecay = 0.1
    batch_size: Annotated[Positive, about("Images per step; 128.")] = 128
    accumulate: Accumulate = 1
    checkpoint_activations: Annotated[
        bool, about("Compute activations again on the way back instead of keeping them.")
    ] = False
    clip: Clip = 1.0
    augment: Annotated[
        str,
        one_of("slight", "flip", "crop", "none", last=", "),
        about(
            "`slight` (crops of nine tenths or more), `flip` (larger crops and mirror images), "
            "`crop` or `none`."
        ),
    ] = "slight"
    arch: Architecture = None
    text: TextModel = None
    seed: RandomSeed = 0

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"lr": LORA_RATE, **found} if found.get("lora") else found

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        lora, steps = found.get("lora"), found.get("steps")
        if lora is not None and (found.get("tune", "all") != "all" or found.get("linearised")):
            yield "lora", f"an adapter goes neither with tune nor with linearised, found {lora!r}"
        if steps is not None and found.get("epochs") is not None:
            yield "steps", f"epochs and steps both say how long; give one of them, found {steps!r}"


def epochs_of(recipe: FinetuneRecipe, task: str) -> int:
    """Passes over the images: of the recipe, of the published vector of that plain name, or ten."""
    return recipe.epochs or EPOCHS.get(task, _OTHERWISE)


def warmup_of(recipe: FinetuneRecipe, steps: int) -> int:
    """Steps over which the rate rises."""
    wanted = min(WARMUP, steps // 10) if recipe.warmup is None else recipe.warmup
    return min(wanted, steps)
