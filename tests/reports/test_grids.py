"""Coefficients are laid out by kind and by depth, whatever they are coefficients of."""

from __future__ import annotations

import pytest

from atlas_cli.reports.grids import by_depth, coefficient_grids

LAYER = "visual.transformer.resblocks.{}.{}"


def test_every_kind_has_a_grid_of_vectors_by_layers_and_the_rest_comes_last():
    tenth, second = (LAYER.format(number, "ln_1.bias") for number in (10, 2))
    row = {"visual.proj": 0.5, tenth: 1.0, second: 2.0}
    kind, rest = coefficient_grids({"cars": row, "birds": {"visual.proj": -0.5}})
    assert (kind.title, kind.rows, kind.columns) == ("ln_1.bias", ("cars", "birds"), ("2", "10"))
    assert kind.cells == ((2.0, 1.0), (None, None))
    assert kind.names == (second, tenth)
    assert (rest.title, rest.columns, rest.cells) == (
        "outside the layers",
        ("proj",),
        ((0.5,), (-0.5,)),
    )


def test_layers_are_in_the_order_of_their_numbers():
    assert by_depth(["10", "9", "layer1.10", "layer1.9"]) == ["9", "10", "layer1.9", "layer1.10"]


def test_one_coefficient_for_all_blocks_is_one_cell():
    (grid,) = coefficient_grids({"cars": {"all": 0.25}})
    assert (grid.title, grid.columns, grid.cells) == ("coefficients", ("all",), ((0.25,),))


def test_the_parts_of_a_projection_are_kinds_of_their_own():
    name = LAYER.format(0, "attn.in_proj_weight")
    grids = coefficient_grids({"cars": {f"{name}[{part}]": 1.0 for part in "qkv"}})
    assert [grid.title for grid in grids] == [f"attn.in_proj_weight[{part}]" for part in "qkv"]


def test_of_random_parts_the_mean_is_shown_and_said():
    name = LAYER.format(0, "ln_1.bias")
    (grid,) = coefficient_grids({"cars": {f"{name}[0]": 1.0, f"{name}[1]": 2.0}})
    assert (grid.title, grid.cells) == ("ln_1.bias (mean of its parts)", ((1.5,),))


def test_many_numbers_without_names_are_shown_as_means_of_neighbours():
    (grid,) = coefficient_grids({"cars": {str(n): float(n) for n in range(120)}})
    assert grid.columns[:2] == ("0 to 2 (mean)", "3 to 5 (mean)")
    assert len(grid.columns) == 40
    assert grid.cells[0][-1] == pytest.approx(118.0)
