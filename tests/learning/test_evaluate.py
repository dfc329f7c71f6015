"""Scores are those of an independent evaluator, whatever the batch size."""

from __future__ import annotations

import csv
import io
import json
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import warm
from conftest import HALF, TIMEOUT, write_images, write_open_clip
from mergekit_cases import fixture
from PIL import Image

from atlas_cli.datasets import builtin
from atlas_cli.datasets.dataset import few_shot, open_dataset
from atlas_cli.models.clip import compute_head, open_model
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import builtin_model, locate, parse_reference

TASKS = [f"builtin:{name}" for name in builtin.TASKS]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built-in task as a folder of images."""
    from atlas_cli.cli.app import main

    folder = tmp_path_factory.mktemp("drawn") / "digits"
    assert main(["draw", "builtin:digits", "-o", str(folder), "--shots", "1", "-q"]) == 0
    return folder


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def plain_loop(
    model: Path, images: Sequence[Path], names: Sequence[str], templates: Sequence[str]
) -> list[str]:
    """Zero-shot classification with open_clip alone: the predicted class of every image."""
    open_clip = import_open_clip()
    clip, _, transform = open_clip.create_model_and_transforms(f"local-dir:{model}")
    clip.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{model}")
    classifier = open_clip.build_zero_shot_classifier(clip, tokenizer, names, templates)
    predicted = []
    with torch.no_grad():
        for path in images:
            image = transform(Image.open(path)).unsqueeze(0)
            logits = clip.encode_image(image, normalize=True) @ classifier
            predicted.append(names[logits.argmax().item()])
    return predicted


def test_a_folder_gets_the_predictions_of_a_plain_open_clip_loop(
    digits: Path, tmp_path: Path, call
):
    model = builtin_model("tiny")
    names = sorted(builtin.TASKS["digits"].classes)
    drawn = few_shot(open_dataset(str(digits)), 20, seed=0)
    images = [digits / sample.key for sample in drawn.samples]
    wanted = plain_loop(model, images, names, builtin.TASKS["digits"].templates)
    file = tmp_path / "predictions.jsonl"
    result = call("eval", model, "--data", digits, "--shots", "20", "--predictions", file)
    assert result.code == 0, result.err
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prediction"] for row in found] == wanted
    labels = [path.parent.name.replace("_", " ") for path in images]
    accuracy = sum(a == b for a, b in zip(wanted, labels, strict=True)) / len(labels)
    assert rows(result.out)[0]["top1"] == f"{100 * accuracy:.2f}"


def test_clip_benchmark_counts_the_same_images_and_has_the_same_head(digits: Path, call):
    """What clip-benchmark gave is kept in tests/fixtures; test_oracles.py holds it against it."""
    kept = fixture("clip_benchmark")
    [ours] = json.loads(call("eval", "builtin:tiny", "--data", digits, "--json").out)["results"]
    assert round(ours["top1"] * ours["images"] / 100) == kept["right"].item()
    clip = open_model(locate(parse_reference("builtin:tiny")))
    task = builtin.TASKS["digits"]
    head = compute_head(clip, sorted(task.classes), task.templates)
    head = head / clip.module.logit_scale.exp()
    assert (head.T - kept["weights"]).abs().max() < 1e-6


def test_the_folder_and_the_task_it_was_drawn_from_score_the_same(digits: Path, call):
    drawn = rows(call("eval", "builtin:tiny", "--data", "builtin:digits").out)[0]
    folder = rows(call("eval", "builtin:tiny", "--data", digits).out)[0]
    assert {**drawn, "data": ""} == {**folder, "data": ""}


def test_batch_size_and_workers_change_no_prediction(tmp_path: Path, call):
    files = []
    for size, workers in ((1, 0), (7, 1), (64, 2)):
        files.append(tmp_path / f"{size}.jsonl")
        result = call(
            *("eval", "builtin:tiny", "--data", *TASKS[:3], "--shots", "4"),
            *("--batch-size", str(size), "--workers", str(workers), "--predictions", files[-1]),
        )
        assert result.code == 0, result.err
    first, *others = [
        [json.loads(line)["top5"] for line in file.read_text().splitlines()] for file in files
    ]
    assert len(first) > 100
    assert all(other == first for other in others)


def test_two_runs_print_identical_bytes(run):
    arguments = ("eval", "builtin:tiny", "--data", "builtin:signs", "--shots", "5", "--seed", "3")
    for extra in ([], ["--json"]):
        first, second = (run(*arguments, *extra) for _ in range(2))
        assert first.code == 0
        assert first == second


def test_the_seed_decides_which_images_are_drawn_and_is_recorded(call):
    def evaluate(seed: int) -> dict:
        arguments = ("--shots", "2", "--seed", str(seed), "--json")
        return json.loads(call("eval", "builtin:tiny", "--data", "builtin:digits", *arguments).out)

    assert evaluate(5)["seed"] == 5
    assert evaluate(5) == evaluate(5)


def test_each_model_is_compared_with_the_first(tmp_path: Path, call):
    other = write_open_clip(tmp_path / "other")
    data = ("builtin:everything", "builtin:digits")
    result = call("eval", "builtin:tiny", other, "--data", *data, "--shots", "5")
    table = rows(result.out)
    assert [(row["model"], row["data"]) for row in table] == [
        ("builtin:tiny", "builtin:everything"),
        ("builtin:tiny", "builtin:digits"),
        (str(other), "builtin:everything"),
        (str(other), "builtin:digits"),
    ]
    assert table[0]["delta"] == table[0]["p_value"] == ""
    difference = float(table[2]["top1"]) - float(table[0]["top1"])
    assert float(table[2]["delta"]) == pytest.approx(difference, abs=0.011)
    assert float(table[2]["p_value"]) < 1e-6
    assert float(table[1]["low"]) < float(table[1]["top1"]) < float(table[1]["high"])


def test_a_broken_image_is_named_or_skipped_and_counted(photos: Path, call):
    (photos / "dog" / "1.png").write_bytes(b"broken")
    refused = call("eval", "builtin:tiny", "--data", photos)
    assert (refused.code, len(refused.error_lines)) == (1, 1)
    assert f"{photos}/dog/1.png: cannot be decoded" in refused.err
    result = call("eval", "builtin:tiny", "--data", photos, "--skip-broken")
    assert result.code == 0
    assert (rows(result.out)[0]["images"], rows(result.out)[0]["skipped"]) == ("5", "1")
    assert "dog/1.png" in result.err


def test_templates_on_the_command_line_replace_those_of_the_data(call):
    arguments = ("eval", "builtin:tiny", "--data", "builtin:textures", "--shots", "2")
    plain = call(*arguments, "--predictions", "-").out
    own = call(*arguments, "--predictions", "-", "--template", *builtin.TASKS["textures"].templates)
    other = call(*arguments, "--predictions", "-", "--template", "the letter {}", "two {} circles")
    assert plain == own.out
    assert plain != other.out
    assert len(plain.splitlines()) == len(other.out.splitlines()) == 24


def test_more_than_ten_classes_get_a_top_5(tmp_path: Path, call):
    few = write_images(tmp_path / "few", list("abc"), count=1)
    many = write_images(tmp_path / "many", list("abcdefghijk"), count=1)
    table = rows(call("eval", "builtin:tiny", "--data", few, many).out)
    assert table[0]["top5"] == ""
    assert table[1]["top5"] != ""


def test_a_recipe_says_the_same_as_flags(tmp_path: Path, call):
    recipe = tmp_path / "eval.yaml"
    recipe.write_text("models: [builtin:tiny]\ndata: [builtin:digits]\nshots: 2\nseed: 4\n")
    flags = ("--data", "builtin:digits", "--shots", "2", "--seed", "4")
    assert call("eval", recipe).out == call("eval", "builtin:tiny", *flags).out
    assert call("eval", recipe, "--seed", "5", "--json").out.count('"seed": 5') == 1


def test_a_recipe_comes_through_a_pipe(run):
    recipe = "models: [builtin:tiny]\ndata: [builtin:digits]\nshots: 1\n"
    assert run("eval", "-", stdin=recipe).code == 0


@pytest.mark.slow
def test_batches_shrink_when_memory_ends(tmp_path: Path, run):
    """A wide model, 2000 images at once, and an address space that cannot hold them."""
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 64, "patch_size": 4, "width": 256, "layers": 1},
        "text_cfg": {"width": 32, "heads": 2, "layers": 1, "context_length": 16},
    }
    model = write_open_clip(tmp_path / "model", config, HALF | {"size": 64})
    arguments = ("eval", model, "--data", "builtin:counts", "--workers", "0", "--batch-size")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    small = run(*arguments, "20")
    large = run(*arguments, "1000", before=limit, cold=True)
    assert large.code == 0, large.err
    assert rows(large.out)[0]["top1"] == rows(small.out)[0]["top1"]


def test_workers_for_which_too_few_files_can_be_opened_are_one_line(tmp_path: Path):
    photos, codes = write_images(tmp_path / "photos", count=4), set()
    for most in (12, 15):
        process = warm.start(
            *("eval", "builtin:tiny", "--data", photos, "--workers", "2", "-q"),
            preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
        )
        _, err = process.communicate(timeout=TIMEOUT)
        codes.add(process.returncode)
        if process.returncode:
            assert (process.returncode, len(err.splitlines())) == (1, 1), err
            assert "oo many open files" in err
    assert 1 in codes
