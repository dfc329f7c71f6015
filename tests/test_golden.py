"""benchmarks/golden: what two versions differ in is told, unless a reason allows just that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "benchmarks" / "golden_differences.yaml"
METRICS = '{{"stage": "all", "loss": {loss}, {accuracy}}}\n'


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "golden"))


def write(path: Path, stdout: str, metrics: str, **files: str) -> Path:
    """What one command line did."""
    texts = {"run/metrics.jsonl": metrics, **files}
    case = {"exit": 0, "stdout": stdout, "stderr": "", "files": {name: name for name in texts}}
    contents = {"metadata": {}, "cases": {"fit": case}, "contents": texts}
    path.write_text(json.dumps(contents))
    return path


def compare(before: Path, after: Path, entries: object = None) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "golden"), "compare", before, after]
    if entries is not None:
        allowed = before.parent / "allowed.yaml"
        allowed.write_text(yaml.safe_dump(entries))
        command += ["--allowed", allowed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


PERCENT = {"where": "*/metrics.jsonl", "why": "accuracies are in percent", "form": "percent"}


def test_every_difference_is_told(tmp_path):
    before = write(tmp_path / "a", "one\ntwo\n", "")
    assert compare(before, before) == (0, ["0 differences"])
    code, lines = compare(before, write(tmp_path / "b", "one\n2\n", "", more="x"))
    assert code == 1
    assert lines == [
        *("fit/files/more", "    - None", "    + 'x'"),
        *("fit/stdout", "    @@ -2 +2 @@", "    -two", "    +2", "2 differences"),
    ]


def test_a_reason_allows_what_it_names_and_no_other_number(tmp_path):
    old = METRICS.format(loss=0.25, accuracy='"accuracy": 0.35')
    new = METRICS.format(loss=0.25, accuracy='"top1_percent": 35.0')
    before, after = write(tmp_path / "a", "", old), write(tmp_path / "b", "", new)
    assert compare(before, after)[0] == 1
    assert compare(before, after, [PERCENT]) == (0, ["0 differences, and 1 that are allowed"])
    for changed in (new.replace("0.25", "0.26"), new.replace("35.0", "36.0")):
        code, lines = compare(before, write(tmp_path / "c", "", changed), [PERCENT])
        assert (code, lines[-1]) == (1, "1 differences")


def test_text_is_replaced_on_either_side_before_it_is_compared(tmp_path):
    before = write(tmp_path / "a", "2 vectors, loss 0.5\n", "")
    after = write(tmp_path / "b", "note\n2 task vectors, loss 0.5\n", "")
    entry = {"where": ["fit/stdout"], "why": "words", "old": {r"(\d) vectors": r"\1 task vectors"}}
    assert compare(before, after, [entry])[0] == 1
    both = {**entry, "new": {"^note\n": ""}}
    assert compare(before, after, [both])[0] == 0
    assert compare(before, after, [entry, {**entry, "old": {}, "new": {"^note\n": ""}}])[0] == 0


def test_what_is_new_is_allowed_without_what_has_changed(tmp_path):
    entry = {"where": "fit/files/*", "why": "a new file", "only": "after"}
    before, after = write(tmp_path / "a", "", "x"), write(tmp_path / "b", "", "x", more="y")
    assert compare(before, after, [entry])[0] == 0
    assert compare(before, write(tmp_path / "c", "", "z", more="y"), [entry])[0] == 1


def test_a_reason_that_nothing_needs_is_told(tmp_path):
    before = write(tmp_path / "a", "", "")
    code, lines = compare(before, before, [PERCENT])
    assert code == 1
    assert lines[0] == "allowed in vain: */metrics.jsonl (accuracies are in percent)"


@pytest.mark.parametrize(
    "name",
    [
        "merge ties/files/out/merge-ties/open_clip_model.safetensors",
        "merge learned/files/out/learned/open_clip_model.safetensors",
        "merge with slices/files/out/options-33/model.safetensors",
        "extract several/files/vectors/cars.safetensors",
        "finetune all/files/out/finetune-all/model/open_clip_model.safetensors",
        "fit block/files/out/fit-block/coefficients.json",
        "tta ufm/files/out/tta-ufm/coefficients.json",
        "eval predictions/files/out/predictions.jsonl",
        "eval several/stdout",
        "fit block/exit",
    ],
)
def test_no_reason_is_about_weights_coefficients_or_predictions(name):
    from comparing import entry_fits, read_allowed

    assert not [entry.why for entry in read_allowed(ALLOWED) if entry_fits(entry, name)]


def test_weights_are_the_same_in_any_order_and_whatever_is_said_of_them(tmp_path):
    from inputs import packed, write_tensors
    from plain import Plain

    one, two = packed("F32", (3,), [0.0, 1.0, 2.0]), packed("F32", (1, 2), [1.0, 1.0])
    half = packed("F16", (1, 2), [1.0, 1.0])
    plain = Plain(tmp_path, {})

    def parts(tensors: dict, made: str) -> dict[str, str]:
        path = write_tensors(tmp_path / "w", tensors, {"made": made})
        return plain.parts("w", path.read_bytes())

    whole = parts({"a": one, "b": two}, "by hand")
    assert whole["w"] == parts({"b": two, "a": one}, "otherwise")["w"]
    assert whole["w"] != parts({"a": one, "b": half}, "by hand")["w"]
    assert '"made": "by hand"' in plain.contents[whole["w#metadata"]]
    assert '"made": "otherwise"' not in plain.contents[whole["w#metadata"]]
