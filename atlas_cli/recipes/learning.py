"""What recipes of all learning commands have, and the recipes of `negate` and `add`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from atlas_cli.errors import pattern_problem
from atlas_cli.recipes.model import (
    GRANULARITY,
    STORAGES,
    Accumulate,
    Architecture,
    Clip,
    ModelName,
    Number,
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
    objective_of,
    one_of,
    parse_bytes,
)

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

VECTORS = about(
    "Task vectors of this base: files, folders, `zoo:SET`, `hf://OWNER/NAME`; or fine-tuned models "
    "and adapters, whose vectors are extracted."
)
_METHOD = about(
    "`learned`, or `search`: the best of 20 uniform scales by the same rule; for `add` also "
    "`isotropic`: one number per vector."
)
SELECT = about("What decides which epoch is kept.")
SelectForSeveral = Annotated[str, one_of("same", "val", "last", "holdout", "kfold"), SELECT]


def split_without(otherwise: str) -> Any:
    """What `split` means; `otherwise` says which split is taken without it."""
    return about(f"`train`, `val` or `test`. Without it: {otherwise}.")


# Values as text -------------------------------------------------------------------------------


def parse_penalty(text: str) -> tuple[int, float]:
    """The order of a norm and its weight; order 0 if the text is not l1:WEIGHT or l2:WEIGHT."""
    found = re.fullmatch(r"l([12]):(\d*\.?\d+(?:e-?\d+)?)", text)
    return (int(found[1]), float(found[2])) if found else (0, 0.0)


def parse_clamp(text: str) -> tuple[float, float] | None:
    """Two bounds from text such as 0:1; None if the text is not LOW:HIGH."""
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return found if found[0] < found[1] else None


def parse_individual(text: str) -> tuple[str, float] | None:
    """A data reference and an accuracy between 0 and 1 from DATA=PERCENT; None if it is neither."""
    name, _, percent = text.rpartition("=")
    try:
        found = float(percent) / 100
    except ValueError:
        return None
    return (name, found) if name and 0 < found <= 1 else None


# Recipes --------------------------------------------------------------------------------------


class LearnRecipe(Recipe):
    """The keys of every learning command: a base, vectors, and how coefficients are found."""

    order = (
        *("vectors", "exclude", "storage", "shots", "method", "select", "granularity"),
        *("schedule", "augment", "groups"),
        *("penalty", "memory", "data", "keep", "forget", "linearised", "objective"),
        *("init", "clamp", "ties", "individual"),
        *("basis", "budget", "keep_vectors", "rank_by", "images_of"),
        *("preset", "adapter", "adapter_stage"),
        *("tune", "trusted_per_class", "power", "prior", "threshold"),
        *("epochs", "batch_size", "accumulate", "min_steps", "lr", "clip", "weight_decay", "seed"),
    )

    model: ModelName
    vectors: Annotated[list[str], expect(bool, "names no task vector", minItems=1), VECTORS]
    exclude: Annotated[list[str], about("Names of vectors that are left out.")] = []
    storage: Annotated[
        str,
        one_of(*STORAGES),
        about(
            "How vectors that are extracted on the way are kept; `int8`, or with fewer bits `int4`."
        ),
    ] = "int8"
    shots: Shots = "all"
    split: Annotated[
        str | None,
        split_without("`train` for `fit`, `val` for `negate` and `add`, `test` for `tta`"),
    ] = None
    templates: Templates = []
    method: Annotated[str, one_of("learned", "search"), _METHOD] = "learned"
    select: Annotated[str, SELECT] = "last"
    granularity: Annotated[
        str,
        GRANULARITY,
        about("What shares a coefficient: `block`, `vector`, `qkv` or `partition:K`."),
    ] = "block"
    groups: Annotated[
        list[str],
        expect(lambda texts: not any(map(pattern_problem, texts)), "not a regular expression"),
        about("Regular expressions; blocks matched by the same one share a coefficient."),
    ] = []
    epochs: Annotated[Positive, about("Passes over the images; 10.")] = 10
    lr: Annotated[Rate, about("Learning rate of AdamW; 0.1.")] = 0.1
    schedule: Schedule = "cosine"
    weight_decay: WeightDecay = 0.1
    batch_size: Annotated[Positive, about("Images per step, of all tasks together; 128.")] = 128
    accumulate: Accumulate = 1
    min_steps: Annotated[
        Positive, about("Steps per epoch at least; few images are shown repeatedly; 10.")
    ] = 10
    clip: Clip = 1.0
    penalty: Annotated[
        Annotated[
            str, expect(lambda text: parse_penalty(text)[0] > 0, "expected l1:WEIGHT or l2:WEIGHT")
        ]
        | None,
        about("`l1:WEIGHT` or `l2:WEIGHT` on the coefficients."),
    ] = None
    augment: Annotated[
        str,
        one_of("flip", "crop", "none"),
        about(
            "`flip` (random crops and mirror images), `crop` or `none`; for `fit` also `slight`."
        ),
    ] = "flip"
    linearised: Annotated[
        bool, about("Learn for the first-order expansion of the model at the base.")
    ] = False
    memory: Annotated[
        str,
        expect(lambda text: parse_bytes(text) is not None, "expected a size such as 2GiB or 500MB"),
        about("Budget for the vectors; beyond it they are kept as bf16, int8, or in their files."),
    ] = "2GiB"
    arch: Architecture = None
    text: TextModel = None
    seed: RandomSeed = 0


class NegateRecipe(LearnRecipe):
    """What `atlas negate` forgets: target tasks, beside a control task that has to stay."""

    data: Annotated[
        list[str],
        expect(bool, "names no task to forget", minItems=1),
        about("Labelled images of the tasks to forget."),
    ]
    control: Annotated[str, about("Labelled images of the task to keep.")]
    keep: Annotated[
        Number,
        expect(
            lambda share: 0 < share < math.inf,
            "expected more than 0, such as 0.95",
            exclusiveMinimum=0,
        ),
        about("Share of its zero-shot accuracy that the control has to keep; 0.95."),
    ] = 0.95
    forget: Annotated[
        str,
        objective_of("negate"),
        about("Loss of the targets: `unlikelihood`, `ascent` (the paper's) or `uniform`."),
    ] = "unlikelihood"
    select: SelectForSeveral = "same"
    split: Annotated[str | None, split_without("`val`, else `train`, or the folder as it is")] = (
        None
    )


class AddRecipe(LearnRecipe):
    """What `atlas add` combines: tasks that one set of coefficients has to serve.

    The objective `entropy` brings the defaults of AdaMerging, and the method `isotropic` has one
    coefficient for each vector.
    """

    data: Annotated[
        list[str],
        expect(bool, "names no task", minItems=1),
        about("Labelled images of every task."),
    ]
    objective: Annotated[
        str,
        objective_of("add"),
        about("`labels`, or `entropy`, which looks at no label: layer-wise AdaMerging."),
    ] = "labels"
    init: Annotated[
        Number,
        expect(lambda value: abs(value) < math.inf, "expected a finite number"),
        about("Coefficients at the start; 0, for `entropy` 0.3."),
    ] = 0.0
    clamp: Annotated[
        Annotated[
            str,
            expect(lambda text: parse_clamp(text) is not None, "expected LOW:HIGH, such as 0:1"),
        ]
        | None,
        about("Bounds of coefficients, `LOW:HIGH`; none, for `entropy` 0:1."),
    ] = None
    ties: Annotated[
        Annotated[
            Number,
            expect(
                lambda share: 0 < share <= 1,
                "expected a share such as 0.2",
                exclusiveMinimum=0,
                maximum=1,
            ),
        ]
        | None,
        about("Keep this share of every vector, and the elected sign, first: AdaMerging++."),
    ] = None
    individual: Annotated[
        list[str],
        expect(
            lambda texts: all(parse_individual(text) is not None for text in texts),
            "expected DATA=ACCURACY in percent, such as builtin:digits=98.5",
        ),
        about("`DATA=PERCENT`: accuracy of a fine-tuned model, to normalise by."),
    ] = []
    method: Annotated[str, one_of("learned", "isotropic", "search"), _METHOD] = "learned"
    select: SelectForSeveral = "same"
    split: Annotated[str | None, split_without("`val`, else `train`, or the folder as it is")] = (
        None
    )

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        if found.get("objective") == "entropy":
            found = {**ADAMERGING, **found}
        if found.get("method") == "isotropic" and isinstance(found.get("granularity", ""), str):
            found = {**found, "granularity": "vector"}
        return found
