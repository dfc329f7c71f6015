"""README says what is true: its commands run and print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
NUMBER = re.compile(r"\d+\.\d+")


def shown_commands() -> list[tuple[str, str]]:
    """Every `$ command` in a console block, with the output shown below it."""
    pairs: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            pairs.append((command, output))
    return pairs


def test_readme_shows_commands():
    assert len(shown_commands()) >= 3


def test_the_commands_of_readme_print_what_it_shows(tmp_path: Path):
    """In order, in one empty folder. Accuracies may move by an image between machines."""
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    for command, shown in shown_commands():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert NUMBER.sub("#", done.stdout) == NUMBER.sub("#", shown), command
        ours, theirs = NUMBER.findall(done.stdout), NUMBER.findall(shown)
        assert [float(n) for n in ours] == pytest.approx([float(n) for n in theirs], abs=0.6)


def test_every_command_is_in_readme():
    from atlas_cli.commands.app import app

    for command in app.registered_commands:
        assert f"`atlas {command.name}" in README, command.name


def test_every_flag_in_readme_exists():
    help_text = ""
    from atlas_cli.commands.app import app

    for command in app.registered_commands:
        done = subprocess.run(
            [sys.executable, "-m", "atlas_cli", str(command.name), "--help"],
            capture_output=True,
            text=True,
        )
        help_text += done.stdout
    known = set(re.findall(r"--[a-z-]+", help_text)) | {"--version"}
    for line in re.findall(r"^(?:\$ )?atlas .*", README, re.MULTILINE):
        for word in shlex.split(line, comments=True):
            if word.startswith("--"):
                assert word.partition("=")[0] in known, word


def test_the_map_of_the_code_lists_every_module():
    package = ROOT / "atlas_cli"
    section = README.partition("## Map of the code")[2]
    listed = re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE)
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)


def test_the_changelog_opens_with_what_is_not_released_yet():
    assert (ROOT / "CHANGELOG.md").read_text().startswith("# Changelog\n\n## Unreleased\n")
