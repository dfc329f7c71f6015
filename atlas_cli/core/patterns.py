"""Regular expressions that recipes and adapters bring along, within a limit of time.

A short expression can take longer than the universe is old. `re` cannot be stopped; `regex`, which
understands the same expressions, can.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_cli.errors import UsageError

_LIMIT = 1.0  # seconds for one name; what is not hopeless takes microseconds
_LONGEST = 1000  # characters of an expression


def find_pattern(pattern: str, name: str, *, whole: bool = False) -> Any:
    """The match of an expression in a name, or with `whole` of all of it; None without one.

    Raises UsageError if it is no expression, or takes too long.
    """
    try:
        compiled = _compiled(pattern)
        return (compiled.fullmatch if whole else compiled.search)(name, timeout=_LIMIT)
    except TimeoutError as problem:
        raise UsageError(
            f"the regular expression {pattern!r} takes more than a second for {name}; "
            "write it without a repetition within a repetition"
        ) from problem


@cache
def _compiled(pattern: str) -> Any:
    import regex  # slow to import

    if len(pattern) > _LONGEST:
        raise UsageError(f"a regular expression of {len(pattern)} characters; {_LONGEST} are most")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, MemoryError) as problem:
        raise UsageError(f"{pattern!r} is no regular expression: {problem}") from problem
