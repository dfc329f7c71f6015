"""The recipe that learning commands write and `merge` takes."""

from __future__ import annotations

from typing import Annotated

from atlas_cli.recipes.model import (
    STORAGES,
    TABLE,
    TABLE_OR_TEXT,
    TEXT,
    Entry,
    EntryOrText,
    Number,
    Recipe,
    SparseEntry,
    about,
    one_of,
)

Coefficients = Annotated[
    Annotated[dict[str, dict[str, Number]], TABLE] | Annotated[str, TEXT], TABLE_OR_TEXT
]


class VectorEntry(SparseEntry):
    """A task vector that a learned recipe scales; of a model, with how its vector is kept."""

    name: str
    file: str
    sha256: str
    storage: str | None = None


class VectorFile(EntryOrText):
    """A task vector: its file and, to be sure, its name and the file's sha256.

    A recipe may write the file alone.
    """

    text_is = "file"

    file: str
    name: str | None = None
    sha256: str | None = None
    storage: Annotated[str, one_of(*STORAGES)] | None = None


class HeadEntry(Entry):
    """A learned head: its adapter, and its file with the file's sha256, or the file as base64."""

    adapter: str
    file: str | None = None
    sha256: str | None = None
    data: str | None = None


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
    head: Annotated[HeadEntry | None, about("The head that was learned, if one was.")] = None
    seed: Annotated[int, about("The seed it was learned with.")] = 0
