"""fit: a few labelled images of one task -> coefficients that recognise them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli.datasets.dataset import Dataset, open_dataset
from atlas_cli.errors import DataError, UsageError
from atlas_cli.learning.events import Listener, Noted, ignore, never
from atlas_cli.learning.results import LearningResult, Report
from atlas_cli.learning.run import (
    LearningVerb,
    RunInputs,
    RunOptions,
    learn,
    open_labelled,
    resolve,
    warner,
)
from atlas_cli.recipes.model import as_percent

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.batches import LabelledObjective, TaskScore, TrainingConfig
    from atlas_cli.learning.ranking import Ranking
    from atlas_cli.learning.run_folder import RunFolder
    from atlas_cli.learning.selection import Policy, Score, Selection
    from atlas_cli.learning.setup import PreparedRun, Setup
    from atlas_cli.models.clip import Classifier
    from atlas_cli.recipes.fit import FitRecipe
    from atlas_cli.recipes.learned import LearnedRecipe

_SCORED = {
    "last": "on the images that it learned from",
    "holdout": "on images held out",
    "kfold": "over the folds",
}
_SCALES = (1.0, 3.0, 5.0, 7.0, 10.0)  # of the pooled start of singular directions
_WARMUP = 0.1


def fit(
    recipe: FitRecipe,
    options: RunOptions | None = None,
    *,
    on_event: Listener = ignore,
    stop: Callable[[], bool] = never,
) -> LearningResult:
    """Learn a coefficient for every block of every task vector from labelled images."""
    verb = Fitting(recipe, lambda text: on_event(Noted(text)))
    return learn(verb, options or RunOptions(), on_event, stop)


def rank_vectors(
    recipe: FitRecipe, options: RunOptions | None = None, *, on_event: Listener = ignore
) -> Ranking:
    """Which blocks of the vectors a fit with this budget would keep. Nothing is written."""
    verb, options = Fitting(recipe), options or RunOptions()
    if not verb.limited:
        raise UsageError("--rank-only ranks what --budget or --keep-vectors keeps; give one")
    inputs = resolve(verb, options, on_event)

    from atlas_cli.learning.ranking import ranking_of
    from atlas_cli.learning.setup import gathered

    files = gathered(inputs, lambda text: on_event(Noted(text)), warner(on_event))
    return ranking_of(replace(inputs, files=files))


@dataclass(frozen=True)
class Fitting(LearningVerb):
    """Recognise a few images of one task."""

    recipe: FitRecipe
    tell: Callable[[str], None] = lambda text: None
    name = "fit"

    def open_data(self) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The labelled images, and those of val:DATA."""
        recipe = self.recipe
        dataset = open_labelled(recipe, recipe.data)
        if not recipe.select.startswith("val:"):
            return (dataset,), ()
        name = recipe.select.removeprefix("val:")
        judges = open_dataset(name, templates=dataset.templates, preferred=("val", "valid"))
        if judges.classes != dataset.classes:
            raise DataError(f"{name}: its classes are not those of {dataset.name}")
        return (dataset,), (judges,)

    @property
    def trains(self) -> bool:
        """Without vectors there are no coefficients, and a head is fitted to fixed features."""
        return bool(self.recipe.vectors)

    def objective(self, setup: Setup) -> tuple[LabelledObjective, Policy]:
        """Cross-entropy on the images of one task."""
        from atlas_cli.learning.batches import LabelledObjective, TaskData
        from atlas_cli.learning.heads import (
            JOINT,
            AutoObjective,
            attach,
            check_adapter,
            headed,
            validated,
        )
        from atlas_cli.learning.selection import policy_for
        from atlas_cli.learning.setup import training_of

        recipe, start = self.recipe, setup.table()
        if recipe.init:
            start = _warm_start(setup, Path(recipe.init).expanduser())
        head: Classifier = setup.heads[0]
        auto, singular = recipe.adapter == "auto", bool(recipe.basis and recipe.basis[:3] == "svd")
        policy = (
            validated(setup.tasks, recipe.seed)
            if auto
            else policy_for(self._select, setup.tasks, recipe.seed)
        )
        if recipe.adapter not in ("none", "auto"):
            check_adapter(setup, recipe.adapter)
        if self._joint:
            start = attach(setup, JOINT if auto else recipe.adapter, recipe.lr, start)
            head = headed(setup).logits
        kind = partial(AutoObjective, setup=setup) if auto else LabelledObjective
        objective = kind(
            setup.model,
            (TaskData(setup.tasks[0], head),),
            training_of(recipe) if not singular else _singular_training(recipe),
            recognise,
            start,
            judges=setup.judges,
            scaled=setup.scaled,
        )
        if singular:
            objective = replace(objective, start=_singular_start(setup, objective, policy))
        return objective, policy

    @property
    def _select(self) -> str:
        """What decides which step is kept: for singular directions the best epoch on the shots."""
        singular = self.recipe.basis and self.recipe.basis.startswith("svd:")
        return "same" if singular and self.recipe.select == "last" else self.recipe.select

    @contextmanager
    def vectors_made(self, inputs: RunInputs, folder: Path | None) -> Iterator[RunInputs]:
        """The directions of a basis, or the blocks that are kept, as vectors, if asked for."""
        if self.limited:
            with self._limited(inputs, folder) as limited:
                yield limited
            return
        if self.recipe.basis is None:
            yield inputs
            return
        if folder is None:
            raise UsageError("--basis writes its directions into the run's folder; use -o DIR")

        from atlas_cli.learning.setup import refuse_target
        from atlas_cli.vectors.basis import write_basis
        from atlas_cli.vectors.pool import open_member
        from atlas_cli.vectors.writer import made_vectors

        if not self.recipe.allow_target:
            refuse_target(map(open_member, inputs.files), inputs.datasets[0])
        with made_vectors(folder) as target:
            made = write_basis(self.recipe.basis, inputs.files, target, self.recipe.seed)
            yield replace(inputs, files=tuple(made))

    @property
    def limited(self) -> bool:
        """Whether only some blocks of the vectors are kept."""
        return self.recipe.budget is not None or self.recipe.keep_vectors is not None

    @contextmanager
    def _limited(self, inputs: RunInputs, folder: Path | None) -> Iterator[RunInputs]:
        """What is kept of the vectors, written into the run's folder."""
        if folder is None:
            raise UsageError("--budget writes what is kept into the run's folder; use -o DIR")
        from atlas_cli.learning.ranking import write_picked
        from atlas_cli.vectors.writer import made_vectors

        with made_vectors(folder) as target:
            made = write_picked(inputs, target, self.tell)
            yield replace(inputs, files=tuple(made))

    @property
    def _joint(self) -> bool:
        return self.recipe.adapter != "none" and self.recipe.adapter_stage == "joint"

    def needs_folder(self, ready: PreparedRun) -> str | None:
        """A tuned projection is a task vector."""
        if self.recipe.adapter == "prolip":
            return "adapter prolip writes a task vector"
        return super().needs_folder(ready)

    def complete(self, ready: PreparedRun, selection: Selection) -> Selection:
        """The selection with its head."""
        if self.recipe.adapter == "none":
            return selection
        from atlas_cli.learning.heads import completed, decided

        if self.recipe.adapter == "auto":
            return decided(ready.setup, selection)
        return completed(ready.setup, selection, self.recipe.adapter, self.recipe.adapter_stage)

    def learned(
        self, ready: PreparedRun, selection: Selection, folder: RunFolder | None
    ) -> LearnedRecipe:
        """The recipe that merges what was learned, with the head if there is one."""
        recipe = super().learned(ready, selection, folder)
        if selection.head is None:
            return recipe
        from atlas_cli.learning.heads import with_head

        return with_head(recipe, ready.setup, selection, selection.head, folder)

    def report(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> Report:
        """The accuracy before and after."""
        select, method = self.recipe.select, self._method
        if selection.before is None or selection.after is None:  # folds score coefficients alone
            known = {"adapter": self.recipe.adapter, "choice": selection.choice}
            return Report(ready.source, (f"{method}: no images to score it on",), known)
        before, after = (
            as_percent(score.values["accuracy"]) for score in (selection.before, selection.after)
        )
        after_all = self.recipe.adapter != "none" and not self._joint
        if selection.choice:
            select, method = "kfold", f"{method} ({selection.choice})"
        scored = _SCORED["last"] if after_all else _SCORED.get(select, f"on {select[4:]}")
        said = "training top-1" if scored == _SCORED["last"] else f"validation top-1 {scored}"
        note = f"{said}: zero-shot {before:.2f} -> {method} {after:.2f}"
        if not selection.improved:
            note = f"nothing beat zero-shot ({said}: {before:.2f}): all are 0"
        comment = (
            f"{ready.source}\nAccuracy {scored}: zero-shot {before:.2f}, {method} {after:.2f}."
        )
        facts: dict[str, object] = {"zero_shot": before, "learned": after}
        if self.recipe.adapter != "none":
            facts["adapter"] = self.recipe.adapter
        if selection.choice:
            facts |= {"choice": selection.choice, "folds": _fold_scores(selection)}
        return Report(comment, (note,), facts)

    @property
    def _method(self) -> str:
        """What was done, in a few words."""
        recipe = self.recipe
        if recipe.adapter == "none":
            return recipe.method
        if not recipe.vectors:
            return recipe.adapter
        return f"{recipe.method} {'with' if self._joint else 'and then'} {recipe.adapter}"


def _fold_scores(selection: Selection) -> dict[str, float]:
    """How well every candidate did on the folds: accuracies in percent, and losses."""
    found = selection.scores[-1].values
    return {k: v if k.endswith(" loss") else as_percent(v) for k, v in found.items()}


def recognise(scores: Sequence[TaskScore], references: Sequence[TaskScore]) -> Score:
    """The higher the accuracy the better, and then the mean logarithm of the right class."""
    from atlas_cli.learning.selection import Score

    (found,) = scores
    return Score((found.accuracy, found.gain), {"accuracy": found.accuracy})


def _warm_start(setup: Setup, run: Path) -> torch.Tensor:
    """The coefficients of another run by name; 0 where it had none."""
    path = run / "coefficients.json"
    try:
        table = json.loads(path.read_text("utf-8"))
        pairs = {(v, k): float(n) for v, row in table.items() for k, n in row.items()}
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        raise UsageError(f"--init {run}: has no coefficients.json of a run: {problem}") from problem
    rows = {member.name: number for number, member in enumerate(setup.pool.members)}
    columns = {label: number for number, label in enumerate(setup.layout.labels)}
    start, known = setup.table(), 0
    for (vector, label), value in pairs.items():
        if vector in rows and label in columns:
            start[rows[vector], columns[label]] = value
            known += 1
    if not known:
        raise UsageError(f"--init {run}: has no coefficient of these vectors")
    return start


# Singular directions --------------------------------------------------------------------------


def _singular_training(recipe: FitRecipe) -> TrainingConfig:
    """BOLT's: coefficients below zero count as zero; the rate rises over a tenth of the steps."""
    from atlas_cli.learning.setup import training_of

    training = training_of(recipe, (0.0, math.inf))
    config = replace(training.optimizer_config, warmup_share=_WARMUP)
    return replace(training, optimizer_config=config)


def _singular_start(setup: Setup, objective: LabelledObjective, policy: Policy) -> torch.Tensor:
    """The best of some multiples of the pooled coefficients, by the shots that are learned from."""
    from atlas_cli.vectors.basis import read_start

    pooled = setup.table()
    column = {label: number for number, label in enumerate(setup.layout.labels)}
    for block, values in read_start(setup.inputs.files).items():
        pooled[: len(values), column[block]] = values.to(pooled.device)
    tables = [(scale * pooled).clamp(min=0.0) for scale in _SCALES]
    fold = policy.folds[-1]
    learned_from = replace(fold, scored_on=fold.train)
    plain = replace(objective, judges=())
    return max(tables, key=lambda table: plain.judge(learned_from, table))
