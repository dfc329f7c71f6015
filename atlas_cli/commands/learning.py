"""What every learning command does: checks, a run that can be stopped, the result."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from atlas_cli import __version__
from atlas_cli.commands import output
from atlas_cli.commands.input import read_text
from atlas_cli.commands.learning_options import Wishes
from atlas_cli.commands.steps import stoppable, walk
from atlas_cli.data import Dataset, check_templates, few_shot, open_dataset, share_of
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.finetune_recipe import FinetuneRecipe
from atlas_cli.learning_recipe import LearnRecipe, learning_recipe, parse_shots
from atlas_cli.recipe import read_keys, write_recipe
from atlas_cli.sources import Source, check_architecture, locate, parse_reference
from atlas_cli.vector_files import expand_vectors

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning import Inputs, Lesson, Prepared
    from atlas_cli.models import Opening
    from atlas_cli.recipe import LearnedRecipe
    from atlas_cli.runs import Run
    from atlas_cli.selection import Verdict


@dataclass(frozen=True)
class Result:
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


class Command(ABC):
    """What a learning command does in its own way. `many` says whether it takes many data."""

    name: ClassVar[str]
    schema: ClassVar[type[LearnRecipe]]
    many: ClassVar[bool] = True
    measure: ClassVar[str] = "accuracy"  # what is told of the images of a step
    labelled: ClassVar[bool] = True

    @abstractmethod
    def open_data(self, recipe: Any) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The images to learn from, and others to select on."""

    @abstractmethod
    def lesson(self) -> Lesson:
        """What makes the objective; asked for once torch may be imported."""

    @contextmanager
    def vectors_made(self, inputs: Inputs, folder: Path | None) -> Iterator[Inputs]:
        """The inputs with other vectors, written into the run's folder, if some have to be made."""
        yield inputs

    def check(self, ready: Prepared) -> None:  # noqa: B027 (most have nothing to check)
        """Raise UsageError if what is asked for cannot be done with what was opened."""

    def tables(self, ready: Prepared) -> Iterator[torch.Tensor] | None:
        """The tables to search through, if nothing is learned by descent."""
        return None

    def learned(self, ready: Prepared, verdict: Verdict, folder: Run | None) -> LearnedRecipe:
        """The recipe that merges what was learned."""
        file = folder.keep_large(verdict.coefficients) if folder and ready.large else None
        return ready.learned(verdict.coefficients, file)

    @abstractmethod
    def result(self, ready: Prepared, verdict: Verdict, *, brief: bool) -> Result:
        """What came out; in brief, since someone waits, only what takes no time."""


def run(command: Command, data: Sequence[str], flags: Mapping[str, Any], wishes: Wishes) -> None:
    """Check everything, learn, and print the learned recipe."""
    recipe = plan_recipe(command, data, flags)
    if wishes.resume and wishes.folder is None:
        raise UsageError("--resume goes on with the run in -o DIR; name it")
    inputs = resolve(command, recipe, wishes)

    from atlas_cli.learning import prepared  # torch is slow: only with good inputs
    from atlas_cli.runs import check_folder

    if wishes.folder:
        check_folder(wishes.folder, resume=wishes.resume, force=wishes.force)
    with (
        command.vectors_made(inputs, wishes.folder) as given,
        prepared(given, command.lesson(), output.warn) as ready,
    ):
        command.check(ready)
        if not wishes.quiet:
            _say_plan(ready)
        text, result, stopped = _learn(command, ready, wishes)
    _show(text, result, wishes)
    if stopped:
        raise typer.Exit(130)
    if result.failed:
        raise AtlasError(result.failed)


def plan_recipe(command: Command, data: Sequence[str], flags: Mapping[str, Any]) -> LearnRecipe:
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


def resolve(command: Command, recipe: LearnRecipe, wishes: Wishes) -> Inputs:
    """Every name turned into what it names, before torch is imported."""
    check_model(recipe)
    vectors = tuple(expand_vectors(recipe.vectors))
    datasets, judges = command.open_data(recipe)
    source, opening = find_model(recipe, wishes)

    from atlas_cli.learning import Inputs

    threads = cores(wishes)
    return Inputs(command.name, recipe, source, vectors, datasets, judges, opening, threads)


