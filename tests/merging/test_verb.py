"""Merging as a function: typed options in, events on the way, a typed result or plan out."""

from __future__ import annotations

from pathlib import Path

import pytest
from merge_runs import linear, llama, read_model, write_model, write_recipe

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.merging.merge import (
    BytesWritten,
    FilterUnused,
    MergeEvent,
    MergeOptions,
    MergeStarted,
    merge,
    plan_merge,
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        write_model(tmp_path / f"m{number}", llama(number))
    found = linear(1, 1)
    found["models"][0]["parameters"]["weight"] = [{"filter": "nowhere", "value": 2}, {"value": 1}]
    return write_recipe(tmp_path / "r.yaml", found)


def test_a_merge_tells_of_its_bytes_and_gives_what_it_wrote(recipe: Path, tmp_path: Path):
    heard: list[MergeEvent] = []
    merged = merge(recipe, tmp_path / "out", on_event=heard.append)
    first, second, *rest = heard
    assert first == FilterUnused("nowhere")
    assert isinstance(second, MergeStarted)
    assert second.bytes == merged.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    data = sum(t.nbytes for t in read_model(tmp_path / "out").values())
    assert sum(event.count for event in rest if isinstance(event, BytesWritten)) == data
    assert str(merged) == str(tmp_path / "out")


def test_a_plan_is_given_without_writing(recipe: Path, tmp_path: Path):
    plan = plan_merge(recipe, MergeOptions(threads=1), explain="lm_head")
    assert (plan.method, plan.tensors, plan.threads) == ("linear", plan.merged, 1)
    assert [one["tensor"] for one in plan.explained] == ["lm_head.weight"]
    assert str(plan).startswith("method   linear\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m1", "m2", "r.yaml"]


def test_what_is_wrong_is_raised_before_anything_is_written(recipe: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"missing.yaml: cannot be read"):
        merge("missing.yaml", "out")
    with pytest.raises(AtlasError, match=r"nowhere: no such folder"):
        merge(recipe, tmp_path / "nowhere" / "out")
    with pytest.raises(AtlasError, match="exists already"):
        merge(recipe, tmp_path / "m1")
