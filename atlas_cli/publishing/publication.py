"""A run, a task vector or a model -> the files of a repository on the Hub, and its card.

Nothing is written to the folder that is published, and no link out of it is followed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, CheckpointError, UsageError, install_hint
from atlas_cli.merging.model_card import Card, Evaluated, on_hub, read_card, read_evaluation
from atlas_cli.publishing import cards
from atlas_cli.publishing.fetch import LARGE, RECIPE, VECTORS
from atlas_cli.recipes.text import parse_mapping, write_mapping
from atlas_cli.reports.runs import is_run, read_coefficients, read_run
from atlas_cli.sources.hub import ask_licence, check_repository, push_files
from atlas_cli.vectors.format import Header, read_header

CARD, PICTURE = "README.md", "coefficients.png"
# What of a run is published; the state from which it resumes is not.
_OF_A_RUN = (
    *("coefficients.json", LARGE, "config.json", "result.json", "metrics.jsonl"),
    "layernorm.safetensors",
)


@dataclass(frozen=True)
class PublishOptions:
    """What a publication says of itself beside what its files tell."""

    licence: str | None = None
    evaluation: Evaluated | None = None


@dataclass(frozen=True)
class Publication:
    """The files of a repository, with the card among them. `notes` are for whoever publishes."""

    repository: str
    kind: str
    files: Mapping[str, Path | bytes]
    notes: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        """The text of the card."""
        text = self.files[CARD]
        assert isinstance(text, bytes)
        return text.decode()

    @property
    def bytes(self) -> int:
        """How much is uploaded."""
        return sum(
            len(found) if isinstance(found, bytes) else found.stat().st_size
            for found in self.files.values()
        )

    def push(self, *, private: bool = False) -> str:
        """Upload everything in one commit, and give the address of the repository."""
        message = f"Upload {self.kind} with atlas"
        return push_files(self.files, self.repository, message, private=private)


def read_evaluation_file(path: Path) -> Evaluated:
    """What `atlas eval --json` printed to a file."""
    try:
        return read_evaluation(path.read_text("utf-8"), str(path))
    except FileNotFoundError as problem:
        raise UsageError(f"--evaluation {path}: no such file") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--evaluation {path}: cannot be read as UTF-8 text") from problem


def prepare(
    paths: Sequence[Path], repository: str, options: PublishOptions | None = None
) -> Publication:
    """What would be published of a run, a model, or one task vector or several."""
    check_repository(repository)
    options, (path, *others) = options or PublishOptions(), paths
    for one in paths:
        if not one.exists():
            raise UsageError(f"no such file or folder: {one}")
    if others or path.is_file():
        return _vectors(list(paths), repository, options)
    if is_run(path):
        return _run(path, repository, options)
    found = sorted(path.glob("*.safetensors"))
    if found and not (path / "config.json").is_file() and all(map(_is_vector, found)):
        return _vectors(found, repository, options)
    return _model(path, repository, options)


def _finished(
    repository: str,
    kind: str,
    files: Mapping[str, Path | bytes],
    card: Card,
    notes: Sequence[str] = (),
) -> Publication:
    return Publication(repository, kind, {CARD: str(card).encode(), **files}, tuple(notes))


# Licences -------------------------------------------------------------------------------------

_UNKNOWN = "unknown"


def _licensed(
    card: Card, options: PublishOptions, bases: Sequence[str] | str
) -> tuple[Card, list[str]]:
    """The card with a licence: the one given, its own, or that of all bases; and what to know."""
    given = options.licence or card.front.get("license")
    if given and given != _UNKNOWN:
        return card.with_front(license=given), []
    listed = dict.fromkeys([bases] if isinstance(bases, str) else bases)
    found = {_licence_of(base) for base in listed}
    licence = found.pop() if len(found) == 1 else None
    if licence is None or licence == _UNKNOWN:
        said = "the licence is not known, and the card says so; --license names one"
        return card.with_front(license=_UNKNOWN), [said]
    said = f"licence {licence}, as {' and '.join(listed)} has it; --license names another"
    return card.with_front(license=licence), [said]


def _licence_of(base: str) -> str | None:
    """The licence in the card of a model, beside it or on the Hub."""
    beside = Path(base).expanduser() / CARD
    if beside.is_file():
        named = read_card(beside.read_text("utf-8", errors="replace")).front.get("license")
        return named if isinstance(named, str) else None
    repository = on_hub(base)
    return ask_licence(repository) if repository else None


# Task vectors ---------------------------------------------------------------------------------


def _is_vector(path: Path) -> bool:
    try:
        read_header(path)
    except CheckpointError:
        return False
    return True


def _alone(path: Path) -> Header:
    """The header of a vector that is whole without another file."""
    header = read_header(path)
    if header.shared:
        raise UsageError(
            f"{path}: shares {header.shared['file']} with others and cannot go alone; write it "
            "anew with: atlas extract --dtype int3"
        )
    return header


def _vectors(paths: Sequence[Path], repository: str, options: PublishOptions) -> Publication:
    headers: dict[str, Header] = {}
    for path in paths:
        header = _alone(path)
        if f"{header.name}.safetensors" in headers:
            raise UsageError(f"two task vectors are called {header.name}; publish them one by one")
        headers[f"{header.name}.safetensors"] = header
    card = cards.vector_card(repository, headers, options.evaluation)
    bases = [str(header.base.get("reference", "")) for header in headers.values()]
    card, notes = _licensed(card, options, bases)
    files = dict(zip(headers, paths, strict=True))
    kind = "task vectors" if len(paths) > 1 else "task vector"
    return _finished(repository, kind, files, card, notes)


# Runs -----------------------------------------------------------------------------------------


def _run(folder: Path, repository: str, options: PublishOptions) -> Publication:
    if (folder / "model").is_dir():
        raise UsageError(f"{folder}: holds a fine-tuned model; publish {folder / 'model'}")
    run = read_run(folder)
    if not run.recipe:
        raise UsageError(f"{folder}: this run has learned nothing yet; --resume goes on with it")
    recipe, vectors = _with_own_vectors(run.recipe)
    files: dict[str, Path | bytes] = {RECIPE: recipe.encode(), **vectors}
    files |= {name: folder / name for name in _OF_A_RUN if (folder / name).is_file()}
    for name in files.keys() - vectors.keys() - {RECIPE}:
        _check_inside(folder, folder / name)
    picture, notes = _picture(run.recipe, folder / RECIPE)
    files |= picture
    card = cards.run_card(repository, run, recipe, PICTURE if picture else None)
    base = str(parse_mapping(recipe, "the run's recipe").get("base_model", ""))
    card, said = _licensed(card, options, [base])
    notes += said
    if options.evaluation:
        card = cards.with_results(card, repository, options.evaluation, ())
    return _finished(repository, "run", files, card, notes)


def _with_own_vectors(text: str) -> tuple[str, dict[str, Path | bytes]]:
    """A learned recipe whose vectors on this machine go with it, and the files of these."""
    recipe = parse_mapping(text, "the run's recipe")
    files: dict[str, Path | bytes] = {}
    for entry in recipe.get("vectors") or []:
        path = Path(str(entry["file"])).expanduser()
        if path.is_file():
            _alone(path)
            name = f"{VECTORS}/{entry['name']}.safetensors"
            files[name], entry["file"] = path, name
    if isinstance(recipe.get("coefficients"), str):
        recipe["coefficients"] = LARGE
    comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    return write_mapping(recipe, "\n".join(comment)), files


def _picture(learned: str, where: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Learned coefficients as heat maps, or a note that says why there are none."""
    from atlas_cli.reports.plots import missing_library, plot_run

    if missing_library():
        return {}, [f"the card has no picture of the coefficients: {install_hint('plot')}"]
    run = read_coefficients(learned, str(where))
    if not run.table:
        return {}, []
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        plot_run(Path(folder) / PICTURE, run)
        return {PICTURE: (Path(folder) / PICTURE).read_bytes()}, []


