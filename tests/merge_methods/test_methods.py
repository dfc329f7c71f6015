"""Merge methods by their laws, on tensors small enough to check by hand."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tiles import cut, merge, resolve

from atlas_cli.errors import UsageError
from atlas_cli.merge_methods.means import karcher_coefficients
from atlas_cli.merge_methods.method import Values
from atlas_cli.merge_methods.tiling import PIECE, all_pieces, tile_of
from atlas_cli.registry import GRANULARITIES, MERGE_METHODS

ROOT = Path(__file__).parent.parent.parent

FROM_MERGEKIT = {
    *("linear", "slerp", "nuslerp", "multislerp", "karcher", "passthrough", "model_stock", "sce"),
    *("task_arithmetic", "ties", "dare_linear", "dare_ties", "della", "della_linear"),
    *("breadcrumbs", "breadcrumbs_ties", "arcee_fusion", "nearswap", "ram", "ramplus_tl"),
}
OTHERS = {"tsv", "iso_c", "iso_cts", "lines", "consensus", "wise_ft", "metagpt"}
OTHERS |= {"wudi", "cart", "pcb", "negmerge"}
NAMES = sorted(FROM_MERGEKIT | OTHERS)
PARAMETERS = {
    "slerp": {"t": 0.3},
    "lines": {"alpha": 0.2, "beta": 0.5},
    "sce": {"select_topk": 0.4},
    "passthrough": {"scale": 0.5},
    "nearswap": {"t": 0.1},
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given(name: str) -> dict:
    """Some value for every parameter without a default, and a density that drops something."""
    names = {*MERGE_METHODS[name].per_model}
    some = {"weight": 0.6, "density": 0.5, "epsilon": 0.2, "gamma": 0.1}
    return {key: some[key] for key in names & set(some)} | PARAMETERS.get(name, {})


def inputs(name: str, *shape: int, dtype: torch.dtype = torch.float32):
    method = MERGE_METHODS[name]
    base = random(*shape, dtype=dtype)
    count = method.models[1] or 3
    models = [base + 0.3 * random(*shape, seed=i + 1, dtype=dtype) for i in range(count)]
    return (None if method.base == "no" else base), models


def test_every_method_is_found_by_its_name():
    assert sorted({*MERGE_METHODS} - {"atlas"}) == NAMES
    assert all(MERGE_METHODS[name].name == name for name in NAMES)


def test_a_method_opens_with_its_formula():
    for name in NAMES:
        apply = MERGE_METHODS[name].apply
        while hasattr(apply, "__wrapped__"):
            apply = apply.__wrapped__
        first = (apply.__doc__ or "").partition("\n")[0]
        assert any(sign in first for sign in "+*=()/"), name


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_as_the_inputs_are(name: str):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for shape, dtype in product([(9, 40), (50,), (4, 3, 2, 2), ()], dtypes):
        base, models = inputs(name, *shape, dtype=dtype)
        copies = [model.clone() for model in models]
        merged = merge(name, base, models, given(name))
        assert (merged.shape, merged.dtype) == (shape, dtype)
        assert merged.isfinite().all(), (shape, dtype)
        kept = [torch.equal(model, copy) for model, copy in zip(models, copies, strict=True)]
        assert all(kept), (shape, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_how_a_tensor_is_cut_changes_no_bit(name: str):
    shapes = [(23, 40), (50,), (9, 3, 2, 2)]
    for shape, dtype in product(shapes, (torch.float32, torch.bfloat16)):
        base, models = inputs(name, *shape, dtype=dtype)
        whole = merge(name, base, models, given(name))
        for rows in (1, 7):
            found = merge(name, base, models, given(name), rows=rows)
            assert torch.equal(found, whole), (shape, dtype, rows)


def test_pieces_within_a_tile_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    given_to = {name: inputs(name, 90, 40, dtype=torch.bfloat16) for name in NAMES}
    wholes = {name: merge(name, *given_to[name], given(name)) for name in NAMES}
    monkeypatch.setattr("atlas_cli.merge_methods.tiling.PIECE", 300)
    for name, whole in wholes.items():
        assert torch.equal(merge(name, *given_to[name], given(name)), whole), name


@pytest.mark.parametrize("shape", [(90, 40), (3000,)])
def test_statistics_of_a_large_tensor_are_read_a_piece_at_a_time(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atlas_cli.merge_methods.tiling.PIECE", 300)
    for name in (name for name in NAMES if not MERGE_METHODS[name].whole):
        statistics_come_in_pieces(name, shape)


def statistics_come_in_pieces(name: str, shape: tuple[int, ...]) -> None:
    base, models = inputs(name, *shape, dtype=torch.bfloat16)
    method, whole = MERGE_METHODS[name], tile_of("weight", 0, shape, base, models)
    spans: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Iterable[torch.Tensor]:
        spans.append((start, stop))
        return whole.inputs.read(start, stop)

    watched = replace(whole, inputs=replace(whole.inputs, read=read))
    values = resolve(method, len(models), given(name), 0)
    found = [method.statistics(lambda tile=tile: iter([tile]), values) for tile in (watched, whole)]
    assert all(stop - start <= 300 for start, stop in spans), name
    if spans:
        assert max(stop for _, stop in spans) == math.prod(shape), name
    results = [method.apply(whole, values, one) for one in found]
    assert torch.equal(*results), name


def test_nothing_merges_into_nothing():
    for name, shape in product(NAMES, [(0,), (0, 4), (4, 0)]):
        base, models = inputs(name, *shape)
        method = MERGE_METHODS[name]
        values = resolve(method, len(models), given(name), 0)
        tile = tile_of("weight", 0, shape, base, tuple(models))
        found = method.statistics(lambda tile=tile: iter([tile]), values)
        assert method.apply(tile, values, found).shape == shape, name


def test_pieces_hold_whole_rows_and_cover_a_tile():
    model = random(5, PIECE // 2 + 1)
    found = list(all_pieces(lambda: cut(None, [model], 3)))
    assert [piece.start for piece in found] == [row * model.shape[1] for row in range(5)]
    assert torch.equal(torch.cat([piece.models[0] for piece in found]), model)


def test_models_that_equal_the_base_merge_into_the_base():
    base = random(20, 30)
    for name in (name for name in NAMES if MERGE_METHODS[name].base == "must"):
        models = [base.clone()] * (MERGE_METHODS[name].models[1] or 3)
        merged = merge(name, base, models, given(name))
        assert torch.allclose(merged, base, rtol=1e-6, atol=1e-7), name


# Weighted sums --------------------------------------------------------------------------------


def test_linear_is_the_weighted_mean():
    models = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    found = merge("linear", None, models, {"weight": [1.0, 3.0]})
    assert found.tolist() == [2.5, 5.0]
    found = merge("linear", None, models, {"weight": [1.0, 3.0], "normalize": False})
    assert found.tolist() == [10.0, 20.0]


def test_linear_keeps_its_sum_in_float32():
    models = [torch.tensor([256.0], dtype=torch.bfloat16)] + [
        torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(4)
    ]
    found = merge("linear", None, models, {"weight": 1.0, "normalize": False})
    assert found.item() == 260.0  # 256 + 1 is 256 in bfloat16


def test_passthrough_scales():
    assert merge("passthrough", None, [torch.tensor([2.0])], {"scale": 0.5}).item() == 1.0
    assert merge("passthrough", None, [torch.tensor([2.0])]).item() == 2.0


def test_wise_ft_goes_from_the_base_to_the_model():
    base, model = torch.tensor([1.0]), torch.tensor([3.0])
    found = [merge("wise_ft", base, [model], {"alpha": a}).item() for a in (0.0, 0.5, 1.0)]
    assert found == [1.0, 2.0, 3.0]


def test_lines_adds_more_the_deeper_a_layer_is():
    method = MERGE_METHODS["lines"]
    base, model = torch.zeros(1), torch.ones(1)
    known = resolve(method, 1, {"alpha": 0.2, "beta": 0.6}, 0)
    (tile,) = cut(base, [model], 1)
    for depth, scale in ((None, 0.2), (0.0, 0.2), (0.5, 0.5), (1.0, 0.8)):
        values = Values(known.models, known.merge, depth=depth)
        assert method.apply(tile, values, None).item() == pytest.approx(scale)


def test_metagpt_weighs_task_vectors_by_their_squared_length():
    base = torch.zeros(2)
    models = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0])]
    assert merge("metagpt", base, models).tolist() == pytest.approx([0.1, 2.7])


def test_consensus_keeps_what_matters_to_two_models():
    base = torch.zeros(3)
    # both; one only; neither has a large part of the sum
    models = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])]
    assert merge("consensus", base, models).tolist() == [2.0, 0.0, 0.0]
    assert merge("consensus", base, models, {"agreement": 1}).tolist() == [2.0, 1.0, 0.0]


# Task arithmetic and elections ----------------------------------------------------------------

BASE = torch.zeros(4)
FIRST, SECOND = torch.tensor([3.0, -2.0, 1.0, 0.5]), torch.tensor([-1.0, -2.0, 4.0, -0.5])


def test_task_arithmetic_adds_weighted_differences():
    found = merge("task_arithmetic", BASE + 1, [FIRST + 1, SECOND + 1], {"weight": [1.0, 0.5]})
    assert found.tolist() == [3.5, -2.0, 4.0, 1.25]
    halved = merge("task_arithmetic", BASE, [FIRST, SECOND], {"weight": [1.0, 0.5], "lambda": 0.5})
    assert halved.tolist() == [1.25, -1.5, 1.5, 0.125]


def test_ties_hears_the_side_that_weighs_more():
    found = merge("ties", BASE, [FIRST, SECOND], {"weight": 1.0})
    assert found.tolist() == [3.0, -2.0, 2.5, 0.5]  # the last sum is zero: positive wins


def test_ties_keeps_the_largest_and_of_equals_the_last():
    found = merge(
        "ties", BASE, [torch.tensor([1.0, -3.0, 1.0, 1.0])], {"weight": 1.0, "density": 0.5}
    )
    assert found.tolist() == [0.0, -3.0, 0.0, 1.0]


def test_ties_rounds_the_number_kept_as_asked():
    model = torch.arange(1.0, 11.0)
    for rounding, kept in (("floor", 2), ("ceil", 3), ("above", 3)):
        asked = {"weight": 1.0, "density": 0.25, "rounding": rounding}
        assert merge("ties", torch.zeros(10), [model], asked).count_nonzero() == kept
    least = {"weight": 1.0, "density": 0.01}
    assert merge("ties", torch.zeros(10), [model], least).count_nonzero() == 1


def test_the_majority_of_signs_settles_a_sum_of_zero():
    downward = [torch.tensor([1.0, -3.0, -2.0]), torch.tensor([-1.0, 1.0, -1.0])]
    asked = {"weight": 1.0, "zero_sign": "majority"}
    assert merge("ties", torch.zeros(3), downward, asked).tolist() == [-1.0, -3.0, -1.5]
    upward = [-model for model in downward]
    assert merge("ties", torch.zeros(3), upward, asked).tolist() == [1.0, 3.0, 1.5]
    balanced = [torch.tensor([1.0]), torch.tensor([-1.0])]
    assert merge("ties", torch.zeros(1), balanced, asked).tolist() == [-1.0]


def test_a_count_of_signs_may_elect():
    models = [torch.tensor([5.0]), torch.tensor([-1.0]), torch.tensor([-2.0])]
    assert merge("ties", torch.zeros(1), models, {"weight": 1.0}).item() == 5.0
    assert merge("ties", torch.zeros(1), models, {"weight": 1.0, "elect": "count"}).item() == -1.5


def test_weights_may_come_after_the_election_and_leave_the_divisor_alone():
    models = [torch.tensor([3.0]), torch.tensor([-2.0])]
    before = merge("ties", torch.zeros(1), models, {"weight": [0.5, 1.0], "normalize": False})
    assert before.item() == -2.0
    asked = {"weight": [0.5, 1.0], "weigh": "after", "divisor": "count"}
    assert merge("ties", torch.zeros(1), models, asked).item() == 1.5


def test_breadcrumbs_drops_outliers_and_the_small():
    model = torch.tensor([0.1, 9.0, -0.2, 0.3, -0.4, 0.5, 8.0, 0.05, 0.6, 0.7])
    asked = {"weight": 1.0, "density": 0.5, "gamma": 0.2}
    found = merge("breadcrumbs", torch.zeros(10), [model], asked)
    assert found.nonzero().flatten().tolist() == [3, 4, 5, 8, 9]


# Spheres --------------------------------------------------------------------------------------


def test_slerp_goes_along_the_arc():
    base, model = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    found = merge("slerp", base, [model], {"t": 1 / 3})
    assert found.tolist() == pytest.approx([math.cos(math.pi / 6), math.sin(math.pi / 6)])


def test_slerp_of_parallel_models_is_a_straight_line():
    base = torch.tensor([1.0, 2.0])
    assert merge("slerp", base, [3 * base], {"t": 0.25}).tolist() == [1.5, 3.0]
    assert merge("slerp", base, [0 * base], {"t": 0.25}).norm() < base.norm()


def test_nuslerp_turns_whole_tensors_rows_or_columns():
    one, other = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    half = {"weight": 1.0}
    rows = merge("nuslerp", None, [one, other], half | {"nuslerp_flatten": False})
    assert rows[0].tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    assert rows[1].tolist() == [0.0, 2.0]
    asked = half | {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    turned = merge("nuslerp", None, [one.T.contiguous(), other.T.contiguous()], asked)
    torch.testing.assert_close(turned, rows.T)


def test_multislerp_keeps_the_mean_length():
    models = [random(40, 30, seed=i) for i in range(3)]
    found = merge("multislerp", None, models, {"weight": 1.0})
    wanted = sum(model.norm() for model in models) / 3
    torch.testing.assert_close(found.norm(), wanted)


def test_multislerp_of_opposites_is_linear_for_two_and_an_error_for_more():
    one = torch.tensor([1.0, 0.0])
    assert merge("multislerp", None, [one, -one], {"weight": 1.0}).tolist() == [0.0, 0.0]
    with pytest.raises(UsageError, match="cancel out in weight"):
        merge("multislerp", None, [one, -one, 0 * one], {"weight": 1.0})


def test_multislerp_of_models_that_equal_the_base_is_the_base():
    base = random(6, 5)
    assert torch.equal(merge("multislerp", base, [base] * 3, {"weight": 1.0}), base)


def test_the_karcher_mean_is_equally_far_from_two_models():
    models = [random(30, 20, seed=i) for i in range(2)]
    found = merge("karcher", None, models)
    cosines = [torch.cosine_similarity(found.flatten(), m.flatten(), 0) for m in models]
    torch.testing.assert_close(cosines[0], cosines[1])
    torch.testing.assert_close(found.norm(), sum(m.norm() for m in models) / 2)


def test_the_karcher_mean_of_nothing_is_nothing():
    assert karcher_coefficients(torch.zeros(2, 2).double(), 10, 1e-5) == [0.0, 0.0]


def test_model_stock_goes_all_the_way_if_models_agree_and_nowhere_if_they_oppose():
    base, model = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.5])
    torch.testing.assert_close(merge("model_stock", base, [model, model]), model)
    opposed = merge("model_stock", base, [model, 2 * base - model])
    torch.testing.assert_close(opposed, base)
    right = [base + torch.tensor([1.0, 0.0]), base + torch.tensor([0.0, 1.0])]
    torch.testing.assert_close(merge("model_stock", base, right), base)


def test_model_stock_may_give_every_row_its_own_ratio():
    base = torch.zeros(2, 2)
    one = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    other = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    found = merge("model_stock", base, [one, other], {"filter_wise": True})
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_sce_keeps_what_varies_and_weighs_by_squares():
    base = torch.zeros(3)
    models = [torch.tensor([2.0, 1.0, 1.0]), torch.tensor([4.0, 1.0, 1.0])]
    found = merge("sce", base, models, {"select_topk": 0.9999})  # one variance is not zero
    assert found.tolist() == [0.0] * 3
    models[0][1] = 1.5
    found = merge("sce", base, models, {"select_topk": 0.5})
    assert found.tolist() == pytest.approx([(4 * 2 + 16 * 4) / 20, 0.0, 0.0])


# Singular vectors -----------------------------------------------------------------------------


def test_iso_c_makes_every_direction_equally_long():
    base = torch.zeros(6, 4)
    merged = merge("iso_c", base, [random(6, 4, seed=1), random(6, 4, seed=2)])
    sizes = torch.linalg.svdvals(merged)
    torch.testing.assert_close(sizes, sizes.mean().expand(4))


def test_iso_cts_is_iso_c_if_all_directions_are_common():
    models = [random(6, 4, seed=1), random(6, 4, seed=2)]
    base = random(6, 4)
    asked = {"common_space_fraction": 1.0}
    torch.testing.assert_close(merge("iso_cts", base, models, asked), merge("iso_c", base, models))


def test_tsv_of_one_task_vector_is_that_vector():
    base, model = random(6, 4), random(6, 4, seed=1)
    torch.testing.assert_close(merge("tsv", base, [model]), model)


def test_tsv_leaves_orthogonal_task_vectors_of_low_rank_as_they_are():
    base, one, other = torch.zeros(3, 4, 4)
    one[0, 0], other[1, 1] = 2.0, 3.0
    torch.testing.assert_close(merge("tsv", base, [one, other]), one + other)


def test_vectors_are_averaged_by_methods_on_singular_vectors():
    base, models = torch.zeros(2), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])]
    for name in ("tsv", "iso_c", "iso_cts"):
        assert merge(name, base, models, {"lambda": 0.5}).tolist() == [1.0, 1.0]


# What is not finite ---------------------------------------------------------------------------

ASLEEP = {  # parameters that give the first model no weight, and where a base has none, the base
    "linear": {"weight": [0.0, 1.0]},
    "task_arithmetic": {"weight": [0.0, 1.0]},
    "slerp": {"t": 0.0},
    "wise_ft": {"alpha": 0.0},
    "nearswap": {"t": 0.0},
    "passthrough": {"scale": 0.0},
    "model_stock": {},
}


def test_the_methods_that_spread_are_those_that_are_tested():
    assert {name for name, method in MERGE_METHODS.items() if method.spreads} == {*ASLEEP}


@pytest.mark.parametrize("name", ASLEEP)
def test_what_is_not_finite_shows_in_the_result_even_without_a_weight(name: str):
    method = MERGE_METHODS[name]
    has_base, count = method.base == "must", method.models[1] or 2
    values, dtypes = (math.nan, math.inf, -math.inf), (torch.float32, torch.bfloat16)
    for ill, value, dtype in product(range(count + has_base), values, dtypes):
        tensors = [random(5, 7, seed=seed, dtype=dtype) for seed in range(count + 1)]
        tensors[ill][3, 2] = value
        *models, base = tensors
        merged = merge(name, base if has_base else None, models, ASLEEP[name])
        assert not merged[3, 2].isfinite(), (ill, value, dtype)


def test_the_tables_of_methods_in_the_docs_are_those_of_the_registry():
    spec = importlib.util.spec_from_file_location("build_methods", ROOT / "docs/build_methods.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    for path in build.PAGES:
        assert path.read_text("utf-8") == build.page(path), "run python docs/build_methods.py"
        assert all(f"[{name}](" in path.read_text("utf-8") for name in MERGE_METHODS)


def test_a_comparison_has_a_value_for_every_parameter():
    for name, method in MERGE_METHODS.items():
        if method.models[1] is None:
            tables = {**method.per_model, **method.per_merge}
            assert not [key for key, one in tables.items() if one.compared is None], name


def test_methods_and_their_parameters_are_known_without_torch():
    script = (
        "import sys\nfrom atlas_cli.registry import GRANULARITIES, MERGE_METHODS\n"
        "print(len(MERGE_METHODS), len(GRANULARITIES), {'torch', 'numpy'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == f"{len(MERGE_METHODS)} {len(GRANULARITIES)} set()\n", found.stderr
