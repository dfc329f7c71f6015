"""Every command gives on an accelerator what it gives on the CPU."""

# ruff: noqa: RUF005 (command lines are lists that are put together)
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import TIMEOUT
from learned_runs import write_world
from safetensors.torch import load_file

QUICK = ["--batch-size", "4", "--epochs", "1", "--min-steps", "2", "--lr", "0.1", "--quiet"]
LEARN = ["--model", "base", "--vectors", "v/0.safetensors", "v/1.safetensors", *QUICK]
FIT = ["fit", "photos", *LEARN]
RUNS: dict[str, list[str]] = {
    "fit": [*FIT, "--select", "kfold"],
    "fit-linearised": [*FIT, "--linearised", "--granularity", "vector"],
    "fit-mapped": [*FIT, "--memory", "1kB", "--group", "resblocks.(\\d+)"],
    **{
        f"fit-{kind}": ["fit", "photos", "--model", "base", "--vectors"]
        + [f"v/{kind}.safetensors", *QUICK, "--granularity", granularity]
        for kind, granularity in (("bf16", "block"), ("int8", "qkv"), ("rank2", "partition:2"))
    },
    **{f"fit-{name[:3]}": [*FIT, "--basis", name] for name in ("svd:2", "pca:1", "random")},
    **{f"fit-{name}": [*FIT, "--adapter", name] for name in ("tip-f", "lpp", "prolip")},
    "fit-after": [*FIT, "--adapter", "probe", "--adapter-stage", "after"],
    "fit-alone": ["fit", "photos", "--model", "base", "--adapter", "tip", *QUICK],
    "negate": ["negate", "photos", "--control", "others", *LEARN, "--keep", "0.01"],
    "add": ["add", "photos", "others", *LEARN],
    **{
        f"tta-{name}": ["tta", "photos", *LEARN, "--objective", name, "--select", "last"]
        for name in ("ufm", "sar", "balanced-entropy", "simclr")
    },
    "tta-layernorm": ["tta", "photos", "--model", "base", "--tune", "layernorm", *QUICK]
    + ["--select", "last", "--objective", "entropy"],
    **{
        f"finetune{'-'.join(['', *more])}": ["finetune", "photos", "--model", "base", *more]
        + ["--batch-size", "4", "--steps", "2", "--lr", "0.001", "--quiet"]
        for more in ([], ["--linearised"], ["--lora", "2"])
    },
}
LOOSE = ("finetune", "fit-lpp")  # small gradients or large numbers: rounding shows earlier
MERGES = ("slerp", "ties", "model_stock", "della")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world, every run of it on both devices, and what each said."""
    root = write_world(tmp_path_factory.mktemp("world"))
    (root / "others").symlink_to("photos")
    _write_inputs(root)
    lines = []
    for device in ("cpu", "pretend"):
        on = ["--device", device]
        (root / device).mkdir()
        lines += [[*given, *on, "-o", f"{device}/{name}"] for name, given in RUNS.items()]
        lines += [
            ["merge", f"{name}.yaml", *on, "-o", f"{device}/merged-{name}", "-q"]
            + ["--memory", "8GB"]
            for name in (*MERGES, "learned")
        ]
        lines += [
            ["eval", "base", f"{device}/merged-learned", "--data", "photos", *on, "--quiet"]
            + ["--predictions", f"{device}/predictions"],
        ]
    lines += [["eval", "base", "--data", "photos", "--device", "pretend:0", "-q", "--json"]]
    (root / "lines.json").write_text(json.dumps(lines))
    program = Path(__file__).parent / "pretend_device.py"
    done = subprocess.run(
        [sys.executable, program, "lines.json"],
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    failed = [
        (line, err)
        for line, (code, _, err, _) in zip(lines, json.loads(done.stdout), strict=True)
        if code
    ]
    assert failed == []
    return root


def _write_inputs(root: Path) -> None:
    """Vectors in every storage, and a recipe for every merge."""
    from atlas_cli.cli.app import main

    for kind in ("bf16", "int8"):
        given = [
            "extract",
            root / "base",
            root / "tuned0",
            "-o",
            root / "v" / f"{kind}.safetensors",
        ]
        assert main([*map(str, given), "--dtype", kind, "--name", kind, "-q"]) == 0
    given = ["extract", root / "base", root / "tuned0", "-o", root / "v" / "rank2.safetensors"]
    assert main([*map(str, given), "--rank", "2", "--name", "rank2", "-q"]) == 0
    for method in MERGES:
        weights = {"parameters": {"weight": 0.5, "density": 0.5}}
        models = [{"model": str(root / f"tuned{n}")} for n in range(2)]
        if method not in ("slerp", "model_stock", "sce"):
            models = [{**one, **weights} for one in models]
        if method in ("linear", "task_arithmetic"):
            models = [{**one, "parameters": {"weight": 0.5}} for one in models]
        recipe = {"merge_method": method, "models": models}
        if method not in ("linear", "slerp"):
            recipe["base_model"] = str(root / "base")
        if method == "slerp":
            recipe |= {"base_model": str(root / "tuned0"), "parameters": {"t": 0.3}}
        (root / f"{method}.yaml").write_text(yaml.safe_dump(recipe))
    table = dict.fromkeys(("birds", "<cars>"), 0.5)
    (root / "learned.yaml").write_text(_learned(root, table))


def _learned(root: Path, table: dict[str, float]) -> str:
    from atlas_cli.vectors.format import open_vector

    blocks = [block.name for block in open_vector(root / "v/0.safetensors").header.blocks]
    return yaml.safe_dump(
        {
            "merge_method": "atlas",
            "base_model": str(root / "base"),
            "vectors": [
                {"name": name, "file": str(root / "v" / f"{number}.safetensors")}
                for number, name in enumerate(table)
            ],
            "coefficients": {name: dict.fromkeys(blocks, value) for name, value in table.items()},
        }
    )


def test_learning_gives_on_an_accelerator_what_it_gives_on_the_cpu(world: Path):
    differences = {}
    for name in RUNS:
        ours, theirs = (_numbers(world / device / name) for device in ("pretend", "cpu"))
        assert ours.keys() == theirs.keys()
        assert theirs, name
        # The bias of keys changes nothing: where its gradient is rounding, AdamW's steps are noise.
        keys = [key for key in theirs if not key.endswith("in_proj_bias[k]")]
        worst = max(abs(ours[key] - theirs[key]) / max(1, abs(theirs[key])) for key in keys)
        if worst > (1e-4 if name.startswith(LOOSE) else 1e-5):
            differences[name] = worst
    assert differences == {}


def _numbers(folder: Path) -> dict[str, float]:
    """All numbers that a run learned."""
    found = {}
    files = [*folder.rglob("*.safetensors")]
    for path in files:
        if path.name != "state.safetensors":
            for name, tensor in load_file(path).items():
                for number, value in enumerate(tensor.double().flatten()[:200].tolist()):
                    found[f"{path.relative_to(folder)}:{name}:{number}"] = value
    if (folder / "recipe.yaml").exists():
        table = yaml.safe_load((folder / "recipe.yaml").read_text())["coefficients"]
        for vector, values in table.items():
            found |= {f"{vector}:{block}": value for block, value in values.items()}
    return found


def test_merges_are_the_same_bytes_or_differ_by_rounding(world: Path):
    for name in (*MERGES, "learned"):
        ours, theirs = (
            load_file(world / device / f"merged-{name}" / "open_clip_model.safetensors")
            for device in ("pretend", "cpu")
        )
        for key in theirs:
            assert (ours[key].double() - theirs[key].double()).abs().max() < 1e-5, (name, key)


def test_models_are_evaluated_on_an_accelerator(world: Path):
    ours, theirs = ((world / device / "predictions").read_text() for device in ("pretend", "cpu"))
    assert re.sub(r"0\.\d+|pretend|cpu", "", ours) == re.sub(r"0\.\d+|pretend|cpu", "", theirs)


FORGOTTEN = """
import sys, torch
sys.path.insert(0, {tests!r})
import pretend_device
pretend_device.install()
there = torch.ones(2).to("pretend")
here = torch.ones(2)
for wrong in (lambda: there + here, lambda: there.numpy(), lambda: there.matmul(here)):
    try:
        wrong()
    except (RuntimeError, TypeError) as problem:
        print("refused")
pretend_device.limit(1000)
try:
    torch.ones(1000).to("pretend")
except torch.OutOfMemoryError:
    print("full")
del there
print(pretend_device._memory["living"])
"""


def test_the_device_refuses_other_devices_and_ends_memory(run_python):
    out = run_python(FORGOTTEN.format(tests=str(Path(__file__).parent)))
    assert out.split() == ["refused"] * 3 + ["full", "0"]
