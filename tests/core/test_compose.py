"""Composition equals the naive sum, forward and backward, for every storage and granularity."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from composing import compose

from atlas_cli.core.compose import (
    Composition,
    Layout,
    Scattered,
    Shapes,
    by_block,
    by_group,
    by_partition,
    by_pattern,
    by_qkv,
    by_vector,
    choose_layout,
    coefficient_gradient,
    compose_block,
    indices,
    map_blocks,
    stack_blocks,
)
from atlas_cli.core.stacks import FactorStack, MappedStack
from atlas_cli.core.storage import Block, BlockPart, Dense, Factors, decode, factorise, quantise
from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.registry import (
    Granularity,
    find_granularity,
    granularity_labels,
    granularity_pattern,
)

SHAPES: Shapes = {
    "a.attn.in_proj_weight": (96, 32),
    "a.attn.in_proj_bias": (96,),
    "conv1.weight": (48, 3, 16, 16),  # more than one tile per vector
    "ln.weight": (32,),
    "scalar": (),
    "wide": (3, 70_000),
}


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def three_thirds(values: torch.Tensor) -> Block:
    """As a LoRA adapter stores a fused projection: one part per third of the rows."""
    if values.dim() != 2 or len(values) % 3:
        return Dense(values)
    rows = len(values) // 3
    parts = tuple(
        BlockPart(n * rows, random((rows, 4), n), random((4, values.shape[1]), n + 9))
        for n in range(3)
    )
    return Factors(tuple(values.shape), parts)


STORAGES: dict[str, Callable[[torch.Tensor], Block]] = {
    "fp32": Dense,
    "fp16": lambda values: Dense(values.half()),
    "bf16": lambda values: Dense(values.bfloat16()),
    "int8": quantise,
    "rank 4": lambda values: factorise(values, rank=4),
    "lora": three_thirds,
}
LAYOUTS: dict[str, Callable[[Shapes], Layout]] = {
    "block": by_block,
    "vector": by_vector,
    "qkv": by_qkv,
    "partition 5": lambda shapes: by_partition(shapes, 5, seed=3),
    "pattern": lambda shapes: by_pattern(shapes, [r"(bias|weight)$"]),
}


def make(layout: Layout, vectors: list[dict[str, Block]], stack=stack_blocks) -> Composition:
    base = {name: random(shape, 100 + n) for n, (name, shape) in enumerate(SHAPES.items())}
    stacks = {
        name: stack({i: blocks[name] for i, blocks in enumerate(vectors) if name in blocks})
        for name in SHAPES
    }
    return Composition(base, stacks, layout, len(vectors))


def columns(layout: Layout, name: str) -> torch.Tensor:
    """The column of every element, spelt out."""
    size = math.prod(SHAPES[name])
    placement = layout.placements[name]
    if isinstance(placement, Scattered):
        return placement.first + indices(placement, size).long()
    spelt = torch.empty(size, dtype=torch.long)
    for start, stop, column in zip(
        placement.bounds, placement.bounds[1:], placement.columns, strict=False
    ):
        spelt[start:stop] = column
    return spelt


def naive(
    composition: Composition, vectors: list[dict[str, Block]], coefficients: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The sum of products under autograd, in float64."""
    composed = {}
    for name, base in composition.base.items():
        column = columns(composition.layout, name)
        total = base.double()
        for i, blocks in enumerate(vectors):
            if name in blocks:
                scale = coefficients[i, column].reshape(base.shape)
                total = total + scale * decode(blocks[name]).double().reshape(base.shape)
        composed[name] = total
    return composed


def check(layout: Layout, vectors: list[dict[str, Block]], stack=stack_blocks) -> None:
    composition = make(layout, vectors, stack)
    start = random(composition.shape, 7)
    ours_at, naive_at = (start.clone().to(d).requires_grad_() for d in (torch.float, torch.double))
    ours, wanted = compose(composition, ours_at), naive(composition, vectors, naive_at)
    # Weights that point along the vectors: a sum that cancels out has no relative precision.
    weights = {name: tensor.detach() + random(tensor.shape, 50) for name, tensor in ours.items()}
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-5)
    sum((ours[n] * w).sum() for n, w in weights.items()).backward()
    sum((wanted[n] * w.double()).sum() for n, w in weights.items()).backward()
    difference = (ours_at.grad.double() - naive_at.grad).norm() / naive_at.grad.norm()
    assert difference < 1e-6


