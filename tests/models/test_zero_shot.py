"""The zero-shot head is open_clip's, and is computed once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import write_open_clip
from safetensors.torch import save_file

from atlas_cli.io.files import cache_folder
from atlas_cli.models.clip import Clip, compute_head, logits_of, open_model, zero_shot_head
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import locate, parse_reference

CLASSES = [f"thing {number}" for number in range(23)] + ["cat", "{odd}"]
TEMPLATES = ["a photo of a {}.", "{} seen from above"]


@pytest.fixture
def clip(open_clip_folder: Path) -> Clip:
    return open_model(locate(parse_reference(str(open_clip_folder))))


def silent(message: str) -> None:
    raise AssertionError(message)


def test_the_weights_are_those_of_open_clip_times_the_logit_scale(clip: Clip):
    classifier = import_open_clip().build_zero_shot_classifier(
        clip.module, clip.tokenize, CLASSES, TEMPLATES
    )
    head = compute_head(clip, CLASSES, TEMPLATES)
    scale = clip.module.logit_scale.exp()
    torch.testing.assert_close(head / scale, classifier.T, atol=1e-6, rtol=0)


def heads() -> list[Path]:
    return sorted((cache_folder() / "heads").glob("*"))


def test_a_head_is_cached_by_content(clip: Clip, tmp_path: Path):
    first = zero_shot_head(clip, CLASSES, TEMPLATES, silent)
    assert len(heads()) == 1
    assert torch.equal(first, zero_shot_head(clip, CLASSES, TEMPLATES, silent))
    assert len(heads()) == 1
    zero_shot_head(clip, CLASSES, TEMPLATES[:1], silent)
    zero_shot_head(clip, CLASSES[::-1], TEMPLATES, silent)
    other = write_open_clip(tmp_path / "other", seed=1)
    zero_shot_head(open_model(locate(parse_reference(str(other)))), CLASSES, TEMPLATES, silent)
    assert len(heads()) == 4


def test_the_image_tower_does_not_matter_to_a_head(clip: Clip):
    zero_shot_head(clip, CLASSES, TEMPLATES, silent)
    with torch.no_grad():
        clip.module.visual.proj.mul_(2)
    zero_shot_head(clip, CLASSES, TEMPLATES, silent)
    assert len(heads()) == 1


def test_a_damaged_head_is_computed_again_and_said(clip: Clip):
    first = zero_shot_head(clip, CLASSES, TEMPLATES, silent)
    heads()[0].write_bytes(b"damaged")
    said: list[str] = []
    assert torch.equal(first, zero_shot_head(clip, CLASSES, TEMPLATES, said.append))
    assert len(said) == 1
    assert "damaged" in said[0]
    assert torch.equal(first, zero_shot_head(clip, CLASSES, TEMPLATES, silent))


def test_another_tokenizer_makes_another_head(clip: Clip):
    """Same text tower, same configuration, other tokens."""
    first = zero_shot_head(clip, CLASSES, TEMPLATES, silent)

    class Shifted:
        encoder = "another"

        def __call__(self, texts: list[str]) -> torch.Tensor:
            tokens = clip.tokenize(texts)
            return torch.where(tokens > 0, (tokens + 7) % 49408, tokens)

    other = zero_shot_head(
        dataclasses.replace(clip, tokenize=Shifted()), CLASSES, TEMPLATES, silent
    )
    assert len(heads()) == 2
    assert not torch.equal(first, other)


def test_a_head_that_is_not_what_was_written_is_computed_again(clip: Clip):
    first = zero_shot_head(clip, CLASSES, TEMPLATES, silent)
    path = heads()[0]
    damages = (first * float("nan"), first[:3], first[0], first * 2, first.long())
    for damaged in damages:
        save_file({"weight": damaged.contiguous()}, path, {"sha256": "0" * 64})
        said: list[str] = []
        assert torch.equal(first, zero_shot_head(clip, CLASSES, TEMPLATES, said.append))
        assert said == [f"{path}: damaged, computed again"]
    path.unlink()
    path.symlink_to(path)
    said = []
    assert torch.equal(first, zero_shot_head(clip, CLASSES, TEMPLATES, said.append))
    assert len(said) == 1


def test_logits_do_not_depend_on_the_length_of_features():
    head = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    for features in ([3.0, 4.0], [0.3, 0.4]):
        logits = logits_of(torch.tensor([features]), head)
        torch.testing.assert_close(logits, torch.tensor([[6.0, 8.0]]))
