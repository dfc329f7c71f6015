"""Which messages of the package the tests produce: errors, problems of recipes, warnings and notes.

While tests run, this process and the warm ones note, in the file that MESSAGES_LOG names, the lines
at which an AtlasError comes about and the words that it and the notes on stderr have. A test run
that is given MESSAGES_LOG keeps that file, so that the default and the slow tests can share one.

    MESSAGES_LOG=notes python -m pytest -n auto
    MESSAGES_LOG=notes python -m pytest -n auto -m slow
    python tests/faults/messages.py notes   # lists what is missing, and fails if an error is

Errors are known by the line that makes them. Clauses that other errors are made of, warnings and
notes are known by their words, as far as those can be told from the code; they are listed only.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from atlas_cli import errors
from atlas_cli.cli import console

LOG = "MESSAGES_LOG"
PACKAGE = Path(errors.__file__).parent
KINDS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.AtlasError)
}
# For a Python that a test starts by itself, before all else that it runs.
RECORD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from faults import messages
messages.record()
"""
_PREFIX = f"{PACKAGE}{os.sep}"
_LONGEST = 400  # letters of a message that are noted
_FRAMES = 3  # of the package that are noted: a function may make the error for its caller
# Raised for programmers: nothing that a user does brings them about.
_NOT_SHOWN = {"AssertionError", "AttributeError", "NotImplementedError"}
# Calls with a text for users: on stderr, or in the line about a recipe.
_SHOWN = {"Noted", "VectorNoted", "Warned", "_warn", "expect", "note", "warn", "wrong_kind"}
_LISTING = re.compile(r"problem|mismatch|complaint|_of_system")  # functions that name faults
_usual_error, _usual_note = errors.AtlasError.__init__, console.note
_noted: set[object] = set()


class Site(NamedTuple):
    """A place that makes a message; `pattern` if it is recognised by its words, not by the line.

    `whole` is False for a clause, a warning or a note, which is no error by itself.
    """

    path: Path
    line: int
    words: str
    pattern: re.Pattern[str] | None = None
    whole: bool = False


# Notes ------------------------------------------------------------------------------------------


def record() -> None:
    """From now on, note every message of this process."""
    errors.AtlasError.__init__ = _made  # type: ignore[method-assign]
    console.note = _said


def _made(self: errors.AtlasError, *arguments: object) -> None:
    _usual_error(self, *arguments)
    _write([*_lines(sys._getframe(1)), *_handled(sys.exception()), *map(str, arguments)])


def _said(text: str) -> None:
    _write([text])
    _usual_note(text)


def _lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """File and line of the innermost frames of the package."""
    found = 0
    while frame and found < _FRAMES:
        name = frame.f_code.co_filename
        if name.startswith(_PREFIX) and name != errors.__file__:
            yield name, frame.f_lineno
            found += 1
        frame = frame.f_back


def _handled(problem: BaseException | None) -> Iterator[tuple[str, int]]:
    """File and line of the frames of the package through which the error that is handled went."""
    seen: set[int] = set()
    while problem and id(problem) not in seen:
        seen.add(id(problem))
        traceback: TracebackType | None = problem.__traceback__
        while traceback:
            if (name := traceback.tb_frame.f_code.co_filename).startswith(_PREFIX):
                yield name, traceback.tb_lineno
            traceback = traceback.tb_next
        problem = problem.__cause__ or problem.__context__


def _write(found: list[tuple[str, int] | str]) -> None:
    new = [one for one in found if one not in _noted]
    if new and (log := os.environ.get(LOG)):
        _noted.update(new)
        short = (one[:_LONGEST] if isinstance(one, str) else one for one in new)
        text = "".join(f"{json.dumps(one)}\n" for one in short)
        with contextlib.suppress(OSError):  # a test may let no file grow: what it shows comes first
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, text.encode())  # one write: lines stay whole
            finally:
                os.close(handle)


def missing(log: Path, package: Path = PACKAGE) -> tuple[list[str], list[str]]:
    """Place and words of what was not noted: errors, and then clauses, warnings and notes."""
    lines, texts = set(), []
    for line in log.read_text("utf-8").splitlines():
        found = json.loads(line)
        if isinstance(found, str):
            texts.append(found)
        else:
            lines.add((found[0], found[1]))
    said = "\n".join(texts)

    def is_noted(site: Site) -> bool:
        if site.pattern:
            return bool(site.pattern.search(said))
        return (str(site.path), site.line) in lines

    never = [site for site in sites(package) if not is_noted(site)]

    def named(whole: bool) -> list[str]:
        return [
            f"{site.path.relative_to(package.parent)}:{site.line}: {site.words}"
            for site in never
            if site.whole is whole
        ]

    return named(True), named(False)


# Places in the package -----------------------------------------------------------------------


def sites(package: Path = PACKAGE) -> Iterator[Site]:
    """Every place in the package that makes a message."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        yield from _errors_of(tree, path)
        yield from _sentences_of(tree, path)


def _errors_of(tree: ast.AST, path: Path) -> Iterator[Site]:
    """Where an AtlasError is made, and where something is raised that becomes one.

    One line may choose between messages: these are told apart by their words.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in KINDS:
            yield Site(path, node.lineno, ast.unparse(node), whole=True)
            texts = [text for argument in node.args for text in _texts(argument)]
            yield from _by_words(texts, path) if len(texts) > 1 else ()
        elif isinstance(node, ast.Raise) and isinstance(made := node.exc, ast.Call):
            given = [*made.args, *(keyword.value for keyword in made.keywords)]
            if _name(made) not in KINDS | _SHOWN | _NOT_SHOWN and any(map(_texts, given)):
                yield Site(path, made.lineno, ast.unparse(made))


def _sentences_of(tree: ast.AST, path: Path) -> Iterator[Site]:
    """Texts that become a line of an error message, a warning or a note."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in _SHOWN:
            yield from _by_words([t for argument in node.args for t in _texts(argument)], path)
        elif isinstance(node, ast.Yield) and node.value and path.parent.name == "recipes":
            yield from _by_words(_texts(node.value), path)
        elif isinstance(node, ast.FunctionDef) and _LISTING.search(node.name):
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            yield from _by_words([t for value in returned if value for t in _texts(value)], path)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _texts(node: ast.expr) -> list[ast.Constant | ast.JoinedStr]:
    """The texts that an expression can be, or that are its parts."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return [node]
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.BoolOp():
            parts = node.values
        case ast.BinOp():
            parts = [node.left, node.right]
        case ast.Tuple() | ast.List():
            parts = node.elts
        case ast.ListComp() | ast.GeneratorExp():
            parts = [node.elt]
        case ast.DictComp():
            parts = [node.value]
        case ast.Lambda():
            parts = [node.body]
        case _:
            return []
    return [text for part in parts for text in _texts(part)]


def _by_words(texts: list[ast.Constant | ast.JoinedStr], path: Path) -> Iterator[Site]:
    """Texts with at least two words of their own, recognised wherever they are said."""
    for text in texts:
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        fixed = [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
        if any(len(one.split()) > 1 for one in fixed if one):
            while fixed[0] is None:  # a search that begins with anything takes minutes
                del fixed[0]
            pattern = "[^\n]*".join(re.escape(one) if one else "" for one in fixed)
            yield Site(path, text.lineno, ast.unparse(text), re.compile(pattern))


if __name__ == "__main__":
    never, others = missing(Path(sys.argv[1]))
    for kind, found in (("clauses, warnings and notes", others), ("errors", never)):
        print("\n".join([*found, f"{len(found)} {kind} that no test produces"]))
    sys.exit(bool(never))
