"""Names are registered once, by the package or by plugins, and looked up with the nearest word."""

from __future__ import annotations

import re

import pytest

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.registry import Registry, late


def first() -> None: ...


def second() -> None: ...


def test_a_name_is_found_or_the_nearest_one_is_told():
    registry: Registry[int] = Registry("colour")
    registry.add("green", 1, first)
    registry.add("blue", 2, second)
    assert (registry["green"], registry.find("blue"), [*registry]) == (1, 2, ["green", "blue"])
    assert registry.get("red") is None
    message = "unknown colour 'gren'; did you mean 'green'? (there are: green, blue)"
    with pytest.raises(UsageError, match=re.escape(message)):
        registry.find("gren")


def test_a_name_that_is_registered_twice_names_both_places():
    registry: Registry[int] = Registry("colour")
    registry.add("green", 1, first)
    registry.add("green", 3, first)  # a cell of a notebook that is run again
    assert registry["green"] == 3
    message = "colour 'green' is registered twice: by test_plugins.first and by test_plugins.second"
    with pytest.raises(AtlasError, match=re.escape(message)):
        registry.add("green", 2, second)


def test_a_late_module_is_the_module():
    import math

    assert late("math").floor is math.floor
