"""A transformers CLIP and its open_clip twin are one model."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import HALF, write_open_clip
from hub import Hub

from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.models.clip import Clip, Opening, open_model
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import locate, parse_reference

import_open_clip()  # mends torchvision, which transformers imports too
transformers = importlib.import_module("transformers")
IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
PROCESSOR = {
    "image_mean": HALF["mean"],
    "image_std": HALF["std"],
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "resample": 3,
}


def small_config(activation: str = "quick_gelu") -> transformers.CLIPConfig:
    tower = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": activation,
    }
    vision = {**tower, "image_size": 32, "patch_size": 16}
    text = {**tower, "max_position_embeddings": 16, "vocab_size": 49408}
    return transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)


def save(model: torch.nn.Module, folder: Path, shard: str = "2MB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A random CLIPModel and the folder that transformers wrote it to, in shards."""
    torch.manual_seed(0)
    model = transformers.CLIPModel(small_config()).eval()
    folder = save(model, tmp_path_factory.mktemp("transformers"))
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return model, folder


def features(clip: Clip) -> torch.Tensor:
    with torch.inference_mode():
        return clip.module.encode_image(IMAGES)


def expected(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found = model.get_image_features(pixel_values=IMAGES)
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def open_path(path: Path, opening: Opening | None = None) -> Clip:
    return open_model(locate(parse_reference(str(path))), opening)


def test_image_features_of_a_sharded_clip_model_are_equal(twin):
    model, folder = twin
    torch.testing.assert_close(features(open_path(folder)), expected(model), atol=1e-5, rtol=1e-5)


def test_text_features_of_a_sharded_clip_model_are_equal(twin):
    model, folder = twin
    clip = open_path(folder)
    tokens = clip.tokenize(["a photo of a cat.", "two dogs"])
    with torch.inference_mode():
        ours = clip.module.encode_text(tokens)
        found = model.get_text_features(input_ids=tokens, attention_mask=(tokens > 0).long())
    theirs = found if isinstance(found, torch.Tensor) else found.pooler_output
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(clip.module.logit_scale, model.logit_scale)


@pytest.mark.slow
def test_image_features_from_the_hub_are_equal(twin, tmp_path: Path, run_python):
    model, folder = twin
    with Hub() as hub:
        commit = hub.add("me/clip", folder, tags=["v1"])
        for revision in ("main", "v1", commit):
            saved = tmp_path / f"{revision}.pt"
            run_python(
                "import sys, torch\n"
                "from atlas_cli.models.clip import open_model\n"
                "from atlas_cli.sources.locate import locate\n"
                "from atlas_cli.sources.locate import parse_reference\n"
                "source = locate(parse_reference(sys.argv[1]))\n"
                "assert source.commit == sys.argv[3], source.commit\n"
                "images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))\n"
                "found = open_model(source).module.encode_image(images * 2 - 1)\n"
                "torch.save(found, sys.argv[2])",
                *(f"me/clip@{revision}", str(saved), commit),
                **hub.env(tmp_path / "home"),
                HF_HUB_OFFLINE="0",
            )
            torch.testing.assert_close(torch.load(saved), expected(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_an_image_tower_alone_takes_the_text_tower_of_another_model(
    twin, tmp_path: Path, prefix: str
):
    from safetensors.torch import save_file

    model, folder = twin
    torch.manual_seed(1)
    tower = transformers.CLIPVisionModel(small_config().vision_config).eval()
    tower.save_pretrained(tmp_path)
    tensors = {
        prefix + name.removeprefix("vision_model."): tensor
        for name, tensor in tower.state_dict().items()
        if "position_ids" not in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    text = locate(parse_reference(str(folder)))
    clip = open_path(tmp_path, Opening(text=text))
    with torch.inference_mode():
        pooled = tower(pixel_values=IMAGES).pooler_output
        wanted = model.visual_projection(pooled)
    torch.testing.assert_close(features(clip), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="has an image tower only; name the model"):
        open_path(tmp_path)


def test_an_image_tower_does_not_fit_a_text_tower_of_another_activation(twin, tmp_path: Path):
    tower = transformers.CLIPVisionModel(small_config("gelu").vision_config)
    tower.save_pretrained(tmp_path)
    text = locate(parse_reference(str(twin[1])))
    with pytest.raises(MismatchError, match=r"config.json says the weights use GELU, but --text"):
        open_path(tmp_path, Opening(text=text))


def test_gelu_and_quick_gelu_come_from_the_configuration(tmp_path: Path):
    torch.manual_seed(0)
    model = transformers.CLIPModel(small_config("gelu")).eval()
    clip = open_path(save(model, tmp_path))
    assert clip.config["quick_gelu"] is False
    torch.testing.assert_close(features(clip), expected(model), atol=1e-5, rtol=1e-5)


def test_a_quick_gelu_checkpoint_under_an_architecture_without_it_is_refused(tmp_path: Path, call):
    vision, text = {"image_size": 224, "patch_size": 32}, {}
    config = {"model_type": "clip", "vision_config": vision, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    small = write_open_clip(tmp_path / "small") / "open_clip_model.safetensors"
    small.rename(tmp_path / "model.safetensors")
    result = call(
        *("eval", tmp_path, "--arch", "ViT-B-32", "--data", "builtin:digits", "--shots", "1")
    )
    assert (result.code, len(result.error_lines)) == (1, 1)
    assert "config.json says the weights use QuickGELU" in result.err
    assert "--arch ViT-B-32 uses GELU" in result.err
    assert "use --arch ViT-B-32-quickgelu" in result.err


def test_preprocessing_that_is_not_said_is_openais_with_a_warning(twin, tmp_path: Path):
    for path in twin[1].iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    (tmp_path / "preprocessor_config.json").unlink()
    blueprint = open_path(tmp_path).blueprint
    usual = transformers.CLIPImageProcessor()
    assert blueprint.preprocess["mean"] == list(usual.image_mean)
    assert blueprint.preprocess["std"] == list(usual.image_std)
    assert blueprint.preprocess["size"] == 32
    (doubt,) = blueprint.doubts
    assert "has no preprocessor_config.json" in doubt
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(PROCESSOR | {"size": 64, "crop_size": 64})
    )
    with pytest.raises(
        CheckpointError, match="preprocessed to 64 pixels but the image tower takes 32"
    ):
        open_path(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "describes bert, not a CLIP model"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act is"),
        ({"vision_config": {"layer_norm_eps": 1e-6}}, "layer_norm_eps is 1e-06"),
    ],
)
def test_a_configuration_that_open_clip_cannot_follow_is_refused(
    twin, tmp_path: Path, change: dict, message: str
):
    for path in twin[1].iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    config = json.loads((twin[1] / "config.json").read_text())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_path(tmp_path)
