"""The recipes of the commands that learn from labels: `fit`, `negate` and `add`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from atlas_cli.errors import UsageError, nearest
from atlas_cli.recipes.merge_checks import STORAGES
from atlas_cli.recipes.model import (
    GRANULARITY,
    Accumulate,
    Architecture,
    Check,
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
    one_of,
)
from atlas_cli.recipes.text import (
    is_pattern,
    parse_bytes,
    parse_clamp,
    parse_individual,
    parse_penalty,
)
from atlas_cli.registry import ADAPTERS, BASES, OBJECTIVES, find_basis, objectives_of

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

# What `fit` does where a recipe does not say; see benchmarks/RESULTS.md for what decided it.
_FAST: Mapping[str, Any] = {
    "adapter": "probe",
    "batch_size": 16,
    "epochs": 6,
    "augment": "slight",
}
# The schedule of BOLT; see core/basis.py.
BOLT: Mapping[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "batch_size": 32,
    "epochs": 20,
    "min_steps": 1,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "fast": _FAST,
    "best": {**_FAST, "adapter": "auto"},
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
    """The key `split`, with what is taken without it."""
    """What `split` means; `otherwise` says which split is taken without it."""
    return about(f"`train`, `val` or `test`. Without it: {otherwise}.")


def objective_of(command: str) -> Check:
    """A check for the name of an objective that a command takes."""

    def problem(word: str) -> str | None:
        entry = OBJECTIVES.get(word)
        if entry and command in entry.commands:
            return None
        names = objectives_of(command)
        listed = " or ".join(names) if len(names) == 2 else ", ".join(names)
        return f"expected {listed}, found {word!r}{nearest(word, names)}"

    return Check(problem, lambda: {"enum": objectives_of(command)})


def _basis_problem(text: str) -> str | None:
    try:
        find_basis(text)
    except UsageError as problem:
        return str(problem).removeprefix("basis: ")
    return None


def _basis_pattern() -> str:
    return f"^({'|'.join(one.expression for one in BASES.values())})$"


def _adapters() -> list[str]:
    return ["none", "auto", *ADAPTERS]


def _adapter_problem(word: str) -> str | None:
    if word in ("none", "auto") or word in ADAPTERS:
        return None
    return f"expected {', '.join(_adapters())}, found {word!r}{nearest(word, _adapters())}"


class LearnRecipe(Recipe):
    """The keys of every learning command: a base, vectors, and how coefficients are found."""

    order = (
        *("vectors", "exclude", "storage", "shots", "method", "select", "granularity"),
        *("schedule", "augment", "groups"),
        *("penalty", "memory", "data", "keep", "forget", "linearised", "objective"),
        *("init", "clamp", "ties", "individual"),
        *("basis", "preset", "adapter", "adapter_stage"),
        *("tune", "trusted_per_class", "power", "prior", "threshold"),
        *("epochs", "batch_size", "accumulate", "min_steps", "lr", "clip", "weight_decay", "seed"),
    )

    model: ModelName
    vectors: Annotated[list[str], expect(bool, "names no task vector", minItems=1), VECTORS]
    exclude: Annotated[list[str], about("Names of vectors that are left out.")] = []
    storage: Annotated[
        str,
        one_of(*STORAGES),
        about("How vectors that are extracted on the way are kept; `int8`."),
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
        expect(lambda texts: all(map(is_pattern, texts)), "not a regular expression"),
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


class FitRecipe(LearnRecipe):
    """What `atlas fit` learns from: a few labelled images of one task."""

    split: Annotated[
        str | None, split_without("`train`, or the folder as it is. Test images score the result")
    ] = None

    select: Annotated[
        str,
        expect(
            lambda text: bool(re.fullmatch("last|holdout|kfold|val:.+", text, re.DOTALL)),
            "expected last, holdout, kfold or val:DATA",
            pattern="^(last|holdout|kfold|val:.+)$",
            examples=["last", "holdout", "kfold", "val:DATA"],
        ),
        SELECT,
    ] = "last"
    vectors: Annotated[list[str], VECTORS] = []
    data: Annotated[str, about("Labelled images to learn from: a data reference.")]
    allow_target: Annotated[bool, about("Take vectors that are named like the data, too.")] = False
    augment: Annotated[
        str,
        one_of("flip", "crop", "slight", "none"),
        about("`flip`, `crop`, `slight` (crops of nine tenths or more) or `none`."),
    ] = "flip"
    basis: Annotated[
        Annotated[str, Check(_basis_problem, lambda: {"pattern": _basis_pattern()})] | None,
        about(
            "Directions instead of the vectors themselves: `svd:K` (singular directions of every "
            "matrix, with BOLT's schedule), `pca:K` or `random` (of the same norms)."
        ),
    ] = None
    preset: Annotated[
        str,
        one_of(*PRESETS),
        about(
            "Values for keys that are not given: `paper` (coefficients alone, as the paper has "
            "them), `fast` (60 steps of 16 images, with a linear head) or `best` (the same, and "
            "folds decide which head)."
        ),
    ] = "paper"
    adapter: Annotated[
        str,
        Check(_adapter_problem, lambda: {"enum": [*_adapters()]}),
        about(
            "A head on top of the features: `tip`, `tip-f`, `lpp`, `probe` or `prolip`; `none`; "
            "`auto`: folds of the shots decide. Without `vectors` it is fitted to the base."
        ),
    ] = "none"
    adapter_stage: Annotated[
        str,
        one_of("joint", "after"),
        about(
            "`joint`: the head is trained with the coefficients (`tip-f`, `probe`, `prolip`); "
            "`after`: on the features of the composed model."
        ),
    ] = "after"

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        preset = found.get("preset")
        found = {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **found}
        if str(found.get("basis", "")).startswith("svd:"):
            return {**BOLT, **found}
        entry = ADAPTERS.get(name) if isinstance(name := found.get("adapter"), str) else None
        if name == "auto" or (entry and entry.joint and found.get("vectors")):
            return {"adapter_stage": "joint", **found}
        return found

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        name, vectors = found.get("adapter", "none"), found.get("vectors")
        entry = ADAPTERS.get(name) if isinstance(name, str) else None
        joint = found.get("adapter_stage") == "joint"
        if name == "none" and not vectors:
            yield "vectors", f"names no task vector, found {vectors or []}"
        if basis := found.get("basis"):
            if not vectors:
                yield "basis", f"there are no vectors to take directions of, found {basis!r}"
            if joint and str(basis).startswith("svd:"):
                yield "adapter_stage", "singular directions are trained alone, found 'joint'"
            if found.get("method", "learned") != "learned":
                yield "method", f"a basis has no uniform scale, found {found['method']!r}"
            if (kind := found.get("granularity", "block")) != "block" or found.get("groups"):
                yield "granularity", f"a basis has a coefficient per block, found {kind!r}"
        if joint and name == "none":
            yield "adapter_stage", "there is no adapter, found 'joint'"
        if joint and entry and not entry.rates:
            yield "adapter_stage", f"{name} has nothing to train with coefficients, found 'joint'"
        if joint and name != "none" and not vectors:
            yield "vectors", f"{name} is trained with coefficients, and there are no vectors"
        if name == "auto" and (select := found.get("select", "last")) != "last":
            yield "select", f"auto selects by folds of its own, found {select!r}"
        if joint and found.get("penalty"):
            yield "penalty", f"is for coefficients alone, not joint, found {found['penalty']!r}"
        if joint and found.get("method") == "search":
            yield "method", "a search has no steps for the head; say after, found 'search'"
        if entry and entry.pooled and found.get("linearised"):
            yield "linearised", f"{name} has no first-order expansion, found True"


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
