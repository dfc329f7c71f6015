"""torchvision, also where it was built for another torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # the operators live as long as this reference


def import_torchvision() -> ModuleType:
    """The module torchvision, also where it was built for another torch.

    A CPU-only torch beside a torchvision built for CUDA fails on import because two detection
    operators are missing. Nothing here calls them, so it is enough to declare them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as problem:
        if "torchvision::nms" not in str(problem):
            raise
        _declare_missing_operators()
        return importlib.import_module("torchvision")


def _declare_missing_operators() -> None:
    """Declare torchvision::nms and ::qnms, and forget the half-imported torchvision."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declared.append(torch.library.Library("torchvision", "DEF"))
    for operator in ("nms", "qnms"):
        _declared[-1].define(f"{operator}{_SCHEMA}")
