"""Every command in README and docs/ runs, in order, from an empty folder, with no network.

A ```sh block is run by bash line by line. In a ```console block the lines after `$` are run, and
must print what is shown below them. A ```text block is an example for models that would have to
be downloaded, and is not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import TIMEOUT
from warm import COLD, atlas

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("commands.md", "screens.md")  # tests/test_docs.py makes them again
IN_PYTHON = "api.md"  # tests/test_api.py runs it
RUN_FROM_A_CLONE = 2  # README's first blocks install atlas, so .ci/run runs them instead
NUMBER = re.compile(r"\d+\.\d+")
KINDS = {"sh", "console", "text", "python", "toml", "yaml"}  # of which the first two are run
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What failed is named in the words of the page. The shell is the same for a whole block.
TRAP = """trap 'code=$?; echo "exit code $code: $BASH_COMMAND (line $LINENO)" >&2' ERR; """


@dataclass(frozen=True)
class Block:
    """A block of commands, with the line that it begins on and what it must print, if shown."""

    line: int
    script: str
    shown: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found: list[Block] = []
    for match in BLOCK.finditer(text):
        kind, content = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        if kind == "sh":
            found.append(Block(line, content))
        if kind == "console":
            for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append(Block(line, command, output))
    return found[RUN_FROM_A_CLONE:] if page.name == "README.md" else found


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of the test, with an `atlas` and a `python` that are the ones being tested."""
    folder = tmp_path_factory.mktemp("bin")
    # A merge's budget counts what the process holds already: a child of the warm server holds more.
    cold = f'case " $* " in " merge "*" --memory "*) exec {shlex.join(COLD)} "$@";; esac\n'
    for name, first, command in (("atlas", cold, atlas()), ("python", "", [sys.executable])):
        script = folder / name
        script.write_text(f'#!/bin/sh\n{first}exec {shlex.join(command)} "$@"\n')
        script.chmod(0o755)
    # No other setting changes: `atlas` would be started without the warm server (see warm.py).
    return os.environ | {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in (*GENERATED, IN_PYTHON)],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_run_in_order(
    page: Path, tmp_path: Path, environment: dict[str, str]
):
    """Accuracies may move by an image between machines."""
    assert blocks(page), "a page shows what it speaks of"
    for block in blocks(page):
        script = TRAP * (block.shown is None) + block.script
        done = subprocess.run(
            ["bash", "-Eeuo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        where = f"{page.name}, block at line {block.line}:\n{block.script}"
        assert done.returncode == 0, f"{where}\n{done.stderr}"
        if block.shown is not None:
            assert NUMBER.sub("#", done.stdout) == NUMBER.sub("#", block.shown), where
            ours, theirs = NUMBER.findall(done.stdout), NUMBER.findall(block.shown)
            assert [float(n) for n in ours] == pytest.approx([float(n) for n in theirs], abs=0.6)


def test_a_failing_line_is_named(tmp_path: Path):
    script = TRAP + "true\n! false\nfalse | cat\necho beyond\n"
    done = subprocess.run(
        ["bash", "-Eeuo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "exit code 1:" in done.stderr
    assert "(line 3)" in done.stderr


def test_the_first_two_blocks_of_readme_are_run_from_a_fresh_clone():
    """They install atlas, which takes a network: README opens with them, and .ci/run runs them."""
    first, second = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:2]
    assert "pip install ." in first
    assert first.endswith(" atlas demo\n")
    assert "pip install -e" in second
    assert second.endswith(" python -m pytest -n auto\n")
    steps = (ROOT / ".ci/run").read_text("utf-8")
    for number, script in ((1, "first.sh"), (2, "second.sh")):
        assert f"block {number} | tee {script}\nbash -euo pipefail {script}\n" in steps


def test_no_command_is_shown_where_it_would_not_be_run():
    """Blocks are of a kind, and indented text holds no command lines."""
    for page in PAGES:
        text = page.read_text("utf-8")
        if page.name not in GENERATED:
            assert {kind for kind, _ in BLOCK.findall(text)} <= KINDS, page.name
            assert not re.search(r"^    \$? ?atlas ", BLOCK.sub("", text), re.MULTILINE), page.name


def test_examples_that_are_not_run_say_so():
    """A ```text block with commands follows a sentence that says what it needs."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == "text" and re.search(r"^atlas ", match[2], re.MULTILINE):
                before = text[: match.start()].rstrip().rpartition("\n\n")[2]
                if page.name not in GENERATED:
                    assert "downloaded" in before or "not run" in before, match[2]
