"""LoRA files of the paper's own code, which used LoRA-Torch -> low-rank blocks, not multiplied out.

Such a file holds the factors of an image encoder and nothing else; in particular it does not say
alpha, which was 32 for every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from atlas_cli.core.patterns import find_pattern
from atlas_cli.core.storage import BlockPart, Factors
from atlas_cli.errors import CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import unwrapped
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.models import tensor_names
from atlas_cli.sources.locate import Source

_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_EMBEDDED = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_embedding_([AB])(?:\.default)?")
# Settings that change nothing about what a finished adapter adds to the weights.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
    *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "runtime_config"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of initialisations below
}
_APPLIED = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("fan_in_fan_out", "init_lora_weights", "bias"),
}
# All other initialisations take something off the base weights and keep it in the adapter.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class _Settings:
    """What adapter_config.json says of the scale and the layout of the factors."""

    where: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    by_root: bool
    transposed: bool
    embeddings: frozenset[str] = frozenset()  # modules whose factors are transposed in any case

    def scale_of(self, module: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) with rslora; patterns may set both for a module."""
        declared = _by_pattern(self.rank_pattern, module, self.rank)
        if declared != rank:
            raise CheckpointError(
                f"{self.where}: {module} has rank {rank}, but adapter_config.json says {declared}"
            )
        alpha: float = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


@dataclass(frozen=True)
class _Piece:
    """up @ down from the row `start` on: one adapted module, or a third of a block."""

    start: int
    up: LazyTensor
    down: LazyTensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        rows, columns = self.up.shape[0], math.prod(self.down.shape[1:])
        return (columns, rows) if self.transposed else (rows, columns)

    def read(self) -> BlockPart:
        """The factors in float32, with the scale in `up`."""
        up = self.up.read().float().flatten(1)
        down = self.down.read().float().flatten(1)
        if self.transposed:
            up, down = down.T.contiguous(), up.T.contiguous()
        return BlockPart(self.start, up * self.scale, down)


def factor_of(name: str) -> tuple[str, str] | None:
    """The module and the letter, A or B, of a tensor that is a factor of LoRA."""
    match = _FACTOR.fullmatch(name) or _EMBEDDED.fullmatch(name)
    return (match[1], match[2]) if match else None


def open_adapter(
    source: Source, tensors: LazyTensors, base: LazyTensors, applied: Collection[str] = ()
) -> dict[str, Callable[[], Factors]]:
    """The blocks of `base` that an adapter changes, each as factors once it is asked for.

    Raises CheckpointError for any setting or tensor that would not be applied exactly, but for
    the settings that the caller has `applied`.
    """
    where = source.reference.text
    embedded = frozenset(match[1] for name in tensors if (match := _EMBEDDED.fullmatch(name)))
    settings = replace(read_settings(source, applied), embeddings=embedded)
    pieces: dict[str, list[_Piece]] = {}
    for module, factors in pairs_of(tensors, where).items():
        name, piece = _place(module, factors, base, settings)
        pieces.setdefault(name, []).append(piece)
    return {name: _block(base[name].shape, pieces[name]) for name in pieces}


def _block(shape: tuple[int, ...], pieces: list[_Piece]) -> Callable[[], Factors]:
    ordered = sorted(pieces, key=lambda piece: piece.start)
    return lambda: Factors(shape, tuple(piece.read() for piece in ordered))


