"""open_clip models, built from what their source says and checked against it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import open_safetensors, open_tensors, read_metadata, write_tensors
from atlas_cli.io.files import cache_folder
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models import transformers_config
from atlas_cli.models.open_clip_config import (
    Tokenize,
    check_config,
    check_installed,
    open_tokenizer,
    quiet,
    with_local_text,
)
from atlas_cli.models.tensor_names import INFORMATION, fill, has_text, read_tensors
from atlas_cli.parallel import choose_device
from atlas_cli.sources.locate import Source, check_architecture
from atlas_cli.sources.reference import Reference

Preprocess = Callable[[Any], torch.Tensor]  # of a PIL image
Warn = Callable[[str], None]
HEAD = "atlas_head.safetensors"  # the name of a learned head beside a model
_PROMPTS_AT_ONCE = 256
_NAMES = {True: "QuickGELU", False: "GELU"}


@dataclass(frozen=True)
class Clip:
    """A model that is ready to run, and the source it came from."""

    name: str
    module: torch.nn.Module
    preprocess: Preprocess
    tokenize: Tokenize
    blueprint: Blueprint
    source: Source
    device: torch.device

    @property
    def config(self) -> Mapping[str, Any]:
        """open_clip's configuration of the model."""
        return self.blueprint.model

    @property
    def has_head(self) -> bool:
        """Whether a learned head lies beside the model."""
        named = self.source.reference.kind in ("path", "hub")
        return named and (self.source.folder / HEAD).is_file()


@dataclass(frozen=True)
class Blueprint:
    """What a source says of a model before its weights are read."""

    model: dict[str, Any]
    preprocess: dict[str, Any]
    folder: Path | None = None
    doubts: tuple[str, ...] = ()  # what was not said and is taken as usual


@dataclass(frozen=True)
class Opening:
    """How the user wants models opened, where their sources do not say."""

    architecture: str | None = None
    text: Source | None = None
    device: str = "auto"


def open_model(source: Source, opening: Opening | None = None) -> Clip:
    """Build, check and fill the model that a source describes."""
    opening = opening or Opening()
    device = choose_device(opening.device)
    tensors = read_tensors(source)
    if has_text(tensors):
        blueprint = read_blueprint(source, opening.architecture)
    else:
        blueprint, tensors = _with_text_of(source, tensors, opening)
    module, preprocess = build(blueprint)
    name = source.reference.text
    fill(module, tensors, name)
    module.eval().requires_grad_(False).to(device)
    tokenize = open_tokenizer(blueprint.model, blueprint.folder)
    return Clip(name, module, preprocess, tokenize, blueprint, source, device)


# What the source says -------------------------------------------------------------------------


def read_blueprint(source: Source, architecture: str | None = None) -> Blueprint:
    """Architecture, activation and preprocessing, from the source and from `--arch`."""
    reference = source.reference
    if reference.kind == "open_clip":
        blueprint = _from_tag(reference)
    elif architecture:
        return _from_architecture(source, architecture)
    elif (config := source.config("open_clip_config.json")) is not None:
        blueprint = _from_open_clip(source, config)
    elif (config := source.config("config.json")) is not None:
        blueprint = _from_transformers(source, config)
    else:
        raise UsageError(
            f"{reference.text}: no open_clip_config.json or config.json says which architecture "
            "this is; name it with --arch, for example --arch ViT-B-32"
        )
    check_activation(source, blueprint, "its configuration")
    return blueprint


def read_architecture(source: Source, architecture: str | None = None) -> dict[str, Any]:
    """Architecture and activation alone, for work that never preprocesses an image."""
    config = source.config("config.json")
    beside = source.config("open_clip_config.json")
    if architecture or config is None or beside or source.reference.kind == "open_clip":
        return read_blueprint(source, architecture).model
    model = transformers_config.model_config(config, source.reference.text)
    check_activation(source, Blueprint(model, {}), "its configuration")
    return model


def _from_tag(reference: Reference) -> Blueprint:
    from atlas_cli.models.open_clip_import import open_clip  # slow to import

    tag = open_clip.get_pretrained_cfg(reference.name, reference.tag)
    blueprint = _named(reference.name)
    blueprint.model["quick_gelu"] = bool(tag.get("quick_gelu", False))
    keys = ("mean", "std", "interpolation", "resize_mode")
    return Blueprint(blueprint.model, {key: tag[key] for key in keys if key in tag})


def _named(architecture: str) -> Blueprint:
    """The architecture of that name in open_clip's own list."""
    from atlas_cli.models.open_clip_import import open_clip  # slow to import

    check_architecture(architecture)
    config = open_clip.get_model_config(architecture)
    return Blueprint({"quick_gelu": False, **config}, {})


