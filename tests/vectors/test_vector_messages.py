"""Vectors and adapters that cannot be made or kept: what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import write_images, write_open_clip
from merge_runs import llama, write_model
from refusals import check, check_commands
from safetensors.torch import save_file

from atlas_cli.sources.locate import Source, locate, parse_reference
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.task_vector import TaskVector


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """m1 and m2 in the working directory."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number))


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"A.weight": torch.ones(2, 8), "B.weight": torch.ones(8, 2)}
    named = {f"{name}.lora_{one}": tensor for one, tensor in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def test_adapters_that_cannot_be_extracted(call, tmp_path: Path):
    write_adapter(tmp_path / "a")
    wide, broken = llama(1, width=4), llama(1)
    broken["lm_head.weight"] = torch.full((20, 8), torch.nan)
    write_model(tmp_path / "wide", wide)
    write_model(tmp_path / "broken", broken)
    large = llama(1)
    large["lm_head.weight"] *= 1e15
    write_model(tmp_path / "large", large)
    (tmp_path / "file").touch()

    def made(*models: str, to: str = "out") -> tuple[str, ...]:
        return ("extract", "./m1", *models, "-o", to, "--lora", "2")

    failures = {
        "./a: an adapter is extracted from whole models, not from LoRA": made("./a"),
        "./wide: does not fit the base model: lm_head.weight has shape": made("./wide"),
        "./broken: lm_head.weight holds values that are not finite (NaN or Inf)": made("./broken"),
        "lm_head.weight: changes too much for fp16; use --dtype bf16 or fp32": (
            *made("./large"),
            *("--dtype", "fp16"),
        ),
        "none: no such folder": made("./m2", to="none/out"),
        "file: is a file; an adapter is a folder": made("./m2", to="file"),
    }
    check_commands(call, failures, 1)
    rtvq = ("extract", "./m1", "./m1", "./m2", "--dtype", "rtvq", "-o", "x.safetensors")
    usage = {
        "an adapter is extracted from whole models, not from a sum": made("./m2+./a"),
        "--name is for one fine-tuned model": (*made("./m1", "./m2"), "--name", "x"),
        "two adapters would be written to one folder; extract them one by one": (
            made("./m2", "./m2")
        ),
        "-o x.safetensors: --dtype rtvq writes several files; name a folder": rtvq,
    }
    check_commands(call, usage, 2)
    assert not (tmp_path / "out").exists()


def test_vectors_that_cannot_be_written(call, tmp_path: Path):
    write_open_clip(tmp_path / "base")
    write_open_clip(tmp_path / "tuned", seed=1)
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "mean.rtvq").touch()
    cases = {
        "none: no such folder": ("extract", "./base", "./tuned", "-o", "none/v.safetensors"),
        "exists already; use --force to replace it": (
            *("extract", "./base", "./base", "./tuned", "-o", "v", "--dtype", "rtvq"),
        ),
    }
    check_commands(call, cases, 1)
    named = parse_reference("ViT-B-32-quickgelu/openai")
    quick = Source(named, tmp_path, (tmp_path / "m1" / "model.safetensors",))
    base = open_base(locate(parse_reference("builtin:tiny")), "visual")
    letters = TaskVector.open("builtin:letters")
    check(
        {
            "ViT-B-32-quickgelu/openai uses quick_gelu, but builtin:tiny uses gelu": (
                lambda: base.check_activation(quick)
            ),
            "builtin:all: stands for ": lambda: TaskVector.open("builtin:all", base="builtin:tiny"),
            "/proc/x.safetensors: cannot be written: No such file or directory": (
                lambda: letters.save("/proc/x.safetensors")
            ),
        }
    )


def test_a_cache_that_cannot_be_written(
    call, run, as_ordinary_user, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_images(tmp_path / "photos", count=1)
    write_open_clip(tmp_path / "base")
    write_open_clip(tmp_path / "tuned", seed=1)
    (tmp_path / "file").touch()
    given = ("fit", "photos", "--model", "./base", "--vectors", "./tuned", "--epochs", "1", "-q")
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "file" / "cache"))
    check_commands(call, {"cannot be written: Not a directory; ": given}, 1)
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "cache"))
    assert call(*given).code == 0
    (kept,) = (
        path for path in (tmp_path / "cache").rglob("*.safetensors") if "head" not in str(path)
    )
    kept.unlink()
    kept.parent.chmod(0o555)
    check_commands(as_ordinary_user, {"cannot be written: Permission denied; ": given}, 1)
