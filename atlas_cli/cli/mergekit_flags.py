"""Flags of mergekit's programs on the command line of `merge`: translated, or named and ignored."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atlas_cli.errors import UsageError

# What a flag of mergekit is here. Flags of one word take no value.
_SAME = {
    "--cuda": ("--device", "cuda"),
    "--gpu-rich": ("--device", "cuda"),
    "--num-threads": ("--threads",),
    "-j": ("--threads",),
    "--out-shard-size": ("--max-shard-size",),
    "--intermediate-dir": ("--keep-intermediate",),
    "-I": ("--keep-intermediate",),
    "--out-path": ("--output",),
}
# What atlas does anyway, or what a merge of atlas does not ask for.
_ALWAYS = {"--lazy-unpickle", "--allow-crimes", "--safe-serialization", "--lazy"}
_IGNORED = {
    *("--trust-remote-code", "--low-cpu-memory", "--clone-tensors", "--read-to-gpu", "--multi-gpu"),
    *("--async-write", "-v", "-vv", "--no-lazy", "--no-lazy-unpickle", "--no-safe-serialization"),
}
_IGNORED_WITH_VALUE = {
    *("--transformers-cache", "--lora-merge-cache", "--lora-merge-dtype", "--write-threads"),
}
_REFUSED = "--unsafe-truncate-embeddings"
_WITHOUT_VALUE = _ALWAYS | _IGNORED
FLAGS = {  # all that `translated` knows
    *(*_SAME, *_WITHOUT_VALUE, *_IGNORED_WITH_VALUE, _REFUSED),
    *(f"--no-{flag[2:]}" for flag in _WITHOUT_VALUE if flag.startswith("--")),
}
_UNITS = {"K": "kB", "M": "MB", "B": "GB"}  # mergekit's B is a billion


def translated(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments as `merge` understands them, and the flags that are ignored."""
    result: list[str] = []
    ignored: list[str] = []
    waiting = list(given)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        plain = flag.replace("--no-", "--", 1)
        if flag == _REFUSED:
            raise UsageError(
                f"{flag}: cuts rows by their number; give tokenizer_source in the recipe"
            )
        if flag in _SAME:
            result += _SAME[flag]
            if len(_SAME[flag]) == 1:
                value = value if equals else waiting.pop(0) if waiting else ""
                result.append(_size(value) if flag == "--out-shard-size" else value)
        elif flag in _IGNORED or (flag.startswith("--no-") and plain in _IGNORED):
            ignored.append(flag)
        elif flag in _IGNORED_WITH_VALUE:
            ignored.append(flag)
            waiting = waiting if equals else waiting[1:]
        elif flag not in _ALWAYS and not (flag.startswith("--no-") and plain in _ALWAYS):
            result.append(word)
    return result, ignored


def _size(text: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", text.upper())
    return found[1] + _UNITS[found[2]] if found else text
