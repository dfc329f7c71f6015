"""Everything the command line does, written down, to see what a change of the code changes.

    python benchmarks/golden make before.json
    python benchmarks/golden make after.json
    python benchmarks/golden compare before.json after.json --allowed allowed.yaml

`make` runs hundreds of command lines of the atlas that Python finds (PYTHONPATH decides) in a fresh
folder: every recipe, every command, and many mistakes. Of each it keeps the exit code, what was
printed, and every file that was written: text as it is, of weights the digest of names, types,
shapes and numbers. Each command line is a fork of one process that has imported what is slow to
import; those that show how a process starts are processes of their own. Inputs are made here by the
standard library alone, so they do not depend on the code under test. What differs from run to run
is taken out: the folder, the version, the memory in use.

`compare` prints every difference and exits with 1 if there is one that no reason in a file of
allowed differences covers, or a reason that nothing needs; comparing.py says how such a file is
written, and benchmarks/golden_differences.yaml is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from comparing import compare
from making import make


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """What is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="run every case and write what it did")
    maker.add_argument("file", type=Path)
    maker.add_argument("--keep", type=Path, metavar="DIR", help="work there and leave every file")
    maker.add_argument("--only", default="*", metavar="GLOB", help="cases with such names alone")
    comparer = commands.add_parser("compare", help="print what two files differ in")
    comparer.add_argument("first", type=Path)
    comparer.add_argument("second", type=Path)
    comparer.add_argument("--allowed", type=Path, metavar="FILE", help="reasons, in YAML")
    return parser.parse_args(None if arguments is None else list(arguments))


if __name__ == "__main__":
    given = parse()
    if given.command == "make":
        make(given.file, given.keep, given.only)
    else:
        sys.exit(compare(given.first, given.second, given.allowed))
