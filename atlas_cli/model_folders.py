"""A model that was changed -> a folder that open_clip opens, written whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from atlas_cli.checkpoint import write_tensors
from atlas_cli.errors import AtlasError
from atlas_cli.merging.beside import copy_beside
from atlas_cli.models import Clip, has_text, read_tensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
_ACTIVATIONS = {True: "quick_gelu", False: "gelu"}
_TEXT_FOLDERS = ("hf_model_name", "hf_tokenizer_name")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name, and its place, at the end."""
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
        try:
            yield temporary
            temporary.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as problem:
        raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem


def write_model(clip: Clip, changed: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a model with some of its tensors changed, those in float32.

    All others keep the values and the dtype that they have in the base.
    """
    with whole_folder(folder) as temporary:
        blueprint = clip.blueprint
        if clip.source.config(CONFIG) is not None:
            copy_beside(clip.source, temporary, None)
        _copy_text(clip, temporary)
        config = {"model_cfg": blueprint.model, "preprocess_cfg": blueprint.preprocess}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        activation = _ACTIVATIONS[bool(clip.config.get("quick_gelu"))]
        write_tensors(temporary / WEIGHTS, _all_tensors(clip, changed), {"activation": activation})


def _copy_text(clip: Clip, folder: Path) -> None:
    """Copy folders beside the base that a text tower of transformers is described in."""
    text, home = clip.config.get("text_cfg", {}), clip.blueprint.folder
    for key in _TEXT_FOLDERS:
        if home and key in text and (home / text[key]).is_dir():
            shutil.copytree(home / text[key], folder / text[key], dirs_exist_ok=True)


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
