"""The folder of a model: its tensors by name, what its configuration may say, its other files."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli.errors import CheckpointError
from atlas_cli.io.checkpoint import open_tensors, unwrapped
from atlas_cli.io.files import copy_file, copy_folder, inside, is_plain
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models.tensor_names import piece, place_of, to_open_clip
from atlas_cli.sources.locate import Source, read_object
from atlas_cli.sources.model_files import COMPANION_FILES

CONFIG = "open_clip_config.json"
MASKS = ("attn_mask", "position_ids")
INFORMATION = ("input_resolution", "context_length", "vocab_size")
_FACTOR = re.compile(r"[._]lora[._]?(A|B|up|down|embedding_A|embedding_B)(\.|$)")

# Tensors by name: those of open_clip, wrapped or not -------------------------------------------


def read_tensors(source: Source, allow: Collection[str] = ()) -> dict[str, LazyTensor]:
    """The tensors of a source under open_clip's names (`visual.*` for the image tower).

    Those of MODEL+ADAPTER hold what the adapter adds.
    """
    tensors = normalised(open_tensors(source.weights, allow), source.reference.text)
    if source.adapter is None:
        return tensors
    from atlas_cli.models.adapters import add_adapter  # most models come without one

    return dict(add_adapter(tensors, source.adapter))


def normalised(tensors: LazyTensors, where: str) -> dict[str, LazyTensor]:
    """Tensors under open_clip's names, whatever their file calls them."""
    plain: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        inner = unwrapped(name)
        if inner in plain:
            raise CheckpointError(f"{where}: two tensors would both be {inner}; one is {name}")
        plain[inner] = tensor
    if is_transformers(plain):
        return to_open_clip(plain)
    kept = {name: tensor for name, tensor in plain.items() if not _is_passing(name)}
    if "conv1.weight" in kept:  # an image tower saved on its own
        return {f"visual.{name}": tensor for name, tensor in kept.items()}
    return kept


def _is_passing(name: str) -> bool:
    """Whether a tensor is no part of the model: a mask, a size, a constant of a script."""
    return name.endswith(MASKS) or name in INFORMATION or name.startswith("CONSTANTS.")


def has_text(tensors: LazyTensors) -> bool:
    """Whether there is a text tower among the tensors."""
    return any(name.startswith(("transformer.", "text.")) for name in tensors)


def is_clip(names: Iterable[str]) -> bool:
    """Whether names are those of a CLIP model, of open_clip or of transformers.

    Language models that see, such as Qwen-VL, have a `visual` tower as well, and are none.
    """
    inner = [unwrapped(name) for name in names]
    if any(_writes_language(name) for name in inner):
        return False
    return any(name.startswith(("visual.", "vision_model.")) for name in inner)


def _writes_language(name: str) -> bool:
    """Whether a tensor belongs to a decoder of language; a text tower of CLIP is `text`."""
    tokens = name.endswith("embed_tokens.weight") and not name.startswith("text.")
    return tokens or name.startswith(("language_model.", "lm_head."))


def is_transformers(tensors: LazyTensors) -> bool:
    """Whether names are those that transformers gives to CLIP."""
    return any("encoder.layers." in name for name in tensors)


def is_adapter(source: Source, tensors: LazyTensors) -> bool:
    """Whether a source is an adapter of PEFT, by the name of its file or of its tensors."""
    named = source.weights[0].name.startswith("adapter_model.")
    return named or any(".lora_A." in name for name in tensors)


def has_factors(names: Iterable[str]) -> bool:
    """Whether some tensors are factors of LoRA, of any library: they are no weights."""
    return any(_FACTOR.search(name) for name in names)


def plain(tensors: LazyTensors, where: str) -> LazyTensors:
    """A model as it can be written: names of open_clip without wrappers, others as they are."""
    if is_clip(tensors) and not is_transformers(tensors):
        return normalised(tensors, where)
    return tensors


def block_of(name: str, *, transformers: bool) -> tuple[str, str]:
    """open_clip's name of a tensor, and what of it this is: see place_of."""
    return place_of(unwrapped(name)) if transformers else (unwrapped(name), "")


