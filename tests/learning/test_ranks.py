"""Several processes learn what one learns."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TIMEOUT
from learned_runs import write_world
from safetensors.torch import load_file
from warm import start

QUICK = ["--batch-size", "8", "--epochs", "2", "--min-steps", "2", "--lr", "0.1", "--quiet"]
LEARN = ["--model", "base", "--vectors", "v", *QUICK]
TUNE = ["--model", "base", "--batch-size", "4", "--steps", "3", "--lr", "0.0001", "--quiet"]
RUNS = {
    "add": ["add", "photos", "others", *LEARN],
    "negate": ["negate", "photos", "--control", "others", *LEARN, "--keep", "0.01"],
    "head": ["fit", "photos", *LEARN, "--adapter", "lpp"],
    "basis": ["fit", "photos", *LEARN, "--basis", "pca:1"],
    "kfold": ["fit", "photos", *LEARN, "--select", "kfold", "--accumulate", "3"],
    "ufm": ["tta", "photos", *LEARN, "--select", "last"],
    "sar": ["tta", "photos", *LEARN, "--select", "last", "--objective", "sar"],
    "balanced": ["tta", "photos", *LEARN, "--select", "last", "--objective", "balanced-entropy"],
    "finetune": ["finetune", "photos", *TUNE],
    "lora": ["finetune", "photos", *TUNE, "--lora", "2"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_world(tmp_path_factory.mktemp("world"))
    (root / "others").symlink_to("photos")
    return root


def started(world: Path, count: int, *given: str | Path) -> list:
    """The processes of a run, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [
        start(*given, cwd=world, env=os.environ | shared | {"RANK": str(rank)})
        for rank in range(count)
    ]


def ended(processes: list) -> list[tuple[int, str, str]]:
    found = [process.communicate(timeout=TIMEOUT) for process in processes]
    return [(p.returncode, *said) for p, said in zip(processes, found, strict=True)]


def numbers(folder: Path) -> dict[str, float]:
    """All that a run learned, but for the biases of attention's keys.

    Softmax does not depend on those: their gradient is zero but for rounding, which AdamW scales up
    to whole steps, so that they differ by up to the learning rate while the model is the same.
    """
    found = {}
    for path in folder.rglob("*.safetensors"):
        if path.name != "state.safetensors":
            for name, tensor in load_file(path).items():
                if name.endswith("attn.in_proj_bias"):
                    queries, _, rest = tensor.chunk(3)
                    tensor = torch.cat([queries, rest])
                values = tensor.double().flatten().tolist()
                found |= {f"{path.name}:{name}:{n}": value for n, value in enumerate(values)}
    if (folder / "recipe.yaml").exists():
        table = yaml.safe_load((folder / "recipe.yaml").read_text())["coefficients"]
        for vector, row in table.items():
            found |= {f"{vector}:{block}": value for block, value in row.items()}
    return found


def difference(ours: Path, theirs: Path) -> float:
    mine, others = numbers(ours), numbers(theirs)
    assert mine.keys() == others.keys()
    assert others
    return max(abs(mine[key] - others[key]) for key in others)


def test_two_processes_fit_what_one_does_and_only_the_first_speaks(world: Path):
    given = ["fit", "photos", *LEARN[:-1], "-v"]
    (alone,) = ended([start(*given, "-o", "fit1", cwd=world)])
    assert alone[0] == 0, alone
    first, second = ended(started(world, 2, *given, "-o", "fit2"))
    assert (first[0], second) == (0, (0, "", "")), (first, second)
    assert difference(world / "fit1", world / "fit2") < 1e-5
    (line,) = [line for line in first[2].splitlines() if "bytes sent" in line]
    count = len(numbers(world / "fit1"))
    assert int(line.split()[3].replace(",", "")) <= 4 * count * 4
    predictions = []
    for ranks in (1, 2):
        asked = ["eval", "base", "--data", "photos", "--predictions", f"p{ranks}", "-q"]
        found = ended(started(world, 2, *asked) if ranks > 1 else [start(*asked, cwd=world)])
        assert [one[0] for one in found] == [0] * ranks, found
        predictions.append((found[0][1], (world / f"p{ranks}").read_text()))
    assert predictions[0] == predictions[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_and_four_processes_learn_what_one_does(world: Path, name: str):
    (alone,) = ended([start(*RUNS[name], "-o", f"{name}1", cwd=world)])
    assert alone[0] == 0, alone
    for count in (2, 4):
        for more in ([], ["--shard-vectors"]) if RUNS[name][0] != "finetune" else ([],):
            folder = f"{name}{count}{len(more)}"
            found = ended(started(world, count, *RUNS[name], *more, "-o", folder))
            assert [one[0] for one in found] == [0] * count, found
            assert difference(world / f"{name}1", world / folder) < 1e-5, (count, more)


@pytest.mark.slow
def test_a_mistake_is_one_line_and_a_killed_process_ends_all(world: Path):
    process = start("fit", "nowhere", *LEARN, "--launch", "2", cwd=world)
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (2, ""), err
    assert len(err.splitlines()) == 1
    long = ["fit", "photos", *LEARN[:-1], "--epochs", "2000", "-o", "killed"]
    processes = started(world, 2, *long)
    while not (world / "killed/metrics.jsonl").exists():
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    (code, out, err), _ = ended(processes)
    assert (code, out) == (1, "")
    assert "another process of this run ended" in err.splitlines()[-1]
