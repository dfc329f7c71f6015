"""atlas zoo: published fine-tuned models by short names, and what of them is in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.options import AsJson, KeepDownloads, Quiet
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.sources.zoo import ZooEntry

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[pull] [NAME]...", help="Sets or SET/TASK; pull gets their vectors."),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--model", metavar="BASE", help="For pull: another copy of the base model."),
]
Storage = Annotated[
    str, typer.Option(metavar="DTYPE", help="For pull: int8, int4, int3, int2, fp16, bf16, fp32.")
]
_COLUMNS = ("name", "base", "tasks", "format", "megabytes", "cached")


def zoo(
    words: Words = None,
    model: BaseModel = None,
    storage: Storage = "int8",
    keep_downloads: KeepDownloads = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """List the published models whose task vectors are one word away, or get their vectors.

    Your own sets go in ~/.config/atlas/zoo.yaml.

    Example: atlas zoo pull vit-b-32/8
    """
    from atlas_cli.sources.zoo import find_entries, read_zoo

    given = list(words or [])
    if given[:1] == ["pull"]:
        _pull(given[1:], model, storage, keep=keep_downloads, as_json=as_json, quiet=quiet)
    elif given:
        entries = [entry for name in given for entry in find_entries(name)]
        _show([_entry_row(entry, _cached()) for entry in entries], as_json=as_json)
    else:
        cached = _cached()
        rows = [_set_row(name, entries, cached) for name, entries in read_zoo().items()]
        _show(rows, as_json=as_json)


def _pull(
    names: Sequence[str],
    model: str | None,
    storage: str,
    *,
    keep: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from atlas_cli.sources.zoo import find_entries
    from atlas_cli.vectors.targets import check_dtype, plain_dtype

    if not names:
        raise UsageError("pull: no set given; atlas zoo lists them")
    storage = plain_dtype(storage)
    check_dtype(storage, "--storage")
    entries = [entry for name in names for entry in find_entries(name)]

    from atlas_cli.vectors.gather import gather_by_name
    from atlas_cli.vectors.pool import Gathering

    tell = (lambda text: None) if quiet else console.note
    how = Gathering(
        storage=storage, keep_downloads=keep, tell=tell, warn=console.warner(quiet=quiet)
    )
    found = gather_by_name(list(dict.fromkeys(entry.name for entry in entries)), model, how)
    if as_json:
        vectors = [
            {"name": one.name, "reference": one.text, "file": str(one.file), "sha256": one.sha256}
            for one in found
        ]
        console.emit({"atlas": __version__, "vectors": vectors}, as_json=True)
    else:
        for one in found:
            console.emit(one.file)


def _cached() -> dict[str, str]:
    """Where each cached vector of the Hub came from, with the words that say how it is kept."""
    from atlas_cli.vectors.gather import cached_vectors

    return {
        str(header.finetuned.get("reference")).partition("@")[0]: header.blocks[0].storage
        for header in cached_vectors()
    }


def _set_row(name: str, entries: Sequence[ZooEntry], cached: dict[str, str]) -> dict[str, Any]:
    first, sizes = entries[0], [entry.megabytes or 0.0 for entry in entries]
    here = sum(entry.address in cached for entry in entries)
    values = (name, first.base, len(entries), first.format, sum(sizes), here)
    return dict(zip(_COLUMNS, values, strict=True))


def _entry_row(entry: ZooEntry, cached: dict[str, str]) -> dict[str, Any]:
    return {
        "name": entry.name.removeprefix("zoo:"),
        "base": entry.base,
        "repository": entry.repository,
        "file": entry.file or "",
        "format": entry.format,
        "licence": entry.licence or "not stated",
        "megabytes": entry.megabytes,
        "cached": cached.get(entry.address, ""),
        "source": entry.source,
    }


def _show(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        console.emit({"atlas": __version__, "zoo": list(rows)}, as_json=True)
        return
    shown = [{key: _text(value) for key, value in row.items()} for row in rows]
    if console.is_terminal():
        console.emit_table(shown, "Take a set or a task with --vectors zoo:NAME.")
    else:
        console.emit_rows(list(shown[0]), [list(row.values()) for row in shown])


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)