def renamed(tensors: LazyTensors, like: LazyTensors, where: str) -> LazyTensors:
    """The tensors under the names that `like` has for them; left alone if they have them already.

    Names that have no counterpart are kept, for whoever compares the two to complain of.
    """
    if tensors.keys() == like.keys() or not (is_clip(tensors) and is_clip(like)):
        return tensors
    blocks = normalised(tensors, where)
    transformers = is_transformers(like)
    found: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for name, wanted in like.items():
        if not wanted.dtype.is_floating_point:
            continue
        block, part = block_of(name, transformers=transformers)
        if block in blocks:
            found[name] = piece(blocks[block], part)
            used.add(block)
    return found | {name: tensor for name, tensor in blocks.items() if name not in used}


# What a configuration may say -----------------------------------------------------------------
#
# open_clip hands what it finds to other libraries. Some of these take a name for an address on the
# Hub or for a file anywhere, so that only keys and values of a known form go on.

_NUMBERS_PER_BYTE = 16  # of weights, beyond which a configuration is not that of its weights
_SMALL = 100_000_000  # numbers that are never too many


@dataclass(frozen=True)
class Blueprint:
    """What a source says of a model before its weights are read."""

    model: dict[str, Any]
    preprocess: dict[str, Any]
    folder: Path | None = None
    doubts: tuple[str, ...] = ()  # what was not said and is taken as usual


def checked_blueprint(
    source: Source,
    model: dict[str, Any],
    preprocess: dict[str, Any],
    where: str,
    doubts: tuple[str, ...] = (),
) -> Blueprint:
    """What a folder says of its model. Raises CheckpointError unless a model can be like that."""
    check_config(model, preprocess, where, source.size)
    _check_size(source, model, preprocess)
    return Blueprint(model, preprocess, source.folder, doubts)


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value <= 10_000_000


def _counts(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and 1 <= len(value) <= 4
    return _count(value) or (listed and all(map(_count, value)))


def _number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e30)


def _index(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= 10_000_000)


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _no(value: Any) -> bool:
    return value in (None, False)


def _word(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(re.fullmatch(r"[\w.-]{0,100}", value)))


def _name(value: Any) -> bool:
    return value is None or (is_plain(value) and ":" not in value and len(value) <= 200)


def _options(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(_flag(v) or _number(v) or _word(v) for v in value.values())
    )


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _colour(value: Any) -> bool:
    return value is None or _number(value) or (_triple(value) and all(v >= 0 for v in value))


def _triple(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_number, value))


def _known(**checks: tuple[Callable[[Any], bool], str]) -> dict[str, Callable[[Any], bool]]:
    return {name: check for check, names in checks.values() for name in names.split()}


_BLOCK = "qk_norm scaled_cosine_attn scale_heads scale_attn_inner scale_attn scale_fc"
_MODEL = _known(
    counts=(_count, "embed_dim"),
    tables=(_mapping, "vision_cfg text_cfg multimodal_cfg"),
    flags=(_flag, "quick_gelu custom_text nonscalar_logit_scale output_dict"),
    numbers=(_number, "init_logit_scale init_logit_bias"),
    words=(_word, "cast_dtype"),
    indexes=(_index, "pad_id"),
)
_VISION = _known(
    counts=(_counts, "layers width head_width image_size"),
    patches=(lambda value: value is None or _counts(value), "patch_size"),
    poolers=(_count, "attn_pooler_queries attn_pooler_heads"),
    numbers=(_number, "mlp_ratio ls_init_value patch_dropout timm_drop timm_drop_path"),
    flags=(_flag, "no_ln_pre final_ln_after_pool output_tokens timm_proj_bias input_patchnorm"),
    blocks=(_flag, _BLOCK),
    words=(_word, "pos_embed_type pool_type block_type timm_model_name timm_pool timm_proj"),
    attention=(lambda value: _flag(value) or _word(value), "attentional_pool global_average_pool"),
    options=(_options, "act_kwargs norm_kwargs"),
    never=(_no, "timm_model_pretrained"),
)
_TEXT = _known(
    counts=(_count, "context_length vocab_size width heads layers dim_head n_queries"),
    poolers=(_count, "attn_pooler_heads"),
    indexes=(_index, "pad_id eos_id"),
    numbers=(_number, "mlp_ratio ls_init_value"),
    flags=(_flag, "embed_cls no_causal_mask final_ln_after_pool proj_bias output_tokens"),
    blocks=(_flag, _BLOCK),
    towers=(_flag, "hf_model_pretrained"),
    words=(_word, "tokenizer_mode pool_type proj_type block_type hf_proj_type hf_pooler_type"),
    names=(_name, "hf_model_name hf_tokenizer_name"),
    options=(_options, "act_kwargs norm_kwargs tokenizer_kwargs"),
)
_PREPROCESS = _known(
    sizes=(_counts, "size"),
    triples=(_triple, "mean std"),
    words=(_word, "mode interpolation resize_mode"),
    colours=(_colour, "fill_color"),
)


