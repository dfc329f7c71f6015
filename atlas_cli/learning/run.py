"""A run of a learning verb, from a checked recipe to its result. Nothing here imports torch early.

A verb says in its own way what to open, what to learn and what to report; `learn` does the rest.
Whoever calls gets events while it works, and may ask it to stop after the step at hand.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from atlas_cli import __version__
from atlas_cli.datasets.dataset import Dataset, check_templates, open_dataset, share_of
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.learning.events import (
    Listener,
    Noted,
    PhaseStarted,
    Planned,
    StepTaken,
    TrainingEnded,
    TrainingStarted,
    Warned,
    agreed,
    ignore,
)
from atlas_cli.learning.results import SAYS_LITTLE, LearningResult, Report
from atlas_cli.recipes.model import UNIT, in_percent, parse_shots
from atlas_cli.recipes.text import write_recipe
from atlas_cli.sources.locate import (
    Source,
    VectorName,
    check_architecture,
    check_vectors,
    locate,
    name_vectors,
    parse_reference,
)

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.batches import Step
    from atlas_cli.learning.loop import Checkpoint, Objective
    from atlas_cli.learning.run_folder import RunFolder
    from atlas_cli.learning.selection import Policy, Selection, TestScore
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.models.clip import Opening
    from atlas_cli.recipes.finetune import FinetuneRecipe
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.learning import LearnRecipe
    from atlas_cli.vectors.pool import GatheredVector


@dataclass(frozen=True)
class RunOptions:
    """What concerns this run only; `skip_broken`, `precision` and `compile` may change results."""

    folder: Path | None = None
    resume: bool = False
    force: bool = False
    threads: int | None = None
    device: str = "auto"
    keep_downloads: bool = False
    workers: int | None = None  # that decode images
    skip_broken: bool = False
    log: Sequence[str] | None = None  # trackers that are told of every step
    shard_vectors: bool = False  # of several processes, each holds a part of the vectors
    precision: str = "auto"  # of forward and backward passes
    device_memory: str | None = None  # for vectors; beyond it they stay on the host
    compile: bool = False  # the passes, by torch.compile

    def check(self) -> None:
        if self.resume and self.folder is None:
            raise UsageError("--resume goes on with the run in -o DIR; name it")
        if self.log:
            from atlas_cli.learning.trackers import check_trackers

            check_trackers(self.log, self.folder)

    @property
    def cores(self) -> int:
        """How many threads may work."""
        return self.threads or os.cpu_count() or 1


@dataclass(frozen=True)
class RunInputs:
    """What a verb is given, with every name resolved. `judges` are images to score on."""

    command: str
    recipe: Any  # of the verb's own kind
    model: Source
    vectors: tuple[VectorName, ...]
    datasets: tuple[Dataset, ...]
    judges: tuple[Dataset, ...]
    opening: Opening
    options: RunOptions
    files: tuple[GatheredVector, ...] | tuple[str, ...] = ()  # of the vectors, once gathered


class LearningVerb(ABC):
    """What a verb that learns coefficients does in its own way."""

    name: ClassVar[str]
    measure: ClassVar[str] = "top1"  # what a step's accuracy is called
    labelled: ClassVar[bool] = True
    farthest: ClassVar[float] = 1.0  # of the uniform scales that are searched

    recipe: Any  # of its own kind

    @abstractmethod
    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The images to learn from, and others to score on."""

    @abstractmethod
    def objective(self, setup: Setup) -> tuple[Objective, Policy]:
        """What is learned, and which coefficients are kept."""

    @contextmanager
    def vectors_made(self, inputs: RunInputs, folder: Path | None) -> Iterator[RunInputs]:
        """The inputs with other vectors, written into the run's folder, if some must be made."""
        yield inputs

    @property
    def trains(self) -> bool:
        """Whether there are steps to take."""
        return True

    def needs_folder(self, ready: PreparedRun) -> str | None:
        """What the result holds that does not go into one text, if anything."""
        return "there are too many coefficients for one text" if ready.large else None

    def complete(self, ready: PreparedRun, selection: Selection) -> Selection:
        """The selection with what is still worked out once the coefficients are known."""
        return selection

    def check(self, ready: PreparedRun) -> None:  # noqa: B027 (most have nothing to check)
        """Raise UsageError if what is asked for cannot be done with what was opened."""

    def scales(self, ready: PreparedRun) -> Iterator[torch.Tensor]:
        """Tables of one scale for everything."""
        return ready.setup.scales(self.farthest)

    def learned(
        self, ready: PreparedRun, selection: Selection, folder: RunFolder | None
    ) -> LearnedRecipe:
        """The recipe that merges what was learned."""
        coefficients = selection.coefficients
        file = folder.keep_large(coefficients) if folder and ready.large else None
        return ready.learned(coefficients, file)

    def untested(self, ready: PreparedRun) -> tuple[str, ...]:
        """What to add to the scores where no test images were scored."""
        return (SAYS_LITTLE,) if self.labelled and self.recipe.select in ("last", "same") else ()

    @abstractmethod
    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """What came out; in brief, since someone waits, only what takes no time."""


