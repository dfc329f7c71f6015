"""A fingerprint of weights that does not depend on the file they are kept in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import xxhash


def digest(name: str, values: torch.Tensor) -> bytes:
    """The XXH3-128 of a block's name, shape and values in float32.

    It tells models apart, as fast as memory is read; against forgery there is the sha256 of files.
    """
    found = xxhash.xxh3_128(f"{name} {tuple(values.shape)}\n".encode())
    content: Any = values.float().contiguous().flatten().numpy()
    found.update(content)
    return found.digest()


def fingerprint(scope: str, digests: Mapping[str, bytes]) -> str:
    """The sha256 over the digests of blocks, in the order of their names, as 64 hex digits."""
    found = hashlib.sha256(f"{scope}\n".encode())
    for name in sorted(digests):
        found.update(digests[name])
    return found.hexdigest()
