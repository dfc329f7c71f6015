"""One grammar of model references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atlas_cli.errors import AtlasError, CheckpointError, UsageError
from atlas_cli.io.files import sha256_of
from atlas_cli.sources.locate import choose_weights, locate, parse_reference
from atlas_cli.sources.open_clip_table import open_clip_repository, open_clip_tags
from atlas_cli.sources.reference import Reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("builtin:tiny", {"kind": "builtin", "name": "tiny"}),
        ("ViT-B-32/openai", {"kind": "open_clip", "name": "ViT-B-32", "tag": "openai"}),
        ("laion/CLIP-B", {"kind": "hub", "name": "laion/CLIP-B"}),
        ("laion/CLIP-B@main", {"kind": "hub", "name": "laion/CLIP-B", "revision": "main"}),
        ("a/b/c/d.pt@refs/pr/1", {"name": "a/b", "file": "c/d.pt", "revision": "refs/pr/1"}),
        ("hf://openai/clip", {"kind": "hub", "name": "openai/clip"}),
        ("hf-hub:openai/clip", {"kind": "hub", "name": "openai/clip"}),
    ],
)
def test_a_reference_is_understood(text: str, expected: dict[str, str]):
    assert parse_reference(text) == Reference(text, **({"kind": "hub"} | expected))


def test_a_folder_that_exists_wins_over_a_hub_repository(tmp_path: Path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_reference("owner/name").kind == "path"
    assert parse_reference("hf://owner/name").kind == "hub"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("builtin:tyni", "did you mean 'tiny'?"),
        ("ViT-B-31/openai", "did you mean 'ViT-B-32'?"),
        ("vit-b-32/openai", "did you mean 'ViT-B-32'?"),
        ("ViT-B-32/opennai", "did you mean 'openai'?"),
        ("ViT-B-32", "it has: openai"),
        ("ViTB32", "did you mean 'ViT-B-32'?"),
        ("./missing", "no such file or folder: ./missing"),
        ("owner/name@", "names no revision"),
        ("owner//x", "is no model reference"),
        ("nonsense", "a model is builtin:tiny"),
    ],
)
def test_what_cannot_be_a_model_is_refused_with_a_way_out(text: str, message: str):
    with pytest.raises(UsageError) as caught:
        parse_reference(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_architectures_and_tags_are_those_of_open_clip_itself():
    from atlas_cli.models.open_clip_import import import_open_clip

    open_clip = import_open_clip()
    ours = {(name, tag) for name, tags in open_clip_tags().items() for tag in tags}
    theirs = set(open_clip.list_pretrained())
    assert theirs <= ours
    assert set(open_clip_tags()) == set(open_clip.list_models())
    for name, tag in ours:
        listed = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "").strip("/")
        assert (open_clip_repository(name, tag) or "") == listed, (name, tag)


def test_safetensors_are_preferred_and_ambiguity_is_an_error():
    assert choose_weights(["pytorch_model.bin", "model.safetensors"], "x") == "model.safetensors"
    assert choose_weights(["only.safetensors", "notes.txt"], "x") == "only.safetensors"
    with pytest.raises(AtlasError, match=r"found several: a\.pt, b\.pt"):
        choose_weights(["b.pt", "a.pt"], "x")
    with pytest.raises(AtlasError, match="x: expected one weight file, found none"):
        choose_weights(["notes.txt"], "x")


def test_a_source_knows_the_sha256_of_every_weight_file(open_clip_folder: Path):
    source = locate(parse_reference(str(open_clip_folder)))
    weights = open_clip_folder / "open_clip_model.safetensors"
    assert source.provenance() == {
        "reference": str(open_clip_folder),
        "commit": None,
        "sha256": {"open_clip_model.safetensors": sha256_of(weights)},
    }


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a\\..\\b"])
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, shard: str):
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        locate(parse_reference(str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', "[" * 100_000])
def test_a_damaged_index_is_named(tmp_path: Path, text: str):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        locate(parse_reference(str(tmp_path)))
