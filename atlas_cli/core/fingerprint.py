"""A fingerprint of weights that does not depend on the file they are kept in."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch

_MOST_WAITING = 4


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


class Digests:
    """The digests of many blocks, computed by a pool while the caller goes on."""

    def __init__(self, pool: Executor, known: dict[str, bytes]) -> None:
        self._pool = pool
        self._known = known
        self._waiting: deque[tuple[str, Future[bytes]]] = deque()

    def add(self, name: str, values: torch.Tensor) -> None:
        """Have a block hashed, unless that was done before. Few blocks are kept waiting."""
        if name not in self._known:
            self._waiting.append((name, self._pool.submit(digest, name, values)))
        while len(self._waiting) > _MOST_WAITING:
            self._take()

    def finish(self) -> None:
        """Wait until all blocks are among those known."""
        while self._waiting:
            self._take()

    def _take(self) -> None:
        name, found = self._waiting.popleft()
        self._known[name] = found.result()
