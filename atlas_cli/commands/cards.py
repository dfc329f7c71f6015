"""What a model or a task vector says of itself, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_cli.census import ModelFacts
    from atlas_cli.describe import VectorFacts

Row = dict[str, str]


def model_card(model: ModelFacts) -> list[Row]:
    """What a model says of itself, line by line."""
    return _lines(
        "model",
        model.model,
        {
            "tensors": f"{len(model.tensors)} ({counts(model.dtypes)})",
            "parameters": f"{model.parameters:,}",
            "size": size_of(model.bytes),
            "architecture": _architecture(model.architecture or {}) or "unknown; name it by --arch",
            "activation": model.activation or "",
            "commit": model.commit or "",
            "sha256": _digests(model.sha256),
        },
    )


def vector_card(vector: VectorFacts) -> list[Row]:
    """What a task vector says of itself, line by line."""
    worst, mean = in_percent(vector.worst_error), in_percent(vector.mean_error)
    blocks = f"{len(vector.blocks)} ({counts(vector.storage)})"
    return _lines(
        "task vector",
        vector.label,
        {
            "base": _source(vector.base),
            "fine-tuned": _source(vector.finetuned),
            "architecture": _architecture(vector.architecture),
            "activation": vector.activation,
            "scope": vector.scope,
            "scale": f"{vector.scale:g}",
            "linearised": "yes" if vector.linearised else "",
            "fingerprint": vector.fingerprint[:12],
            "atlas": vector.atlas,
            "blocks": blocks,
            "dropped": _dropped(vector.dropped),
            "parameters": f"{vector.parameters:,}",
            "size": size_of(vector.bytes),
            "error": f"worst {worst} %, mean {mean} %",
            "|tau| / |theta0|": f"{in_percent(vector.relative_norm)} %",
        },
    )


def _lines(left: str, right: str, facts: Mapping[str, str]) -> list[Row]:
    return [{left: name, right: value} for name, value in facts.items() if value]


# Words ----------------------------------------------------------------------------------------


def in_percent(value: float | None) -> str:
    """A fraction as percent with three digits; nothing for None."""
    return "" if value is None else f"{100 * value:.3g}"


def shape_of(shape: Sequence[int]) -> str:
    """A shape as in 768x512; a scalar is 1."""
    return "x".join(map(str, shape)) or "1"


def size_of(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def counts(found: Mapping[str, int]) -> str:
    """One name alone, or each with how often it occurs."""
    return ", ".join(f"{n} {name}" if len(found) > 1 else name for name, n in found.items())


def _dropped(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _source(found: Mapping[str, Any]) -> str:
    """A reference with its commit and the checksums of its files, shortened."""
    words = [str(found.get("reference", "unknown"))]
    if found.get("commit"):
        words.append(f"commit {str(found['commit'])[:12]}")
    if isinstance(found.get("sha256"), dict) and found["sha256"]:
        words.append(f"sha256 {_digests(found['sha256'])}")
    return ", ".join(words)


def _digests(digests: Mapping[str, Any]) -> str:
    return " ".join(str(digest)[:12] for digest in digests.values())


def _architecture(config: Mapping[str, Any]) -> str:
    """An open_clip configuration in a few words."""
    vision = config.get("vision_cfg")
    if not isinstance(vision, dict):
        return ", ".join(f"{k} {v}" for k, v in config.items() if isinstance(v, str | int | float))
    if "timm_model_name" in vision:
        return str(vision["timm_model_name"])
    layers = vision.get("layers", 12)
    depth = "-".join(map(str, layers)) if isinstance(layers, list) else layers
    return (
        f"{'ResNet' if isinstance(layers, list) else 'ViT'}, {depth} layers of width "
        f"{vision.get('width', 768)}, patches of {vision.get('patch_size', 16)}, "
        f"images of {vision.get('image_size', 224)} pixels"
    )
