"""atlas: learn, merge and evaluate task vectors of CLIP models."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# What `atlas_cli.NAME` is, imported on first use so that `import atlas_cli` stays quick.
_EXPORTS = {
    "Parameter": "atlas_cli.merge_methods.method",
    "merge_method": "atlas_cli.merge_methods.method",
    "dataset_kind": "atlas_cli.registry",
    "granularity": "atlas_cli.registry",
    "objective": "atlas_cli.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'atlas_cli' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
