"""A fingerprint of weights that does not depend on the file they are kept in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def digest(name: str, values: torch.Tensor) -> bytes:
    """The sha256 of a block's name, shape and values in float32."""
    found = hashlib.sha256(f"{name} {tuple(values.shape)}\n".encode())
    content: Any = values.float().contiguous().flatten().numpy()
    found.update(content)
    return found.digest()


def fingerprint(scope: str, digests: Mapping[str, bytes]) -> str:
    """The sha256 over the blocks of a scope, in the order of their names, as 64 hex digits."""
    found = hashlib.sha256(f"{scope}\n".encode())
    for name in sorted(digests):
        found.update(digests[name])
    return found.hexdigest()
