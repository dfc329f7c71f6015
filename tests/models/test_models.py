"""Models are built from what their source says, and checked against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_CONFIG, write_open_clip
from safetensors.torch import load_file, save_file

from atlas_cli.errors import AtlasError, MismatchError, UsageError
from atlas_cli.models.clip import Opening, open_model
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.parallel import choose_device
from atlas_cli.sources.locate import locate, parse_reference

WEIGHTS = "open_clip_model.safetensors"


def open_path(path: Path, opening: Opening | None = None):
    return open_model(locate(parse_reference(str(path))), opening)


def test_a_folder_gives_the_model_that_open_clip_itself_opens(open_clip_folder: Path):
    theirs, _, transform = import_open_clip().create_model_and_transforms(
        f"local-dir:{open_clip_folder}"
    )
    clip = open_path(open_clip_folder)
    ours, wanted = clip.module.state_dict(), theirs.state_dict()
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():  # a processor may add in another order where weights lie otherwise
        found, features = (m.encode_image(images) for m in (clip.module, theirs.eval()))
        torch.testing.assert_close(found, features, rtol=1e-5, atol=1e-5)
    assert repr(clip.preprocess) == repr(transform)


def test_opening_a_model_says_nothing(open_clip_folder: Path, capfd: pytest.CaptureFixture[str]):
    open_path(open_clip_folder)
    assert capfd.readouterr() == ("", "")


def test_nothing_requires_a_gradient_and_dropout_is_off(open_clip_folder: Path):
    module = open_path(open_clip_folder).module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module.", "model."])
def test_training_wrappers_are_seen_through(open_clip_folder: Path, wrapper: str):
    before = open_path(open_clip_folder).module.state_dict()
    tensors = load_file(open_clip_folder / WEIGHTS)
    save_file({wrapper + name: t for name, t in tensors.items()}, open_clip_folder / WEIGHTS)
    after = open_path(open_clip_folder).module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"visual.proj": torch.zeros(64, 31)}),
            r"visual\.proj has shape \(64, 31\), expected \(64, 32\)",
        ),
        (lambda t: t.pop("visual.proj"), r"visual\.proj is missing"),
        (lambda t: t.update({"visual.more": torch.zeros(1)}), r"visual\.more is unknown"),
        (
            lambda t: t.update({"visual.positional_embedding": torch.zeros(10, 64)}),
            r"positional_embedding has shape \(10, 64\), expected \(5, 64\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_listed(open_clip_folder: Path, change, message: str):
    tensors = load_file(open_clip_folder / WEIGHTS)
    change(tensors)
    save_file(tensors, open_clip_folder / WEIGHTS)
    with pytest.raises(MismatchError, match=message):
        open_path(open_clip_folder)


def test_only_the_first_mismatches_are_listed(open_clip_folder: Path):
    tensors = load_file(open_clip_folder / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if "ln_" not in name}
    save_file(kept, open_clip_folder / WEIGHTS)
    with pytest.raises(MismatchError, match=r"is missing \(and \d+ more\)"):
        open_path(open_clip_folder)


def test_a_declared_activation_must_be_the_one_of_the_configuration(open_clip_folder: Path):
    tensors = load_file(open_clip_folder / WEIGHTS)
    save_file(tensors, open_clip_folder / WEIGHTS, {"activation": "quick_gelu"})
    with pytest.raises(
        MismatchError,
        match=r"metadata of .* weights use QuickGELU, but its configuration uses GELU",
    ):
        open_path(open_clip_folder)


def test_quick_gelu_is_used_when_the_source_says_so(tmp_path: Path):
    plain = write_open_clip(tmp_path / "plain")
    quick = write_open_clip(tmp_path / "quick", TINY_CONFIG | {"quick_gelu": True})
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        ours = [open_path(folder).module.encode_image(images) for folder in (plain, quick)]
    assert not torch.allclose(*ours, atol=1e-4)


def test_a_bare_weight_file_needs_an_architecture(open_clip_folder: Path):
    (open_clip_folder / "open_clip_config.json").unlink()
    with pytest.raises(UsageError, match="name it with --arch, for example --arch ViT-B-32"):
        open_path(open_clip_folder / WEIGHTS)
    with pytest.raises(MismatchError, match="do not fit the architecture"):
        open_path(open_clip_folder / WEIGHTS, Opening(architecture="RN50"))


def test_preprocessing_for_another_size_is_refused(open_clip_folder: Path):
    path = open_clip_folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["preprocess_cfg"]["size"] = 64
    path.write_text(json.dumps(config))
    with pytest.raises(AtlasError, match="preprocessed to 64 pixels but the image tower takes 32"):
        open_path(open_clip_folder)


def test_a_device_that_is_not_there_is_an_error():
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(AtlasError, match="--device cuda: this torch sees no cuda device"):
            choose_device("cuda")


def test_half_precision_weights_are_computed_in_float32(open_clip_folder: Path):
    tensors = {name: t.half() for name, t in load_file(open_clip_folder / WEIGHTS).items()}
    save_file(tensors, open_clip_folder / WEIGHTS)
    module = open_path(open_clip_folder).module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
