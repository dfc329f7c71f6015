"""benchmarks/contenders: finished rows are kept, and count as long as their way is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAN = (["digits", "signs"], [1, 4], [0])


class AskedError(Exception):
    """Something was to be measured."""


def refuse(task: str, shots: int, seed: int) -> dict[str, object]:
    raise AskedError(task, shots, seed)


@pytest.fixture
def contenders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import contenders

    return contenders


def write_rows(contenders: ModuleType, file: Path, ways: tuple[str, ...], about: object) -> None:
    tasks, shots, seeds = PLAN
    rows = [
        {
            "task": task,
            "shots": k,
            "seed": seed,
            "way": way,
            "accuracy": 50.0 + k,
            "seconds": 1.0,
            "digest": contenders.digest(way, about),
        }
        for task in tasks
        for k in shots
        for seed in seeds
        for way in ways
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_that_are_there_are_not_measured_again_and_fill_the_tables(contenders, tmp_path):
    file, ways = tmp_path / "rows.jsonl", ("block", "best")
    write_rows(contenders, file, ways, {})
    rows = contenders.measure_all(file, refuse, *PLAN, ways, {})
    lines = list(contenders.tables(rows, *PLAN))
    assert "| block | 51.0 ± 0.0 | 1 | 51.0 | 51.0 |" in lines
    assert "| best | 54.0 ± 0.0 | 1 | 54.0 | 54.0 |" in lines
    with pytest.raises(AskedError, match="digits"):
        contenders.measure_all(file, refuse, *PLAN, (*ways, "tip"), {})


def test_rows_of_what_a_way_was_before_do_not_count(contenders, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    write_rows(contenders, file, ("best", "block"), {"size": 128})
    changes = {
        "keys": (contenders.FITS, "best", contenders.Way({"preset": "fast"})),
        "revision": (contenders.REVISIONS, "auto", 99),
    }
    contenders.measure_all(file, refuse, *PLAN, ["best"], {"size": 128})
    for change in changes.values():
        with monkeypatch.context() as patch:
            patch.setitem(*change)
            with pytest.raises(AskedError):
                contenders.measure_all(file, refuse, *PLAN, ["best"], {"size": 128})
    with pytest.raises(AskedError):
        contenders.measure_all(file, refuse, *PLAN, ["best"], {"size": 224})


def test_every_way_has_a_digest_of_its_own_but_those_that_mean_the_same(contenders):
    digests = {way: contenders.digest(way, {}) for way in contenders.WAYS}
    assert len(set(digests.values())) == len(digests)


def test_ways_that_train_the_same_are_measured_together(contenders):
    groups = list(contenders._groups(contenders.USUAL))
    assert ["block", "block, then tip-f", "block, then lpp"] in groups
    assert ["best"] in groups
    assert sorted(way for group in groups for way in group) == sorted(contenders.USUAL)


@pytest.mark.slow
def test_ways_that_differ_in_a_head_fitted_afterwards_train_once_and_score_as_alone(contenders):
    target = {
        "data": "builtin:digits",
        "model": "builtin:tiny",
        "vectors": ["builtin:signs"],
        "shots": 1,
        "seed": 0,
    }
    together = dict(contenders.measure(("zero-shot", "tip", "tip-f"), target))
    assert "needs 2 of every class" in together["tip"]["refused"]
    for way in ("zero-shot", "tip-f"):
        ((_, alone),) = contenders.measure((way,), target)
        assert alone["accuracy"] == together[way]["accuracy"]
