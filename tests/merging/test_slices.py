"""Slices of a merge that several processes write make the model that one process does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import warm
from conftest import TIMEOUT
from merge_runs import ROOMY, digests, linear, llama, write_model, write_recipe

from atlas_cli.io.journal import Written, read_pieces

TIES = {
    "merge_method": "ties",
    "base_model": "./m1",
    "models": [{"model": f"./m{n}", "parameters": {"density": 0.5, "weight": 0.7}} for n in (2, 3)],
    "out_dtype": "bfloat16",
}
SHARDS = ("--max-shard-size", "1kB")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_model(tmp_path / f"m{number}", llama(number))
    return write_recipe(tmp_path / "r.yaml", TIES)


def test_slices_in_any_order_make_the_same_bytes_as_one_process(call, recipe: Path):
    assert call("merge", recipe, "-o", "whole", *SHARDS, *ROOMY).code == 0
    wanted = digests(Path("whole"))
    assert len(wanted) > 5
    for count in (2, 3):
        for number in reversed(range(1, count + 1)):
            part = ("--slice", f"{number}/{count}")
            found = call("merge", recipe, "-o", "out", *SHARDS, *part, *ROOMY)
            assert (found.code, found.out) == (0, f"out {number}/{count}\n")
            assert not Path("out").exists()
        found = call("merge", recipe, "-o", "out", *SHARDS, "--finish", *ROOMY)
        assert (found.code, found.out, found.err) == (0, "out\n", "")
        assert digests(Path("out")) == wanted
        assert not Path(".out.part").exists()
        shutil.rmtree("out")


def test_each_slice_writes_about_as_many_bytes(call, recipe: Path):
    sizes = []
    for number in (1, 2, 3):
        asked = ("--slice", f"{number}/3", "--json", *ROOMY)
        sizes.append(json.loads(call("merge", recipe, "-o", "out", *asked).out)["bytes"])
    assert max(sizes) - min(sizes) < sum(sizes) / 10
    found = json.loads(call("merge", recipe, "-o", "out", "--finish", "--json", *ROOMY).out)
    assert sum(sizes) < found["bytes"]  # with headers


def test_what_cannot_be_finished_is_one_line(call, recipe: Path, tmp_path: Path):
    def refused(code: int, text: str, *given: str | Path) -> None:
        found = call("merge", *given, *ROOMY)
        assert (found.code, found.out, len(found.error_lines)) == (code, "", 1), found
        assert text in found.err

    refused(1, "out: has no slices to finish", recipe, "-o", "out", "--finish")
    assert call("merge", recipe, "-o", "out", "--slice", "2/4", *ROOMY).code == 0
    missing = "slices are missing or not complete: 1/4, 3/4, 4/4; write them with --slice"
    refused(1, missing, recipe, "-o", "out", "--finish")
    refused(1, "was begun in 4 slices, not 3", recipe, "-o", "out", "--slice", "1/3")
    other = write_recipe(tmp_path / "other.yaml", linear(1, 2))
    for given in (["--slice", "1/4"], ["--finish"]):
        refused(1, "slices of another recipe, of other inputs", other, "-o", "out", *given)
    weights = tmp_path / "m2" / "model.safetensors"
    os.utime(weights, (time.time() + 9, time.time() + 9))
    for given in (["--slice", "1/4"], ["--finish"]):
        refused(1, "slices of another recipe, of other inputs", recipe, "-o", "out", *given)
    for text in ("0/3", "4/3", "1", "1/0", "a/b"):
        refused(2, f"--slice {text}: expected I/N", recipe, "-o", "new", "--slice", text)
    for more in (["--finish"], ["--dry-run"], ["--push", "me/it"]):
        refused(2, f"without {more[0]}", recipe, "-o", "new", "--slice", "1/2", *more)
    refused(2, "give one of them", recipe, "-o", "new", "--finish", "--dry-run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("")
    refused(1, "exists already", recipe, "-o", "full", "--slice", "1/2")
    refused(1, "not written by atlas merge", recipe, "-o", "full", "--slice", "1/2", "--force")
    several = [linear(1, 2, name="first"), linear(1)]
    several[1]["models"][0]["model"] = "first"
    steps = tmp_path / "steps.yaml"
    steps.write_text("---\n".join(json.dumps(one) + "\n" for one in several))
    refused(2, "the recipe has several merges", steps, "-o", "new", "--slice", "1/2")
    assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name) == []


def test_a_line_of_a_journal_that_was_cut_short_is_no_piece(tmp_path: Path):
    journal = tmp_path / "journal"
    assert read_pieces(journal) == ({}, 0, True)
    place = f"8 4 {'0' * 16} a b.safetensors"
    journal.write_text(f"3 0 {place}\nnonsense\n12 1 {place}\n4 0 8 4")
    wanted = Written("a b.safetensors", 8, 4, "0" * 16)
    assert read_pieces(journal) == ({(3, 0): wanted, (12, 1): wanted}, 92, False)


@pytest.mark.parametrize(
    "wanted_kills",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.campaign)],
)
def test_kills_of_slices_and_the_same_commands_again_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted_kills: int
):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_model(tmp_path / f"m{number}", llama(number, layers=24, width=370))
    recipe = write_recipe(tmp_path / "r.yaml", TIES)

    def start(*more: str):
        return warm.start("merge", recipe, "-o", "out", "-q", *ROOMY, *more)

    def ended(process) -> int:
        process.communicate(timeout=TIMEOUT)
        return process.returncode

    assert ended(start()) == 0
    wanted = digests(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    chance, kills, places = random.Random(20), 0, set()
    while kills < wanted_kills:
        count = chance.choice((2, 3))
        left = {f"{number}/{count}" for number in range(1, count + 1)}
        while left:  # all at once, one of them killed after some more pieces
            running = {part: start("--slice", part) for part in sorted(left)}
            victim = chance.choice(sorted(left))
            journal = tmp_path / ".out.part" / f"slice-{victim.replace('/', '-of-')}"
            after = len(read_pieces(journal)[0]) + chance.randint(0, 12)
            while running[victim].poll() is None and len(read_pieces(journal)[0]) < after:
                time.sleep(0.0005)
            running[victim].kill()
            found = {part: ended(process) for part, process in running.items()}
            assert set(found.values()) <= {0, -signal.SIGKILL}, found
            if found[victim]:
                kills += 1
                places.add(after)
            left = {part for part, code in found.items() if code}
        finishing = start("--finish")
        time.sleep(chance.random() * 0.3)
        finishing.kill()
        if ended(finishing):
            kills += 1
            if not (tmp_path / "out").exists():
                assert ended(start("--finish")) == 0
        assert digests(tmp_path / "out") == wanted
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / ".out.part", ignore_errors=True)  # killed after the last rename
    assert len(places) > 4
