"""The folder of a run loses no bit of where it stood, and nothing of anyone else's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import resource
import struct
import time
from pathlib import Path

import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atlas_cli.core.optimizers import CoefficientOptimizer, OptimizerConfig
from atlas_cli.errors import AtlasError, CheckpointError, UsageError
from atlas_cli.io.checkpoint import read_metadata
from atlas_cli.io.files import FolderLock
from atlas_cli.learning.batches import Step
from atlas_cli.learning.loop import Checkpoint, CoefficientTrainer
from atlas_cli.learning.run_folder import RunFolder, SavedRun, check_folder, open_run
from atlas_cli.learning.selection import Score

CONFIG = {
    "command": "fit",
    "recipe": {"seed": 0, "lr": 0.1, "data": "shots"},
    "vectors": [{"name": "cars", "sha256": "ab"}],
    "versions": {"atlas": "0.1.0"},
}
TABLE = {"cars": {"a": 0.5}}


def moment_after(steps: int) -> Checkpoint:
    """A moment as learning makes it, with an optimizer's memory in it."""
    optimizer = CoefficientOptimizer(torch.zeros(2, 3), 10, OptimizerConfig())
    for number in range(steps):
        optimizer.step(torch.arange(6.0).view(2, 3) - number)
    checks = {
        "holdout": [
            Score((1 / 3, -math.log(3)), {"accuracy": 1 / 3}),
            Score((0.1 + 0.2, -5e-324), {"accuracy": 0.1 + 0.2}, valid=False),
        ]
    }
    step = Step(steps, 1, 2 / 3, 0.7, 0.1 * math.cos(1)) if steps else None
    return Checkpoint(1, step, checks, torch.full((2, 3), 0.1), optimizer.state())


def facts(checkpoint: Checkpoint) -> tuple:
    checks = {
        name: [dataclasses.astuple(check) for check in found]
        for name, found in checkpoint.scores.items()
    }
    return checkpoint.fold, checkpoint.step, checks


def same(first: Checkpoint, second: Checkpoint) -> bool:
    tensors = zip(
        [*sorted(first.state.items()), ("best", first.best)],
        [*sorted(second.state.items()), ("best", second.best)],
        strict=True,
    )
    return facts(first) == facts(second) and all(
        a == b and left.dtype == right.dtype and torch.equal(left, right)
        for (a, left), (b, right) in tensors
    )


def start(folder: Path, config: dict = CONFIG) -> RunFolder:
    with open_run(folder, config, {}, resume=False, force=True) as run:
        return run


def go_on(folder: Path, config: dict = CONFIG) -> RunFolder:
    with open_run(folder, config, {}, resume=True, force=False) as run:
        return run


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def save(run: RunFolder, checkpoint: Checkpoint, *steps: int) -> None:
    for step in steps:
        run.record({"step": step})
    run.save(*CoefficientTrainer.to_saved(checkpoint))


# What is saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_moment_comes_back_without_losing_a_bit(tmp_path: Path, steps: int):
    checkpoint = moment_after(steps)
    save(start(tmp_path / "run"), checkpoint)
    saved = go_on(tmp_path / "run").restore()
    assert saved is not None
    assert same(CoefficientTrainer.from_saved(saved), checkpoint)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.floats(max_value=0, allow_nan=False, allow_infinity=True),
        )
    ),
    st.floats(allow_nan=False),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
)
def test_every_number_comes_back_through_json(
    pairs: list[tuple[float, float]], loss: float, values: list[float]
):
    checks = {
        "fold 1": [Score(pair, {"a": pair[0]}, pair[0] > 0.5) for pair in pairs],
        "fold 2": [],
    }
    best = torch.tensor(values)
    checkpoint = Checkpoint(
        2, Step(3, 1, loss, 0.5, 0.1), checks, best, {"number": torch.tensor(3)}
    )
    tensors, facts = CoefficientTrainer.to_saved(checkpoint)
    assert same(
        CoefficientTrainer.from_saved(SavedRun(tensors, json.loads(json.dumps(facts)))), checkpoint
    )


