"""Directions that coefficients scale instead of the task vectors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SingularBasis:
    """Orthonormal directions of one matrix: sum_r s_r up[:, r] down[r]; `start` are the first s."""

    up: torch.Tensor
    down: torch.Tensor
    start: torch.Tensor


def singular_basis(matrices: Sequence[torch.Tensor], terms: int) -> SingularBasis:
    """BOLT: polar(U) diag(s) polar(V), of the first singular vectors of every matrix.

    U stacks the first `terms` left singular vectors of each of n matrices, (rows, n terms), V the
    right ones, (n terms, columns); each is replaced by its polar factor. s starts as the mean over
    matrices of diag(U^T tau V^T). In float64.
    """
    lefts, rights = [], []
    for matrix in matrices:
        left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        lefts.append(left[:, :terms])
        rights.append(right[:terms])
    up, down = polar(torch.cat(lefts, dim=1)), polar(torch.cat(rights))
    each = [((up.T @ matrix.double()) * down).sum(dim=1) for matrix in matrices]
    return SingularBasis(up, down, torch.stack(each).mean(dim=0))


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthonormal columns, or rows: W Z of the decomposition W S Z."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return torch.matmul(left, right)


def principal_weights(products: torch.Tensor, terms: int) -> torch.Tensor:
    """Rows of weights w with sum_i w_i tau_i the principal directions, from the Gram matrix.

    The k-th has the length of the k-th singular value of the stacked vectors. Shape (terms, n).
    """
    _, vectors = torch.linalg.eigh(products.double())
    found = vectors.flip(1).T[:terms]
    # An eigenvector has no sign of its own: the largest weight is made positive.
    largest = found.gather(1, found.abs().argmax(dim=1, keepdim=True))
    return torch.mul(found, largest.sign())


def random_like(values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A normal direction of the same shape and norm."""
    drawn = torch.randn(values.shape, generator=random)
    return torch.mul(drawn, torch.linalg.norm(values) / torch.linalg.norm(drawn))
