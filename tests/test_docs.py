"""README and docs/ say what is true. That their commands run is for test_doc_commands.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
DOCS = ROOT / "docs"
COMMANDS = (DOCS / "commands.md").read_text("utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/README.md",
    *sorted(DOCS.glob("*.md")),
]


def test_every_command_is_in_readme():
    from atlas_cli.cli.app import list_commands

    for command in list_commands().registered_commands:
        assert f"`atlas {command.name}" in README, command.name


def test_the_page_of_commands_is_what_help_prints():
    done = subprocess.run(
        [sys.executable, "-c", "import build_commands; print(build_commands.page(), end='')"],
        env=os.environ | {"PYTHONPATH": f"{DOCS}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == COMMANDS, "run python docs/build_commands.py"


def screens(names: str) -> tuple[str, dict[str, str]]:
    """The page of screens, and those that are named, as docs/build_screens.py makes them now."""
    script = f"import build_screens as b, json; print(json.dumps([b.page(), b.pictures({names})]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": f"{DOCS}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page, pictures = json.loads(done.stdout)
    return page, pictures


def test_the_page_of_screens_is_what_its_script_writes():
    """Of its pictures, those that take no time are drawn again, to the same bytes."""
    page, pictures = screens("('help', 'mistake')")
    assert page == (DOCS / "screens.md").read_text("utf-8"), "run python docs/build_screens.py"
    for name, picture in pictures.items():
        assert picture == (DOCS / "screens" / f"{name}.svg").read_text("utf-8")
    shown = set(re.findall(r"\(screens/(\w+\.svg)\)", page))
    assert shown == {path.name for path in (DOCS / "screens").iterdir()}


@pytest.mark.slow
def test_screens_drawn_again_say_the_same():
    """Numbers may move between machines."""
    for name, picture in screens("")[1].items():
        kept = (DOCS / "screens" / f"{name}.svg").read_text("utf-8")
        assert said(picture) == said(kept), name


def said(picture: str) -> list[str]:
    """The words of an SVG, with # for numbers."""
    root = ElementTree.fromstring(picture)
    text = " ".join(one.text or "" for one in root.iter() if one.tag.endswith("}text"))
    return re.sub(r"[+-]?\d[\d.,e-]*", "#", text).split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_flag_on_a_page_exists(page: Path):
    """By the help of the very command, also in blocks that are not run and within sentences."""
    helps = {part.partition("`")[0]: part for part in COMMANDS.split("\n## `atlas ")[1:]}
    text = page.read_text("utf-8")
    shown = re.findall(r"`atlas ([a-z][^`]*)`", text)
    for block in re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        shown += re.findall(r"(?:^|^\$ |\| )atlas ([^|;>\n]*)", block, re.MULTILINE)
    for line in shown:
        command, *words = line.split()
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= set(re.findall(r"--[a-z-]+", helps[command])), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_on_a_page_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The names that a heading is linked by."""
    headings = re.findall(r"^#+ (.*)", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_map_of_the_code_has_a_row_for_every_folder_and_top_level_module():
    package = ROOT / "atlas_cli"
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Map of the code")[2]
    listed = re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE)
    files = {path.name for path in package.glob("*.py")} - {"__main__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)


def test_the_changelog_opens_with_what_is_not_released_yet():
    assert (ROOT / "CHANGELOG.md").read_text().startswith("# Changelog\n\n## Unreleased\n")
