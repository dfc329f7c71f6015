"""Bases for coefficients: formulas in numpy, and runs that merge like any other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from learned_runs import write_world

import atlas_cli
from atlas_cli.core.basis import principal_weights, singular_basis
from atlas_cli.core.storage import decode
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.learning.fit import Fitting
from atlas_cli.learning.run import RunOptions, prepare
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.model import check_recipe
from atlas_cli.vectors.basis import read_start, write_basis
from atlas_cli.vectors.format import open_checked

QUICK = {"batch_size": 8, "epochs": 2, "min_steps": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def paths(world: Path) -> list[str]:
    return sorted(str(path) for path in (world / "v").iterdir())


def polar(matrix: np.ndarray) -> np.ndarray:
    """M (M^T M)^(-1/2), by another way than ours."""
    values, vectors = np.linalg.eigh(matrix.T @ matrix)
    return matrix @ vectors @ np.diag(values**-0.5) @ vectors.T


def test_singular_directions_are_the_polar_factors_of_the_stacked_singular_vectors():
    random = np.random.default_rng(0)
    matrices = [random.normal(size=(9, 7)) for _ in range(2)]
    ups, downs = [], []
    for matrix in matrices:
        values, vectors = np.linalg.eigh(matrix @ matrix.T)  # left ones, the largest last
        left = vectors[:, ::-1][:, :3]
        ups.append(left)
        downs.append((left.T @ matrix) / np.sqrt(values[::-1][:3])[:, None])
    up, down = polar(np.concatenate(ups, axis=1)), polar(np.concatenate(downs).T).T
    found = singular_basis([torch.from_numpy(matrix) for matrix in matrices], 3)
    # A pair of singular vectors may have both signs turned, which leaves the product as it is.
    for r in range(6):
        ours = np.outer(found.up[:, r].numpy(), found.down[r].numpy())
        assert np.allclose(np.abs(ours), np.abs(np.outer(up[:, r], down[r])), atol=1e-8)
        start = np.mean([found.up[:, r].numpy() @ m @ found.down[r].numpy() for m in matrices])
        assert found.start[r].item() == pytest.approx(start)
    assert torch.allclose(found.up.T @ found.up, torch.eye(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(found.down @ found.down.T, torch.eye(6, dtype=torch.float64), atol=1e-12)


def test_all_directions_of_a_vector_with_their_start_give_it_back(world, tmp_path):
    (path, *_) = paths(world)
    vector = open_checked(Path(path))
    matrices = {b.name: b.shape for b in vector.header.blocks if b.name.endswith("fc.weight")}
    name, shape = next(iter(matrices.items()))
    most = min(shape)
    made = write_basis(f"svd:{most}", [path], tmp_path / "basis", 0)
    start, total = read_start(made)[name], torch.zeros(shape)
    for number, one in enumerate(made):
        opened = open_checked(Path(one))
        if name in opened.names:
            total += start[number] * decode(opened.read(name))
    exact = decode(vector.read(name))
    assert (total - exact).norm() < 1e-5 * exact.norm()


def test_principal_directions_are_those_of_numpys_decomposition():
    stacked = np.random.default_rng(1).normal(size=(4, 50))
    weights = principal_weights(torch.from_numpy(stacked @ stacked.T), 2).numpy()
    _, values, directions = np.linalg.svd(stacked, full_matrices=False)
    for k in range(2):
        found = weights[k] @ stacked
        assert np.linalg.norm(found) == pytest.approx(values[k])
        assert abs(found @ directions[k]) == pytest.approx(values[k])


def test_random_directions_have_the_norms_of_the_vectors_and_come_again(world, tmp_path):
    given = paths(world)
    made = write_basis("random", given, tmp_path / "a", 3)
    again = write_basis("random", given, tmp_path / "b", 3)
    other = write_basis("random", given, tmp_path / "c", 4)
    for path, one in zip(given, made, strict=True):
        for before, after in zip(
            open_checked(Path(path)).header.blocks,
            open_checked(Path(one)).header.blocks,
            strict=True,
        ):
            assert after.norm == pytest.approx(before.norm, rel=1e-4)
    first = open_checked(Path(made[0])).header.blocks[0].name
    drawn = [decode(open_checked(Path(some[0])).read(first)) for some in (made, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_run_on_a_basis_merges_to_the_model_that_it_learned(world, tmp_path):
    for basis in ("svd:2", "random", "pca:1"):
        run = tmp_path / basis[:3]
        given = {"model": world / "base", "vectors": paths(world), "basis": basis, **QUICK}
        more = {"lr": 0.05} if basis == "svd:2" else {"lr": 0.5}
        found = atlas_cli.fit(
            world / "photos", output=run, adapter="lpp", adapter_stage="after", **given, **more
        )
        model = atlas_cli.merge(found, tmp_path / f"{basis[:3]}-model", memory="4GB")
        (scored,) = atlas_cli.evaluate(str(model), world / "photos")
        told = json.loads((run / "result.json").read_text())
        assert scored.top1 == pytest.approx(told["learned"])
        if basis == "svd:2":
            table = json.loads((run / "coefficients.json").read_text())
            values = [value for row in table.values() for value in row.values()]
            assert len(table) == 4
            assert min(values) >= 0


def test_singular_directions_start_pooled_with_the_schedule_of_bolt(world, tmp_path):
    given = {
        "data": str(world / "photos"),
        "model": str(world / "base"),
        "vectors": paths(world),
        "basis": "svd:2",
    }
    recipe = check_recipe(FitRecipe, given)
    assert (recipe.lr, recipe.weight_decay, recipe.batch_size, recipe.epochs) == (1e-3, 0, 32, 20)
    with prepare(Fitting(recipe), RunOptions(folder=tmp_path / "run")) as ready:
        config, start = ready.objective.training.optimizer_config, ready.objective.start
        pooled = read_start(ready.inputs.files)
        column = ready.layout.labels.index(next(iter(pooled)))
        wanted = pooled[ready.layout.labels[column]].clamp(min=0)
        found = start[:, column]
        assert any(torch.allclose(found, scale * wanted) for scale in (1, 3, 5, 7, 10))
    assert config.low == 0
    assert [config.rate_at(n, 100) for n in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_bad_input_is_one_line_and_nothing_is_written(world, tmp_path):
    run = tmp_path / "run"
    cases = [
        ({"basis": "svd:99"}, UsageError, "room for 32 directions each; use svd:32"),
        ({"basis": "pca:3"}, UsageError, "no more than 2 principal directions"),
        ({"basis": "sdv:2"}, UsageError, "expected svd:K or random or pca:K, found 'sdv:2'"),
        ({"basis": "svd"}, UsageError, "expected svd:K"),
        ({"basis": "random", "granularity": "vector"}, UsageError, "a coefficient per block"),
        ({"basis": "random", "vectors": [], "adapter": "lpp"}, UsageError, "no vectors"),
        ({"basis": "svd:2", "adapter": "probe", "adapter_stage": "joint"}, UsageError, "alone"),
    ]
    for more, kind, words in cases:
        given = {"model": world / "base", "vectors": paths(world), **QUICK, **more}
        with pytest.raises(kind, match=words):
            atlas_cli.fit(world / "photos", output=run, **given)
        assert not run.exists(), words
    with pytest.raises(UsageError, match="use -o DIR"):
        atlas_cli.fit(world / "photos", model=world / "base", vectors=paths(world), basis="pca:1")
    for data, own in (("birds", "birds"), ("stanford-cars", "<cars>")):  # one task, two names
        (world / data).symlink_to(world / "photos")
        with pytest.raises(MismatchError, match=f"vector {own} seems to be learned on"):
            atlas_cli.fit(
                world / data, model=world / "base", vectors=paths(world), basis="pca:1", output=run
            )
        assert not run.exists()
