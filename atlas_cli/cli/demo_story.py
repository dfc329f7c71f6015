"""The demo: a story in command lines, and the table that its scores make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli import __version__

PLACE = "atlas-demo"
_TUNED = "signs"  # fine-tuned on the spot; the other vectors come with the model
_TUNING = "--steps 30 --batch-size 64 --lr 0.001 --augment none"
_QUICK = ("--epochs", "5", "--augment", "none")


@dataclass(frozen=True)
class StoryLine:
    """One command line. What it writes is `made`; `kept` names a file for what it prints."""

    arguments: tuple[str, ...]
    made: str = ""
    kept: str = ""

    @property
    def name(self) -> str:
        """What it is called where it speaks: the name of what it makes."""
        return (self.made or self.kept).partition(".")[0]

    def needs(self, other: StoryLine) -> bool:
        """Whether it reads what another one makes."""
        read = {argument.partition("/")[0] for argument in self.arguments} - {self.made}
        return bool(other.made) and other.made in read

    def __str__(self) -> str:
        kept = f" > {self.kept}" if self.kept else ""
        return f"atlas {' '.join(self.arguments)}{kept}"


@dataclass(frozen=True)
class Chapter:
    """Some lines under a title."""

    title: str
    lines: tuple[StoryLine, ...]


@dataclass(frozen=True)
class Tale:
    """One thing that coefficients do: the command that learns them, and where it is tested."""

    name: str
    title: str
    learn: tuple[str, ...]
    tested: tuple[str, ...]

    @property
    def runs(self) -> tuple[str, str]:
        """The runs with one scale for everything, and with learned coefficients."""
        return f"{self.name}_uniform", self.name


def _vectors(*names: str) -> tuple[str, ...]:
    files = (f"{n}.safetensors" if n == _TUNED else f"builtin:{n}" for n in names)
    return ("--vectors", *files)


TALES = (
    Tale(
        "few_shot",
        "few-shot: 4 per class",
        (
            *("fit", "builtin:house_numbers", "--shots", "4", "--augment", "none"),
            *_vectors("signs", "digits", "letters", "counts"),
        ),
        ("builtin:house_numbers",),
    ),
    Tale(
        "test_time",
        "test-time: no labels",
        (
            *("tta", "builtin:textures", "--split", "val", "--objective", "balanced-entropy"),
            *_vectors("signs", "digits", "letters", "terrain"),
        ),
        ("builtin:textures",),
    ),
    Tale(
        "forget",
        "forgetting",
        (
            *("negate", "builtin:letters", "--control", "builtin:everything", "--shots", "4"),
            *(*_QUICK, "--batch-size", "32", *_vectors("letters")),
        ),
        ("builtin:letters", "builtin:everything"),
    ),
    Tale(
        "together",
        "adding: one for all",
        (
            *("add", "builtin:digits", "builtin:signs", "builtin:terrain", "--shots", "4"),
            *(*_QUICK, "--batch-size", "32", *_vectors("digits", "signs", "terrain")),
        ),
        ("builtin:digits", "builtin:signs", "builtin:terrain"),
    ),
)


def chapters() -> tuple[Chapter, ...]:
    """The whole story. A line comes after those that it needs, and the longest come first."""
    few_shot, test_time, forget, together = TALES
    return (
        Chapter(
            "Fine-tune the built-in model on road signs for a few seconds: what that changes is a "
            "task vector. With the vector of letters, which comes with the model, forget letters",
            (_tuning(), *_learning(forget), _extraction()),
        ),
        Chapter(
            "Learn how much of each block of each vector to add: from a few images, from images "
            "without labels, for several tasks; beside the best single scale",
            tuple(line for tale in (together, few_shot, test_time) for line in _learning(tale)),
        ),
        Chapter(
            "Merge: what was learned becomes a plain model. Evaluate it beside the base, on test "
            "images",
            tuple(
                line for tale in reversed(TALES) for line in (*_merging(tale), _evaluation(tale))
            ),
        ),
    )


def _line(text: str, run: str) -> StoryLine:
    return StoryLine((*text.split(), "--model", "builtin:tiny", "-o", run), run)


def _tuning() -> StoryLine:
    return _line(f"finetune builtin:{_TUNED} {_TUNING}", _TUNED)


def _extraction() -> StoryLine:
    file = f"{_TUNED}.safetensors"
    names = (f"{_TUNED}/model", "--name", _TUNED)
    return StoryLine(("extract", "builtin:tiny", *names, "-o", file), file)


def _learning(tale: Tale) -> Iterator[StoryLine]:
    uniform, learned = tale.runs
    text = " ".join(tale.learn)
    yield _line(text, learned)
    yield _line(f"{text} --method search", uniform)


def _merging(tale: Tale) -> Iterator[StoryLine]:
    for run in tale.runs:
        yield StoryLine(("merge", f"{run}/recipe.yaml", "-o", _model(run)), _model(run))


def _evaluation(tale: Tale) -> StoryLine:
    models = ("builtin:tiny", *map(_model, tale.runs))
    return StoryLine(("eval", *models, "--data", *tale.tested, "--json"), kept=scores_file(tale))


def _model(run: str) -> str:
    return f"{run}_model"


def scores_file(tale: Tale) -> str:
    """Where the scores of a tale are kept."""
    return f"{tale.name}.json"


def drawing(path: str) -> Chapter:
    """The command that draws the coefficients of the first tale."""
    line = StoryLine(("inspect", TALES[0].name, "--plot", path), path)
    return Chapter("Draw the coefficients that recognise house numbers", (line,))


def identity() -> str:
    """What tells this story from that of another version."""
    text = "\n".join(str(line) for chapter in chapters() for line in chapter.lines)
    return hashlib.sha256(f"{__version__}\n{text}".encode()).hexdigest()[:16]


# The end ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableRow:
    """One row of the last table: accuracy on test images, in percent."""

    what: str
    task: str
    zero_shot: float
    uniform: float
    learned: float


def table(scores: Mapping[str, Mapping[str, Any]]) -> list[TableRow]:
    """The rows of all tales, by the JSON that `atlas eval` printed for each."""
    return [row for tale in TALES for row in _rows(tale, scores[tale.name]["results"])]


def _rows(tale: Tale, results: Sequence[Mapping[str, Any]]) -> Iterator[TableRow]:
    found = {(one["model"], one["data"]): 100 * one["top1"] for one in results}
    models = ("builtin:tiny", *map(_model, tale.runs))
    rows = [[found[model, data] for model in models] for data in tale.tested]
    if tale.name == "forget":
        for task, what, row in zip(tale.tested, ("to forget", "to keep"), rows, strict=True):
            yield TableRow(f"{tale.title}: {what}", task, *(round(value, 2) for value in row))
        return
    means = [round(sum(column) / len(column), 2) for column in zip(*rows, strict=True)]
    names = ", ".join(tale.tested) if len(rows) == 1 else f"mean of {len(rows)} tasks"
    yield TableRow(tale.title, names, *means)
