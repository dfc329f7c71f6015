"""The base model that task vectors are taken from."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from atlas_cli.errors import MismatchError
from atlas_cli.hashes import BlockHashes
from atlas_cli.models import Blueprint, check_activation, read_architecture, read_tensors
from atlas_cli.sources import Source
from atlas_cli.tensors import LazyTensors
from atlas_cli.vectors import belongs, in_scope

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
    hashes = BlockHashes(source.weights, scope, blocks.keys())
    return Base(source, scope, tensors, blocks, read_architecture(source, architecture), hashes)