def stored(storage: str, count: int = 3) -> list[dict[str, Block]]:
    """Random vectors, every block kept in one way."""
    return [
        {
            name: STORAGES[storage](random(shape, 10 * i + n))
            for n, (name, shape) in enumerate(SHAPES.items())
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradient_equal_the_naive_sum(storage: str, layout: str):
    check(LAYOUTS[layout](SHAPES), stored(storage))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_stay_where_they_are_give_the_same_sum(storage: str, layout: str):
    check(LAYOUTS[layout](SHAPES), stored(storage), map_blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_of_different_storage_compose_together(layout: str):
    vectors = [
        {name: store(random(shape, 10 * i + n)) for n, (name, shape) in enumerate(SHAPES.items())}
        for i, store in enumerate(STORAGES.values())
    ]
    check(LAYOUTS[layout](SHAPES), vectors)


def test_a_vector_may_lack_blocks():
    vectors = [
        {name: Dense(random(shape, n)) for n, (name, shape) in enumerate(SHAPES.items()) if n != i}
        for i in range(3)
    ]
    check(by_block(SHAPES), vectors)


def test_zero_coefficients_give_the_base_bit_for_bit():
    vectors = [{name: Dense(random(shape, 3)) for name, shape in SHAPES.items()}]
    composition = make(by_block(SHAPES), vectors)
    composed = compose(composition, torch.zeros(composition.shape))
    assert all(torch.equal(composed[name], composition.base[name]) for name in SHAPES)


def test_the_base_and_the_coefficients_are_left_alone():
    vectors = [{name: Dense(random(shape, 3)) for name, shape in SHAPES.items()}]
    composition = make(by_block(SHAPES), vectors)
    before = {name: tensor.clone() for name, tensor in composition.base.items()}
    coefficients = torch.ones(composition.shape)
    compose(composition, coefficients)
    assert all(torch.equal(before[name], composition.base[name]) for name in SHAPES)
    assert torch.equal(coefficients, torch.ones(composition.shape))


def test_blocks_of_one_shape_are_split_differently():
    layout = by_partition({"a": (1000,), "b": (1000,)}, 4, seed=0)
    first, second = (indices(layout.placements[name], 1000) for name in "ab")
    assert not torch.equal(first, second)
    assert sorted(set(first.tolist())) == [0, 1, 2, 3]


def test_labels_name_every_column():
    layout = by_qkv(SHAPES)
    assert layout.labels[:4] == (
        "a.attn.in_proj_weight[q]",
        "a.attn.in_proj_weight[k]",
        "a.attn.in_proj_weight[v]",
        "a.attn.in_proj_bias[q]",
    )
    assert by_vector(SHAPES).labels == ("all",)
    patterns = by_pattern(SHAPES, [r"^(\w+)\."])
    assert patterns.labels == (r"^(\w+)\. a", r"^(\w+)\. conv1", r"^(\w+)\. ln", "scalar", "wide")


# Granularities by their names -------------------------------------------------------------------

NAMED = {"a.weight": (4, 2), "a.bias": (4,), "b.weight": (3,)}


def test_a_granularity_is_chosen_by_its_name():
    assert choose_layout(NAMED, "block") == by_block(NAMED)
    assert choose_layout(NAMED, "vector").labels == ("all",)
    assert choose_layout(NAMED, "partition:3", seed=5) == by_partition(NAMED, 3, 5)
    groups = choose_layout(NAMED, "block", groups=[r"^(\w+)\."])
    assert len(groups.labels) == 2


def test_a_name_must_have_the_parameter_that_it_needs_and_no_other():
    for text in ("layer", "partition", "partition:", "partition:0", "partition:100000", "block:2"):
        assert find_granularity(text) is None
        with pytest.raises(UsageError, match="expected block, vector, qkv or partition:K, found"):
            choose_layout(NAMED, text)


def test_names_are_shown_and_matched_in_one_order():
    assert granularity_labels() == "block, vector, qkv or partition:K"
    assert granularity_pattern() == "^(block|vector|qkv|partition:[1-9][0-9]{0,4})$"


def test_a_layout_without_a_place_for_every_block_is_refused(monkeypatch: pytest.MonkeyPatch):
    def first_only(shapes) -> Layout:
        return by_group({"a.weight": shapes["a.weight"]}, {"a.weight": "first"})

    found = Granularity("first", first_only, "", "")
    monkeypatch.setattr("atlas_cli.core.compose.find_granularity", lambda name: found)
    with pytest.raises(MismatchError, match=r"granularity first: no coefficient for a\.bias"):
        choose_layout(NAMED, "first")


# The parts that towers use --------------------------------------------------------------------


def mixed() -> list[dict[str, Block]]:
    """A vector of every storage."""
    return [
        {name: store(random(shape, 10 * i + n)) for n, (name, shape) in enumerate(SHAPES.items())}
        for i, store in enumerate(STORAGES.values())
    ]


@pytest.mark.parametrize("storage", STORAGES)
def test_mapped_blocks_are_the_given_ones_and_no_copies(storage: str):
    (vector,) = stored(storage, 1)
    for block in vector.values():
        (*mapped,) = map_blocks({0: block})
        if isinstance(block, Factors):  # small, and cheaper to keep than to read
            assert all(isinstance(stack, FactorStack) for stack in mapped)
        else:
            (stack,) = mapped
            assert isinstance(stack, MappedStack)
            assert stack.blocks[0].values.data_ptr() == block.values.data_ptr()


def test_mapped_and_stacked_blocks_of_all_storages_give_the_same_numbers():
    layout = by_block(SHAPES)
    kept, mapped = (make(layout, mixed(), stack) for stack in (stack_blocks, map_blocks))
    coefficients = random(kept.shape, 7)
    first, second = compose(kept, coefficients), compose(mapped, coefficients)
    for name in SHAPES:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_composed_into_a_given_tensor_with_the_same_bits(layout: str):
    composition = make(LAYOUTS[layout](SHAPES), mixed())
    coefficients = random(composition.shape, 7)
    for name, shape in SHAPES.items():
        place = torch.full(shape, math.nan)  # nothing of what was there may be left
        given = compose_block(composition, name, coefficients, place)
        assert given is place
        assert torch.equal(place, compose_block(composition, name, coefficients))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stack", [stack_blocks, map_blocks])
def test_the_gradient_is_the_product_of_vectors_and_gradients_of_the_blocks(layout: str, stack):
    vectors = mixed()
    composition = make(LAYOUTS[layout](SHAPES), vectors, stack)
    gradients = {name: decode(vectors[0][name]) + random(s, 60) for name, s in SHAPES.items()}
    wanted = torch.zeros(composition.shape, dtype=torch.float64)
    for name, gradient in gradients.items():
        column = columns(composition.layout, name)
        for i, blocks in enumerate(vectors):
            products = decode(blocks[name]).double().flatten() * gradient.double().flatten()
            wanted[i].index_add_(0, column, products)
    found = coefficient_gradient(composition, gradients)
    assert found.dtype == torch.float64
    assert (found - wanted).norm() / wanted.norm() < 1e-6


def test_a_block_without_a_gradient_adds_nothing():
    composition = make(by_block(SHAPES), stored("fp32"))
    found = coefficient_gradient(composition, {"ln.weight": torch.ones(32)})
    column = composition.layout.labels.index("ln.weight")
    assert found[:, column].all()
    assert found.count_nonzero() == len(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_spread_over_threads_give_identical_bits(layout: str):
    composition = make(LAYOUTS[layout](SHAPES), mixed())
    weights = {name: random(shape, 50) for name, shape in SHAPES.items()}

    def run(spread) -> tuple[list[torch.Tensor], torch.Tensor]:
        table = random(composition.shape, 7).requires_grad_()
        composed = compose(composition, table, spread)
        sum((composed[name] * weights[name]).sum() for name in SHAPES).backward()
        return list(composed.values()), table.grad

    alone, alone_gradient = run(map)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            together, gradient = run(pool.map)
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
            assert torch.equal(alone_gradient, gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_base_in_half_precision_is_composed_in_float32(dtype: torch.dtype):
    whole = make(by_block(SHAPES), mixed())
    base = {name: tensor.to(dtype) for name, tensor in whole.base.items()}
    composition = Composition(base, whole.stacks, whole.layout, whole.vectors)
    coefficients = random(whole.shape, 7)
    composed = compose(composition, coefficients)
    wanted = naive(composition, mixed(), coefficients.double())
    for name, tensor in composed.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-5)


def test_adding_a_vector_and_its_negation_changes_nothing_but_rounding():
    (vector,) = stored("fp32", 1)
    negated = {name: Dense(-decode(block)) for name, block in vector.items()}
    composition = make(by_block(SHAPES), [vector, negated])
    composed = compose(composition, torch.ones(composition.shape))
    for name, tensor in composed.items():
        torch.testing.assert_close(tensor, composition.base[name], rtol=1e-6, atol=1e-6)


def test_a_transposed_base_and_gradient_are_taken_by_place_not_by_stride():
    shapes = {"w": (6, 4)}
    base = {"w": random((4, 6), 0).T}
    values = random((6, 4), 1)
    composition = Composition(base, {"w": stack_blocks({0: Dense(values)})}, by_block(shapes), 1)
    composed = compose(composition, torch.tensor([[2.0]]))
    torch.testing.assert_close(composed["w"], base["w"] + 2 * values)
    gradient = random((4, 6), 2).T
    found = coefficient_gradient(composition, {"w": gradient})
    assert found.item() == pytest.approx((gradient * values).sum().item(), rel=1e-6)
