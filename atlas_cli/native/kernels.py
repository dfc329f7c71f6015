"""Sums over several tensors in one pass, by the loops of kernels.c where they were built.

The functions give what torch's operations give in several passes, each of which stands beside
the call. Models that are merged may be in files still, and are read meanwhile. Without a compiler
at installation, on another kind of processor and for tensors that are not on the CPU `ready` is
False, and torch does the work.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Sequence
from functools import cache

import torch

from atlas_cli.native.operands import Operands, Sum

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_BEST = 4  # form of the loops: with registers of 64 bytes; 3 has half of that
_SUMMED = 2048  # as in kernels.c: the room that `products` needs for each term
_int, _long, _float, _pointer = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "weighted_sum": (_int, _pointer, _pointer, _int, _float, _pointer, _long),
    "add_differences": (_int, _pointer, _pointer, _int, _float, _float, _pointer, _long),
    "products": (_int, _pointer, _int, _int, _long, _long, _pointer, _pointer),
    "add_vectors": (_int, _pointer, _pointer, _int, _pointer, _pointer, _long, _long),
    "dot_vectors": (_int, _pointer, _pointer, _int, _pointer, _pointer, _long, _long),
    "sort_rows": (_pointer, _pointer, _long, _long, _long, _pointer),
}


class _Term(ctypes.Structure):
    """Where the elements of a term are: in memory, or in a file."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("path", ctypes.c_char_p),
        ("stamp", ctypes.c_int64 * 4),
        ("offset", ctypes.c_int64),
    )


class _Result(ctypes.Structure):
    """Where the elements of the result go: to memory, or to a file."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("file", ctypes.c_int),
        ("finite", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The loops, if they were built and the processor can run them."""
    spec = importlib.util.find_spec("atlas_cli.native._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError:  # built for another system
        return None
    for name, signature in _SIGNATURES.items():
        function = getattr(found, f"atlas_{name}")
        function.argtypes, function.restype = signature, ctypes.c_int
    return found if found.atlas_take_level(_BEST) else None


def ready(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the loops take these tensors: of one dtype that they know, in order, on the CPU."""
    dtype = tensors[0].dtype
    return (
        dtype in _TYPES
        and library() is not None
        and all(t.is_cpu and t.dtype == dtype and t.is_contiguous() for t in tensors)
    )


def reads(terms: Operands) -> bool:
    """Whether the loops read these terms from files themselves, a little at a time."""
    return bool(terms.places) and terms.dtype in _TYPES and library() is not None


def add(terms: Operands, total: Sum) -> torch.Tensor | None:
    """The sum; None if the loops do not take the terms, or cannot read them."""
    if terms.dtype not in _TYPES:
        return None
    out = torch.empty(terms.shape, dtype=terms.dtype)
    return out if _add(terms, total, _Result(out.data_ptr())) else None


def _add(terms: Operands, total: Sum, result: _Result) -> bool:
    if (places := _terms(terms)) is None:
        return False
    given = _TYPES[terms.dtype], places, _numbers(total.weights), len(places), total.divisor
    end = ctypes.byref(result), terms.size
    if total.scale is None:
        return bool(_run("weighted_sum", *given, *end))
    return bool(_run("add_differences", *given, total.scale, *end))


def products(terms: Operands, *, from_first: bool) -> list[float] | None:
    """<x_s, x_t> for s <= t; rows in float32, their sums in float64.

    The elements of a vector are rows of their own. With `from_first`, x are the differences of the
    other terms from the first.
    """
    if (places := _terms(terms)) is None:
        return None
    count = len(places) - from_first
    rows, width = (terms.shape[0], math.prod(terms.shape[1:])) if terms.shape else (1, 1)
    sums = torch.zeros(count * (count + 1) // 2, dtype=torch.float64)
    room = torch.empty(count, _SUMMED)
    given = _TYPES[terms.dtype], places, len(places), from_first, rows, width
    read = _run("products", *given, room.data_ptr(), sums.data_ptr())
    return list(sums.tolist()) if read else None


def add_vectors(
    vectors: Sequence[torch.Tensor], weights: torch.Tensor, onto: torch.Tensor, out: torch.Tensor
) -> None:
    """out = onto + sum over v of weights[row, v] * T_v[row], in float32; all are flat."""
    rows = len(weights)
    _run(
        "add_vectors",
        *(_TYPES[vectors[0].dtype], _places(vectors), weights.data_ptr(), len(vectors)),
        *(onto.data_ptr(), out.data_ptr(), rows, out.numel() // rows),
    )


def dot_vectors(
    vectors: Sequence[torch.Tensor], scales: torch.Tensor | None, gradient: torch.Tensor
) -> torch.Tensor:
    """sum over rows of scales[row, v] * <T_v[row], gradient[row]>, in float64; all are flat."""
    rows = 1 if scales is None else len(scales)
    sums = torch.zeros(len(vectors), dtype=torch.float64)
    _run(
        "dot_vectors",
        *(_TYPES[vectors[0].dtype], _places(vectors)),
        *(None if scales is None else scales.data_ptr(), len(vectors), gradient.data_ptr()),
        *(sums.data_ptr(), rows, gradient.numel() // rows),
    )
    return sums


def sort_rows(magnitudes: torch.Tensor, out: torch.Tensor) -> None:
    """out = the rows of a matrix of 16-bit magnitudes, each in order; `out` may be part of one."""
    rows, width = magnitudes.shape
    room = torch.empty(width, dtype=torch.int16)
    places = magnitudes.data_ptr(), out.data_ptr()
    _run("sort_rows", *places, rows, width, out.stride(0), room.data_ptr())


def _run(name: str, *arguments: object) -> int:
    found: int = getattr(library(), f"atlas_{name}")(*arguments)
    return found


def _terms(terms: Operands) -> ctypes.Array[_Term] | None:
    """Where the terms are; None if the loops do not take them."""
    if reads(terms):
        before = terms.start * terms.dtype.itemsize
        found = [_Term(None, p.path, p.stamp, p.start + before) for p in terms.places]
    elif ready(terms.tensors):
        found = [_Term(tensor.data_ptr()) for tensor in terms.tensors]
    else:
        return None
    return (_Term * len(found))(*found)


def _places(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _numbers(values: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)