def check_model(recipe: LearnRecipe | FinetuneRecipe) -> None:
    """Raise UsageError if a recipe names a model that cannot be one. Nothing is fetched yet."""
    parse_reference(recipe.model)
    if recipe.text:
        parse_reference(recipe.text)
    check_architecture(recipe.arch)


def find_model(recipe: LearnRecipe | FinetuneRecipe, wishes: Wishes) -> tuple[Source, Opening]:
    """The files of the base model, and how it is opened."""
    source = locate(parse_reference(recipe.model))
    text = locate(parse_reference(recipe.text)) if recipe.text else None

    from atlas_cli.models import Opening

    return source, Opening(recipe.arch, text, wishes.device)


def cores(wishes: Wishes) -> int:
    """How many threads may work."""
    return wishes.threads or os.cpu_count() or 1


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


def _say_plan(ready: Prepared) -> None:
    pool, recipe = ready.pool, ready.inputs.recipe
    rows, columns = ready.setting.tower.composition.shape
    if not pool.members:
        output.note(f"{columns} numbers of LayerNorms are tuned")
        return
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


def _learn(command: Command, ready: Prepared, wishes: Wishes) -> tuple[str, Result, bool]:
    """Learn, and write the folder if there is one. A failure leaves nothing half-written."""
    from atlas_cli.resuming import Descents
    from atlas_cli.runs import open_run
    from atlas_cli.selection import settle

    folder = None
    if ready.large and wishes.folder is None:
        raise UsageError("there are too many coefficients for one text; give a folder with -o DIR")
    if wishes.folder:
        folder = open_run(wishes.folder, ready.config(), resume=wishes.resume)
    try:
        with stoppable() as stop:
            if tables := command.tables(ready):
                verdict = _search(ready, tables, folder, stop)
            else:
                course = Descents(ready.material, ready.plan, command.measure)
                moment = walk(course, folder, wishes, stop, measure=command.measure)
                verdict = settle(ready.material, ready.plan, moment)
        result = command.result(ready, verdict, brief=bool(stop))
        if folder and command.labelled and not stop:
            result = _with_classes(ready, verdict, result)
        return _write(command, ready, folder, verdict, result), result, bool(stop)
    except AtlasError:
        if folder:
            folder.abandon()
        raise


def _search(
    ready: Prepared, tables: Iterator[torch.Tensor], folder: Run | None, stop: list[int]
) -> Verdict:
    """The best of some tables, until someone stops it."""
    from atlas_cli.selection import choose

    def tried() -> Iterator[torch.Tensor]:
        for table in tables:
            if stop:
                return
            yield table

    return choose(ready.material, ready.plan[0], tried())


# The result -----------------------------------------------------------------------------------


def _with_classes(ready: Prepared, verdict: Verdict, result: Result) -> Result:
    from atlas_cli.classwise import by_class

    return dataclasses.replace(result, classes=by_class(ready, verdict.coefficients))


def _write(
    command: Command, ready: Prepared, folder: Run | None, verdict: Verdict, result: Result
) -> str:
    """The learned recipe, also in the folder."""
    recipe = command.learned(ready, verdict, folder)
    table = recipe.coefficients if isinstance(recipe.coefficients, dict) else None
    text = write_recipe(recipe, f"Learned by atlas {__version__} {result.comment}")
    if folder:
        folder.finish(text, table, result.record())
    return text


def _show(text: str, result: Result, wishes: Wishes) -> None:
    for line in result.notes:
        output.note(line)
    if result.rows and not wishes.quiet:
        output.tell_table(result.rows)
    if wishes.as_json:
        output.emit({"atlas": __version__, **result.facts}, as_json=True)
    else:
        output.write(text)


def facts_of(ready: Prepared, verdict: Verdict) -> dict[str, object]:
    """What the JSON of every command holds."""
    return {
        "improved": verdict.improved,
        "select": ready.inputs.recipe.select,
        "config": ready.config(),
        "coefficients": None if ready.unnamed else ready.table(verdict.coefficients),
    }


def source_of(ready: Prepared) -> str:
    """What was learned from, in a few words."""
    inputs = ready.inputs
    images = sum(len(dataset.samples) for dataset in inputs.datasets)
    names = ", ".join(dataset.name for dataset in inputs.datasets)
    return f"from {images} images of {names}, seed {inputs.recipe.seed}."
