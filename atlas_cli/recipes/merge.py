"""The recipe of a merge: mergekit's for merges of same-shaped models, and learned coefficients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from atlas_cli.errors import UsageError
from atlas_cli.recipes.learned import Coefficients, HeadEntry, VectorFile
from atlas_cli.recipes.merge_checks import (
    DTYPES,
    MERGEKIT_KEYS,
    ReferenceCheck,
    dtype_problem,
    effective_keys,
    idle_keys,
    lock_problems,
    model_problems,
    refused_keys,
)
from atlas_cli.recipes.merge_documents import in_order, name_of, with_places
from atlas_cli.recipes.merge_entries import (
    LockedEntry,
    ModelEntry,
    ModuleEntry,
    Parameters,
    SliceEntry,
)
from atlas_cli.recipes.merge_parts import Part, parts_of
from atlas_cli.recipes.merge_tokenizer import TokenizerEntry, TokenizerWish, wish_of
from atlas_cli.recipes.model import (
    Check,
    Positive,
    RandomSeed,
    Recipe,
    about,
    in_schema,
    method_problem,
    problems_of,
)
from atlas_cli.recipes.text import parse_documents, table_problems
from atlas_cli.registry import (
    MERGE_METHODS,
    find_granularity,
    granularity_labels,
    granularity_pattern,
)

# What is wrong with a reference to a model or to a task vector, each problem as a sentence.
SourceCheck = Callable[[Literal["model", "vector"], str], Sequence[str]]
SCOPES = ("visual", "text", "all")

Granularity = Annotated[str, Check(schema=lambda: {"pattern": granularity_pattern()})]
Scope = Annotated[str, in_schema(enum=[*SCOPES])]
Dtype = Annotated[str, Check(dtype_problem, lambda: {"enum": [*DTYPES]})]


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
        Annotated[list[SliceEntry], in_schema(minItems=1)] | None,
        about(
            "Instead of `models`: the layers of the result, slice by slice. A slice has `sources` "
            "(`model`, `layer_range: [FIRST, END]`, `parameters`) and may have a `base_model`, "
            "`parameters` and a `merge_method` of its own."
        ),
    ] = None
    modules: Annotated[
        dict[str, ModuleEntry] | None,
        about(
            "Instead of `models`: `models` or `slices` for each part of a model, such as `encoder` "
            "and `decoder`, or any beginning of tensors' names."
        ),
    ] = None
    parameters: Annotated[
        Parameters, about("Parameters of the merge, and of models that do not set their own.")
    ] = None
    post: Annotated[
        dict[str, Parameters] | None,
        about("Steps after the method by name, each with its parameters, such as `svc`."),
    ] = None
    dtype: Annotated[Dtype | None, about("Compute in this dtype; else in that of the tensors.")] = (
        None
    )
    out_dtype: Annotated[Dtype | None, about("Write in this dtype; else in that of computing.")] = (
        None
    )
    tokenizer_source: Annotated[
        str | None,
        about(
            "The tokenizer of the result: of the `base`, the `union` of all, or of the model that "
            "is named. Embeddings and heads are aligned with it, token by token."
        ),
    ] = None
    tokenizer: Annotated[
        TokenizerEntry | None,
        about(
            "The same as `source`, with `tokens`, where the rows of single tokens come from, and "
            "`pad_to_multiple_of` for the number of rows."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        about(
            "The chat template of the result: `chatml`, `llama3`, `mistral`, `alpaca`, `exaone`, "
            "`auto` (what most models have), a file, or the template itself."
        ),
    ] = None
    vectors: Annotated[
        list[VectorFile] | None,
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
    head: Annotated[
        HeadEntry | None,
        about("For `atlas`: a learned head, which is written beside the model."),
    ] = None
    max_rank: Annotated[
        Positive | None,
        about("For LoRA adapters: the best adapter of this rank, instead of the exact sum."),
    ] = None
    seed: RandomSeed = 0
    locked: Annotated[
        dict[str, LockedEntry],
        about("Written by `merge`: the commit and a digest of every input, which must still hold."),
    ] = {}

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        def check(kind: Literal["model", "vector"], reference: Any, where: str) -> list[str]:
            known = context is None or not isinstance(reference, str)
            return [] if known else [f"{where}: {line}" for line in context(kind, reference)]

        lines = check("model", found.get("base_model"), ".base_model")
        lines += lock_problems(found.get("locked"))
        problems = _learned_problems if found.get("merge_method") == "atlas" else model_problems
        return (("", line) for line in chain(lines, problems(found, check)))


# Learned coefficients -------------------------------------------------------------------------


def _learned_problems(found: Mapping[str, Any], check: ReferenceCheck) -> Iterator[str]:
    for key in ("base_model", "vectors", "coefficients"):
        if found.get(key) is None or (key == "base_model" and found[key] == ""):
            yield f": key '{key}' is missing; merge_method atlas needs it"
    for key in ("models", "slices", "modules", "parameters", "post", "tokenizer", "chat_template"):
        if key in found:
            yield f": '{key}' has no meaning with merge_method atlas; it has vectors"
    if found.get("vectors") == [] and not found.get("head"):
        yield ".vectors: names no task vector"
    yield from _head_problems(found.get("head"))
    if found.get("linearised") is True:
        yield (
            ".linearised: these coefficients were learned for the first-order expansion of "
            "the model, and no merged weights compute that; learn them without --linearised"
        )
    if found.get("scope", "visual") not in SCOPES:
        yield f".scope: expected visual, text or all, found {found['scope']!r}"
    kind = found.get("granularity", "block")
    if isinstance(kind, str) and not find_granularity(kind):
        yield f".granularity: expected {granularity_labels()}, found {kind!r}"
    yield from _file_problems(found, check)


def _head_problems(head: object) -> Iterator[str]:
    if not isinstance(head, dict):
        return
    file, data = head.get("file"), head.get("data")
    if (file is None) == (data is None):
        yield ".head: expected either 'file' or 'data'"
    if isinstance(file, str) and not _is_file(file):
        yield f".head: no such file: {file}"


def _file_problems(found: Mapping[str, Any], check: ReferenceCheck) -> Iterator[str]:
    entries = found.get("vectors")
    for entry in entries if isinstance(entries, list) else []:
        file = entry.get("file") if isinstance(entry, dict) else entry
        if isinstance(file, str):
            yield from check("vector", file, ".vectors")
    table = found.get("coefficients")
    if isinstance(table, str) and not _is_file(table):
        yield f".coefficients: no such file: {table}"
    if isinstance(table, dict):
        numbers = {
            vector: {label: value for label, value in row.items() if isinstance(value, float)}
            for vector, row in table.items()
            if isinstance(row, dict)
        }
        yield from table_problems(numbers, ".coefficients")


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError):  # too long for a path, or the home of nobody
        return False


# Merges ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merge:
    """A recipe in normal form.

    `layout` is the model whose names, files and configuration the result has. `raw` is the recipe
    as it was given, `idle` what of it has no effect, and `files` are those of task vectors that
    have other names than their files. `steps` are merges whose results it needs, by their names, in
    their order; once they are made, `aliases` have the names of their places, and `preceding`
    their locked recipes.
    """

    method: str
    layout: str
    parts: tuple[Part, ...]
    recipe: MergeRecipe
    raw: Mapping[str, Any]
    idle: tuple[str, ...] = ()
    name: str | None = None
    steps: tuple[Merge, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    preceding: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)

    def with_vectors(self, entries: Sequence[VectorFile], files: Mapping[str, Path]) -> Merge:
        """The merge with its vectors pinned, and the local files that their names stand for."""
        listed = [entry.model_dump(exclude_none=True) for entry in entries]
        recipe = self.recipe.model_copy(update={"vectors": list(entries)})
        return replace(self, recipe=recipe, raw={**self.raw, "vectors": listed}, files=files)

    @property
    def tokenizer(self) -> TokenizerWish | None:
        """What the recipe says of the tokenizer of the result."""
        if entry := self.recipe.tokenizer:
            return wish_of(entry)
        source = self.recipe.tokenizer_source
        return TokenizerWish(source) if source else None

    @property
    def references(self) -> tuple[str, ...]:
        """Every model that is read, each once."""
        given = (self.layout, *(model for part in self.parts for model in part.references))
        return tuple(dict.fromkeys(given))

    def with_seed(self, seed: int) -> Merge:
        """The merge, and its steps, with another seed."""
        recipe = self.recipe.model_copy(update={"seed": seed})
        steps = tuple(step.with_seed(seed) for step in self.steps)
        return replace(self, recipe=recipe, raw={**self.raw, "seed": seed}, steps=steps)

    def placed(self, places: Mapping[str, str]) -> Merge:
        """The merge with results of other merges by their places instead of their names."""
        raw = with_places(self.raw, places)
        aliases = {place: name for name, place in places.items()}
        found = _normal(MergeRecipe.model_validate(raw), raw)
        return replace(found, idle=self.idle, name=self.name, aliases=aliases)


def read_merge(
    text: str,
    where: str = "recipe",
    check_source: SourceCheck | None = None,
    *,
    strict: bool = False,
) -> Merge:
    """Read the recipe of a merge. Raises UsageError with one line for every problem found.

    Of several documents it is the one that the others are steps of. `check_source` says what is
    wrong with references to models and task vectors. `strict` takes what has no effect for a
    problem, too.
    """
    documents = parse_documents(text, where)
    if len(documents) == 1:
        return _read_one(documents[0], where, check_source, strict=strict)
    order, names = in_order(documents, where), [name_of(one) for one in documents]

    def check(kind: Literal["model", "vector"], reference: str) -> Sequence[str]:
        known = split_adapter(reference)[0] in names
        return () if known or check_source is None else check_source(kind, reference)

    found: dict[int, Merge] = {}
    lines: list[str] = []
    for number, document in enumerate(documents):
        own = {key: value for key, value in document.items() if key not in ("name", "out_path")}
        try:
            found[number] = _read_one(own, f"{where}#{number + 1}", check, strict=strict)
        except UsageError as problem:
            lines += problem.args
    if lines:
        raise UsageError(*lines)
    merges = [replace(found[number], name=names[number]) for number in order]
    unused = tuple(f"document {n + 1} ({names[n]})" for n in range(len(names)) if n not in order)
    last = merges[-1]
    return replace(last, steps=tuple(merges[:-1]), idle=(*last.idle, *unused))


def _read_one(
    found: Mapping[Any, Any], where: str, check_source: SourceCheck | None, *, strict: bool
) -> Merge:
    rest = dict(found)
    idle: tuple[str, ...] = ()
    lines: list[str] = []
    if found.keys() & MERGEKIT_KEYS:
        rest, idle = effective_keys(found), idle_keys(found)
        lines += [f"{where}.{path}: has no effect here" for path in idle] if strict else []
        lines += refused_keys(found, where)
    problems = problems_of(MergeRecipe, rest, where, check_source)
    lines += [*problems.structure, *problems.values]
    if lines:
        raise UsageError(*dict.fromkeys(lines))
    return replace(_normal(MergeRecipe.model_validate(rest), rest), idle=idle)


def _normal(recipe: MergeRecipe, raw: Mapping[str, Any]) -> Merge:
    """Parts in the order of the result's layers; a recipe for task vectors has none."""
    parts = parts_of(raw) if recipe.merge_method != "atlas" else ()
    first = parts[0].references[0] if parts else ""
    return Merge(recipe.merge_method, recipe.base_model or first, parts, recipe, raw)


def split_adapter(reference: str) -> tuple[str, str | None]:
    """A reference as MODEL and, after a +, the LoRA adapter that is added to it."""
    if "+" not in reference or Path(reference).exists():
        return reference, None
    model, _, adapter = reference.rpartition("+")
    return model, adapter
