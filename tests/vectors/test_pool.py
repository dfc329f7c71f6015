"""Vectors are refused if they do not fit the base, and kept within the memory they may use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composing import compose
from conftest import TINY_CONFIG, write_open_clip
from makers import FORMS, write_vector
from safetensors.torch import load_file, save_file

from atlas_cli.core.compose import Composition, by_block
from atlas_cli.core.storage import Block, Dense, Form, bytes_of, decode, encode, relative_error
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import read_metadata
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.models.folders import read_tensors
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.format import base_fingerprint
from atlas_cli.vectors.pool import Pool, compose_pool, open_pool

RESNET = {
    **TINY_CONFIG,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64},
}
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class Base:
    """A model on disk, and task vectors of it."""

    def __init__(self, folder: Path, config: dict = TINY_CONFIG) -> None:
        size = config["vision_cfg"]["image_size"]
        preprocess = {"size": size, "mean": [0.5] * 3, "std": [0.5] * 3}
        write_open_clip(folder, config, preprocess)
        weights = load_file(folder / "open_clip_model.safetensors")
        self.weights = {n: t for n, t in weights.items() if n.startswith("visual.")}
        self.statistics = [n for n in self.weights if n.endswith(("_mean", "_var", "_tracked"))]
        self.parameters = [n for n in self.weights if n not in self.statistics]
        self.lazy: LazyTensors = read_tensors(locate(parse_reference(str(folder))))
        self.fingerprint = base_fingerprint(self.lazy, "visual")

    def values(self, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        return {
            name: 0.01 * torch.randn(tensor.shape, generator=random)
            for name, tensor in self.weights.items()
            if tensor.is_floating_point()
        }

    def vector(
        self, path: Path, seed: int = 1, form: Callable[[torch.Tensor], Block] = Dense, **changes
    ) -> str:
        exact = self.values(seed)
        blocks = {name: form(tensor) for name, tensor in exact.items()}
        changes = {"fingerprint": self.fingerprint, **changes}
        return str(write_vector(path, blocks, exact=exact, **changes))

    def open(self, *paths: str, budget: int | None = None) -> Pool:
        return open_pool(paths, self.lazy, self.parameters, budget=budget)

    def compose(self, pool: Pool) -> Composition:
        return compose_pool(pool, self.weights, by_block(pool.shapes), CPU)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"))


# What is refused ------------------------------------------------------------------------------


def test_a_vector_of_another_base_is_refused_with_both_fingerprints(base: Base, tmp_path: Path):
    path = base.vector(tmp_path / "cars.safetensors", fingerprint="0123456789abcdef" * 4)
    with pytest.raises(MismatchError) as problem:
        base.open(path)
    assert str(problem.value) == (
        f"{path}: was taken from another base (builtin:tiny, fingerprint 0123456789ab) than the "
        f"model (fingerprint {base.fingerprint[:12]})"
    )


def test_vectors_of_two_bases_are_refused(base: Base, tmp_path: Path):
    cars = base.vector(tmp_path / "cars.safetensors")
    dogs = base.vector(tmp_path / "dogs.safetensors", fingerprint="ab" * 32)
    with pytest.raises(MismatchError, match=r"dogs.* and .*cars.* were taken from different base"):
        base.open(cars, dogs)


@pytest.mark.parametrize("scope", ["text", "all"])
def test_a_vector_of_another_scope_is_refused_with_the_way_out(
    base: Base, tmp_path: Path, scope: str
):
    path = base.vector(tmp_path / "cars.safetensors", scope=scope)
    with pytest.raises(MismatchError, match=rf"has scope {scope}, .*; extract it with --scope vis"):
        base.open(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("budget", [None, 0], ids=["in memory", "mapped"])
def test_a_vector_with_a_value_that_is_not_finite_is_refused_by_block(
    base: Base, tmp_path: Path, bad: float, budget: int | None
):
    exact = base.values(1)
    blocks = {name: tensor.clone() for name, tensor in exact.items()}
    blocks["visual.ln_post.weight"][3] = bad
    path = tmp_path / "cars.safetensors"
    write_vector(path, exact, fingerprint=base.fingerprint)
    metadata = read_metadata(path)
    save_file(blocks, path, metadata)  # as if it was damaged after it was written
    with pytest.raises(AtlasError, match=r"block visual\.\S+ holds values that are not finite"):
        base.compose(base.open(str(path), budget=budget))


def test_two_vectors_of_one_name_are_refused_with_the_way_out(base: Base, tmp_path: Path):
    first = base.vector(tmp_path / "cars.safetensors")
    second = base.vector(tmp_path / "more.safetensors", 2, name="cars")
    with pytest.raises(UsageError) as problem:
        base.open(first, second)
    assert str(problem.value) == (
        f"{second} and {first} are both called cars; give one another name with: "
        "atlas extract --name"
    )


def test_a_file_that_is_no_vector_is_refused_by_name(base: Base, tmp_path: Path):
    path = write_open_clip(tmp_path / "model") / "open_clip_model.safetensors"
    with pytest.raises(CheckpointError, match="is not a task vector; make one with: atlas extract"):
        base.open(str(path))


def test_a_block_that_the_base_has_in_another_shape_or_not_at_all_is_refused(
    base: Base, tmp_path: Path
):
    proj = "visual.proj"
    for blocks, message in (
        ({proj: torch.ones(64, 5)}, r"block visual\.proj has shape \(64, 5\), but .* \(64, 32\)"),
        ({"visual.wheel": torch.ones(2)}, r"block visual\.wheel has shape .* no such tensor"),
    ):
        path = write_vector(tmp_path / "v.safetensors", blocks, fingerprint=base.fingerprint)
        with pytest.raises(MismatchError, match=message):
            base.open(str(path))


# What is opened -------------------------------------------------------------------------------


def test_a_pool_knows_its_members_and_blocks(base: Base, tmp_path: Path):
    paths = [base.vector(tmp_path / f"{name}.safetensors", n) for n, name in enumerate("ab")]
    pool = base.open(*paths)
    assert [member.name for member in pool.members] == ["a", "b"]
    assert [member.path for member in pool.members] == paths
    assert list(pool.names) == base.parameters
    assert pool.left == ()
    assert pool.shapes == {name: tuple(base.weights[name].shape) for name in base.parameters}


def test_composed_weights_are_the_base_plus_scaled_vectors(base: Base, tmp_path: Path):
    pool = base.open(*(base.vector(tmp_path / f"{n}.safetensors", n) for n in (1, 2)))
    composition = base.compose(pool)
    composed = compose(composition, torch.tensor([[0.5], [-2.0]]).expand(composition.shape))
    first, second = base.values(1), base.values(2)
    for name in base.parameters:
        wanted = base.weights[name] + 0.5 * first[name] - 2 * second[name]
        torch.testing.assert_close(composed[name], wanted)


def test_a_vector_may_have_some_blocks_only(base: Base, tmp_path: Path):
    one = {"visual.proj": base.values(1)["visual.proj"]}
    other = {"visual.ln_post.bias": base.values(1)["visual.ln_post.bias"]}
    pool = base.open(
        *(
            str(write_vector(tmp_path / f"{n}.safetensors", blocks, fingerprint=base.fingerprint))
            for n, blocks in enumerate((one, other))
        )
    )
    assert set(pool.names) == {"visual.proj", "visual.ln_post.bias"}
    composition = base.compose(pool)
    assert [s[0].members for s in composition.stacks.values()] in ([(0,), (1,)], [(1,), (0,)])


def test_statistics_of_batch_normalisation_are_left_to_the_base(tmp_path: Path):
    base = Base(tmp_path / "resnet", RESNET)
    pool = base.open(base.vector(tmp_path / "v.safetensors"))
    assert "visual.bn1.running_mean" in pool.left
    assert all(name.endswith(("running_mean", "running_var")) for name in pool.left)
    composition = base.compose(pool)
    assert "visual.bn1.weight" in composition.stacks
    assert not set(pool.left) & composition.stacks.keys()


# Memory ---------------------------------------------------------------------------------------


def stored_bytes(pool: Pool, storage: str | None = None) -> int:
    """What the dense blocks of a pool take, spelt out block by block."""
    total = 0
    for member in pool.members:
        for name in pool.names:
            block = member.vector.read(name)
            total += bytes_of(encode(block, Form(storage)) if storage else block)
    return total


@pytest.fixture
def plain(base: Base, tmp_path: Path) -> list[str]:
    return [base.vector(tmp_path / f"{name}.safetensors", n) for n, name in enumerate("ab")]


def test_as_the_budget_shrinks_vectors_are_stored_lower_and_then_mapped(
    base: Base, plain: list[str]
):
    pool = base.open(*plain)
    sizes = {
        "as stored": stored_bytes(pool),
        "bf16": stored_bytes(pool, "bf16"),
        "int8": stored_bytes(pool, "int8"),
    }
    assert sizes["as stored"] == 2 * sizes["bf16"]
    assert (pool.storage, pool.bytes) == ("as stored", sizes["as stored"])
    lower = {"as stored": "bf16", "bf16": "int8", "int8": "mapped"}
    for storage, size in sizes.items():
        fits = base.open(*plain, budget=size)
        assert (fits.storage, fits.bytes) == (storage, size)
        assert base.open(*plain, budget=size - 1).storage == lower[storage]
    assert base.open(*plain, budget=0).storage == "mapped"


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_blocks_that_are_small_already_are_counted_and_kept_as_they_are(
    base: Base, tmp_path: Path, form: str
):
    path = base.vector(tmp_path / "v.safetensors", form=FORMS[form])
    pool = base.open(path)
    assert pool.bytes == stored_bytes(pool)
    again = base.open(path, budget=pool.bytes)
    assert (again.storage, again.bytes) == ("as stored", pool.bytes)


def test_low_rank_vectors_are_counted_by_their_factors(base: Base, tmp_path: Path):
    path = base.vector(tmp_path / "v.safetensors", form=FORMS["factors"])
    pool = base.open(path)
    assert stored_bytes(pool) <= pool.bytes <= Path(path).stat().st_size
    assert pool.bytes < stored_bytes(base.open(base.vector(tmp_path / "w.safetensors"))) / 2


BUDGETS = {"as stored": None, "bf16": 0.5, "int8": 0.3, "mapped": 0.0}


def composed_with(base: Base, paths: list[str], storage: str) -> tuple[Composition, Tensors]:
    share = BUDGETS[storage]
    whole = base.open(*paths).bytes
    pool = base.open(*paths, budget=None if share is None else int(share * whole))
    assert pool.storage == storage
    composition = base.compose(pool)
    random = torch.Generator().manual_seed(0)
    return composition, compose(composition, torch.randn(composition.shape, generator=random))


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_lower_storage_changes_composed_weights_by_no_more_than_its_error(
    base: Base, plain: list[str], storage: str
):
    composition, found = composed_with(base, plain, storage)
    _, exact = composed_with(base, plain, "as stored")
    random = torch.Generator().manual_seed(0)
    coefficients = torch.randn(composition.shape, generator=random)
    for column, name in enumerate(composition.layout.labels):
        bound = 1e-6
        for row in range(2):
            values = base.values(row)[name]
            error = relative_error(values, encode(Dense(values), Form(storage)))
            bound += coefficients[row, column].abs().item() * error * values.norm().item()
        distance = (found[name] - exact[name]).norm().item()
        assert distance <= bound * (1 + 1e-4)
    assert any(not torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize("form", FORMS)
def test_mapped_vectors_give_the_same_weights_and_gradient_as_in_memory(
    base: Base, tmp_path: Path, form: str
):
    paths = [base.vector(tmp_path / f"{n}.safetensors", n, FORMS[form]) for n in (1, 2)]
    gradients, weights = [], []
    for budget in (None, 0):
        pool = base.open(*paths, budget=budget)
        assert pool.storage == ("mapped" if budget == 0 else "as stored")
        composition = base.compose(pool)
        table = torch.full(composition.shape, 0.3, requires_grad=True)
        composed = compose(composition, table)
        sum(tensor.square().sum() for tensor in composed.values()).backward()
        weights.append(composed)
        gradients.append(table.grad)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_mapped_dense_vectors_take_no_memory_of_their_own(base: Base, plain: list[str]):
    composition = base.compose(base.open(*plain, budget=0))
    for stacks in composition.stacks.values():
        (stack,) = stacks
        assert all(not hasattr(stack, kept) for kept in ("values", "codes"))
        assert len(stack.blocks) == 2


def test_decoded_blocks_of_a_pool_are_those_of_the_files(base: Base, plain: list[str]):
    pool = base.open(*plain)
    for row, member in enumerate(pool.members):
        wanted = base.values(row)
        assert all(torch.equal(decode(member.vector.read(n)), wanted[n]) for n in pool.names)
