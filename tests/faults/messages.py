"""List the error messages that no test produces: `python -m tests.faults.messages -n 2`.

Runs the tests, with the flags of pytest that are given, while every process notes where it makes an
AtlasError, and compares these places with the source. `--log FILE` keeps the notes, and counts
those of earlier runs of the same source.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atlas_cli import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(errors.__file__).parent
KINDS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.AtlasError)
}


def sites() -> Iterator[tuple[str, int, str]]:
    """File, line and words of every place in the package that makes an AtlasError."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in KINDS:
                yield str(path.relative_to(PACKAGE)), node.lineno, ast.unparse(node)


def noted(log: Path) -> set[tuple[str, int]]:
    """File and line of every place that the tests came to."""
    found = set()
    for line in log.read_text("utf-8").splitlines():
        number, _, name = line.partition(" ")
        path = Path(name)
        if path.is_relative_to(PACKAGE):
            found.add((str(path.relative_to(PACKAGE)), int(number)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, help="where the notes go, and those of earlier runs")
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="atlas-messages-") as folder:
        log = (given.log or Path(folder) / "log").absolute()
        log.touch()
        paths = [str(Path(__file__).parent / "recorder"), str(ROOT), os.environ.get("PYTHONPATH")]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *flags],
            env=os.environ
            | {"MESSAGES_LOG": str(log), "PYTHONPATH": ":".join(filter(None, paths))},
            cwd=ROOT,
            check=False,
        )
        came = noted(log)
    everything = list(sites())
    missing = [site for site in everything if site[:2] not in came]
    for file, line, text in missing:
        print(f"atlas_cli/{file}:{line}: {text}")
    print(f"{len(everything)} messages, {len(missing)} that no test produces")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
