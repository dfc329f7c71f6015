"""The module open_clip, also where torchvision was built for another torch."""

from __future__ import annotations

import importlib
from types import ModuleType

from atlas_cli.io.torchvision_import import import_torchvision


def import_open_clip() -> ModuleType:
    """The module open_clip; what mends torchvision for it serves other libraries, too."""
    import_torchvision()
    return importlib.import_module("open_clip")


open_clip = import_open_clip()
