"""Commands join up in real pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TIMEOUT, write_images, write_open_clip
from safetensors.torch import load_file, save_file
from warm import COLD, atlas

JSON = f"{sys.executable} -m json.tool"


def bash(script: str, *, program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which `atlas` is this program: the warm one, or another."""
    definition = f'atlas() {{ {shlex.join(program or atlas())} "$@"; }}'
    command = ["bash", "-c", f"set -o pipefail; {definition}; {script}"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=TIMEOUT)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and the same model with every weight of the image tower moved a little."""
    base = write_open_clip(tmp_path / "base")
    tuned = write_open_clip(tmp_path / "tuned")
    path = tuned / "open_clip_model.safetensors"
    weights = load_file(path)
    random = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if name.startswith("visual."):
            weights[name] = tensor + 0.01 * torch.randn(tensor.shape, generator=random)
    save_file(weights, path, {"format": "pt"})
    return base, tuned


def test_extract_inspect_and_a_json_reader(models: tuple[Path, Path], tmp_path: Path):
    base, tuned = models
    line = f"atlas extract {base} {tuned} -o - | atlas inspect - --json | {JSON}"
    done = bash(line, program=COLD)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.replace("relative error", "")
    [vector] = json.loads(done.stdout)["vectors"]
    weights = [load_file(folder / "open_clip_model.safetensors") for folder in models]
    names = [name for name in weights[0] if name.startswith("visual.")]
    before = torch.cat([weights[0][name].double().flatten() for name in names])
    after = torch.cat([weights[1][name].double().flatten() for name in names])
    wanted = ((after - before).norm() / before.norm()).item()
    assert vector["file"] == "-"
    assert {block["name"].removeprefix("visual.") for block in vector["blocks"]} == {
        name.removeprefix("visual.") for name in names
    }
    assert vector["parameters"] == len(before)
    assert vector["relative_norm"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("storage", ["--dtype fp16", "--dtype bf16", "--dtype int8", "--rank 2"])
def test_every_storage_passes_through_the_pipe(models: tuple[Path, Path], storage: str):
    base, tuned = models
    done = bash(f"atlas extract {base} {tuned} {storage} -q -o - | atlas inspect - --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 < json.loads(done.stdout)["vectors"][0]["worst_error"] < 1


def test_scaling_by_minus_one_turns_a_vector_round(models: tuple[Path, Path], tmp_path: Path):
    base, tuned = models
    file = tmp_path / "v.safetensors"
    done = bash(
        f"atlas extract {base} {tuned} -q -o {file} && "
        f"atlas extract {base} {tuned} -q --scale -1 -o - | atlas inspect {file} - --json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["comparison"]["cosine"][0][1] == pytest.approx(-1)
    assert [vector["scale"] for vector in found["vectors"]] == [1, -1]


def test_a_failure_upstream_is_no_result_downstream(models: tuple[Path, Path]):
    base, _ = models
    done = bash(f"atlas extract {base} {base} -o - | atlas inspect - --json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "atlas: error: stdin: is empty" in done.stderr.splitlines()


LEARNING = {
    "fit": "fit shots",
    "negate": "negate shots --control others --keep 0.1 --lr 0.5",
    "add": "add shots others",
}


@pytest.mark.parametrize("command", LEARNING)
def test_a_pipe_from_folders_to_learned_coefficients(
    models: tuple[Path, Path], tmp_path: Path, command: str
):
    base, tuned = models
    write_images(tmp_path / "shots", ("cat", "dog"), 3)
    write_images(tmp_path / "others", ("dog", "fish", "cat"), 2)
    done = bash(
        f"cd {tmp_path} && atlas extract {base} {tuned} -o v/ && "
        f"atlas {LEARNING[command]} --model {base} --vectors v/*.safetensors --epochs 1 "
        f"--min-steps 2 --batch-size 4 | tee learned.yaml | atlas inspect - --json"
    )
    # With nothing to forget, negate fails after it has printed zeros.
    assert done.returncode == 0 or "nothing lowered" in done.stderr, done.stderr
    found = json.loads(done.stdout.partition("\n")[2])
    assert [row["vector"] for row in found["summary"]] == ["tuned"]
    again = bash(f"atlas inspect {tmp_path}/learned.yaml --json")
    assert json.loads(again.stdout) == found
    rows = bash(f"atlas inspect {tmp_path}/learned.yaml")
    assert rows.stdout.splitlines()[0] == "vector,block,coefficient"


def test_learned_coefficients_become_a_model_that_is_evaluated_in_one_line(tmp_path: Path):
    from makers import write_moved_tiny

    write_moved_tiny(tmp_path / "v" / "moved.safetensors", seed=1)
    done = bash(
        f"cd {tmp_path} && atlas draw builtin:digits -o digits --shots 2 -q > /dev/null && "
        f"atlas fit digits --model builtin:tiny --vectors v/*.safetensors --epochs 1 "
        f"--min-steps 2 --batch-size 8 -q | atlas merge - -o merged && "
        f"atlas eval builtin:tiny merged --data builtin:digits --shots 5"
    )
    assert done.returncode == 0, done.stderr
    path, columns, *rows = done.stdout.splitlines()
    assert (path, columns.split(",")[0]) == ("merged", "model")
    assert [row.split(",")[0] for row in rows] == ["builtin:tiny", "merged"]


def test_a_plan_goes_to_a_json_reader(models: tuple[Path, Path], tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    entries = [{"model": str(model), "parameters": {"weight": 1}} for model in models]
    recipe.write_text(json.dumps({"merge_method": "linear", "models": entries}))
    done = bash(f"atlas merge {recipe} --dry-run --json | {JSON}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"][0]["file"] == "open_clip_model.safetensors"