def read_settings(source: Source, applied: Collection[str] = ()) -> _Settings:
    """What an adapter says of itself. Raises CheckpointError for what atlas does not apply."""
    where, config = source.reference.text, source.config("adapter_config.json")
    if config is None:
        raise CheckpointError(f"{where}: is an adapter, but there is no adapter_config.json by it")
    _check({key: value for key, value in config.items() if key not in applied}, where)
    found: Any = config
    try:
        return _Settings(
            where,
            int(found["r"]),
            float(found["lora_alpha"]),
            {key: int(value) for key, value in (found.get("rank_pattern") or {}).items()},
            {key: float(value) for key, value in (found.get("alpha_pattern") or {}).items()},
            bool(found.get("use_rslora")),
            bool(found.get("fan_in_fan_out")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(f"{where}: adapter_config.json is damaged: {problem!r}") from problem


def _check(config: Mapping[str, Any], where: str) -> None:
    """Refuse, by name, whatever would make the adapter more than a product of two factors."""
    refused = []
    if config.get("peft_type") != "LORA":
        refused.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        refused.append(f"bias {config['bias']}")
    if config.get("init_lora_weights") not in _INITIALISATIONS:
        refused.append(f"init_lora_weights {config['init_lora_weights']}")
    known = _HARMLESS | _APPLIED
    refused += [key for key, value in config.items() if value and key not in known]
    if refused:
        listed = ", ".join(refused)
        raise CheckpointError(
            f"{where}: adapter_config.json uses {listed}, which atlas does not apply exactly; "
            "merge the adapter into its model with peft and extract from that"
        )


def pairs_of(tensors: LazyTensors, where: str) -> dict[str, dict[str, LazyTensor]]:
    """Both factors of every adapted module; any other tensor is refused by name."""
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        factor = factor_of(name)
        if factor is None or len(tensor.shape) < 2 or 0 in tensor.shape:
            raise CheckpointError(f"{where}: {name} is no factor of LoRA, so it is not applied")
        found.setdefault(factor[0], {})[factor[1]] = tensor
    for module, factors in found.items():
        if factors.keys() != {"A", "B"} or factors["A"].shape[0] != factors["B"].shape[1]:
            raise CheckpointError(f"{where}: {module} lacks one of its factors, or they differ")
    return found


def _place(
    module: str, factors: Mapping[str, LazyTensor], base: LazyTensors, settings: _Settings
) -> tuple[str, _Piece]:
    """The block that a module's factors change, and how; raises MismatchError if none fits."""
    name, part = block_of_module(unwrapped(module).replace(".base_layer", ""), base)
    if name not in base:
        raise MismatchError(f"{settings.where}: {module} has no place in the base model ({name})")
    up, down = factors["B"], factors["A"]
    shape = base[name].shape
    rows = shape[0] // 3 if part in tensor_names.THIRDS else shape[0]
    start = tensor_names.THIRDS.index(part) * rows if part in tensor_names.THIRDS else 0
    flipped = settings.transposed or module in settings.embeddings
    transposed = flipped != (part == tensor_names.TRANSPOSED)
    scale = settings.scale_of(module, down.shape[0])
    piece = _Piece(start, up, down, scale, transposed)
    if piece.shape != (rows, math.prod(shape[1:])) or math.prod(up.shape[2:]) != 1:
        wanted = (rows, *shape[1:])
        raise MismatchError(
            f"{settings.where}: {module} changes {piece.shape}, but {name} has {wanted} there"
        )
    return name, piece


def block_of_module(module: str, base: LazyTensors) -> tuple[str, str]:
    """The tensor of `base` that is a module's weight, and which part of it."""
    if f"{module}.in_proj_weight" in base:  # open_clip's attention, adapted as a whole
        return f"{module}.in_proj_weight", ""
    for name in (f"{module}.weight", f"vision_model.{module}.weight"):  # of an image tower alone
        if name in base:
            return name, ""
    return tensor_names.place_of(f"{module}.weight")


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name."""
    for pattern, value in patterns.items():
        try:
            if find_pattern(rf"(.*\.)?({pattern})", module, whole=True):
                return value
        except UsageError as problem:
            raise CheckpointError(
                f"adapter_config.json: bad pattern {pattern!r}: {problem}"
            ) from problem
    return otherwise


_FILE_FACTOR = re.compile(r"(.+\.)(w|o|qkv)_lora_([AB])")
_WEIGHTS = {"w": "weight", "o": "out_proj.weight", "qkv": "in_proj_weight"}
_ALPHA = 32


def is_lora_torch(tensors: LazyTensors) -> bool:
    """Whether names are those that LoRA-Torch gives to its factors."""
    return any(_FILE_FACTOR.fullmatch(name) for name in tensors)


def open_lora_torch(
    tensors: LazyTensors, base: LazyTensors, where: str
) -> dict[str, Callable[[], Factors]]:
    """The blocks of `base` that the factors change, each (32 / rank) * B @ A once it is asked for.

    Raises CheckpointError for any other tensor, MismatchError for factors that do not fit.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _FILE_FACTOR.fullmatch(unwrapped(name))
        if match is None:
            raise CheckpointError(f"{where}: {name} is no factor of LoRA, so it is not applied")
        found.setdefault(match[1] + _WEIGHTS[match[2]], {})[match[3]] = tensor
    return {name: _file_block(name, factors, base, where) for name, factors in found.items()}


def _file_block(
    name: str, factors: Mapping[str, LazyTensor], base: LazyTensors, where: str
) -> Callable[[], Factors]:
    if name not in base:
        raise MismatchError(f"{where}: there is no {name} in the base model")
    if factors.keys() != {"A", "B"}:
        raise CheckpointError(f"{where}: {name} lacks one of its factors")
    up, down, shape = factors["B"], factors["A"], base[name].shape
    rank = down.shape[0] if down.shape else 0
    if not rank or (up.shape, down.shape) != ((shape[0], rank), (rank, math.prod(shape[1:]))):
        shapes = f"{up.shape} by {down.shape}"
        raise MismatchError(f"{where}: the factors of {name} are {shapes}, but it has {shape}")

    def read() -> Factors:
        return Factors(
            shape, (BlockPart(0, up.read().float() * (_ALPHA / rank), down.read().float()),)
        )

    return read
