"""Steps of learning as a command takes them: shown, recorded, saved, and stopped when asked."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import read_text
from atlas_cli.cli.options import RunOptions
from atlas_cli.datasets.dataset import Dataset, check_templates, few_shot, open_dataset, share_of
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.recipes.finetune import FinetuneRecipe
from atlas_cli.recipes.learning import LearnRecipe, learning_recipe, parse_shots
from atlas_cli.recipes.reading import read_keys, write_recipe
from atlas_cli.sources.locate import Source, locate
from atlas_cli.sources.references import check_architecture, expand_vectors, parse_reference

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.loop import Step
    from atlas_cli.learning.run_folder import RunFolder, SavedRun
    from atlas_cli.learning.selection import Selection
    from atlas_cli.learning.setup import Inputs, ObjectiveFactory, PreparedRun
    from atlas_cli.models.clip import Opening
    from atlas_cli.recipes.reading import LearnedRecipe


@dataclass(frozen=True)
class RunResult:
    """What a command says of its result: for the recipe's comment, for people, and as JSON."""

    comment: str
    notes: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    rows: Sequence[Mapping[str, str]] = ()
    failed: str | None = None
    classes: Sequence[Mapping[str, object]] = ()

    def record(self) -> dict[str, object]:
        """What a run keeps: the facts that are in no other file, and every class if counted."""
        kept = {k: v for k, v in self.facts.items() if k not in ("config", "coefficients")}
        return {**kept, "classes": self.classes} if self.classes else kept


class LearningCommand(ABC):
    """What a learning command does in its own way. `many` says whether it takes many data."""

    name: ClassVar[str]
    schema: ClassVar[type[LearnRecipe]]
    many: ClassVar[bool] = True
    measure: ClassVar[str] = "accuracy"  # what is told of the images of a step
    labelled: ClassVar[bool] = True
    farthest: ClassVar[float] = 1.0  # of the uniform scales that are searched through

    @abstractmethod
    def open_data(self, recipe: Any) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The images to learn from, and others to select on."""

    @abstractmethod
    def objective_factory(self) -> ObjectiveFactory:
        """What makes the objective; asked for once torch may be imported."""

    @contextmanager
    def vectors_made(self, inputs: Inputs, folder: Path | None) -> Iterator[Inputs]:
        """The inputs with other vectors, written into the run's folder, if some have to be made."""
        yield inputs

    def check(self, ready: PreparedRun) -> None:  # noqa: B027 (most have nothing to check)
        """Raise UsageError if what is asked for cannot be done with what was opened."""

    def tables(self, ready: PreparedRun) -> Iterator[torch.Tensor] | None:
        """The tables to search through, if nothing is learned by descent: uniform scales."""
        return self.scales(ready) if ready.inputs.recipe.method == "search" else None

    def scales(self, ready: PreparedRun) -> Iterator[torch.Tensor]:
        """Tables of one scale for everything."""
        return ready.setting.scales(self.farthest)

    def learned(
        self, ready: PreparedRun, selection: Selection, folder: RunFolder | None
    ) -> LearnedRecipe:
        """The recipe that merges what was learned."""
        file = folder.keep_large(selection.coefficients) if folder and ready.large else None
        return ready.learned(selection.coefficients, file)

    @abstractmethod
    def result(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> RunResult:
        """What came out; in brief, since someone waits, only what takes no time."""


def run(
    command: LearningCommand, data: Sequence[str], flags: Mapping[str, Any], options: RunOptions
) -> None:
    """Check everything, learn, and print the learned recipe."""
    recipe = plan_recipe(command, data, flags)
    if options.resume and options.folder is None:
        raise UsageError("--resume goes on with the run in -o DIR; name it")
    inputs = resolve(command, recipe, options)

    from atlas_cli.learning.run_folder import check_folder
    from atlas_cli.learning.setup import prepared  # torch is slow: only with good inputs

    if options.folder:
        check_folder(options.folder, resume=options.resume, force=options.force)
    with (
        command.vectors_made(inputs, options.folder) as given,
        prepared(given, command.objective_factory(), console.warn) as ready,
    ):
        command.check(ready)
        if not options.quiet:
            _say_plan(ready)
        text, result, stopped = _learn(command, ready, options)
    _show(text, result, options)
    if stopped:
        raise typer.Exit(130)
    if result.failed:
        raise AtlasError(result.failed)


def plan_recipe(
    command: LearningCommand, data: Sequence[str], flags: Mapping[str, Any]
) -> LearnRecipe:
    """What to learn: the recipe, if there is one, with the flags laid over it."""
    keys, where = given_keys(command.schema, data, flags, many=command.many)
    return learning_recipe(command.schema, keys, where)


def given_keys(
    schema: type, data: Sequence[str], flags: Mapping[str, Any], *, many: bool
) -> tuple[dict[str, Any], str]:
    """The keys of a recipe, or of the flags alone, and what errors put before their names."""
    if len(data) == 1 and (data[0] == "-" or data[0].endswith((".yaml", ".yml"))):
        return {**read_keys(schema, *read_text(data[0])), **flags}, ""
    required = [
        field.name
        for field in dataclasses.fields(schema)
        if field.default is field.default_factory is dataclasses.MISSING and field.name != "data"
    ]
    for key in required:
        if not flags.get(key):
            raise UsageError(f"no {key} given; for example {_EXAMPLES[key]}")
    return {"data": list(data) if many else data[0], **flags}, "--"


_EXAMPLES = {
    "model": "--model builtin:tiny",
    "vectors": "--vectors v/",
    "control": "--control builtin:everything",
}


def resolve(command: LearningCommand, recipe: LearnRecipe, options: RunOptions) -> Inputs:
    """Every name turned into what it names, before torch is imported."""
    check_model(recipe)
    vectors = tuple(expand_vectors(recipe.vectors))
    datasets, judges = command.open_data(recipe)
    source, opening = find_model(recipe, options)

    from atlas_cli.learning.setup import Inputs

    threads = cores(options)
    return Inputs(command.name, recipe, source, vectors, datasets, judges, opening, threads)


def check_model(recipe: LearnRecipe | FinetuneRecipe) -> None:
    """Raise UsageError if a recipe names a model that cannot be one. Nothing is fetched yet."""
    parse_reference(recipe.model)
    if recipe.text:
        parse_reference(recipe.text)
    check_architecture(recipe.arch)


def find_model(recipe: LearnRecipe | FinetuneRecipe, options: RunOptions) -> tuple[Source, Opening]:
    """The files of the base model, and how it is opened."""
    source = locate(parse_reference(recipe.model))
    text = locate(parse_reference(recipe.text)) if recipe.text else None

    from atlas_cli.models.clip import Opening

    return source, Opening(recipe.arch, text, options.device)


def cores(options: RunOptions) -> int:
    """How many threads may work."""
    return options.threads or os.cpu_count() or 1


def open_tasks(
    recipe: LearnRecipe, names: Sequence[str]
) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
    """The images of several tasks and, to select by val, the val splits of the same."""
    if recipe.select != "val":
        return tuple(open_labelled(recipe, name, ("val", "train")) for name in names), ()
    if recipe.split == "val":
        raise UsageError("--select val judges by the val split; learn from another --split")
    judged = dataclasses.replace(recipe, split="val", shots="all")
    tasks = tuple(open_labelled(recipe, name, ("train",)) for name in names)
    return tasks, tuple(open_labelled(judged, name) for name in names)


def open_labelled(
    recipe: LearnRecipe | FinetuneRecipe, name: str, preferred: tuple[str, ...] = ("train",)
) -> Dataset:
    """Labelled images to learn from, as many of each class as the recipe wants."""
    templates = check_templates(recipe.templates, "templates")
    dataset = open_dataset(name, split=recipe.split, templates=templates, preferred=preferred)
    if not dataset.labelled:
        raise DataError(f"{dataset.name}: has no labels; a sub-folder per class is needed")
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.name}: has one class only; there is nothing to tell apart")
    shots = parse_shots(recipe.shots)
    if shots is None:
        return dataset
    if isinstance(shots, float):
        return share_of(dataset, shots, recipe.seed)
    return few_shot(dataset, shots, recipe.seed)


