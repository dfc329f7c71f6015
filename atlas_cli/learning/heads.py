"""Heads of a fit: trained with the coefficients or after them, kept in the run and its recipe."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from atlas_cli.core.adapters import Head, Shots, check_count
from atlas_cli.datasets.pixels import Pixels
from atlas_cli.io.checkpoint import open_safetensors
from atlas_cli.io.files import sha256_of
from atlas_cli.learning.batches import (
    LabelledObjective,
    TaskScore,
    features_of,
    score,
    score_of,
)
from atlas_cli.learning.run_folder import HEAD, PROJECTION, RunFolder
from atlas_cli.learning.selection import (
    Fold,
    Policy,
    Score,
    Scoring,
    Selection,
    validation_folds,
)
from atlas_cli.learning.setup import Setup, layout_of, placed_labels
from atlas_cli.models.clip import Classifier, logits_of
from atlas_cli.models.headed import HeadedModel, projection_name
from atlas_cli.models.heads import SavedHead, to_text, write_head
from atlas_cli.recipes.learned import HeadEntry, LearnedRecipe, VectorEntry
from atlas_cli.registry import ADAPTERS

# Standard errors by which the luckiest of eight candidates, none of them better, is ahead in one
# case of twenty: the 1 - 0.05 / 8 quantile of a normal distribution.
_CLEARLY = 2.5
_FOLDS = 3  # of cross-validation that chooses a head


def headed(setup: Setup) -> HeadedModel:
    """The model of a fit, which can train a head."""
    assert isinstance(setup.model, HeadedModel)
    return setup.model


def shots_of(setup: Setup, name: str, indices: Sequence[int] | None = None) -> Shots:
    """The labelled images as a kind of head sees them, with the weights that are loaded."""
    model, pixels, text = headed(setup), setup.tasks[0], setup.heads[0]
    assert isinstance(text, torch.Tensor)
    chosen = list(range(len(pixels.dataset.samples)) if indices is None else indices)
    labels = pixels.labels[chosen].to(text.device)
    if not ADAPTERS[name].pooled:
        return Shots(features_of(model, pixels, chosen), labels, text)
    with model.pooled():
        return Shots(features_of(model, pixels, chosen), labels, text, model.projection())


def check_adapter(setup: Setup, name: str) -> None:
    """Raise if a head cannot be fitted to the images or the model. Nothing is computed."""
    counts = torch.bincount(setup.tasks[0].labels)
    fewest = int(counts[counts > 0].min().item())
    check_count(name, ADAPTERS[name], fewest, setup.inputs.datasets[0].name)
    if ADAPTERS[name].pooled:
        projection_name(setup.clip.module.visual)  # type: ignore[arg-type]


def attach(setup: Setup, name: str, rate: float, start: torch.Tensor) -> torch.Tensor:
    """Give the model a head to train with the coefficients; gives the values at the start."""
    model = headed(setup)
    model.load(start)
    values = model.attach(name, shots_of(setup, name), rate)
    values.view(-1)[: start.numel()] = start.flatten()
    return values


def trained_head(setup: Setup, table: torch.Tensor, name: str) -> Head:
    """A head fitted to all shots, on the features of the model with these coefficients."""
    headed(setup).load(table)
    shots = shots_of(setup, name)
    return Head(name, ADAPTERS[name].train(shots), shots.text)


def head_score(
    setup: Setup, table: torch.Tensor, head: Head, pixels: Pixels, indices: Sequence[int]
) -> TaskScore:
    """How well images are classified by a head on top of the model with these coefficients."""
    model = headed(setup)
    model.load(table)
    with model.features_for(head):
        return score(model, pixels, indices, head)


def completed(setup: Setup, selection: Selection, name: str, stage: str) -> Selection:
    """The selection with its head: what was trained with the coefficients, or a head after them."""
    model = headed(setup)
    if stage == "joint":
        found, head = model.parts(selection.coefficients)
        model.detach()
        learned = bool(selection.coefficients.any())
        return replace(selection, coefficients=found, head=head if learned else None)
    table = selection.coefficients
    head = trained_head(setup, table, name)
    everything = range(len(setup.tasks[0].dataset.samples))
    reached = head_score(setup, table, head, setup.tasks[0], everything)
    after = Score((reached.accuracy, reached.gain), {"accuracy": reached.accuracy})
    return replace(selection, head=head, after=after)


# Which head, decided by cross-validation on the shots ------------------------------------------

JOINT = "probe"  # what `auto` trains with the coefficients
# Candidates beside refitted heads: the mean of that head and of the same one refitted, and the
# zero-shot head.
MEAN, PLAIN = "mean", "text"
_REFITTED = ("probe", "lpp", "tip-f")
Candidate = tuple[bool, str]  # with coefficients or on the base, and the head


@dataclass(frozen=True)
class Validated(Policy):
    """Score what training comes to on folds, train on everything, and keep the mean of all passes.

    The passes differ only in which images they saw. Values are averaged, so the result is one
    model.
    """

    validation: tuple[Fold, ...]
    final: Fold

    @property
    def folds(self) -> tuple[Fold, ...]:
        return (*self.validation, self.final)

    def keeps(self, found: Score, before: Sequence[Score]) -> bool:
        """Never: the folds only tell how well it goes."""
        return False

    def after_pass(self, number: int, values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """The mean of the passes so far."""
        return best + (values - best) / (number + 1)

    @property
    def backtracks(self) -> bool:
        return False


def validated(tasks: Sequence[Pixels], seed: int) -> Validated:
    """Folds that are scored at their end; none if a class has one image."""
    everything = tuple(tuple(range(len(pixels.dataset.samples))) for pixels in tasks)
    folds = validation_folds(tasks, seed, _FOLDS, Scoring.AT_END)
    return Validated(folds, Fold("all", everything, None, Scoring.NEVER))


def candidates() -> list[Candidate]:
    """What cross-validation chooses from; the first is taken unless another is better."""
    composed = [(True, name) for name in (MEAN, *_REFITTED, PLAIN)]
    return [*composed, *((False, name) for name in (*_REFITTED, PLAIN))]


def label_of(candidate: Candidate) -> str:
    """The name of a candidate in results."""
    return f"{'composed' if candidate[0] else 'base'} {candidate[1]}"


@dataclass(frozen=True)
class AutoObjective(LabelledObjective):
    """Trains coefficients with a linear head; folds score every candidate made of that."""

    setup: Setup | None = None

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """The accuracy of all candidates on images held out; at zero, of zero-shot alone."""
        found = super().judge(fold, coefficients)
        if not coefficients.any():
            return found
        assert self.setup is not None
        assert fold.scored_on is not None
        scores = candidate_scores(self.setup, coefficients, fold.train[0], fold.scored_on[0])
        values = {f"{label_of(one)}": score.accuracy for one, score in scores.items()}
        losses = {f"{label_of(one)} loss": -score.gain for one, score in scores.items()}
        return replace(found, values={**found.values, **values, **losses})


def candidate_scores(
    setup: Setup, values: torch.Tensor, train: Sequence[int], held: Sequence[int]
) -> dict[Candidate, TaskScore]:
    """Every candidate, fitted to some images and scored on others."""
    model, pixels, text = headed(setup), setup.tasks[0], setup.heads[0]
    assert isinstance(text, torch.Tensor)
    table, joint = model.parts(values)
    labels = pixels.labels[list(held)]
    found = {}
    for composed in (True, False):
        model.load(table if composed else torch.zeros_like(table))
        shots = shots_of(setup, JOINT, train)
        features = features_of(model, pixels, held)
        for one, name in candidates():
            if one == composed:
                head = _candidate_head(name, joint, shots)
                found[one, name] = score_of(logits_of(features, head).cpu(), labels)
    model.load(values)
    return found


def _candidate_head(name: str, joint: Head, shots: Shots) -> Classifier:
    if name == PLAIN:
        return shots.text
    if name == MEAN:
        return mean_head(joint, Head(JOINT, ADAPTERS[JOINT].train(shots), shots.text))
    return Head(name, ADAPTERS[name].train(shots), shots.text)


def mean_head(left: Head, right: Head) -> Head:
    """The mean of two linear heads, of which the second is brought to the norm of the first.

    What all classes have in common changes no prediction and is left out.
    """
    ours, theirs = (
        weight - weight.mean(0)
        for weight in (left.parameters["weight"], right.parameters["weight"])
    )
    scale = ours.norm() / theirs.norm().clamp(min=torch.finfo(theirs.dtype).tiny)
    return Head(JOINT, {"weight": (ours + scale * theirs) / 2}, left.text)


def chosen(scores: Mapping[str, float], images: int) -> Candidate:
    """The candidate that the folds speak for: the first, unless another is clearly better."""
    first, *others = candidates()
    best = max(others, key=lambda one: (scores[label_of(one)], -scores[f"{label_of(one)} loss"]))
    ours, theirs = scores[label_of(first)], scores[label_of(best)]
    spread = ours * (1 - ours) + theirs * (1 - theirs)  # at most: both see the same images
    doubt = math.sqrt(max(spread, 1 / images) / images)
    return best if theirs > ours + _CLEARLY * doubt else first


def decided(setup: Setup, selection: Selection) -> Selection:
    """The selection of `auto`: coefficients and head as the folds decided, on all shots."""
    model = headed(setup)
    table, joint = model.parts(selection.coefficients)
    model.detach()
    scores = selection.scores[-1].values if len(selection.scores) > 1 else {}
    pick = candidates()[0]
    if scores:
        pick = chosen(scores, len(setup.tasks[0].dataset.samples))
    if not pick[0]:
        table = torch.zeros_like(table)
    head = None
    if pick[1] == MEAN:
        head = mean_head(joint, trained_head(setup, table, JOINT))
    elif pick[1] != PLAIN:
        head = trained_head(setup, table, pick[1])
    choice = label_of(pick)
    after = Score((scores[choice],), {"accuracy": scores[choice]}) if scores else None
    before = selection.before if scores else None
    found = replace(selection, before=before, after=after)
    return replace(found, coefficients=table, head=head, choice=choice)


# Keeping a head -------------------------------------------------------------------------------


def with_head(
    recipe: LearnedRecipe,
    setup: Setup,
    selection: Selection,
    head: Head,
    folder: RunFolder | None,
) -> LearnedRecipe:
    """A learned recipe with its head: a file of the run, or the file as text without a folder.

    A tuned projection is a tensor of the model, and is kept as one more task vector.
    """
    if ADAPTERS[head.adapter].pooled:
        assert folder is not None
        return _with_projection(recipe, setup, selection, folder)
    saved = SavedHead(head, setup.inputs.datasets[0].classes)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="atlas-") as temporary:
            path = Path(temporary) / HEAD
            write_head(path, saved)
            entry = HeadEntry(adapter=head.adapter, data=to_text(path))
    else:
        path = folder.folder / HEAD
        write_head(path, saved)
        entry = HeadEntry(adapter=head.adapter, file=str(path), sha256=sha256_of(path))
    return recipe.model_copy(update={"head": entry})


def _with_projection(
    recipe: LearnedRecipe, setup: Setup, selection: Selection, folder: RunFolder
) -> LearnedRecipe:
    model, inputs = headed(setup), setup.inputs
    assert selection.head is not None
    name, flipped = projection_name(setup.clip.module.visual)  # type: ignore[arg-type]
    wanted = selection.head.parameters["projection"]
    model.load(selection.coefficients)
    added = (wanted - model.projection()).cpu()
    tensor = f"visual.{name}"
    base = setup.clip.module.state_dict()[tensor].float().cpu()
    changed = {tensor: base + (added.T if flipped else added)}
    told = f"projection tuned on {inputs.datasets[0].name}"
    entry = folder.keep_vector(PROJECTION, inputs.model, changed, told)
    return recipe.model_copy(
        update={
            "vectors": [*recipe.vectors, entry],
            "coefficients": _with_row(recipe, setup, entry, tensor, folder),
        }
    )


def _with_row(
    recipe: LearnedRecipe, setup: Setup, entry: VectorEntry, tensor: str, folder: RunFolder
) -> dict[str, dict[str, float]] | str:
    """The coefficients with a row of ones for the vector of the projection."""
    shapes = setup.pool.shapes
    parameters = setup.clip.module.visual.named_parameters()  # type: ignore[union-attr]
    wider = {
        f"visual.{name}": tuple(value.shape)
        for name, value in parameters
        if f"visual.{name}" in shapes or f"visual.{name}" == tensor
    }
    layout = layout_of(setup.inputs.recipe, wider)
    labels = placed_labels(layout, layout.placements[tensor])
    if isinstance(recipe.coefficients, dict):
        return {**recipe.coefficients, entry.name: dict.fromkeys(labels, 1.0)}
    before = open_safetensors(Path(recipe.coefficients))["coefficients"].read()
    column = {label: number for number, label in enumerate(layout.labels)}
    table = torch.zeros(len(before) + 1, len(column))
    table[:-1, [column[label] for label in setup.layout.labels]] = before
    table[-1, [column[label] for label in labels]] = 1.0
    return folder.keep_large(table)
