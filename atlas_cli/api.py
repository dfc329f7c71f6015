"""The verbs of atlas as Python functions; `atlas_cli` exports them.

Keywords that are not parameters of a function are keys of its recipe. Wrong input raises an
AtlasError. Heavy imports wait until all names are resolved, as on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.learning.evaluate import ModelScore
    from atlas_cli.learning.events import Event
    from atlas_cli.learning.finetune import FinetuneResult
    from atlas_cli.learning.results import LearningResult
    from atlas_cli.learning.run import RunOptions
    from atlas_cli.merging.in_memory import Coefficients
    from atlas_cli.merging.merge import Merged
    from atlas_cli.models.clip import Clip
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.merge import Merge
    from atlas_cli.vectors.task_vector import TaskVector

    PathLike: TypeAlias = str | Path
    # A path, YAML, a mapping, or what a learning verb returned.
    RecipeLike: TypeAlias = PathLike | Mapping[str, Any] | LearningResult | LearnedRecipe

    from atlas_cli.recipes.model import Recipe

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")


# Learning -------------------------------------------------------------------------------------


def fit(
    data: PathLike, *, on_event: Callable[[Event], None] | None = None, **keys: Any
) -> LearningResult:
    """Learn a coefficient for every block of every task vector from labelled images.

    Keys are those of a recipe (model, vectors, shots, select, ...), and output, resume, force,
    threads and device for this run.
    """
    from atlas_cli.learning.events import ignore
    from atlas_cli.learning.fit import fit as run
    from atlas_cli.recipes.fit import FitRecipe

    options = _take_options(keys)
    return run(_recipe(FitRecipe, str(data), keys), options, on_event=on_event or ignore)


def negate(
    data: PathLike | Sequence[PathLike],
    *,
    on_event: Callable[[Event], None] | None = None,
    **keys: Any,
) -> LearningResult:
    """Learn coefficients that unlearn tasks and keep a control task. Keys as for `fit`."""
    from atlas_cli.learning.events import ignore
    from atlas_cli.learning.negate import negate as run
    from atlas_cli.recipes.learning import NegateRecipe

    options = _take_options(keys)
    return run(_recipe(NegateRecipe, _listed(data), keys), options, on_event=on_event or ignore)


def add(
    data: PathLike | Sequence[PathLike],
    *,
    on_event: Callable[[Event], None] | None = None,
    **keys: Any,
) -> LearningResult:
    """Learn coefficients for one model that does several tasks. Keys as for `fit`."""
    from atlas_cli.learning.add import add as run
    from atlas_cli.learning.events import ignore
    from atlas_cli.recipes.learning import AddRecipe

    options = _take_options(keys)
    return run(_recipe(AddRecipe, _listed(data), keys), options, on_event=on_event or ignore)


def tta(
    data: PathLike,
    *,
    predictions: PathLike | None = None,
    on_event: Callable[[Event], None] | None = None,
    **keys: Any,
) -> LearningResult:
    """Adapt coefficients to images without labels. Keys as for `fit`."""
    from atlas_cli.learning.events import ignore
    from atlas_cli.learning.tta import tta as run
    from atlas_cli.recipes.tta import TtaRecipe

    options, file = _take_options(keys), Path(predictions) if predictions else None
    recipe = _recipe(TtaRecipe, str(data), keys)
    return run(recipe, options, predictions=file, on_event=on_event or ignore)


def finetune(
    data: PathLike | Sequence[PathLike],
    *,
    vector: PathLike | None = None,
    vectors_dir: PathLike | None = None,
    on_event: Callable[[Event], None] | None = None,
    **keys: Any,
) -> FinetuneResult:
    """Train the image tower on each task, and write models and task vectors. Keys as for `fit`."""
    from atlas_cli.learning.events import ignore
    from atlas_cli.learning.finetune import VectorOutput
    from atlas_cli.learning.finetune import finetune as run
    from atlas_cli.recipes.finetune import FinetuneRecipe

    options = _take_options(keys)
    file, folder = (Path(path) if path else None for path in (vector, vectors_dir))
    recipe = _recipe(FinetuneRecipe, _listed(data), keys)
    return run(recipe, options, vectors=VectorOutput(file, folder), on_event=on_event or ignore)


def _take_options(keys: dict[str, Any]) -> RunOptions:
    """The options of a run, taken out of the keys."""
    from atlas_cli.learning.run import RunOptions

    names = ("resume", "force", "threads", "device", "workers", "skip_broken", "log")
    given = {name: keys.pop(name) for name in names if name in keys}
    output = keys.pop("output", None)
    return RunOptions(folder=Path(output) if output else None, **given)


def _recipe(schema: type[AnyRecipe], data: object, keys: Mapping[str, Any]) -> AnyRecipe:
    """A checked recipe of keywords. Raises UsageError that lists everything wrong with them."""
    from atlas_cli.recipes.model import check_recipe

    return check_recipe(schema, {"data": data, **{key: _plain(keys[key]) for key in keys}})


def _plain(value: Any) -> Any:
    """Paths as text, so that keywords look as they do in a file."""
    from atlas_cli.vectors.task_vector import TaskVector

    if isinstance(value, TaskVector):
        raise UsageError(f"vectors: {value!r} is in no file yet; save it, and name the file")
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _listed(values: Any) -> list[Any]:
    listed = list(values) if isinstance(values, list | tuple) else [values]
    return [str(value) if isinstance(value, Path) else value for value in listed]


# Models ---------------------------------------------------------------------------------------


def merge(
    recipe: RecipeLike,
    output: PathLike,
    *,
    force: bool = False,
    memory: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    allow_nonfinite: bool = False,
) -> Merged:
    """Merge models by a recipe into a folder. `str(merged)` is its path.

    `memory` is a budget for the whole process; by default, 512 MB beyond what it takes already.
    """
    from atlas_cli.merging.merge import MergeOptions
    from atlas_cli.merging.merge import merge as run
    from atlas_cli.recipes.model import parse_bytes

    budget = None if memory is None else parse_bytes(memory) or 0
    options = MergeOptions(budget, threads, device, force=force, allow_nonfinite=allow_nonfinite)
    return run(_merge_recipe(recipe), output, options)


def compose(
    model: PathLike,
    vectors: Sequence[TaskVector | PathLike] | None = None,
    coefficients: Coefficients | RecipeLike = 1.0,
    *,
    arch: str | None = None,
    text: str | None = None,
    device: str = "auto",
) -> Clip:
    """A model with scaled task vectors added to its weights, in memory.

    `module` of the result is open_clip's module, `preprocess` and `tokenize` go with it.
    Coefficients are a number for all vectors, one for each, a mapping by the names of vectors, with
    numbers or with numbers by block, or a learned recipe, which also names vectors if none are
    given. The weights are those that `merge` would write, bit for bit.
    """
    from atlas_cli.sources.locate import check_architecture, parse_reference

    reference = parse_reference(str(model))
    check_architecture(arch)
    scales: Any = coefficients
    if not isinstance(coefficients, int | float | list | tuple) and not _is_table(coefficients):
        scales = _merge_recipe(coefficients).recipe  # type: ignore[arg-type]

    from atlas_cli.merging.in_memory import compose_model
    from atlas_cli.sources.locate import locate
    from atlas_cli.vectors.task_vector import TaskVector

    opened = None
    if vectors is not None:
        opened = [
            one if isinstance(one, TaskVector) else TaskVector.open(one, model) for one in vectors
        ]
    return compose_model(locate(reference), opened, scales, _opening(arch, text, device))


def evaluate(
    models: PathLike | Clip | Sequence[PathLike | Clip],
    data: PathLike | Sequence[PathLike],
    *,
    split: str | None = None,
    templates: Sequence[str] = (),
    shots: int | None = None,
    seed: int = 0,
    arch: str | None = None,
    text: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    skip_broken: bool = False,
    device: str = "auto",
    warn: Callable[[str], None] = lambda text: None,
) -> list[ModelScore]:
    """Score models, also composed ones, on datasets, and compare each with the first."""
    from atlas_cli.datasets.dataset import open_datasets
    from atlas_cli.sources.locate import check_architecture, locate, parse_reference

    listed: list[Any] = list(models) if isinstance(models, list | tuple) else [models]
    found = [parse_reference(str(m)) if isinstance(m, str | Path) else m for m in listed]
    check_architecture(arch)
    datasets = open_datasets(
        _listed(data), split=split, templates=templates, shots=shots, seed=seed
    )

    from atlas_cli.learning.evaluate import Loading, Watcher
    from atlas_cli.learning.evaluate import evaluate as run
    from atlas_cli.models.clip import Clip

    opened = [one if isinstance(one, Clip) else locate(one) for one in found]
    loading = Loading(batch_size, workers, skip_broken)
    opening = _opening(arch, text, device)
    return [one.score for one in run(opened, datasets, opening, loading, Watcher(warn))]


def extract(
    base: PathLike,
    finetuned: PathLike,
    output: PathLike,
    *,
    warn: Callable[[str], None] = lambda text: None,
    **form: Any,
) -> TaskVector:
    """Write the task vector of a fine-tuned model, and open it.

    Further keywords: scope, dtype, rank, energy, scale, ignore, name, allow, arch and force.
    """
    from atlas_cli.vectors.targets import ExtractRequest, resolve

    known = ExtractRequest.__dataclass_fields__.keys() - {"base", "finetuned", "path", "lora"}
    if unknown := sorted(form.keys() - known):
        from atlas_cli.errors import nearest

        raise UsageError(f"extract: unknown keyword '{unknown[0]}'{nearest(unknown[0], known)}")
    if Path(output).suffix != ".safetensors":
        raise UsageError(f"{output}: expected the name of a .safetensors file")
    request = ExtractRequest(str(base), [str(finetuned)], str(output), **form)
    (target,), source, (tuned,) = resolve(request)

    from atlas_cli.vectors.bases import open_base
    from atlas_cli.vectors.extract import extract as run
    from atlas_cli.vectors.extract import options_of
    from atlas_cli.vectors.task_vector import TaskVector

    opened = open_base(source, request.scope, tuple(request.allow), request.arch)
    (made,) = run(opened, [tuned], [target], options_of(request, warn))
    return TaskVector.open(made.path)


def push(
    what: PathLike | Sequence[PathLike],
    repository: str,
    *,
    license: str | None = None,  # noqa: A002 (the word of the Hub)
    evaluation: PathLike | None = None,
    private: bool = False,
) -> str:
    """Publish a run, a model or task vectors on the Hub, with a card, and give the address.

    `evaluation` is a file that `atlas eval --json` printed.
    """
    from atlas_cli.publishing.publication import PublishOptions, prepare, read_evaluation_file

    shown = read_evaluation_file(Path(evaluation)) if evaluation else None
    paths = [Path(path) for path in _listed(what)]
    return prepare(paths, repository, PublishOptions(license, shown)).push(private=private)


def _opening(arch: str | None, text: str | None, device: str) -> Any:
    from atlas_cli.models.clip import Opening
    from atlas_cli.sources.locate import locate, parse_reference

    return Opening(arch, locate(parse_reference(text)) if text else None, device)


def _is_table(given: object) -> bool:
    """Whether a mapping is coefficients rather than a recipe."""
    return isinstance(given, Mapping) and "merge_method" not in given


def _merge_recipe(given: RecipeLike) -> Merge:
    """A checked merge recipe, whatever form it is given in."""
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.merge import read_merge
    from atlas_cli.recipes.text import write_mapping, write_recipe

    if isinstance(given, Mapping):
        return read_merge(write_mapping(given, ""))
    if isinstance(given, LearnedRecipe):
        return read_merge(write_recipe(given, ""))
    if not isinstance(given, str | Path):
        return read_merge(given.text)
    if isinstance(given, str) and "\n" in given:
        return read_merge(given)
    try:
        return read_merge(Path(given).expanduser().read_text("utf-8"), str(given))
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{given}: cannot be read as a recipe") from problem
