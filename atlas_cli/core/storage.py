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
class BlockPart:
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
    parts: tuple[BlockPart, ...]


Block = Dense | Quantised | Factors
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
_ROW = 1024


@dataclass(frozen=True)
class Form:
    """How the user wants blocks kept: a dtype and, for matrices, a rank or a share of energy."""

    dtype: str = "fp32"
    rank: int | None = None
    energy: float | None = None

    @property
    def is_low_rank(self) -> bool:
        """Whether matrices become factors."""
        return self.rank is not None or self.energy is not None


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
                end = part.start + len(part.up)
                whole[part.start : end] += part.up.float() @ part.down.float()
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
    matrix = values.float().reshape(values.shape[0], -1).double()
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    squares, basis = _principal(tall)
    if energy is not None:
        share = squares.cumsum(0) / squares.sum()
        rank = int((share < energy - 1e-12).sum()) + 1
    rank = min(rank or 1, len(squares))
    if rank * sum(matrix.shape) >= matrix.numel():
        return Dense(values.float())
    # Both factors get the root of the singular value, so that neither leaves the range of fp16.
    root = squares[:rank].clamp(min=max(1e-24 * squares[0].item(), 1e-300)) ** 0.25
    up, down = tall @ basis[:, :rank] / root, (basis[:, :rank] * root).T
    up, down = (up, down) if tall is matrix else (down.T, up.T)
    part = BlockPart(0, up.float().contiguous(), down.float().contiguous())
    return Factors(tuple(values.shape), (part,))


def _principal(tall: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared singular values, largest first, and the right singular vectors as columns.

    From the Gram matrix in float64: several times quicker than a full decomposition, and as
    good for the leading terms of float32 values.
    """
    squares, vectors = torch.linalg.eigh(tall.T @ tall)
    return squares.flip(0).clamp(min=0), vectors.flip(1)


def encode(exact: Block, form: Form) -> Block:
    """A block in the form the user chose. Factors stay factors, in the dtype of the form."""
    if isinstance(exact, Factors):
        return _cast(exact, _DTYPES[form.dtype])
    values = decode(exact)
    if form.is_low_rank:
        return _cast(factorise(values, rank=form.rank, energy=form.energy), _DTYPES[form.dtype])
    return quantise(values) if form.dtype == "int8" else Dense(values.to(_DTYPES[form.dtype]))


def _cast(block: Dense | Factors, dtype: torch.dtype) -> Dense | Factors:
    if isinstance(block, Dense):
        return Dense(block.values.to(dtype))
    parts = (BlockPart(part.start, part.up.to(dtype), part.down.to(dtype)) for part in block.parts)
    return Factors(block.shape, tuple(parts))


def scaled(block: Block, scale: float) -> Block:
    """scale * block, computed in float32. Only one factor of a low-rank part is scaled."""
    if scale == 1.0:
        return block
    if isinstance(block, Factors):
        parts = (BlockPart(part.start, part.up.float() * scale, part.down) for part in block.parts)
        return Factors(block.shape, tuple(parts))
    return Dense(decode(block) * scale)


def storage_of(block: Block) -> str:
    """The word for how a block is kept: fp32, fp16, bf16, int8 or factors."""
    if isinstance(block, Factors):
        return "factors"
    return next(word for word, dtype in _DTYPES.items() if dtype == block.values.dtype)


def relative_error(exact: torch.Tensor, block: Block) -> float:
    """|tau - stored| / |tau| in the Frobenius norm; the difference is taken in float32."""
    if isinstance(block, Dense) and block.values is exact:
        return 0.0
    size = norm(exact)
    return norm(exact.float() - decode(block)) / size if size else 0.0


def norm(values: torch.Tensor) -> float:
    """The Frobenius norm: rows of 1024 values in float32, their squares summed in float64."""
    flat = values.float().flatten()
    whole = len(flat) - len(flat) % _ROW
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    parts = torch.cat([parts, torch.linalg.vector_norm(flat[whole:]).reshape(1)])
    found = parts.double().square().sum().sqrt().item()
    if found == 0 or not math.isfinite(found):  # nothing there, or squares beyond float32
        found = torch.linalg.vector_norm(flat.double()).item()
    return found


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
