"""What is in a model: its tensors, counted, and where it came from."""

from __future__ import annotations

import fnmatch
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.io.files import copy_file, copy_folder, inside
from atlas_cli.models.clip import Clip, read_blueprint
from atlas_cli.models.open_clip_config import text_folder
from atlas_cli.models.tensor_names import has_text, read_tensors
from atlas_cli.sources.locate import Source, read_object
from atlas_cli.sources.model_files import COMPANION_FILES

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
_ACTIVATIONS = {True: "quick_gelu", False: "gelu"}
_TEXT_FOLDERS = ("hf_model_name", "hf_tokenizer_name")
# What companion patterns match, but what describes other weights than those that are written.
_LEFT = ("*.index.json", "adapter_config.json", "trainer_state.json", "training_args*", "*.bin")
_CONFIGS = ("config.json", "generation_config.json", CONFIG)


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
            copy_companion_files(clip.source, temporary)
        _copy_text(blueprint.model, blueprint.folder, temporary)
        config = {"model_cfg": blueprint.model, "preprocess_cfg": blueprint.preprocess}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        activation = _ACTIVATIONS[bool(clip.config.get("quick_gelu"))]
        write_tensors(temporary / WEIGHTS, _all_tensors(clip, changed), {"activation": activation})


def _copy_text(model: Mapping[str, Any], home: Path | None, folder: Path) -> None:
    """Copy folders beside the base that a text tower of transformers is described in."""
    text = model.get("text_cfg", {})
    for key in _TEXT_FOLDERS:
        target = folder / str(text.get(key))
        if home and not target.exists() and (found := text_folder(home, text.get(key))):
            copy_folder(found, target, str(home))


def companion_files(source: Source) -> list[Path]:
    """The configuration, tokenizer, preprocessing and licence of a model, sorted by name."""
    return sorted(
        inside(source.folder, path.name, str(source.folder))
        for path in source.folder.iterdir()
        if path.is_file()
        and path not in source.weights
        and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in COMPANION_FILES)
        and not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT)
    )


def copy_companion_files(
    source: Source,
    folder: Path,
    change: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Copy the companion files of a model, and the folder that describes its text tower.

    `change` gives other values for a configuration. It is called with the name of the file and
    with what is in it.
    """
    for path in companion_files(source):
        text = _changed(path, change) if change and path.name in _CONFIGS else None
        if text is None:
            copy_file(path, folder / path.name)
        else:
            (folder / path.name).write_text(text, "utf-8")
    described: Any = (source.config(CONFIG) or {}).get("model_cfg")
    if isinstance(described, dict) and isinstance(described.get("text_cfg", {}), dict):
        _copy_text(described, source.folder, folder)


def _changed(path: Path, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> str | None:
    """The file with other values; None if none is another one."""
    found: dict[str, Any] = read_object(path)
    changed = change(path.name, found)
    return json.dumps(changed, indent=2, ensure_ascii=False) + "\n" if changed != found else None


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


@dataclass(frozen=True)
class TensorFacts:
    """One tensor, unread."""

    dtype: str
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class ModelFacts:
    """One model, told in open_clip's names. Nothing is known of the architecture of a bare file."""

    model: str
    parameters: int
    dtypes: dict[str, int]
    bytes: int
    architecture: dict[str, Any] | None
    activation: str | None
    commit: str | None
    sha256: dict[str, str]
    tensors: dict[str, TensorFacts]


def describe_model(source: Source, architecture: str | None = None) -> ModelFacts:
    """Count the tensors of a model without reading them, and say where it came from."""
    tensors = {
        name: TensorFacts(
            str(tensor.dtype).removeprefix("torch."), tensor.shape, math.prod(tensor.shape)
        )
        for name, tensor in read_tensors(source).items()
    }
    config = _config(source, architecture)
    found = source.provenance()
    return ModelFacts(
        model=source.reference.text,
        parameters=sum(tensor.parameters for tensor in tensors.values()),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors.values())),
        bytes=sum(path.stat().st_size for path in source.weights),
        architecture=config,
        activation=_activation(config),
        commit=source.commit,
        sha256=found["sha256"],  # type: ignore[arg-type]
        tensors=tensors,
    )


def _config(source: Source, architecture: str | None) -> dict[str, Any] | None:
    try:
        return read_blueprint(source, architecture).model
    except UsageError:  # a bare weight file, and no --arch
        return None


def _activation(config: dict[str, Any] | None) -> str | None:
    return None if config is None else "quick_gelu" if config.get("quick_gelu") else "gelu"
