"""The task-vector file: what is written is read, and a file that lies is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from makers import lora, random_values, write_vector
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_cli.core.storage import Dense, Factors, Quantised, decode, quantise
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.io.tensors import LazyTensor
from atlas_cli.vectors.format import (
    base_fingerprint,
    belongs,
    check_same_base,
    in_scope,
    open_vector,
    read_header,
)
from atlas_cli.vectors.writer import stored_tensors


def test_dense_quantised_and_low_rank_blocks_come_back(tmp_path: Path):
    values = random_values()
    blocks = {
        "visual.proj": Dense(values["visual.proj"].half()),
        "visual.class_embedding": quantise(values["visual.class_embedding"]),
        "visual.x": lora(0),
    }
    vector = open_vector(write_vector(tmp_path / "v.safetensors", blocks))
    assert vector.names == list(blocks)
    assert [block.storage for block in vector.header.blocks] == ["fp16", "int8", "factors"]
    kinds = [type(vector.read(name)) for name in vector.names]
    assert kinds == [Dense, Quantised, Factors]
    for name, block in blocks.items():
        assert torch.equal(decode(vector.read(name)), decode(block))


def test_stored_names_say_what_a_tensor_is():
    assert list(stored_tensors("w", Dense(torch.ones(2)))) == ["w"]
    assert list(stored_tensors("w", quantise(torch.ones(2, 2)))) == ["w", "w#scale"]
    names = [f"w#{kind}{number}" for number in range(3) for kind in ("up", "down")]
    assert list(stored_tensors("w", lora(0))) == names


def test_another_file_is_told_how_to_become_a_vector(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="is not a task vector; make one with: atlas extract"):
        read_header(path)


def rewrite(path: Path, change) -> Path:
    """The same file with another header."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    header = json.loads(metadata["atlas"])
    header = change(header) or header
    save_file(load_file(path), path, metadata | {"atlas": json.dumps(header)})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(version=2), r"is atlas\.task_vector version 2; this atlas reads"),
        (lambda h: h.update(format="other"), "is other version 1; this atlas reads"),
        (lambda h: h.pop("scope") and None, "its task-vector header is damaged"),
        (lambda h: h.update(more=1), "its task-vector header is damaged"),
        (lambda h: [1], "its task-vector header is damaged"),
        (lambda h: h["blocks"][0].pop("norm") and None, "its task-vector header is damaged"),
        (lambda h: h["blocks"][0].update(name="none"), "block none is not stored as its header"),
        (lambda h: h["blocks"][0].update(shape=[1]), "is not stored as its header says"),
        (lambda h: h["blocks"][0].update(storage="int8"), "is not stored as its header says"),
        (
            lambda h: h["blocks"][0].update(storage="factors", starts=[0]),
            "is not stored as its header says",
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change, message: str):
    path = write_vector(tmp_path / "v.safetensors", random_values())
    with pytest.raises(CheckpointError, match=message):
        open_vector(rewrite(path, change))


def test_vectors_of_one_base_pass_and_of_two_are_refused(tmp_path: Path):
    first, second = (
        write_vector(tmp_path / f"{name}.safetensors", random_values(), fingerprint=name * 64)
        for name in "ab"
    )
    headers = {"x": read_header(first), "y": read_header(first)}
    check_same_base(headers)
    with pytest.raises(MismatchError, match="z and x were taken from different base models"):
        check_same_base(headers | {"z": read_header(second)})


def test_a_scope_is_the_image_tower_the_rest_or_both():
    names = ["visual.proj", "logit_scale", "transformer.x", "visual_projection"]
    tensor = LazyTensor((1,), torch.float32, lambda: torch.ones(1))
    tensors = dict.fromkeys(names, tensor)
    tensors["visual.count"] = LazyTensor((), torch.int64, lambda: torch.tensor(1))
    assert list(in_scope(tensors, "visual")) == names[:1]
    assert list(in_scope(tensors, "text")) == names[1:]
    assert list(in_scope(tensors, "all")) == names
    assert belongs("visual.count", "visual")
    assert base_fingerprint(tensors, "visual") != base_fingerprint(tensors, "text")
