"""Every merge method by its name."""

from __future__ import annotations

from atlas_cli.merge_methods import (
    arithmetic,
    barycentre,
    linear,
    model_stock,
    sce,
    spectral,
    spherical,
)
from atlas_cli.merge_methods.method import Method

_MODULES = (arithmetic, barycentre, linear, sce, spectral, spherical, model_stock)
METHODS: dict[str, Method] = {
    method.name: method for module in _MODULES for method in module.METHODS
}
