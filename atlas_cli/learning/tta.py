"""tta: images that nobody labelled -> coefficients that suit them, scored without labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli import __version__
from atlas_cli.datasets.dataset import (
    DEFAULT_TEMPLATE,
    Dataset,
    check_templates,
    content,
    open_dataset,
)
from atlas_cli.datasets.known import named_classes
from atlas_cli.errors import ClosedError, DataError, UsageError
from atlas_cli.io.files import write_text
from atlas_cli.learning.events import Listener, Predicted, Saving, ignore, never
from atlas_cli.learning.results import Cell, LearningResult, Report
from atlas_cli.learning.run import (
    LearningVerb,
    RunOptions,
    learn,
    prepare,
    training,
    warner,
)
from atlas_cli.recipes.model import as_percent, in_percent
from atlas_cli.recipes.text import write_recipe

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.online import OnlineAdapter
    from atlas_cli.learning.run_folder import RunFolder
    from atlas_cli.learning.selection import Policy, Selection
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.learning.unlabelled import UnlabelledObjective
    from atlas_cli.recipes.learned import HeadEntry, LearnedRecipe
    from atlas_cli.recipes.tta import TtaRecipe

_SHOWN = 20  # classes of a histogram
_PREDICTED = "predicted, in percent"
_WORDS = {"skew": "class imbalance", "merit": "information"}  # what signs are called in words
_STREAM = "stdin"


def tta(
    recipe: TtaRecipe,
    options: RunOptions | None = None,
    *,
    predictions: Path | None = None,
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> LearningResult:
    """Adapt coefficients to images without labels. `predictions` is a file for what they show."""
    return learn(Adapting(recipe, predictions), options or RunOptions(), on_event, stop)


@dataclass(frozen=True)
class Adapting(LearningVerb):
    """Adapt to the images of one folder. `predictions` is a file for what they show."""

    recipe: TtaRecipe
    predictions: Path | None = None
    name = "tta"
    measure = "agreement"
    labelled = False

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The images, in an order that no label has a part in."""
        if str(self.predictions) == "-":
            raise UsageError("--predictions -: stdout has the recipe; name a file")
        recipe = self.recipe
        templates = check_templates(recipe.templates, "templates")
        dataset = open_dataset(
            recipe.data,
            split=recipe.split,
            templates=templates,
            preferred=("test", "val", "train"),
        )
        return (without_labels(dataset, recipe.classes),), ()

    def objective(self, setup: Setup) -> tuple[UnlabelledObjective, Policy]:
        """The recipe's objective on all images, scored without labels."""
        from atlas_cli.learning.selection import policy_for
        from atlas_cli.learning.unlabelled import unlabelled_objective

        objective = unlabelled_objective(setup, setup.tasks[0])
        select = "same" if objective.guarded else "last"
        return objective, policy_for(select, setup.tasks, self.recipe.seed)

    def learned(
        self, ready: PreparedRun, selection: Selection, folder: RunFolder | None
    ) -> LearnedRecipe:
        """The recipe that merges what was learned: for LayerNorms, their own task vector."""
        if self.recipe.tune != "layernorm":
            recipe = super().learned(ready, selection, folder)
        elif folder is None:
            raise UsageError("--tune layernorm writes a task vector; give a folder with -o DIR")
        else:
            recipe = _with_norms(ready, selection.coefficients, folder)
        return recipe.model_copy(update={"head": _head_beside(ready)})

    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """What the images look like to the model before and after, and which rule decided."""
        before, after = selection.before, selection.after
        assert before is not None
        assert after is not None
        found = {
            "zero-shot": ready.objective.predictions(0 * selection.coefficients),
            "adapted": ready.objective.predictions(selection.coefficients),
        }
        if self.predictions:
            write_text(self.predictions, _lines(ready.inputs.datasets[0], found["adapted"]))
        names = ready.inputs.datasets[0].classes
        histograms = {
            name: _histogram(names, rows.argmax(dim=1).tolist()) for name, rows in found.items()
        }
        decided = decision(selection, guarded=ready.objective.guarded)
        first, last = in_percent(before.values), in_percent(after.values)
        changes = ", ".join(
            f"{_WORDS.get(key, key)} {_sign(key, old)} -> {_sign(key, last[key])}"
            for key, old in first.items()
        )
        facts = {
            "rule": decided,
            "zero_shot": first,
            "adapted": last,
            "histogram": histograms,
        }
        comment = f"{ready.source} No label was looked at.\n{decided}: {changes}."
        return Report(comment, (decided,), facts, _rows(histograms), details=(changes,))


