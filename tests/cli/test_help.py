"""What --help says is true, complete, and fits the terminal."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.core import TyperOption
from warm import atlas

from atlas_cli.cli.app import list_commands
from atlas_cli.cli.descriptions import key_of, recipe_of, shown_default
from atlas_cli.cli.help import PANELS, panel_of

COMMANDS = typer.main.get_command(list_commands()).commands  # type: ignore[attr-defined]


def help_of(call, command: str) -> dict[str, str]:
    """The text of every option, in one line, by its longest name."""
    text = call(command, "--help").out
    found = {}
    for entry in re.split(r"\n(?=  (?:-\w, )?--)", text.partition("\n\nMethods")[0]):
        names, *words = entry.split("\n\n")[0].split()
        while words and names.endswith(","):
            found[names[:-1]], names, words = " ".join(words), words[0], words[1:]
        found[names] = " ".join(words)
    return found


def test_every_default_is_that_of_the_recipe(call):
    """Of all commands: where a recipe has a key, and where an option has a default of its own."""
    checked = 0
    for name, command in COMMANDS.items():
        texts, schema = help_of(call, name), recipe_of(name)
        for option in command.params:
            if not isinstance(option, TyperOption):
                continue
            field = schema.model_fields.get(key_of(option)) if schema else None
            default = field.default if field and not field.is_required() else option.default
            text = texts[max(option.opts, key=len)]
            said = re.findall(r"\[default: ([^\]]*)\]", text)
            if default is None or default == [] or isinstance(default, bool):
                assert not said, (name, option.name)
            else:
                assert said == [shown_default(default)], (name, option.name)
                checked += 1
            assert "(default" not in text
            # What a sentence says of a default besides is the same one.
            for number in re.findall(r"; ([\d.]+(?:e-?\d+)?)(?=, (?:for|with) )", text):
                assert float(number) == default, (name, option.name)
    assert checked > 80


def test_every_option_is_in_a_panel_and_has_a_text(call):
    for name, command in COMMANDS.items():
        texts = help_of(call, name)
        panels = re.findall(r"^(\w+):$", call(name, "-h").out, re.MULTILINE)
        known = ["Arguments", *PANELS, "Advanced", "Example"]
        assert set(panels) <= set(known), name
        for option in command.params:
            if isinstance(option, TyperOption):
                assert panel_of(option) in panels
                text = texts[max(option.opts, key=len)]
                assert text.removeprefix(option.metavar or ""), (name, option.name)


def test_help_fits_a_terminal_and_nothing_is_cut(on_terminal, call):
    """The words are those of a very wide terminal."""
    for name in ([], ["fit"], ["tta"], ["merge"]):
        words = call(*name, "-h").out.split()
        for columns in (80, 120):
            shown = on_terminal(*name, "-h", columns=columns, COLUMNS="")
            lines = shown.replace("\r", "").splitlines()
            assert columns - 16 < max(map(len, lines)) <= columns
            assert shown.split() == words


def test_merge_names_its_methods(call):
    from atlas_cli.registry import MERGE_METHODS

    listed = " ".join(call("merge", "-h").out.partition("Methods of recipes")[2].split())
    assert listed.partition(": ")[2].split(", ") == list(MERGE_METHODS)


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path):
    """As they are printed, one after the other in one folder; the demo has tests of its own."""
    order = ("draw", "finetune", "extract", "eval", "fit", "merge", "negate", "add", "tta")
    script = "set -e\n"
    for name in (*order, "inspect"):
        text = COMMANDS[name].help or ""
        script += text.partition("Example:\n")[2].strip() + " > /dev/null\n"
    assert script.count("atlas ") == len(order) + 1
    done = subprocess.run(
        ["bash", "-c", f'atlas() {{ {shlex.quote(atlas()[0])} "$@"; }}\n{script}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
