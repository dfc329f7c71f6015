"""Vocabularies of tokenizers: read, joined, and written with the files that go with them.

Only tokenizer.json is read, by the library `tokenizers`; all tokens of a union beyond those of the
first tokenizer become added tokens, so that no merge rule of it changes.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_cli.errors import AtlasError, CheckpointError, install_hint
from atlas_cli.sources.locate import read_object
from atlas_cli.sources.model_files import TOKENIZER_PATTERNS

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_FILES = (*TOKENIZER_PATTERNS, "added_tokens.json", "chat_template*", "*.tiktoken")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json as it is, the folder that it lies in, and the ids of all tokens.

    `added` are the tokens that are found before the text is cut, with their flags.
    """

    folder: Path
    vocabulary: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]]
    raw: Mapping[str, Any]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer that can be read."""
    return (folder / FILE).is_file()


def read_tokenizer(folder: Path, where: str) -> Tokenizer:
    """The tokenizer in a folder. Raises CheckpointError if there is none, or it is broken."""
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{where}: has no {FILE}; make it with transformers: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    raw: Any = read_object(folder / FILE)
    load = _library().from_str
    with _of_tokens(folder / FILE):
        _check_merges(raw.get("model") or {})
    try:
        vocabulary = load(json.dumps(raw)).get_vocab(with_added_tokens=True)
    except Exception as problem:  # the library raises Exception itself
        raise CheckpointError(f"{folder / FILE}: is no tokenizer: {problem}") from problem
    listed: Any = raw.get("added_tokens") or []
    added = {str(one["content"]): one for one in listed}
    for content, token in _declared(folder).items():
        if content not in vocabulary:
            vocabulary[content] = token["id"]
        added.setdefault(content, token)
    return Tokenizer(folder, vocabulary, added, raw)


def _check_merges(model: Mapping[str, Any]) -> None:
    """Raise ValueError for merges that the library, which gives up in Rust, would cut in two."""
    prefix = model.get("continuing_subword_prefix") or ""
    for rule in (model.get("merges") or []) if prefix else []:
        second = _sides(rule)[1]
        if not (prefix.isascii() and second.startswith(prefix)):
            raise ValueError(f"{second!r} does not begin with {prefix!r}")


def _library() -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as problem:
        raise AtlasError(
            "this recipe aligns tokenizers, which needs the package tokenizers; "
            f"run: {install_hint('hf')}"
        ) from problem
    return Library


def _declared(folder: Path) -> dict[str, dict[str, Any]]:
    """Tokens that transformers adds from the settings of a tokenizer when it opens it."""
    if not (folder / SETTINGS).is_file():
        return {}
    listed: Any = read_object(folder / SETTINGS).get("added_tokens_decoder") or {}
    with _of_tokens(folder / SETTINGS):
        return {
            str(one["content"]): {"id": int(number), **{k: one[k] for k in one if k in _FLAGS}}
            for number, one in sorted(listed.items(), key=lambda item: int(item[0]))
        }


@contextmanager
def _of_tokens(path: Path) -> Iterator[None]:
    """Raise CheckpointError for a file whose lists of tokens are none."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path}: lists tokens as no tokenizer does") from problem


def differing(folders: Mapping[str, Path], first: str) -> list[str]:
    """A sentence for each model whose tokenizer has other ids than that of the first model."""
    if not has_tokenizer(folders[first]):
        return []
    text = (folders[first] / FILE).read_bytes()
    lines = []
    for who, folder in folders.items():
        if not has_tokenizer(folder) or (folder / FILE).read_bytes() == text:
            continue
        ours, theirs = (_ids(one / FILE) for one in (folders[first], folder))
        moved = [token for token in ours if theirs.get(token, ours[token]) != ours[token]]
        if moved:
            lines.append(
                f"{who}: its tokenizer has other ids than that of {first} for {len(moved)} tokens, "
                f"such as {moved[0]!r}, and their rows are merged with each other; "
                "tokenizer_source: base or union aligns them"
            )
    return lines


def _ids(path: Path) -> dict[str, int]:
    """The ids of tokens in a tokenizer.json, read without the library."""
    raw: Any = read_object(path)
    with _of_tokens(path):
        words = (raw.get("model") or {}).get("vocab") or {}
        if isinstance(words, list):  # with their scores
            words = {str(word[0]): number for number, word in enumerate(words)}
        added = raw.get("added_tokens") or []
        return {**words, **{str(one["content"]): int(one["id"]) for one in added}}


# Changing -------------------------------------------------------------------------------------


