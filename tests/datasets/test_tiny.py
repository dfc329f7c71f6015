"""open_clip opens the built-in model by itself, and the model knows its world."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from atlas_cli.datasets.builtin import CONTROL, TASKS, draw, label_of
from atlas_cli.models.open_clip_import import import_open_clip
from atlas_cli.sources.locate import builtin_model

Opened = tuple[Any, Callable[[list[str]], torch.Tensor], Callable[[Any], torch.Tensor]]


@pytest.fixture(scope="module")
def opened() -> Opened:
    open_clip = import_open_clip()
    name = f"local-dir:{builtin_model('tiny').resolve()}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    return model.eval(), open_clip.get_tokenizer(name), preprocess


@torch.no_grad()
def zero_shot(opened: Opened, task: str, count: int = 320) -> float:
    """Percent of the first test images that are nearest to the prompts of their class."""
    model, tokenizer, _ = opened
    rows = []
    for name in TASKS[task].classes:
        prompts = [template.format(name) for template in TASKS[task].templates]
        rows.append(F.normalize(model.encode_text(tokenizer(prompts)), dim=-1).mean(0))
    images = np.stack([draw(task, "test", index) for index in range(count)])
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    scores = F.normalize(model.encode_image(inputs), dim=-1) @ F.normalize(torch.stack(rows)).T
    labels = torch.tensor([label_of(task, "test", index) for index in range(count)])
    return 100.0 * float((scores.argmax(1) == labels).float().mean())


def test_the_model_takes_less_than_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in builtin_model("tiny").iterdir()) < 8_000_000


def test_the_weights_are_half_precision_and_name_their_activation() -> None:
    with safe_open(builtin_model("tiny") / "open_clip_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "activation": "gelu"}
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118


def test_the_configuration_is_that_of_a_plain_vision_transformer() -> None:
    config = json.loads((builtin_model("tiny") / "open_clip_config.json").read_text())
    assert config["model_cfg"]["quick_gelu"] is False
    assert "timm_model_name" not in config["model_cfg"]["vision_cfg"]


def test_the_preprocessing_keeps_every_pixel(opened: Opened) -> None:
    from PIL import Image

    image = draw("signs", "test", 0)
    expected = torch.from_numpy(image).permute(2, 0, 1).float() / 127.5 - 1.0
    assert torch.allclose(opened[2](Image.fromarray(image)), expected, atol=1e-5)


def test_the_model_knows_the_control_task(opened: Opened) -> None:
    assert zero_shot(opened, CONTROL) > 60.0


@pytest.mark.parametrize("task", [name for name in TASKS if name != CONTROL])
def test_every_other_task_is_neither_out_of_reach_nor_solved(opened: Opened, task: str) -> None:
    assert 130.0 / len(TASKS[task].classes) < zero_shot(opened, task) < 72.0
