"""Open a pickled checkpoint: describe its tensors now, read each one when it is asked for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.pickles.formats import Context, Loaded, load
from atlas_cli.pickles.policy import Policy
from atlas_cli.pickles.rebuild import View
from atlas_cli.pickles.spans import Allowance, FlawError, Span
from atlas_cli.pickles.walk import model_tensors, named_tensors
from atlas_cli.tensors import LazyTensor

_MOST_REPEATED = 8


def open_pickle(path: Path, *, allow: Collection[str] = ()) -> dict[str, LazyTensor]:
    """The named tensors of a .pt/.bin/.pth file, none of its code run. Raises CheckpointError.

    Names are those of the file. `allow` lists further globals that the file may mention; they
    are not called either. A tensor is read from the file at each `read()`, and only its part.
    """
    try:
        return _open(path, allow)
    except FlawError as flaw:
        raise CheckpointError(f"{path}: {flaw}") from flaw
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or 'cannot be read'}") from error


def _open(path: Path, allow: Collection[str]) -> dict[str, LazyTensor]:
    policy = Policy(allow)
    try:
        pickles = load(path, Context(policy, Allowance()))
    except FlawError as flaw:
        raise FlawError(policy.complaint() or str(flaw)) from flaw
    if complaint := policy.complaint():
        raise FlawError(complaint)
    views = model_tensors(pickles["data"].value)
    if not views:
        raise FlawError("holds no tensors by name; a state dict or a module is needed")
    return _lazily(path, views, pickles["data"]) | _constants(path, pickles)


def _constants(path: Path, pickles: dict[str, Loaded]) -> dict[str, LazyTensor]:
    """The tensors that TorchScript code refers to as CONSTANTS.c0, CONSTANTS.c1 and so on."""
    if "constants" not in pickles or not isinstance(pickles["constants"].value, tuple):
        return {}
    constants = pickles["constants"]
    views = named_tensors({f"CONSTANTS.c{n}": item for n, item in enumerate(constants.value)})
    return _lazily(path, views, constants)


def _lazily(path: Path, views: dict[str, View], pickle: Loaded) -> dict[str, LazyTensor]:
    found = {}
    for name, view in views.items():
        try:
            found[name] = _lazy(path, view, pickle)
        except FlawError as flaw:
            raise FlawError(f"{flaw} (tensor {name})") from flaw
    if sum(view.nbytes for view in views.values()) > _MOST_REPEATED * path.stat().st_size:
        raise FlawError(f"repeats its numbers until they fill {_MOST_REPEATED} times its own size")
    return found


def _lazy(path: Path, view: View, pickle: Loaded) -> LazyTensor:
    place = pickle.place(view.storage)
    size = view.dtype.itemsize
    span = place.part(view.offset * size, view.reach * size) if view.reach else None

    def read() -> torch.Tensor:
        try:
            return _read(view, span)
        except (FlawError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    return LazyTensor(view.shape, view.dtype, read)


def _read(view: View, span: Span | None) -> torch.Tensor:
    """The tensor as one contiguous block that is its own copy."""
    if span is None:
        return torch.empty(view.shape, dtype=view.dtype)
    numbers = torch.frombuffer(span.read(), dtype=view.dtype)
    return numbers.as_strided(view.shape, view.stride).contiguous()
