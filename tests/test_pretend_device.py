"""Every command gives on an accelerator what it gives on the CPU."""

# ruff: noqa: RUF005 (command lines are lists that are put together)
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from conftest import TIMEOUT
from learned_runs import write_world
from safetensors.torch import load_file

QUICK = ["--batch-size", "4", "--epochs", "1", "--min-steps", "2", "--lr", "0.1", "--quiet"]
BASE = ["--model", "base", *QUICK]
LEARN = ["--vectors", "v/0.safetensors", "v/1.safetensors", "--select", "last", *BASE]
FIT = ["fit", "photos", *LEARN]
ADAPT = ["tta", "photos", *LEARN]
NEGATE = ["negate", "photos", "--control", "others", *LEARN, "--keep", "0.01"]
STORAGES = ("fp32", "fp16", "bf16", "int8", "int4", "int3", "int2", "rtvq", "factors")
# A vector in each of the storages.
ALL = ["fit", "photos", *BASE, "--select", "last", "--vectors", "kinds"]
RUNS: dict[str, list[str]] = {
    **{
        f"fit-{name.partition(':')[0]}": [*ALL, "--granularity", name]
        for name in ("block", "qkv", "partition:2")
    },
    "fit-vector": [*FIT, "--granularity", "vector"],
    "fit-groups": [*FIT, "--group", "resblocks.(\\d+)"],
    "fit-hosted": [*ALL, "--device-memory", "0"],
    "fit-mapped": [*FIT, "--memory", "1kB", "--select", "kfold"],
    "fit-linearised": [*FIT, "--linearised", "--granularity", "vector"],
    "fit-ranked": [*FIT, "--keep-vectors", "1"],
    "fit-search": [*FIT, "--method", "search"],
    **{f"fit-{name[:3]}": [*FIT, "--basis", name] for name in ("svd:2", "pca:1", "random")},
    **{f"fit-{name}": [*FIT, "--adapter", name] for name in ("tip", "tip-f", "lpp")},
    "fit-joint": [*FIT, "--adapter", "prolip", "--adapter-stage", "joint"],
    "fit-after": [*FIT, "--adapter", "probe", "--adapter-stage", "after"],
    "fit-auto": [*FIT, "--adapter", "auto"],
    "fit-alone": ["fit", "photos", *BASE, "--adapter", "tip"],
    "negate": NEGATE,
    "negate-ascent": [*NEGATE, "--forget", "ascent", "--lr", "1"],
    "negate-linearised": [*NEGATE, "--forget", "uniform", "--linearised"],
    "add": ["add", "photos", "others", *LEARN],
    "add-entropy": ["add", "photos", "others", *LEARN, "--objective", "entropy"],
    **{
        f"tta-{name}": [*ADAPT, "--objective", name]
        for name in ("ufm", "entropy", "sar", "balanced-entropy", "simclr")
    },
    "tta-layernorm": ["tta", "photos", *BASE, "--tune", "layernorm", "--select", "last"]
    + ["--objective", "entropy"],
    **{
        "-".join(["finetune", *more]).replace("--", ""): ["finetune", "photos", "--model", "base"]
        + ["--batch-size", "4", "--steps", "2", "--lr", "0.001", "--quiet", *more]
        for more in ([], ["--linearised"], ["--lora", "2"], ["--tune", "layernorm"])
    },
}
# Of these, zero-shot is kept: nothing is better. The losses of their steps are still compared.
ZERO = ("fit-vector", "fit-partition", "fit-mapped", "fit-search", "add", "tta-sar")
# The numbers of this head solve equations: rounding shows earlier.
LOOSE = ("fit-lpp",)
MERGES = ("linear", "slerp", "ties", "model_stock", "della", "sce")


def world_of_runs(folder: Path) -> Path:
    """A small world, and every run of it on both devices."""
    root = write_world(folder)
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
    exported = ["export", "pretend/fit-after", "--classifier", "--format", "torch", "-q"]
    lines += [[*exported, "-o", "pretend/exported"]]
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

    base, folder = root / "base", root / "kinds"
    folder.mkdir()
    for kind in STORAGES:
        models, target = [root / "tuned0"], folder / f"{kind}.safetensors"
        form = ["--dtype", kind, "--name", kind]
        if kind == "factors":
            form = ["--rank", "2", "--name", kind]
        elif kind == "rtvq":  # of several models, into a folder of its own
            models, target, form = [root / "tuned0", root / "tuned1"], folder, ["--dtype", kind]
        given = ["extract", base, *models, "-o", target, *form, "-q"]
        assert main([str(word) for word in given]) == 0
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


# One test, since another process of xdist would make the world again for a second one.
def test_every_command_gives_on_an_accelerator_what_it_gives_on_the_cpu(tmp_path: Path):
    world = world_of_runs(tmp_path)
    check_what_is_learned(world)
    check_merges(world)
    check_predictions(world)


def check_what_is_learned(world: Path) -> None:
    differences = {}
    for name in RUNS:
        ours, theirs = (_numbers(world / device / name) for device in ("pretend", "cpu"))
        assert ours.keys() == theirs.keys()
        learned = [found for key, found in theirs.items() if key != "losses"]
        assert name in ZERO or any(found.any() for found in learned), name
        worst = max(
            ((ours[key] - theirs[key]).abs() / theirs[key].abs().clamp(min=1)).max().item()
            for key in theirs
        )
        if worst > (1e-4 if name in LOOSE else 1e-5):
            differences[name] = worst
    assert differences == {}


def _numbers(folder: Path) -> dict[str, torch.Tensor]:
    """All numbers that a run learned, and the losses of its steps."""
    steps = folder / "metrics.jsonl"
    rows = map(json.loads, steps.read_text().splitlines() if steps.exists() else ())
    losses = [row["loss"] for row in rows]
    found = {"losses": torch.tensor(losses, dtype=torch.float64)} if losses else {}
    for path in folder.rglob("*.safetensors"):
        if path.name != "state.safetensors":
            for name, tensor in load_file(path).items():
                found[f"{path.relative_to(folder)}:{name}"] = tensor.double()
    if (folder / "recipe.yaml").exists():
        table = yaml.safe_load((folder / "recipe.yaml").read_text())["coefficients"]
        for vector, values in table.items() if isinstance(table, dict) else ():
            for block, value in values.items():
                found[f"{vector}:{block}"] = torch.tensor(value, dtype=torch.float64)
    return found


def check_merges(world: Path) -> None:
    """The same bytes, but for rounding."""
    for name in (*MERGES, "learned"):
        ours, theirs = (
            load_file(world / device / f"merged-{name}" / "open_clip_model.safetensors")
            for device in ("pretend", "cpu")
        )
        for key in theirs:
            assert (ours[key].double() - theirs[key].double()).abs().max() < 1e-5, (name, key)


def check_predictions(world: Path) -> None:
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
