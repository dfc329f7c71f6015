"""Task vectors are added and scaled lazily, and what comes out is a task vector like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlas_cli.core.storage import Dense
from atlas_cli.errors import AtlasError, MismatchError, UsageError
from atlas_cli.vectors.task_vector import TaskVector

DIGITS, SIGNS = (TaskVector.open(f"builtin:{name}") for name in ("digits", "signs"))
BLOCK = "visual.ln_post.weight"


def test_sums_and_multiples_are_those_of_the_values():
    digits, signs = (vector.values(BLOCK) for vector in (DIGITS, SIGNS))
    for vector, expected in (
        (DIGITS + SIGNS, digits + signs),
        (DIGITS - SIGNS, digits - signs),
        (0.3 * DIGITS, 0.3 * digits),
        (DIGITS * 2, 2 * digits),
        (-DIGITS, -digits),
        (DIGITS / 2, digits / 2),
        (0.5 * (DIGITS + SIGNS) - DIGITS, 0.5 * (digits + signs) - digits),
    ):
        assert torch.equal(vector.values(BLOCK), expected), vector
        assert set(vector.names) == {*DIGITS.names, *SIGNS.names}


def test_a_vector_and_its_negation_sum_to_nothing(tmp_path: Path):
    nothing = DIGITS + -DIGITS
    assert not any(nothing.values(name).any() for name in nothing.names)
    assert nothing.norm == 0
    with pytest.raises(MismatchError, match="digits - digits: is zero; there is nothing"):
        nothing.save(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_nothing_is_read_before_a_block_is_asked_for():
    def read(name: str) -> Dense:
        raise AssertionError(name)

    unread = replace(DIGITS, read=read)
    assert repr(2 * (unread + SIGNS) / 3 - unread).startswith("<TaskVector 0.666667 * digits")


def test_a_saved_sum_is_a_vector_that_commands_take(call, tmp_path: Path):
    path = tmp_path / "both.safetensors"
    saved = (0.5 * (DIGITS + SIGNS)).save(path)
    assert (saved.name, saved.header.base_norm) == ("both", DIGITS.header.base_norm)
    assert saved.norm == pytest.approx((0.5 * DIGITS + 0.5 * SIGNS).norm, rel=1e-6)
    terms = saved.header.finetuned["sum_of"]
    assert [(term["scale"], term["name"]) for term in terms] == [(0.5, "digits"), (0.5, "signs")]
    assert terms[0]["finetuned"] == DIGITS.header.finetuned
    shown = call("inspect", path, "--json")
    assert (shown.code, shown.err) == (0, "")
    assert '"reference": "0.5 * digits + 0.5 * signs"' in shown.out
    learned = call(
        *("fit", "builtin:letters", "--shots", "1", "--epochs", "1", "--batch-size", "16"),
        *("--model", "builtin:tiny", "--vectors", path),
    )
    assert learned.code == 0
    assert "both:" in learned.out


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_a_sum_can_be_kept_in_fewer_bits(tmp_path: Path, dtype: str):
    saved = (DIGITS + SIGNS).save(tmp_path / "x.safetensors", name="sum", dtype=dtype)
    assert {block.storage for block in saved.header.blocks} == {dtype}
    assert (saved.name, saved.norm) == ("sum", pytest.approx((DIGITS + SIGNS).norm, rel=1e-2))


def test_what_does_not_fit_is_refused(tmp_path: Path):
    header = replace(DIGITS.header, fingerprint="0" * 64)
    with pytest.raises(MismatchError, match="different base models"):
        DIGITS + replace(DIGITS, header=header)
    infos = tuple(replace(block, shape=(1, 2, 3)) for block in DIGITS.header.blocks)
    with pytest.raises(MismatchError, match=r"against \(1, 2, 3\)"):
        DIGITS + replace(DIGITS, header=replace(DIGITS.header, blocks=infos))
    with pytest.raises(UsageError, match="expected a finite number"):
        DIGITS * float("nan")
    with pytest.raises(TypeError):
        DIGITS + 1
    with pytest.raises(UsageError, match="--dtype fp61: expected fp32, fp16, bf16, int8"):
        DIGITS.save(tmp_path / "x.safetensors", dtype="fp61")
    (tmp_path / "x.safetensors").write_bytes(b"mine")
    with pytest.raises(AtlasError, match="exists already"):
        DIGITS.save(tmp_path / "x.safetensors")
    saved = DIGITS.save(tmp_path / "x.safetensors", force=True)
    assert saved.norm == pytest.approx(DIGITS.norm, rel=1e-3)


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path):
    broken = DIGITS + replace(SIGNS, read=lambda name: Dense(SIGNS.values(name) * torch.inf))
    with pytest.raises(AtlasError, match="not finite"):
        broken.save(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_values_too_large_for_a_dtype_are_named_and_nothing_is_saved(tmp_path: Path):
    with pytest.raises(AtlasError, match=rf"{BLOCK}: changes too much for fp16; use --dtype bf16"):
        only(1e8 * DIGITS, BLOCK).save(tmp_path / "x.safetensors", dtype="fp16")
    assert not list(tmp_path.iterdir())


def only(vector: TaskVector, name: str) -> TaskVector:
    """A vector without its other blocks."""
    kept = tuple(info for info in vector.header.blocks if info.name == name)
    return replace(vector, header=replace(vector.header, blocks=kept))


def test_a_low_rank_vector_stays_so_when_it_is_scaled(tmp_path: Path, call):
    path = tmp_path / "low.safetensors"
    done = call("extract", "builtin:tiny", "builtin:digits", "-o", path, "--rank", "2")
    assert done.code == 0, done.err
    low = TaskVector.open(path)
    saved = (-low).save(tmp_path / "negated.safetensors")
    assert {b.storage for b in saved.header.blocks} == {b.storage for b in low.header.blocks}
    assert all(torch.equal(saved.values(name), -low.values(name)) for name in low.names)
