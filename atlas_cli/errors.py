"""What atlas refuses to do, and the exit code of each refusal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtlasError(Exception):
    """A problem the user can act on. The message names the thing at fault and the way out."""

    exit_code = 1


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
    """A model or a dataset could not be reached; trying again may help."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """The clause "; did you mean 'x'?" for the closest known word, or nothing."""
    folded = {name.lower(): name for name in known}
    cutoff = 0.5 if len(word) <= 5 else 0.6  # two letters swapped are half of a short word
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=cutoff)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""
