"""The base model that task vectors are taken from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atlas_cli import __version__
from atlas_cli.core import storage
from atlas_cli.errors import MismatchError
from atlas_cli.io.files import XXH3, CachedDigest, load_digests, save_digests, stat_files
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.models.clip import check_activation
from atlas_cli.models.facts import read_architecture
from atlas_cli.models.folders import Blueprint, read_tensors
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.format import belongs, digest, fingerprint, in_scope

_AHEAD = 4  # blocks that may wait to be hashed; each is in memory until then


class BlockHashes:
    """What identifies the blocks of a scope: from another run, or taken block by block.

    `files` must have been opened already: a file that is replaced later is noticed by its reader.
    """

    def __init__(self, files: Sequence[Path], scope: str, names: Collection[str]) -> None:
        self._scope, self._names = scope, set(names)
        # Another version may name blocks anew.
        self._what = f"XXH3 of blocks of {scope} by atlas {__version__}"
        self._stats = stat_files(files)
        found = load_digests(self._what, self._stats, names, XXH3)
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

    @property
    def known(self) -> bool:
        """Whether every block was added, or known from another run."""
        return self._names <= self._norms.keys()

    def fingerprint(self) -> str:
        """The fingerprint of the scope, once every block was added."""
        if self._begun:
            self._digests |= {name: future.result() for name, future in self._begun.items()}
            self._begun.clear()
            found = {n: CachedDigest(self._digests[n].hex(), self._norms[n]) for n in self._digests}
            save_digests(self._what, self._stats, found)
        return fingerprint(self._scope, self._digests)


_ACTIVATIONS = {True: "quick_gelu", False: "gelu"}


@dataclass(frozen=True)
class Base:
    """An opened base model: all its tensors, and the blocks of the scope.

    Its hashes are kept for the next vector from the same base.
    """

    source: Source
    scope: str
    tensors: LazyTensors
    blocks: LazyTensors
    architecture: dict[str, Any]
    hashes: BlockHashes
    provenance: list[Future[dict[str, object]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the user calls it."""
        return self.source.reference.text

    @property
    def activation(self) -> str:
        """gelu or quick_gelu."""
        return _ACTIVATIONS[bool(self.architecture.get("quick_gelu"))]

    @property
    def integers(self) -> list[str]:
        """The tensors of the scope that no vector can hold."""
        names = self.tensors.keys() - self.blocks.keys()
        return sorted(name for name in names if belongs(name, self.scope))

    def fingerprint(self) -> str:
        """The fingerprint of the scope; every block is read unless its hash is known."""
        if not self.hashes.known:
            with ThreadPoolExecutor(1) as pool:
                for name, tensor in self.blocks.items():
                    self.hashes.add(name, tensor.read().float(), pool)
        return self.hashes.fingerprint()

    def check_activation(self, finetuned: Source) -> None:
        """Refuse a model that was trained with another activation."""
        check_activation(finetuned, Blueprint(self.architecture, {}), self.name)
        if finetuned.reference.kind == "open_clip":
            other = _ACTIVATIONS[bool(read_architecture(finetuned).get("quick_gelu"))]
            if other != self.activation:
                name = finetuned.reference.text
                raise MismatchError(f"{name} uses {other}, but {self.name} uses {self.activation}")


def open_base(
    source: Source, scope: str, allow: tuple[str, ...] = (), architecture: str | None = None
) -> Base:
    """Read what a base model is and holds, but none of its values."""
    tensors = read_tensors(source, allow)
    blocks = in_scope(tensors, scope)
    if not blocks or tensors.keys() <= {"weight", "bias"}:
        where = source.reference.text
        raise MismatchError(f"{where}: is no CLIP model with tensors of scope {scope}")
    hashes = BlockHashes([*source.files.values()], scope, blocks.keys())
    return Base(source, scope, tensors, blocks, read_architecture(source, architecture), hashes)