def _from_architecture(source: Source, architecture: str) -> Blueprint:
    blueprint = _named(architecture)
    check_activation(source, blueprint, f"--arch {architecture}")
    config = source.config("preprocessor_config.json")
    if config is not None:
        found = transformers_config.preprocess_config(config, source.reference.text)
        return Blueprint(blueprint.model, found)
    beside = source.config("open_clip_config.json") or {}
    return Blueprint(blueprint.model, _table(beside, "preprocess_cfg"))


def _from_open_clip(source: Source, config: Mapping[str, Any]) -> Blueprint:
    if "model_cfg" not in config:
        raise CheckpointError(f"{source.folder / 'open_clip_config.json'}: has no model_cfg")
    model = {"quick_gelu": False, **_table(config, "model_cfg")}
    preprocess = _table(config, "preprocess_cfg")
    check_config(model, preprocess, str(source.folder / "open_clip_config.json"), source.size)
    _check_size(source, model, preprocess)
    return Blueprint(model, preprocess, source.folder)


def _from_transformers(source: Source, config: Mapping[str, Any]) -> Blueprint:
    where = source.reference.text
    found = source.config("preprocessor_config.json")
    model = _translated(transformers_config.model_config, config, where)
    doubts: tuple[str, ...] = ()
    if found is not None:
        preprocess = _translated(transformers_config.preprocess_config, found, where)
    else:  # every CLIP of transformers that was published has the same
        preprocess = transformers_config.usual_preprocessing(model)
        doubts = (
            f"{where}: has no preprocessor_config.json; images are prepared as for OpenAI's CLIP, "
            f"at {preprocess['size']} pixels",
        )
    check_config(model, preprocess, f"{where}: config.json", source.size)
    _check_size(source, model, preprocess)
    return Blueprint(model, preprocess, source.folder, doubts)


def _translated(
    translate: Callable[[Mapping[str, Any], str], dict[str, Any]],
    config: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """What a configuration of transformers says in the words of open_clip."""
    try:
        return translate(config, where)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as problem:
        raise CheckpointError(
            f"{where}: its configuration lacks something or has it in another form: {problem!r}"
        ) from problem


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key, {})
    return dict(found) if isinstance(found, dict) else {}


def _check_size(source: Source, model: Mapping[str, Any], preprocess: Mapping[str, Any]) -> None:
    """Refuse preprocessing for another image size than the tower's."""
    tower, size = model["vision_cfg"].get("image_size", 224), preprocess.get("size")
    if isinstance(size, list | tuple) and len(set(size)) == 1:
        size = size[0]
    if isinstance(size, int) and isinstance(tower, int) and size != tower:
        raise CheckpointError(
            f"{source.reference.text}: images are preprocessed to {size} pixels but the image "
            f"tower takes {tower}"
        )


def check_activation(source: Source, blueprint: Blueprint, used: str) -> None:
    """Refuse an architecture whose activation differs from the one the weights declare."""
    using = bool(blueprint.model.get("quick_gelu", False))
    for where, declared in _declared_activations(source):
        if declared != using:
            raise MismatchError(
                f"{source.reference.text}: {where} says the weights use {_NAMES[declared]}, but "
                f"{used} uses {_NAMES[using]}; features would be wrong"
                + (_suggest(used, declared) if used.startswith("--arch") else "")
            )


def _suggest(used: str, quick: bool) -> str:
    name = used.removeprefix("--arch ").removesuffix("-quickgelu")
    return f" (use --arch {name}{'-quickgelu' if quick else ''})"


def _declared_activations(source: Source) -> Iterator[tuple[str, bool]]:
    """Every place that says which activation the weights were trained with."""
    for path in source.weights:
        if activation := read_metadata(path).get("activation"):
            yield f"the metadata of {path.name}", activation == "quick_gelu"
        if _is_openai(path):
            yield f"OpenAI's archive {path.name}", True
    if source.reference.kind == "open_clip":
        return  # the tag has been asked already
    if config := source.config("open_clip_config.json"):
        yield "open_clip_config.json", bool(_table(config, "model_cfg").get("quick_gelu", False))
    config = source.config("config.json")
    if config and config.get("model_type") in {"clip", "clip_vision_model"}:
        model = transformers_config.model_config(config, source.reference.text)
        yield "config.json", model["quick_gelu"]


def _is_openai(path: Path) -> bool:
    """Whether a file is one of OpenAI's archives, which were all trained with QuickGELU."""
    if path.suffix == ".safetensors":
        return False
    try:
        return set(INFORMATION) <= open_tensors([path]).keys()
    except CheckpointError:  # it has names that need --allow-global, so no TorchScript
        return False


