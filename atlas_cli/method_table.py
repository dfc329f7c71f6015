"""What each merge method takes, known without torch: its models, its base and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Knob:
    """A number, a switch or a word that a recipe may set. `default` None: it must be given."""

    default: float | bool | str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


Knobs = Mapping[str, Knob]
_NONE: Knobs = MappingProxyType({})


@dataclass(frozen=True)
class Row:
    """A method: what it does with a base, how many models it merges, and its parameters.

    The number of models does not count the base, unless the method has no use for one.
    """

    base: Literal["no", "may", "must"]
    models: tuple[int, int | None]
    per_model: Knobs = field(default_factory=dict)
    per_merge: Knobs = field(default_factory=dict)


# One row for each of core/methods/registry.py; a test holds the two equal.
_WEIGHT = Knob()
_DENSITY = Knob(1.0, low=0.0, high=1.0)
_NORMALIZE = Knob(False)
_RESCALE = Knob(False)
_LAMBDA = Knob(1.0)
_INT8_MASK = Knob(False)
_ELECT = Knob("sum", choices=("sum", "count"))
_ZERO_SIGN = Knob("positive", choices=("positive", "majority"))
_WEIGH = Knob("before", choices=("before", "after"))
_DIVISOR = Knob("weight", choices=("weight", "count"))
_RESCALE_2 = Knob(True)
_RESCALE_BY = Knob("norm", choices=("norm", "density"))
_EPSILON = Knob(0.15, low=0.0, high=1.0)
_GAMMA = Knob(0.01, low=0.0, high=1.0)
METHODS: Mapping[str, Row] = {
    "task_arithmetic": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY},
        {"normalize": _NORMALIZE, "rescale": _RESCALE, "lambda": _LAMBDA, "int8_mask": _INT8_MASK},
    ),
    "ties": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY},
        {
            "normalize": Knob(True),
            "rescale": _RESCALE,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "rounding": Knob("floor", choices=("floor", "ceil", "above")),
            "elect": _ELECT,
            "zero_sign": _ZERO_SIGN,
            "weigh": _WEIGH,
            "divisor": _DIVISOR,
        },
    ),
    "dare_linear": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY},
        {
            "normalize": _NORMALIZE,
            "rescale": _RESCALE_2,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "rescale_by": _RESCALE_BY,
        },
    ),
    "dare_ties": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY},
        {
            "normalize": _NORMALIZE,
            "rescale": _RESCALE_2,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "rescale_by": _RESCALE_BY,
            "elect": _ELECT,
            "zero_sign": _ZERO_SIGN,
            "weigh": _WEIGH,
            "divisor": _DIVISOR,
        },
    ),
    "della": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY, "epsilon": _EPSILON},
        {
            "normalize": Knob(True),
            "rescale": _RESCALE_2,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "rescale_by": _RESCALE_BY,
            "elect": _ELECT,
            "zero_sign": _ZERO_SIGN,
            "weigh": _WEIGH,
            "divisor": _DIVISOR,
        },
    ),
    "della_linear": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY, "epsilon": _EPSILON},
        {
            "normalize": _NORMALIZE,
            "rescale": _RESCALE_2,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "rescale_by": _RESCALE_BY,
        },
    ),
    "breadcrumbs": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY, "gamma": _GAMMA},
        {"normalize": _NORMALIZE, "rescale": _RESCALE, "lambda": _LAMBDA, "int8_mask": _INT8_MASK},
    ),
    "breadcrumbs_ties": Row(
        "must",
        (1, None),
        {"weight": _WEIGHT, "density": _DENSITY, "gamma": _GAMMA},
        {
            "normalize": _NORMALIZE,
            "rescale": _RESCALE,
            "lambda": _LAMBDA,
            "int8_mask": _INT8_MASK,
            "elect": _ELECT,
            "zero_sign": _ZERO_SIGN,
            "weigh": _WEIGH,
            "divisor": _DIVISOR,
        },
    ),
    "linear": Row("no", (1, None), {"weight": _WEIGHT}, {"normalize": Knob(True)}),
    "passthrough": Row("no", (1, 1), {"scale": Knob(1.0)}, {}),
    "wise_ft": Row("must", (1, 1), {}, {"alpha": Knob(0.5)}),
    "lines": Row("must", (1, None), {"weight": Knob(1.0)}, {"alpha": Knob(), "beta": Knob()}),
    "metagpt": Row("must", (1, None), {}, {"lambda": _LAMBDA}),
    "consensus": Row(
        "must",
        (1, None),
        {"threshold": Knob(0.4, low=0.0)},
        {"lambda": _LAMBDA, "agreement": Knob(2, low=1)},
    ),
    "slerp": Row("must", (1, 1), {}, {"t": Knob()}),
    "atlas": Row("must", (0, 0)),
}
# What mergekit has and atlas does not: named, so that nobody looks for a misspelling.
OTHERS = ("arcee_fusion", "nearswap", "ram", "ramplus_tl", "rectify_embed")
