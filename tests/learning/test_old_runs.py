"""Run folders that commit 6791ab2 wrote: shares for accuracies, and recipes with fewer keys.

`fit_stopped` is the run `fit`, interrupted after three steps. The fine-tuned one lacks its weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from atlas_cli.reports.runs import read_run

OLD = Path(__file__).parent.parent / "fixtures" / "old_runs"
FIT = (
    *("fit", "builtin:signs", "--model", "builtin:tiny", "--shots", "2", "--select", "holdout"),
    *("--vectors", "builtin:digits", "builtin:letters", "--granularity", "vector"),
    *("--epochs", "3", "--min-steps", "4", "--augment", "none", "--batch-size", "16"),
)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_they_are_shown_in_percent(call, tmp_path: Path):
    fit, negate, tta = (read_run(OLD / name) for name in ("fit", "negate", "tta"))
    assert fit.scores.rows == {"zero-shot": (50.0,), "learned": (pytest.approx(58.3333, abs=1e-3),)}
    assert [row["top1_percent"] for row in fit.metrics] == [
        pytest.approx(100 * row["accuracy"]) for row in rows_of(OLD / "fit")
    ]
    assert negate.scores.rows["zero-shot"] == (50.0, 98.75)
    assert {share for task in negate.classes for _, *found in task.rows for share in found} > {100}
    shown = dict(zip(tta.scores.columns, tta.scores.rows["zero-shot"], strict=True))
    assert shown["agreement"] == 74.8
    assert shown["entropy"] < 1
    assert call("inspect", OLD / "fit").out.splitlines()[1].startswith("digits,all,0.")
    tuned = call("inspect", OLD / "finetune")
    assert tuned.out.splitlines()[1:] == ["1,3,2.85457,65.4", "2,6,3.73122,65.6"]
    names = ("fit", "negate", "tta", "finetune", "fit_stopped")
    page = tmp_path / "page.html"
    assert call("report", *(OLD / name for name in names), "-o", page).code == 0
    assert "98.75" in page.read_text()


def test_they_merge_and_the_model_is_evaluated(call, tmp_path: Path):
    command = ("merge", OLD / "fit", "-o", tmp_path / "model", "--memory", "2GiB")
    assert call(*command).code == 0
    assert call("draw", "builtin:signs", "--shots", "4", "-o", tmp_path / "signs").code == 0
    data = ("--data", tmp_path / "signs", "--split", "val", "--workers", "0", "--json")
    found = json.loads(call("eval", tmp_path / "model", *data).out)
    assert found["unit"] == "percent"
    assert 40 < found["results"][0]["top1"] <= 100


def test_a_run_that_was_stopped_goes_on_to_the_result_that_it_had(call, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(OLD / "fit_stopped", folder)
    result = call(*FIT, "-o", folder, "--resume")
    assert result.code == 0, result.err
    found, wanted = (
        json.loads((place / "coefficients.json").read_text()) for place in (folder, OLD / "fit")
    )
    assert found == {n: pytest.approx(r) for n, r in wanted.items()}
    rows = rows_of(folder)
    assert [row["number"] for row in rows] == list(range(1, 13))
    assert all("top1_percent" in row and "accuracy" not in row for row in rows)
    assert json.loads((folder / "result.json").read_text())["unit"] == "percent"


def test_a_run_of_other_inputs_is_refused_by_the_name_of_what_differs(call, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(OLD / "fit_stopped", folder)
    for more, words in (
        (("--adapter", "probe"), 'begun with recipe.adapter "none", not "probe"'),
        (("--seed", "1"), "begun with data 1.sha256 "),
    ):
        result = call(*FIT, *more, "-q", "-o", folder, "--resume")
        assert (result.code, len(result.error_lines)) == (2, 1)
        assert words in result.err
        assert "--force" in result.err


def test_a_run_is_no_model(call):
    """Its weight file is the state of the optimizer."""
    result = call("eval", OLD / "fit", "--data", "builtin:signs")
    assert (result.code, len(result.error_lines)) == (2, 1)
    assert f"{OLD / 'fit'}: holds a run, and no model yet; first atlas merge" in result.err
