"""LoRA adapters -> one adapter: sum_t w_t s_t B_t A_t as one pair of factors for every module.

The factors of all adapters side by side are exact. With a limit on the rank, the best pair of
that rank takes their place, and what it leaves out is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import open_tensors
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.provenance import Located
from atlas_cli.models.adapters import Parts, lora_settings, parts_of
from atlas_cli.models.lora import pairs_of, read_settings
from atlas_cli.recipes.merge import Merge
from atlas_cli.recipes.merge_parameters import depths_of, resolve
from atlas_cli.recipes.merge_parts import Levels
from atlas_cli.sources.locate import Source

CONFIG = "adapter_config.json"
_METHOD = "linear"
_FROZEN = ".base_layer."  # in the name of a tensor that has factors
_SAME = ("fan_in_fan_out", "task_type", "modules_to_save")  # settings that adapters must share


@dataclass(frozen=True)
class Term:
    """What one adapter adds to a module: scale * B A."""

    up: LazyTensor
    down: LazyTensor
    scale: float


@dataclass(frozen=True)
class Module:
    """A module of the merged adapter: the sum of terms, exact or of a limited rank.

    Values are float32. Both factors are computed once, when one of them is asked for.
    """

    terms: tuple[Term, ...]
    most: int | None

    @property
    def rank(self) -> int:
        """The rank of the pair of factors."""
        whole = sum(term.down.shape[0] for term in self.terms)
        return whole if self.most is None else min(self.most, whole, *self._size)

    @property
    def _size(self) -> tuple[int, int]:
        first = self.terms[0]
        return first.up.shape[0], math.prod(first.down.shape[1:])

    @cached_property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """B, A, and the squares of what they hold and of what they leave out."""
        ups = [term.up.read().float().flatten(1) * term.scale for term in self.terms]
        downs = [term.down.read().float().flatten(1) for term in self.terms]
        up, down = torch.cat(ups, 1), torch.cat(downs)
        if self.rank == up.shape[1]:
            return up, down, 0.0, 0.0
        left, inner = torch.linalg.qr(up.double())
        right, outer = torch.linalg.qr(down.double().T)
        u, sizes, v = torch.linalg.svd(inner @ outer.T)
        root, kept = sizes[: self.rank].sqrt(), self.rank
        squares = sizes.square()
        return (
            (left @ u[:, :kept] * root).float(),
            (root[:, None] * v[:kept] @ right.T).float(),
            float(squares[:kept].sum()),
            float(squares[kept:].sum()),
        )

    def up(self) -> torch.Tensor:
        """B, in its shape."""
        return self._factors[0].reshape(self.shape("B"))

    def down(self) -> torch.Tensor:
        """A, in its shape."""
        return self._factors[1].reshape(self.shape("A"))

    def shape(self, letter: str) -> tuple[int, ...]:
        """The shape of a factor: that of the first adapter, but for the rank."""
        one = self.terms[0].up if letter == "B" else self.terms[0].down
        rest = one.shape
        return (rest[0], self.rank, *rest[2:]) if letter == "B" else (self.rank, *rest[1:])

    def squares(self) -> tuple[float, float]:
        """The squares of what the factors hold and of what they leave out."""
        return self._factors[2], self._factors[3]


@dataclass(frozen=True)
class MergedAdapter:
    """All tensors of the merged adapter, and its configuration."""

    tensors: LazyTensors
    config: Mapping[str, Any]
    modules: Mapping[str, Module] = field(default_factory=dict)

    def error(self) -> float | None:
        """|what a limited rank leaves out| / |the exact sum|; None if all is exact."""
        cut = [module for module in self.modules.values() if module.most is not None]
        if not cut or all(module.squares() == (0.0, 0.0) for module in cut):
            return None
        kept, lost = (math.fsum(column) for column in zip(*(m.squares() for m in cut), strict=True))
        return math.sqrt(lost / ((kept + lost) or 1.0))


def are_adapters(merge: Merge, located: Mapping[str, Located]) -> bool:
    """Whether all that is merged are adapters by themselves."""
    sources = [located[who] for who in merge.references]
    return all(
        one.adapter is None and one.model.weights[0].name.startswith("adapter_model.")
        for one in sources
    )


def merge_adapters(merge: Merge, located: Mapping[str, Located]) -> MergedAdapter:
    """The sum of adapters by the recipe's weights. Raises UsageError for any other method."""
    if merge.method != _METHOD or len(merge.parts) != 1 or merge.parts[0].ranges is not None:
        raise UsageError(
            f"adapters are merged into one adapter by {_METHOD} over `models`; for {merge.method} "
            "write MODEL+ADAPTER for each, which gives whole weights"
        )
    sources = {who: located[who].model for who, _ in merge.parts[0].models}
    opened = {who: parts_of(open_tensors(source.weights)) for who, source in sources.items()}
    shared = _shared_settings(sources)
    weights = _weights(merge, opened)
    modules = _modules(merge, sources, opened, weights)
    whole = _whole_tensors(opened, weights)
    tensors: dict[str, LazyTensor] = {}
    for module, made in modules.items():
        for letter, read in (("A", made.down), ("B", made.up)):
            name = _name(module, letter, opened)
            tensors[name] = LazyTensor(made.shape(letter), torch.float32, read)
    tensors |= whole
    config = {**shared, **lora_settings({name: one.rank for name, one in modules.items()})}
    return MergedAdapter(dict(sorted(tensors.items())), config, modules)


# Adapters against each other ------------------------------------------------------------------


