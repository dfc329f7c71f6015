"""Merged CLIP models open in open_clip and in transformers, and compute what was composed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composing import compose
from conftest import write_open_clip
from makers import write_moved_tiny
from merge_runs import digests, read_model, write_recipe
from safetensors.torch import load_file, save_file

from atlas_cli.core.compose import choose_layout
from atlas_cli.models.clip import open_model
from atlas_cli.models.folders import read_tensors
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import builtin_model, locate, parse_reference
from atlas_cli.vectors.pool import compose_pool, open_pool

import_open_clip()  # mends torchvision, which transformers imports too
ROOMY = ("--memory", "8GB")
WEIGHTS = "open_clip_model.safetensors"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moved_model(folder: Path, seed: int) -> Path:
    """The built-in model with every weight moved a little."""
    shutil.copytree(builtin_model("tiny"), folder)
    random = torch.Generator().manual_seed(seed)
    weights = load_file(folder / WEIGHTS)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            step = torch.randn(tensor.shape, generator=random)
            weights[name] = (tensor.float() * (1 + 0.05 * step)).to(tensor.dtype)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


def features(model: torch.nn.Module) -> torch.Tensor:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.encode_image(images)  # type: ignore[operator]


def learned(granularity: str, coefficients: Any, **more: Any) -> dict[str, Any]:
    files = [str(write_moved_tiny(Path(f"v/{name}.safetensors"), seed=n)) for n, name in NAMES]
    vectors = [{"name": name, "file": file} for (_, name), file in zip(NAMES, files, strict=True)]
    found = {"merge_method": "atlas", "base_model": "builtin:tiny", "vectors": vectors}
    return found | {"granularity": granularity, "coefficients": coefficients, **more}


NAMES = [(1, "one"), (2, "two")]


def composed(recipe: dict[str, Any]) -> torch.nn.Module:
    """The base with its image tower composed by the code that learning uses."""
    source = locate(parse_reference("builtin:tiny"))
    module: Any = open_model(source).module
    base = {f"visual.{name}": tensor for name, tensor in module.visual.named_parameters()}
    paths = [entry["file"] for entry in recipe["vectors"]]
    pool = open_pool(paths, read_tensors(source), list(base))
    layout = choose_layout(pool.shapes, recipe["granularity"], seed=recipe.get("seed", 0))
    table = torch.zeros(2, len(layout.labels))
    for row, name in enumerate(("one", "two")):
        for label, value in recipe["coefficients"].get(name, {}).items():
            table[row, layout.labels.index(label)] = value
    found = compose(compose_pool(pool, base, layout, torch.device("cpu")), table)
    with torch.no_grad():
        for name, tensor in found.items():
            base[name].copy_(tensor)
    return module


@pytest.mark.parametrize("granularity", ["vector", "block", "qkv", "partition:3"])
def test_a_learned_merge_opened_by_open_clip_has_the_features_of_the_composition(
    call, granularity: str
):
    recipe = learned(granularity, {}, out_dtype="float32")  # the base is kept in fp16
    pool = open_pool(
        [entry["file"] for entry in recipe["vectors"]],
        read_tensors(locate(parse_reference("builtin:tiny"))),
        list(load_file(builtin_model("tiny") / WEIGHTS)),
    )
    labels = choose_layout(pool.shapes, granularity).labels
    random = torch.Generator().manual_seed(3)
    recipe["coefficients"] = {
        name: {label: torch.randn(1, generator=random).item() for label in labels}
        for _, name in NAMES
    }
    result = call("merge", write_recipe(Path("r.yaml"), recipe), "-o", "out", *ROOMY)
    assert (result.code, result.out) == (0, "out\n"), result.err
    opened = import_open_clip().create_model(f"local-dir:{Path('out').resolve()}").eval()
    torch.testing.assert_close(features(opened), features(composed(recipe)), rtol=1e-5, atol=1e-5)


def test_a_table_in_a_file_is_the_table_itself(call):
    recipe = learned("vector", {"one": {"all": 0.5}, "two": {"all": -0.25}})
    assert call("merge", write_recipe(Path("a.yaml"), recipe), "-o", "a", *ROOMY).code == 0
    Path("table.json").write_text(json.dumps(recipe["coefficients"]))
    by_file = recipe | {"coefficients": "table.json"}
    assert call("merge", write_recipe(Path("b.yaml"), by_file), "-o", "b", *ROOMY).code == 0
    save_file({"coefficients": torch.tensor([[0.5], [-0.25]])}, "table.safetensors")
    by_tensor = recipe | {"coefficients": "table.safetensors"}
    assert call("merge", write_recipe(Path("c.yaml"), by_tensor), "-o", "c", *ROOMY).code == 0
    wanted = read_model(Path("a"))
    for other in ("b", "c"):
        assert all(torch.equal(t, wanted[n]) for n, t in read_model(Path(other)).items())


@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        ({"coefficients": {"three": {}}}, "no vector is called 'three'", 2),
        ({"coefficients": {"one": {"al": 1.0}}}, "there is no 'al'; did you mean 'all'?", 2),
        ({"scope": "text"}, "has scope visual, but these coefficients are for scope text", 1),
        ({"base_model": "./other"}, "was taken from another base", 1),
        ({"linearised": True}, "learned for the first-order expansion", 2),
    ],
)
def test_a_learned_recipe_that_does_not_fit_is_refused(call, change, message: str, code: int):
    moved_model(Path("other"), 5)
    recipe = learned("vector", {"one": {"all": 0.5}}) | change
    result = call("merge", write_recipe(Path("r.yaml"), recipe), "-o", "out", *ROOMY)
    assert (result.code, message in result.err) == (code, True), result.err
    assert not Path("out").exists()


def test_a_vector_that_has_changed_is_refused(call):
    recipe = learned("vector", {"one": {"all": 0.5}})
    recipe["vectors"][0]["sha256"] = "00" * 32
    result = call("merge", write_recipe(Path("r.yaml"), recipe), "-o", "out", *ROOMY)
    assert result.code == 1
    assert "is not the file that the recipe speaks of" in result.err


def test_the_lock_of_a_learned_merge_gives_the_same_bytes(call):
    recipe = learned("vector", {"one": {"all": 0.5}, "two": {"all": 0.1}})
    assert call("merge", write_recipe(Path("r.yaml"), recipe), "-o", "out", *ROOMY).code == 0
    assert call("merge", "out/atlas_recipe.lock.yaml", "-o", "again", *ROOMY).code == 0
    assert digests(Path("again")) == digests(Path("out"))
    locked = yaml.safe_load(Path("out/atlas_recipe.lock.yaml").read_text())["locked"]
    assert set(locked) == {"builtin:tiny", "v/one.safetensors", "v/two.safetensors"}


# Two families ---------------------------------------------------------------------------------


def twins(folder: Path, seed: int) -> tuple[Path, Path]:
    """The same weights as a folder of transformers and as one of open_clip."""
    import transformers

    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "hidden_act": "gelu"}
    vision = {**tower, "image_size": 32, "patch_size": 16}
    text = {**tower, "max_position_embeddings": 16, "vocab_size": 49408}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)
    torch.manual_seed(seed)
    theirs = folder / f"transformers{seed}"
    transformers.CLIPModel(config).save_pretrained(theirs)
    (theirs / "preprocessor_config.json").write_text(
        json.dumps({"size": 32, "crop_size": 32, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )
    ours = write_open_clip(folder / f"open_clip{seed}", TWIN)
    tensors = read_tensors(locate(parse_reference(str(theirs))))
    found = {name: tensor.read().contiguous() for name, tensor in tensors.items()}
    save_file(found, ours / WEIGHTS, {"format": "pt"})
    return theirs, ours


TWIN = {
    "embed_dim": 24,
    "quick_gelu": False,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32,
                   "mlp_ratio": 2.0},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2,
                 "mlp_ratio": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_model_decides_the_family_and_the_other_is_renamed(call, first: int):
    pairs = [twins(Path.cwd(), seed) for seed in (1, 2)]
    models = [str(pairs[0][first]), str(pairs[1][1 - first])]
    recipe: dict[str, Any] = {"merge_method": "linear", "parameters": {"weight": 1}}
    recipe["models"] = [{"model": model} for model in models]
    result = call("merge", write_recipe(Path("r.yaml"), recipe), "-o", "out", *ROOMY)
    assert result.code == 0, result.err
    same = [str(pair[first]) for pair in pairs]
    recipe["models"] = [{"model": model} for model in same]
    assert call("merge", write_recipe(Path("s.yaml"), recipe), "-o", "same", *ROOMY).code == 0
    found, wanted = read_model(Path("out")), read_model(Path("same"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_both_libraries_open_a_merge_and_agree(call):
    import transformers

    pairs = [twins(Path.cwd(), seed) for seed in (1, 2)]
    shown = []
    for family, name in enumerate(("theirs", "ours")):
        recipe = {"merge_method": "task_arithmetic", "base_model": str(pairs[0][family])}
        recipe["models"] = [{"model": str(pairs[1][family]), "parameters": {"weight": 0.3}}]
        result = call("merge", write_recipe(Path("r.yaml"), recipe), "-o", name, *ROOMY)
        assert result.code == 0, result.err
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    theirs = transformers.CLIPModel.from_pretrained("theirs").eval()
    with torch.no_grad():
        shown.append(theirs.visual_projection(theirs.vision_model(images).pooler_output))
    ours = import_open_clip().create_model(f"local-dir:{Path('ours').resolve()}").eval()
    shown.append(features(ours))
    torch.testing.assert_close(shown[0], shown[1], rtol=1e-5, atol=1e-5)


def test_vectors_are_added_to_a_base_of_transformers(call):
    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import Options, extract_to

    theirs, ours = twins(Path.cwd(), 1)
    _, tuned = twins(Path.cwd(), 2)
    for base, name in ((theirs, "theirs"), (ours, "ours")):
        opened = open_base(locate(parse_reference(str(base))), "visual")
        tuned_source = locate(parse_reference(str(tuned)))
        extract_to(Path(f"{name}.safetensors"), "v", opened, tuned_source, Options())
        recipe = {"merge_method": "atlas", "base_model": str(base), "granularity": "vector"}
        recipe |= {"vectors": [f"{name}.safetensors"], "coefficients": {"v": {"all": 0.5}}}
        path = write_recipe(Path(f"{name}.yaml"), recipe)
        result = call("merge", path, "-o", f"{name}_out", *ROOMY)
        assert result.code == 0, result.err
    found = read_tensors(locate(parse_reference("./theirs_out")))
    wanted = read_tensors(locate(parse_reference("./ours_out")))
    for name, tensor in found.items():
        assert torch.equal(tensor.read(), wanted[name].read()), name