# Learning -------------------------------------------------------------------------------------


def _say_plan(ready: PreparedRun) -> None:
    pool, recipe = ready.pool, ready.inputs.recipe
    rows, columns = ready.setting.tower.composition.shape
    if not pool.members:
        console.note(f"{columns} numbers of LayerNorms are tuned")
        return
    kept = f"{pool.bytes / 1e6:.1f} MB in memory, {pool.storage}"
    if pool.storage == "mapped":
        kept = f"read from their files each step, since they exceed --memory {recipe.memory}"
    elif pool.storage != "as stored":
        kept = f"{pool.bytes / 1e6:.1f} MB in memory as {pool.storage} (--memory {recipe.memory})"
    console.note(f"{rows} vectors x {columns} coefficients; vectors: {kept}")
    if pool.left:
        console.note(
            f"{len(pool.left)} blocks stay those of the base, such as {pool.left[0]}: "
            "they are no parameters"
        )


def _learn(
    command: LearningCommand, ready: PreparedRun, options: RunOptions
) -> tuple[str, RunResult, bool]:
    """Learn, and write the folder if there is one. A failure leaves nothing half-written."""
    from atlas_cli.learning.run_folder import CoefficientTrainer, open_run
    from atlas_cli.learning.selection import select_coefficients

    folder = None
    if ready.large and options.folder is None:
        raise UsageError("there are too many coefficients for one text; give a folder with -o DIR")
    if options.folder:
        folder = open_run(options.folder, ready.config(), resume=options.resume)
    try:
        with stoppable() as stop:
            if tables := command.tables(ready):
                selection = _search(ready, tables, folder, stop)
            else:
                course = CoefficientTrainer(ready.objective, ready.plan, command.measure)
                checkpoint = walk(course, folder, options, stop, measure=command.measure)
                selection = select_coefficients(ready.objective, ready.plan, checkpoint)
        result = command.result(ready, selection, brief=bool(stop))
        if folder and command.labelled and not stop:
            result = _with_classes(ready, selection, result)
        return _write(command, ready, folder, selection, result), result, bool(stop)
    except AtlasError:
        if folder:
            folder.abandon()
        raise


