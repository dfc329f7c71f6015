"""Inputs that fuzzing found: every reader takes them or refuses them in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.faults.fuzz import CORPUS, TARGETS, mutated, problem_with


@pytest.fixture(autouse=True)
def alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test has a limit of its own.
    monkeypatch.setattr("tests.faults.fuzz._limit", lambda seconds, waiting: None)


def test_inputs_that_once_were_a_problem_are_none(tmp_path: Path):
    kept = sorted(path for path in CORPUS.rglob("*") if path.is_file())
    assert len(kept) >= 4
    for path in kept:
        assert problem_with(path.parent.name, path.read_bytes(), tmp_path) is None, path


def test_the_seeds_of_every_reader_and_some_mutants_are_no_problem(tmp_path: Path):
    import random

    dice = random.Random(0)
    for name, (_, seeds) in TARGETS.items():
        made = seeds()
        for content in [*made, *(mutated(dice.choice(made), dice, made) for _ in range(3))]:
            assert problem_with(name, content, tmp_path) is None, (name, content)
