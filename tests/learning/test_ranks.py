"""Several processes learn what one learns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import TIMEOUT
from learned_runs import write_world
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser
from warm import COLD, start

QUICK = ["--batch-size", "4", "--epochs", "2", "--augment", "none", "--lr", "0.1", "--quiet"]
LEARN = ["--model", "base", "--vectors", "v", "--select", "last", *QUICK]
VIEWS = ["--augment", "flip"]
TUNE = ["--model", "base", "--batch-size", "4", "--steps", "3", "--lr", "0.0001", "--quiet"]
RUNS = {
    "add": ["add", "photos", "others", *LEARN],
    "negate": ["negate", "photos", "--control", "others", *LEARN, "--keep", "0.01"],
    "fit": ["fit", "photos", *LEARN, "--granularity", "qkv"],
    "head": ["fit", "photos", *LEARN, "--adapter", "lpp"],
    "basis": ["fit", "photos", *LEARN, "--basis", "pca:1"],
    "kfold": ["fit", "photos", *LEARN, "--select", "kfold", "--accumulate", "3"],
    "ufm": ["tta", "photos", *LEARN, *VIEWS],
    "sar": ["tta", "photos", *LEARN, *VIEWS, "--objective", "sar"],
    "balanced": ["tta", "photos", *LEARN, *VIEWS, "--objective", "balanced-entropy"],
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
    """All that a run learned."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        if path.name != "state.safetensors":
            for name, tensor in load_file(path).items():
                values = tensor.double().flatten().tolist()
                found |= {f"{path.name}:{name}:{n}": value for n, value in enumerate(values)}
    if (folder / "recipe.yaml").exists():
        table = yaml.safe_load((folder / "recipe.yaml").read_text())["coefficients"]
        for vector, row in table.items():
            found |= {f"{vector}:{block}": value for block, value in row.items()}
    return found


def difference(ours: Path, theirs: Path) -> float:
    """The largest difference of two runs; the relative one of numbers above 1, as heads have."""
    mine, others = numbers(ours), numbers(theirs)
    assert mine.keys() == others.keys()
    assert others
    return max(abs(mine[key] - others[key]) / max(1, abs(others[key])) for key in others)


def losses(folder: Path) -> list[float]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def check_same(ours: Path, theirs: Path) -> None:
    """All that was learned and the loss of every step are the same, and something was learned."""
    assert difference(ours, theirs) < 1e-5
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-5)
    # These may find nothing that is better than zero; their losses tell.
    assert any(numbers(ours).values()) or ours.name.startswith(("kfold", "sar"))


def test_two_processes_fit_what_one_does_and_only_the_first_speaks(world: Path):
    given = ["fit", "photos", *LEARN[:-1], "-v"]
    (alone,) = ended([start(*given, "-o", "fit1", cwd=world)])
    assert alone[0] == 0, alone
    first, second = ended(started(world, 2, *given, "-o", "fit2"))
    assert (first[0], second) == (0, (0, "", "")), (first, second)
    check_same(world / "fit1", world / "fit2")
    both = ended(started(world, 2, *given, "--shard-vectors", "-o", "fit2-shared"))
    assert [one[0] for one in both] == [0, 0], both
    check_same(world / "fit1", world / "fit2-shared")
    (line,) = [line for line in first[2].splitlines() if "bytes sent" in line]
    count = len(numbers(world / "fit1"))
    # A number in float64 for each coefficient and five facts, whatever the size of the model.
    assert int(line.split()[3].replace(",", "")) == 8 * (count + 5) <= 4 * count * 4
    predictions = []
    for ranks in (1, 2):
        asked = ["eval", "base", "--data", "photos", "--predictions", f"p{ranks}", "-q"]
        found = ended(started(world, 2, *asked) if ranks > 1 else [start(*asked, cwd=world)])
        assert [one[0] for one in found] == [0] * ranks, found
        predictions.append((found[0][1], (world / f"p{ranks}").read_text()))
    assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_a_process_that_waits_for_another_ends_when_it_is_told_to(world: Path):
    """torch gives no signal handler a chance while it waits."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    process = start(*RUNS["fit"], "-o", "alone", cwd=world, env=os.environ | shared)
    waits = False
    while not waits and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            waits = True
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (143, "")
    assert not (world / "alone").exists()


@pytest.mark.slow
def test_a_signal_to_a_process_that_looks_for_the_first_is_at_most_one_line(world: Path):
    """torch would tell of each interrupted call, with a stack of its own."""
    with socket.create_server(("localhost", 0)) as first:
        port = str(first.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        process = subprocess.Popen(
            [*COLD, *RUNS["fit"], "-o", "alone"],
            cwd=world,
            env=os.environ | shared,
            stderr=subprocess.PIPE,
            text=True,
        )
        first.settimeout(TIMEOUT)
        first.accept()[0].close()
    for number in (signal.SIGINT, signal.SIGTERM):
        time.sleep(0.2)
        process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode in (130, 143), err
    assert len(err.splitlines()) <= 1, err
    assert not (world / "alone").exists()


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
            check_same(world / f"{name}1", world / folder)


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


@pytest.mark.slow
def test_torchrun_itself_runs_a_command_and_the_first_process_speaks(world: Path):
    given = [*RUNS["fit"], "-o"]
    (alone,) = ended([start(*given, "by-itself", cwd=world)])
    assert alone[0] == 0, alone
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "atlas_cli"]
    done = subprocess.run(
        [*torchrun, *given, "by-torchrun"],
        cwd=world,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(alone[1].splitlines())  # one of them prints
    check_same(world / "by-itself", world / "by-torchrun")


# The second process does not see the files, as on a machine where they are not mounted.
NO_FILES = """
import os
if os.environ.get("RANK") == "1":
    os.chdir(os.path.dirname(__file__))
"""


@pytest.mark.slow
def test_one_process_that_fails_ends_all_with_its_own_line_and_exit_code(
    world: Path, tmp_path: Path
):
    (tmp_path / "sitecustomize.py").write_text(NO_FILES)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*COLD, *RUNS["fit"], "--launch", "2", "-o", "one-fails"],
        cwd=world,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("atlas: error: ")
    assert not (world / "one-fails" / "recipe.yaml").exists()


def test_torchrun_takes_the_lines_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")
    found = re.findall(r"torchrun (--.*?-m atlas_cli .*?)\n", page, re.DOTALL)
    assert len(found) == 4
    for line in found:
        line = re.sub(r"\$\([^)]*\)", "host", line.replace("\\\n", " "))
        words = shlex.split(re.sub(r"\$\w+", "1", line))
        given = get_args_parser().parse_args(words)
        assert (given.module, given.training_script) == (True, "atlas_cli")
        assert given.training_script_args[0] == "fit"
