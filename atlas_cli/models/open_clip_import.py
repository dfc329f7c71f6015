"""The module open_clip, also where torchvision was built for another torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # the operators live as long as this reference


def import_open_clip() -> ModuleType:
    """The module open_clip; what mends torchvision for it serves other libraries, too.

    A CPU-only torch beside a torchvision built for CUDA fails on import because two detection
    operators are missing. No model here calls them, so it is enough to declare them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as problem:
        if "torchvision::nms" not in str(problem):
            raise
        _declare_missing_operators()
        importlib.import_module("torchvision")
    return importlib.import_module("open_clip")


def _declare_missing_operators() -> None:
    """Declare torchvision::nms and ::qnms, and forget the half-imported torchvision."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared.append(torch.library.Library("torchvision", "DEF"))
    for operator in ("nms", "qnms"):
        _declared[-1].define(f"{operator}{_SCHEMA}")


open_clip = import_open_clip()
