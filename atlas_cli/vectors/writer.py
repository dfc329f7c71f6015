"""Writing a task-vector file block by block, with a header that is known last."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from atlas_cli.core import storage
from atlas_cli.core.packed import Packed, Residual
from atlas_cli.core.storage import Block, Dense, Factors, Form, Quantised
from atlas_cli.errors import AtlasError
from atlas_cli.io.checkpoint import header_text
from atlas_cli.vectors.format import BlockInfo, Header, to_metadata

LONGEST_NUMBER = -1.234567e-100
_LONGEST_OFFSET = 10**12
TRIMMED = "trimmed"  # the folder of vectors that were made for a run


def room_for(header: Header, parts: int) -> int:
    """The most bytes that a promised header can take, if blocks have up to `parts` parts."""
    longest = dict.fromkeys(("norm", "base_norm", "error"), LONGEST_NUMBER)
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
        for kind in ("", "#scale", "#low", "#step", *kinds)
    }
    return len(header_text(entries, to_metadata(worst)))


def shortened(info: BlockInfo) -> BlockInfo:
    """A block with numbers of seven digits."""
    norm, base_norm, error = map(rounded, (info.norm, info.base_norm, info.error))
    return dataclasses.replace(info, norm=norm, base_norm=base_norm, error=error)


def rounded(number: float) -> float:
    """Seven digits: more are noise, and would take more room than was left."""
    return float(f"{number:.6e}")


def stored(exact: Block, values: torch.Tensor, form: Form, name: str) -> tuple[Block, float]:
    """A block, whose values are decoded already, in the form that is kept, and the error of that.

    Raises AtlasError if a value is too large for the form.
    """
    block = storage.encode(exact, form, name)
    error = storage.relative_error(values, block)
    check_fits(error, name, form.dtype)
    return block, error


def check_fits(measure: float, name: str, dtype: str) -> None:
    """Raise AtlasError unless a measure of what is kept, which overflow spoils, is finite."""
    if not math.isfinite(measure):
        raise AtlasError(f"{name}: changes too much for {dtype}; use --dtype bf16 or fp32")


def stored_tensors(name: str, block: Block) -> dict[str, torch.Tensor]:
    """The tensors of a block under the names they have in the file."""
    match block:
        case Dense(values):
            return {name: values}
        case Quantised(values, scales):
            return {name: values, f"{name}#scale": scales}
        case Packed(_, codes, lows, steps) | Residual(_, Packed(_, codes, lows, steps), _):
            return {name: codes, f"{name}#low": lows, f"{name}#step": steps}
        case Factors(_, parts):
            return {
                f"{name}#{kind}{number}": tensor
                for number, part in enumerate(parts)
                for kind, tensor in (("up", part.up), ("down", part.down))
            }


@contextmanager
def made_vectors(folder: Path) -> Iterator[Path]:
    """Where vectors that are made for a run go. If the run fails, what was made is removed."""
    target = folder / TRIMMED
    made = [path for path in (target, folder) if not path.exists()]
    try:
        yield target
    except AtlasError:
        for path in made:
            if path == target:
                shutil.rmtree(target, ignore_errors=True)
            elif path.exists() and not any(path.iterdir()):
                path.rmdir()
        raise
