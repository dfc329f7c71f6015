"""Nothing heavy is imported before the command line has been checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from imports import HEAVY, outcomes

LINES: list[tuple[list[str], int]] = [
    (["--help"], 0),
    (["--version"], 0),
    (["eval", "--help"], 0),
    (["draw", "--help"], 0),
    (["evla"], 2),
    (["eval", "builtin:tiny", "--dtaa", "x"], 2),
    (["eval", "builtin:tiny"], 2),
    (["eval", "builtin:tiny", "--data", "builtin:digit"], 2),
    (["eval", "builtin:tny", "--data", "builtin:digits"], 2),
    (["eval", "ViT-B-32/openia", "--data", "builtin:digits"], 2),
    (["eval", "x.safetensors", "--data", "builtin:digits"], 2),
    (["eval", "builtin:tiny", "--data", "builtin:digits", "--arch", "ViT-B-31"], 2),
    (["eval", "builtin:tiny", "--data", "builtin:digits", "--device", "gpu"], 2),
    (["eval", "builtin:tiny", "--data", "nowhere/"], 2),
    (["eval", "missing.yaml"], 2),
    (["finetune", "--help"], 0),
    (["finetune", "builtin:digits", "--model", "builtin:tiny"], 2),
    (["inspect", "--help"], 0),
    (["report", "--help"], 0),
    (["report", "nowhere", "-o", "report.html"], 2),
    (["merge", "--help"], 0),
    (["merge", "--schema"], 0),
    (["merge", "missing.yaml", "-o", "out"], 2),
    (["eval", "builtin:tiny", "--data", "builtin:digits", "--template", "no place"], 2),
]
RECIPES = [
    "modles: [a]\n",
    "models: builtin:tiny\ndata: [builtin:digits]\n",
    "models: [",
    "[]",
    "a: 1\na: 2",
]


def test_help_and_mistakes_cost_no_heavy_import():
    found = outcomes([line for line, _ in LINES])
    for (line, code), outcome in zip(LINES, found, strict=True):
        assert (outcome.code, outcome.heavy) == (code, []), (line, outcome)


def test_the_list_of_commands_needs_no_pydantic():
    """Importing it and building the models of recipes takes a tenth of a second."""
    script = "import sys, atlas_cli.cli.app; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ).returncode == 0


def test_a_recipe_with_an_error_costs_no_heavy_import():
    found = outcomes({recipe: ["eval", "-"] for recipe in RECIPES})
    for recipe, outcome in zip(RECIPES, found, strict=True):
        assert (outcome.code, outcome.heavy) == (2, []), (recipe, outcome)


def test_a_folder_without_images_costs_no_heavy_import(tmp_path: Path):
    [outcome] = outcomes([["eval", "builtin:tiny", "--data", str(tmp_path)]])
    assert (outcome.code, outcome.heavy) == (1, [])


def test_the_program_itself_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "atlas_cli", "--help"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "typer" in names  # the measurement itself works
    assert not names & HEAVY


def test_a_command_imports_no_other_command():
    script = (
        "import sys; from atlas_cli.cli.app import main; main(['report', '--help'])\n"
        "sys.exit('atlas_cli.cli.tta' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_misspelt_command_gets_the_nearest_of_all_though_its_arguments_name_one():
    (found,) = outcomes([["fti", "merge"]])
    assert found.err == "atlas: error: no such command 'fti'; did you mean 'fit'?\n"
