"""The folder of a run: its configuration, metrics, state and result, written so that it resumes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atlas_cli.datasets.dataset import Dataset, Sample, draw_samples
from atlas_cli.errors import AtlasError, CheckpointError, UsageError
from atlas_cli.io.checkpoint import (
    digest_of_tensors,
    open_safetensors,
    read_metadata,
    write_tensors,
)
from atlas_cli.io.files import LOCK, FolderLock, read_regular, sha256_of, write_text
from atlas_cli.io.staging import sweep
from atlas_cli.learning.results import with_units
from atlas_cli.recipes.learned import VectorEntry
from atlas_cli.recipes.model import default_keys
from atlas_cli.sources.locate import Source
from atlas_cli.vectors.writer import TRIMMED

if TYPE_CHECKING:
    from pydantic import BaseModel

    from atlas_cli.learning.run import RunOptions
    from atlas_cli.learning.selection import Tested
    from atlas_cli.learning.trackers import Trackers

_CONFIG, _STATE, _METRICS = "config.json", "state.safetensors", "metrics.jsonl"
_RECIPE, _RESULT = "recipe.yaml", "result.json"
_SHOTS = 48  # images of a task that are remembered as learned from
_IMAGES = "images.jsonl"  # that were learned from or tested on, with predictions
HEAD, PROJECTION = "head.safetensors", "projection.safetensors"  # of a fit with a head
_RESULTS = (
    *(_STATE, _METRICS, _RECIPE, _RESULT, _IMAGES),
    *("coefficients.json", "coefficients.safetensors", "layernorm.safetensors"),
    *(HEAD, PROJECTION),
)
MODEL, ADAPTER = "model", "adapter"  # folders that fine-tuning writes
_TRACKED = ("tensorboard", "wandb")  # folders that --log writes
_UNCHECKED = ("versions",)


@dataclass(frozen=True)
class SavedRun:
    """A run as it was last saved: named tensors, and the rest as JSON. `path` is its file."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    path: Path = Path(_STATE)

    def below(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with a prefix, without it."""
        found = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensors[name] for name in found}


@dataclass
class RunFolder:
    """A folder that is being written. Rows of metrics wait until the next save."""

    folder: Path
    made: bool
    lock: FolderLock
    resumed: bool = False
    trackers: Trackers | None = None
    _waiting: list[str] = field(default_factory=list)
    _rows: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)  # of the rows that are written

    def record(self, row: Mapping[str, object]) -> None:
        """Add a row of metrics, which is written with the next save."""
        self._waiting.append(json.dumps(row) + "\n")

    def save(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, object]) -> None:
        """Write the rows that wait, and then the state that counts them."""
        with _explained(self.folder):
            with (self.folder / _METRICS).open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
            rows, self._waiting = self._waiting, []
            self._rows += len(rows)
            self._digest.update("".join(rows).encode())
            counted = {"rows": self._rows, "rows_sha256": self._digest.hexdigest()}
            text = json.dumps({**facts, **counted})
            kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            sealed = {"atlas_run": text, "sha256": digest_of_tensors(text, kept)}
            write_tensors(self.folder / _STATE, kept, sealed)
        if self.trackers:
            self.trackers.rows(rows)

    def restore(self) -> SavedRun | None:
        """The last save, with the rows of metrics that belong to it; None before the first."""
        path = self.folder / _STATE
        if not path.exists():
            self._cut(0, None)
            return None
        facts, sealed = _read_facts(path), read_metadata(path)
        tensors = {name: tensor.read().clone() for name, tensor in open_safetensors(path).items()}
        found = digest_of_tensors(sealed["atlas_run"], tensors)
        if sealed.get("sha256", found) != found:  # earlier versions wrote none
            raise _damaged(path)
        self._cut(facts["rows"], facts.get("rows_sha256"))
        return SavedRun(tensors, facts, path)

    def _cut(self, rows: int, sha256: str | None) -> None:
        """Drop rows that were written after the last save; they will come again.

        Raises CheckpointError if the others are not those that were saved: `sha256`, if known.
        """
        path = self.folder / _METRICS
        with _explained(self.folder):
            lines = read_regular(path).splitlines(True) if path.exists() else []
        if len(lines) < rows:
            raise CheckpointError(f"{path}: has {len(lines)} rows, but the run had {rows}")
        if sha256 not in (None, hashlib.sha256(b"".join(lines[:rows])).hexdigest()):
            raise _damaged(path)
        try:
            kept = [json.dumps(with_units(json.loads(line))) + "\n" for line in lines[:rows]]
            write_text(path, "".join(kept))
        except (AttributeError, ValueError) as problem:
            raise _damaged(path) from problem
        self._rows, self._digest = rows, hashlib.sha256("".join(kept).encode())
        if self.trackers:
            self.trackers.rows(kept)

    def keep_large(self, coefficients: torch.Tensor) -> str:
        """Write a table that is too large for text, and give its path."""
        path = self.folder / "coefficients.safetensors"
        with _explained(self.folder):
            write_tensors(path, {"coefficients": coefficients.cpu().contiguous()})
        return str(path)

    def keep_vector(
        self, name: str, model: Source, changed: Mapping[str, torch.Tensor], told: str
    ) -> VectorEntry:
        """Write tensors of the base that were changed as a task vector, for a learned recipe."""
        from atlas_cli.vectors.extract import extract_changed

        path = self.folder / name
        extract_changed(path, model, changed, told)
        return VectorEntry(name=path.stem, file=str(path), sha256=sha256_of(path))

    def finish(
        self,
        recipe: str,
        coefficients: Mapping[str, Mapping[str, float]] | None,
        result: Mapping[str, object] | None = None,
    ) -> None:
        """Write the result: the recipe last, so that a folder with a recipe is a whole one."""
        if result is not None:
            self.write_result(result)
        if coefficients is not None:
            text = json.dumps(coefficients, indent=1) + "\n"
            write_text(self.folder / "coefficients.json", text)
        write_text(self.folder / _RECIPE, recipe)

    def write_result(self, result: Mapping[str, object]) -> None:
        """Write what was measured."""
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        with _explained(self.folder):
            write_text(self.folder / _RESULT, text)
        if self.trackers:
            self.trackers.result(result)

    def write_images(self, shown: Iterable[Dataset], tested: Iterable[Tested]) -> None:
        """Write which images were learned from, and what is predicted for test images."""
        if text := "".join(_image_lines(shown, tested)):
            with _explained(self.folder):
                write_text(self.folder / _IMAGES, text)

    def recipe(self) -> str | None:
        """The learned recipe, if the run came to its end."""
        path = self.folder / _RECIPE
        return path.read_text("utf-8") if path.exists() else None

    def abandon(self) -> None:
        """Remove what a failed run made. A resumed run keeps what there was."""
        if self.resumed:
            return
        if self.trackers:
            self.trackers.close()
        (self.folder / _CONFIG).unlink(missing_ok=True)
        _clear(self.folder)
        self.lock.release()
        if self.made and not any(self.folder.iterdir()):
            self.folder.rmdir()


def _image_lines(shown: Iterable[Dataset], tested: Iterable[Tested]) -> Iterator[str]:
    """One JSON object for some images of every task that were learned from, and for test images.

    Those of test images also have what is predicted before and after.
    """
    for data in shown:
        for sample in draw_samples(data.samples, _SHOTS):
            yield _line(data, sample, {})
    for one in tested:
        names, data = one.dataset.classes, one.dataset
        for sample, before, after in zip(data.samples, one.before, one.after, strict=True):
            yield _line(data, sample, {"zero_shot": names[before], "learned": names[after]})


def _line(dataset: Dataset, sample: Sample, predicted: Mapping[str, str]) -> str:
    label = dataset.classes[sample.label or 0]
    row = {"data": dataset.name, "split": dataset.split, "image": sample.key, "label": label}
    return json.dumps({**row, **predicted}, ensure_ascii=False) + "\n"


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged; --force starts anew")


def _read_facts(path: Path) -> dict[str, Any]:
    """What a state says besides its tensors. Raises CheckpointError if it is damaged."""
    try:
        facts = json.loads(read_metadata(path).get("atlas_run", "null"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("rows"), int):
        raise CheckpointError(f"{path}: is not the state of a run")
    return facts


def check_folder(folder: Path, *, resume: bool, force: bool) -> None:
    """Raise if a run may not use this folder. Nothing is made yet."""
    if folder.exists() and not folder.is_dir():
        raise AtlasError(f"{folder}: is a file")
    if not folder.absolute().parent.is_dir():
        raise AtlasError(f"{folder.parent}: no such folder")
    if not os.access(folder if folder.exists() else folder.absolute().parent, os.W_OK):
        raise AtlasError(f"{folder}: cannot be written")
    if folder.exists():
        with _explained(folder):
            FolderLock(folder).check()
            sweep(folder)
        _check_content(folder, resume=resume, force=force)


def _check_content(folder: Path, *, resume: bool, force: bool) -> None:
    begun = (folder / _CONFIG).exists()
    others = [path for path in folder.iterdir() if path.name not in (TRIMMED, LOCK)]
    if others and not begun:
        raise AtlasError(f"{folder}: is not empty, and holds no run")
    if begun and not (resume or force):
        raise AtlasError(f"{folder}: holds a run; --resume goes on with it, --force starts anew")


@contextmanager
def open_folder(
    folder: Path | None, config: Mapping[str, object], options: RunOptions, recipe: BaseModel
) -> Iterator[RunFolder | None]:
    """The folder of a run, if it has one; no other run writes it meanwhile."""
    if folder is None:
        yield None
        return
    how = {"resume": options.resume, "force": options.force}
    with open_run(folder, config, default_keys(type(recipe)), **how) as opened:
        if not options.log:
            yield opened
            return
        with _tracked(opened, config, options.log):
            yield opened


@contextmanager
def _tracked(run: RunFolder, config: Mapping[str, object], names: Sequence[str]) -> Iterator[None]:
    """With trackers that are told of the run, until it ends."""
    from atlas_cli.learning.trackers import Trackers

    try:
        with _explained(run.folder):
            run.trackers = Trackers(names, run.folder, config)
    except AtlasError:
        run.abandon()
        raise
    try:
        yield
    finally:
        run.trackers.close()


@contextmanager
def open_run(
    folder: Path,
    config: Mapping[str, object],
    defaults: Mapping[str, object],
    *,
    resume: bool,
    force: bool,
) -> Iterator[RunFolder]:
    """Start a run, or resume one, and let nobody else write its folder meanwhile.

    Raises UsageError if the run that is there has another configuration. `defaults` are those of
    the keys of recipes: runs of earlier versions lack some of them.
    """
    made = not folder.exists()
    lock = FolderLock(folder)
    try:
        with _explained(folder):
            folder.mkdir(exist_ok=True)
            lock.take()
            _check_content(folder, resume=resume, force=force)  # another run may have come first
        run = _begin(RunFolder(folder, made, lock), config, defaults, resume=resume)
    except BaseException:
        lock.release()
        with suppress(OSError):  # somebody else may have begun to write it
            folder.rmdir() if made else None
        raise
    try:
        yield run
    finally:
        with _explained(folder):
            lock.release()


def _begin(
    run: RunFolder, config: Mapping[str, object], defaults: Mapping[str, object], *, resume: bool
) -> RunFolder:
    folder = run.folder
    with _explained(folder):
        for path in folder.glob(".*.atlas-*.part"):  # the lock is ours: nobody else writes them
            folders = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path, ignore_errors=True) if folders else path.unlink()
        if resume and (folder / _CONFIG).exists():
            _check_same(folder / _CONFIG, config, defaults)
            run.resumed = True
            return run
        _clear(folder)
        write_text(folder / _CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n")
    return run


def _clear(folder: Path) -> None:
    """Remove the results of a run."""
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    for name in (MODEL, ADAPTER, *_TRACKED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _check_same(path: Path, config: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse to go on with a run that had other inputs.

    A key of its recipe that an earlier version did not know yet had no effect, as its default has.
    """
    try:
        before = json.loads(read_regular(path).decode("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: cannot be read as JSON") from problem
    if not isinstance(before, dict):
        raise CheckpointError(f"{path}: is not the configuration of a run")
    now = json.loads(json.dumps(config))
    if isinstance(before.get("recipe"), dict):
        before["recipe"] = {**json.loads(json.dumps(defaults)), **before["recipe"]}
    for key in sorted((before.keys() | now.keys()) - set(_UNCHECKED)):
        for name, old, new in _differences(key, before.get(key), now.get(key)):
            raise UsageError(
                f"{path.parent}: was begun with {name} {old}, not {new}; "
                "repeat its command, or start anew with --force"
            )


def _differences(name: str, old: Any, new: Any) -> list[tuple[str, str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(f"{name}.{key}", old.get(key), new.get(key))
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True), start=1)
        return [one for number, pair in pairs for one in _differences(f"{name} {number}", *pair)]
    return [] if old == new else [(name, json.dumps(old), json.dumps(new))]


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one line that names the folder."""
    try:
        yield
    except OSError as problem:
        raise AtlasError(f"{folder}: cannot be written: {problem.strerror}") from problem
