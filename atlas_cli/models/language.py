"""What language models have in common: embeddings, heads, stacks of layers, and their settings.

Facts about names, for models whose code is not at hand. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli.io.tensors import LazyTensor, LazyTensors

_LAYER = re.compile(r"\.(\d+)\.")
# How names of token embeddings end, and those of the heads that give a number for every token.
_EMBEDDINGS = (
    *("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "tok_embeddings.weight"),
    *("embed_in.weight", "backbone.embeddings.weight", "shared.weight", "token_embedding.weight"),
)
_HEADS = (
    *("lm_head.weight", "lm_head.bias", "lm_head.linear.weight", "lm_head.linear.bias"),
    *("lm_head.decoder.weight", "lm_head.decoder.bias", "embed_out.weight", "proj_out.weight"),
    *("model.output.weight", "output_layer.weight", "vocab_projector.weight"),
    *("vocab_projector.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *("cls.predictions.bias",),
)
# Buffers that transformers computes by itself and that older versions of it saved all the same.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
# What stands before the layers, of the tensors outside of them; all else stands behind.
_BEFORE = re.compile(
    r"embed(?!_out)|wte|wpe|(^|\.)(shared|conv\d?|patch\w*|class_embedding)\.|class_embedding$"
    r"|positional|pos_emb|position_ids|rotary|layernorm_pre|ln_pre|layrnorm|relative_pe"
)
# Parts of models by the names that recipes have for them, and how their tensors' names begin.
_MODULES = {
    "encoder": ("model.encoder.", "encoder."),
    "decoder": ("model.decoder.", "decoder.", "proj_out.", "lm_head."),
    "shared": ("shared.",),
    "text_decoder": ("language_model.", "model.language_model.", "model.", "lm_head."),
    "vision_tower": ("vision_tower.", "model.vision_tower.", "visual.", "model.visual."),
    "vision_model": ("vision_model.", "model.vision_model."),
    "multi_modal_projector": (
        *("multi_modal_projector.", "model.multi_modal_projector.", "visual.merger."),
        *("model.visual.merger.", "model.visual.deepstack_merger_list."),
    ),
}
_TOWERS = ({"encoder", "decoder", "shared"}, _MODULES.keys() - {"encoder", "decoder", "shared"})
# Settings that hold the number of layers, by what the name of the stack says.
_COUNTS = (
    (r"decoder", ("decoder_layers", "num_decoder_layers")),
    (r"encoder", ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers")),
    (
        r"visual|vision",
        ("vision_config.num_hidden_layers", "vision_config.depth", "vision_cfg.layers"),
    ),
    (
        r"",
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "text_cfg.layers"),
            "text_config.num_hidden_layers",
        ),
    ),
)

_SIZES = ("vocab_size", "text_config.vocab_size")  # settings that hold the number of tokens


# Tensors --------------------------------------------------------------------------------------


def is_embedding(name: str) -> bool:
    """Whether a tensor has a row for every token that goes in."""
    return name.endswith(_EMBEDDINGS)


def is_head(name: str) -> bool:
    """Whether a tensor has a row for every token that may come out."""
    return name.endswith(_HEADS) or name == "output.weight"


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for every token."""
    return is_embedding(name) or is_head(name)


def is_before_layers(name: str) -> bool:
    """Whether a tensor outside of the layers is used before them."""
    return not is_head(name) and _BEFORE.search(name) is not None


@dataclass(frozen=True)
class LayerName:
    """The name of a tensor in a layer: `stack`.`layer`.`rest`."""

    stack: str
    layer: int
    rest: str


def layer_of(name: str) -> LayerName | None:
    """Where a tensor is in its stack of layers, or None outside of any."""
    match = _LAYER.search(name)
    return LayerName(name[: match.start()], int(match[1]), name[match.end() :]) if match else None


def stacks_of(names: Iterable[str]) -> dict[str, int]:
    """The stacks of layers by the beginning of their names, and the number of layers of each."""
    counts: dict[str, int] = {}
    for name in names:
        if found := layer_of(name):
            counts[found.stack] = max(counts.get(found.stack, 0), found.layer + 1)
    return counts


def module_of(name: str, known: Iterable[str]) -> str | None:
    """The part of a model that a tensor belongs to: one of `known`, or another that has a name.

    `default` is what belongs to no other part.
    """
    wanted = set(known)
    names = dict.fromkeys([*wanted, *next((t for t in _TOWERS if t & wanted), ())])
    found = [
        (len(prefix), module)
        for module in names
        for prefix in (*_MODULES.get(module, ()), f"{module}.")
        if name.startswith(prefix)
    ]
    return max(found)[1] if found else "default" if "default" in wanted else None