def _with_text_of(
    source: Source, tensors: LazyTensors, opening: Opening
) -> tuple[Blueprint, dict[str, LazyTensor]]:
    """An image tower alone, completed by the text tower of another model."""
    if opening.text is None:
        raise UsageError(
            f"{source.reference.text}: has an image tower only; name the model whose text tower "
            "goes with it, for example --text openai/clip-vit-base-patch32"
        )
    other = opening.text.reference.text
    blueprint = read_blueprint(opening.text, opening.architecture)
    check_activation(source, blueprint, f"--text {other}")
    completed = read_tensors(opening.text)
    if unknown := sorted(name for name in tensors if name not in completed):
        raise MismatchError(
            f"{source.reference.text}: {unknown[0]} has no place in {other} "
            f"({len(unknown)} such tensors)"
        )
    return blueprint, {**completed, **tensors}


# Building -------------------------------------------------------------------------------------


def build(blueprint: Blueprint) -> tuple[torch.nn.Module, Preprocess]:
    """An open_clip model with untrained weights, and its evaluation transform."""
    from atlas_cli.models.open_clip_import import open_clip  # slow to import

    model = with_local_text(blueprint.model, blueprint.folder)
    check_installed(model["text_cfg"])
    with tempfile.TemporaryDirectory() as folder, quiet():
        config = {"model_cfg": model, "preprocess_cfg": blueprint.preprocess}
        (Path(folder) / "open_clip_config.json").write_text(json.dumps(config), "utf-8")
        try:
            module, _, transform = open_clip.create_model_and_transforms(
                f"local-dir:{folder}", load_weights=False, pretrained_text=False
            )
        except Exception as problem:  # of four libraries, for what a stranger wrote
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise CheckpointError(
                f"open_clip cannot build this architecture: {reason}"
            ) from problem
    return module, transform


# Zero-shot head -------------------------------------------------------------------------------


def zero_shot_head(
    clip: Clip, classes: Sequence[str], templates: Sequence[str], warn: Warn
) -> torch.Tensor:
    """The head's weights, (classes, width), from the cache if they are there."""
    path = cache_folder() / "heads" / f"{_key(clip, classes, templates)}.safetensors"
    if os.path.lexists(path):
        try:
            return _kept_head(path, len(classes)).to(clip.device)
        except (CheckpointError, KeyError):
            warn(f"{path}: damaged, computed again")
    weight = compute_head(clip, classes, templates)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, {"weight": weight.cpu()}, {"sha256": _digest(weight)})
    except OSError as problem:
        warn(
            f"{path.parent}: cannot keep the zero-shot head: {problem.strerror}; "
            "set ATLAS_CACHE to a folder that can be written"
        )
    return weight


def _kept_head(path: Path, classes: int) -> torch.Tensor:
    """A head from the cache. Raises CheckpointError unless it is what was written there."""
    weight = open_safetensors(path)["weight"].read()
    sound = weight.dtype.is_floating_point and bool(weight.isfinite().all())
    if not sound or weight.dim() != 2 or len(weight) != classes:
        raise CheckpointError(f"{path}: is no head of {classes} classes")
    if read_metadata(path).get("sha256") != _digest(weight):
        raise CheckpointError(f"{path}: is not what was written")
    return weight


def _digest(tensor: torch.Tensor) -> str:
    content: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def compute_head(clip: Clip, classes: Sequence[str], templates: Sequence[str]) -> torch.Tensor:
    """exp(s) * norm(mean over templates of norm(text(template of class))), for every class.

    s is the model's logit scale. Logits are head @ norm(image features).
    """
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    features = []
    with torch.no_grad():
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            tokens = clip.tokenize(prompts[start : start + _PROMPTS_AT_ONCE]).to(clip.device)
            features.append(clip.module.encode_text(tokens, normalize=True))  # type: ignore[operator]
        means = torch.cat(features).reshape(len(classes), len(templates), -1).mean(dim=1)
        scale = clip.module.logit_scale.exp()  # type: ignore[operator]
        return (scale * F.normalize(means, dim=-1)).clone()


def _key(clip: Clip, classes: Sequence[str], templates: Sequence[str]) -> str:
    """A hash of all that decides the head: text tower, tokenizer, names and templates.

    A tokenizer is known by its vocabulary and rules, and by what it makes of every name and of
    every template once.
    """
    digest = hashlib.sha256()
    for name, tensor in clip.module.state_dict().items():
        if not name.startswith("visual."):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    text = {**clip.config, "vision_cfg": None}
    digest.update(json.dumps([text, list(classes), list(templates)], sort_keys=True).encode())
    inner: Any = getattr(clip.tokenize, "tokenizer", clip.tokenize)
    rules = getattr(inner, "backend_tokenizer", None)
    known = rules.to_str() if rules else getattr(inner, "encoder", None) or inner.get_vocab()
    digest.update(json.dumps(known, sort_keys=True).encode())
    probes = [templates[0].replace("{}", name) for name in classes]
    tokens = clip.tokenize([*probes, *(text.replace("{}", classes[0]) for text in templates)])
    digest.update(_digest(tokens).encode())
    return digest.hexdigest()
