"""The evaluation in a model card: a table of all results, and for the Hub those of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

RECIPE = {"merge_method": "passthrough", "models": [{"model": "builtin:tiny"}]}
ROOMY = ("--memory", "8GB")  # the process of the tests itself is in the budget


@pytest.fixture
def merge(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Merge the recipe into ./out and give what was said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE))

    def run(*flags: str):
        return call("merge", "r.yaml", "-o", "out", "--force", *ROOMY, *flags)

    return run


def front_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_the_card_shows_an_evaluation_and_the_hub_hears_of_its_own(call, merge, tmp_path: Path):
    assert merge().code == 0
    before = (tmp_path / "out" / "open_clip_model.safetensors").read_bytes()
    told = call("eval", "builtin:tiny", "out", "--data", "builtin:digits", "--shots", "2", "--json")
    assert told.code == 0, told.err
    (tmp_path / "scores.json").write_text(told.out)
    assert merge("--evaluation", "scores.json").code == 0
    assert (tmp_path / "out" / "open_clip_model.safetensors").read_bytes() == before
    card = (tmp_path / "out" / "README.md").read_text()
    first, second = json.loads(told.out)["results"]
    top = f"{first['top1']:.2f}"
    assert f"| builtin:tiny | builtin:digits | test | {first['images']} | {top} |" in card
    assert f"| **out** | builtin:digits | test | {second['images']} | **{top}** |" in card
    assert front_of(card)["model-index"] == [
        {
            "name": "out",
            "results": [
                {
                    "task": {"type": "zero-shot-image-classification"},
                    "dataset": {
                        **{"name": "builtin:digits", "type": "builtin:digits"},
                        "split": "test",
                    },
                    "metrics": [
                        {
                            "type": "accuracy",
                            "name": "top-1 in percent",
                            "value": round(second["top1"], 6),
                        }
                    ],
                }
            ],
        }
    ]


def test_results_of_other_weights_are_shown_but_not_claimed(merge, tmp_path: Path):
    row = {"model": "m|1", "data": "d", "split": "test", "images": 8}
    scores = {"top1": 0.5, "low": 0.2, "high": 0.8}
    models = [{"reference": "m|1", "commit": None, "sha256": {"model.safetensors": "0" * 64}}]
    told = {"atlas": "0", "models": models, "results": [row | scores]}
    (tmp_path / "scores.json").write_text(json.dumps(told))
    assert merge("--evaluation", "scores.json").code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| m\\|1 | d | test | 8 | 50.00 | 20.0-80.0 |" in card
    assert "model-index" not in front_of(card)


def test_without_an_evaluation_the_card_has_no_such_section(merge, tmp_path: Path):
    assert merge().code == 0
    assert "## Evaluation" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "top-1: 90 %",
        "[]",
        '{"atlas": "0", "models": [], "results": [{"model": "m"}]}',
        '{"atlas": "0", "models": [], "results": []}',
        '{"atlas": "0", "models": [], "results": [{"model": "m", "data": "d", "split": "test", '
        '"images": 8, "top1": "high", "low": 0, "high": 1}]}',
    ],
)
def test_a_file_that_is_no_evaluation_is_one_line_before_anything_is_read(
    merge, tmp_path: Path, text: str
):
    (tmp_path / "scores.json").write_text(text)
    result = merge("--evaluation", "scores.json")
    assert (result.code, result.out, len(result.error_lines)) == (2, "", 1)
    assert "scores.json" in result.err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_one_line(merge):
    result = merge("--evaluation", "nowhere.json")
    assert (result.code, result.out) == (2, "")
    assert result.err == "atlas: error: --evaluation nowhere.json: no such file\n"
