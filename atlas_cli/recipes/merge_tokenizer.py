"""What a merge recipe says of the tokenizer of its result, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_cli.errors import nearest
from atlas_cli.recipes.chat_templates import CHAT_TEMPLATES
from atlas_cli.recipes.model import Entry, EntryOrText, Positive

BASE, UNION = "base", "union"
_KINDS = ("model_token", "zero")
TEMPLATES = ("auto", *CHAT_TEMPLATES)


class TokenSource(EntryOrText):
    """`model_token`: the row of a token, by its text or its id, in a model; `zero`: zeros."""

    text_is = "model"
    text_means = {"kind": "model"}

    kind: str
    model: str | None = None
    token: str | None = None
    token_id: int | None = None


class TokenEntry(Entry):
    """Where the row of a token comes from in models that lack it; with `force`, in all."""

    source: TokenSource
    force: bool = False


class TokenizerEntry(Entry):
    """The tokenizer of the result, rows of single tokens, and a multiple for the number of rows."""

    source: str = "union"
    tokens: dict[str, TokenEntry] | None = None
    pad_to_multiple_of: Positive | None = None


@dataclass(frozen=True)
class TokenRow:
    """The row of a token: of a model, of another token of it, or zeros if `model` is None."""

    model: str | None
    token: str | None
    number: int | None
    force: bool


@dataclass(frozen=True)
class TokenizerWish:
    """What a recipe says of the tokenizer: `source` is base, union or a model."""

    source: str
    tokens: Mapping[str, TokenRow] = field(default_factory=dict)
    multiple: int | None = None


def wish_of(entry: TokenizerEntry) -> TokenizerWish:
    """The wish of a recipe that is written as a table."""
    rows = {
        token: TokenRow(own.source.model, own.source.token, own.source.token_id, own.force)
        for token, own in (entry.tokens or {}).items()
    }
    return TokenizerWish(entry.source, rows, entry.pad_to_multiple_of)


# Checking -------------------------------------------------------------------------------------


def tokenizer_sources(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Models whose tokenizers a recipe names, each with the path of its name."""
    entry = found.get("tokenizer")
    inner = entry.get("source") if isinstance(entry, dict) else None
    for source, where in (
        (found.get("tokenizer_source"), ".tokenizer_source"),
        (
            inner,
            ".tokenizer.source",
        ),
    ):
        if isinstance(source, str) and source not in (BASE, UNION):
            yield source, where


def tokenizer_problems(found: Mapping[str, Any], models: Collection[Any]) -> Iterator[str]:
    """What is wrong beyond types. `models` are those that the recipe merges."""
    if found.get("tokenizer_source") is not None and found.get("tokenizer") is not None:
        yield ": give either 'tokenizer_source' or 'tokenizer'"
    yield from _template_problems(found.get("chat_template"))
    entry = found.get("tokenizer")
    tokens = entry.get("tokens") if isinstance(entry, dict) else None
    for token, own in tokens.items() if isinstance(tokens, dict) else ():
        source = own.get("source") if isinstance(own, dict) else None
        where = f".tokenizer.tokens.{token}.source"
        model = source.get("model") if isinstance(source, dict) else source
        if isinstance(source, dict):
            yield from _source_problems(source, where)
        if isinstance(model, str) and model not in models:
            yield f"{where}: {model} is none of the models{nearest(model, map(str, models))}"


def _source_problems(source: Mapping[str, Any], where: str) -> Iterator[str]:
    kind = source.get("kind")
    if not isinstance(kind, str):
        return
    if kind not in _KINDS:
        yield f"{where}.kind: expected model_token or zero, found '{kind}'{nearest(kind, _KINDS)}"
        return
    given = {key for key in ("model", "token", "token_id") if source.get(key) is not None}
    if kind == "zero" and given:
        yield f"{where}: zeros need no {' or '.join(sorted(given))}"
    if kind == "model_token" and "model" not in given:
        yield f"{where}: key 'model' is missing"
    if kind == "model_token" and len(given & {"token", "token_id"}) != 1:
        yield f"{where}: expected either 'token' or 'token_id'"


def _template_problems(template: Any) -> Iterator[str]:
    if not isinstance(template, str) or template in TEMPLATES or "{" in template:
        return
    if not Path(template).expanduser().is_file():
        listed = ", ".join(TEMPLATES)
        hint = nearest(template, TEMPLATES)
        yield (
            f".chat_template: expected {listed}, a file, or a template in Jinja, "
            f"found {template[:40]!r}{hint}"
        )
