"""Weight files in and out, tensor by tensor, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.io.files import open_regular, whole_file
from atlas_cli.io.pickles import open_pickle
from atlas_cli.io.tensors import FileSpan, LazyTensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_LARGEST_HEADER = 16 * 2**20  # bytes; a large model has one of a few hundred thousand
# How the names of tensors end in a model that was quantised, and by what.
_PACKED = {
    r"\.(qweight|qzeros|g_idx)": "GPTQ or AWQ",
    r"\.weight_packed": "compressed-tensors",
    r"\.(absmax|quant_map|nested_absmax|quant_state\.\w+|SCB)": "bitsandbytes",
    r"\.(weight_scale|weight_scale_inv)": "fp8 or int8 with scales",
    r"\.(W_q|_data)": "HQQ or quanto",
}
_DEQUANTISE = (
    "dequantise it first, or take the model that it was made from (transformers: "
    "from_pretrained(MODEL).dequantize().save_pretrained(FOLDER))"
)


def open_tensors(files: Iterable[Path], allow: Collection[str] = ()) -> dict[str, LazyTensor]:
    """The named tensors of one checkpoint, kept in one file or in several shards.

    `allow` lists further globals that a pickle may mention; they are never called.
    """
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        _check_format(path)
        safe = path.suffix == ".safetensors"
        found = open_safetensors(path) if safe else open_pickle(path, allow=allow)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{path}: {twice[0]} is also in another shard")
        _check_unpacked(path, found)
        tensors |= found
    return tensors


def _check_format(path: Path) -> None:
    with _explained(path), open_regular(path) as file:
        if file.read(4) == b"GGUF":
            raise CheckpointError(
                f"{path}: is a GGUF file, which llama.cpp runs; atlas merges safetensors and "
                "PyTorch files: take the model that it was converted from"
            )


def _check_unpacked(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Raise CheckpointError for quantised weights: what is packed in integers cannot be added."""
    for name, tensor in tensors.items():
        kinds = [kind for end, kind in _PACKED.items() if re.search(f"{end}$", name)]
        whole = not tensor.dtype.is_floating_point and len(tensor.shape) > 1
        if kinds or (whole and name.endswith(".weight")):
            kind = kinds[0] if kinds else str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{path}: {name} is quantised ({kind}); {_DEQUANTISE}")


# Reading safetensors --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    place: FileSpan
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """The tensor, copied: a mapped file that another program cuts short ends this one."""
        return self.read_part(0, math.prod(self.shape)).reshape(self.shape)

    def read_part(self, start: int, stop: int) -> torch.Tensor:
        """Some elements, copied."""
        values = torch.empty(stop - start, dtype=self.dtype)
        content: Any = values.view(torch.uint8).numpy() if len(values) else b""
        room = memoryview(content)
        with self._opened() as file:
            file.seek(self.place.start + start * self.dtype.itemsize)
            while len(room):
                if not (count := file.readinto(room)):
                    raise self._changed()
                room = room[count:]
        return values

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: changed while it was being read")

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        """The file, if it is still the one whose header was read."""
        with _explained(self.path), FileIO(self.path) as file:
            if _stamp(file) != self.place.stamp:
                raise self._changed()
            yield file


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file, each read when it is asked for."""
    with _explained(path), open_regular(path) as file:
        header, start = _read_header(path, file)
        stamp = _stamp(file)
    header.pop(_METADATA, None)
    tensors = {}
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        entry = header[name]
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            way = f"; {_DEQUANTISE}" if entry["dtype"].startswith("F8") else ""
            kind = f"has dtype {entry['dtype']}, which atlas lacks{way}"
            raise CheckpointError(f"{path}: {name} {kind}")
        shape = tuple(entry["shape"])
        place = FileSpan(os.fsencode(path), stamp, start + entry["data_offsets"][0])
        stored = _Stored(path, place, shape, dtype)
        tensors[name] = LazyTensor(shape, dtype, stored.read, stored.read_part, place)
    return tensors


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, checked, and where its data starts."""
    head, size = file.read(8), os.fstat(file.fileno()).st_size
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    try:
        if not length:
            raise ValueError(f"it has no header, and {size} bytes in all")
        if length > _LARGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"its header cannot be read: {problem}") from problem
        _check_header(header, size - 8 - length)
    except ValueError as problem:
        raise CheckpointError(f"{path}: is not a valid safetensors file: {problem}") from problem
    return header, 8 + length


