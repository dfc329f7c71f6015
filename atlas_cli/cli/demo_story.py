"""The demo as data: its experiments, their command lines in sections, and the table of scores."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas_cli import __version__

PLACE = "atlas-demo"
_TUNED = "signs"  # fine-tuned on the spot; the other vectors come with the model
_TUNING = "--steps 30 --batch-size 64 --lr 0.001 --augment none"
_QUICK = ("--epochs", "5", "--augment", "none")


@dataclass(frozen=True)
class CommandLine:
    """One command line. `made` is the file or folder it writes, `kept` the file for its stdout."""

    arguments: tuple[str, ...]
    made: str = ""
    kept: str = ""

    @property
    def name(self) -> str:
        """What messages call it: the name of what it makes."""
        return (self.made or self.kept).rpartition("/")[2].partition(".")[0]

    def needs(self, other: CommandLine) -> bool:
        """Whether it reads what another command line makes."""
        read = {argument.partition("/")[0] for argument in self.arguments} - {self.made}
        return bool(other.made) and other.made in read

    def __str__(self) -> str:
        kept = f" > {self.kept}" if self.kept else ""
        return f"atlas {shlex.join(self.arguments)}{kept}"


@dataclass(frozen=True)
class Section:
    """Command lines under a title."""

    title: str
    lines: tuple[CommandLine, ...]


@dataclass(frozen=True)
class Experiment:
    """One use of coefficients: the command that learns them, and the data they are tested on."""

    name: str
    title: str
    learn: tuple[str, ...]
    tested: tuple[str, ...]

    @property
    def runs(self) -> tuple[str, str]:
        """The names of the run with one scale for everything and of that which learns."""
        return f"{self.name}_uniform", self.name


def _vectors(*names: str) -> tuple[str, ...]:
    files = (f"{n}.safetensors" if n == _TUNED else f"builtin:{n}" for n in names)
    return ("--vectors", *files)


EXPERIMENTS = (
    Experiment(
        "few_shot",
        "few-shot: 4 per class",
        (
            *("fit", "builtin:house_numbers", "--shots", "4", "--augment", "none"),
            *_vectors("signs", "digits", "letters", "counts"),
        ),
        ("builtin:house_numbers",),
    ),
    Experiment(
        "test_time",
        "test-time: no labels",
        (
            *("tta", "builtin:textures", "--split", "val", "--objective", "balanced-entropy"),
            *_vectors("signs", "digits", "letters", "terrain"),
        ),
        ("builtin:textures",),
    ),
    Experiment(
        "forget",
        "forgetting",
        (
            *("negate", "builtin:letters", "--control", "builtin:everything", "--shots", "4"),
            *(*_QUICK, "--batch-size", "32", *_vectors("letters")),
        ),
        ("builtin:letters", "builtin:everything"),
    ),
    Experiment(
        "together",
        "adding: one for all",
        (
            *("add", "builtin:digits", "builtin:signs", "builtin:terrain", "--shots", "4"),
            *(*_QUICK, "--batch-size", "32", *_vectors("digits", "signs", "terrain")),
        ),
        ("builtin:digits", "builtin:signs", "builtin:terrain"),
    ),
)


def sections() -> tuple[Section, ...]:
    """All command lines. Each comes after those that it needs; the longest come first."""
    few_shot, test_time, forget, together = EXPERIMENTS
    return (
        Section(
            "Fine-tune the built-in model on road signs for a few seconds: what that changes is a "
            "task vector. With the vector of letters, which comes with the model, forget letters",
            (_tuning(), *_learning(forget), _extraction()),
        ),
        Section(
            "Learn how much of each block of each vector to add: from a few images, from images "
            "without labels, for several tasks; beside the best single scale",
            tuple(
                line
                for experiment in (together, few_shot, test_time)
                for line in _learning(experiment)
            ),
        ),
        Section(
            "Merge: what was learned becomes a plain model. Evaluate it beside the base, on test "
            "images",
            tuple(
                line
                for experiment in reversed(EXPERIMENTS)
                for line in (*_merging(experiment), _evaluation(experiment))
            ),
        ),
    )


def _line(text: str, run: str) -> CommandLine:
    return CommandLine((*text.split(), "--model", "builtin:tiny", "-o", run), run)


def _tuning() -> CommandLine:
    return _line(f"finetune builtin:{_TUNED} {_TUNING}", _TUNED)


def _extraction() -> CommandLine:
    file = f"{_TUNED}.safetensors"
    names = (f"{_TUNED}/model", "--name", _TUNED)
    return CommandLine(("extract", "builtin:tiny", *names, "-o", file), file)


def _learning(experiment: Experiment) -> Iterator[CommandLine]:
    uniform, learned = experiment.runs
    text = " ".join(experiment.learn)
    yield _line(text, learned)
    yield _line(f"{text} --method search", uniform)


def _merging(experiment: Experiment) -> Iterator[CommandLine]:
    for run in experiment.runs:
        yield CommandLine(("merge", f"{run}/recipe.yaml", "-o", _model(run)), _model(run))


def _evaluation(experiment: Experiment) -> CommandLine:
    models = ("builtin:tiny", *map(_model, experiment.runs))
    return CommandLine(
        ("eval", *models, "--data", *experiment.tested, "--json"), kept=scores_file(experiment)
    )


def _model(run: str) -> str:
    return f"{run}_model"


def scores_file(experiment: Experiment) -> str:
    """The file that holds the scores of an experiment."""
    return f"{experiment.name}.json"


def drawing(path: str) -> Section:
    """The command that draws the coefficients of the first experiment."""
    line = CommandLine(("inspect", EXPERIMENTS[0].name, "--plot", path), path)
    return Section("Draw the coefficients that recognise house numbers", (line,))


def identity() -> str:
    """A hash that changes with the version and with any command line."""
    text = "\n".join(str(line) for section in sections() for line in section.lines)
    return hashlib.sha256(f"{__version__} in percent\n{text}".encode()).hexdigest()[:16]


# The table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoRow:
    """One row of the final table: accuracy on test images, in percent."""

    what: str
    task: str
    zero_shot: float
    uniform: float
    learned: float


def table(scores: Mapping[str, Mapping[str, Any]]) -> list[DemoRow]:
    """The rows of all experiments, from the JSON that `atlas eval` printed for each."""
    return [
        row
        for experiment in EXPERIMENTS
        for row in _rows(experiment, scores[experiment.name]["results"])
    ]


def _rows(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> Iterator[DemoRow]:
    found = {(one["model"], one["data"]): one["top1"] for one in results}
    models = ("builtin:tiny", *map(_model, experiment.runs))
    rows = [[found[model, data] for model in models] for data in experiment.tested]
    if experiment.name == "forget":
        for task, what, row in zip(experiment.tested, ("to forget", "to keep"), rows, strict=True):
            yield DemoRow(f"{experiment.title}: {what}", task, *(round(value, 2) for value in row))
        return
    means = [round(sum(column) / len(column), 2) for column in zip(*rows, strict=True)]
    names = ", ".join(experiment.tested) if len(rows) == 1 else f"mean of {len(rows)} tasks"
    yield DemoRow(experiment.title, names, *means)
