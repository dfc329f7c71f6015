"""The tables inside a merge recipe: models, slices, modules, and what was locked."""

from __future__ import annotations

from typing import Annotated, Any

from atlas_cli.recipes.model import Entry, in_schema

Parameters = dict[str, Any] | None  # what may be in them depends on the method: see merge_checks


class ModelEntry(Entry):
    """A model to merge, and what holds for it alone."""

    model: str
    parameters: Parameters = None


class LayerEntry(Entry):
    """As ModelEntry, with the layers that it gives: from the first up to, not with, the last."""

    model: str
    layer_range: Annotated[list[int], in_schema(minItems=2, maxItems=2)]
    parameters: Parameters = None


class SliceEntry(Entry):
    """Layers of the result, and the models that are merged into them."""

    sources: Annotated[list[LayerEntry], in_schema(minItems=1)]
    base_model: str | None = None
    merge_method: str | None = None
    parameters: Parameters = None


class ModuleEntry(Entry):
    """A part of a model, such as an encoder, and what is merged into it."""

    models: list[ModelEntry] | None = None
    slices: list[SliceEntry] | None = None
    parameters: Parameters = None


class LockedEntry(Entry):
    """What a reference was when the recipe was locked: its commit, and the digests of its files.

    A file has a digest of one kind. Locks of older versions have sha256 only.
    """

    sha256: dict[str, str] = {}
    blake3: dict[str, str] = {}
    commit: str | None = None

    def of(self, kind: str) -> dict[str, str]:
        """The digests of one kind, by file."""
        return self.blake3 if kind == "blake3" else self.sha256
