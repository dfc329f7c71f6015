"""What `atlas fit` does with its arguments: checks, a run that can be stopped, the result."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from atlas_cli import __version__
from atlas_cli.commands import output
from atlas_cli.commands.input import read_text
from atlas_cli.data import Dataset, check_templates, few_shot, open_dataset, share_of
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.recipe import FitRecipe, check_fit, parse_shots, read_recipe, write_recipe
from atlas_cli.sources import check_architecture, locate, parse_reference

if TYPE_CHECKING:
    from atlas_cli.fit import Inputs, Prepared
    from atlas_cli.runs import Run
    from atlas_cli.selection import Moment, Verdict

_SAVE_EVERY = 1.0  # seconds


@dataclass(frozen=True)
class Wishes:
    """What concerns this run only and does not change its result."""

    folder: Path | None
    resume: bool
    force: bool
    threads: int | None
    device: str
    as_json: bool
    quiet: bool


def run(data: str, flags: Mapping[str, Any], wishes: Wishes) -> None:
    """Check everything, learn, and print the learned recipe."""
    recipe = plan_fit(data, flags)
    if wishes.resume and wishes.folder is None:
        raise UsageError("--resume goes on with the run in -o DIR; name it")
    inputs = _resolve(recipe, wishes)

    from atlas_cli.fit import prepared  # torch is slow: only with good inputs
    from atlas_cli.runs import check_folder

    if wishes.folder:
        check_folder(wishes.folder, resume=wishes.resume, force=wishes.force)
    with prepared(inputs, output.warn) as ready:
        if not wishes.quiet:
            _say_plan(ready)
        text, verdict, stopped = _learn(ready, wishes)
    _show(text, verdict, ready, wishes)
    if stopped:
        raise typer.Exit(130)


def plan_fit(data: str, flags: Mapping[str, Any]) -> FitRecipe:
    """What to learn: the recipe, if there is one, with the flags laid over it."""
    given = {key: value for key, value in flags.items() if value is not None}
    if data == "-" or data.endswith((".yaml", ".yml")):
        recipe = read_recipe(FitRecipe, *read_text(data))
        return check_fit(dataclasses.replace(recipe, **given))
    for key in ("model", "vectors"):
        if not given.get(key):
            raise UsageError(f"no {key} given; for example --model builtin:tiny --vectors v/")
    return check_fit(FitRecipe(data=data, **given), "--")


def _resolve(recipe: FitRecipe, wishes: Wishes) -> Inputs:
    """Every name turned into what it names, before torch is imported."""
    reference = parse_reference(recipe.model)
    text = parse_reference(recipe.text) if recipe.text else None
    check_architecture(recipe.arch)
    vectors = expand_vectors(recipe.vectors)
    dataset = open_shots(recipe)
    judges = _open_judges(recipe, dataset)
    source = locate(reference)
    other = locate(text) if text else None

    from atlas_cli.fit import Inputs
    from atlas_cli.models import Opening

    opening = Opening(recipe.arch, other, wishes.device)
    threads = wishes.threads or os.cpu_count() or 1
    return Inputs(recipe, source, tuple(vectors), dataset, judges, opening, threads)


def expand_vectors(texts: list[str]) -> list[str]:
    """Task-vector files, with folders spelt out."""
    found: list[str] = []
    for text in texts:
        path = Path(text).expanduser()
        if path.is_dir():
            inside = sorted(str(file) for file in path.glob("*.safetensors"))
            if not inside:
                raise UsageError(f"{text}: holds no task vectors (*.safetensors)")
            found += inside
        elif path.is_file():
            found.append(str(path))
        else:
            raise UsageError(f"no such task vector: {text}")
    return found


def open_shots(recipe: FitRecipe) -> Dataset:
    """The labelled images to learn from."""
    templates = check_templates(recipe.templates, "templates")
    dataset = open_dataset(
        recipe.data, split=recipe.split, templates=templates, preferred=("train",)
    )
    if not dataset.labelled:
        raise DataError(f"{dataset.name}: has no labels; fit needs a sub-folder per class")
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.name}: has one class only; there is nothing to tell apart")
    shots = parse_shots(recipe.shots)
    if shots is None:
        return dataset
    if isinstance(shots, float):
        return share_of(dataset, shots, recipe.seed)
    return few_shot(dataset, shots, recipe.seed)


def _open_judges(recipe: FitRecipe, dataset: Dataset) -> Dataset | None:
    if not recipe.select.startswith("val:"):
        return None
    name = recipe.select.removeprefix("val:")
    judges = open_dataset(name, templates=dataset.templates, preferred=("val", "valid"))
    if judges.classes != dataset.classes:
        raise DataError(f"{name}: its classes are not those of {dataset.name}")
    return judges


# Learning -------------------------------------------------------------------------------------


def _say_plan(ready: Prepared) -> None:
    pool, recipe = ready.pool, ready.inputs.recipe
    rows, columns = ready.material.tower.composition.shape
    kept = f"{pool.bytes / 1e6:.1f} MB in memory, {pool.storage}"
    if pool.storage == "mapped":
        kept = f"read from their files each step, since they exceed --memory {recipe.memory}"
    elif pool.storage != "as stored":
        kept = f"{pool.bytes / 1e6:.1f} MB in memory as {pool.storage} (--memory {recipe.memory})"
    output.note(f"{rows} vectors x {columns} coefficients; vectors: {kept}")
    if pool.left:
        output.note(
            f"{len(pool.left)} blocks stay those of the base, such as {pool.left[0]}: "
            "they are no parameters"
        )


def _learn(ready: Prepared, wishes: Wishes) -> tuple[str, Verdict, bool]:
    """Learn, and write the folder if there is one. A failure leaves nothing half-written."""
    from atlas_cli.runs import open_run
    from atlas_cli.selection import settle

    folder = None
    if ready.large and wishes.folder is None:
        raise UsageError("there are too many coefficients for one text; give a folder with -o DIR")
    if wishes.folder:
        folder = open_run(wishes.folder, ready.config(), resume=wishes.resume)
    try:
        with stoppable() as stop:
            moment = _go(ready, folder, wishes, stop)
        verdict = settle(ready.material, ready.plan, moment)
        return _write(ready, folder, verdict), verdict, bool(stop)
    except AtlasError:
        if folder:
            folder.abandon()
        raise


def _go(ready: Prepared, folder: Run | None, wishes: Wishes, stop: list[int]) -> Moment:
    """Take steps until the end, or until someone stops it."""
    from atlas_cli.resuming import from_saved, to_saved
    from atlas_cli.selection import begin, learn

    material, plan = ready.material, ready.plan
    saved = folder.restore() if folder and wishes.resume else None
    start = moment = from_saved(saved) if saved else begin(material, plan)
    total = sum(material.problem(stage).steps for stage in plan)
    clock = time.monotonic()
    with output.training(total, quiet=wishes.quiet) as show:
        for moment in learn(material, plan, start):
            step = moment.step
            assert step is not None
            images = ready.inputs.recipe.batch_size
            show(f"loss {step.loss:.3f}  accuracy {100 * step.accuracy:.1f}", images)
            if folder:
                folder.record(row_of(ready, moment))
                if time.monotonic() - clock > _SAVE_EVERY or moment.stage == len(plan):
                    folder.save(*to_saved(moment))
                    clock = time.monotonic()
            if stop:
                break
    if folder and stop:
        folder.save(*to_saved(moment))
    return moment


def row_of(ready: Prepared, moment: Moment) -> dict[str, object]:
    """One line of metrics.jsonl."""
    assert moment.step is not None
    stage = ready.plan[min(moment.stage, len(ready.plan) - 1)]
    row: dict[str, object] = {"stage": stage.name, **dataclasses.asdict(moment.step)}
    return row


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """An interrupt asks for an end after the step at hand; a second one ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


