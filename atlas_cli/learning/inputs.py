"""The labelled images that a verb learns from, by what its recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas_cli.datasets.dataset import Dataset, check_templates, open_dataset, share_of
from atlas_cli.errors import DataError, UsageError
from atlas_cli.recipes.text import parse_shots

if TYPE_CHECKING:
    from atlas_cli.recipes.finetune import FinetuneRecipe
    from atlas_cli.recipes.learning import LearnRecipe


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
