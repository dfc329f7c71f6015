"""Composition equals the naive sum, forward and backward, for every storage and granularity."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from atlas_cli.core import blocks as granularity
from atlas_cli.core.blocks import Layout, Scattered, Shapes, indices
from atlas_cli.core.compose import Composition, compose, stack_blocks
from atlas_cli.core.storage import Block, Dense, Factors, Part, decode, factorise, quantise

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
        Part(n * rows, random((rows, 4), n), random((4, values.shape[1]), n + 9)) for n in range(3)
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
    "block": granularity.by_block,
    "vector": granularity.by_vector,
    "qkv": granularity.by_qkv,
    "partition 5": lambda shapes: granularity.by_partition(shapes, 5, seed=3),
    "pattern": lambda shapes: granularity.by_pattern(shapes, [r"(bias|weight)$"]),
}


def make(layout: Layout, vectors: list[dict[str, Block]]) -> Composition:
    base = {name: random(shape, 100 + n) for n, (name, shape) in enumerate(SHAPES.items())}
    stacks = {
        name: stack_blocks({i: blocks[name] for i, blocks in enumerate(vectors) if name in blocks})
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


def check(layout: Layout, vectors: list[dict[str, Block]]) -> None:
    composition = make(layout, vectors)
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


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradient_equal_the_naive_sum(storage: str, layout: str):
    vectors = [
        {
            name: STORAGES[storage](random(shape, 10 * i + n))
            for n, (name, shape) in enumerate(SHAPES.items())
        }
        for i in range(3)
    ]
    check(LAYOUTS[layout](SHAPES), vectors)


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
    check(granularity.by_block(SHAPES), vectors)


def test_zero_coefficients_give_the_base_bit_for_bit():
    vectors = [{name: Dense(random(shape, 3)) for name, shape in SHAPES.items()}]
    composition = make(granularity.by_block(SHAPES), vectors)
    composed = compose(composition, torch.zeros(composition.shape))
    assert all(torch.equal(composed[name], composition.base[name]) for name in SHAPES)


def test_the_base_and_the_coefficients_are_left_alone():
    vectors = [{name: Dense(random(shape, 3)) for name, shape in SHAPES.items()}]
    composition = make(granularity.by_block(SHAPES), vectors)
    before = {name: tensor.clone() for name, tensor in composition.base.items()}
    coefficients = torch.ones(composition.shape)
    compose(composition, coefficients)
    assert all(torch.equal(before[name], composition.base[name]) for name in SHAPES)
    assert torch.equal(coefficients, torch.ones(composition.shape))


def test_no_tensor_of_the_size_of_a_vector_is_saved_for_the_backward_pass():
    vectors = [{name: Dense(random(shape, i)) for name, shape in SHAPES.items()} for i in range(3)]
    composition = make(granularity.by_block(SHAPES), vectors)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        compose(composition, torch.zeros(composition.shape, requires_grad=True))
    assert saved == []


def test_blocks_of_one_shape_are_split_differently():
    layout = granularity.by_partition({"a": (1000,), "b": (1000,)}, 4, seed=0)
    first, second = (indices(layout.placements[name], 1000) for name in "ab")
    assert not torch.equal(first, second)
    assert sorted(set(first.tolist())) == [0, 1, 2, 3]


def test_labels_name_every_column():
    layout = granularity.by_qkv(SHAPES)
    assert layout.labels[:4] == (
        "a.attn.in_proj_weight[q]",
        "a.attn.in_proj_weight[k]",
        "a.attn.in_proj_weight[v]",
        "a.attn.in_proj_bias[q]",
    )
    assert granularity.by_vector(SHAPES).labels == ("all",)
    patterns = granularity.by_pattern(SHAPES, [r"^(\w+)\."])
    assert patterns.labels == (r"^(\w+)\. a", r"^(\w+)\. conv1", r"^(\w+)\. ln", "scalar", "wide")
