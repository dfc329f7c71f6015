"""What the configuration of a model may say: keys and values that are known, before it is used.

open_clip hands what it finds to other libraries. Some of these take a name for an address on the
Hub or for a file anywhere, so that only names of a known form go on.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import AtlasError, CheckpointError
from atlas_cli.io.files import inside, is_plain

Tokenize = Callable[[Sequence[str]], torch.Tensor]

_NUMBERS_PER_BYTE = 16  # of weights, beyond which a configuration is not that of its weights
_SMALL = 100_000_000  # numbers that are never too many


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value <= 10_000_000


def _counts(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and 1 <= len(value) <= 4
    return _count(value) or (listed and all(map(_count, value)))


def _number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


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


def _table(value: Any) -> bool:
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
    tables=(_table, "vision_cfg text_cfg multimodal_cfg"),
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
    width, layers = tower.get("width") or 0, tower.get("layers") or 0
    depth = float(sum(layers) if isinstance(layers, list | tuple) else layers)
    side = float(max(width) if isinstance(width, list | tuple) else width)
    patches = tower.get("image_size") or 0, tower.get("patch_size") or 1
    grid = [float(max(v) if isinstance(v, list | tuple) else v) for v in patches]
    words = float(tower.get("vocab_size", 0)) + float(tower.get("context_length", 0)) ** 2 / 100
    ratio = float(tower.get("mlp_ratio") or 4.0)
    return (4 + 2 * ratio) * side**2 * depth + side * words + side * (grid[0] / grid[1]) ** 2


# Text towers and tokenizers --------------------------------------------------------------------


def with_local_text(model: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The configuration with a text tower's own files found beside it, if they are there."""
    text = dict(model.get("text_cfg", {}))
    for key in ("hf_model_name", "hf_tokenizer_name"):
        if folder and (found := text_folder(folder, text.get(key))):
            text[key] = str(found.resolve())
    return {**model, "text_cfg": text}


def text_folder(home: Path, name: object) -> Path | None:
    """The folder in that of a model which describes its text tower, if it has one of that name."""
    if not name:
        return None
    found = inside(home, name, f"{home / 'open_clip_config.json'}")
    return found if found.is_dir() else None


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
        with quiet():  # code that comes with a tokenizer is never run
            if not name:
                return open_clip.SimpleTokenizer(context_length=length, **options)  # type: ignore[no-any-return]
            return open_clip.tokenizer.HFTokenizer(  # type: ignore[no-any-return]
                name, context_length=length, trust_remote_code=False, **options
            )
    except Exception as problem:  # of three libraries, for what a stranger wrote
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise CheckpointError(f"tokenizer {name}: cannot be opened: {reason}") from problem


# What configurations of open_clip say of tokenizers of transformers.
_TOKENIZER_OPTIONS = frozenset({"clean", "language", "strip_sep_token", "tokenizer_mode"})


@contextmanager
def quiet() -> Iterator[None]:
    """Without open_clip's log lines: what matters in them, atlas checks and says itself."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def check_installed(text: Mapping[str, Any]) -> None:
    """Refuse a text tower of transformers where that is not installed."""
    wanted = text.get("hf_model_name") or text.get("hf_tokenizer_name")
    if wanted and not _is_installed("transformers"):
        raise AtlasError(
            f"{wanted}: is a text tower of transformers, which is not installed; "
            "run: pip install 'atlas-cli[hf]'"
        )


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False