def test_the_last_save_counts(tmp_path: Path):
    run = start(tmp_path / "run")
    save(run, moment_after(1), 1)
    save(run, moment_after(5), 2, 3)
    again = go_on(tmp_path / "run")
    assert same(CoefficientTrainer.from_saved(again.restore()), moment_after(5))
    assert rows(tmp_path / "run") == [{"step": 1}, {"step": 2}, {"step": 3}]
    save(again, moment_after(6), 4)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_that_was_never_saved_starts_at_the_beginning(tmp_path: Path):
    run = start(tmp_path / "run")
    run.record({"step": 1})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')  # stopped within the save
    again = go_on(tmp_path / "run")
    assert again.restore() is None
    assert rows(tmp_path / "run") == []


@pytest.mark.parametrize("tail", ['{"step": 3}\n{"step": 4}\n', '{"step": 3}\n{"st', '{"step": 3'])
def test_rows_after_the_last_save_are_cut(tmp_path: Path, tail: str):
    save(start(tmp_path / "run"), moment_after(2), 1, 2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(tail)  # a save that did not come to writing the state
    again = go_on(tmp_path / "run")
    again.restore()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    save(again, moment_after(3), 3)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_missing_rows_are_an_error(tmp_path: Path):
    save(start(tmp_path / "run"), moment_after(2), 1, 2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: has 1 rows, but the run had 2"):
        go_on(tmp_path / "run").restore()


# Damage ---------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:8] = struct.pack("<Q", 2**40)
    path.write_bytes(content)


def without_facts(path: Path) -> None:
    save_file(load_file(path), path, {"format": "pt"})


def with_facts(text: str):
    def change(path: Path) -> None:
        save_file(load_file(path), path, {"atlas_run": text})

    return change


def without_best(path: Path) -> None:
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "best"}
    facts = '{"stage": 0, "step": null, "checks": {}, "rows": 0}'
    save_file(tensors, path, {"atlas_run": facts})


DAMAGES = {
    "cut short": cut_short,
    "empty": cut_to_nothing,
    "header": flip_header,
    "no facts": without_facts,
    "half of the facts": with_facts('{"stage": 0, '),
    "a list of facts": with_facts("[1]"),
    "no rows": with_facts('{"stage": 0, "step": null, "checks": {}}'),
    "rows in words": with_facts('{"stage": 0, "step": null, "checks": {}, "rows": "two"}'),
    "no checks": with_facts('{"stage": 0, "step": null, "rows": 0}'),
    "another step": with_facts('{"stage": 0, "step": {"size": 1}, "checks": {}, "rows": 0}'),
    "another check": with_facts('{"stage": 0, "step": null, "checks": {"a": [[1]]}, "rows": 0}'),
    "no best": without_best,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_one_clear_error(tmp_path: Path, damage):
    save(start(tmp_path / "run"), moment_after(2), 1)
    damage(tmp_path / "run" / "state.safetensors")
    with pytest.raises(CheckpointError) as problem:
        CoefficientTrainer.from_saved(go_on(tmp_path / "run").restore())
    assert "state.safetensors" in str(problem.value)
    assert len(str(problem.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff"])
def test_a_damaged_configuration_is_one_clear_error(tmp_path: Path, text: str):
    start(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(AtlasError, match=r"config\.json") as problem:
        go_on(tmp_path / "run")
    assert len(str(problem.value).splitlines()) == 1


# Another configuration ------------------------------------------------------------------------


def changed(**recipe: object) -> dict:
    return {**CONFIG, "recipe": {**CONFIG["recipe"], **recipe}}


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (changed(lr=0.2), "recipe.lr 0.1, not 0.2"),
        (changed(seed=1, lr=0.2), "recipe.lr 0.1, not 0.2"),  # the first by name
        (changed(data="other"), 'recipe.data "shots", not "other"'),
        (changed(clip=1), "recipe.clip null, not 1"),
        ({**CONFIG, "command": "add"}, 'command "fit", not "add"'),
        ({**CONFIG, "device": "cuda"}, 'device null, not "cuda"'),
    ],
)
def test_a_run_that_was_begun_otherwise_is_refused_by_the_first_difference(
    tmp_path: Path, config: dict, difference: str
):
    save(start(tmp_path / "run"), moment_after(2), 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UsageError) as problem:
        go_on(tmp_path / "run", config)
    assert str(problem.value) == (
        f"{tmp_path / 'run'}: was begun with {difference}; "
        "repeat its command, or start anew with --force"
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_other_vectors_are_refused(tmp_path: Path):
    start(tmp_path / "run")
    vectors = [{"name": "cars", "sha256": "cd"}]
    with pytest.raises(UsageError, match="was begun with vectors"):
        go_on(tmp_path / "run", {**CONFIG, "vectors": vectors})


def test_another_version_of_a_library_may_go_on(tmp_path: Path):
    save(start(tmp_path / "run"), moment_after(2), 1)
    run = go_on(tmp_path / "run", {**CONFIG, "versions": {"atlas": "0.2.0", "torch": "9"}})
    assert run.restore() is not None


def test_starting_anew_leaves_nothing_of_the_run_before(tmp_path: Path):
    run = start(tmp_path / "run")
    save(run, moment_after(2), 1)
    run.keep_large(torch.ones(2, 3))
    run.finish("merge_method: atlas\n", TABLE)
    start(tmp_path / "run", changed(seed=1))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["seed"] == 1


def test_resuming_where_nothing_began_starts(tmp_path: Path):
    run = go_on(tmp_path / "run")
    assert run.restore() is None
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIG


# The end --------------------------------------------------------------------------------------


def test_a_whole_run_has_its_recipe_and_its_table(tmp_path: Path):
    run = start(tmp_path / "run")
    assert run.recipe() is None
    run.finish("merge_method: atlas\n", TABLE)
    assert run.recipe() == "merge_method: atlas\n"
    assert json.loads((tmp_path / "run" / "coefficients.json").read_text()) == TABLE


def test_a_large_table_is_kept_as_a_tensor(tmp_path: Path):
    run = start(tmp_path / "run")
    table = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    path = run.keep_large(table)
    run.finish("merge_method: atlas\n", None)
    assert torch.equal(load_file(path)["coefficients"], table)
    assert not (tmp_path / "run" / "coefficients.json").exists()


def test_a_run_in_vain_removes_the_folder_that_it_made(tmp_path: Path):
    run = start(tmp_path / "run")
    save(run, moment_after(2), 1)
    run.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_vain_leaves_a_folder_that_was_there_as_empty_as_before(tmp_path: Path):
    (tmp_path / "run").mkdir()
    run = start(tmp_path / "run")
    save(run, moment_after(2), 1)
    run.abandon()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_in_vain_leaves_what_others_put_there(tmp_path: Path):
    run = start(tmp_path / "run")
    save(run, moment_after(2), 1)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "plots").mkdir()
    run.abandon()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["notes.txt", "plots"]


def test_a_run_that_goes_on_in_vain_keeps_what_there_was(tmp_path: Path):
    save(start(tmp_path / "run"), moment_after(2), 1)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    go_on(tmp_path / "run").abandon()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


# Folders --------------------------------------------------------------------------------------


def may(folder: Path, *, resume: bool = False, force: bool = False) -> str | None:
    try:
        check_folder(folder, resume=resume, force=force)
    except AtlasError as problem:
        return str(problem).removeprefix(str(folder))
    return None


def test_a_new_or_empty_folder_may_be_used_and_is_not_made_by_asking(tmp_path: Path):
    assert may(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert may(tmp_path / "run") is None


def test_a_folder_with_a_run_may_be_used_only_if_that_is_said(tmp_path: Path):
    start(tmp_path / "run")
    assert may(tmp_path / "run") == ": holds a run; --resume goes on with it, --force starts anew"
    assert may(tmp_path / "run", resume=True) is None
    assert may(tmp_path / "run", force=True) is None


def test_a_folder_of_someone_else_is_never_used(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    for how in ({}, {"resume": True}, {"force": True}):
        assert may(tmp_path / "run", **how) == ": is not empty, and holds no run"


def test_a_file_or_a_place_that_is_not_there_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert may(tmp_path / "file") == ": is a file"
    with pytest.raises(AtlasError, match=f"{tmp_path / 'no'}: no such folder"):
        check_folder(tmp_path / "no" / "run", resume=False, force=False)


def test_a_folder_that_is_gone_is_one_clear_error(tmp_path: Path):
    run = start(tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(AtlasError, match="run: cannot be written: No such file or directory"):
        save(run, moment_after(1), 1)


# One folder, one writer -----------------------------------------------------------------------


def test_a_second_run_does_not_write_the_folder_of_the_first(call, tmp_path: Path):
    given = ("--model", "builtin:tiny", "--vectors", "builtin:letters", "--shots", "1")
    given += ("--batch-size", "10", "--epochs")
    first = warm.start("fit", "builtin:digits", *given, "10000", "-o", tmp_path / "run")
    while first.poll() is None and not (tmp_path / "run" / "state.safetensors").exists():
        time.sleep(0.01)
    for more in ((), ("--force",), ("--resume",)):
        result = call("fit", "builtin:digits", *given, "1", "-o", tmp_path / "run", *more)
        assert (result.code, len(result.error_lines)) == (1, 1), result.err
        assert (
            f"process {(tmp_path / 'run' / '.atlas.lock').read_text().split()[0]} on" in result.err
        )
    first.kill()
    first.communicate()
    result = call("fit", "builtin:digits", *given, "1", "-o", tmp_path / "run", "--force")
    assert result.code == 0, result.err  # the lock of a process that has ended is stale
    assert not (tmp_path / "run" / ".atlas.lock").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 10


def test_a_lock_of_another_host_is_respected_until_it_is_removed(tmp_path: Path):
    (tmp_path / ".atlas.lock").write_text("123 elsewhere\n")
    with pytest.raises(AtlasError, match=r"process 123 on elsewhere writes it; .* remove .*\.lock"):
        FolderLock(tmp_path).take()
    (tmp_path / ".atlas.lock").write_bytes(b"\xff\xfe garbage")
    lock = FolderLock(tmp_path)
    lock.take()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_damaged_rows_of_metrics_are_one_line_and_change_no_result(tmp_path: Path):
    for number, damage in enumerate((b'{"step": 1\n', b"\xff\n", b"[\n")):
        folder = tmp_path / f"run{number}"
        run = start(folder)
        run.record({"step": 1})
        run.save({"a": torch.ones(1)}, {})
        (folder / "metrics.jsonl").write_bytes(damage)
        with pytest.raises(CheckpointError, match="is damaged; --force starts anew"):
            run.restore()


def test_damaged_rows_of_earlier_versions_are_noticed_without_a_digest(tmp_path: Path):
    save(start(tmp_path), moment_after(1), 1)
    state = tmp_path / "state.safetensors"
    facts = json.loads(read_metadata(state)["atlas_run"])
    del facts["rows_sha256"]
    save_file(load_file(state), state, {"atlas_run": json.dumps(facts)})
    assert go_on(tmp_path).restore() is not None
    (tmp_path / "metrics.jsonl").write_text('{"step": \n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: is damaged; --force starts anew"):
        go_on(tmp_path).restore()


def test_a_stale_lock_goes_also_when_the_folder_is_refused(call, tmp_path: Path):
    folder = tmp_path / "run"
    save(start(folder), moment_after(1), 1)
    stale = f"{2**22 + 1} {platform.node()}\n"
    for flags in ((), ("--resume",)):  # a folder with a run, and a run with another recipe
        (folder / ".atlas.lock").write_text(stale)
        given = ("--model", "builtin:tiny", "--vectors", "builtin:letters", "--shots", "1")
        result = call("fit", "builtin:digits", *given, "-o", folder, *flags)
        assert result.code == (2 if flags else 1), result.err
        assert not (folder / ".atlas.lock").exists()


def test_a_disk_that_takes_nothing_keeps_neither_a_lock_nor_a_folder(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, most in itertools.product(("run", "empty"), (0, 100)):  # 100: a lock, no more
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
        try:
            with pytest.raises(AtlasError) as caught:
                start(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert "cannot be written: File too large" in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_lock_that_its_holder_removes_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    usual = FolderLock._refuse_others

    def released_first(self: FolderLock, handle: int) -> None:
        first.release()
        usual(self, handle)

    monkeypatch.setattr(FolderLock, "_refuse_others", released_first)
    second.take()
    monkeypatch.setattr(FolderLock, "_refuse_others", usual)
    with pytest.raises(AtlasError, match="writes it"):
        FolderLock(tmp_path).take()
    second.release()


# Damage and left-overs ------------------------------------------------------------------------


def test_a_digit_that_changed_in_saved_rows_is_noticed(tmp_path: Path):
    save(start(tmp_path), moment_after(1), 1, 2)
    metrics = tmp_path / "metrics.jsonl"
    for sound, damaged in (("2", "3"), ("1", "9")):
        whole = metrics.read_text()
        metrics.write_text(whole.replace(sound, damaged))
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: is damaged; --force"):
            go_on(tmp_path).restore()
        metrics.write_text(whole)
    again = go_on(tmp_path)
    assert again.restore() is not None
    save(again, moment_after(2), 3)  # the digest goes on from the rows that were there
    assert go_on(tmp_path).restore() is not None


def test_a_new_run_keeps_no_result_of_the_old_one(tmp_path: Path):
    for name in ("head.safetensors", "projection.safetensors", "layernorm.safetensors"):
        run = start(tmp_path / "run")
        (tmp_path / "run" / name).touch()
        start(tmp_path / "run")
        assert not (tmp_path / "run" / name).exists()
        (tmp_path / "run" / name).touch()
        run.abandon()
        assert not (tmp_path / "run" / name).exists()


def test_what_a_kill_left_of_files_in_the_making_goes_with_the_next_run_at_once(tmp_path: Path):
    for begin in (start, go_on):
        save(start(tmp_path), moment_after(1), 1)
        for name in (".state.safetensors.atlas-ab12.part", ".result.json.atlas-x.part"):
            (tmp_path / name).write_text("half")
        (tmp_path / ".model.atlas-cd34.part").mkdir()
        (tmp_path / ".mine.part").touch()
        begin(tmp_path)
        assert [path.name for path in tmp_path.glob(".*")] == [".mine.part"]


def test_a_pipe_in_the_place_of_a_lock_is_one_line_and_stays(tmp_path: Path):
    save(start(tmp_path), moment_after(1), 1)
    os.mkfifo(tmp_path / ".atlas.lock")
    for refused in (go_on, lambda folder: check_folder(folder, resume=True, force=False)):
        with pytest.raises(AtlasError, match=r"\.atlas\.lock: is in the way, and is no file"):
            refused(tmp_path)
        assert (tmp_path / ".atlas.lock").is_fifo()


def test_no_descriptor_beyond_the_lock_leaves_no_lock(tmp_path: Path):
    save(start(tmp_path), moment_after(1), 1)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in (0, 1, 2):
        free = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, usual[1]))
        try:
            with contextlib.suppress(AtlasError):
                go_on(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert not (tmp_path / ".atlas.lock").exists()


def test_what_a_kill_left_is_swept_also_from_a_folder_that_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".model.atlas-0_ab.part").mkdir()
    (tmp_path / ".recipe.yaml.atlas-1.part").touch()
    for path in tmp_path.glob(".*.part"):
        os.utime(path, (time.time() - 3600,) * 2)
    (tmp_path / ".model.atlas-young.part").mkdir()
    with pytest.raises(AtlasError, match="is not empty, and holds no run"):
        check_folder(tmp_path, resume=True, force=False)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", ".model.atlas-young.part"}


def test_a_bit_that_changed_in_a_state_is_noticed_and_states_without_a_digest_are_read(
    tmp_path: Path,
):
    run = start(tmp_path)
    run.save({"a": torch.arange(6.0)}, {"step": 1})
    state = tmp_path / "state.safetensors"
    whole = state.read_bytes()
    for place in (len(whole) - 3, whole.index(b"step") + 8):
        state.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"state\.safetensors: is "):
            go_on(tmp_path).restore()
    save_file({"a": torch.arange(6.0)}, state, {"atlas_run": '{"rows": 0}'})
    assert go_on(tmp_path).restore().tensors["a"].tolist() == [0, 1, 2, 3, 4, 5]
