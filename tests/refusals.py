"""Tables of mistakes: what is said, and what brings it about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atlas_cli.errors import AtlasError

Act = Callable[[], object]


def check(cases: Mapping[str, Act]) -> None:
    """Every act is refused with a message that has these words, in one line."""
    for words, act in cases.items():
        with pytest.raises(AtlasError) as raised:
            act()
        assert words in str(raised.value), str(raised.value)
        assert "\n" not in str(raised.value), str(raised.value)


def check_commands(
    call: Callable[..., Any], cases: Mapping[str, Sequence[str | Path]], code: int
) -> None:
    """Every command line ends with this code, after one line of error that has these words."""
    for words, given in cases.items():
        result = call(*given)
        assert (result.code, result.out) == (code, ""), (given, result)
        errors = [line for line in result.error_lines if "warning: " not in line]
        assert len(errors) == 1, (given, result.err)
        assert errors[0].startswith("atlas: error: "), (given, result.err)
        assert words in errors[0], (given, result.err)
