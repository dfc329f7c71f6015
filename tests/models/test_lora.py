"""What PEFT wrote is what it would add to the weights, kept as factors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters import ALL, adapt, clip, small_config
from conftest import write_open_clip
from extracting import read, run
from hub import Hub
from safetensors.torch import load_file, save_file

from atlas_cli.core.storage import Factors, Form
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.models.clip import open_model
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.differences import Choice
from atlas_cli.vectors.format import open_vector

import_open_clip()  # mends torchvision, which transformers imports too
import peft  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LAYER = "visual.transformer.resblocks.{}."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    transformers.CLIPModel(small_config()).save_pretrained(folder)
    return folder


@pytest.fixture
def run_atlas(request: pytest.FixtureRequest):
    """Atlas as a process of its own; `run` is the function from test_extract here."""
    return request.getfixturevalue("run")


def expected_of(deltas: Tensors, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """peft's deltas of transformers' modules at their places in open_clip's blocks."""
    rename = {"self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    found: Tensors = {}
    for module, delta in deltas.items():
        if module == "visual_projection":
            found["visual.proj"] = delta.T
            continue
        _, _, rest = module.partition("encoder.layers.")
        layer, _, kind = rest.partition(".")
        prefix = LAYER.format(layer).removeprefix("visual." if "text_model" in module else "")
        if kind in rename:
            found[f"{prefix}{rename[kind]}.weight"] = delta
        else:
            name = f"{prefix}attn.in_proj_weight"
            whole = found.setdefault(name, torch.zeros(shapes[name]))
            start = "qkv".index(kind[len("self_attn.")]) * len(delta)
            whole[start : start + len(delta)] = delta
    return found


def shapes_of(base: Path) -> dict[str, tuple[int, ...]]:
    from atlas_cli.models.folders import read_tensors

    return {n: t.shape for n, t in read_tensors(locate(parse_reference(str(base)))).items()}


def assert_equal(path: Path, expected: Tensors) -> None:
    found = read(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-8, rtol=1e-6)


SETTINGS = {
    "plain": {},
    "uneven scale": {"r": 3, "lora_alpha": 7},
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 6, "fc1": 2},
        "alpha_pattern": {r".*\.0\.mlp\.fc2": 5, "k_proj": 1},
    },
    "projection": {"target_modules": ["visual_projection", "fc1"]},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_deltas_are_those_of_peft(base: Path, tmp_path: Path, name: str):
    deltas = adapt(clip(base), tmp_path / "adapter", **SETTINGS[name])
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("all"))
    assert_equal(tmp_path / "v.safetensors", expected_of(deltas, shapes_of(base)))
    vector = open_vector(tmp_path / "v.safetensors")
    assert all(isinstance(vector.read(name), Factors) for name in vector.names)
    assert max(info.error for info in vector.header.blocks) == 0


