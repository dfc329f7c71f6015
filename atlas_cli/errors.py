"""What atlas refuses to do, and the exit code of each refusal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtlasError(Exception):
    """A problem the user can act on. The message names the thing at fault and the way out.

    Given several messages, one for each problem, it is told in as many lines.
    """

    exit_code = 1

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class MismatchError(AtlasError):
    """Two sets of tensors do not line up."""


class DataError(AtlasError):
    """A folder, a table or an image cannot be used as it is."""


class CheckpointError(AtlasError):
    """A weight file cannot be read, or is not safe to read."""


class UsageError(AtlasError):
    """The command line or a recipe is wrong."""

    exit_code = 2


class ClosedError(AtlasError):
    """Whoever read what was written went away."""


class UnreachableError(AtlasError):
    """A model or a dataset could not be reached; trying again may help.

    `cut` says whether no answer came, rather than the answer being no.
    """

    exit_code = 3

    def __init__(self, text: str, *, cut: bool = False) -> None:
        super().__init__(text)
        self.cut = cut


def nearest(word: str, known: Iterable[str]) -> str:
    """The clause "; did you mean 'x'?" for the closest known word, or nothing."""
    folded = {name.lower(): name for name in known}
    cutoff = 0.5 if len(word) <= 5 else 0.6  # two letters swapped are half of a short word
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=cutoff)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""


def pattern_problem(text: str) -> str | None:
    """What is wrong with a regular expression; None if nothing is."""
    import re
    import warnings

    try:
        with warnings.catch_warnings(action="ignore"):  # of sets that may mean more one day
            re.compile(text)
    except (re.error, OverflowError) as problem:
        return str(problem)
    except RecursionError:
        return "it is nested too deeply"
    return None


def install_hint(extra: str) -> str:
    """The command that installs what an extra needs, by packages that an index has.

    atlas itself may be installed from a folder, where `pip install atlas-cli[...]` finds nothing.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("atlas-cli") or []
    except PackageNotFoundError:
        listed = []
    wanted = [line.partition(";")[0].strip() for line in listed if f'extra == "{extra}"' in line]
    wanted = wanted or [f"atlas-cli[{extra}]"]
    return f"pip install {' '.join(repr(name) for name in wanted)}"


# How libraries say that an allocation failed. The CPU's allocator has no exception of its own, and
# oneDNN says of a primitive only that it could not be created.
_NO_MEMORY = (
    *("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "could not allocate"),
    *("could not create a primitive", "bad_alloc", "out of memory"),
)


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an error of Python or of torch, on any device, says that memory has ended."""
    named = isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"
    return named or any(sign in str(problem) for sign in _NO_MEMORY)