def without_tokens(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """The tokenizer without tokens whose ids have no row in the embedding."""
    if all(number < rows for number in tokenizer.vocabulary.values()):
        return tokenizer
    gone = {token for token, number in tokenizer.vocabulary.items() if number >= rows}
    raw: Any = json.loads(json.dumps(tokenizer.raw))
    raw["added_tokens"] = [
        one for one in raw.get("added_tokens") or [] if one["content"] not in gone
    ]
    model = raw["model"]
    if gone & set(model.get("vocab") or {}) and model.get("type") != "BPE":
        raise AtlasError(
            f"{tokenizer.folder}: its tokenizer has {len(gone)} tokens beyond the {rows} rows of "
            f"its embedding, and only those of BPE can be taken away, not of {model.get('type')}"
        )
    if model.get("type") == "BPE":
        model["vocab"] = {t: number for t, number in model["vocab"].items() if t not in gone}
        model["merges"] = [rule for rule in model["merges"] if not gone & set(_sides(rule))]
    kept = {token: number for token, number in tokenizer.vocabulary.items() if token not in gone}
    added = {token: one for token, one in tokenizer.added.items() if token not in gone}
    return Tokenizer(tokenizer.folder, kept, added, raw)


def _sides(rule: str | Sequence[str]) -> Sequence[str]:
    """The two tokens that a rule merges, and the one that it makes of them."""
    sides = rule.split(" ") if isinstance(rule, str) else rule
    return [*sides, "".join(sides)]


def union(first: Tokenizer, others: Iterable[Tokenizer]) -> Tokenizer:
    """The first tokenizer with all tokens of the others added: plain ones, then added ones."""
    plain: dict[str, Mapping[str, Any]] = {}
    added: dict[str, Mapping[str, Any]] = {}
    for tokenizer in others:
        for token in sorted(tokenizer.vocabulary, key=lambda t: tokenizer.vocabulary[t]):
            own = tokenizer.added.get(token)
            (plain if own is None else added).setdefault(token, own or {})
    return with_tokens(first, {**{t: {} for t in plain if t not in added}, **added})


def with_tokens(tokenizer: Tokenizer, tokens: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """The tokenizer with further tokens, behind those that it has; with their flags."""
    vocabulary, added = dict(tokenizer.vocabulary), dict(tokenizer.added)
    new = [token for token in tokens if token not in vocabulary]
    if not new:
        return tokenizer
    raw: Any = json.loads(json.dumps(tokenizer.raw))
    raw["added_tokens"] = list(raw.get("added_tokens") or [])
    for token in new:
        vocabulary[token] = 1 + max(vocabulary.values(), default=-1)
        flags = dict.fromkeys(_FLAGS, False) | {"normalized": True}
        flags |= {key: value for key, value in tokens[token].items() if key in _FLAGS}
        added[token] = {"id": vocabulary[token], "content": token, **flags}
        raw["added_tokens"].append(added[token])
    return Tokenizer(tokenizer.folder, vocabulary, added, raw)


# Writing --------------------------------------------------------------------------------------


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into the folder of a model, with the files that lay beside it."""
    for path in tokenizer_files(folder):
        path.unlink()
    for path in tokenizer_files(tokenizer.folder):
        shutil.copyfile(path, folder / path.name)
    if tokenizer.raw == read_object(tokenizer.folder / FILE):
        return
    text = _library().from_str(json.dumps(tokenizer.raw)).to_str(pretty=True)
    (folder / FILE).write_text(text, "utf-8")
    (folder / "added_tokens.json").unlink(missing_ok=True)
    if (folder / SETTINGS).is_file():
        settings = read_object(folder / SETTINGS)
        if "added_tokens_decoder" in settings:
            listed = sorted(tokenizer.added.items(), key=lambda one: tokenizer.vocabulary[one[0]])
            settings["added_tokens_decoder"] = {
                str(tokenizer.vocabulary[token]): {
                    "content": token,
                    **{key: bool(own.get(key)) for key in _FLAGS},
                }
                for token, own in listed
            }
            _write(folder / SETTINGS, settings)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, each) for each in _FILES)
    )


def read_template(folder: Path) -> str:
    """The chat template of the tokenizer in a folder; empty if it has none."""
    if (folder / TEMPLATE).is_file():
        try:
            return (folder / TEMPLATE).read_text("utf-8")
        except UnicodeError as problem:
            raise CheckpointError(f"{folder / TEMPLATE}: is no UTF-8 text") from problem
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, each with its name
        named = (one for one in found if isinstance(one, dict) and one.get("name") == "default")
        found = next((one.get("template") for one in named), None)
    return found if isinstance(found, str) else ""


def write_template(folder: Path, text: str) -> None:
    """Give the tokenizer in a folder a chat template, where any version of transformers looks."""
    (folder / TEMPLATE).write_text(text, "utf-8")
    if (folder / SETTINGS).is_file():
        _write(folder / SETTINGS, read_object(folder / SETTINGS) | {"chat_template": text})


def _write(path: Path, found: Mapping[str, object]) -> None:
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")
