"""The layouts of pickled checkpoints: a zip archive, the older torch.save, a plain pickle."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from atlas_cli.io.pickles.archive import open_archive
from atlas_cli.io.pickles.machine import Machine
from atlas_cli.io.pickles.policy import (
    Allowance,
    ByteStream,
    FlawError,
    GlobalsPolicy,
    Span,
    printable,
    span_of,
)
from atlas_cli.io.pickles.rebuild import Storage, storage_of, tensor_calls

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_DEEPEST = 3


@dataclass(frozen=True)
class Loaded:
    """What a pickle describes, and where the numbers of its storages are."""

    value: Any
    place: Callable[[Storage], Span]


@dataclass(frozen=True)
class Context:
    """What all pickles of one file share, and how deep this one is inside the others."""

    policy: GlobalsPolicy
    allowance: Allowance
    depth: int = 0

    def machine(self, stream: ByteStream, persistent: Callable[[tuple[Any, ...]], Any]) -> Machine:
        """A machine that understands tensors, with storages in bytes read one level deeper."""
        calls = tensor_calls(self.policy, self.allowance, lambda span: load_storage(span, self))
        return Machine(stream, self.policy, calls, persistent)


def load_archive(path: Path, context: Context) -> dict[str, Loaded]:
    """The pickles of a zip archive: "data", and "constants" if it is a TorchScript one."""
    archive = open_archive(path)
    if "byteorder" in archive:
        _check_order(bytes(archive.member("byteorder").part(0, 3).read()) == b"lit")
    found = {}
    for name in ("data", "constants"):
        if f"{name}.pkl" in archive:
            value = _load_one(archive.member(f"{name}.pkl"), context)
            found[name] = Loaded(value, _member_place(archive.member, name))
    return found


def load_stream(span: Span, context: Context) -> Loaded:
    """A pickle outside a zip archive: of the older torch.save, or a plain one."""
    with span.open() as file:
        stream = ByteStream(span, file, context.allowance)
        first = context.machine(stream, storage_of).run()
        if first == _MAGIC and type(first) is int:
            return _load_legacy(stream, context)
    return Loaded(first, _no_place)


def load_storage(span: Span, context: Context) -> Storage:
    """A storage that was saved on its own into bytes, as a plain pickle does with each."""
    if context.depth >= _DEEPEST:
        raise FlawError(f"has storages within storages, more than {_DEEPEST} deep")
    loaded = load_stream(span, replace(context, depth=context.depth + 1))
    if not isinstance(loaded.value, Storage):
        raise FlawError("has bytes that should be a storage and are not")
    return replace(loaded.value, span=loaded.place(loaded.value))


def _load_one(span: Span, context: Context) -> Any:
    with span.open() as file:
        return context.machine(ByteStream(span, file, context.allowance), storage_of).run()


def _check_order(little: bool) -> None:
    if not little:
        raise FlawError("was written in big-endian byte order, which is not supported")


def _member_place(member: Callable[[str], Span], folder: str) -> Callable[[Storage], Span]:
    """Where a member holds a storage; a member that many tensors use is looked up once."""
    known = cache(member)

    def place(storage: Storage) -> Span:
        return storage.span or known(f"{folder}/{storage.key}").part(0, storage.nbytes)

    return place


def _no_place(storage: Storage) -> Span:
    if storage.span is None:
        raise FlawError("has a storage without its numbers")
    return storage.span


def _load_legacy(stream: ByteStream, context: Context) -> Loaded:
    """The rest of the older layout: version, system, object, storage keys, then the storages."""
    storages: dict[str, Storage] = {}

    def persistent(key: tuple[Any, ...]) -> Any:
        if len(key) == 4 and key[0] == "module":
            return key[1]
        storage = storage_of(key)
        if storages.setdefault(storage.key, storage) != storage:
            raise FlawError(f"describes the storage {printable(storage.key)} in two ways")
        return storage

    version, system, value, keys = (context.machine(stream, persistent).run() for _ in range(4))
    if version != _VERSION or not isinstance(system, dict):
        raise FlawError("has an unknown version of the older torch.save layout")
    _check_order(system.get("little_endian") is True)
    spans = _legacy_spans(stream, keys, storages)
    return Loaded(value, lambda storage: storage.span or _known(spans, storage))


def _legacy_spans(stream: ByteStream, keys: Any, storages: dict[str, Storage]) -> dict[str, Span]:
    """Where each storage lies; they follow one another, each after its length."""
    spans: dict[str, Span] = {}
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, str) or key not in storages or key in spans:
            raise FlawError("lists a storage that no tensor uses, or lists one twice")
        (length,) = struct.unpack("<q", stream.read(8))
        if length != storages[key].length:
            raise FlawError(f"has the storage {printable(key)} with another length than declared")
        spans[key] = stream.skip(storages[key].nbytes)
    return spans


def _known(spans: dict[str, Span], storage: Storage) -> Span:
    if storage.key not in spans:
        raise FlawError(f"has no numbers for the storage {printable(storage.key)}")
    return spans[storage.key]


def load(path: Path, context: Context) -> dict[str, Loaded]:
    """Every pickle of the file, by what it is for; raises FlawError if it has none."""
    if path.exists() and not path.is_file():
        raise FlawError("is not a file")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"PK\3\4"):
        return load_archive(path, context)
    for start, what in _IMPOSTORS.items():
        if head.lstrip().startswith(start):
            raise FlawError(f"is {what}, not a checkpoint; download it again")
    return {"data": load_stream(span_of(path), context)}


_IMPOSTORS = {b"version https://git-lfs": "a Git LFS pointer", b"<": "a web page"}