# Opening --------------------------------------------------------------------------------------


def resolve(verb: LearningVerb, options: RunOptions, on_event: Listener = ignore) -> RunInputs:
    """Turn every name into what it names, before torch is imported."""
    recipe = verb.recipe
    check_model(recipe)
    check_vectors(recipe.vectors)
    datasets, judges = verb.open_data()
    if options.skip_broken:
        from atlas_cli.datasets.broken import without_broken

        datasets = without_broken(datasets, options.workers, warner(on_event))
        judges = without_broken(judges, options.workers, warner(on_event))
    vectors = tuple(name_vectors(recipe.vectors, lambda text: on_event(Noted(text))))
    source, opening = find_model(recipe, options)
    return RunInputs(verb.name, recipe, source, vectors, datasets, judges, opening, options)


def warner(on_event: Listener) -> Callable[[str], None]:
    """What tells a listener of warnings."""
    return lambda text: on_event(Warned(text))


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


def open_tasks(
    recipe: LearnRecipe, names: Sequence[str]
) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
    """The images of several tasks and, to select by val, the val splits of the same."""
    if recipe.select != "val":
        return tuple(open_labelled(recipe, name, ("val", "train")) for name in names), ()
    if recipe.split == "val":
        raise UsageError("--select val judges by the val split; learn from another --split")
    judged = recipe.model_copy(update={"split": "val", "shots": "all"})
    tasks = tuple(open_labelled(recipe, name, ("train",)) for name in names)
    return tasks, tuple(open_labelled(judged, name) for name in names)


def open_labelled(
    recipe: LearnRecipe | FinetuneRecipe, name: str, preferred: tuple[str, ...] = ("train",)
) -> Dataset:
    """Labelled images to learn from, as many of each class as the recipe wants."""
    templates = check_templates(recipe.templates, "templates")
    shots = parse_shots(recipe.shots)
    dataset = open_dataset(
        name,
        split=recipe.split,
        templates=templates,
        preferred=preferred,
        shots=shots if isinstance(shots, int) else None,
        seed=recipe.seed,
    )
    if not dataset.labelled:
        raise DataError(f"{dataset.name}: has no labels; a sub-folder per class is needed")
    if len(dataset.classes) < 2:
        raise DataError(f"{dataset.name}: has one class only; there is nothing to tell apart")
    return share_of(dataset, shots, recipe.seed) if isinstance(shots, float) else dataset


@contextmanager
def prepare(
    verb: LearningVerb, options: RunOptions, on_event: Listener = ignore
) -> Iterator[PreparedRun]:
    """Resolve and open everything that a verb works with."""
    options.check()
    on_event(PhaseStarted("finding the model and the images"))
    inputs = resolve(verb, options, on_event)

    from atlas_cli.learning.run_folder import check_folder
    from atlas_cli.learning.setup import gathered, prepared  # torch is slow: only with good inputs

    if options.folder:
        check_folder(options.folder, resume=options.resume, force=options.force)
    on_event(PhaseStarted("opening the model and the vectors"))
    warn = warner(on_event)
    files = gathered(inputs, lambda text: on_event(Noted(text)), warn)
    with (
        verb.vectors_made(replace(inputs, files=files), options.folder) as given,
        prepared(given, verb.objective, warn) as ready,
    ):
        verb.check(ready)
        yield ready


# Learning -------------------------------------------------------------------------------------


