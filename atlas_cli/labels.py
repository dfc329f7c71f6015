"""The header of a task vector: promised before its blocks are written, fulfilled after.

A safetensors file has its header first, so the room for it must be known beforehand.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from atlas_cli import __version__
from atlas_cli.bases import Base
from atlas_cli.checkpoint import header_text
from atlas_cli.differences import Difference
from atlas_cli.errors import MismatchError
from atlas_cli.headers import BlockInfo, Header, to_metadata
from atlas_cli.sources import Source

_LONGEST_NUMBER = -1.234567e-100
_LONGEST_OFFSET = 10**12


def block_order(base: Base) -> list[str]:
    """The blocks as people count them; those that would upset alignment come last."""
    odd = {name: math.prod(tensor.shape) % 8 != 0 for name, tensor in base.blocks.items()}
    return sorted(base.blocks, key=lambda name: (odd[name], natural(name)))


def natural(name: str) -> list[Any]:
    """A key that sorts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def promised(
    name: str, base: Base, finetuned: Source, difference: Difference, scale: float
) -> Header:
    """The header with all that is known beforehand, and hashes that are only as long as theirs."""
    shapes = {name: base.blocks[name].shape for name in block_order(base)}
    return Header(
        name=name,
        base=_unhashed(base.source),
        finetuned={**_unhashed(finetuned), **difference.origin},
        architecture=base.architecture,
        activation=base.activation,
        scope=base.scope,
        scale=scale * difference.scale,
        fingerprint="0" * 64,
        blocks=tuple(BlockInfo(name, shape, "factors", 0, 0, 0) for name, shape in shapes.items()),
        dropped=(*difference.dropped, *base.integers),
        linearised=difference.linearised,
        atlas=__version__,
        base_norm=_LONGEST_NUMBER,
    )


def _unhashed(source: Source) -> dict[str, Any]:
    hashes = {path.name: "0" * 64 for path in source.weights}
    return {"reference": source.reference.text, "commit": source.commit, "sha256": hashes}


def room_for(header: Header, parts: int) -> int:
    """The most bytes that a promised header can take, if blocks have up to `parts` parts."""
    longest = dict.fromkeys(("norm", "base_norm", "error"), _LONGEST_NUMBER)
    blocks = tuple(
        BlockInfo(block.name, block.shape, "factors", **longest, starts=block.shape[:1] * parts)
        for block in header.blocks
    )
    dropped = (*header.dropped, *(block.name for block in blocks))
    worst = dataclasses.replace(header, blocks=blocks, dropped=dropped)
    kinds = [f"#{kind}{number}" for number in range(parts) for kind in ("up", "down")]
    place = [_LONGEST_OFFSET, _LONGEST_OFFSET]
    entries = {
        block.name + kind: {"dtype": "BF16", "shape": block.shape, "data_offsets": place}
        for block in blocks
        for kind in ("", "#scale", *kinds)
    }
    return len(header_text(entries, to_metadata(worst)))


def fulfilled(
    header: Header, infos: Sequence[BlockInfo], base: Base, difference: Difference
) -> Header:
    """The header with the numbers of the blocks; raises MismatchError if there is no vector."""
    finetuned = header.finetuned["reference"]
    kept = sorted((info for info in infos if info.norm), key=lambda info: natural(info.name))
    if not kept:
        raise MismatchError(f"{finetuned}: is identical to {base.name} in scope {header.scope}")
    found = base.hashes.fingerprint()
    if difference.fingerprint not in (None, found):
        raise MismatchError(f"{finetuned}: is a task vector of another base model than {base.name}")
    unchanged = [info.name for info in infos if not info.norm]
    return dataclasses.replace(
        header,
        fingerprint=found,
        blocks=tuple(_in_short(info) for info in kept),
        dropped=tuple(sorted({*header.dropped, *unchanged}, key=natural)),
        base_norm=_rounded(math.hypot(*(info.base_norm for info in infos))),
    )


def _in_short(info: BlockInfo) -> BlockInfo:
    norm, base_norm, error = map(_rounded, (info.norm, info.base_norm, info.error))
    return dataclasses.replace(info, norm=norm, base_norm=base_norm, error=error)


def _rounded(number: float) -> float:
    """Seven digits: more are noise, and would take more room than was left."""
    return float(f"{number:.6e}")
