"""atlas export --classifier: what it writes predicts as atlas does, and needs no atlas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learned_runs import learn, write_world
from stopping import largest_file

from atlas_cli.cli.app import main
from atlas_cli.datasets.dataset import open_dataset
from atlas_cli.datasets.pixels import Pixels, view_of
from atlas_cli.models.clip import open_model
from atlas_cli.sources.locate import locate, parse_reference

ALONE = """
import json, sys
sys.modules["atlas_cli"] = sys.modules["open_clip"] = None  # importing either now fails
import torch
images, *files = sys.argv[1:]
images = torch.load(images)
for file in files:
    if file.endswith(".onnx"):
        import onnxruntime
        (logits,) = onnxruntime.InferenceSession(file).run(None, {"images": images.numpy()})
        logits = torch.from_numpy(logits)
    else:
        logits = torch.export.load(file).module()(images)
    print(json.dumps(logits.argmax(dim=1).tolist()))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def call(*given: object) -> int:
    return main([str(one) for one in given])


def alone(world: Path, *files: Path) -> list[list[str]]:
    """What classifiers say of the photos, in a process that cannot import atlas."""
    view = view_of(open_model(locate(parse_reference(str(world / "base")))).preprocess)
    pixels = Pixels(open_dataset(str(world / "photos")), view, 2**30)
    images = pixels.fixed(range(8)) * view.std + view.mean
    torch.save(images, world / "images.pt")
    given = [sys.executable, "-c", ALONE, world / "images.pt", *files]
    done = subprocess.run(given, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = []
    for file, line in zip(files, done.stdout.splitlines(), strict=True):
        labels = json.loads((file.parent / "labels.json").read_text("utf-8"))
        found.append([labels[number] for number in json.loads(line)])
    return found


def predicted(world: Path, model: Path, file: Path) -> list[str]:
    """What eval says of the photos."""
    assert call("eval", model, "--data", world / "photos", "--predictions", file, "--quiet") == 0
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [row["prediction"] for row in rows]


def exported(world: Path, folder: Path, capsys, *formats: str) -> None:
    """Export runs and models, and compare every prediction with that of eval."""
    files, wanted = [], []
    for adapter in ("lpp", "tip-f"):
        run = learn(world, "fit", folder / adapter, "--adapter", adapter)
        model = folder / f"{adapter}-model"
        assert call("merge", run, "-o", model, "--memory", "4GB", "--quiet") == 0
        source, target = (run if adapter == "lpp" else model), folder / f"{adapter}-exported"
        more = ["--format", *formats, "-o", target]
        assert call("export", source, "--classifier", *more) == 0
        files += [
            target / {"torch": "classifier.pt2", "onnx": "classifier.onnx"}[f] for f in formats
        ]
        wanted += [predicted(world, model, folder / "p.jsonl")] * len(formats)
    assert len(set(map(tuple, wanted))) > 1
    assert alone(world, *files) == wanted
    assert capsys.readouterr().err.count("the head is no linear layer") == 1


@pytest.mark.slow
def test_a_torch_classifier_predicts_as_eval_does_where_atlas_is_not_installed(
    world, tmp_path, capsys
):
    exported(world, tmp_path, capsys, "torch")


@pytest.mark.slow
def test_an_onnx_classifier_predicts_as_eval_does_where_atlas_is_not_installed(
    world, tmp_path, capsys
):
    exported(world, tmp_path, capsys, "torch", "onnx")


def test_without_a_head_the_classes_are_those_of_the_run_or_of_data(world, tmp_path, capsys):
    run = learn(world, "fit", tmp_path / "run")
    more = ["--classifier", "--format", "torch", "-o", tmp_path / "x"]
    assert call("export", run, *more, "--json") == 0
    told = json.loads(
        capsys.readouterr().out.partition("\n# Learned")[0].rpartition("\n{")[2].join(["{", ""])
    )
    assert told["classes"] == 2
    assert told["linear"]
    assert "README.md" in told["files"]
    assert call("export", world / "base", "--classifier", "-o", tmp_path / "y") == 2
    assert "no head was learned; name the classes with --data DATA" in capsys.readouterr().err


@pytest.mark.slow
def test_a_classifier_is_the_same_bytes_every_time_and_without_room_one_line(
    world, tmp_path, capsys
):
    def export(name: str) -> int:
        more = ("--data", world / "photos", "--format", "torch", "-o", tmp_path / name)
        return call("export", world / "base", "--classifier", *more)

    assert (export("a"), export("b")) == (0, 0)
    first, second = (tmp_path / name / "classifier.pt2" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    capsys.readouterr()
    with largest_file(first.stat().st_size // 2):
        assert export("c") == 1
    assert capsys.readouterr().err == (
        f"atlas: error: {tmp_path / 'c'}: cannot be written: File too large\n"
    )
    assert not list(tmp_path.glob("*c*"))


def test_bad_input_is_one_line_and_nothing_is_written(world, tmp_path, capsys):
    target = tmp_path / "x"
    for given, words in (
        ([world / "base"], "say what to export: --classifier"),
        ([world / "base", "--classifier", "--format", "onxx"], "did you mean 'onnx'"),
        ([tmp_path / "gone", "--classifier"], "no such file or folder"),
        ([world / "base", "--classifier", "--data", "gone"], "gone"),
    ):
        assert call("export", *given, "-o", target) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not target.exists()
    target.mkdir()
    assert call("export", world / "base", "--classifier", "-o", target) == 2
    assert "exists already" in capsys.readouterr().err
