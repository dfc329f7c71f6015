"""Where a block sits in a model: its layer and its kind, read from its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerPosition:
    """`layer` is empty outside the layers; `kind` is what blocks of several layers share."""

    layer: str
    kind: str


def places(names: Iterable[str]) -> dict[str, LayerPosition]:
    """The place of each block, in the order of the names.

    visual.transformer.resblocks.3.attn.in_proj_weight is attn.in_proj_weight of layer 3. Where
    both towers are there, kinds of the text tower start with "text.".
    """
    listed = list(names)
    both = len({name.startswith("visual.") for name in listed}) == 2
    return {name: _place(name, both) for name in listed}


def _place(name: str, both: bool) -> LayerPosition:
    tower = "text." if both and not name.startswith("visual.") else ""
    parts = name.removeprefix("visual.").removeprefix("text.").split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if number is None or number == len(parts) - 1:
        return LayerPosition("", tower + ".".join(parts))
    layer = ".".join(parts[: number + 1]).removeprefix("transformer.resblocks.")
    return LayerPosition(layer, tower + ".".join(parts[number + 1 :]))
