"""Blocks of few bits: what they keep, and sums over them, against values that were unpacked."""

from __future__ import annotations

import pytest
import torch

from atlas_cli.core import packed
from atlas_cli.core.compose import (
    Composition,
    by_block,
    by_partition,
    by_qkv,
    coefficient_gradient,
    compose_block,
    stack_blocks,
)
from atlas_cli.core.packed import FEW, Packed, Residual, pack, packed_bytes, unpacked
from atlas_cli.core.storage import Block, Dense, Form, bytes_of, decode, encode, storage_of
from atlas_cli.native import kernels

NAME = "visual.transformer.resblocks.0.attn.in_proj_weight"


def matrix(seed: int, *shape: int) -> torch.Tensor:
    return 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_values_on_the_steps_of_a_group_come_back():
    for bits in FEW.values():
        codes = torch.randint(2**bits, (3, 64), generator=torch.Generator().manual_seed(bits))
        codes[:, 0], codes[:, 1] = 0, 2**bits - 1  # the range of every group is that of the codes
        values = codes * 0.25 - 0.5
        assert torch.equal(unpacked(pack(values, bits)), values)


def test_no_group_is_further_off_than_rounding_between_its_ends():
    values = matrix(0, 40, 50)
    for bits in FEW.values():
        found = unpacked(pack(values, bits))
        # 2000 values are 31 groups of 64 and a last one that is filled up with its last value.
        flat = torch.cat([values.flatten(), values.flatten()[-1:].expand(48)]).view(-1, 64)
        low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
        plain = ((flat - low) / (high - low) * (2**bits - 1)).round() / (2**bits - 1)
        worst = (flat - (low + plain * (high - low))).square().sum()
        assert (found - values).square().sum() <= 1.05 * worst  # ends are rounded to 16 bits


def test_a_constant_group_and_zeros_come_back():
    for value in (0.0, 0.5):
        assert torch.equal(
            unpacked(pack(torch.full((3, 30), value), 2)), torch.full((3, 30), value)
        )


def test_few_bits_are_for_matrices_and_take_as_many_bytes_as_they_say():
    for word, bits in FEW.items():
        block = encode(Dense(matrix(1, 24, 16)), Form(word))
        assert (storage_of(block), bytes_of(block)) == (word, packed_bytes((24, 16), bits))
        assert bytes_of(block) == 6 * (8 * bits + 4)
        assert storage_of(encode(Dense(matrix(1, 64)), Form(word))) == "bf16"


def residual(values: torch.Tensor) -> Block:
    return Residual(SHARED, pack(values - unpacked(SHARED), 2), "pool")


SHARED = pack(matrix(9, 24, 25), 3)
KINDS = {
    **{word: lambda values, bits=bits: pack(values, bits) for word, bits in FEW.items()},
    "rtvq": residual,
}
LAYOUTS = {
    "block": by_block,
    "qkv": by_qkv,
    "partition": lambda shapes: by_partition(shapes, 5, 0),
}


@pytest.mark.parametrize("loops", [True, False])
def test_sums_and_gradients_are_those_of_the_unpacked_values(monkeypatch, loops: bool):
    if not loops:
        monkeypatch.setattr(kernels, "ready", lambda tensors: False)
    monkeypatch.setattr(packed, "_TILE", 3 * 64)  # several tiles, and spans that no group begins
    base, gradient = {NAME: matrix(5, 24, 25)}, {NAME: matrix(6, 24, 25)}
    for kind, form in KINDS.items():
        few = {number: form(matrix(number, 24, 25)) for number in range(3)}
        plain = {number: Dense(decode(block)) for number, block in few.items()}
        for layout in LAYOUTS.values():
            columns = layout({NAME: (24, 25)})
            coefficients = matrix(7, 3, len(columns.labels)) * 100
            found, wanted = (
                Composition(base, {NAME: stack_blocks(blocks)}, columns, 3)
                for blocks in (few, plain)
            )
            sums = [compose_block(one, NAME, coefficients) for one in (found, wanted)]
            torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-7, msg=kind)
            slopes = [coefficient_gradient(one, gradient) for one in (found, wanted)]
            torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-9, msg=kind)


def test_what_a_pool_shares_is_kept_once():
    blocks = {number: residual(matrix(number, 24, 25)) for number in range(3)}
    own, shared = stack_blocks(blocks)
    assert [block.bits for block in own.blocks] == [2, 2, 2]
    assert isinstance(shared.block, Packed)
    assert shared.members == (0, 1, 2)
