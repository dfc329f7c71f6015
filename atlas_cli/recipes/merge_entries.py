"""The tables inside a merge recipe: models, slices, modules, vectors, and what was locked."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import model_validator

from atlas_cli.recipes.model import STORAGES, Entry, in_schema, one_of, wrong_kind

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


class VectorFile(Entry):
    """A task vector: its file and, to be sure, its name and the file's sha256.

    A recipe may write the file alone.
    """

    file: str
    name: str | None = None
    sha256: str | None = None
    storage: Annotated[str, one_of(*STORAGES)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, found: Any) -> Any:
        if not isinstance(found, str | dict | VectorFile):
            raise wrong_kind("keys and values or str")
        return {"file": found} if isinstance(found, str) else found

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        entry = handler.resolve_ref_schema(handler(schema))
        del entry["description"]
        return {"anyOf": [{"type": "string"}, entry]}


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