def _head_beside(ready: PreparedRun) -> HeadEntry | None:
    """The learned head beside the base, if the images were classified by it."""
    from atlas_cli.io.files import sha256_of
    from atlas_cli.models.clip import HEAD
    from atlas_cli.recipes.learned import HeadEntry

    head, path = ready.setup.heads[0], ready.inputs.model.folder / HEAD
    if not hasattr(head, "adapter"):
        return None
    return HeadEntry(adapter=head.adapter, file=str(path), sha256=sha256_of(path))


def without_labels(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """The images, with classes to choose from but nothing that says which they are of.

    Files are put in the order of their contents' hashes: names of folders give classes away, too.
    """
    names = check_classes(named_classes(classes) if classes else dataset.classes, dataset.name)
    samples = dataset.unlabelled().samples
    if not dataset.keys_identify:
        hashed = [replace(s, sha256=sha256(content(dataset, s)).digest()) for s in samples]
        samples = tuple(sorted(hashed, key=lambda sample: (sample.sha256, sample.key)))
    return replace(dataset, classes=names, samples=samples)


def check_classes(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Two class names or more, none of them twice."""
    if not names:
        raise UsageError(f"{where}: has no class names; give them with --classes a,b,c")
    if len(names) < 2:
        raise DataError(f"{where}: has one class only; there is nothing to tell apart")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UsageError(f"{where}: class '{twice}' is named twice")
    return tuple(names)


def _with_norms(ready: PreparedRun, values: torch.Tensor, folder: RunFolder) -> LearnedRecipe:
    """Write tuned LayerNorms as a task vector; the recipe adds all of it."""
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.vectors.format import open_vector

    inputs = ready.inputs
    changed = ready.setup.model.load(values)
    told = f"LayerNorms tuned on {inputs.datasets[0].name}"
    entry = folder.keep_vector("layernorm.safetensors", inputs.model, changed, told)
    blocks = [block.name for block in open_vector(Path(entry.file)).header.blocks if block.norm]
    return LearnedRecipe(
        merge_method="atlas",
        base_model=inputs.recipe.model,
        vectors=[entry],
        coefficients={entry.name: dict.fromkeys(blocks, 1.0)},
        seed=inputs.recipe.seed,
    )


# The report -----------------------------------------------------------------------------------


def decision(selection: Selection, *, guarded: bool) -> str:
    """Which rule decided, in a few words."""
    from atlas_cli.core.losses import OBJECTIONS

    faults = [name for score in selection.scores for name in OBJECTIONS if name in score.values]
    if not selection.improved:
        gravest = min(faults, key=list(OBJECTIONS).index, default=None)
        why = OBJECTIONS[gravest] if gravest else "nothing was learned"
        return f"zero-shot is kept, all coefficients are 0: {why}"
    if not guarded:
        return "the last step is kept, unchecked, since --select is last"
    if not selection.scores:  # a search keeps none
        scale = selection.coefficients.flatten()[0].item()
        return f"the uniform scale {scale:g} is kept: its predictions are the clearest"
    epochs = len(selection.scores) - 1
    kept = next(n for n, score in enumerate(selection.scores) if score is selection.after)
    said = f"epoch {kept} of {epochs} is kept: its predictions are the clearest"
    told = dict.fromkeys(OBJECTIONS[name] for name in OBJECTIONS if name in faults)
    return f"{said}; in other epochs, {' and '.join(told)}" if told else said


def _sign(name: str, value: float) -> str:
    """A sign as text; what is a share of images has its unit."""
    return f"{value:.2f} %" if name == "agreement" else f"{value:.3f}"


def _lines(dataset: Dataset, probabilities: torch.Tensor) -> str:
    rows = zip(dataset.samples, probabilities, strict=True)
    return "".join(
        json.dumps(prediction_row(sample.key, dataset.classes, row), ensure_ascii=False) + "\n"
        for sample, row in sorted(rows, key=lambda pair: pair[0].key)
    )


def prediction_row(
    image: str, classes: Sequence[str], probabilities: torch.Tensor
) -> dict[str, Any]:
    """The most likely class of one image."""
    best = int(probabilities.argmax().item())
    probability = round(probabilities[best].item(), 4)
    return {"image": image, "prediction": classes[best], "probability": probability}


def _histogram(names: Sequence[str], predicted: Sequence[int]) -> dict[str, int]:
    counts = [0] * len(names)
    for number in predicted:
        counts[number] += 1
    return dict(zip(names, counts, strict=True))


def _rows(histograms: Mapping[str, Mapping[str, int]]) -> list[dict[str, Cell]]:
    """The classes that are predicted most often, in percent of all images."""
    before, after = histograms["zero-shot"], histograms["adapted"]
    total = sum(before.values())
    order = sorted(before, key=lambda name: -before[name] - after[name])
    rows: list[dict[str, Cell]] = [
        {
            _PREDICTED: name,
            "zero-shot": as_percent(before[name] / total),
            "adapted": as_percent(after[name] / total),
        }
        for name in order[:_SHOWN]
    ]
    if rest := order[_SHOWN:]:
        shares = [as_percent(sum(found[n] for n in rest) / total) for found in (before, after)]
        rows.append(
            {_PREDICTED: f"{len(rest)} others", "zero-shot": shares[0], "adapted": shares[1]}
        )
    return rows


# Images that come one by one ------------------------------------------------------------------


@dataclass(frozen=True)
class OnlineResult:
    """How a stream of images ended, and what was learned on the way, if it has a folder."""

    ended: str
    interrupted: bool
    seen: int
    learned_from: int
    folder: Path | None


@dataclass(frozen=True)
class Streaming(Adapting):
    """Adapt to images that are named one by one. There are none yet."""

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """No images, but their classes."""
        templates = check_templates(self.recipe.templates, "templates") or (DEFAULT_TEMPLATE,)
        classes = check_classes(named_classes(self.recipe.classes), _STREAM)
        return (Dataset(_STREAM, "all", classes, templates, ()),), ()


def tta_online(
    recipe: TtaRecipe,
    paths: Iterable[tuple[str, str]],
    options: RunOptions | None = None,
    *,
    on_event: Listener = ignore,
) -> OnlineResult:
    """Predict every image as it comes, and adapt once there are enough of them.

    `paths` gives the path of an image and the text to call it by. Whatever ends it (the last path,
    a listener that raises ClosedError, an interrupt), what was learned is kept.
    """
    options = options or RunOptions()
    options.check()
    if recipe.method == "search":
        raise UsageError("--method search looks at all images at once; it has no --online")
    if options.log:
        raise UsageError("--log follows the steps of a run over given images; it has no --online")
    verb = Streaming(recipe)
    with prepare(verb, options, on_event) as ready:
        from atlas_cli.learning.online import OnlineAdapter
        from atlas_cli.learning.run_folder import open_folder

        adapter = OnlineAdapter(ready.setup, warner(on_event))
        with open_folder(options.folder, ready.config, options, recipe) as folder:
            if folder and options.resume and (saved := folder.restore()):
                adapter.restore(saved.tensors, saved.facts)
            with training(on_event):
                return _follow(verb, ready, adapter, paths, folder, on_event)


def _follow(
    verb: Streaming,
    ready: PreparedRun,
    adapter: OnlineAdapter,
    paths: Iterable[tuple[str, str]],
    folder: RunFolder | None,
    on_event: Listener,
) -> OnlineResult:
    classes = ready.inputs.datasets[0].classes
    ended, interrupted = "stdin ended", False
    state = adapter.state()
    try:
        for path, shown in paths:
            on_event(_predicted(adapter, path, shown, classes))
            if adapter.adapt() and folder:
                folder.save(*adapter.state())
            state = adapter.state()  # of a whole step, wherever an interrupt comes
        on_event(Saving())  # an interrupt that waits is raised here
    except ClosedError:
        ended = "the reader went away"
    except KeyboardInterrupt:
        ended, interrupted = "interrupted", True
    on_event(Saving())
    if folder:
        folder.save(*state)
        _finish(verb, ready, folder, *state)
    seen, learned_from = state[1]["seen"], state[1]["learned_from"]
    return OnlineResult(ended, interrupted, seen, learned_from, folder.folder if folder else None)


def _predicted(
    adapter: OnlineAdapter, path: str, shown: str, classes: tuple[str, ...]
) -> Predicted:
    try:
        return Predicted(**prediction_row(shown, classes, adapter.predict(path)))
    except DataError as problem:
        return Predicted(shown, error=str(problem))


def _finish(
    verb: Streaming,
    ready: PreparedRun,
    folder: RunFolder,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, object],
) -> None:
    from atlas_cli.learning.selection import Selection

    found = Selection(tensors["walker.coefficients"], None, None)
    recipe = verb.learned(ready, found, folder)
    table = recipe.coefficients if isinstance(recipe.coefficients, dict) else None
    comment = f"Learned by atlas {__version__} from {facts['seen']} images on stdin."
    folder.finish(write_recipe(recipe, comment), table)
