"""Weight files in and out, tensor by tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from atlas_cli.errors import CheckpointError
from atlas_cli.io.checkpoint import TensorStream, open_safetensors, open_tensors, read_metadata

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, shape, generator=random).to(dtype)


def stream(path: Path, tensors: dict[str, torch.Tensor], room: int = 5000) -> int:
    with path.open("wb") as file:
        writer = TensorStream(file, room)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish({"format": "pt", "note": "é"})


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """All dtypes, scalars, nothing at all, and sizes that leave the next one unaligned."""
    found = {str(dtype): some(dtype, 3, 5) for dtype in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "one": torch.ones(1)}


def test_a_stream_is_read_by_safetensors_and_by_us(tmp_path: Path, tensors):
    path = tmp_path / "x.safetensors"
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), **tensors}
    assert stream(path, tensors) == path.stat().st_size
    theirs, ours = load_file(path), open_safetensors(path)
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name].read(), tensor)
        assert (ours[name].shape, ours[name].dtype) == (tuple(tensor.shape), tensor.dtype)
    assert read_metadata(path) == {"format": "pt", "note": "é"}
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)


def test_a_strided_tensor_is_written_by_value(tmp_path: Path):
    whole = torch.arange(12.0).reshape(3, 4)
    stream(tmp_path / "x.safetensors", {"t": whole.T, "c": whole[:, 1]})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["t"], whole.T)
    assert torch.equal(found["c"], whole[:, 1])


def test_data_starts_at_a_multiple_of_eight(tmp_path: Path):
    for room in (200, 201, 207, 208):
        stream(tmp_path / "x.safetensors", {"a": torch.ones(2)}, room)
        content = (tmp_path / "x.safetensors").read_bytes()
        assert int.from_bytes(content[:8], "little") % 8 == 0
        assert content[8:9] == b"{"


def test_too_little_room_is_our_mistake(tmp_path: Path):
    with pytest.raises(ValueError, match="in room for 16"):
        stream(tmp_path / "x.safetensors", {"a": torch.ones(2)}, 16)


def test_what_is_read_belongs_to_the_reader(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    before = path.read_bytes()
    tensor = open_safetensors(path)["a"]
    tensor.read().add_(1)
    assert tensor.read().tolist() == [0, 0, 0]
    assert path.read_bytes() == before


def test_a_tensor_outlives_its_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(5.0)}, path)
    lazy = open_safetensors(path)["a"]
    values = lazy.read()
    path.unlink()
    assert values.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        lazy.read()


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    lazy = open_safetensors(path)["a"]
    save_file({"a": torch.ones(300)}, path)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        lazy.read()


def test_pickles_may_hold_names_that_are_allowed(tmp_path: Path):
    import time

    torch.save({"a": torch.ones(2), "when": time.strptime("2024", "%Y")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"refuses to load time\.struct_time"):
        open_tensors([tmp_path / "x.pt"])
    found = open_tensors([tmp_path / "x.pt"], allow=["time.struct_time"])
    assert found["a"].read().tolist() == [1, 1]


def test_a_file_that_is_cut_short_while_its_tensors_are_in_use_ends_nothing(tmp_path: Path):
    """A mapped file would end the process by SIGBUS when its pages are first touched."""
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(100_000)}, path)
    opened = open_safetensors(path)["w"]
    tensor = opened.read()
    with path.open("r+b") as file:
        file.truncate(100)
    assert tensor.sum() == 100_000
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        opened.read()


HEADERS = {
    "no object": b"[]",
    "something else than text": b'{"__metadata__":{"a":1}}',
    "x begins at byte 4, where 0": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "and the file has room for 8": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "8 bytes, which its shape": b'{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "x has no dtype, shape": b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}',
    "y has no dtype, shape": b'{"y":3}',
    "z ends before it begins": b'{"z":{"dtype":"F4","shape":[0],"data_offsets":[8,0]}}',
}


def test_a_header_that_does_not_describe_the_data_is_refused(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    for message, header in HEADERS.items():
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointError, match=message):
            open_safetensors(path)
        with pytest.raises(SafetensorError):  # the library says so, too
            safe_open(path, framework="np").__enter__()


def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(100)}, path)
    found = open_safetensors(path)["a"]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: changed while it was being read"):
        found.read()


def test_a_pipe_in_the_place_of_a_weight_file_is_refused_and_nobody_waits_for_it(tmp_path: Path):
    for name in ("a.safetensors", "a.pt"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match="is not a"):
            open_tensors([tmp_path / name])
