"""The digest and the norm of every block of a base model, taken once and remembered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

import torch

from atlas_cli import __version__, cache
from atlas_cli.core import storage
from atlas_cli.core.fingerprint import digest, fingerprint

_AHEAD = 4  # blocks that may wait to be hashed; each is in memory until then


class BlockHashes:
    """What identifies the blocks of a scope: from another run, or taken block by block.

    `files` must have been opened already: a file that is replaced later is noticed by its reader.
    """

    def __init__(self, files: Sequence[Path], scope: str, names: Collection[str]) -> None:
        self._scope = scope
        # Another version may name blocks anew.
        self._what = f"XXH3 of blocks of {scope} by atlas {__version__}"
        self._sighting = cache.sight(files)
        found = cache.recall(self._what, self._sighting, names, cache.XXH3)
        self._digests = {name: bytes.fromhex(known.digest) for name, known in found.items()}
        self._norms = {name: known.norm for name, known in found.items()}
        self._begun: dict[str, Future[bytes]] = {}

    def add(self, name: str, values: torch.Tensor, pool: Executor) -> float:
        """The norm of a block, which is hashed in the pool. Both are done only if not known."""
        if name not in self._norms:
            self._begun[name] = pool.submit(digest, name, values)
            self._norms[name] = storage.norm(values)
            waiting = [future for future in self._begun.values() if not future.done()]
            if len(waiting) > _AHEAD:
                waiting[0].result()
        return self._norms[name]

    def fingerprint(self) -> str:
        """The fingerprint of the scope, once every block was added."""
        if self._begun:
            self._digests |= {name: future.result() for name, future in self._begun.items()}
            self._begun.clear()
            found = {n: cache.Known(self._digests[n].hex(), self._norms[n]) for n in self._digests}
            cache.remember(self._what, self._sighting, found)
        return fingerprint(self._scope, self._digests)
