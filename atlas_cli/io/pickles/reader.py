"""Open a pickled checkpoint: describe its tensors now, read each one when it is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.io.pickles.formats import Context, Loaded, load
from atlas_cli.io.pickles.policy import Allowance, FlawError, GlobalsPolicy, Object, Span, printable
from atlas_cli.io.pickles.rebuild import StorageView
from atlas_cli.io.tensors import LazyTensor

WRAPPERS = ("state_dict", "model_state_dict", "model")
_MOST_WRAPPED = 2
_DEEPEST = 64
_LONGEST_NAME = 500
_MOST_ENTRIES = 1_000_000
_REBUILDERS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
_SCRIPTED = "__torch__."
_NO_TEXT = "\0"


def model_tensors(value: Any, wrapped: int = 0) -> dict[str, StorageView]:
    """Tensors by name, those of the model alone if a training checkpoint wraps one."""
    if isinstance(value, dict) and wrapped <= _MOST_WRAPPED and not _holds_tensors(value):
        for inside in (value[key] for key in WRAPPERS if key in value):
            if found := model_tensors(inside, wrapped + 1):
                return found
    return named_tensors(value)


def named_tensors(value: Any) -> dict[str, StorageView]:
    """Every tensor below `value`, by dotted name.

    Raises FlawError if two have one name, or if what is shared or nested makes too many names.
    """
    found: dict[str, StorageView] = {}
    waiting = [("", value, 0)]
    seen = 0
    while waiting:
        name, item, depth = waiting.pop()
        if isinstance(item, StorageView):
            _add(found, name, item)
            continue
        entries = _entries(item)
        seen += 1 + len(entries)
        _check_extent(seen, depth)
        below = [(_join(name, key), child, depth + 1) for key, child in _children(entries)]
        waiting.extend(reversed(below))
    return found


def _holds_tensors(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, StorageView) for item in value.values())


def _check_extent(seen: int, depth: int) -> None:
    if seen > _MOST_ENTRIES:
        raise FlawError(f"refers to more than {_MOST_ENTRIES} things by name, which no model does")
    if depth > _DEEPEST:
        raise FlawError(f"is nested more than {_DEEPEST} deep, or contains itself")


def _add(found: dict[str, StorageView], name: str, view: StorageView) -> None:
    if not name:
        raise FlawError("holds a tensor without a name; a dictionary or a module is needed")
    if not name.isprintable():
        raise FlawError(f"has a tensor with the unusable name {printable(name)}")
    if name in found:
        raise FlawError(f"names {printable(name)} twice")
    found[name] = view


def _entries(item: Any) -> dict[Any, Any]:
    """What lies directly below a dictionary, a module or a scripted module."""
    if isinstance(item, dict):
        return item
    if not isinstance(item, Object):
        return {}
    if isinstance(item.state, dict) and "_parameters" in item.state:
        return _module_entries(item.state)
    if str(item.made_by).startswith(_SCRIPTED) and isinstance(item.state, dict):
        return item.state
    return item.entries


def _module_entries(state: dict[Any, Any]) -> dict[Any, Any]:
    """What state_dict() of a module would list: parameters, lasting buffers, then modules."""
    parts = [state.get(key) for key in ("_parameters", "_buffers", "_modules")]
    parameters, buffers, modules = (part if isinstance(part, dict) else {} for part in parts)
    passing = state.get("_non_persistent_buffers_set")
    skipped = passing if isinstance(passing, list) and len(passing) <= len(buffers) else []
    names = {name for name in skipped if isinstance(name, str)}
    lasting = {name: None if name in names else buffer for name, buffer in buffers.items()}
    return {**parameters, **lasting, **modules}


def _children(entries: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, item in entries.items():
        if isinstance(item, Object) and str(item.made_by).startswith(_REBUILDERS):
            raise FlawError(
                f"has a tensor of a kind that is not supported, {printable(str(item.made_by))}"
            )
        if isinstance(item, StorageView | dict | Object):
            yield key, item


def _join(name: str, key: Any) -> str:
    last = key if isinstance(key, str) else _NO_TEXT
    joined = f"{name}.{last}" if name else last
    if len(joined) > _LONGEST_NAME:
        raise FlawError(f"has a name of more than {_LONGEST_NAME} letters, {printable(joined, 40)}")
    return joined


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
    policy = GlobalsPolicy(allow)
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


def _lazily(path: Path, views: dict[str, StorageView], pickle: Loaded) -> dict[str, LazyTensor]:
    found = {}
    for name, view in views.items():
        try:
            found[name] = _lazy(path, view, pickle)
        except FlawError as flaw:
            raise FlawError(f"{flaw} (tensor {name})") from flaw
    if sum(view.nbytes for view in views.values()) > _MOST_REPEATED * path.stat().st_size:
        raise FlawError(f"repeats its numbers until they fill {_MOST_REPEATED} times its own size")
    return found


def _lazy(path: Path, view: StorageView, pickle: Loaded) -> LazyTensor:
    place = pickle.place(view.storage)
    size = view.dtype.itemsize
    span = place.part(view.offset * size, view.reach * size) if view.reach else None

    def read() -> torch.Tensor:
        try:
            return _read(view, span)
        except (FlawError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    return LazyTensor(view.shape, view.dtype, read)


def _read(view: StorageView, span: Span | None) -> torch.Tensor:
    """The tensor as one contiguous block that is its own copy."""
    if span is None:
        return torch.empty(view.shape, dtype=view.dtype)
    numbers = torch.frombuffer(span.read(), dtype=view.dtype)
    return numbers.as_strided(view.shape, view.stride).contiguous()