# Models that differ in what they store --------------------------------------------------------


def reconciled(
    models: Mapping[str, LazyTensors], untied: Collection[str] = ()
) -> dict[str, LazyTensors]:
    """The models with the same heads, and without buffers that only some of them store.

    A model whose head is its embedding need not store it twice; another one may. Those that are
    `untied` by their configuration must store a head.
    """
    names = dict.fromkeys(name for tensors in models.values() for name in tensors)
    heads = [name for name in names if is_head(name) and name.endswith("weight")]
    apart = {name for name in names if not all(name in tensors for tensors in models.values())}
    return {
        who: {name: t for name, t in tensors.items() if not _is_left(name, t, apart)}
        | {
            name: tied
            for name in heads
            if who not in untied and name in apart and (tied := tied_to(tensors, name))
        }
        for who, tensors in models.items()
    }


def _is_left(name: str, tensor: LazyTensor, apart: set[str]) -> bool:
    mask = len(tensor.shape) != 1 or name.endswith("inv_freq")  # a true bias is a vector
    return name in apart and mask and _BUFFERS.search(name) is not None


def tied_to(tensors: LazyTensors, head: str) -> LazyTensor | None:
    """The head of a model: its own, or the embedding that takes its place."""
    return tensors.get(head) or next((t for n, t in tensors.items() if is_embedding(n)), None)


def is_untied(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says that the head is another tensor than the embedding."""
    inner = config.get("text_config")
    tables = (config, inner if isinstance(inner, Mapping) else {})
    return any(table.get("tie_word_embeddings") is False for table in tables)


# Settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restacked:
    """A stack of layers that was put together anew: for every layer, a configuration and its layer.

    `count` is the number of layers that it had in the configuration that is changed.
    """

    stack: str
    count: int
    layers: Sequence[tuple[Mapping[str, Any], int]]


def with_layers(config: Mapping[str, Any], changed: Restacked) -> dict[str, Any]:
    """A configuration for the layers of a stack that was put together anew.

    The number of layers is set wherever it stands, and lists with an entry for every layer get the
    entries of the layers that were taken.
    """
    result = dict(config)
    keys = next(keys for pattern, keys in _COUNTS if re.search(pattern, changed.stack))
    there = [key for key in keys if _get(config, key) == changed.count]
    for key in there or keys[:1]:
        _set(result, key, len(changed.layers))
        for name, value in list(_table(result, key).items()):
            if isinstance(value, list) and len(value) == changed.count and "layer" in name:
                path = f"{key.rpartition('.')[0]}.{name}".lstrip(".")
                _set(result, path, _listed(changed, path, value))
    return result


def _listed(changed: Restacked, path: str, otherwise: list[Any]) -> list[Any]:
    """A list with the entry that each layer has in the configuration it comes from."""
    lists = [(_get(config, path), layer) for config, layer in changed.layers]
    if all(isinstance(found, list) and layer < len(found) for found, layer in lists):
        return [found[layer] for found, layer in lists]
    return [otherwise[min(layer, len(otherwise) - 1)] for _, layer in changed.layers]


def _table(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split(".")[:-1]:
        config = config.get(key) or {}
    return config


def _get(config: Mapping[str, Any], path: str) -> Any:
    table = _table(config, path)
    return table.get(path.rpartition(".")[2]) if isinstance(table, Mapping) else None


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a path; tables on the way are copied, since others may hold them."""
    *way, last = path.split(".")
    for key in way:
        config[key] = dict(config.get(key) or {})
        config = config[key]
    config[last] = value


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A configuration for another number of tokens, wherever it stands."""
    result = dict(config)
    there = [key for key in _SIZES if _get(config, key) is not None]
    for key in there or _SIZES[:1]:
        _set(result, key, size)
    return result


def with_special_ids(
    config: Mapping[str, Any], old: Mapping[str, int], new: Mapping[str, int]
) -> dict[str, Any]:
    """A configuration whose ids of special tokens are those of another tokenizer."""
    tokens = {number: token for token, number in old.items()}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        return new.get(tokens.get(value, ""), value) if type(value) is int else value

    return {key: moved(v) if key.endswith("_token_id") else v for key, v in config.items()}
