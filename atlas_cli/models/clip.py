"""open_clip models, built from what their source says and checked against it."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.io import checkpoint
from atlas_cli.io.checkpoint import open_safetensors, open_tensors, read_metadata, write_tensors
from atlas_cli.io.files import cache_folder
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models import transformers_config
from atlas_cli.models.folders import (
    CONFIG,
    INFORMATION,
    MASKS,
    Blueprint,
    checked_blueprint,
    has_text,
    read_tensors,
    with_local_text,
)
from atlas_cli.parallel import choose_device
from atlas_cli.sources.locate import Source

Preprocess = Callable[[Any], torch.Tensor]  # of a PIL image
Tokenize = Callable[[Sequence[str]], torch.Tensor]
Classifier = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]  # weights, or a learned head
Warn = Callable[[str], None]
HEAD = "atlas_head.safetensors"  # the name of a learned head beside a model
_BUFFERS = (*MASKS, "num_batches_tracked")  # a module makes them itself
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
        return named and not self.source.adapter and (self.source.folder / HEAD).is_file()


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
        from atlas_cli.models.open_clip_import import configuration_of  # slow to import

        blueprint = Blueprint(*configuration_of(reference))
    elif architecture:
        return _from_architecture(source, architecture)
    elif (config := source.config(CONFIG)) is not None:
        blueprint = _from_open_clip(source, config)
    elif (config := source.config("config.json")) is not None:
        blueprint = transformers_config.transformers_blueprint(source, config)
    else:
        raise UsageError(
            f"{reference.text}: no open_clip_config.json or config.json says which architecture "
            "this is; name it with --arch, for example --arch ViT-B-32"
        )
    check_activation(source, blueprint, "its configuration")
    return blueprint


def _from_open_clip(source: Source, config: Mapping[str, Any]) -> Blueprint:
    where = str(source.folder / CONFIG)
    if "model_cfg" not in config:
        raise CheckpointError(f"{where}: has no model_cfg")
    model = {"quick_gelu": False, **_table(config, "model_cfg")}
    return checked_blueprint(source, model, _table(config, "preprocess_cfg"), where)


def _from_architecture(source: Source, architecture: str) -> Blueprint:
    from atlas_cli.models.open_clip_import import architecture_named  # slow to import

    blueprint = Blueprint(architecture_named(architecture), {})
    check_activation(source, blueprint, f"--arch {architecture}")
    config = source.config("preprocessor_config.json")
    if config is not None:
        found = transformers_config.preprocess_config(config, source.reference.text)
        return Blueprint(blueprint.model, found)
    beside = source.config(CONFIG) or {}
    return Blueprint(blueprint.model, _table(beside, "preprocess_cfg"))


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return dict(found) if isinstance(found := config.get(key), dict) else {}


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
    if config := source.config(CONFIG):
        yield CONFIG, bool(_table(config, "model_cfg").get("quick_gelu", False))
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
    from atlas_cli.models.open_clip_import import check_tower_size, open_clip  # slow to import

    model = with_local_text(blueprint.model, blueprint.folder)
    text = model["text_cfg"]
    if wanted := text.get("hf_model_name") or text.get("hf_tokenizer_name"):
        transformers_config.check_installed(wanted)
    with ExitStack() as after, _quiet():
        path = Path(tempfile.mkdtemp(prefix="atlas-")) / CONFIG
        after.callback(path.parent.rmdir)  # which takes no descriptor: all may be in use
        after.callback(path.unlink, missing_ok=True)
        path.write_text(json.dumps({"model_cfg": model, "preprocess_cfg": blueprint.preprocess}))
        try:
            module, _, transform = open_clip.create_model_and_transforms(
                f"local-dir:{path.parent}", load_weights=False, pretrained_text=False
            )
        except Exception as problem:  # of four libraries, for what a stranger wrote
            said = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise CheckpointError(f"open_clip cannot build this architecture: {said}") from problem
    if "timm_model_name" in model["vision_cfg"]:
        check_tower_size(module, model["vision_cfg"].get("image_size", 224))
    return module, transform


def fill(module: torch.nn.Module, tensors: LazyTensors, where: str) -> None:
    """Copy tensors into a module by name. Raises MismatchError that lists what does not fit."""
    places = module.state_dict()
    if problems := _mismatches(places, tensors):
        listed = "; ".join(problems[:3])
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise MismatchError(f"{where}: the weights do not fit the architecture: {listed}{more}")
    with torch.no_grad():
        for name, place in places.items():
            if name in tensors:
                place.copy_(tensors[name].read().reshape(place.shape))


def _mismatches(places: Mapping[str, torch.Tensor], tensors: LazyTensors) -> list[str]:
    problems = []
    for name, place in places.items():
        if name in tensors:
            found, wanted = tensors[name].shape, tuple(place.shape)
            if found != wanted and not {found, wanted} <= {(), (1,)}:
                problems.append(f"{name} has shape {found}, expected {wanted}")
        elif not name.endswith(_BUFFERS):
            problems.append(f"{name} is missing")
    return problems + [f"{name} is unknown" for name in tensors if name not in places]


def open_tokenizer(model: Mapping[str, Any], folder: Path | None) -> Tokenize:
    """The tokenizer that a configuration names, or the one of CLIP."""
    from atlas_cli.models.open_clip_import import open_clip  # slow to import

    text = with_local_text(model, folder)["text_cfg"]
    length = text.get("context_length", 77)
    name, options = text.get("hf_tokenizer_name"), text.get("tokenizer_kwargs") or {}
    if strange := sorted(options.keys() - _TOKENIZER_OPTIONS):
        raise CheckpointError(
            f"{folder}: its configuration has tokenizer_kwargs {', '.join(strange)}, "
            f"which atlas does not hand on; it knows {', '.join(sorted(_TOKENIZER_OPTIONS))}"
        )
    try:
        with _quiet():  # code that comes with a tokenizer is never run
            if not name:
                made = copy.copy(_made_once(open_clip.SimpleTokenizer, **options))
                made.context_length = length
                return made  # type: ignore[no-any-return]
            return open_clip.tokenizer.HFTokenizer(  # type: ignore[no-any-return]
                name, context_length=length, trust_remote_code=False, **options
            )
    except Exception as problem:  # of three libraries, for what a stranger wrote
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CheckpointError(f"tokenizer {name}: cannot be opened: {reason}") from problem


@functools.cache
def _made_once(tokenizer: Callable[..., Any], **options: Any) -> Any:
    """CLIP's tokenizer: its tables take as long to build as a small model, and 22 MB."""
    return tokenizer(**options)