def test_a_scale_that_is_a_power_of_two_gives_every_bit(base: Path, tmp_path: Path):
    deltas = adapt(clip(base), tmp_path / "adapter")
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("all"))
    found = read(tmp_path / "v.safetensors")
    expected = expected_of(deltas, shapes_of(base))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_model_with_the_adapter_merged_is_base_plus_vector(base: Path, tmp_path: Path):
    adapt(clip(base), tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(clip(base), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors")
    run(base, tmp_path / "merged", tmp_path / "w.safetensors")
    factors, dense = read(tmp_path / "v.safetensors"), read(tmp_path / "w.safetensors")
    assert factors.keys() == dense.keys()
    for name, tensor in dense.items():
        torch.testing.assert_close(factors[name], tensor, atol=1e-7, rtol=1e-4)


def test_an_adapter_of_the_image_tower_alone_lacks_the_prefix(base: Path, tmp_path: Path):
    deltas = adapt(clip(base).vision_model, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(name.startswith("base_model.model.encoder.layers.0") for name in names)
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors")
    assert_equal(tmp_path / "v.safetensors", expected_of(deltas, shapes_of(base)))


def test_a_pickled_adapter_and_a_path_to_its_file_are_read_too(base: Path, tmp_path: Path):
    deltas = adapt(clip(base), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(path), tmp_path / "adapter" / "adapter_model.bin")
    path.unlink()
    for source in (tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.bin"):
        run(base, source, tmp_path / "v.safetensors", Choice("all"))
        assert_equal(tmp_path / "v.safetensors", expected_of(deltas, shapes_of(base)))


def test_the_scope_decides_which_tower_of_an_adapter_is_taken(base: Path, tmp_path: Path):
    deltas = adapt(clip(base), tmp_path / "adapter")
    expected = expected_of(deltas, shapes_of(base))
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors")
    assert read(tmp_path / "v.safetensors").keys() == {n for n in expected if "visual" in n}
    adapt(clip(base).vision_model, tmp_path / "vision")
    with pytest.raises(MismatchError, match="the adapter changes nothing in scope text"):
        run(base, tmp_path / "vision", tmp_path / "w.safetensors", Choice("text"))


def test_an_adapter_on_the_hub_is_read_with_its_configuration(
    base: Path, tmp_path: Path, run_atlas
):
    deltas = adapt(clip(base), tmp_path / "adapter")
    torch.save({"lr": 1}, tmp_path / "adapter" / "training_args.bin")  # what a trainer leaves
    with Hub() as hub:
        commit = hub.add("me/cars-lora", tmp_path / "adapter")
        result = run_atlas(
            *("extract", base, "me/cars-lora", "-o", tmp_path / "out", "--scope", "all"),
            **hub.env(tmp_path / "home"),
            HF_HUB_OFFLINE="0",
        )
    path = tmp_path / "out" / "cars-lora.safetensors"
    assert (result.code, result.out) == (0, f"{path}\n"), result.err
    assert_equal(path, expected_of(deltas, shapes_of(base)))
    assert open_vector(path).header.finetuned["commit"] == commit


# open_clip's own modules ----------------------------------------------------------------------


def test_an_adapter_on_modules_of_open_clip(tmp_path: Path):
    folder = write_open_clip(tmp_path / "base")
    model = open_model(locate(parse_reference(str(folder)))).module
    targets = ["c_fc", "c_proj", "conv1"]
    deltas = adapt(model, tmp_path / "adapter", target_modules=targets)
    assert "visual.conv1" in deltas
    run(folder, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("all"))
    assert_equal(tmp_path / "v.safetensors", {f"{n}.weight": d for n, d in deltas.items()})


def test_an_adapter_on_the_attention_of_open_clip(tmp_path: Path):
    folder = write_open_clip(tmp_path / "base")
    model = open_model(locate(parse_reference(str(folder)))).module.visual
    wrapped = torch.nn.Module()
    wrapped.visual = model
    adapt(wrapped, tmp_path / "adapter", target_modules=["attn"])
    run(folder, tmp_path / "adapter", tmp_path / "v.safetensors")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = read(tmp_path / "v.safetensors")
    for layer in range(2):
        attention = f"visual.transformer.resblocks.{layer}.attn"
        places = {f"{attention}.in_proj_weight": attention}
        places[f"{attention}.out_proj.weight"] = f"{attention}.base_layer.out_proj"
        for name, module in places.items():
            a, b = (factors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            torch.testing.assert_close(found[name], 2.0 * b @ a, atol=1e-8, rtol=1e-6)


def test_fan_in_fan_out_is_transposed_as_peft_does(tmp_path: Path):
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = torch.nn.Module()
            self.visual.conv1 = torch.nn.Conv2d(3, 8, 4, bias=False)
            self.visual.first = transformers.pytorch_utils.Conv1D(12, 8)

    torch.manual_seed(0)
    model = Tower()
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    deltas = adapt(model, tmp_path / "a", target_modules=["first"], fan_in_fan_out=True)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["fan_in_fan_out"]
    path = tmp_path / "v.safetensors"
    run(tmp_path / "base.safetensors", tmp_path / "a", path, architecture="ViT-B-32")
    assert_equal(path, {"visual.first.weight": deltas["visual.first"]})
    assert deltas["visual.first"].shape == (8, 12)


# Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias lora_only"),
        ({"bias": "all"}, "bias all"),
        ({"modules_to_save": ["visual_projection"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"target_parameters": ["fc1.weight"], "target_modules": ["fc2"]}, "target_parameters"),
    ],
)
def test_what_would_not_be_applied_exactly_is_refused_by_name(
    base: Path, tmp_path: Path, settings: dict, name: str
):
    config = peft.LoraConfig(**({"r": 4, "target_modules": ALL} | settings))
    peft.get_peft_model(clip(base), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json uses {name}, which atlas"):
        run(base, tmp_path / "adapter", tmp_path / "v.safetensors", Choice("all"))


def test_another_kind_of_adapter_is_refused_by_name(base: Path, tmp_path: Path):
    config = peft.LoKrConfig(r=4, target_modules=["fc1"])
    peft.get_peft_model(clip(base), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"uses peft_type LOKR, .*which atlas does not"):
        run(base, tmp_path / "adapter", tmp_path / "v.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 5}, r"has rank 4, but adapter_config\.json says 5"),
        ({"surprise": True}, "uses surprise, which atlas does not apply exactly"),
        ({"lora_alpha": None}, r"adapter_config\.json is damaged"),
        ({"rank_pattern": {"(": 3}}, "bad pattern"),
        ({"peft_type": "ADALORA"}, "uses peft_type ADALORA"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(
    base: Path, tmp_path: Path, change: dict, message: str
):
    adapt(clip(base), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        run(base, tmp_path, tmp_path / "v.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(n), "lacks one of its factors"),
        (lambda t, n: t.update({n: t[n][:, :7].contiguous()}), r"has \(32, 32\) there"),
        (lambda t, n: t.update({"x.lora_magnitude": torch.ones(2)}), "is no factor of LoRA"),
        (
            lambda t, n: t.update({n.replace("layers.0", "layers.9"): t[n] + 0 for n in list(t)}),
            r"layers\.9.* has no place in the base model",
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused(base: Path, tmp_path: Path, change, message: str):
    adapt(clip(base), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors, next(n for n in tensors if "0.self_attn.q_proj.lora_A" in n and "vision" in n))
    save_file(tensors, path)
    with pytest.raises(AtlasError, match=message):
        run(base, tmp_path, tmp_path / "v.safetensors")


def test_an_adapter_without_its_configuration_is_refused(base: Path, tmp_path: Path):
    adapt(clip(base), tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no adapter_config\.json by it"):
        run(base, tmp_path / "adapter_model.safetensors", tmp_path / "v.safetensors")


# Forms ----------------------------------------------------------------------------------------


def test_the_dtype_applies_to_the_factors(base: Path, tmp_path: Path):
    deltas = adapt(clip(base), tmp_path / "adapter")
    made = run(base, tmp_path / "adapter", tmp_path / "v.safetensors", form=Form("fp16"))
    tensors = load_file(tmp_path / "v.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert 0 < made.mean_error < 1e-3
    found, expected = read(tmp_path / "v.safetensors"), expected_of(deltas, shapes_of(base))
    for info in open_vector(tmp_path / "v.safetensors").header.blocks:
        exact = expected[info.name]
        error = (found[info.name] - exact).norm() / exact.norm()
        assert error.item() == pytest.approx(info.error, rel=1e-2)


@pytest.mark.parametrize("form", [Form("int8"), Form(rank=2), Form(energy=0.5)])
def test_an_adapter_is_not_made_low_rank_again(base: Path, tmp_path: Path, form: Form):
    adapt(clip(base), tmp_path / "adapter")
    with pytest.raises(UsageError, match="is low-rank already and stays so"):
        run(base, tmp_path / "adapter", tmp_path / "v.safetensors", form=form)


def test_a_vector_of_an_adapter_can_be_negated(base: Path, tmp_path: Path):
    adapt(clip(base), tmp_path / "adapter")
    run(base, tmp_path / "adapter", tmp_path / "v.safetensors")
    run(base, tmp_path / "v.safetensors", tmp_path / "n.safetensors", scale=-1.0)
    forth, back = read(tmp_path / "v.safetensors"), read(tmp_path / "n.safetensors")
    assert all(torch.equal(forth[name], -back[name]) for name in forth)
    header = open_vector(tmp_path / "n.safetensors").header
    assert {info.storage for info in header.blocks} == {"factors"}
    assert {len(info.starts) for info in header.blocks} == {1, 3}
