"""Places that cannot be written, names that mean nothing, runs that have not begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_images
from refusals import check, check_commands

import atlas_cli as atlas
from atlas_cli.learning.run_folder import open_run
from atlas_cli.recipes.merge_parameters import parse_merge
from atlas_cli.registry import MERGE_METHODS


def test_names_that_mean_nothing_and_runs_that_have_not_begun(call, tmp_path: Path):
    photos = write_images(tmp_path / "photos", count=1)
    data = [{"name": "photos", "split": "all", "images": 2, "sha256": "ab"}]
    config = {"command": "fit", "recipe": {"data": "photos"}, "data": data, "judges": []}
    with open_run(tmp_path / "run", config, {}, resume=False, force=False):
        pass
    usage = {
        "'hf:a/b@' ends with @ but names no revision": (
            *("fit", photos, "--model", "builtin:tiny", "--vectors", "hf:a/b@"),
        ),
        "run: this run has learned nothing yet; --resume goes on with it": (
            *("push", tmp_path / "run", "owner/name"),
        ),
    }
    check_commands(call, usage, 2)
    plot = ("inspect", tmp_path / "run", "--plot", tmp_path / "x.png")
    check_commands(call, {"run: has nothing to draw yet; --resume goes on with it": plot}, 1)


@pytest.fixture
def unusual() -> Iterator[None]:
    """A merge method of somebody else, whose parameter has no usual value."""

    @atlas.merge_method("unusual", models=(1, None), per_merge={"share": atlas.Parameter()})
    def unusual(tile: object, values: object, statistics: object) -> object:
        """theta_0"""
        return tile.base  # type: ignore[attr-defined]

    yield
    MERGE_METHODS._entries.pop("unusual")
    MERGE_METHODS._origins.pop("unusual")


def test_plugins_that_need_what_is_not_given(unusual: None):
    check(
        {
            "--compare unusual: parameter 'share' is missing": lambda: parse_merge("unusual"),
            "objective 'odd' needs 'lables', which there is not; did you mean 'labels'?": (
                lambda: atlas.objective("odd", needs=("lables",))
            ),
        }
    )
