"""Every merge method by its name."""

from __future__ import annotations

from atlas_cli.core.methods import (
    arithmetic,
    barycentre,
    linear,
    sce,
    singular,
    spherical,
    stock,
)
from atlas_cli.core.methods.method import Method

_MODULES = (arithmetic, barycentre, linear, sce, singular, spherical, stock)
METHODS: dict[str, Method] = {
    method.name: method for module in _MODULES for method in module.METHODS
}
