"""What each merge method takes, known without torch: its models, its base and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Knob:
    """A number, a switch or a word that a recipe may set. `default` None: it must be given."""

    default: float | bool | str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


Knobs = Mapping[str, Knob]


Base = Literal["no", "may", "must"]


@dataclass(frozen=True)
class Row:
    """A method: what it does with a base, how many models it merges, and its parameters.

    The number of models does not count the base, unless the method has no use for one.
    """

    base: Base
    models: tuple[int, int | None]
    per_model: Knobs = field(default_factory=dict)
    per_merge: Knobs = field(default_factory=dict)


def _one_of(*choices: str) -> Knob:
    """A word; the first is the default."""
    return Knob(choices[0], choices=choices)


_LAMBDA, _INT8 = Knob(1.0), Knob(False)  # mergekit's int8_mask changes no number
_OWN = {"weight": Knob(), "density": Knob(1.0, 0.0, 1.0)}
_EPSILON, _GAMMA = {"epsilon": Knob(0.15, 0.0, 1.0)}, {"gamma": Knob(0.01, 0.0, 1.0)}
_SCOPE = {"scope": _one_of("tensor", "model")}
_ROUNDING = {"rounding": _one_of("floor", "ceil", "above")}
_RESCALE_BY = {"rescale_by": _one_of("norm", "density")}
_ELECTION = {
    "elect": _one_of("sum", "count"),
    "zero_sign": _one_of("positive", "majority"),
    "weigh": _one_of("before", "after"),
    "divisor": _one_of("weight", "count"),
}


def _arithmetic(normalize: bool, rescale: bool, own: Knobs, merge: Knobs) -> Row:
    """A method of the family of task arithmetic, and what it has beside the family's."""
    switches = {"normalize": Knob(normalize), "rescale": Knob(rescale)}
    shared = {**switches, "lambda": _LAMBDA, "int8_mask": _INT8}
    return Row("must", (1, None), {**_OWN, **own}, {**shared, **merge})


def _spectral(**more: Knob) -> Row:
    """A method that decomposes the matrices of task vectors."""
    return Row("must", (1, None), {"weight": Knob(1.0)}, {"lambda": _LAMBDA, **more})


# One row for each of core/methods/registry.py; a test holds the two equal.
METHODS: Mapping[str, Row] = {
    "linear": Row("no", (1, None), {"weight": Knob()}, {"normalize": Knob(True)}),
    "slerp": Row("must", (1, 1), {}, {"t": Knob()}),
    "nuslerp": Row(
        "may",
        (2, 2),
        {"weight": Knob()},
        {"nuslerp_flatten": Knob(True), "nuslerp_row_wise": Knob(False)},
    ),
    "multislerp": Row(
        "may",
        (1, None),
        {"weight": Knob()},
        {"normalize_weights": Knob(True), "eps": Knob(1e-8, 0.0)},
    ),
    "karcher": Row("no", (1, None), {}, {"max_iter": Knob(10, 0), "tol": Knob(1e-5, 0.0)}),
    "passthrough": Row("no", (1, 1), {"scale": Knob(1.0)}),
    "task_arithmetic": _arithmetic(False, False, {}, {}),
    "ties": _arithmetic(True, False, {}, {**_SCOPE, **_ROUNDING, **_ELECTION}),
    "dare_linear": _arithmetic(False, True, {}, _RESCALE_BY),
    "dare_ties": _arithmetic(False, True, {}, {**_RESCALE_BY, **_ELECTION}),
    "della": _arithmetic(True, True, _EPSILON, {**_RESCALE_BY, **_ELECTION}),
    "della_linear": _arithmetic(False, True, _EPSILON, _RESCALE_BY),
    "breadcrumbs": _arithmetic(False, False, _GAMMA, _SCOPE),
    "breadcrumbs_ties": _arithmetic(False, False, _GAMMA, {**_SCOPE, **_ELECTION}),
    "model_stock": Row("must", (2, None), {}, {"filter_wise": Knob(False)}),
    "sce": Row("must", (1, None), {}, {"select_topk": Knob(1.0, 0.0, 1.0), "int8_mask": _INT8}),
    "wise_ft": Row("must", (1, 1), {}, {"alpha": Knob(0.5)}),
    "lines": Row("must", (1, None), {"weight": Knob(1.0)}, {"alpha": Knob(), "beta": Knob()}),
    "metagpt": Row("must", (1, None), {}, {"lambda": _LAMBDA}),
    "consensus": Row(
        "must",
        (1, None),
        {"threshold": Knob(0.4, 0.0)},
        {"lambda": _LAMBDA, "agreement": Knob(2, 1)},
    ),
    "tsv": _spectral(),
    "iso_c": _spectral(),
    "iso_cts": _spectral(common_space_fraction=Knob(0.8, 0.0, 1.0)),
    "atlas": Row("must", (0, 0)),
}
# What mergekit has and atlas does not: named, so that nobody looks for a misspelling.
OTHERS = ("arcee_fusion", "nearswap", "ram", "ramplus_tl", "rectify_embed")
