"""atlas report, and atlas inspect of runs: what is written, what is refused, the same bytes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from learned_runs import learn, write_world

from atlas_cli.errors import install_hint
from atlas_cli.reports.runs import read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs `fit` and `tta`."""
    root = tmp_path_factory.mktemp("runs")
    world = write_world(root / "world")
    learn(world, "fit", root / "fit")
    learn(world, "tta", root / "tta", "--select", "last")
    return root


def test_a_report_is_one_page_and_its_path_is_printed(call, run, runs: Path, tmp_path: Path):
    path = tmp_path / "report.html"
    result = call("report", runs / "fit", runs / "tta", "-o", path)
    assert (result.code, result.out, result.err) == (0, f"{path}\n", "")
    text = path.read_text()
    for word in ("loss of every step", "Learned recipe", "recipe.weight_decay", 'label="runs"'):
        assert word in text
    for line in (runs / "fit" / "metrics.jsonl").read_text().splitlines():
        assert f'data-value="{json.loads(line)["loss"]!r}"' in text
    for name in ("<cars>", "<fox>"):  # names are text, never markup
        assert name not in text
    shown = run("report", runs / "fit", runs / "tta", "-o", "-")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == text  # the same bytes


def test_a_report_that_exists_is_kept_unless_forced(call, runs: Path, tmp_path: Path):
    path = tmp_path / "r.html"
    path.write_text("mine")
    result = call("report", runs / "fit", "-o", path)
    assert (result.code, result.out) == (1, "")
    assert result.err == f"atlas: error: {path}: exists already; use --force to replace it\n"
    assert path.read_text() == "mine"
    assert call("report", runs / "fit", "-o", path, "--force").code == 0
    assert path.read_text().startswith("<!doctype html>")


def test_what_is_no_run_is_named_and_nothing_is_written(call, runs: Path, tmp_path: Path):
    result = call("report", runs / "fit", runs / "world", "-o", tmp_path / "r.html")
    assert (result.code, result.out, len(result.error_lines)) == (2, "", 1)
    assert "world: holds no run" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_is_shown_as_far_as_it_went(call, runs: Path, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_bytes((runs / "fit" / name).read_bytes())
    assert call("report", folder, "-o", tmp_path / "r.html").code == 0
    assert "This run has no result yet" in (tmp_path / "r.html").read_text()
    drawn = call("inspect", folder, "--plot", tmp_path / "x.svg")
    assert (drawn.code, drawn.out) == (0, "")
    refused = call("inspect", folder)
    assert (refused.code, len(refused.error_lines)) == (1, 1)
    assert "has no coefficients yet" in refused.err


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_without_the_extra_one_line_says_what_to_install(
    call, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
):
    monkeypatch.setitem(sys.modules, library, None)  # as Python notes what is not there
    result = call("report", runs / "fit", "-o", tmp_path / "r.html")
    line = f"atlas: error: atlas report needs {library}; run: {install_hint('plot')}\n"
    assert (result.code, result.out, result.err) == (1, "", line)


# atlas inspect --------------------------------------------------------------------------------


def test_a_run_is_drawn_with_the_same_bytes_each_time(call, runs: Path, tmp_path: Path):
    for name in ("a.png", "a.svg", "b.svg", "a.pdf"):
        result = call("inspect", runs / "fit", "--plot", tmp_path / name)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("vector,block,coefficient\n")
        assert (tmp_path / name).stat().st_size > 10_000
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("command", "words"), [("fit", ("training top-1",)), ("tta", ("agreement",))]
)
def test_the_picture_has_coefficients_curves_and_classes(
    call, runs: Path, tmp_path: Path, command: str, words: tuple[str, ...]
):
    path = tmp_path / "x.svg"
    assert call("inspect", runs / command, "--plot", path).code == 0
    text = path.read_text()
    for word in ("birds", "mlp.c_fc.weight", "outside the layers", "loss of every step", "cat"):
        assert word in text
    for word in words:
        assert f"{word} of every step, in percent" in text
        assert text.count(">100</text>") >= 1  # percent, as on every axis of an accuracy
        assert "100%" not in text
    assert text.count(">zero-shot</text>") == 1  # one legend, that of the classes


@pytest.mark.parametrize("name", ["coefficients.json", "recipe.yaml"])
def test_coefficients_alone_are_drawn_and_shown(call, runs: Path, tmp_path: Path, name: str):
    assert call("inspect", runs / "fit" / name, "--plot", tmp_path / "x.pdf").code == 0
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF-")
    result = call("inspect", runs / "fit" / name, "--plot", tmp_path / "x.svg")
    assert (result.code, result.out) == (0, call("inspect", runs / "fit").out)
    text = (tmp_path / "x.svg").read_text()
    assert "mlp.c_fc.weight" in text
    assert "loss" not in text


@pytest.mark.parametrize("name", ["coefficients.json", "recipe.yaml"])
def test_coefficients_from_a_pipe(
    call, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    with (runs / "fit" / name).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        result = call("inspect", "-", "--plot", tmp_path / "x.png")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("vector,block,coefficient\nbirds,")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_run_is_drawn_as_a_page(call, runs: Path, tmp_path: Path):
    assert call("inspect", runs / "fit", "--plot", tmp_path / "x.html").code == 0
    assert "training top-1 of every step, in percent" in (tmp_path / "x.html").read_text()


def test_a_table_as_json_says_its_coefficients(call, runs: Path):
    path = runs / "fit" / "coefficients.json"
    found = json.loads(call("inspect", path, "--json").out)
    assert found["coefficients"] == json.loads(path.read_text())
    assert [row["vector"] for row in found["summary"]] == ["birds", "<cars>"]


def test_task_vectors_are_drawn_as_a_page(call, runs: Path, tmp_path: Path):
    vectors = sorted((runs / "world" / "v").iterdir())
    assert call("inspect", *vectors, "--plot", tmp_path / "x.html").code == 0
    assert "cosine" in (tmp_path / "x.html").read_text()


def test_the_folder_of_an_earlier_version_is_the_same_run(call, runs: Path, tmp_path: Path):
    """It has shares between 0 and 1 and names no unit; there were no test images."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "fit", folder)
    (folder / "images.jsonl").unlink()
    result = json.loads((folder / "result.json").read_text())
    for one in (result, *result["classes"][0]["classes"].values()):
        one |= {key: one[key] / 100 for key in ("zero_shot", "learned")}
    del result["unit"]
    (folder / "result.json").write_text(json.dumps(result))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [{**row, "accuracy": row.pop("top1_percent") / 100} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in shares))
    old, new = read_run(folder), read_run(runs / "fit")
    assert (old.scores, old.classes, old.table) == (new.scores, new.classes, new.table)
    assert [dict(row) for row in old.metrics] == [pytest.approx(row) for row in new.metrics]
    assert call("inspect", folder).out == call("inspect", runs / "fit").out
    assert call("report", folder, "-o", tmp_path / "r.html").code == 0


def test_two_runs_at_once_are_for_a_report(call, runs: Path):
    result = call("inspect", runs / "fit", runs / "tta")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert "is shown alone" in result.err


def test_a_search_is_called_a_search(call, runs: Path, tmp_path: Path):
    folder = learn(runs / "world", "fit", tmp_path / "searched", "--method", "search")
    result = call("report", folder, "-o", tmp_path / "r.html")
    assert result.code == 0
    body = (tmp_path / "r.html").read_text().partition('<script type="module">')[0]
    assert "<td>search</td>" in body
    assert "<button>search</button>" in body
    assert "<td>learned</td>" not in body
    assert "<button>learned</button>" not in body
