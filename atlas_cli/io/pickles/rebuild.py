"""The few calls of a pickle that are understood: those that describe a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atlas_cli.io.pickles.machine import Call
from atlas_cli.io.pickles.policy import (
    GETATTR,
    Allowance,
    FlawError,
    Global,
    GlobalsPolicy,
    Object,
    Span,
    entries_of,
    printable,
)

_MOST_SIZES = 64
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Untyped": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
_UNTYPED_ONLY = (
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
_DTYPES = {str(dtype): dtype for dtype in (*_STORAGES.values(), *_UNTYPED_ONLY)}
_STORAGE_TYPES = {
    f"{module}.{name}Storage": dtype
    for module in ("torch", "torch.cuda", "torch.storage")
    for name, dtype in _STORAGES.items()
}


@dataclass(frozen=True)
class Storage:
    """A run of numbers that tensors are views of; `span` is set once its place is known."""

    key: str
    dtype: torch.dtype
    length: int
    span: Span | None = None

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file."""
        return self.length * self.dtype.itemsize


@dataclass(frozen=True)
class StorageView:
    """A tensor: where its numbers lie in a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor once it is read."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def reach(self) -> int:
        """How many numbers lie between the first of the tensor and the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


def storage_of(key: tuple[Any, ...]) -> Storage:
    """The storage a persistent id stands for; raises FlawError for any other id."""
    match key:
        case ("storage", Global() as kind, str() as name, str(), int() as length, *view):
            if str(kind) in _STORAGE_TYPES and view in ([], [None]):
                return Storage(name, _STORAGE_TYPES[str(kind)], _whole(length))
            raise FlawError(
                f"has a storage of a kind that is not supported, {printable(str(kind))}"
            )
    raise FlawError("has a persistent id that is not that of a storage")


def tensor_calls(
    policy: GlobalsPolicy, allowance: Allowance, load_storage: Callable[[Span], Storage]
) -> Mapping[str, Call]:
    """What is worked out when a pickle calls it, by name; all other calls stay notes."""
    return _REBUILDERS | {
        "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
        "torch.storage._load_from_bytes": lambda args: load_storage(_bytes(args)),
        "torch.Size": _items,
        "builtins.set": _items,
        "builtins.frozenset": _items,
        "collections.OrderedDict": lambda args: _dict(allowance, args),
        "collections.defaultdict": lambda args: _dict(allowance, args),
        "_codecs.encode": lambda args: _encoded(allowance, args),
        "copyreg._reconstructor": _reconstructed,
        GETATTR: lambda args: _attribute(policy, args),
    }


def _whole(number: Any) -> int:
    """A count or an offset; raises FlawError for what cannot be one."""
    if type(number) is not int or not 0 <= number < 2**63:
        raise FlawError("has a tensor with a size, stride or offset that is not a whole number")
    return number


def _tensor(args: tuple[Any, ...]) -> StorageView:
    match args:
        case (Storage() as storage, offset, shape, stride, *rest):
            if any(rest[2:]):
                raise FlawError("has a tensor with the conjugate or negative bit set")
            return _view(storage, storage.dtype, offset, (shape, stride))
    raise FlawError("has a tensor that is not a view of a storage")


def _tensor_with_dtype(args: tuple[Any, ...]) -> StorageView:
    match args:
        case (Storage() as storage, offset, shape, stride, _, _, Global() as name, *rest):
            if str(name) not in _DTYPES or any(rest):
                raise FlawError(
                    f"has a tensor of a kind that is not supported, {printable(str(name))}"
                )
            return _view(storage, _DTYPES[str(name)], offset, (shape, stride))
    raise FlawError("has a tensor that is not a view of a storage")


def _view(
    storage: Storage, dtype: torch.dtype, offset: Any, layout: tuple[Any, Any]
) -> StorageView:
    """A view that is known to lie within its storage; raises FlawError if it would not."""
    if any(len(numbers) > _MOST_SIZES for numbers in layout):
        raise FlawError(f"has a tensor of more than {_MOST_SIZES} dimensions")
    shape, stride = (tuple(_whole(number) for number in numbers) for numbers in layout)
    if len(shape) != len(stride) or math.prod(n or 1 for n in shape) >= 2**63:
        raise FlawError("has a tensor with a shape that cannot be")
    view = StorageView(storage, dtype, _whole(offset), shape, stride)
    end = (view.offset + view.reach) * dtype.itemsize
    if end > storage.nbytes or view.nbytes > storage.nbytes:
        key = printable(storage.key)
        raise FlawError(
            f"has a tensor {shape} that reaches beyond its storage {key}, or repeats it"
        )
    return view


def _first(args: tuple[Any, ...]) -> Any:
    if not args or not isinstance(args[0], StorageView):
        raise FlawError("has a parameter that is not made from a plain tensor")
    return args[0]


def _tensor_of_type(args: tuple[Any, ...]) -> Any:
    """A tensor with attributes of its own; the attributes are left out."""
    match args:
        case (Global() as name, _, tuple() as inner, *_):
            if str(name) in _REBUILDERS:
                return _REBUILDERS[str(name)](inner)
    raise FlawError(
        "has a tensor of a kind that is not supported, torch._tensor._rebuild_from_type_v2"
    )


def _bytes(args: tuple[Any, ...]) -> Span:
    if len(args) != 1 or not isinstance(args[0], Span):
        raise FlawError("has a storage that is not made from bytes")
    return args[0]


def _items(args: tuple[Any, ...]) -> Any:
    """The given items themselves: a copy at each call could fill the memory."""
    return args[0] if args and isinstance(args[0], list | tuple) else []


def _dict(allowance: Allowance, args: tuple[Any, ...]) -> dict[Any, Any]:
    """OrderedDict or defaultdict as a dict, from nothing or from a list of pairs."""
    pairs = args[-1] if args and isinstance(args[-1], list) else []
    allowance.spend_opcodes(len(pairs))
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise FlawError("has a dictionary that is not made of pairs")
    return entries_of((key, value) for key, value in pairs)


def _encoded(allowance: Allowance, args: tuple[Any, ...]) -> Any:
    """Bytes, which old pickle protocols write as text."""
    match args:
        case (str() as text, "latin1" | "latin-1"):
            allowance.spend_text(len(text))
            content = text.encode("latin-1")
            return Span(content, 0, len(content))
    return Object(None, args)


def _reconstructed(args: tuple[Any, ...]) -> Object:
    return Object(args[0] if args and isinstance(args[0], Global) else None, args)


def _attribute(policy: GlobalsPolicy, args: tuple[Any, ...]) -> Any:
    """A class inside a class, which old pickle protocols write as getattr(Outer, 'Inner')."""
    match args:
        case (Global() as outer, str() as name):
            return policy.admit(outer.module, f"{outer.qualname}.{name}")
    policy.refuse(Global("builtins", "getattr"))
    return Object(None, args)


_REBUILDERS: dict[str, Call] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
}
