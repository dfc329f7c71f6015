"""What `--help` shows: the commands, and the options of each in panels.

Help is plain text, since drawing it with rich would take longer than all the rest of the start.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from atlas_cli.cli.descriptions import describe, key_of

PANELS: dict[str, tuple[str, ...]] = {
    "Data": (
        *("data", "split", "shots", "templates", "classes", "control", "prior"),
        *("workers", "skip_broken"),
    ),
    "Model": (
        "model",
        "vectors",
        "exclude",
        "storage",
        "base",
        "arch",
        "text",
        "scope",
        "allow_target",
        "name",
    ),
    "Learning": (
        *(
            "objective",
            "forget",
            "keep",
            "method",
            "select",
            "granularity",
            "tune",
            "lora",
            "adapter",
            "basis",
            "preset",
            "adapter_stage",
        ),
        *("epochs", "steps", "lr", "batch_size", "augment", "seed"),
    ),
    "Output": (
        *("folder", "output", "path", "vector", "vectors_dir", "predictions", "plot", "dtype"),
        *("rank", "energy", "dry_run", "compare", "disentanglement", "push", "evaluation", "log"),
        *(
            "blocks",
            "classifier",
            "formats",
            "keep_files",
            "resume",
            "force",
            "as_json",
            "quiet",
            "verbose",
            "schema",
            "help",
        ),
    ),
}
_ADVANCED = "Advanced"
_WIDEST = 26  # characters of an option's names and value before its text begins on a new line


class Command(TyperCommand):
    """A command whose help shows its options in panels."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the name of the command: its options and arguments."""
        arguments = [p for p in self.get_params(ctx) if isinstance(p, TyperArgument)]
        shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
        return ["[OPTIONS]", *map(str, shown)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options in panels."""
        described = describe(self)
        arguments = [p for p in self.get_params(ctx) if isinstance(p, TyperArgument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(str(p.metavar), p.help or "") for p in arguments])
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (*PANELS, _ADVANCED)}
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption) and not option.hidden:
                names = _names(option, ctx)
                text = described.get(option.name or "") or option.help or ""
                panels[panel_of(option)].append((names, text))
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=_WIDEST)
        if self.name == "merge":
            from atlas_cli.registry import MERGE_METHODS

            with formatter.section("Methods of recipes (merge_method)"):
                formatter.write_text(", ".join(MERGE_METHODS))


class CommandGroup(TyperGroup):
    """The list of commands, with all of what each is for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first sentence of every command, on as many lines as it takes."""
        rows = [
            (name, (command.help or "").split("\n\n")[0].replace("\n", " "))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def panel_of(option: TyperOption) -> str:
    """The panel in which help shows an option."""
    name = key_of(option)
    return next((panel for panel, names in PANELS.items() if name in names), _ADVANCED)


def _names(option: TyperOption, ctx: Any) -> str:
    short_first = ", ".join(sorted(option.opts, key=lambda name: name.startswith("--")))
    if option.is_flag:
        return short_first
    kind = option.metavar or {"int": "N", "float": "X"}.get(option.bare_type(), "TEXT")
    return f"{short_first} {kind}"
