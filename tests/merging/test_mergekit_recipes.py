"""mergekit's recipes run unchanged on a Llama and on CLIP, and give mergekit's tensors.

What mergekit gave is kept in tests/fixtures; test_oracles.py holds that against mergekit itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_fixtures import write_models, write_recipes
from merge_runs import read_model
from mergekit_cases import MODELS, fixture, joined, parted

from atlas_cli.cli.app import main

EXACT = ("linear", "task_arithmetic", "passthrough", "dare_linear", "dare_ties", "della_linear")
# Which of several elements of equal magnitude mergekit takes depends on a sort that is not stable.
SELECTING = ("ties", "breadcrumbs", "sce", "breadcrumbs_ties")


@pytest.mark.parametrize("chosen", MODELS)
def test_the_same_recipe_gives_the_same_tensors(chosen: str, tmp_path: Path):
    """The same bits, or the same to rounding, or nearer to the exact result than mergekit's."""
    kept = fixture("mergekit_recipes")
    write_models(tmp_path, kept, chosen)
    for name in write_recipes(tmp_path, chosen):
        theirs = parted(kept[f"{chosen}/{name}"], MODELS[chosen])
        compare(tmp_path / f"{name}.yaml", theirs, name.partition("_g")[0].partition("_f")[0])


def compare(recipe: Path, theirs: dict[str, torch.Tensor], method: str) -> None:
    ours = merge(recipe, recipe.parent / f"{recipe.stem}-ours")
    assert ours.keys() == theirs.keys(), recipe.stem
    far = []
    for key, wanted in theirs.items():
        found, where = ours[key], (recipe.stem, key)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        if method in EXACT:
            assert torch.equal(found, wanted), where
        elif apart(found, wanted) > (1e-6 if found.dtype == torch.float32 else 2e-3):
            far.append(key)
    if not far:
        return
    if method in SELECTING:
        assert next(iter(ours.values())).dtype == torch.bfloat16, recipe.stem
        assert apart(joined(ours), joined(theirs)) < 0.05, recipe.stem
        return
    exact_recipe = recipe.with_stem(f"{recipe.stem}-exact")
    exact_recipe.write_text(recipe.read_text() + "\ndtype: float64\n")
    exact = merge(exact_recipe, recipe.parent / f"{recipe.stem}-exact")
    for key in far:
        assert apart(ours[key], exact[key]) < apart(theirs[key], exact[key]), (recipe.stem, key)


def merge(recipe: Path, target: Path) -> dict[str, torch.Tensor]:
    assert main(["merge", str(recipe), "-o", str(target), "--memory", "4GB", "-q"]) == 0
    return read_model(target)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
