"""Spectra of blocks as they are stored, and of several vectors through their Gram matrix.

Computed in float64. Low-rank blocks are measured through their factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from atlas_cli.core.storage import CHUNK, Block, Factors, chunks, decode


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
    for rows in chunks(len(long), CHUNK // long.shape[1]):
        part = long[rows].double()
        products += part.T @ part
    return _roots(products, products.trace().item())


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
