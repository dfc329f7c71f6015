"""How the values of one block are kept: dense, as 8-bit integers, or as low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dense:
    """Every value as a floating-point number."""

    values: torch.Tensor


@dataclass(frozen=True)
class Quantised:
    """tau = scales[:, None] * values, with values in [-127, 127] and one scale per row.

    A row is an index of the first dimension; a vector or a scalar is one row.
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Part:
    """up @ down in the rows from `start` on. Shapes: up (rows, rank), down (rank, columns)."""

    start: int
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Factors:
    """A sum of low-rank parts, each in its own range of rows; zero elsewhere.

    `shape` is the block's; beyond the first dimension it is flattened into columns.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Block = Dense | Quantised | Factors


def decode(block: Block) -> torch.Tensor:
    """The values of a block in float32."""
    match block:
        case Dense(values):
            return values.float()
        case Quantised(values, scales):
            rows = values.reshape(len(scales), -1).float() * scales[:, None]
            return rows.reshape(values.shape)
        case Factors(shape, parts):
            whole = torch.zeros(shape[0], math.prod(shape[1:]))
            for part in parts:
                rows = slice(part.start, part.start + len(part.up))
                whole[rows] += part.up.float() @ part.down.float()
            return whole.reshape(shape)


def quantise(values: torch.Tensor) -> Quantised:
    """round(tau / scale) with scale = max |row| / 127, per row, in float32."""
    rows = values.float().reshape(values.shape[0] if values.dim() > 1 else 1, -1)
    scales = rows.abs().amax(dim=1) / 127
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (rows / divisor[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Quantised(codes.reshape(values.shape), scales)


def factorise(
    values: torch.Tensor, *, rank: int | None = None, energy: float | None = None
) -> Factors | Dense:
    """The best approximation of a matrix by `rank` terms, or by as many as hold `energy`.

    Energy is the share of the squared singular values. A block that is no matrix, or whose
    factors would be no smaller than itself, stays dense.
    """
    if values.dim() < 2 or min(values.shape) <= 1:
        return Dense(values.float())
    matrix = values.float().reshape(values.shape[0], -1)
    left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    if energy is not None:
        share = (singular**2).cumsum(0) / (singular**2).sum()
        rank = int((share < energy - 1e-12).sum()) + 1
    rank = min(rank or 1, len(singular))
    if rank * sum(matrix.shape) >= matrix.numel():
        return Dense(values.float())
    root = singular[:rank].sqrt()
    up, down = (left[:, :rank] * root).float(), (root[:, None] * right[:rank]).float()
    return Factors(tuple(values.shape), (Part(0, up.contiguous(), down.contiguous()),))


def relative_error(exact: torch.Tensor, block: Block) -> float:
    """|tau - stored| / |tau| in the Frobenius norm, computed in float64."""
    wanted = exact.double()
    norm = wanted.norm().item()
    return (wanted - decode(block).double()).norm().item() / norm if norm else 0.0


def bytes_of(block: Block) -> int:
    """How many bytes the block takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(block))


def tensors_of(block: Block) -> Sequence[torch.Tensor]:
    """The tensors a block consists of."""
    match block:
        case Dense(values):
            return [values]
        case Quantised(values, scales):
            return [values, scales]
        case Factors(_, parts):
            return [tensor for part in parts for tensor in (part.up, part.down)]
