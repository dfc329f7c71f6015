"""An accelerator for machines without one: a device `pretend` that computes on the CPU.

Its tensors hold a CPU tensor and report `pretend:0`; every operator runs on what they hold. As on a
real accelerator, operands of two devices and `.numpy()` are refused, so that a forgotten
`.to(device)` or `.cpu()` is an error. It tells nothing about speed. `limit(bytes)` makes it run out
of memory as real ones do: with torch.OutOfMemoryError, once its living tensors exceed that.

    python tests/pretend_device.py COMMANDS.json

runs command lines of atlas one after the other in one process and prints a JSON list of their exit
codes, with what each wrote to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
MOVES = {"aten._to_copy.default", "aten.copy_.default", "aten.set_.source_Tensor"}
_memory = {"living": 0, "limit": 0, "peak": 0}
# How many there were, the number of the one that fails, and failures that are still to be raised.
_allocations = {"made": 0, "fails": -1, "late": 0}
_kept: list[Any] = []  # the library that implements the device


class Pretend(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretend:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        # Derivatives make zeros that have no memory, which operators below this level refuse.
        self.inner = torch.zeros_like(inner) if inner._is_zerotensor() else inner
        _take(self.inner)

    def __repr__(self) -> str:
        return f"pretend({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def item(self) -> Any:
        return self.inner.item()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner.new_tensor(data, **kwargs).to(self.device)

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def storage(self) -> Any:
        return self.inner.storage()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of device pretend to numpy; use .cpu() first")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def _index(index: Any) -> Any:
    """Lists as tensors of this device: torch moves them below the level that knows of it."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return torch.tensor(index).to(NAME) if isinstance(index, list) else index


# Memory ---------------------------------------------------------------------------------------

_storages: dict[int, int] = {}  # how many tensors share a storage, by its address


def _take(inner: torch.Tensor) -> None:
    """Count the bytes of a storage once, as long as any tensor has it."""
    try:
        storage = inner.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # a tensor within a transform of torch.func has no storage
        return
    if not size:
        return
    if key not in _storages:
        _allocations["made"] += 1
        if _allocations["made"] == _allocations["fails"]:
            _fail("pretend: out of memory, as was asked for")
        if _memory["limit"] and _memory["living"] + size > _memory["limit"]:
            there = _memory["limit"] - _memory["living"]
            _fail(f"pretend: out of memory: {size} bytes, {there} are free")
        _memory["living"] += size
        _memory["peak"] = max(_memory["peak"], _memory["living"])
    _storages[key] = _storages.get(key, 0) + 1
    weakref.finalize(inner, _release, key, size)


def _fail(text: str) -> None:
    """Raise, or have `backward` raise: an exception in a thread of torch's own ends the process."""
    if threading.current_thread() is threading.main_thread():
        raise torch.OutOfMemoryError(text)
    _allocations["late"] += 1


def _backward(original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        failed, _allocations["late"] = _allocations["late"], 0
        if failed:
            raise torch.OutOfMemoryError("pretend: out of memory in a backward pass")

    return backward


def _release(key: int, size: int) -> None:
    _storages[key] -= 1
    if not _storages[key]:
        del _storages[key]
        _memory["living"] -= size


def limit(size: int) -> None:
    """From now on there are so many bytes; 0 for any number."""
    _memory["limit"] = size


def fail_at(number: int) -> int:
    """Let the allocation of that number fail, counted from now on; the count up to now."""
    found = _allocations["made"]
    _allocations.update(made=0, fails=number, late=0)
    return found


def peak() -> int:
    """The most bytes that were in use since this was last asked."""
    found, _memory["peak"] = _memory["peak"], _memory["living"]
    return found


# Operators ------------------------------------------------------------------------------------


def run(function, args, kwargs):
    name, outs = _facts(function)
    device = kwargs.get("device")
    there: list[Pretend] = []
    here: list[torch.Tensor] = []
    plain_args = _plain(args, there, here)
    plain_kwargs = {key: _plain(value, there, here) for key, value in kwargs.items()}
    if there and here and name not in MOVES and any(value.dim() for value in here):
        raise RuntimeError(f"{name}: found operands on cpu and on {NAME}")
    wanted = torch.device(device).type == NAME if device is not None else bool(there)
    if name == "aten.copy_.default":
        wanted = isinstance(args[0], Pretend)
    if device is not None:
        plain_kwargs["device"] = torch.device("cpu")
    if kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False
    with torch._C._DisableFuncTorch():  # what is held is below any transform of torch.func
        result = function(*plain_args, **plain_kwargs)
    if outs:  # in place, or into `out`: the result is the very tensor that was given
        if len(outs) == 1:
            return kwargs["out"] if "out" in kwargs else args[0]
        return tuple(kwargs.get(one) for one in outs)
    return _wrapped(result) if wanted else result


@functools.cache
def _facts(function: Any) -> tuple[str, tuple[str, ...]]:
    """The name of an operator, and the arguments that it writes to and returns, if it does."""
    returns = function._schema.returns
    if not returns or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return str(function), ()
    written = [a.name for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
    return str(function), tuple(written[: len(returns)])


def _plain(value: Any, there: list[Pretend], here: list[torch.Tensor]) -> Any:
    """What tensors of this device hold; they and all others are noted."""
    if isinstance(value, Pretend):
        there.append(value)
        return value.inner
    if isinstance(value, torch.Tensor):
        here.append(value)
    elif type(value) in (list, tuple):
        return type(value)([_plain(one, there, here) for one in value])
    return value


def _wrapped(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return Pretend(result)
    if isinstance(result, list | tuple):
        return type(result)([_wrapped(one) for one in result])
    return result


def install() -> None:
    """Register the device; once per process."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
    _kept.append(library)
    torch.Tensor.backward = _backward(torch.Tensor.backward)
    for maker in ("tensor", "arange"):
        setattr(torch, maker, _made_there(getattr(torch, maker)))


def _made_there(make: Any) -> Any:
    """A function that makes tensors; those of this device are made on the CPU and moved."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == NAME:
            return make(*args, **kwargs).to(NAME)
        return make(*args, device=device, **kwargs)

    return made


def main() -> None:
    install()
    from faults import messages

    from atlas_cli.cli.app import main as atlas

    messages.record()

    results = []
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        began = time.process_time()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = atlas(arguments)
            except Exception:
                code = 70
                traceback.print_exc()
        results.append([code, out.getvalue(), err.getvalue(), time.process_time() - began])
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