def learn(
    verb: LearningVerb, options: RunOptions, on_event: Listener, stop: Callable[[], bool]
) -> LearningResult:
    """Check everything, learn, and write the folder if there is one; all of it or nothing."""
    with prepare(verb, options, on_event) as ready:
        from atlas_cli.learning.run_folder import open_folder
        from atlas_cli.learning.selection import score_test_images

        on_event(Planned(*ready.plan()))
        if options.folder is None and (reason := verb.needs_folder(ready)):
            raise UsageError(f"{reason}; give a folder with -o DIR")
        on_event(PhaseStarted("hashing the images"))
        with open_folder(options.folder, ready.config, options, ready.inputs.recipe) as folder:
            try:
                stop = agreed(stop) if "RANK" in os.environ else stop
                selection = _selected(verb, ready, folder, options, on_event, stop)
                selection = verb.complete(ready, selection)
                stopped = stop()
                on_event(PhaseStarted("scoring what was learned"))
                report = verb.report(ready, selection, brief=stopped)
                tested: tuple[TestScore, ...] = ()
                if folder and verb.labelled and not stopped:
                    on_event(PhaseStarted("scoring test images"))
                    found = score_test_images(ready, selection, warner(on_event))
                    folder.write_images(ready.inputs.datasets, found)
                    tested = tuple(one.score for one in found)
                return _finished(verb, ready, folder, selection, report, tested, stopped=stopped)
            except AtlasError:
                if folder:
                    folder.abandon()
                raise


def _selected(
    verb: LearningVerb,
    ready: PreparedRun,
    folder: RunFolder | None,
    options: RunOptions,
    on_event: Listener,
    stop: Callable[[], bool],
) -> Selection:
    """The coefficients that training or a search finds."""
    from atlas_cli.learning.loop import CoefficientTrainer, train
    from atlas_cli.learning.selection import Selection

    if not verb.trains:
        fold, zero = ready.policy.folds[0], ready.setup.table()
        scored = fold.scored_on is not None or ready.setup.judges
        return Selection(zero, ready.objective.judge(fold, zero) if scored else None, None)
    if verb.recipe.method == "search":
        from atlas_cli.learning.baselines import search_tables

        def tried() -> Iterator[torch.Tensor]:
            for table in verb.scales(ready):
                if stop():
                    return
                yield table

        on_event(PhaseStarted("searching for the best uniform scale"))
        with training(on_event):
            return search_tables(ready.objective, ready.policy.folds[0], tried())
    trainer = CoefficientTrainer(ready.objective, ready.policy, verb.measure)

    def on_step(checkpoint: Checkpoint, step: Step | None) -> None:
        if step:
            on_event(StepTaken(step, trainer.batch_size, verb.measure))
            if setback := str(step):
                on_event(Warned(setback))

    with training(on_event, trainer.steps, verb.recipe.epochs):
        checkpoint = train(trainer, folder, resume=options.resume, stop=stop, on_checkpoint=on_step)
        return trainer.select(checkpoint)


@contextmanager
def training(on_event: Listener, steps: int | None = None, epochs: int = 0) -> Iterator[None]:
    """Announce that training starts, and that it ended, however it did."""
    on_event(TrainingStarted(steps, epochs))
    try:
        yield
    finally:
        on_event(TrainingEnded())


def _finished(
    verb: LearningVerb,
    ready: PreparedRun,
    folder: RunFolder | None,
    selection: Selection,
    report: Report,
    tested: tuple[TestScore, ...],
    *,
    stopped: bool,
) -> LearningResult:
    """The result, also in the folder: there with every class, if there are labels and time."""
    from atlas_cli.learning.selection import by_class

    recorded = {
        "unit": UNIT,
        **report.facts,
        "improved": selection.improved,
        "select": ready.inputs.recipe.select,
        **({"test": [dataclasses.asdict(one) for one in tested]} if tested else {}),
    }
    recipe = verb.learned(ready, selection, folder)
    text = write_recipe(recipe, f"Learned by atlas {__version__} {report.comment}")
    if folder:
        classes = {}
        if verb.labelled and not stopped:
            classes = {"classes": by_class(ready, selection)}
        table = recipe.coefficients if isinstance(recipe.coefficients, dict) else None
        folder.finish(text, table, {**recorded, **classes})
    coefficients = None if ready.unnamed else ready.table(selection.coefficients)
    return LearningResult(
        recipe=recipe,
        text=text,
        coefficients=coefficients,
        improved=selection.improved,
        before=in_percent(selection.before.values) if selection.before else None,
        after=in_percent(selection.after.values) if selection.after else None,
        facts={**recorded, "config": ready.config, "coefficients": coefficients},
        notes=(*report.notes, *(map(str, tested) if tested else verb.untested(ready))),
        details=report.details,
        tests=tested,
        rows=report.rows,
        failed=report.failed,
        folder=folder.folder if folder else None,
        stopped=stopped,
    )
