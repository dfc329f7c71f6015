"""What a merge method is, and how it gets its name: parameters, statistics, a formula.

A family module calls `merge_method` for each of its methods, and so may a plugin. The parameters
are known without torch, which a family module mentions by way of `late` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from atlas_cli.merge_methods.tiling import by_pieces
from atlas_cli.registry import MERGE_METHODS, POST_STEPS

if TYPE_CHECKING:
    import torch

    from atlas_cli.merge_methods.tiling import Tile, Tiles

    Formula = Callable[[Tile, "Values", Any], torch.Tensor]

F = TypeVar("F", bound="Formula")
Base = Literal["no", "may", "must"]


@dataclass(frozen=True)
class Parameter:
    """A number, a switch or a word that a recipe may set.

    A parameter whose `default` is None must be given. `usual` is what `--compare` takes instead
    of the default, where that is None, or mergekit's rather than the one of the paper.
    """

    default: float | bool | str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # of a parameter that is a word; the first is the default
    usual: float | None = None

    @property
    def compared(self) -> float | bool | str | None:
        """The value that `--compare` takes if none is given."""
        return self.default if self.usual is None else self.usual


def one_of(*choices: str) -> Parameter:
    """A parameter that is one of several words; the first is the default."""
    return Parameter(choices[0], choices=choices)


@dataclass(frozen=True)
class Values:
    """Parameters resolved for one tensor: those of each model, and those of the whole merge."""

    models: tuple[Mapping[str, Any], ...]
    merge: Mapping[str, Any]
    seed: int = 0
    depth: float | None = None  # of the tensor's layer, from 0 (first) to 1 (last)


@dataclass(frozen=True)
class MergeMethod:
    """A way to merge models.

    `apply` gives the merged values of one tile. `statistics` looks at the whole tensor before, as
    often as it must, and gives a few numbers that `apply` takes as its last argument.
    """

    name: str
    formula: str  # in words, for the table of methods
    apply: Formula
    base: Base  # whether there must be one, may be one, or it is a model like the others
    models: tuple[int, int | None]  # at least and at most; the base counts only if `base` is "no"
    per_model: Mapping[str, Parameter]
    per_merge: Mapping[str, Parameter]
    statistics: Callable[[Tiles, Values], Any]
    whole: bool
    spreads: bool


def merge_method(
    name: str,
    *,
    base: Base = "must",
    models: tuple[int, int | None] = (1, None),
    per_model: Mapping[str, Parameter] | None = None,
    per_merge: Mapping[str, Parameter] | None = None,
    statistics: Callable[[Tiles, Values], Any] = lambda tiles, values: None,
    whole: bool = False,
    pieces: bool = True,
    spreads: bool = False,
    formula: str = "",
) -> Callable[[F], F]:
    """Register a formula as a merge method: merged = apply(tile, values, statistics).

    `base` and `models` say what there must be to merge. The formula is applied to pieces of a
    tile, so that its temporaries stay small, and its result is rounded to the dtype of the
    tensors; `pieces=False` gives it the tile as it is, `whole` the whole tensor. `spreads` says
    that an input element that is not finite makes an element of the result that is not finite,
    so that checking the result is enough. `formula` describes the method; without it, the first
    line of the docstring does.
    """

    def register(function: F) -> F:
        said = formula or (function.__doc__ or "").strip().partition("\n")[0]
        apply = by_pieces(function) if pieces and not whole else function
        method = MergeMethod(
            *(name, said, apply, base, models, per_model or {}, per_merge or {}),
            *(statistics, whole, spreads),
        )
        MERGE_METHODS.add(name, method, function)
        return function

    return register


# Steps after a method --------------------------------------------------------------------------


@dataclass(frozen=True)
class PostStep:
    """What is done to a merged matrix: apply(merged, base, models, parameters)."""

    name: str
    formula: str
    apply: Callable[..., torch.Tensor]
    parameters: Mapping[str, Parameter]


P = TypeVar("P", bound=Callable[..., Any])


def post_step(name: str, **parameters: Parameter) -> Callable[[P], P]:
    """Register a function as a step that recipes name under `post`. It is given whole matrices."""

    def register(function: P) -> P:
        said = (function.__doc__ or "").strip().partition("\n")[0]
        POST_STEPS.add(name, PostStep(name, said, function, parameters), function)
        return function

    return register
