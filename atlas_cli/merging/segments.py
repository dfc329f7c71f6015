"""Parts of a recipe -> tensors of the result, each with the tensors that it is merged from.

A result may be stacked from layers of several models. Here every model of a part gets the names
that its tensors have in the result, so that whoever computes values need not know of layers. Every
tensor gets its parameters, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from atlas_cli.core.patterns import find_pattern
from atlas_cli.errors import AtlasError, MismatchError, UsageError
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models.language import (
    LayerName,
    Restacked,
    is_before_layers,
    layer_of,
    module_of,
    stacks_of,
    with_layers,
)
from atlas_cli.recipes.merge import Merge
from atlas_cli.recipes.merge_parameters import depths_of, resolve
from atlas_cli.recipes.merge_parts import Levels, Part, Range
from atlas_cli.registry import MERGE_METHODS


@dataclass(frozen=True)
class Model:
    """An opened model by the name that the user gave it. `names` are its own, where they differ."""

    reference: str
    tensors: LazyTensors
    names: Mapping[str, str] = field(default_factory=dict)

    def own_name(self, name: str) -> str:
        """What the model calls a tensor of the result."""
        return self.names.get(name, name)


@dataclass(frozen=True)
class Segment:
    """Tensors of the result that are merged from the same models by the same method.

    `layout` has the names, shapes and order of them. `depths` tell where each is in the layers of
    its slice: 0 first, 1 last, None outside of any.
    """

    part: Part
    layout: Model
    base: Model | None
    models: tuple[Model, ...]
    depths: Mapping[str, float | None]
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of the result, by stack

    @property
    def inputs(self) -> tuple[Model, ...]:
        """Whatever is read: the base first, if there is one."""
        return (self.base, *self.models) if self.base else self.models

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Where layers of the result come from that is put together of slices."""
        spans = (self.part.ranges or {}).items()
        return [
            {
                "stack": stack,
                "layers": [layers[0], layers[-1] + 1],
                "method": self.part.method,
                "sources": [{"model": who, "layer_range": list(span)} for who, span in spans],
            }
            for stack, layers in self.layers.items()
        ]


def segments_of(merge: Merge, opened: Mapping[str, LazyTensors]) -> list[Segment]:
    """The tensors of the result, in their order, part by part."""
    if merge.parts[0].module is None:
        return _stacked(merge, merge.parts, opened, lambda name: True)
    found: list[Segment] = []
    known = dict.fromkeys(str(part.module) for part in merge.parts)
    for module, parts in groupby(merge.parts, key=lambda part: part.module):
        listed = list(parts)

        def mine(name: str, module: str | None = module) -> bool:
            return module_of(name, known) == module

        if not any(mine(name) for name in opened[listed[0].references[0]]):
            stacks = ", ".join(stacks_of(opened[merge.layout])) or "none"
            raise UsageError(
                f"modules.{module}: no tensor of {listed[0].references[0]} belongs to it; "
                f"a module may also be the beginning of names (stacks of layers: {stacks})"
            )
        found += _stacked(merge, listed, opened, mine)
    return found


def left_out(merge: Merge, opened: Mapping[str, LazyTensors]) -> dict[str, LazyTensor]:
    """Tensors of the layout's model that no module of the recipe has: they are copied."""
    if merge.parts[0].module is None:
        return {}
    known = [str(part.module) for part in merge.parts]
    tensors = opened[merge.layout]
    return {name: t for name, t in tensors.items() if module_of(name, known) not in known}


def _stacked(
    merge: Merge,
    parts: Sequence[Part],
    opened: Mapping[str, LazyTensors],
    mine: Callable[[str], bool],
) -> list[Segment]:
    chosen = {
        who: {name: t for name, t in opened[who].items() if mine(name)}
        for part in parts
        for who in part.references
    }
    if parts[0].ranges is None:
        return [_whole(parts[0], chosen, merge.layout)]
    stack = _stack_of(parts[0], chosen[parts[0].references[0]])
    found, done = [], 0
    for part in parts:
        assert part.ranges is not None
        length = _check_ranges(part, part.ranges, chosen, stack)
        places = (part is parts[0], part is parts[-1])
        found.append(_slice(part, chosen, stack, range(done, done + length), places))
        done += length
    return found


