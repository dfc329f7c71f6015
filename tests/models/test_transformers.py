"""Vectors of CLIP models that transformers wrote are those of their open_clip twins."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from extracting import read, run
from safetensors.torch import load_file, save_file

from atlas_cli.errors import MismatchError
from atlas_cli.models.folders import read_tensors
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.format import open_vector

import_open_clip()  # mends torchvision, which transformers imports too
transformers = importlib.import_module("transformers")
Tensors = dict[str, torch.Tensor]


def small_config() -> transformers.CLIPConfig:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    vision = {**tower, "image_size": 32, "patch_size": 16}
    text = {**tower, "max_position_embeddings": 16, "vocab_size": 500}
    return transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)


def train(model: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter a little."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=random)
    return model


@pytest.fixture(scope="module")
def model() -> transformers.CLIPModel:
    torch.manual_seed(0)
    return transformers.CLIPModel(small_config())


@pytest.fixture(scope="module")
def base(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base in shards; without preprocessor_config.json, since no image is looked at."""
    folder = tmp_path_factory.mktemp("transformers")
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def tensors_of(path: Path) -> Tensors:
    source = locate(parse_reference(str(path)))
    return {name: tensor.read() for name, tensor in read_tensors(source).items()}


def stacked(state: Tensors, layer: int, kind: str) -> torch.Tensor:
    names = [f"vision_model.encoder.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
    return torch.cat([state[name] for name in names])


@pytest.mark.parametrize("shard", ["100KB", "1GB"])
def test_a_clip_model_gives_the_difference_of_its_state_dicts(
    model, base: Path, tmp_path: Path, shard: str
):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = transformers.CLIPModel(small_config())
    tuned.load_state_dict(before)
    after = train(tuned).state_dict()
    tuned.save_pretrained(tmp_path / "tuned", max_shard_size=shard)
    run(base, tmp_path / "tuned", tmp_path / "v.safetensors", Choice("all"))
    vector = read(tmp_path / "v.safetensors")
    delta = {name: after[name] - before[name] for name in before}
    renamed = {
        "visual.proj": delta["visual_projection.weight"].T,
        "text_projection": delta["text_projection.weight"].T,
        "logit_scale": delta["logit_scale"],
        "visual.conv1.weight": delta["vision_model.embeddings.patch_embedding.weight"],
        "positional_embedding": delta["text_model.embeddings.position_embedding.weight"],
        "ln_final.bias": delta["text_model.final_layer_norm.bias"],
        "transformer.resblocks.1.mlp.c_fc.weight": delta[
            "text_model.encoder.layers.1.mlp.fc1.weight"
        ],
    }
    for kind in ("weight", "bias"):
        name = f"visual.transformer.resblocks.1.attn.in_proj_{kind}"
        renamed[name] = stacked(after, 1, kind) - stacked(before, 1, kind)
    for name, expected in renamed.items():
        assert torch.equal(vector[name], expected), name
    assert sum(v.numel() for v in vector.values()) == sum(p.numel() for p in tuned.parameters())


def vision_model(model, *, projected: bool) -> torch.nn.Module:
    kind = "CLIPVisionModelWithProjection" if projected else "CLIPVisionModel"
    config = small_config().vision_config
    config.projection_dim = 24
    tower = getattr(transformers, kind)(config)
    ours = {name.removeprefix("vision_model."): t for name, t in model.state_dict().items()}
    state = {n: ours[n.removeprefix("vision_model.")] for n in tower.state_dict()}
    tower.load_state_dict(state)
    return train(tower)


@pytest.mark.parametrize("prefix", ["", "vision_model.", "model.vision_model."])
def test_an_image_tower_alone_leaves_the_projection_as_it_is(
    model, base: Path, tmp_path: Path, prefix: str
):
    tower = vision_model(model, projected=False)
    tower.save_pretrained(tmp_path / "tuned")
    path = tmp_path / "tuned" / "model.safetensors"
    state = {prefix + n.removeprefix("vision_model."): t for n, t in load_file(path).items()}
    save_file(state, path)
    said: list[str] = []
    run(base, tmp_path / "tuned", tmp_path / "v.safetensors", warn=said.append)
    vector, before, after = (
        read(tmp_path / "v.safetensors"),
        tensors_of(base),
        tensors_of(tmp_path / "tuned"),
    )
    assert open_vector(tmp_path / "v.safetensors").header.dropped == ("visual.proj",)
    assert said == [f"{tmp_path / 'tuned'}: left out, so as in the base: visual.proj"]
    assert all(torch.equal(vector[n], after[n] - before[n]) for n in after)
    assert vector.keys() == after.keys()


def test_a_projection_is_taken_where_there_is_one(model, base: Path, tmp_path: Path):
    tower = vision_model(model, projected=True)
    tower.save_pretrained(tmp_path / "tuned")
    run(base, tmp_path / "tuned", tmp_path / "v.safetensors")
    wanted = tower.visual_projection.weight - model.visual_projection.weight
    assert torch.equal(read(tmp_path / "v.safetensors")["visual.proj"], wanted.T)


def test_only_a_tower_of_transformers_may_lack_the_projection(model, base: Path, tmp_path: Path):
    vision_model(model, projected=False).save_pretrained(tmp_path / "tuned")
    tensors = tensors_of(tmp_path / "tuned")
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "visual.safetensors")
    with pytest.raises(MismatchError, match=r"visual\.proj is missing"):
        run(base, tmp_path / "visual.safetensors", tmp_path / "v.safetensors")


def test_towers_of_another_activation_do_not_fit(model, base: Path, tmp_path: Path):
    config = small_config().vision_config
    config.hidden_act = "gelu"
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "tuned")
    with pytest.raises(MismatchError, match=r"config.json says the weights use GELU, but"):
        run(base, tmp_path / "tuned", tmp_path / "v.safetensors")