def check_config(
    model: Mapping[str, Any], preprocess: Mapping[str, Any], where: str, size: int
) -> None:
    """Raise CheckpointError for a key or a value that no model of open_clip has.

    `size` is that of the weights in bytes: towers that are far larger are not built.
    """
    _check("model_cfg", model, _MODEL, where)
    for key, known in (("vision_cfg", _VISION), ("text_cfg", _TEXT), ("multimodal_cfg", _TEXT)):
        if key not in model and key != "multimodal_cfg":
            raise CheckpointError(f"{where}: model_cfg has no {key}")
        _check(key, model.get(key, {}), known, where)
    _check("preprocess_cfg", preprocess, _PREPROCESS, where)
    if 0 in (preprocess.get("std") or ()):
        raise CheckpointError(f"{where}: preprocess_cfg has a standard deviation of 0")
    numbers = sum(_numbers(model[key]) for key in ("vision_cfg", "text_cfg"))
    if numbers > max(_SMALL, size * _NUMBERS_PER_BYTE):
        raise CheckpointError(
            f"{where}: describes a model of {numbers:.2g} numbers, and its weights have "
            f"{size / 1e6:,.0f} MB"
        )


def _check(
    table: str, found: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]], where: str
) -> None:
    for key, value in found.items():
        if key not in known:
            raise CheckpointError(f"{where}: {table} has '{key}', which atlas does not hand on")
        if not known[key](value):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise CheckpointError(f"{where}: {table}.{key} cannot be {shown}")


def _numbers(tower: Mapping[str, Any]) -> float:
    """About how many numbers a tower has."""
    own = not (tower.get("timm_model_name") or tower.get("hf_model_name"))  # else by that name
    width, layers = tower.get("width") or 768 * own, tower.get("layers") or 12 * own
    depth = float(sum(layers) if isinstance(layers, list | tuple) else layers)
    side = float(max(width) if isinstance(width, list | tuple) else width)
    patches = tower.get("image_size") or 0, tower.get("patch_size") or 1
    grid = [float(max(v) if isinstance(v, list | tuple) else v) for v in patches]
    words = float(tower.get("vocab_size", 0)) + float(tower.get("context_length", 0)) ** 2 / 100
    ratio = float(tower.get("mlp_ratio") or 4.0)
    return (4 + 2 * ratio) * side**2 * depth + side * words + side * (grid[0] / grid[1]) ** 2


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


# The files beside the weights -----------------------------------------------------------------

_TEXT_FOLDERS = ("hf_model_name", "hf_tokenizer_name")
# What companion patterns match, but what describes other weights than those that are written.
_LEFT = ("*.index.json", "adapter_config.json", "trainer_state.json", "training_args*", "*.bin")
_CONFIGS = ("config.json", "generation_config.json", CONFIG)


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
        copy_text(described, source.folder, folder)


def _changed(path: Path, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> str | None:
    """The file with other values; None if none is another one."""
    found: dict[str, Any] = read_object(path)
    changed = change(path.name, found)
    return json.dumps(changed, indent=2, ensure_ascii=False) + "\n" if changed != found else None


def copy_text(model: Mapping[str, Any], home: Path | None, folder: Path) -> None:
    """Copy folders beside the base that a text tower of transformers is described in."""
    text = model.get("text_cfg", {})
    for key in _TEXT_FOLDERS:
        target = folder / str(text.get(key))
        if home and not target.exists() and (found := text_folder(home, text.get(key))):
            copy_folder(found, target, str(home))


def text_folder(home: Path, name: object) -> Path | None:
    """The folder in that of a model which describes its text tower, if it has one of that name."""
    if not name:
        return None
    found = inside(home, name, f"{home / CONFIG}")
    return found if found.is_dir() else None


def with_local_text(model: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The configuration with a text tower's own files found beside it, if they are there."""
    text = dict(model.get("text_cfg", {}))
    for key in _TEXT_FOLDERS:
        if folder and (found := text_folder(folder, text.get(key))):
            text[key] = str(found.resolve())
        elif folder and key == _TEXT_FOLDERS[1] and text.get(key) and _has_tokenizer(folder):
            text[key] = str(folder.resolve())  # beside the weights, as SigLIP has it
    return {**model, "text_cfg": text}


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