def _whole(part: Part, chosen: Mapping[str, LazyTensors], wanted: str) -> Segment:
    models = {who: Model(who, chosen[who]) for who in part.references}
    layout = models.get(wanted) or models[part.references[0]]
    return Segment(part, layout, *_roles(part, models), depths_of(layout.tensors))


def _roles(part: Part, models: Mapping[str, Model]) -> tuple[Model | None, tuple[Model, ...]]:
    return models[part.base] if part.base else None, tuple(models[who] for who, _ in part.models)


# Slices ---------------------------------------------------------------------------------------


def _stack_of(part: Part, tensors: LazyTensors) -> str:
    """The stack of layers that slices are of."""
    stacks = stacks_of(tensors)
    large = [stack for stack, count in stacks.items() if count > 1] or [*stacks]
    if len(large) != 1:
        who, kind = part.references[0], f"{len(large)} stacks of layers" if large else "no layers"
        names = f" ({', '.join(large)})" if large else ""
        way = "; give slices for each under modules" if large else ""
        raise UsageError(f"{part.place}: {who} has {kind}{names}{way}")
    return large[0]


def _check_ranges(
    part: Part, ranges: Mapping[str, Range], chosen: Mapping[str, LazyTensors], stack: str
) -> int:
    """The number of layers of a slice. Raises UsageError for layers that a model does not have."""
    for who, (_, end) in ranges.items():
        if end > (count := stacks_of(chosen[who]).get(stack, 0)):
            raise UsageError(
                f"{part.place}: layer_range ends at {end}, but {who} has {count} layers"
            )
    first, end = ranges[part.references[0]]
    return end - first


def _slice(
    part: Part,
    chosen: Mapping[str, LazyTensors],
    stack: str,
    layers: range,
    places: tuple[bool, bool],
) -> Segment:
    """Layers of the result; the first slice also gives what is before them, the last the rest."""
    names = {
        who: dict(_renamed(chosen[who], stack, (part.ranges or {})[who][0], layers, places))
        for who in part.references
    }
    models = {
        who: Model(who, {new: chosen[who][old] for new, old in own.items()}, own)
        for who, own in names.items()
    }
    layout = models[part.references[0]]
    depths = {name: _depth(layer_of(name), stack, layers) for name in layout.tensors}
    return Segment(part, layout, *_roles(part, models), depths, {stack: [*layers]})


def _renamed(
    tensors: LazyTensors, stack: str, first: int, layers: range, places: tuple[bool, bool]
) -> Iterator[tuple[str, str]]:
    """The names that tensors have in the result, in its order, and their own."""
    inside: dict[int, list[LayerName]] = {}
    outside: list[str] = []
    for name in tensors:
        at = layer_of(name)
        if at is None or at.stack != stack:
            outside.append(name)
        else:
            inside.setdefault(at.layer, []).append(at)
    before, behind = places
    yield from ((name, name) for name in outside if before and is_before_layers(name))
    for offset, layer in enumerate(layers):
        for at in inside.get(first + offset, ()):
            yield f"{stack}.{layer}.{at.rest}", f"{stack}.{at.layer}.{at.rest}"
    yield from ((name, name) for name in outside if behind and not is_before_layers(name))


def _depth(at: LayerName | None, stack: str, layers: range) -> float | None:
    if at is None or at.stack != stack:
        return None
    return (at.layer - layers.start) / (len(layers) - 1) if len(layers) > 1 else 1.0


# What is told of them -------------------------------------------------------------------------


def restacked(
    segments: Sequence[Segment], tensors: LazyTensors, configs: Mapping[str, Mapping[str, Any]]
) -> list[Restacked]:
    """What a configuration must know of stacks that are put together of slices.

    `tensors` are those of the model that the configuration is of.
    """
    layers: dict[str, list[tuple[Mapping[str, Any], int]]] = {}
    for segment in segments:
        for stack, numbers in segment.layers.items():
            who = segment.layout.reference
            first = (segment.part.ranges or {})[who][0]
            taken = [(configs.get(who) or {}, first + offset) for offset in range(len(numbers))]
            layers.setdefault(stack, []).extend(taken)
    counts = stacks_of(tensors)
    return [Restacked(stack, counts.get(stack, 0), taken) for stack, taken in layers.items()]


