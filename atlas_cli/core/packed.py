"""Blocks of two, three or four bits per value, and sums over several of them in tiles.

Values are taken in groups of 64, in the order of the flat block; each group has a lowest value and
a step between codes. The codes of a group lie in planes of 4, 2 or 1 bits: byte j of a plane of w
bits holds the values j, j + 8 w, j + 16 w and so on of its group, so that a shift of whole bytes
unpacks neighbours. A plane of one bit tops up the plane of two where there are three bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from atlas_cli.native import kernels

GROUP = 64
FEW = {"int4": 4, "int3": 3, "int2": 2}
_PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
# Of the range of a group. Outliers cost the rest their steps, so narrower ranges are tried, too.
_RANGES = (1.0, 0.9, 0.8, 0.7, 0.6)
_TILE = 1 << 20  # codes, of all vectors together, unpacked at a time
_CHUNK = 1 << 14  # groups that are encoded at a time
Range = tuple[int, int]


@dataclass(frozen=True)
class Packed:
    """tau = lows + steps * codes, by group.

    Shapes: codes (groups, 8 * bits), in bytes; lows and steps (groups,).
    """

    shape: tuple[int, ...]
    codes: torch.Tensor
    lows: torch.Tensor
    steps: torch.Tensor

    @property
    def bits(self) -> int:
        """How many bits a code has."""
        return self.codes.shape[1] // 8

    def to(self, device: torch.device) -> Packed:
        """The same block on a device."""
        codes, lows, steps = (t.to(device) for t in (self.codes, self.lows, self.steps))
        return replace(self, codes=codes, lows=lows, steps=steps)


@dataclass(frozen=True)
class Residual:
    """tau = shared + own: what all vectors of a pool have in common, and what one has besides.

    `key` tells apart what is shared by different pools.
    """

    shared: Packed
    own: Packed
    key: str


# One block ------------------------------------------------------------------------------------


def groups_of(shape: Sequence[int]) -> int:
    """How many groups a block of that shape has; the last may be filled up."""
    return -(-math.prod(shape) // GROUP)


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """What a block takes: its codes, and two numbers of 16 bits for every group."""
    return groups_of(shape) * (8 * bits + 4)


def pack(values: torch.Tensor, bits: int) -> Packed:
    """round((tau - low) / step) by group, in the range with the least squared error."""
    count, flat = groups_of(values.shape), values.float().flatten()
    filled = torch.cat([flat, flat[-1:].expand(count * GROUP - len(flat))]).view(count, GROUP)
    parts = [_pack_groups(some, bits) for some in filled.split(_CHUNK)]
    codes, lows, steps = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Packed(tuple(values.shape), codes, lows, steps)


def _pack_groups(
    groups: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = groups.amin(1), groups.amax(1)
    centre, half = (low + high) / 2, (high - low) / 2
    best = torch.full_like(low, math.inf)
    codes = torch.zeros(groups.shape, dtype=torch.uint8)
    lows, steps = low.bfloat16(), torch.zeros_like(low).bfloat16()
    for share in _RANGES:
        # Codes are chosen for the numbers that are kept: their rounding costs nothing more.
        start = (centre - share * half).bfloat16()
        step = (2 * share * half / (2**bits - 1)).bfloat16()
        divisor = torch.where(step > 0, step.float(), torch.ones_like(low))
        found = ((groups - start.float()[:, None]) / divisor[:, None]).round_()
        found.clamp_(0, 2**bits - 1)
        restored = found * step.float()[:, None] + start.float()[:, None]
        error = (groups - restored).square_().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        codes[better] = found[better].to(torch.uint8)
        lows, steps = torch.where(better, start, lows), torch.where(better, step, steps)
    return _to_planes(codes, bits), lows, steps


def _to_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    planes, rest = [], codes
    for width in _PLANES[bits]:
        parts = (rest & (2**width - 1)).view(len(codes), 8 // width, -1)
        plane = torch.zeros_like(parts[:, 0])
        for number in range(8 // width):
            plane |= parts[:, number] << (width * number)
        planes.append(plane)
        rest = rest >> width
    return torch.cat(planes, dim=1)


def unpack(block: Packed, groups: slice, out: torch.Tensor) -> torch.Tensor:
    """The codes of some groups, (groups, 64), as 8-bit integers; they are written to `out`."""
    first = 0
    for width in _PLANES[block.bits]:
        plane = block.codes[groups, first : first + 8 * width]
        parts = out.view(len(out), 8 // width, -1)
        for number in range(8 // width):
            some = (plane >> (width * number)) & (2**width - 1)
            if first:  # the upper bits: those of the planes before are there already
                parts[:, number] |= some << (first // 8)
            else:
                parts[:, number] = some
        first += 8 * width
    return out


def values_of(block: Packed, groups: slice) -> torch.Tensor:
    """The values of some groups in float32, (groups, 64)."""
    lows, steps = block.lows[groups].float(), block.steps[groups].float()
    out = torch.empty(len(lows), GROUP, dtype=torch.uint8, device=lows.device)
    return torch.addcmul(lows[:, None], steps[:, None], unpack(block, groups, out).float())


def unpacked(block: Packed) -> torch.Tensor:
    """All values of a block in float32."""
    whole = values_of(block, slice(None)).flatten()
    return whole[: math.prod(block.shape)].reshape(block.shape)


# Several vectors ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedStack:
    """The packed blocks of one name, one for each vector."""

    members: tuple[int, ...]
    blocks: tuple[Packed, ...]


@dataclass(frozen=True)
class SharedStack:
    """What several vectors have in common: T_i = block for each of them."""

    members: tuple[int, ...]
    block: Packed

    @property
    def once(self) -> PackedStack:
        """The block as that of a single vector."""
        return PackedStack((0,), (self.block,))


def add(
    total: torch.Tensor, stack: PackedStack, span: Range, weights: torch.Tensor, onto: torch.Tensor
) -> None:
    """total[span] = onto[span] + weights @ T[:, span], a tile of codes at a time."""
    for start, stop, codes, tables in _code_tiles(stack, span, total):
        lows, steps = tables
        source, place = onto[start:stop].float().contiguous(), total[start:stop]
        kernels.add_vectors(list(codes.flatten(1)), (steps * weights).contiguous(), source, place)
        place.view(-1, GROUP).add_((lows @ weights)[:, None])
    for start, stop, tile in _rest(stack, span, total):
        there = tile.to(total.device).T
        torch.addmv(onto[start:stop].float(), there, weights, out=total[start:stop])


def dot(gradient: torch.Tensor, stack: PackedStack, span: Range) -> torch.Tensor:
    """T[:, span] @ gradient[span], one number per vector, summed in float64 on the CPU."""
    wide = torch.float64 if kernels.has_float64(gradient.device) else torch.float32
    found = torch.zeros(len(stack.members), dtype=wide, device=gradient.device)
    for start, stop, codes, (lows, steps) in _code_tiles(stack, span, gradient):
        part = gradient[start:stop]
        found += kernels.dot_vectors(list(codes.flatten(1)), steps, part)
        found += part.view(-1, GROUP).sum(1, dtype=wide) @ lows.to(wide)
    for start, stop, tile in _rest(stack, span, gradient):
        found += (tile.to(gradient.device) @ gradient[start:stop]).to(wide)
    return found


def tiles(stack: PackedStack, span: Range) -> Iterator[tuple[int, int, torch.Tensor]]:
    """A range of T in float32, in pieces: start, stop, (k, stop - start)."""
    step = max(1, _TILE // GROUP // len(stack.blocks))
    for first in range(span[0] // GROUP, -(-span[1] // GROUP), step):
        groups = slice(first, min(first + step, -(-span[1] // GROUP)))
        tile = torch.stack([values_of(block, groups).flatten() for block in stack.blocks])
        start, stop = max(span[0], first * GROUP), min(span[1], groups.stop * GROUP)
        yield start, stop, tile[:, start - first * GROUP : stop - first * GROUP]


def _whole(span: Range, like: torch.Tensor) -> Range:
    """The whole groups of a range that the loops take as codes; none on other devices."""
    first, last = -(-span[0] // GROUP), span[1] // GROUP
    usable = like.is_cpu and kernels.ready([torch.empty(1, dtype=torch.int8)])
    return (first, last) if usable and first < last else (first, first)


def _code_tiles(
    stack: PackedStack, span: Range, like: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """Whole groups as 8-bit codes (k, groups, 64), with lows and steps, both (groups, k)."""
    first, last = _whole(span, like)
    step = max(1, _TILE // GROUP // len(stack.blocks))
    room = torch.empty(len(stack.blocks), min(step, last - first), GROUP, dtype=torch.int8)
    for start in range(first, last, step):
        groups = slice(start, min(start + step, last))
        codes = room[:, : groups.stop - start]
        codes = codes if codes.is_contiguous() else torch.empty_like(codes)
        for block, out in zip(stack.blocks, codes.view(torch.uint8), strict=True):
            unpack(block, groups, out)
        lows = torch.stack([block.lows[groups].float() for block in stack.blocks], dim=1)
        steps = torch.stack([block.steps[groups].float() for block in stack.blocks], dim=1)
        yield start * GROUP, groups.stop * GROUP, codes, (lows, steps)


def _rest(
    stack: PackedStack, span: Range, like: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """What of a range is in no whole group that the loops take, in float32."""
    first, last = (group * GROUP for group in _whole(span, like))
    if first == last:
        yield from tiles(stack, span)
        return
    for start, stop in ((span[0], first), (last, span[1])):
        if start < stop:
            yield from tiles(stack, (start, stop))