# The result -----------------------------------------------------------------------------------


def _write(ready: Prepared, folder: Run | None, verdict: Verdict) -> str:
    """The learned recipe, also in the folder."""
    table = None if ready.large else ready.table(verdict.coefficients)
    file = folder.keep_large(verdict.coefficients) if folder and ready.large else None
    recipe = ready.learned(verdict.coefficients, file)
    given = ready.inputs.recipe
    comment = (
        f"Learned by atlas {__version__} from {len(ready.inputs.dataset.samples)} images of "
        f"{given.data}, seed {given.seed}.\n"
        f"Accuracy {_judged(ready)}: zero-shot {100 * verdict.before.accuracy:.2f}, "
        f"learned {100 * verdict.after.accuracy:.2f}."
    )
    text = write_recipe(recipe, comment)
    if folder:
        folder.finish(text, table)
    return text


def _judged(ready: Prepared) -> str:
    words = {"last": "on the images it learned from", "holdout": "on images held out"}
    select = ready.inputs.recipe.select
    return words.get(select, "over the folds" if select == "kfold" else f"on {select[4:]}")


def _show(text: str, verdict: Verdict, ready: Prepared, wishes: Wishes) -> None:
    before, after = 100 * verdict.before.accuracy, 100 * verdict.after.accuracy
    if not verdict.improved:
        output.note(
            f"nothing beat zero-shot ({before:.2f} {_judged(ready)}): all coefficients are 0"
        )
    elif not wishes.quiet:
        output.note(f"zero-shot {before:.2f} -> learned {after:.2f} {_judged(ready)}")
    if wishes.as_json:
        output.emit(
            {
                "atlas": __version__,
                "zero_shot": verdict.before.accuracy,
                "learned": verdict.after.accuracy,
                "improved": verdict.improved,
                "select": ready.inputs.recipe.select,
                "config": ready.config(),
                "coefficients": None if ready.large else ready.table(verdict.coefficients),
            },
            as_json=True,
        )
    else:
        output.write(text)
