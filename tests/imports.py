"""What command lines import: several of them one after another in one new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEAVY = {
    *("torch", "open_clip", "transformers", "numpy", "torchvision", "PIL", "safetensors"),
    *("altair", "vl_convert"),
}
SCRIPT = """
import contextlib, io, json, sys
from atlas_cli.cli.app import main
HEAVY = json.loads(sys.argv[1])
for arguments, stdin in json.load(sys.stdin):
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    heavy = [name for name in HEAVY if name in sys.modules]
    print(json.dumps({"code": code, "err": err.getvalue(), "heavy": heavy}))
assert "typer" in sys.modules
"""


@dataclass(frozen=True)
class Outcome:
    """How a command line ended, what it said, and what heavy modules were imported by then."""

    code: int
    err: str
    heavy: list[str]


def outcomes(lines: Sequence[Sequence[str]] | Mapping[str, Sequence[str]]) -> list[Outcome]:
    """What became of command lines; those of a mapping read its keys from stdin."""
    given = [(line, "") for line in lines]
    if isinstance(lines, Mapping):
        given = [(line, stdin) for stdin, line in lines.items()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(sorted(HEAVY))],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
