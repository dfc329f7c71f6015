"""atlas finetune: train an image tower on a task, and write its task vector."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.learning import (
    check_model,
    cores,
    find_model,
    given_keys,
    open_labelled,
    stoppable,
    walk,
)
from atlas_cli.cli.options import RunOptions, given_flags, learning_command
from atlas_cli.cli.targets import VectorTarget, check_targets
from atlas_cli.datasets.dataset import Dataset, expand_references, has_split, task_name
from atlas_cli.errors import AtlasError, DataError, UsageError
from atlas_cli.recipes.finetune import FinetuneRecipe, finetune_recipe
from atlas_cli.sources.locate import locate
from atlas_cli.sources.references import parse_reference

if TYPE_CHECKING:
    from atlas_cli.learning.finetune import FinetuneCheckpoint, FinetuneTrainer
    from atlas_cli.learning.setup import Inputs


@dataclass(frozen=True)
class VectorOutput:
    """Where task vectors are to go: a file for one, or a folder for all."""

    vector: Path | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class FinetuneTask:
    """A task to train on, the images that judge it, and where its results go."""

    name: str
    dataset: Dataset
    judges: tuple[Dataset, ...]
    folder: Path | None
    target: VectorTarget


@dataclass(frozen=True)
class Finetuned:
    """A tower that was trained. Shown as the paths of what was written, or as JSON."""

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


def run(
    data: Sequence[str], flags: Mapping[str, Any], wanted: VectorOutput, options: RunOptions
) -> None:
    """Check everything, then train on every task and tell of it."""
    recipe = finetune_recipe(*given_keys(FinetuneRecipe, data, flags, many=True))
    if options.resume and options.folder is None:
        raise UsageError("--resume goes on with the run in -o DIR; name it")
    if not (options.folder or wanted.vector or wanted.folder):
        raise UsageError("nothing would be kept; give -o DIR, --vector FILE or --vectors-dir DIR")
    check_model(recipe)
    tasks = list(_tasks(recipe, wanted, options))
    _check_names(tasks)
    check_targets([task.target for task in tasks], force=options.force or options.resume)
    source, opening = find_model(recipe, options)

    from atlas_cli.learning.setup import Inputs  # torch is slow: only with good inputs

    results = []
    with _folder_of_all(tasks, options):
        for task in tasks:
            own = dataclasses.replace(recipe, data=[task.dataset.name])
            datasets = (task.dataset,)
            threads = cores(options)
            inputs = Inputs("finetune", own, source, (), datasets, task.judges, opening, threads)
            found, stopped = _finetune(task, inputs, options)
            if found:
                results.append(dataclasses.asdict(found))
                if not options.as_json:
                    console.emit(found)
            if stopped:
                break
    if options.as_json and results:
        console.emit({"atlas": __version__, "runs": results}, as_json=True)
    if stopped:
        raise typer.Exit(130)


# Before anything is trained -------------------------------------------------------------------


def _tasks(
    recipe: FinetuneRecipe, wanted: VectorOutput, options: RunOptions
) -> Iterator[FinetuneTask]:
    """The tasks with their images."""
    names = expand_references(recipe.data)
    if len(names) > 1 and wanted.vector:
        raise UsageError(f"--vector is one file for {len(names)} tasks; give --vectors-dir DIR")
    if wanted.vector and wanted.folder:
        raise UsageError("--vector and --vectors-dir both say where the vector goes; give one")
    if wanted.vector and wanted.vector.suffix != ".safetensors":
        raise UsageError(f"--vector {wanted.vector}: expected a name that ends in .safetensors")
    for name in names:
        dataset = open_labelled(recipe, name)
        called = task_name(dataset)
        folder = options.folder / called if options.folder and len(names) > 1 else options.folder
        path = wanted.folder / f"{called}.safetensors" if wanted.folder else wanted.vector
        target = VectorTarget(path.stem if path else called, path)
        yield FinetuneTask(called, dataset, _judges(recipe, dataset), folder, target)


def _judges(recipe: FinetuneRecipe, dataset: Dataset) -> tuple[Dataset, ...]:
    """The val split of the same data, if there is one and it is not trained on."""
    if dataset.split == "val" or not has_split(dataset.name, "val"):
        return ()
    judge = open_labelled(dataclasses.replace(recipe, split="val", shots="all"), dataset.name)
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

    Raises if a run may not use its folder.
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
    task: FinetuneTask, inputs: Inputs, options: RunOptions
) -> tuple[Finetuned | None, bool]:
    """Train on one task, and write what is wanted unless someone stops it before the end."""
    from atlas_cli.learning.finetune import prepared
    from atlas_cli.learning.run_folder import open_run

    with prepared(inputs, console.warn) as ready:
        folder = None
        if not options.quiet:
            console.note(_plan(task, ready))
        if task.folder:
            folder = open_run(task.folder, ready.config(), resume=options.resume)
        try:
            with stoppable() as stop:
                heard = (lambda checkpoint: None) if options.quiet else _telling(task, ready)
                checkpoint = walk(ready, folder, options, stop, heard=heard)
            if not checkpoint.over:
                _tell_stop(task, checkpoint)
                return None, True
            return _write(task, ready, checkpoint), bool(stop)
        except AtlasError:
            if folder:
                folder.abandon()
            raise


def _write(task: FinetuneTask, ready: FinetuneTrainer, checkpoint: FinetuneCheckpoint) -> Finetuned:
    """Write the model, the adapter and the vector, and say how well it does."""
    from atlas_cli.learning.run_folder import ADAPTER, MODEL

    recipe = ready.recipe
    with tempfile.TemporaryDirectory(prefix="atlas-") as temporary:
        home = task.folder or Path(temporary)
        model, adapter = home / MODEL, home / ADAPTER
        ready.write(checkpoint, model, adapter)
        if task.target.path:
            _extract(task, ready, adapter if recipe.lora else model)
    zero_shot, accuracy = _result(task, ready, checkpoint)
    return Finetuned(
        data=task.dataset.name,
        model=str(model) if task.folder else None,
        adapter=str(adapter) if task.folder and recipe.lora else None,
        vector=str(task.target.path) if task.target.path else None,
        zero_shot=zero_shot,
        accuracy=accuracy,
        accuracies=list(checkpoint.accuracies),
        steps=ready.steps,
        config=ready.config(),
    )


def _extract(task: FinetuneTask, ready: FinetuneTrainer, tuned: Path) -> None:
    """Write the task vector as `atlas extract` does."""
    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import Options, extract_to

    inputs, target = ready.inputs, task.target
    source = locate(parse_reference(str(tuned)))
    if not task.folder:  # nobody will find the folder that this was
        reference = dataclasses.replace(source.reference, text=f"fine-tuned on {task.name}")
        source = dataclasses.replace(source, reference=reference)
    base = open_base(inputs.model, "visual", architecture=inputs.recipe.arch)
    assert target.path is not None
    with target.folder():
        extract_to(target.path, target.name, base, source, Options(warn=console.warn))


# Talk -----------------------------------------------------------------------------------------


def _plan(task: FinetuneTask, ready: FinetuneTrainer) -> str:
    count = sum(tensor.numel() for tensor in ready.tower.values.values())
    judged = f"judged by {len(ready.judged_by)} images {_judged_by(task)}"
    if not ready.judged_by:
        judged = "no class has an image to spare, so nothing judges it"
    epochs = ready.steps / ready.problem.epoch_steps
    text = f"{task.name}: {count:,} numbers, {ready.steps} steps ({epochs:.3g} epochs), {judged}"
    if ready.recipe.linearised:
        text += "; other programs run the weights of the expansion as an ordinary model"
    return text


def _judged_by(task: FinetuneTask) -> str:
    return "of the val split" if task.judges else "held out"


def _telling(task: FinetuneTask, ready: FinetuneTrainer) -> Callable[[FinetuneCheckpoint], None]:
    """Say the accuracy of zero-shot and of every epoch, once each."""
    told: list[float] = []

    def tell(checkpoint: FinetuneCheckpoint) -> None:
        for number in range(len(told), len(checkpoint.accuracies)):
            told.append(checkpoint.accuracies[number])
            when = f"epoch {number}" if number else "zero-shot"
            console.note(f"{task.name}: {when} {100 * told[-1]:.2f} {_judged_by(task)}")

    return tell


def _tell_stop(task: FinetuneTask, checkpoint: FinetuneCheckpoint) -> None:
    step = checkpoint.step.number if checkpoint.step else 0
    kept = "; --resume goes on" if task.folder else ", and without -o nothing is kept"
    console.note(f"{task.name}: stopped after step {step}{kept}")


def _result(
    task: FinetuneTask, ready: FinetuneTrainer, checkpoint: FinetuneCheckpoint
) -> tuple[float | None, float | None]:
    """The accuracy of zero-shot and of the weights that were chosen, if any images judge them."""
    if not checkpoint.accuracies:
        return None, None
    before, *epochs = checkpoint.accuracies
    after = max(epochs) if ready.recipe.select == "best" else epochs[-1]
    if after < before:
        console.warn(
            f"{task.name}: fine-tuning lowered the accuracy from {100 * before:.2f} to "
            f"{100 * after:.2f}; another learning rate may help"
        )
    return before, after


Data = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Labelled images, or a recipe (.yaml, -).")
]
Vector = Annotated[
    Path | None, typer.Option("--vector", metavar="FILE", help="Write the task vector, too.")
]
VectorsFolder = Annotated[
    Path | None,
    typer.Option("--vectors-dir", metavar="DIR", help="Write DIR/NAME.safetensors of each task."),
]
Tune = Annotated[
    str | None, typer.Option(metavar="WHAT", help="all (default), layernorm or projection.")
]
Lora = Annotated[
    int | None, typer.Option(metavar="R", help="Train a LoRA adapter of rank R (extra: lora).")
]
Steps = Annotated[int | None, typer.Option(help="Steps in all, instead of --epochs.")]
Warmup = Annotated[
    int | None, typer.Option(help="Steps while the rate rises; 500, but a tenth at most.")
]
CheckpointActivations = Annotated[
    bool,
    typer.Option(
        "--checkpoint-activations", help="Compute activations twice instead of keeping them."
    ),
]
_COEFFICIENTS_ONLY = (
    "vectors",
    "method",
    "granularity",
    "groups",
    "min_steps",
    "penalty",
    "memory",
)


@partial(learning_command, without=_COEFFICIENTS_ONLY)
def finetune(
    data: Data,
    vector: Vector = None,
    vectors_dir: VectorsFolder = None,
    tune: Tune = None,
    lora: Lora = None,
    steps: Steps = None,
    warmup: Warmup = None,
    checkpoint_activations: CheckpointActivations = False,
    *,
    flags: dict[str, Any],
    options: RunOptions,
) -> None:
    """Train the image tower on each task with its zero-shot head frozen; print what was written.

    --select is last (default) or best: the epoch with the best accuracy on the val split, or on
    images held out. --augment is slight (default: crops of nine tenths or more), flip, crop or
    none. Epochs are those of the published task vectors by the name of the data, else 10.

    Example: atlas finetune cars/ --model ViT-B-32/openai -o run --vector cars.safetensors
    """

    own = {
        "tune": tune,
        "lora": lora,
        "steps": steps,
        "warmup": warmup,
        "checkpoint_activations": checkpoint_activations,
    }
    run(data, {**flags, **given_flags(own)}, VectorOutput(vector, vectors_dir), options)
