"""Write docs/commands.md: what `--help` prints, for every command.

python docs/build_commands.py
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

PAGE = Path(__file__).parent / "commands.md"
INTRODUCTION = """# Commands

What `--help` prints. This page is written by `python docs/build_commands.py`.
"""


def page() -> str:
    """The text of docs/commands.md."""
    os.environ["COLUMNS"] = "100"
    from atlas_cli.cli.app import list_commands

    names = [str(command.name) for command in list_commands().registered_commands]
    sections = [f"\n## `atlas`\n\n```text\n{_help()}```\n"]
    sections += [f"\n## `atlas {name}`\n\n```text\n{_help(name)}```\n" for name in names]
    return INTRODUCTION + "".join(sections)


def _help(*command: str) -> str:
    from atlas_cli.cli.app import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([*command, "--help"])
    assert code == 0, command
    return printed.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
