"""The shape of task vectors: singular values of a block, angles and spectrum of a set.

Everything is computed in float64. A block of more than two dimensions is a matrix whose rows
are its first dimension. Low-rank blocks are measured through their factors: up @ down is
never formed unless a dense block has to be compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from atlas_cli.core.storage import Block, BlockPart, Factors, decode

_CHUNK = 1 << 22  # numbers that are float64 at the same time


@dataclass(frozen=True)
class Spectrum:
    """The principal components of a set of n vectors, largest first.

    `share` is s_k^2 / sum of s^2; `participation_ratio` is (sum of s^2)^2 / sum of s^4, the
    number of components that matter: n for orthogonal vectors of one length, 1 for parallel
    ones, 0 where nothing is left.
    """

    singular_values: tuple[float, ...]
    share: tuple[float, ...]
    participation_ratio: float


# One block ------------------------------------------------------------------------------------


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a block of that shape has more than one row and more than one column."""
    return len(shape) > 1 and min(shape[0], math.prod(shape[1:])) > 1


def singular_values(block: Block) -> torch.Tensor:
    """s_1 >= s_2 >= ... of a matrix block.

    From the eigenvalues of the smaller of X X^T and X^T X, whose rounding hides singular values
    below 1e-7 s_1 or so; they are given as zero. Of factors, exactly: with the QR
    decompositions up = P R and down^T = Q S, the values of up @ down are those of R S^T.
    """
    if isinstance(block, Factors):
        up, down = _joined(block)
        left, right = torch.linalg.qr(up).R, torch.linalg.qr(down.T).R
        exact: torch.Tensor = torch.linalg.svdvals(left @ right.T)
        return exact
    values = decode(block)
    matrix = values.reshape(len(values), -1)
    long = matrix if len(matrix) >= matrix.shape[1] else matrix.T
    products = torch.zeros(long.shape[1], long.shape[1], dtype=torch.float64)
    for rows in _chunks(len(long), _CHUNK // long.shape[1]):
        part = long[rows].double()
        products += part.T @ part
    return _roots(products, products.trace().item())


def norm(block: Block) -> float:
    """|tau|, the root of the sum of the squares of all values."""
    return math.sqrt(abs(gram([block]).item()))  # rounding may leave -1e-17 of factors


def effective_rank(singular: torch.Tensor) -> float:
    """exp(-sum of p_k ln p_k) with p_k = s_k / sum of s; 0 for a zero block.

    The effective rank of Roy and Vetterli (2007): r for r equal singular values, and between
    1 and the rank for others.
    """
    total = singular.sum()
    if total == 0:
        return 0.0
    shares = singular / total
    return math.exp(torch.special.entr(shares).sum().item())


def energy(singular: torch.Tensor, count: int) -> float:
    """The sum of s_k^2 over the first `count` values by that over all; 0 for a zero block."""
    squares = singular**2
    total = squares.sum().item()
    return min(1.0, squares[:count].sum().item() / total) if total else 0.0


# Several vectors ------------------------------------------------------------------------------


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
    for span in _chunks(len(flat[0]), _CHUNK // len(flat)):
        part = torch.stack([values[span].double() for values in flat])
        inner += part @ part.T
    return inner


def cosines(products: torch.Tensor) -> torch.Tensor:
    """G_ij / sqrt(G_ii G_jj), from a Gram matrix; NaN where a vector is zero."""
    squares = products.diagonal()
    return (products / (squares[:, None] * squares).sqrt()).clamp(-1, 1)


def spectrum(products: torch.Tensor, *, centred: bool) -> Spectrum:
    """The singular values of n stacked vectors, from their Gram matrix G.

    They are the roots of the eigenvalues of G or, with the mean vector taken off first, of
    H G H with H = I - 1/n.
    """
    scale = products.trace().item()
    if centred:
        products = products - products.mean(dim=0, keepdim=True)
        products = products - products.mean(dim=1, keepdim=True)
    values = _roots(products, scale)
    squares = values**2
    total = squares.sum().item()
    share = squares / total if total else squares
    ratio = 1 / (share**2).sum().item() if total else 0.0
    return Spectrum(tuple(values.tolist()), tuple(share.tolist()), ratio)


# Steps ----------------------------------------------------------------------------------------


def _joined(block: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """All parts as one pair of factors, without the rows that no part reaches."""
    spans = [torch.arange(part.start, part.start + len(part.up)) for part in block.parts]
    reached = torch.cat(spans).unique()
    ups = []
    for part, span in zip(block.parts, spans, strict=True):
        up = torch.zeros(len(reached), part.up.shape[1], dtype=torch.float64)
        up[torch.searchsorted(reached, span)] = part.up.double()
        ups.append(up)
    return torch.cat(ups, dim=1), torch.cat([part.down.double() for part in block.parts])


def _roots(products: torch.Tensor, scale: float) -> torch.Tensor:
    """The roots of the eigenvalues, largest first; zero where only rounding is left."""
    values = torch.linalg.eigvalsh(products).flip(0)
    noise = len(values) * torch.finfo(torch.float64).eps * scale
    return torch.where(values > noise, values, torch.zeros_like(values)).sqrt()


def _chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, max(1, size)):
        yield slice(start, start + max(1, size))
