"""What is said of task vectors and models is what a direct computation finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_open_clip
from makers import (
    ATTENTION,
    BIAS,
    FORMS,
    LAYER,
    MLP,
    lora,
    random_values,
    rewrite_header,
    write_vector,
)
from safetensors.torch import load_file, save_file

from atlas_cli.core.storage import Dense, decode
from atlas_cli.errors import CheckpointError, MismatchError
from atlas_cli.models.facts import describe_model
from atlas_cli.reports.grids import cosine_grid, norm_grids
from atlas_cli.sources.locate import locate, parse_reference
from atlas_cli.vectors.describe import Comparison, VectorFacts, compare, describe_vector, is_vector
from atlas_cli.vectors.format import open_checked

NAME = LAYER.format(0, ATTENTION)


def silent(count: int) -> None:
    pass


def described(path: Path) -> VectorFacts:
    source = locate(parse_reference(str(path)))
    return describe_vector(path.stem, source, open_checked(path), silent)


def compared(*paths: Path) -> Comparison:
    return compare({path.stem: open_checked(path) for path in paths}, silent)


# One vector -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_block_measures_as_its_values_do(tmp_path: Path, form: str):
    values = random_values()
    blocks = {name: FORMS[form](tensor) for name, tensor in values.items()}
    facts = described(write_vector(tmp_path / "v.safetensors", blocks, exact=values))
    for block in facts.blocks:
        stored = decode(blocks[block.name]).double().numpy()
        exact = values[block.name].double().norm().item()
        assert block.norm == pytest.approx(exact, rel=1e-6)
        assert block.relative_norm == pytest.approx(exact / 2.0, rel=1e-6)
        if stored.ndim < 2:
            assert (block.effective_rank, block.energy) == (None, {})
            continue
        singular = np.linalg.svd(stored.reshape(len(stored), -1), compute_uv=False)
        for count in (1, 4, 16, 64):
            share = (singular[:count] ** 2).sum() / (singular**2).sum()
            assert block.energy[count] == pytest.approx(share, abs=1e-6)


def test_the_whole_is_the_sum_of_its_blocks(tmp_path: Path):
    values = random_values()
    path = write_vector(tmp_path / "v.safetensors", values, base_norm=3.0)
    facts = described(path)
    norm = torch.cat([tensor.double().flatten() for tensor in values.values()]).norm().item()
    assert facts.norm == pytest.approx(norm, rel=1e-9)
    assert facts.relative_norm == pytest.approx(norm / (3 * math.sqrt(len(values))), rel=1e-9)
    assert facts.parameters == sum(tensor.numel() for tensor in values.values())
    assert facts.bytes == path.stat().st_size
    assert facts.storage == {"fp32": len(values)}
    assert (facts.worst_error, facts.mean_error) == (0, 0)
    kinds = {kind.kind: kind for kind in facts.kinds}
    assert list(kinds) == ["class_embedding", "proj", ATTENTION, MLP, BIAS]
    pair = [block for block in facts.blocks if block.kind == ATTENTION]
    assert kinds[ATTENTION].blocks == len(pair) == 2
    assert kinds[ATTENTION].norm == pytest.approx(math.hypot(*(block.norm for block in pair)))
    ranks = [block.effective_rank or 0 for block in pair]
    assert kinds[ATTENTION].effective_rank == pytest.approx(sum(ranks) / 2)


def test_errors_are_those_of_the_header(tmp_path: Path):
    values = random_values()
    blocks = {name: FORMS["int8"](tensor) for name, tensor in values.items()}
    facts = described(write_vector(tmp_path / "v.safetensors", blocks, exact=values))
    errors = [block.error for block in facts.blocks]
    assert (facts.worst_error, facts.mean_error) == (max(errors), sum(errors) / len(errors))
    assert 0 < facts.worst_error < 0.02


def test_a_block_of_a_base_that_is_zero_has_no_relative_norm(tmp_path: Path):
    path = write_vector(tmp_path / "v.safetensors", random_values(), base_norm=0.0)
    facts = described(path)
    assert facts.relative_norm is None
    assert {block.relative_norm for block in facts.blocks} == {None}


def test_the_relative_norm_is_over_the_scope_where_the_file_tells_its_norm(tmp_path: Path):
    path = write_vector(tmp_path / "v.safetensors", {NAME: torch.ones(24, 8)}, base_norm=3.0)
    before = described(path)
    assert before.relative_norm == pytest.approx(before.norm / 3.0)
    rewrite_header(path, lambda header: header.update(base_norm=5))
    after = described(path)
    assert after.relative_norm == pytest.approx(before.norm / 5.0)
    assert after.blocks == before.blocks


def test_a_file_from_before_that_norm_was_kept_still_opens(tmp_path: Path):
    path = write_vector(tmp_path / "v.safetensors", {NAME: torch.ones(24, 8)}, base_norm=3.0)
    rewrite_header(path, lambda header: header.pop("base_norm"))
    assert described(path).relative_norm == pytest.approx(math.sqrt(24 * 8) / 3.0)


def test_an_adapter_is_measured_through_its_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    blocks = {NAME: lora(4)}
    path = write_vector(tmp_path / "lora.safetensors", blocks)
    wanted = np.linalg.svd(decode(blocks[NAME]).double().numpy(), compute_uv=False)
    monkeypatch.setattr("atlas_cli.core.storage.decode", None)  # would form the product
    [block] = described(path).blocks
    assert block.storage == "factors"
    assert block.energy[4] == pytest.approx((wanted[:4] ** 2).sum() / (wanted**2).sum(), abs=1e-6)
    assert compare({"a": open_checked(path), "b": open_checked(path)}, silent).cosine[0][1] == 1


# Files that lie -------------------------------------------------------------------------------


def change_block(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["blocks"][0].update(fields)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no blocks": lambda header: header.update(blocks=[]),
    "blocks of text": lambda header: header.update(blocks=["a"]),
    "a missing field": lambda header: header.pop("fingerprint"),
    "an extra field": lambda header: header.update(more=1),
    "a fingerprint that is no text": lambda header: header.update(fingerprint=7),
    "a base that is no object": lambda header: header.update(base="builtin:tiny"),
    "an architecture with NaN": lambda header: header.update(architecture={"x": math.nan}),
    "a scale of text": lambda header: header.update(scale="1"),
    "dropped numbers": lambda header: header.update(dropped=[1]),
    "another version": lambda header: header.update(version=99),
    "another format": lambda header: header.update(format="else"),
    "a block twice": lambda header: header.update(blocks=header["blocks"][:1] * 2),
    "a block that is not there": change_block(name="nowhere"),
    "a name that is no text": change_block(name=["a"]),
    "another shape": change_block(shape=[3, 3]),
    "a negative shape": change_block(shape=[-8]),
    "a shape of text": change_block(shape="8"),
    "a boundless shape": change_block(shape=[2**70]),
    "an unknown storage": change_block(storage="fp4"),
    "factors that are not there": change_block(storage="factors", starts=[0]),
    "factors without parts": change_block(storage="factors"),
    "parts of a dense block": change_block(starts=[0]),
    "a norm of NaN": change_block(norm=math.nan),
    "a boundless norm": change_block(norm=10**400),
    "a negative norm": change_block(norm=-1.0),
    "another norm": change_block(norm=123.0),
    "an infinite base": change_block(base_norm=math.inf),
    "an error of text": change_block(error="none"),
    "an infinite scope": lambda header: header.update(base_norm=math.inf),
    "a negative scope": lambda header: header.update(base_norm=-1.0),
    "a scope of text": lambda header: header.update(base_norm="1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_one_line(tmp_path: Path, damage: str):
    path = write_vector(tmp_path / "v.safetensors", random_values())
    rewrite_header(path, DAMAGES[damage])
    with pytest.raises(CheckpointError, match=r"v\.safetensors: ") as caught:
        described(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("part", "shape"),
    [("up0", (25, 2)), ("up0", (8, 2, 1)), ("down0", (2, 9)), ("down0", (3, 8)), ("up2", (9, 2))],
)
def test_factors_that_do_not_fit_are_refused(tmp_path: Path, part: str, shape: tuple[int, ...]):
    path = write_vector(tmp_path / "v.safetensors", {NAME: lora(0)})
    tensors = load_file(path)
    tensors[f"{NAME}#{part}"] = torch.ones(shape)
    _save_with_header(path, tensors)
    with pytest.raises(CheckpointError, match="is not stored as its header says"):
        described(path)


def _save_with_header(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from atlas_cli.io.checkpoint import read_metadata

    save_file(tensors, path, read_metadata(path))


def test_a_huge_shape_costs_no_memory(tmp_path: Path):
    path = write_vector(tmp_path / "v.safetensors", {NAME: lora(0)})
    rewrite_header(path, change_block(shape=[10**12, 8]))
    assert described(path).blocks[0].shape == (10**12, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float):
    values = random_values()
    path = write_vector(tmp_path / "v.safetensors", values)
    values[NAME][0, 0] = value
    _save_with_header(path, values)
    with pytest.raises(CheckpointError, match=f"block {NAME} holds values that are not finite"):
        described(path)


# Several vectors ------------------------------------------------------------------------------


def test_cosines_over_all_blocks_and_by_kind(tmp_path: Path):
    sets = [random_values(seed) for seed in range(3)]
    paths = [write_vector(tmp_path / f"{n}.safetensors", values) for n, values in enumerate(sets)]
    found = compared(*paths)
    assert found.vectors == ("0", "1", "2")

    def cosines(chosen: Callable[[str], bool]) -> np.ndarray:
        rows = [
            torch.cat([t.double().flatten() for n, t in values.items() if chosen(n)]).numpy()
            for values in sets
        ]
        return np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for a in rows] for b in rows])

    assert np.allclose(found.cosine, cosines(lambda name: True), atol=1e-12)
    for kind, matrix in found.cosine_by_kind.items():
        wanted = cosines(lambda name, kind=kind: name.endswith(kind))
        assert np.allclose(matrix, wanted, atol=1e-12)


def test_a_vector_itself_its_negation_and_an_orthogonal_one(tmp_path: Path):
    one = {NAME: torch.tensor([[1.0, 2.0], [0.0, 0.0]])}
    other = {NAME: torch.tensor([[0.0, 0.0], [3.0, 1.0]])}
    sets = {"same": one, "twin": one, "minus": {NAME: -one[NAME]}, "other": other}
    found = compared(*(write_vector(tmp_path / f"{n}.safetensors", v) for n, v in sets.items()))
    assert found.cosine[0] == pytest.approx([1, 1, -1, 0], abs=1e-12)
    assert max(abs(cell or 0) for row in found.cosine for cell in row) <= 1


def test_the_spectrum_is_that_of_numpy(tmp_path: Path):
    sets = [random_values(seed) for seed in range(4)]
    found = compared(
        *(write_vector(tmp_path / f"{n}.safetensors", values) for n, values in enumerate(sets))
    )
    rows = np.stack([torch.cat([t.flatten() for t in v.values()]).double().numpy() for v in sets])
    centred = rows - rows.mean(axis=0)
    for spectrum, matrix in ((found.spectrum, rows), (found.centred_spectrum, centred)):
        wanted = np.linalg.svd(matrix, compute_uv=False)
        assert np.allclose(spectrum.singular_values, wanted, atol=1e-8 * wanted[0])
        assert np.allclose(spectrum.share, wanted**2 / (wanted**2).sum())


def test_a_block_that_one_vector_dropped_counts_as_zero(tmp_path: Path):
    whole = random_values(1)
    part = {name: tensor for name, tensor in whole.items() if not name.endswith(BIAS)}
    zeros = {n: t if n in part else torch.zeros_like(t) for n, t in whole.items()}
    paths = [
        write_vector(tmp_path / f"{name}.safetensors", values)
        for name, values in {"whole": whole, "part": part, "zeros": zeros}.items()
    ]
    found = compared(*paths)
    assert found.cosine[0][1] == pytest.approx(found.cosine[0][2], abs=1e-12)
    assert found.cosine[1][2] == pytest.approx(1)
    assert found.cosine_by_kind[BIAS] == [[1, None, None], [None] * 3, [None] * 3]


def test_vectors_of_different_bases_are_refused(tmp_path: Path):
    one = write_vector(tmp_path / "one.safetensors", random_values())
    two = write_vector(tmp_path / "two.safetensors", random_values(), fingerprint="0f" * 32)
    with pytest.raises(MismatchError, match="two and one were taken from different base models"):
        compared(one, two)


def test_blocks_of_different_shapes_are_refused(tmp_path: Path):
    one = write_vector(tmp_path / "one.safetensors", {NAME: torch.ones(2, 3)})
    two = write_vector(tmp_path / "two.safetensors", {NAME: torch.ones(3, 2)})
    with pytest.raises(MismatchError, match=r"different shapes: \(2, 3\) in one, \(3, 2\) in two"):
        compared(one, two)


# Grids ----------------------------------------------------------------------------------------


def test_the_grids_hold_the_norms_by_kind_and_layer(tmp_path: Path):
    facts = described(write_vector(tmp_path / "v.safetensors", random_values(layers=11)))
    layers, outside = norm_grids([facts])
    assert layers.columns == tuple(map(str, range(11)))
    assert layers.rows == (ATTENTION, MLP, BIAS)
    assert (outside.rows, outside.columns) == (("class_embedding", "proj"), ("",))
    block = next(block for block in facts.blocks if (block.layer, block.kind) == ("10", MLP))
    assert layers.cells[1][10] == pytest.approx(100 * (block.relative_norm or 0))


def test_the_grid_of_several_is_their_root_mean_square(tmp_path: Path):
    one = described(write_vector(tmp_path / "a.safetensors", {NAME: torch.ones(3, 3)}))
    two = described(write_vector(tmp_path / "b.safetensors", {NAME: 7 * torch.ones(3, 3)}))
    [grid] = norm_grids([one, two])  # relative norms of 1.5 and 10.5
    assert grid.cells[0][0] == pytest.approx(100 * math.sqrt((1.5**2 + 10.5**2) / 2))
    assert grid.title.endswith("(root mean square of 2)")


def test_long_names_keep_both_ends():
    name = "tasks/one-of-many/a-long-name-of-a-file.safetensors"
    found = cosine_grid(Comparison((name, "b"), [[1, 0.5], [0.5, 1]], {}, None, None))  # type: ignore[arg-type]
    assert found.rows == ("tasks/one-o…safetensors", "b")
    assert found.cells == ((None, 0.5), (0.5, None))


# Models ---------------------------------------------------------------------------------------


def test_a_model_is_counted_without_reading_it(tmp_path: Path):
    folder = write_open_clip(tmp_path / "model")
    source = locate(parse_reference(str(folder)))
    assert not is_vector(source)
    facts = describe_model(source)
    kept = {
        name: tensor
        for name, tensor in load_file(folder / "open_clip_model.safetensors").items()
        if not name.endswith("attn_mask")
    }
    assert set(facts.tensors) == set(kept)
    assert facts.parameters == sum(tensor.numel() for tensor in kept.values())
    assert facts.dtypes == {"float32": len(kept)}
    assert facts.activation == "gelu"
    assert facts.architecture is not None
    assert facts.architecture["vision_cfg"]["layers"] == 2
    assert facts.sha256 == source.provenance()["sha256"]


def test_nothing_is_known_of_the_architecture_of_a_bare_file(tmp_path: Path):
    path = tmp_path / "bare.safetensors"
    save_file({"visual.conv1.weight": torch.ones(4, 3, 2, 2).half()}, path)
    facts = describe_model(locate(parse_reference(str(path))))
    assert (facts.architecture, facts.activation, facts.parameters) == (None, None, 48)
    assert facts.dtypes == {"float16": 1}


def test_dense_stays_dense(tmp_path: Path):
    path = write_vector(tmp_path / "v.safetensors", {NAME: Dense(torch.ones(2, 2).bfloat16())})
    assert described(path).storage == {"bf16": 1}
