"""Which task vectors a run may take."""

from __future__ import annotations

from atlas_cli.vectors.pool import same_task


def test_one_task_is_known_by_several_names():
    assert same_task("cars", "stanfordcars")
    assert same_task("oxfordflowers102", "flowers102")
    assert same_task("pets", "oxfordpets")
    assert not same_task("mnist", "fashionmnist")
