"""Regular expressions of recipes and adapters end, whatever they are."""

from __future__ import annotations

import pytest

from atlas_cli.core.compose import by_pattern
from atlas_cli.core.patterns import find_pattern
from atlas_cli.errors import CheckpointError, UsageError, pattern_problem
from atlas_cli.models.lora import _by_pattern
from atlas_cli.vectors.targets import ExtractRequest

ENDLESS = "^(a|a)*$"
NAME = "a" * 60 + "!"


def test_an_expression_that_would_run_for_years_is_an_error_after_a_second():
    with pytest.raises(UsageError, match="takes more than a second for aaa"):
        by_pattern({NAME: (1,)}, [ENDLESS])
    with pytest.raises(CheckpointError, match=r"bad pattern .*takes more than a second"):
        _by_pattern({ENDLESS.strip("^$"): 8}, NAME, 4)


def test_what_is_no_expression_is_refused_by_name():
    for pattern in ("(", "*", "a" * 1001, "(" * 999):
        with pytest.raises(UsageError, match="regular expression"):
            find_pattern(pattern, "name")


@pytest.mark.filterwarnings("error")
def test_an_expression_of_a_recipe_or_an_option_is_a_problem_in_words_or_none():
    assert pattern_problem("[[a]") is None  # re has a warning for it
    for pattern in ("(", "a{99999999999}", "(" * 3000 + ")" * 3000):
        assert pattern_problem(pattern)
        with pytest.raises(UsageError, match="not a regular expression"):
            ExtractRequest("base", ["tuned"], "v", ignore=(pattern,)).check()


def test_ordinary_expressions_find_what_re_finds():
    assert find_pattern(r"resblocks\.(\d+)\.", "visual.resblocks.11.ln").groups() == ("11",)
    assert find_pattern("ln", "visual.ln_post", whole=True) is None