def changed_config(config: Mapping[str, Any], changes: Sequence[Restacked]) -> dict[str, Any]:
    """A configuration for all stacks that were put together anew."""
    result = dict(config)
    for change in changes:
        result = with_layers(result, change)
    return result


def check_outputs(segments: Sequence[Segment]) -> None:
    """Raise MismatchError if a tensor of the result would be made twice."""
    seen: set[str] = set()
    for segment in segments:
        if twice := seen & segment.layout.tensors.keys():
            raise MismatchError(f"{segment.part.place}: {min(twice)} is made twice")
        seen |= segment.layout.tensors.keys()


def with_tensors(
    segment: Segment, change: Callable[[str, Mapping[str, Model]], Mapping[str, LazyTensor]]
) -> Segment:
    """The segment with some tensors replaced: `change` gives those of a name, by model."""
    inputs = {model.reference: model for model in (segment.layout, *segment.inputs)}
    tensors = {who: dict(model.tensors) for who, model in inputs.items()}
    for name in segment.layout.tensors:
        for who, tensor in change(name, inputs).items():
            tensors[who][name] = tensor
    models = {who: replace(model, tensors=tensors[who]) for who, model in inputs.items()}
    return replace(
        segment,
        layout=models[segment.layout.reference],
        base=models[segment.base.reference] if segment.base else None,
        models=tuple(models[model.reference] for model in segment.models),
    )


# Parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """The parameters of one tensor: those of each model, those of the whole merge, its depth."""

    models: tuple[dict[str, Any], ...]
    merge: dict[str, Any]
    depth: float | None


def resolve_all(segment: Segment, names: Iterable[str]) -> dict[str, Resolved]:
    """What every parameter is for every tensor. Raises AtlasError if one has no value."""
    return {name: _resolve_one(segment, name) for name in names}


def _resolve_one(segment: Segment, name: str) -> Resolved:
    """Filters look for what the model itself calls a tensor, or the result for the whole merge."""
    part, depth = segment.part, segment.depths[name]
    row = MERGE_METHODS[part.method]

    def value(levels: Levels, key: str, default: Any, own: str, whose: str) -> Any:
        found = resolve(levels, key, own, depth)
        if found is None and default is None:
            raise AtlasError(f"{name}: no filter gives it a {key}{whose}; add an entry without one")
        return default if found is None else found

    models = tuple(
        {
            key: value(levels, key, knob.default, model.own_name(name), f" of {who}")
            for key, knob in row.per_model.items()
        }
        for (who, levels), model in zip(part.models, segment.models, strict=True)
    )
    whole = {
        key: value(part.levels, key, knob.default, name, "") for key, knob in row.per_merge.items()
    }
    return Resolved(models, whole, depth)


def check_together(
    method: str, resolved: Mapping[str, Resolved], dtypes: Collection[object]
) -> None:
    """Raise UsageError if tensors that are merged as one vector differ in more than their names."""
    who = f"{method} with scope model"
    first = next(iter(resolved.values()))
    for name, one in resolved.items():
        if (one.models, one.merge) != (first.models, first.merge):
            raise UsageError(f"{who}: give every parameter as one value; {name} has another")
    if len(dtypes) > 1:
        raise UsageError(f"{who}: tensors have several dtypes; give a dtype to compute in")


def explained(
    segments: Iterable[Segment], resolved: Mapping[str, Resolved], pattern: str
) -> list[dict[str, Any]]:
    """The parameters of every tensor whose name the regular expression is found in."""
    return [
        {
            "tensor": name,
            "parameters": resolved[name].merge,
            "models": {
                who: own
                for (who, _), own in zip(segment.part.models, resolved[name].models, strict=True)
            },
        }
        for segment in segments
        for name in segment.layout.tensors
        if name in resolved and find_pattern(pattern, name)
    ]
