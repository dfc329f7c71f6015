"""Weight files in and out, tensor by tensor, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from atlas_cli.errors import CheckpointError
from atlas_cli.files import whole_file
from atlas_cli.pickles import open_pickle
from atlas_cli.tensors import LazyTensor

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


def open_tensors(files: Iterable[Path]) -> dict[str, LazyTensor]:
    """The named tensors of one checkpoint, kept in one file or in several shards."""
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        found = open_safetensors(path) if path.suffix == ".safetensors" else open_pickle(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{path}: {twice[0]} is also in another shard")
        tensors |= found
    return tensors


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file, memory-mapped: each is read when it is asked for."""
    with _explained(path):
        file = safe_open(path, framework="pt")
        return {name: _lazy(path, file, name) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """The string metadata of a safetensors file; empty for any other kind of file."""
    if path.suffix != ".safetensors":
        return {}
    with _explained(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _lazy(path: Path, file: safe_open, name: str) -> LazyTensor:
    part = file.get_slice(name)
    dtype = _DTYPES.get(part.get_dtype())
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {part.get_dtype()}, which atlas lacks")

    def read() -> torch.Tensor:
        with _explained(path):
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return LazyTensor(tuple(part.get_shape()), dtype, read)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. Its name appears only when it is complete."""
    with whole_file(path) as temporary:
        save_file(dict(tensors), temporary, {"format": "pt", **(metadata or {})})


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what safetensors raises into one line that names the file."""
    try:
        yield
    except SafetensorError as problem:
        raise CheckpointError(f"{path}: is not a valid safetensors file: {problem}") from problem
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem.strerror or problem}") from problem
