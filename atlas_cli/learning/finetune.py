"""finetune: train the image tower of a model on each of some tasks, and write its task vectors."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.datasets.dataset import Dataset, expand_references, has_split, task_name
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.learning.events import (
    EpochScored,
    Listener,
    PhaseStarted,
    Planned,
    StepTaken,
    TaskFinished,
    Warned,
    agreed,
    ignore,
    never,
)
from atlas_cli.learning.run import (
    RunInputs,
    RunOptions,
    check_model,
    find_model,
    open_labelled,
    training,
    warner,
)
from atlas_cli.recipes.model import UNIT, as_percent
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.targets import VectorTarget, check_targets

if TYPE_CHECKING:
    from atlas_cli.learning.batches import Step
    from atlas_cli.learning.weights import FinetuneCheckpoint, WeightTrainer
    from atlas_cli.recipes.finetune import FinetuneRecipe


@dataclass(frozen=True)
class VectorOutput:
    """Where task vectors are to go: a file for one, or a folder for all."""

    vector: Path | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class FinetuneTask:
    """A task to train on, the images that score it, and where its results go."""

    name: str
    dataset: Dataset
    judges: tuple[Dataset, ...]
    folder: Path | None
    target: VectorTarget

    @property
    def scored_on(self) -> str:
        return "of the val split" if self.judges else "held out of the training images"


@dataclass(frozen=True)
class Finetuned:
    """A model that was trained on a task. Shown as the paths of what was written, or as JSON.

    Accuracies are in percent: zero-shot, of what is kept, and of zero-shot and every epoch.
    """

    data: str
    model: str | None
    adapter: str | None
    vector: str | None
    zero_shot: float | None
    accuracy: float | None
    accuracies: list[float]
    steps: int
    config: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(path for path in (self.model, self.adapter, self.vector) if path)


@dataclass(frozen=True)
class FinetuneResult:
    """The tasks that were finished; `stopped` says where it was stopped, if it was."""

    tasks: tuple[Finetuned, ...]
    stopped: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))


def finetune(
    recipe: FinetuneRecipe,
    options: RunOptions | None = None,
    *,
    vectors: VectorOutput | None = None,
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> FinetuneResult:
    """Train the image tower of a model on each task with its zero-shot head frozen.

    Models and adapters go to the folder of the options, task vectors to where `vectors` says.
    """
    options, vectors = options or RunOptions(), vectors or VectorOutput()
    options.check()
    stop = agreed(stop) if "RANK" in os.environ else stop
    if not (options.folder or vectors.vector or vectors.folder):
        raise UsageError("nothing would be kept; give -o DIR, --vector FILE or --vectors-dir DIR")
    check_model(recipe)
    tasks = list(_tasks(recipe, vectors, options, on_event))
    _check_names(tasks)
    check_targets([task.target for task in tasks], force=options.force or options.resume)
    source, opening = find_model(recipe, options)
    results: list[Finetuned] = []
    with _folder_of_all(tasks, options):
        for task in tasks:
            own = recipe.model_copy(update={"data": [task.dataset.name]})
            datasets = (task.dataset,)
            inputs = RunInputs("finetune", own, source, (), datasets, task.judges, opening, options)
            found, note = _finetune(task, inputs, options, on_event, stop)
            if found:
                results.append(found)
                on_event(TaskFinished(found))
            if stop():
                return FinetuneResult(tuple(results), True, (note,) if note else ())
    return FinetuneResult(tuple(results), False)


# Before anything is trained -------------------------------------------------------------------


def _tasks(
    recipe: FinetuneRecipe, vectors: VectorOutput, options: RunOptions, on_event: Listener
) -> Iterator[FinetuneTask]:
    """The tasks with their images."""
    names = expand_references(recipe.data)
    if len(names) > 1 and vectors.vector:
        raise UsageError(f"--vector is one file for {len(names)} tasks; give --vectors-dir DIR")
    if vectors.vector and vectors.folder:
        raise UsageError("--vector and --vectors-dir both say where the vector goes; give one")
    if vectors.vector and vectors.vector.suffix != ".safetensors":
        raise UsageError(f"--vector {vectors.vector}: expected a name that ends in .safetensors")
    for name in names:
        dataset = open_labelled(recipe, name)
        called = task_name(dataset)
        folder = options.folder / called if options.folder and len(names) > 1 else options.folder
        path = vectors.folder / f"{called}.safetensors" if vectors.folder else vectors.vector
        target = VectorTarget(path.stem if path else called, path)
        judges = _judges(recipe, dataset)
        if options.skip_broken:
            from atlas_cli.datasets.broken import without_broken

            (dataset,) = without_broken([dataset], options.workers, warner(on_event))
            judges = without_broken(judges, options.workers, warner(on_event))
        yield FinetuneTask(called, dataset, judges, folder, target)


def _judges(recipe: FinetuneRecipe, dataset: Dataset) -> tuple[Dataset, ...]:
    """The val split of the same data, if there is one and it is not trained on."""
    if dataset.split == "val" or not has_split(dataset.name, "val"):
        return ()
    judged = recipe.model_copy(update={"split": "val", "shots": "all"})
    judge = open_labelled(judged, dataset.name)
    if judge.classes != dataset.classes:
        raise DataError(f"{dataset.name}: the classes of its val split are not those of the other")
    return (judge,)


def _check_names(tasks: Sequence[FinetuneTask]) -> None:
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tasks are called {name}; fine-tune on them one by one")


@contextmanager
def _folder_of_all(tasks: Sequence[FinetuneTask], options: RunOptions) -> Iterator[None]:
    """With the folder that holds one run for each of several tasks, which goes if it stays empty.

    Raises AtlasError if a run may not use its folder.
    """
    from atlas_cli.learning.run_folder import check_folder

    several = options.folder if len(tasks) > 1 else None
    made = several is not None and not several.exists()
    if several and made:
        check_folder(several, resume=options.resume, force=options.force)
        several.mkdir()
    try:
        for task in tasks:
            if task.folder:
                check_folder(task.folder, resume=options.resume, force=options.force)
        yield
    finally:
        if several and made and not any(several.iterdir()):
            several.rmdir()


# Training -------------------------------------------------------------------------------------


def _finetune(
    task: FinetuneTask,
    inputs: RunInputs,
    options: RunOptions,
    on_event: Listener,
    stop: Callable[[], bool],
) -> tuple[Finetuned | None, str | None]:
    """Train on one task and write what is wanted, or say where it was stopped before the end."""
    from atlas_cli.learning.loop import train
    from atlas_cli.learning.run_folder import open_folder
    from atlas_cli.learning.weights import prepared_trainer

    on_event(PhaseStarted("opening the model"))
    with (
        prepared_trainer(inputs, warner(on_event)) as trainer,
        open_folder(task.folder, trainer.config, options, inputs.recipe) as folder,
    ):
        device = f"device: {trainer.clip.device}; threads: {inputs.options.cores}"
        on_event(Planned((_plan(task, trainer),), (device,)))
        announced = 0

        def on_checkpoint(checkpoint: FinetuneCheckpoint, step: Step | None) -> None:
            nonlocal announced
            if step:
                on_event(StepTaken(step, trainer.batch_size))
            for epoch in range(announced, len(checkpoint.accuracies)):
                accuracy = as_percent(checkpoint.accuracies[epoch])
                on_event(EpochScored(task.name, epoch, accuracy, task.scored_on))
            announced = len(checkpoint.accuracies)

        try:
            epochs = -(-trainer.steps // trainer.data.epoch_steps)
            with training(on_event, trainer.steps, epochs):
                checkpoint = train(
                    trainer,
                    folder,
                    resume=options.resume,
                    stop=stop,
                    on_checkpoint=on_checkpoint,
                )
            if not checkpoint.over:
                return None, _stopped(task, checkpoint)
            found = _write(task, trainer, checkpoint, on_event)
            if folder:
                facts = dataclasses.asdict(found)
                del facts["config"]
                folder.write_result({"unit": UNIT, **facts})
            return found, None
        except AtlasError:
            if folder:
                folder.abandon()
            raise


def _write(
    task: FinetuneTask,
    trainer: WeightTrainer,
    checkpoint: FinetuneCheckpoint,
    on_event: Listener,
) -> Finetuned:
    """Write the model, the adapter and the vector, and say how well it does."""
    from atlas_cli.learning.run_folder import ADAPTER, MODEL

    recipe = trainer.recipe
    with tempfile.TemporaryDirectory(prefix="atlas-") as temporary:
        home = task.folder or Path(temporary)
        model, adapter = home / MODEL, home / ADAPTER
        trainer.write(checkpoint, model, adapter)
        if task.target.path:
            _extract(task, trainer, adapter if recipe.lora else model, on_event)
    zero_shot, accuracy = _scores(task, trainer, checkpoint, on_event)
    return Finetuned(
        data=task.dataset.name,
        model=str(model) if task.folder else None,
        adapter=str(adapter) if task.folder and recipe.lora else None,
        vector=str(task.target.path) if task.target.path else None,
        zero_shot=zero_shot,
        accuracy=accuracy,
        accuracies=[*map(as_percent, checkpoint.accuracies)],
        steps=trainer.steps,
        config=trainer.config,
    )


def _extract(task: FinetuneTask, trainer: WeightTrainer, tuned: Path, on_event: Listener) -> None:
    """Write the task vector as `atlas extract` does."""
    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import Options, extract_to

    inputs, target = trainer.inputs, task.target
    source = locate(parse_reference(str(tuned)))
    if not task.folder:  # nobody will find the folder that this was
        reference = dataclasses.replace(source.reference, text=f"fine-tuned on {task.name}")
        source = dataclasses.replace(source, reference=reference)
    base = open_base(inputs.model, "visual", architecture=inputs.recipe.arch)
    assert target.path is not None
    options = Options(warn=warner(on_event))
    with target.folder():
        extract_to(target.path, target.name, base, source, options)


# In words -------------------------------------------------------------------------------------


def _plan(task: FinetuneTask, trainer: WeightTrainer) -> str:
    count = sum(tensor.numel() for tensor in trainer.model.values.values())
    judged = f"scored on {len(trainer.scored_on)} images {task.scored_on}"
    if not trainer.scored_on:
        judged = "nothing is held out: all images are trained on"
    epochs = trainer.steps / trainer.data.epoch_steps
    size = f"{count:,} trainable parameters, {trainer.steps} steps ({epochs:.3g} epochs)"
    text = f"{task.name}: {size}, {judged}"
    if trainer.recipe.linearised:
        text += "; other programs run the weights of the expansion as an ordinary model"
    return text


def _stopped(task: FinetuneTask, checkpoint: FinetuneCheckpoint) -> str:
    step = checkpoint.step.number if checkpoint.step else 0
    kept = "; --resume goes on" if task.folder else ", and without -o nothing is kept"
    return f"{task.name}: stopped after step {step}{kept}"


def _scores(
    task: FinetuneTask,
    trainer: WeightTrainer,
    checkpoint: FinetuneCheckpoint,
    on_event: Listener,
) -> tuple[float | None, float | None]:
    """The accuracy of zero-shot and of the weights that are kept, if any images score them."""
    if not checkpoint.accuracies:
        return None, None
    before, *epochs = map(as_percent, checkpoint.accuracies)
    after = max(epochs) if trainer.recipe.select == "best" else epochs[-1]
    if after < before:
        on_event(
            Warned(
                f"{task.name}: fine-tuning lowered the accuracy from {before:.2f} to "
                f"{after:.2f}; another learning rate may help"
            )
        )
    return before, after