# Models ---------------------------------------------------------------------------------------


def _model(folder: Path, repository: str, options: PublishOptions) -> Publication:
    from atlas_cli.merging.provenance import MANIFEST
    from atlas_cli.sources.locate import locate
    from atlas_cli.sources.reference import Reference

    source = locate(Reference(str(folder), "path", str(folder)))  # is there a model in it?
    files: dict[str, Path | bytes] = {}
    for path in _inside(folder):
        files[path.relative_to(folder).as_posix()] = path
    notes: list[str] = []
    lock = folder / MANIFEST
    recipe = parse_mapping(lock.read_text("utf-8"), str(lock)) if lock.is_file() else {}
    if isinstance(table := recipe.get("coefficients"), dict):
        picture, notes = _picture(json.dumps(table), lock)
        files |= picture
    before = files.pop(CARD, None)
    text = before.read_text("utf-8") if isinstance(before, Path) else ""
    card = cards.model_card(repository, folder, text, PICTURE if PICTURE in files else None)
    bases = [str(recipe["base_model"])] if recipe.get("base_model") else []
    card, said = _licensed(card, options, bases or card.front.get("base_model") or [])
    notes += said
    if options.evaluation:
        digests = tuple(str(one) for one in source.provenance()["sha256"].values())  # type: ignore[attr-defined]
        card = cards.with_results(card, repository, options.evaluation, digests)
    return _finished(repository, "model", files, card, notes)


def _inside(folder: Path) -> Iterator[Path]:
    """The files of a folder, hidden ones left out. Raises AtlasError for a link out of it."""
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        _check_inside(folder, path)
        if path.is_file():
            yield path


def _check_inside(folder: Path, path: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise AtlasError(
            f"{path}: is a link out of {folder}; copy what it stands for, or remove it"
        )