def _check_header(header: Any, size: int) -> None:
    """Raise ValueError unless tensors cover the data from its start to its end, each once."""
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata holds something else than text")
    spans = [_span(name, entry) for name, entry in header.items() if name != _METADATA]
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ValueError(f"{name} begins at byte {start}, where {end} is expected")
        end = stop
    if end != size:
        raise ValueError(f"its tensors have {end} bytes, and the file has room for {size}")


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """The first byte of a tensor and that after its last. Raises ValueError for another entry."""
    try:
        word, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or not isinstance(word, str) or len(shape) > _DIMENSIONS:
        raise ValueError(f"{name} has no dtype, shape and data_offsets that make a tensor")
    if word in _DTYPES and stop - start != math.prod(shape) * _DTYPES[word].itemsize:
        raise ValueError(f"{name} has {stop - start} bytes, which its shape does not take")
    if stop < start:
        raise ValueError(f"{name} ends before it begins")
    return start, stop, name


_METADATA = "__metadata__"
_DIMENSIONS = 64  # of a tensor, as numpy has them at most


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {key!r} twice")
        found[key] = value
    return found


def _stamp(file: BinaryIO | FileIO) -> tuple[int, int, int, int]:
    status = os.fstat(file.fileno())
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_metadata(path: Path) -> dict[str, str]:
    """The string metadata of a safetensors file; empty for any other kind of file."""
    if path.suffix != ".safetensors":
        return {}
    with _explained(path), open_regular(path) as file:
        return dict(_read_header(path, file)[0].get(_METADATA, {}))


# Writing --------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file: the same bytes for the same tensors, whole or not at all."""
    text = {"format": "pt", **(metadata or {})}
    largest_first = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with whole_file(path) as temporary, temporary.open("wb") as file:
        stream = TensorStream(file, _room(tensors, text))
        for name in largest_first:
            stream.add(name, tensors[name])
        stream.finish(text)


def _room(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """Bytes that the header of these tensors does not exceed."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    entries = {
        name: {"dtype": WORDS[t.dtype], "shape": list(t.shape), "data_offsets": [total, total]}
        for name, t in tensors.items()
    }
    return len(header_text(entries, metadata))


class TensorStream:
    """A safetensors file written tensor by tensor. The header is filled in at the end.

    The format has its header first, so room is left for it; what is not needed stays blank.
    """

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file = file
        self._room = -(-room // 8) * 8  # data starts at a multiple of 8
        self._entries: dict[str, Any] = {}
        self._length = 0
        file.write(bytes(8 + self._room))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor after those before it."""
        content: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(content)
        place = [self._length, self._length + len(content)]
        word = WORDS[tensor.dtype]
        self._entries[name] = {"dtype": word, "shape": list(tensor.shape), "data_offsets": place}
        self._length = place[1]

    def finish(self, metadata: Mapping[str, str]) -> int:
        """Write the header, and give the length of the file."""
        header = header_text(self._entries, metadata)
        if len(header) > self._room:
            raise ValueError(f"a header of {len(header)} bytes in room for {self._room}")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        return 8 + self._room + self._length


def header_text(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, without the length before it."""
    text = {_METADATA: dict(metadata), **entries}
    return json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the system into one line that names the file."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror or problem}") from problem


# Names ----------------------------------------------------------------------------------------

_WRAPPERS = ("module.", "_orig_mod.", "model.", "image_encoder.")


def unwrapped(name: str) -> str:
    """A name without the prefixes that training wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def digest_of(tensor: torch.Tensor) -> str:
    """The sha256 of a tensor's values."""
    content: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def digest_of_tensors(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of a text and of named tensors, in the order of their names."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest_of(tensor)}".encode())
    return found.hexdigest()
