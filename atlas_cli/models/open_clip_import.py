"""The module open_clip, also where torchvision was built for another torch, and its own lists."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from atlas_cli.errors import CheckpointError
from atlas_cli.io.torchvision_import import import_torchvision
from atlas_cli.sources.locate import check_architecture
from atlas_cli.sources.reference import Reference


def import_open_clip() -> ModuleType:
    """The module open_clip; what mends torchvision for it serves other libraries, too."""
    import_torchvision()
    return importlib.import_module("open_clip")


open_clip = import_open_clip()


def architecture_named(name: str) -> dict[str, Any]:
    """The configuration of the architecture of that name in open_clip's own list."""
    check_architecture(name)
    return {"quick_gelu": False, **open_clip.get_model_config(name)}


def configuration_of(reference: Reference) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configurations of a model of open_clip's own list and of its preprocessing."""
    tag = open_clip.get_pretrained_cfg(reference.name, reference.tag)
    model = {**architecture_named(reference.name), "quick_gelu": bool(tag.get("quick_gelu", False))}
    keys = ("mean", "std", "interpolation", "resize_mode")
    return model, {key: tag[key] for key in keys if key in tag}


def check_tower_size(module: Any, size: Any) -> None:
    """Refuse a tower of timm that takes one other size: only its first batch would say so."""
    patches = getattr(getattr(module.visual, "trunk", None), "patch_embed", None)
    found = getattr(patches, "img_size", None)
    if isinstance(found, tuple) and isinstance(size, int) and found != (size, size):
        raise CheckpointError(
            f"timm's tower takes {found[0]} pixels, its configuration says {size}"
        )
