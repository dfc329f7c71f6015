"""The recipe of a merge: mergekit's for merges of same-shaped models, and learned coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import model_validator

from atlas_cli.errors import UsageError
from atlas_cli.recipes.merge_checks import (
    DTYPES,
    SCOPES,
    SourceCheck,
    dtype_problem,
    is_refused,
    method_problem,
    refused_keys,
    semantic_problems,
)
from atlas_cli.recipes.model import (
    TABLE,
    TABLE_OR_TEXT,
    TEXT,
    Check,
    Entry,
    Number,
    RandomSeed,
    Recipe,
    about,
    in_schema,
    problems_of,
    wrong_kind,
)
from atlas_cli.recipes.text import parse_mapping
from atlas_cli.registry import MERGE_METHODS, granularity_pattern

Parameters = dict[str, Any] | None  # what may be in them depends on the method: see merge_checks
Coefficients = Annotated[
    Annotated[dict[str, dict[str, Number]], TABLE] | Annotated[str, TEXT], TABLE_OR_TEXT
]
Granularity = Annotated[str, Check(schema=lambda: {"pattern": granularity_pattern()})]
Scope = Annotated[str, in_schema(enum=[*SCOPES])]
Dtype = Annotated[str, Check(dtype_problem, lambda: {"enum": [*DTYPES]})]


class VectorEntry(Entry):
    """A task vector that a learned recipe scales: its name, its file and the file's sha256."""

    name: str
    file: str
    sha256: str


class LearnedRecipe(Recipe):
    """What `fit` prints and `merge` takes: a base, vectors, and a coefficient for each block.

    `coefficients` is the table itself or, for a large one, the safetensors file that holds it.
    """

    merge_method: Annotated[str, about("`atlas`.")]
    base_model: Annotated[str, about("The base model.")]
    vectors: Annotated[
        list[VectorEntry], about("`name`, `file` and `sha256` of every task vector.")
    ]
    coefficients: Annotated[
        Coefficients,
        about("Vector, then block, then number; or the file that holds a large table."),
    ]
    granularity: Annotated[str, about("As it was learned.")] = "block"
    groups: Annotated[list[str], about("As they were learned.")] = []
    linearised: Annotated[bool, about("Whether it was learned for the first-order expansion.")] = (
        False
    )
    scope: Annotated[str, about("`visual`: the image tower.")] = "visual"
    seed: Annotated[int, about("The seed it was learned with.")] = 0


class ModelEntry(Entry):
    """A model to merge, and what holds for it alone."""

    model: str
    parameters: Parameters = None


class LayerEntry(Entry):
    """As ModelEntry, with the layers it takes part with; all of them, or it is refused."""

    model: str
    layer_range: Annotated[list[int], in_schema(minItems=2, maxItems=2)]
    parameters: Parameters = None


class SliceEntry(Entry):
    """Models that are merged from the first to the last layer."""

    sources: list[LayerEntry]
    base_model: str | None = None
    parameters: Parameters = None


class VectorFile(Entry):
    """A task vector: its file and, to be sure, its name and the file's sha256.

    A recipe may write the file alone.
    """

    file: str
    name: str | None = None
    sha256: str | None = None

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
    """What a reference was when the recipe was locked: its commit, and the sha256 of its files."""

    sha256: dict[str, str]
    commit: str | None = None


class MergeRecipe(Recipe):
    """What `atlas merge` writes: `models` or `slices`, or `vectors` for the method atlas."""

    merge_method: Annotated[
        str,
        Check(method_problem, lambda: {"enum": [*MERGE_METHODS]}),
        about("How models are merged; see the table below."),
    ]
    base_model: Annotated[
        str | None,
        about("The model that the others were fine-tuned from. Its files go with the result."),
    ] = None
    models: Annotated[
        list[ModelEntry] | None,
        about(
            "Models to merge: `model`, a reference (`@REVISION`, `+ADAPTER`), and its `parameters`."
        ),
    ] = None
    slices: Annotated[
        Annotated[list[SliceEntry], in_schema(minItems=1, maxItems=1)] | None,
        about("The same as mergekit writes it: one slice, of all layers of every model."),
    ] = None
    parameters: Annotated[
        Parameters, about("Parameters of the merge, and of models that do not set their own.")
    ] = None
    dtype: Annotated[Dtype | None, about("Compute in this dtype; else in that of the tensors.")] = (
        None
    )
    out_dtype: Annotated[Dtype | None, about("Write in this dtype; else in that of computing.")] = (
        None
    )
    tokenizer_source: Annotated[
        Annotated[str, in_schema(const="base")] | None,
        about("`base`: the tokenizer is copied from it."),
    ] = None
    vectors: Annotated[
        Annotated[list[VectorFile], in_schema(minItems=1)] | None,
        about("For `atlas`: task vectors, as paths or with `name`, `file` and `sha256`."),
    ] = None
    coefficients: Annotated[
        Coefficients | None,
        about("For `atlas`: vector, then block, then number; or a .json or .safetensors file."),
    ] = None
    granularity: Annotated[
        Granularity,
        about("For `atlas`: what shares a coefficient: `block`, `vector`, `qkv` or `partition:K`."),
    ] = "block"
    groups: Annotated[
        list[str],
        about(
            "For `atlas`: regular expressions; blocks matched by the same one share a coefficient."
        ),
    ] = []
    linearised: Annotated[
        bool,
        about(
            "For `atlas`: true is refused, since no merged weights compute a first-order expansion."
        ),
    ] = False
    scope: Annotated[
        Scope, about("For `atlas`: the part of the model that the vectors are of.")
    ] = "visual"
    seed: RandomSeed = 0
    locked: Annotated[
        dict[str, LockedEntry],
        about(
            "Written by `merge`: the commit and the sha256 of every input, which must still hold."
        ),
    ] = {}

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        return (("", line) for line in semantic_problems(found, context))


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


def read_merge(text: str, where: str = "recipe", check_source: SourceCheck | None = None) -> Merge:
    """Read the recipe of a merge. Raises UsageError with one line for every problem found.

    `check_source` says what is wrong with references to models and task vectors.
    """
    found = parse_mapping(text, where)
    rest = {key: value for key, value in found.items() if not is_refused(key, value)}
    problems = problems_of(MergeRecipe, rest, where, check_source)
    lines = [*refused_keys(found, where), *problems.structure, *problems.values]
    if lines:
        raise UsageError("\n".join(dict.fromkeys(lines)))
    return _normal(MergeRecipe.model_validate(rest), rest)


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
    use = MERGE_METHODS[recipe.merge_method].base
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
