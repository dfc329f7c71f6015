"""The recipe of a merge: mergekit's for merges of same-shaped models, and learned coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_cli.errors import UsageError
from atlas_cli.recipes.merge_checks import refused_keys, semantic_problems
from atlas_cli.recipes.merge_parameters import METHODS
from atlas_cli.recipes.reading import parse_mapping, schema_problems


@dataclass(frozen=True)
class ModelEntry:
    """A model to merge, and what holds for it alone."""

    model: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class LayerEntry:
    """As ModelEntry, with the layers it takes part with; all of them, or it is refused."""

    model: str
    layer_range: list[int]
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class SliceEntry:
    """Models that are merged from the first to the last layer."""

    sources: list[LayerEntry]
    base_model: str | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class VectorFile:
    """A task vector: its file and, to be sure, its name and the file's sha256."""

    file: str
    name: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class LockedEntry:
    """What a reference was when the recipe was locked: its commit, and the sha256 of its files."""

    sha256: dict[str, str]
    commit: str | None = None


@dataclass(frozen=True)
class MergeRecipe:
    """What `atlas merge` writes: `models` or `slices`, or `vectors` for the method atlas."""

    merge_method: str
    base_model: str | None = None
    models: list[ModelEntry] | None = None
    slices: list[SliceEntry] | None = None
    parameters: dict[str, Any] | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str | None = None
    vectors: list[VectorFile | str] | None = None
    coefficients: dict[str, dict[str, float]] | str | None = None
    granularity: str = "block"
    groups: list[str] = field(default_factory=list)
    linearised: bool = False
    scope: str = "visual"
    seed: int = 0
    locked: dict[str, LockedEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class Merge:
    """A recipe in normal form: every model with its tables of parameters, the most special first.

    `base` is None for a method that has no use for one; `layout` is the model whose names, files
    and configuration the result has. `raw` is the recipe as it was given.
    """

    method: str
    layout: str
    base: str | None
    models: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...]
    levels: tuple[Mapping[str, Any], ...]
    layers: int | None
    recipe: MergeRecipe
    raw: Mapping[str, Any]

    @property
    def references(self) -> tuple[str, ...]:
        """Every model that is read, each once."""
        given = (self.base, self.layout, *(model for model, _ in self.models))
        return tuple(dict.fromkeys(text for text in given if text))


def read_merge(text: str, where: str = "recipe") -> Merge:
    """Read the recipe of a merge. Raises UsageError with one line for every problem found."""
    found = parse_mapping(text, where)
    problems = list(refused_keys(found, where))
    rest = {key: value for key, value in found.items() if key not in _refused(found)}
    problems += schema_problems(MergeRecipe, rest, where)
    problems += semantic_problems(rest, where)
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))
    return _normal(_filled(rest), rest)


def _refused(found: Mapping[Any, Any]) -> set[Any]:
    return {key for key in found if any(refused_keys({key: found[key]}, ""))}


def _filled(found: dict[str, Any]) -> MergeRecipe:
    values = {key: value for key, value in found.items() if value is not None}
    if "models" in values:
        values["models"] = [ModelEntry(**entry) for entry in values["models"]]
    if "slices" in values:
        values["slices"] = [_slice(entry) for entry in values["slices"]]
    if "vectors" in values:
        given = values["vectors"]
        values["vectors"] = [
            VectorFile(e) if isinstance(e, str) else VectorFile(**e) for e in given
        ]
    locks = values.get("locked", {})
    values["locked"] = {name: LockedEntry(**entry) for name, entry in locks.items()}
    return MergeRecipe(**values)


def _slice(found: dict[str, Any]) -> SliceEntry:
    return SliceEntry(**{**found, "sources": [LayerEntry(**entry) for entry in found["sources"]]})


def _normal(recipe: MergeRecipe, raw: Mapping[str, Any]) -> Merge:
    """One list of models, and tables of parameters from the most special to the most general."""
    levels = [recipe.parameters or {}]
    base, layers = recipe.base_model, None
    entries: list[ModelEntry | LayerEntry] = list(recipe.models or [])
    if recipe.slices:
        part = recipe.slices[0]
        entries = list(part.sources)
        levels.insert(0, part.parameters or {})
        base, layers = part.base_model or base, part.sources[0].layer_range[1]
    use = METHODS[recipe.merge_method].base
    listed = [(e.model, (e.parameters or {}, *levels)) for e in entries]
    if use == "no" and base and base not in [model for model, _ in listed]:
        listed.append((base, tuple(levels)))
    layout = base or listed[0][0]
    others = [one for one in listed if use == "no" or one[0] != base]
    kept = base if use != "no" else None
    return Merge(
        *(recipe.merge_method, layout, kept, tuple(others), tuple(levels), layers),
        *(recipe, raw),
    )


def split_adapter(reference: str) -> tuple[str, str | None]:
    """A reference as MODEL and, after a +, the LoRA adapter that is added to it."""
    if "+" not in reference or Path(reference).exists():
        return reference, None
    model, _, adapter = reference.rpartition("+")
    return model, adapter
