"""Task vectors by name: those that come with the built-in model, files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_cli.errors import UsageError
from atlas_cli.models.folders import read_tensors
from atlas_cli.sources.locate import (
    BUILTIN_VECTORS,
    locate,
    name_vectors,
    parse_reference,
    vector_file,
)
from atlas_cli.vectors.format import base_fingerprint, open_checked


@pytest.fixture(scope="module")
def fingerprint() -> str:
    source = locate(parse_reference("builtin:tiny"))
    return base_fingerprint(read_tensors(source), "visual")


@pytest.mark.parametrize("name", BUILTIN_VECTORS)
def test_a_builtin_vector_belongs_to_the_builtin_model_and_is_small(
    name: str, fingerprint: str
) -> None:
    vector = open_checked(vector_file(f"builtin:{name}"))
    assert vector.header.name == name
    assert vector.header.fingerprint == fingerprint
    assert vector.header.base["reference"] == "builtin:tiny"
    assert vector.header.finetuned["reference"] == f"./{name}.safetensors"  # nobody's own folder
    assert vector_file(f"builtin:{name}").stat().st_size < 700_000


def test_builtin_all_is_every_vector_but_the_controls() -> None:
    found = name_vectors(["builtin:all"])
    assert [one.text for one in found] == [f"builtin:{name}" for name in BUILTIN_VECTORS]
    assert {one.group for one in found} == {"builtin:all"}
    assert "everything" not in BUILTIN_VECTORS


def test_an_unknown_builtin_vector_is_told_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown task vector 'builtin:digit'.*digits"):
        vector_file("builtin:digit")


def test_a_folder_stands_for_the_vectors_in_it(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    found = name_vectors([str(tmp_path)])
    assert [Path(one.text).name for one in found] == ["a.safetensors", "b.safetensors"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such task vector: nothing"):
        name_vectors(["nothing.safetensors"])
    with pytest.raises(UsageError, match="holds no task vectors"):
        name_vectors([str(tmp_path)])


def test_a_builtin_vector_keeps_its_blocks_to_two_percent() -> None:
    vector = open_checked(vector_file("builtin:digits"))
    assert 0 < max(block.error for block in vector.header.blocks) < 0.02
