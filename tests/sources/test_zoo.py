"""The table of the zoo: its form, its sets, and the names by which models are asked for."""

from __future__ import annotations

import re

import pytest

from atlas_cli.errors import UsageError
from atlas_cli.sources.locate import parse_reference
from atlas_cli.sources.model_files import WEIGHT_SUFFIXES
from atlas_cli.sources.zoo import find_entries, read_zoo

SIZES = {"vit-b-32": 20, "vit-b-32/8": 8, "vit-b-16": 20, "vit-l-14": 20}
SIZES |= {"vit-b-16-lora": 8, "vit-b-32/mar8": 8}


@pytest.fixture(autouse=True)
def no_own_sets(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_every_entry_names_base_repository_layout_and_source_of_the_fact():
    for name, entries in read_zoo().items():
        assert re.fullmatch(r"vit-[bl]-\d\d(-lora)?(/\w+)?", name)
        for entry in entries:
            assert parse_reference(entry.base).kind == "hub"
            reference = parse_reference(entry.address)
            assert (reference.kind, reference.name) == ("hub", entry.repository)
            assert reference.file == entry.file
            assert entry.file is not None
            assert entry.file.endswith(WEIGHT_SUFFIXES)
            assert entry.format
            assert entry.source.startswith("https://huggingface.co/")
            assert entry.megabytes is not None
            assert 0 < entry.megabytes < 2000
            assert "{" not in entry.repository + entry.file
            assert find_entries(entry.name) == (entry,)


def test_the_sets_have_their_tasks():
    found = {name: len(find_entries(f"zoo:{name}")) for name in SIZES}
    assert found == SIZES
    eight = [entry.task for entry in find_entries("zoo:vit-b-32/8")]
    assert [entry.task for entry in find_entries("zoo:vit-b-32")][:8] == eight
    (cars,) = find_entries("zoo:vit-b-32/mar8/Cars")
    assert cars.file == "finetune/ViT-B-32/openai/Cars/full.pt"
    (mnist,) = find_entries("zoo:vit-l-14/mnist")
    assert mnist.repository == "tanganke/clip-vit-large-patch14_mnist"


def test_models_have_the_names_that_people_type():
    for text in ("ViT-B-32/openai", "ViT-B-32,openai"):
        found = parse_reference(text)
        assert (found.kind, found.name, found.tag) == ("open_clip", "ViT-B-32", "openai")
    found = parse_reference("hf-hub:timm/ViT-B-16-SigLIP")
    assert (found.kind, found.name) == ("hub", "timm/ViT-B-16-SigLIP")
    with pytest.raises(UsageError, match=r"ViT-B-32: which weights\? for example ViT-B-32/openai"):
        parse_reference("ViT-B-32")
    with pytest.raises(UsageError, match="no weights 'opnai' for ViT-B-32; did you mean 'openai'"):
        parse_reference("ViT-B-32,opnai")
