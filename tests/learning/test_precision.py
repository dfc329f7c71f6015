"""Passes in lower precision: nearly the same losses, and said in the run's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FIT = ["fit", "builtin:digits", "--shots", "1", "--epochs", "1", "--min-steps", "2", "-q"]
FIT += ["--model", "builtin:tiny", "--vectors", "builtin:letters", "builtin:signs"]


def losses(folder: str) -> list[float]:
    return [
        json.loads(row)["loss"] for row in Path(folder, "metrics.jsonl").read_text().splitlines()
    ]


def test_bf16_on_the_cpu_gives_nearly_the_same_losses(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for precision in ("auto", "bf16"):
        found = call(*FIT, "--precision", precision, "-o", precision)
        assert found.code == 0, found.err
    whole, half = losses("auto"), losses("bf16")
    assert half == pytest.approx(whole, rel=0.05)
    assert half != whole
    assert "precision" not in json.loads(Path("auto/config.json").read_text())
    assert json.loads(Path("bf16/config.json").read_text())["precision"] == "bf16"


def test_an_unknown_precision_or_size_is_one_line(call):
    found = call(*FIT, "--precision", "int4")
    assert (found.code, len(found.error_lines)) == (2, 1)
    assert "expected auto, fp32, bf16 or fp16" in found.err
    found = call(*FIT, "--device-memory", "much")
    assert (found.code, len(found.error_lines)) == (2, 1)
    assert "expected a size such as 8GB, or 0" in found.err
