"""Completion with Tab in bash, zsh and fish: commands, options, and the values of options.

A shell runs `atlas` with the line up to the cursor in the environment; the answer is a line for
every candidate, with a description behind a tab, and `FILES` last if files are candidates, too.
Recipes and registries say which words an option takes, so plugins' names are completed as ours are.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperArgument, TyperOption

from atlas_cli.errors import AtlasError, UsageError, nearest

ASKED = "_ATLAS_COMPLETE"  # the shell that asks
_LINE, _BREAKS = "_ATLAS_LINE", "_ATLAS_BREAKS"
_FILES = ":files:"

_BASH = """\
_atlas_completion() {
    local IFS=$'\\n' found
    found=($(_ATLAS_COMPLETE=bash _ATLAS_LINE="${COMP_LINE:0:COMP_POINT}" \\
        _ATLAS_BREAKS="$COMP_WORDBREAKS" "$1" 2>/dev/null))
    COMPREPLY=()
    local one
    for one in "${found[@]}"; do
        if [[ $one == :files: ]]; then
            compopt -o filenames 2>/dev/null
            COMPREPLY+=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
        else
            COMPREPLY+=("${one%%$'\\t'*}")
        fi
    done
}
complete -F _atlas_completion atlas
"""
_ZSH = """\
#compdef atlas
_atlas_completion() {
    local -a found values
    local one files=
    found=("${(@f)$(_ATLAS_COMPLETE=zsh \\
        _ATLAS_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" $words[1] 2>/dev/null)}")
    for one in $found; do
        if [[ $one == :files: ]]; then
            files=1
        else
            values+=("${${one%%$'\\t'*}//:/\\\\:}:${one#*$'\\t'}")
        fi
    done
    (( $#values )) && _describe -V atlas values
    [[ -n $files ]] && _files
    return 0
}
if [[ $funcstack[1] == _atlas ]]; then
    _atlas_completion "$@"
else
    compdef _atlas_completion atlas
fi
"""
_FISH = """\
function __atlas_completion
    set -l line (commandline -cp | string collect)
    set -l command (commandline -po)[1]
    for one in (_ATLAS_COMPLETE=fish _ATLAS_LINE=$line $command 2>/dev/null)
        if test "$one" = :files:
            __fish_complete_path (commandline -ct)
        else
            printf '%s\\n' $one
        end
    end
end
complete -c atlas -f -a '(__atlas_completion)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/atlas",
    "zsh": "~/.zfunc/_atlas",
    "fish": "~/.config/fish/completions/atlas.fish",
}
_HINTS = {
    "bash": "bash finds it with the package bash-completion; without that, source it in ~/.bashrc",
    "zsh": "zsh finds it with: fpath+=~/.zfunc; autoload -Uz compinit; compinit (in ~/.zshrc)",
    "fish": "fish finds it by itself",
}


class Candidate(NamedTuple):
    """What may stand at the cursor, and what it is."""

    value: str
    about: str = ""


def script_of(shell: str) -> str:
    """The script that a shell reads. Raises UsageError for a shell that there is none for."""
    if shell not in _SCRIPTS:
        listed = ", ".join(_SCRIPTS)
        raise UsageError(f"no completion for '{shell}'{nearest(shell, _SCRIPTS)} ({listed})")
    return _SCRIPTS[shell]


def install(shell: str) -> tuple[Path, str]:
    """Write the script of a shell into the user's folders; its path, and what else is to do."""
    script, path = script_of(shell), Path(_PLACES[shell]).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, "utf-8")
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem
    return path, _HINTS[shell]


# What may stand at the cursor -----------------------------------------------------------------


def answer(group: Any, environment: Mapping[str, str]) -> str:
    """The candidates for the line that a shell has, as that shell reads them."""
    line = environment.get(_LINE, "")
    words, current = split_line(line)
    found = [*candidates(group, words, current)]
    files = any(one.value == _FILES for one in found)
    known = {one.value: one for one in reversed(found)}  # the first of each
    shown = [one for one in found if one.value.startswith(current) and known[one.value] is one]
    shown = [one for one in shown if one.value != _FILES]
    drop = 0
    if environment.get(ASKED) == "bash":  # which completes what follows a colon or an =
        drop = max(current.rfind(c) + 1 for c in ":=" if c in environment.get(_BREAKS, ":="))
    lines = [f"{one.value[drop:]}\t{one.about}".rstrip("\t") for one in shown]
    return "".join(f"{line}\n" for line in [*lines, *([_FILES] if files else [])])


