"""How a block of a task vector is stored, and what can be measured of it as it is stored.

Norms and inner products are computed in float64. A block of more than two dimensions is
a matrix whose rows are its first dimension. Low-rank blocks are measured through their factors:
up @ down is never formed unless a dense block has to be compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from atlas_cli.core.packed import FEW, Packed, Residual, pack, unpacked
from atlas_cli.native import kernels


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


Block = Dense | Quantised | Factors | Packed | Residual
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
_ROW = 1024
SHARED_BITS, RESIDUAL_BITS = 3, 2  # of rtvq
BITS = {**FEW, "rtvq": RESIDUAL_BITS}  # of the codes that a block has of its own


@dataclass(frozen=True)
class Form:
    """How the user wants blocks kept: a dtype and, for matrices, a rank or a share of energy.

    Few bits are for matrices: of `int4`, `int3` and `int2`, other blocks are kept as bf16. `shared`
    gives what the vectors of a pool have in common in the block of a name, for `rtvq`.
    """

    dtype: str = "fp32"
    rank: int | None = None
    energy: float | None = None
    shared: Callable[[str], Packed] | None = None
    key: str = ""

    @property
    def is_few(self) -> bool:
        """Whether matrices take four bits per value or fewer."""
        return self.dtype in BITS

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
        case Packed():
            return unpacked(block)
        case Residual(shared, own, _):
            return unpacked(shared) + unpacked(own)


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
    most = rank if energy is None else None
    up, down, _ = leading_factors(matrix, rank=most, energy=energy)
    if up.shape[1] * sum(matrix.shape) >= matrix.numel():
        return Dense(values.float())
    return Factors(tuple(values.shape), (BlockPart(0, up, down),))


def leading_factors(
    matrix: torch.Tensor, *, rank: int | None = None, energy: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """up and down of the best approximation up @ down, and |matrix - up @ down|^2.

    Of at most `rank` terms, and of no more than hold a share `energy` of the squares.
    """
    whole = matrix.double()
    tall = whole if whole.shape[0] >= whole.shape[1] else whole.T
    squares, basis = _principal(tall)
    count = len(squares) if rank is None else min(rank, len(squares))
    if energy is not None:
        share = squares.cumsum(0) / squares.sum()
        count = min(count, int((share < energy - 1e-12).sum()) + 1)
    # Both factors get the root of the singular value, so that neither leaves the range of fp16.
    root = squares[:count].clamp(min=max(1e-24 * squares[0].item(), 1e-300)) ** 0.25
    up, down = tall @ basis[:, :count] / root, (basis[:, :count] * root).T
    up, down = (up, down) if tall is whole else (down.T, up.T)
    return up.float().contiguous(), down.float().contiguous(), float(squares[count:].sum())


def _principal(tall: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared singular values, largest first, and the right singular vectors as columns.

    From the Gram matrix in float64: several times quicker than a full decomposition, and as
    good for the leading terms of float32 values.
    """
    squares, vectors = torch.linalg.eigh(tall.T @ tall)
    return squares.flip(0).clamp(min=0), vectors.flip(1)


def encode(exact: Block, form: Form, name: str = "") -> Block:
    """A block in the form the user chose. Factors stay factors, in the dtype of the form."""
    if form.is_few:
        return _few(decode(exact), form, name)
    if isinstance(exact, Factors):
        return _cast(exact, _DTYPES[form.dtype])
    values = decode(exact)
    if form.is_low_rank:
        return _cast(factorise(values, rank=form.rank, energy=form.energy), _DTYPES[form.dtype])
    return quantise(values) if form.dtype == "int8" else Dense(values.to(_DTYPES[form.dtype]))


def _few(values: torch.Tensor, form: Form, name: str) -> Block:
    """A block of few bits: of what is not shared, if something is."""
    if not is_matrix(values.shape):
        return Dense(values.bfloat16())
    if form.shared is None:
        return pack(values, FEW[form.dtype])
    shared = form.shared(name)
    return Residual(shared, pack(values - unpacked(shared), RESIDUAL_BITS), form.key)


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
    """The word for how a block is kept: a dtype, int4, int3, int2, rtvq or factors."""
    if isinstance(block, Packed):
        return f"int{block.bits}"
    if isinstance(block, Residual):
        return "rtvq"
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
    """How many bytes the block takes, without what it shares with others."""
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
        case Packed():
            return [block.codes, block.lows, block.steps]
        case Residual(_, own, _):
            return tensors_of(own)


CHUNK = 1 << 22  # numbers that are float64 at the same time


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a block of that shape has more than one row and more than one column."""
    return len(shape) > 1 and min(shape[0], math.prod(shape[1:])) > 1


def block_norm(block: Block) -> float:
    """|tau|, the root of the sum of the squares of all values."""
    return math.sqrt(abs(gram([block]).item()))  # rounding may leave -1e-17 of factors


def gram(blocks: Sequence[Block | None]) -> torch.Tensor:
    """G_ij = <tau_i, tau_j> for the blocks of one name in n vectors; None is a zero block.

    A block of factors against another is the sum of (U_i^T U_j) * (D_i D_j^T).
    """
    there = [index for index, block in enumerate(blocks) if block is not None]
    found = [block for block in blocks if block is not None]
    whole = torch.zeros(len(blocks), len(blocks), dtype=torch.float64)
    factors = [block for block in found if isinstance(block, Factors)]
    if found:
        places = torch.tensor(there)
        inner = _of_factors(factors) if len(factors) == len(found) else _of_values(found)
        whole[places[:, None], places] = inner
    return whole


def _of_factors(blocks: Sequence[Factors]) -> torch.Tensor:
    inner = torch.zeros(len(blocks), len(blocks), dtype=torch.float64)
    for i, block in enumerate(blocks):
        for j, other in enumerate(blocks[: i + 1]):
            pairs = product(block.parts, other.parts)
            inner[i, j] = inner[j, i] = math.fsum(_inner(left, right) for left, right in pairs)
    return inner


def _inner(left: BlockPart, right: BlockPart) -> float:
    """<up down, up' down'> over the rows that both parts reach."""
    start = max(left.start, right.start)
    stop = min(left.start + len(left.up), right.start + len(right.up))
    if stop <= start:
        return 0.0
    ups = [part.up[start - part.start : stop - part.start].double() for part in (left, right)]
    inner = (ups[0].T @ ups[1]) * (left.down.double() @ right.down.double().T)
    return inner.sum().item()


def _of_values(blocks: Sequence[Block]) -> torch.Tensor:
    flat = [decode(block).flatten() for block in blocks]
    inner = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for span in chunks(len(flat[0]), CHUNK // len(flat)):
        part = torch.stack([values[span].double() for values in flat])
        inner += part @ part.T
    return inner


def chunks(length: int, size: int) -> Iterator[slice]:
    """A length in slices of a size."""
    for start in range(0, length, max(1, size)):
        yield slice(start, start + max(1, size))


def widest(values: torch.Tensor) -> torch.dtype:
    """float64, or float32 where a device has nothing wider."""
    wide = values.is_cpu or kernels.has_float64(values.device)
    return torch.float64 if wide else torch.float32
