"""`atlas demo`: command lines that can be copied, stopped, and run again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import TIMEOUT
from warm import atlas, start

from atlas_cli.cli.demo_run import Story, going_on
from atlas_cli.cli.demo_story import (
    EXPERIMENTS,
    CommandLine,
    Experiment,
    Section,
    drawing,
    identity,
    scores_file,
    sections,
    table,
)

COMMANDS = {"extract", "negate", "add", "fit", "tta", "merge", "eval"}


def test_all_seven_commands_have_a_part() -> None:
    used = {line.arguments[0] for section in sections() for line in section.lines}
    assert used >= COMMANDS


def test_a_line_comes_after_those_that_make_what_it_reads() -> None:
    lines = [line for section in sections() for line in section.lines]
    for number, line in enumerate(lines):
        assert not any(line.needs(later) for later in lines[number:]), line
    names = {line.name: line for line in lines if line.made}
    assert names["few_shot_model"].needs(names["few_shot"])
    assert lines[-1].needs(names["few_shot_uniform_model"])
    assert not names["few_shot_uniform"].needs(names["few_shot"])


def test_no_line_takes_a_vector_of_the_task_that_it_is_tested_on() -> None:
    for experiment in EXPERIMENTS[:2]:  # to forget or to combine tasks is to use their own vectors
        assert not set(experiment.tested) & set(experiment.learn[2:])


def test_the_table_holds_what_eval_printed() -> None:
    scores = {experiment.name: scores_of(experiment) for experiment in EXPERIMENTS}
    few, blind, forgotten, kept, together = table(scores)
    assert (few.zero_shot, few.uniform, few.learned) == (1, 2, 3)
    assert (blind.zero_shot, blind.uniform, blind.learned) == (1, 2, 3)
    assert (forgotten.zero_shot, forgotten.uniform, forgotten.learned) == (1, 3, 5)
    assert (kept.zero_shot, kept.uniform, kept.learned) == (2, 4, 6)
    assert (together.zero_shot, together.uniform, together.learned) == (2, 5, 8)


def scores_of(experiment: Experiment) -> dict[str, object]:
    """What eval prints of an experiment, with 1, 2, 3, ... for accuracies."""
    models = ["builtin:tiny", *(f"{run}_model" for run in experiment.runs)]
    pairs = [(model, data) for model in models for data in experiment.tested]
    results = [{"model": m, "data": d, "top1": n + 1} for n, (m, d) in enumerate(pairs)]
    return {"results": results}


def test_lines_that_run_at_once_are_told_one_after_the_other() -> None:
    first, second, third = (CommandLine(("eval", name), made=name) for name in ("a", "b", "c"))
    told: list[str] = []
    one, two = Section("one", (first, second)), Section("two", (third,))
    story = Story([(one, first), (one, second), (two, third)], told.append)
    story.begin(first)
    story.begin(second)
    story.end(second, "second says")
    assert told == ["\n# one", "$ atlas eval a"]
    story.begin(third)
    story.end(first, "first says")
    lines = [text for text in told[2:] if text]
    assert lines == ["first says", "$ atlas eval b", "second says", "\n# two", "$ atlas eval c"]
    story.end(third, "third says")
    assert told[-1] == "third says"


def test_every_line_knows_the_option_with_which_it_is_run_again(call) -> None:
    for line in [line for section in (*sections(), drawing("x.png")) for line in section.lines]:
        if line.made:
            text = call(line.arguments[0], "--help").out
            assert all(option in text for option in going_on(line))


def test_a_picture_beside_the_folder_is_called_by_its_name() -> None:
    """What a line says is kept in a file of that name within the folder of the demo."""
    (line,) = drawing("/somewhere/else/atlas-demo.png").lines
    assert line.name == "atlas-demo"


def test_a_line_that_fails_is_told_though_one_before_it_still_runs() -> None:
    first, second = (CommandLine(("eval", name), made=name) for name in ("a", "b"))
    told: list[str] = []
    one = Section("one", (first, second))
    story = Story([(one, first), (one, second)], told.append)
    story.begin(first)
    story.begin(second)
    story.end(second, "it failed")
    story.end_all()
    assert told[-2:] == ["$ atlas eval b", "it failed"]


def test_a_terminal_has_a_bar_and_quiet_has_the_table_alone(on_terminal, tmp_path: Path) -> None:
    """Every command is done already, as after a kill at the very end."""
    lines = [line for section in sections() for line in section.lines]
    done = [str(line) for line in (*lines, *drawing("coefficients.png").lines)]
    place = tmp_path / "d"
    place.mkdir()
    (place / "demo.json").write_text(json.dumps({"story": identity(), "done": done, "seconds": 1}))
    for experiment in EXPERIMENTS:
        (place / scores_file(experiment)).write_text(json.dumps(scores_of(experiment)))
    for columns in (40, 80, 120):
        shown = on_terminal("demo", "-o", place, columns=columns, COLUMNS="", NO_COLOR="1")
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
        assert (f"{len(lines)}/{len(lines)}" in plain) == (columns > 40)
        assert "━" in plain
        told = [row.strip() for row in plain.splitlines() if row.startswith("$ ")]
        assert len(told) >= len(lines)
    quiet = run("-o", str(place), "-q", cwd=tmp_path)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout.count("\n") == 6


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*atlas(), "demo", *arguments], cwd=cwd, capture_output=True, text=True)


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(
    as_ordinary_user, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    monkeypatch.chdir(locked)
    done = as_ordinary_user("demo")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "atlas: error: atlas-demo: cannot be written (Permission denied); "
        "choose another folder with -o DIR\n"
    )


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "atlas-demo").mkdir()
    (tmp_path / "atlas-demo" / "mine").write_text("mine")
    done = run("--force", cwd=tmp_path)
    assert done.returncode == 1
    assert "is not empty and holds no demo" in done.stderr
    assert (tmp_path / "atlas-demo" / "mine").read_text() == "mine"


def test_the_demo_of_another_version_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "demo.json").write_text(json.dumps({"story": "other", "done": []}))
    done = run("-o", "d", cwd=tmp_path)
    assert done.returncode == 1
    assert "d: holds the demo of another atlas; --force begins anew" in done.stderr


def test_a_command_that_fails_ends_the_demo_with_its_own_words(tmp_path: Path) -> None:
    lines = [line for section in sections()[:2] for line in section.lines]
    done = [str(line) for line in lines]
    (tmp_path / "d").mkdir()
    notes = {"story": identity(), "done": done, "seconds": 0.0}
    (tmp_path / "d" / "demo.json").write_text(json.dumps(notes))
    ended = run("-o", "d", cwd=tmp_path)
    assert ended.returncode == 1
    assert f"going on in d, where {len(done)} commands are done" in ended.stderr
    assert "together_uniform/recipe.yaml" in ended.stderr
    assert "failed with exit code" in ended.stderr


@pytest.mark.slow
def test_a_quiet_demo_tells_why_a_command_fails(tmp_path: Path) -> None:
    lines = [line for section in sections()[:2] for line in section.lines]
    (tmp_path / "d").mkdir()
    notes = {"story": identity(), "done": [str(line) for line in lines], "seconds": 0.0}
    (tmp_path / "d" / "demo.json").write_text(json.dumps(notes))
    ended = run("-o", "d", "-q", cwd=tmp_path)
    first, last = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert first.startswith("atlas: error: no such recipe: together")
    assert last.endswith("failed with exit code 2")


def test_a_kill_ends_the_commands_that_run(tmp_path: Path) -> None:
    process = start("demo", "-o", "d", cwd=tmp_path, stdout=-3, stderr=-3)
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "d" / "signs" / "config.json").exists():  # fine-tuning is under way
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert working_in(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + TIMEOUT
    while working_in(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def working_in(folder: Path) -> list[str]:
    """The processes whose working directory is within a folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (one / "cwd").readlink().is_relative_to(folder.resolve()):
                found.append(one.name)
    return found


def commands_done(folder: Path) -> int:
    """How many commands of a demo its notes say are done."""
    with suppress(OSError, ValueError):
        return len(json.loads((folder / "demo.json").read_text())["done"])
    return 0


@pytest.mark.campaign
def test_killed_and_run_again_it_goes_on_to_the_same_table(tmp_path: Path) -> None:
    whole = run("-o", "whole", "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    for done in (2, 7):  # commands, after which it is killed within another
        process = start("demo", "-o", "killed", "--json", cwd=tmp_path, stdout=-3, stderr=-3)
        while commands_done(tmp_path / "killed") < done and process.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    again = run("-o", "killed", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on in killed" in again.stderr
    rows = [json.loads(done.stdout)["rows"] for done in (whole, again)]
    assert rows[0] == rows[1]
    for row in rows[0]:
        if "to forget" not in row["what"]:
            assert row["learned"] > row["zero_shot"] or "to keep" in row["what"]
