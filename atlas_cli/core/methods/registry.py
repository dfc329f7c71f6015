"""Every merge method by its name."""

from __future__ import annotations

from atlas_cli.core.methods import arithmetic, linear, spherical
from atlas_cli.core.methods.method import Method

METHODS: dict[str, Method] = {
    method.name: method for module in (arithmetic, linear, spherical) for method in module.METHODS
}