def _search(
    ready: PreparedRun, tables: Iterator[torch.Tensor], folder: RunFolder | None, stop: list[int]
) -> Selection:
    """The best of some tables, until someone stops it."""
    from atlas_cli.learning.selection import search_tables

    def tried() -> Iterator[torch.Tensor]:
        for table in tables:
            if stop:
                return
            yield table

    return search_tables(ready.objective, ready.plan[0], tried())


# The result -----------------------------------------------------------------------------------


def _with_classes(ready: PreparedRun, selection: Selection, result: RunResult) -> RunResult:
    from atlas_cli.learning.per_class import by_class

    return dataclasses.replace(result, classes=by_class(ready, selection.coefficients))


def _write(
    command: LearningCommand,
    ready: PreparedRun,
    folder: RunFolder | None,
    selection: Selection,
    result: RunResult,
) -> str:
    """The learned recipe, also in the folder."""
    recipe = command.learned(ready, selection, folder)
    table = recipe.coefficients if isinstance(recipe.coefficients, dict) else None
    text = write_recipe(recipe, f"Learned by atlas {__version__} {result.comment}")
    if folder:
        folder.finish(text, table, result.record())
    return text


def _show(text: str, result: RunResult, options: RunOptions) -> None:
    for line in result.notes:
        console.note(line)
    if result.rows and not options.quiet:
        console.tell_table(result.rows)
    if options.as_json:
        console.emit({"atlas": __version__, **result.facts}, as_json=True)
    else:
        console.write(text)


def facts_of(ready: PreparedRun, selection: Selection) -> dict[str, object]:
    """What the JSON of every command holds."""
    return {
        "improved": selection.improved,
        "select": ready.inputs.recipe.select,
        "config": ready.config(),
        "coefficients": None if ready.unnamed else ready.table(selection.coefficients),
    }


def source_of(ready: PreparedRun) -> str:
    """What was learned from, in a few words."""
    inputs = ready.inputs
    images = sum(len(dataset.samples) for dataset in inputs.datasets)
    names = ", ".join(dataset.name for dataset in inputs.datasets)
    return f"from {images} images of {names}, seed {inputs.recipe.seed}."


_SAVE_EVERY = 1.0  # seconds, or if saving takes long:
_SAVE_SHARE = 0.02  # of the time

State = TypeVar("State")


class Trainer(Protocol[State]):
    """A way of learning: where it begins, what comes after, and how that is written down."""

    @property
    def steps(self) -> int:
        """How many steps there are from beginning to end."""

    @property
    def batch_size(self) -> int:
        """The images of a step."""

    def begin(self) -> State:
        """Before the first step."""

    def learn(self, checkpoint: State, /) -> Iterator[State]:
        """What comes after a moment, step by step."""

    def step_of(self, checkpoint: State, /) -> Step:
        """The last step."""

    def is_over(self, checkpoint: State, /) -> bool:
        """Whether there is nothing more to learn."""

    def row(self, checkpoint: State, /) -> dict[str, object]:
        """One line of metrics.jsonl."""

    def to_saved(self, checkpoint: State, /) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a run's folder keeps of a moment."""

    def from_saved(self, saved: SavedRun, /) -> State:
        """The moment that was saved."""


def walk(
    course: Trainer[State],
    folder: RunFolder | None,
    options: RunOptions,
    stop: list[int],
    *,
    measure: str = "accuracy",
    heard: Callable[[State], None] = lambda checkpoint: None,
) -> State:
    """Take steps until the end, or until someone stops it. `heard` is told of every moment."""
    saved = folder.restore() if folder and options.resume else None
    start = checkpoint = course.from_saved(saved) if saved else course.begin()
    heard(checkpoint)
    clock, pause = time.monotonic(), _SAVE_EVERY
    with console.training(course.steps, quiet=options.quiet) as show:
        for checkpoint in course.learn(start):
            step = course.step_of(checkpoint)
            show(f"loss {step.loss:.3f}  {measure} {100 * step.accuracy:.1f}", course.batch_size)
            heard(checkpoint)
            if folder:
                folder.record(course.row(checkpoint))
                began = time.monotonic()
                if began - clock > pause or course.is_over(checkpoint):
                    folder.save(*course.to_saved(checkpoint))
                    clock = time.monotonic()
                    pause = max(_SAVE_EVERY, (clock - began) / _SAVE_SHARE)
            if stop:
                break
    if folder and checkpoint is not start and not course.is_over(checkpoint):
        folder.save(*course.to_saved(checkpoint))  # stopped, or its last stage had no step to take
    return checkpoint


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