# What configurations of open_clip say of tokenizers of transformers.
_TOKENIZER_OPTIONS = frozenset({"clean", "language", "strip_sep_token", "tokenizer_mode"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without open_clip's log lines: what matters in them, atlas checks and says itself."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


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
        write_tensors(path, {"weight": weight.cpu()}, {"sha256": checkpoint.digest_of(weight)})
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
    if read_metadata(path).get("sha256") != checkpoint.digest_of(weight):
        raise CheckpointError(f"{path}: is not what was written")
    return weight


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


def logits_of(features: torch.Tensor, head: Classifier) -> torch.Tensor:
    """head @ norm(features), (images, classes), or what a learned head makes of the features.

    The weights hold the model's logit scale.
    """
    if not isinstance(head, torch.Tensor):
        return head(features)
    return F.normalize(features, dim=-1) @ head.T


def _key(clip: Clip, classes: Sequence[str], templates: Sequence[str]) -> str:
    """A hash of all that decides the head: text tower, tokenizer, names and templates.

    A tokenizer is known by its vocabulary and rules, and by what it makes of every name and of
    every template once.
    """
    digest = hashlib.sha256()
    for name, tensor in clip.module.state_dict().items():
        if not name.startswith("visual."):
            shape = tuple(tensor.shape)
            what = f"{name} {tensor.dtype} {shape} {checkpoint.digest_of(tensor)}"
            digest.update(what.encode())
    text = {**clip.config, "vision_cfg": None}
    digest.update(json.dumps([text, list(classes), list(templates)], sort_keys=True).encode())
    inner: Any = getattr(clip.tokenize, "tokenizer", clip.tokenize)
    rules = getattr(inner, "backend_tokenizer", None)
    known = rules.to_str() if rules else getattr(inner, "encoder", None)
    digest.update(repr(known or sorted(inner.get_vocab().items())).encode())
    probes = [templates[0].replace("{}", name) for name in classes]
    tokens = clip.tokenize([*probes, *(text.replace("{}", classes[0]) for text in templates)])
    digest.update(checkpoint.digest_of(tokens).encode())
    return digest.hexdigest()
