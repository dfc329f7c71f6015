"""Sums over several tensors in one pass, by the loops of kernels.c where they were built.

Each function gives what several operations of torch give; those stand next to every call and do
the work instead if `ready` is False: without a C compiler at installation, on another kind of
processor, and for tensors that are not on the CPU. Models that are merged may still be in files,
which the loops read block by block.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from atlas_cli.native.operands import Operands, Sum

_int, _long, _float, _pointer = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_float, ctypes.c_void_p
_places = (_pointer, _pointer, _pointer, _pointer)  # values, or else paths, stamps and offsets
_SIGNATURES = {
    "type": (ctypes.c_char_p,),
    "weighted_sum": (_int, *_places, _pointer, _int, _float, _pointer, _long),
    "add_differences": (_int, *_places, _pointer, _int, _float, _float, _pointer, _long),
    "products": (_int, *_places, _int, _int, _long, _long, _pointer),
    "add_vectors": (_int, _pointer, _pointer, _int, _pointer, _pointer, _long, _long),
    "dot_vectors": (_int, _pointer, _pointer, _int, _pointer, _pointer, _long, _long),
    "sort_rows": (_pointer, _pointer, _long, _long, _long, _pointer),
}


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
    try:
        for name, signature in _SIGNATURES.items():
            function = getattr(found, f"atlas_{name}")
            function.argtypes, function.restype = signature, ctypes.c_int
    except AttributeError:  # built from other sources than these
        return None
    return found if found.atlas_take_level(found.atlas_best_level()) else None


def _type_of(dtype: torch.dtype) -> int:
    """The number by which the loops know a dtype; negative if they do not, or were not built."""
    found = library()
    return -1 if found is None else _types(found)(dtype)


@cache
def _types(found: ctypes.CDLL) -> Callable[[torch.dtype], int]:
    return cache(lambda dtype: found.atlas_type(str(dtype).removeprefix("torch.").encode()))


def ready(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the loops take these tensors: of one dtype that they know, contiguous, on the CPU."""
    dtype = tensors[0].dtype
    return _type_of(dtype) >= 0 and all(
        t.is_cpu and t.dtype == dtype and t.is_contiguous() for t in tensors
    )


def reads(terms: Operands) -> bool:
    """Whether the loops read these terms from files themselves, a block at a time."""
    return bool(terms.places) and _type_of(terms.dtype) >= 0


def add(terms: Operands, total: Sum) -> torch.Tensor | None:
    """The sum; None if the loops do not take the terms, or cannot read them."""
    if (places := _places_of(terms)) is None:
        return None
    out = torch.empty(terms.shape, dtype=terms.dtype)
    numbers = _array(_float, total.weights), len(terms.places or terms.tensors), total.divisor
    given = _type_of(terms.dtype), *places, *numbers
    end = out.data_ptr(), terms.size
    if total.scale is None:
        return out if _run("weighted_sum", *given, *end) else None
    return out if _run("add_differences", *given, total.scale, *end) else None


def products(terms: Operands, *, from_first: bool) -> list[float] | None:
    """<x_s, x_t> for s <= t; rows in float32, their sums in float64.

    The elements of a vector are rows of their own. With `from_first`, x are the differences of the
    other terms from the first. None if the loops do not take the terms, or cannot read them.
    """
    if (places := _places_of(terms)) is None:
        return None
    given = len(terms.places or terms.tensors)
    count = given - from_first
    rows, width = (terms.shape[0], math.prod(terms.shape[1:])) if terms.shape else (1, 1)
    sums = torch.zeros(count * (count + 1) // 2, dtype=torch.float64)
    shape = given, from_first, rows, width
    read = _run("products", _type_of(terms.dtype), *places, *shape, sums.data_ptr())
    return list(sums.tolist()) if read else None


def add_vectors(
    vectors: Sequence[torch.Tensor], weights: torch.Tensor, onto: torch.Tensor, out: torch.Tensor
) -> None:
    """out = onto + sum over v of weights[row, v] * T_v[row], in float32; all are flat."""
    rows = len(weights)
    _run(
        "add_vectors",
        *(_type_of(vectors[0].dtype), _addresses(vectors), weights.data_ptr(), len(vectors)),
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
        *(_type_of(vectors[0].dtype), _addresses(vectors)),
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


def _places_of(terms: Operands) -> tuple[object, ...] | None:
    """Where terms are, as the loops want to know it; None if the loops do not take them."""
    if reads(terms):
        before = terms.start * terms.dtype.itemsize
        return (
            None,
            _array(ctypes.c_char_p, [place.path for place in terms.places]),
            _array(ctypes.c_int64, [number for place in terms.places for number in place.stamp]),
            _array(ctypes.c_int64, [place.start + before for place in terms.places]),
        )
    return (_addresses(terms.tensors), None, None, None) if ready(terms.tensors) else None


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return _array(ctypes.c_void_p, [tensor.data_ptr() for tensor in tensors])


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


# Wide sums ------------------------------------------------------------------------------------


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; mps and some others do not."""
    try:
        return device.type == "cpu" or bool(torch.ones(1, dtype=torch.float64, device=device) > 0)
    except (RuntimeError, TypeError):
        return False