def split_line(line: str) -> tuple[list[str], str]:
    """The whole words of a line, without the program's name, and the word at its end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words += lexer
    except ValueError:  # a quote that is still open
        words.append(lexer.token)
    unfinished = bool(line) and not line[-1].isspace()
    return (words[1:-1], words[-1]) if unfinished and len(words) > 1 else (words[1:], "")


def candidates(group: Any, words: Sequence[str], current: str) -> Iterator[Candidate]:
    """Everything that may follow some words; those that do not begin as `current` does, too."""
    command = group.commands.get(words[0]) if words else None
    if command is None:
        if not words:
            yield from (
                Candidate(name, _first(one.help)) for name, one in sorted(group.commands.items())
            )
            yield from _options(group.params)
        return
    option = option_at(command.params, words[1:])
    if option is not None and not current.startswith("-"):
        yield from _values(command.name, option.name)
        if not getattr(option, "multiple", False):
            return
    if current.startswith("-"):
        from atlas_cli.cli.descriptions import describe

        yield from _options(command.params, describe(command))
    elif argument := next((p for p in command.params if isinstance(p, TyperArgument)), None):
        yield from _values(command.name, f"{argument.name}:")


def option_at(params: Iterable[Any], words: Sequence[str]) -> TyperOption | None:
    """The option whose value is next: the last one, if it takes more values than it has."""
    named = {name: one for one in params if isinstance(one, TyperOption) for name in one.opts}
    for count, word in enumerate(reversed(words)):
        if word.startswith("-") and word != "-":
            option = named.get(word)
            takes = option is not None and not option.is_flag
            return option if takes and (option.multiple or not count) else None  # type: ignore[union-attr]
    return None


def _options(params: Iterable[Any], texts: Mapping[str, str] | None = None) -> Iterator[Candidate]:
    for option in params:
        if isinstance(option, TyperOption) and not option.hidden:
            about = (texts or {}).get(option.name or "") or option.help
            yield Candidate(max(option.opts, key=len), _first(about))
    yield Candidate("--help", "Show this message and exit.")


def _first(text: str | None) -> str:
    """The first sentence of a text."""
    return " ".join((text or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


# Values ---------------------------------------------------------------------------------------

_DATA = ("data", "data:", "control", "images:", "task:")
_MODELS = ("model", "text", "models:", "base:", "finetuned:", "subjects:")
_PATHS = (
    *("folder", "output", "path", "vector", "vectors_dir", "predictions", "plot", "evaluation"),
    *("classes", "recipe:", "runs:"),
)


def _values(command: str, name: str | None) -> Iterator[Candidate]:
    """The values of an option, or of an argument, whose name ends in a colon."""
    from atlas_cli.datasets.dataset import SPLITS
    from atlas_cli.sources.locate import BUILTIN_MODELS, BUILTIN_VECTORS
    from atlas_cli.sources.open_clip_table import open_clip_tags
    from atlas_cli.vectors.targets import DTYPES, SCOPES

    known: dict[str, Iterable[str]] = {"dtype": DTYPES, "scope": SCOPES, "split": SPLITS}
    known |= {"device": ("auto", "cpu", "cuda", "mps", "xpu"), "log": ("tensorboard", "wandb")}
    if name == "arch":
        known["arch"] = open_clip_tags()
    if name == "compare":
        from atlas_cli.registry import MERGE_METHODS

        known["compare"] = MERGE_METHODS
    if name in known:
        yield from map(Candidate, known[name])
        return
    if name in _DATA:
        from atlas_cli.datasets import builtin

        yield from (Candidate(f"builtin:{one}", "a built-in task") for one in builtin.TASKS)
    if name in _MODELS:
        yield from (Candidate(f"builtin:{one}", "the built-in model") for one in BUILTIN_MODELS)
    if name in ("vectors", "finetuned:", "subjects:"):
        yield from (Candidate(f"builtin:{one}", "a task vector") for one in BUILTIN_VECTORS)
        yield Candidate("builtin:all", "every task vector of the built-in model")
    if name in (*_DATA, *_MODELS, *_PATHS, "vectors"):
        yield Candidate(_FILES)
    yield from map(Candidate, _choices(command, name or ""))


def _choices(command: str, name: str) -> list[str]:
    """The words that the recipe of a command has for a key."""
    from atlas_cli.cli.descriptions import choices_of, recipe_of
    from atlas_cli.recipes.schema import json_schema

    schema = recipe_of(command)
    key = json_schema(schema)["properties"].get(name, {}) if schema else {}
    return [word.removesuffix("DATA").removesuffix("K") for word in choices_of(key)]
