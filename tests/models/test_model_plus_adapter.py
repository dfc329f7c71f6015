"""MODEL+ADAPTER wherever a model is taken: the same as the model that peft makes of the two."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import adapters
import pytest
import torch
import yaml
from conftest import write_images
from hub import Hub
from merge_runs import ROOMY
from published import BASE, clip, tuned, write_adapter, write_base, write_vision
from safetensors.torch import load_file

from atlas_cli.models.folders import read_tensors
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.format import open_checked


@dataclass(frozen=True)
class Models:
    """A base, an adapter of its image tower, and what peft merges the two into."""

    base: Path
    adapter: Path
    merged: Path
    tuned: Path
    photos: Path

    @property
    def sum(self) -> str:
        return f"{self.base}+{self.adapter}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root, model = tmp_path_factory.mktemp("plus"), clip()
    base = write_base(model, root / "base")
    adapter = write_adapter(model, root / "adapter")
    merged = copy.deepcopy(model)
    vision = getattr(merged.vision_model, "vision_model", merged.vision_model)
    with warnings.catch_warnings(action="ignore"):
        deltas = adapters.adapt(
            copy.deepcopy(vision),
            root / "again",
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "v_proj"],
        )
    with torch.no_grad():
        for name, delta in deltas.items():
            vision.get_submodule(name).weight += delta
    assert (
        load_file(root / "again/adapter_model.safetensors").keys()
        == load_file(adapter / "adapter_model.safetensors").keys()
    )
    return Models(
        base,
        adapter,
        write_base(merged, root / "merged"),
        write_vision(tuned(model, 5), root / "tuned"),
        write_images(root / "photos", count=2),
    )


def values(reference: str | Path) -> dict[str, torch.Tensor]:
    found = read_tensors(locate(parse_reference(str(reference))))
    return {name: tensor.read() for name, tensor in found.items()}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


def test_the_sum_is_what_peft_makes_of_it(models: Models):
    assert close(values(models.sum), values(models.merged))
    assert not close(values(models.sum), values(models.base))


def test_commands_take_the_sum_for_a_model(models: Models, call, tmp_path: Path):
    scores = {}
    for model in (models.sum, str(models.merged)):
        done = call("eval", model, "--data", models.photos, "--json", "-q")
        assert done.code == 0, done.err
        scores[model] = json.loads(done.out)["results"][0]["top1"]
    assert scores[models.sum] == scores[str(models.merged)]
    seen = call("inspect", models.sum, "--json")
    assert seen.code == 0, seen.err
    facts = json.loads(seen.out)
    assert {"model.safetensors", "+adapter_model.safetensors"} < set(json.dumps(facts).split('"'))
    for name, base in (("sum", models.sum), ("merged", models.merged)):
        vector = tmp_path / f"{name}.safetensors"
        done = call("extract", base, models.tuned, "-o", vector, "--name", "one")
        assert done.code == 0, done.err
        done = call(
            *("fit", models.photos, "--model", base, "--vectors", vector, "--augment", "none"),
            *("--epochs", "1", "--min-steps", "1", "-o", tmp_path / f"run-{name}", "-q"),
        )
        assert done.code == 0, done.err
        merged = ["merge", tmp_path / f"run-{name}", "-o", tmp_path / f"out-{name}", "-q"]
        done = call(*merged, *ROOMY)
        assert done.code == 0, done.err
    assert close(values(tmp_path / "out-sum"), values(tmp_path / "out-merged"))
    recipe = yaml.safe_load((tmp_path / "run-sum/recipe.yaml").read_text())
    assert recipe["base_model"] == models.sum


def test_a_method_merges_sums_of_a_transformers_model(models: Models, call, tmp_path: Path):
    entry = {"model": models.sum, "parameters": {"weight": 1.0}}
    recipe = {"merge_method": "linear", "models": [entry], "dtype": "float32"}
    (tmp_path / "linear.yaml").write_text(yaml.safe_dump(recipe))
    done = call("merge", tmp_path / "linear.yaml", "-o", tmp_path / "out", "-q", *ROOMY)
    assert done.code == 0, done.err
    assert close(values(tmp_path / "out"), values(models.merged))


def test_a_sum_is_finetuned_adapted_and_extracted_from(models: Models, call, tmp_path: Path):
    few = ["--epochs", "1", "--min-steps", "1", "-q"]
    done = call(
        *("finetune", models.photos, "--model", models.sum, "-o", tmp_path / "made"),
        *("--steps", "1", "-q"),
    )
    assert done.code == 0, done.err
    done = call("extract", models.base, models.sum, "-o", tmp_path / "sum.safetensors")
    assert done.code == 0, done.err
    alone = call("extract", models.base, models.adapter, "-o", tmp_path / "alone.safetensors")
    assert alone.code == 0, alone.err
    whole, factors = (open_checked(tmp_path / f"{name}.safetensors") for name in ("sum", "alone"))
    assert whole.names == factors.names
    assert all(
        torch.allclose(whole.values(name), factors.values(name), atol=1e-6) for name in whole.names
    )
    done = call(
        *("tta", models.photos, "--model", models.sum, "--vectors", tmp_path / "made/model"),
        *few,
    )
    assert done.code == 0, done.err


def test_both_parts_may_be_on_the_hub(models: Models, run, tmp_path: Path):
    with Hub() as hub:
        hub.add(BASE, models.base)
        hub.add("me/adapter", models.adapter)
        given = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
        shown = run("eval", f"{BASE}+me/adapter", "--data", models.photos, "--json", "-q", **given)
        assert shown.code == 0, shown.err
        hub.require_token("me/adapter", "hf_right", gated=True)
        shutil.rmtree(tmp_path / "hf")
        closed = run("eval", f"{BASE}+me/adapter", "--data", models.photos, "-q", **given)
        assert (closed.code, closed.out, len(closed.error_lines)) == (3, "", 1)
        assert "me/adapter" in closed.err


def test_what_does_not_fit_is_one_line(models: Models, call, tmp_path: Path, open_clip_folder):
    cases = {
        f"{models.base}+{models.merged}": (1, "is no LoRA adapter that can follow a +"),
        f"{open_clip_folder}+{models.adapter}": (1, "adapter: "),
        f"{models.base}+": (2, "expected MODEL+ADAPTER"),
        f"{models.base}+{tmp_path}/none": (2, "no such file or folder"),
    }
    for text, (code, said) in cases.items():
        done = call("eval", text, "--data", models.photos, "-q")
        assert (done.code, done.out, len(done.error_lines)) == (code, "", 1), done.err
        assert said in done.err
    vector = call("fit", models.photos, "--model", models.base, "--vectors", models.sum)
    assert (vector.code, len(vector.error_lines)) == (2, 1)
    assert "an adapter is a task vector by itself" in vector.err


def test_a_path_may_have_a_plus_in_it(models: Models, call, tmp_path: Path):
    shutil.copytree(models.base, tmp_path / "a+b")
    done = call("eval", tmp_path / "a+b", "--data", models.photos, "-q")
    assert done.code == 0, done.err