def _shared_settings(sources: Mapping[str, Source]) -> dict[str, Any]:
    """What all adapters say of themselves. Raises MismatchError where they disagree."""
    configs = {who: source.config(CONFIG) or {} for who, source in sources.items()}
    first, *others = configs
    for other in others:
        for key in ("base_model_name_or_path", *_SAME):
            one, two = configs[first].get(key) or None, configs[other].get(key) or None
            if one != two:
                raise MismatchError(
                    f"{first} and {other} differ in {key} of {CONFIG}: {one!r} and {two!r}; "
                    "adapters that are merged into one have to agree in it"
                )
    kept = ("base_model_name_or_path", *_SAME, "revision")
    return {key: configs[first].get(key) for key in kept}


Weights = Mapping[str, Mapping[str, float]]  # by module, then by adapter


def _weights(merge: Merge, opened: Mapping[str, Parts]) -> Weights:
    """w_t / sum_t w_t of every module; without the divisor if not `normalize`."""
    part = merge.parts[0]
    names = {name for one in opened.values() for name in (*one.whole, *_modules_of(one))}
    depths = depths_of([f"{name}." for name in names])
    found: dict[str, dict[str, float]] = {}
    for name in names:
        depth = depths[f"{name}."]

        def value(levels: Levels, key: str, name: str = name, depth: float | None = depth) -> Any:
            return resolve(levels, key, name, depth)

        own = {who: value(levels, "weight") for who, levels in part.models}
        for who, weight in own.items():
            if weight is None:
                raise UsageError(
                    f"{name}: no filter gives it a weight of {who}; add an entry without one"
                )
        normalize = value(part.levels, "normalize")
        total = sum(own.values()) if normalize is None or normalize else 1.0
        if total == 0:
            raise UsageError(f"{name}: the weights add up to 0; set normalize: false")
        found[name] = {who: weight / total for who, weight in own.items()}
    return found


def _modules_of(parts: Parts) -> set[str]:
    return set(pairs_of(parts.factors, ""))


def _modules(
    merge: Merge, sources: Mapping[str, Source], opened: Mapping[str, Parts], weights: Weights
) -> dict[str, Module]:
    found: dict[str, list[Term]] = {}
    for who, parts in opened.items():
        if parts.magnitudes:
            raise CheckpointError(
                f"{who}: has DoRA, and a sum of such adapters is none; write MODEL+{who} to merge "
                "whole weights"
            )
        settings = read_settings(sources[who], ("modules_to_save",))
        for module, factors in pairs_of(parts.factors, who).items():
            scale = settings.scale_of(module, factors["A"].shape[0]) * weights[module][who]
            found.setdefault(module, []).append(Term(factors["B"], factors["A"], scale))
    for module, terms in found.items():
        kinds = {(term.up.shape[:1], term.down.shape[1:]) for term in terms}
        if len(kinds) > 1:
            raise MismatchError(f"the adapters differ in the shape of {module}")
    most = merge.recipe.max_rank
    return {name: Module(tuple(terms), most) for name, terms in sorted(found.items())}


def _whole_tensors(opened: Mapping[str, Parts], weights: Weights) -> dict[str, LazyTensor]:
    """sum_t w_t W_t of the tensors that adapters hold whole: all have them, and w adds up to 1.

    Tensors of the base that were saved beside their factors stay as they are.
    """
    found = {}
    for name, raw in _whole_names(opened).items():
        having = {who: parts.whole[name] for who, parts in opened.items() if name in parts.whole}
        if _FROZEN in raw:
            found[raw] = _equal(name, having)
            continue
        lacking = [who for who in opened if who not in having]
        if lacking or not math.isclose(sum(weights[name].values()), 1.0, rel_tol=1e-9):
            why = f"{lacking[0]} lacks it" if lacking else "the weights do not add up to 1"
            raise MismatchError(
                f"{name} is saved whole, and {why}; write MODEL+ADAPTER to merge whole weights"
            )
        found[raw] = _mean([(tensor, weights[name][who]) for who, tensor in having.items()])
    return found


def _whole_names(opened: Mapping[str, Parts]) -> dict[str, str]:
    """The names in files of all tensors that adapters hold whole, by those of the model."""
    return {name: raw for parts in opened.values() for name, raw in parts.names.items()}


def _equal(name: str, having: Mapping[str, LazyTensor]) -> LazyTensor:
    """A tensor of the base that adapters have saved beside its factors: it must be the same."""
    first, *others = having.values()
    for who, other in zip([*having][1:], others, strict=True):
        if first.shape != other.shape or not torch.equal(first.read(), other.read()):
            raise MismatchError(f"{who}: its {name} is that of another base model")
    return first


def _mean(terms: Sequence[tuple[LazyTensor, float]]) -> LazyTensor:
    shapes = {tensor.shape for tensor, _ in terms}
    if len(shapes) > 1:
        raise MismatchError(f"the adapters hold whole tensors of several shapes: {sorted(shapes)}")

    def read() -> torch.Tensor:
        return torch.stack([tensor.read().float() * weight for tensor, weight in terms]).sum(0)

    return LazyTensor(terms[0][0].shape, torch.float32, read)


def _name(module: str, letter: str, opened: Mapping[str, Parts]) -> str:
    """The name of a factor, as PEFT writes it."""
    embedded = f"{module}.lora_embedding_{letter}"
    found = any(name.endswith(embedded) for parts in opened.values() for name in parts.factors)
    own = embedded if found else f"{module}.lora_{letter}.weight"
    return f"base_model.model.{own}"
