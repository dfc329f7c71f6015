"""Models written: a folder that is there at once, with some tensors changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from atlas_cli.errors import AtlasError
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.io.staging import exchange, temporary_folder
from atlas_cli.models.clip import Clip
from atlas_cli.models.folders import CONFIG, copy_companion_files, copy_text, has_text, read_tensors

_WEIGHTS = "open_clip_model.safetensors"
_ACTIVATIONS = {True: "quick_gelu", False: "gelu"}


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name, and its place, at the end.

    However the process ends, the old folder or the new one is there, or comes back with the next
    run that writes it.
    """
    try:
        with temporary_folder(folder) as temporary:
            yield temporary
            temporary.chmod(0o755)
            exchange(temporary, folder)
    except OSError as problem:
        raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem


def write_model(clip: Clip, changed: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a model with some of its tensors changed, those in float32.

    All others keep the values and the dtype that they have in the base.
    """
    with whole_folder(folder) as temporary:
        blueprint = clip.blueprint
        if clip.source.config(CONFIG) is not None:
            copy_companion_files(clip.source, temporary)
        copy_text(blueprint.model, blueprint.folder, temporary)
        config = {"model_cfg": blueprint.model, "preprocess_cfg": blueprint.preprocess}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        activation = _ACTIVATIONS[bool(clip.config.get("quick_gelu"))]
        write_tensors(temporary / _WEIGHTS, _all_tensors(clip, changed), {"activation": activation})


def _all_tensors(clip: Clip, changed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    base = read_tensors(clip.source)
    if not has_text(base):  # the text tower is another model's
        base = {}
    found = {}
    for name, tensor in clip.module.state_dict().items():
        kept = base[name].dtype if name in base else tensor.dtype
        found[name] = (
            changed.get(name, tensor).detach().cpu().to(torch.float32 if name in changed else kept)
        )
    return found
