"""atlas tta: adapt coefficients to images that nobody labelled."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli import console
from atlas_cli.cli.console import OutputOptions, given_recipe, learning_options, run_learning
from atlas_cli.cli.options import learning_command
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.learning.events import Event
    from atlas_cli.learning.run import RunOptions

Images = Annotated[
    str | None,
    typer.Argument(metavar="IMAGES", help="Images whose labels are not looked at, or a recipe."),
]
Classes = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Class names: a,b,c, a file with one per line, or a well-known dataset.",
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(metavar="LOSS", help="ufm (default), entropy, balanced-entropy, sar or simclr."),
]
Tune = Annotated[
    str | None,
    typer.Option(metavar="WHAT", help="coefficients (default), or layernorm: no vectors needed."),
]
TrustedPerClass = Annotated[
    int | None, typer.Option(metavar="K", help="ufm: images of a class that are trusted.")
]
Power = Annotated[
    float | None,
    typer.Option(help="ufm: exponent of predictions; above 1 sharpens, below 1 flattens."),
]
Threshold = Annotated[
    str | None,
    typer.Option(metavar="START:END", help="ufm: how sure a prediction must be, over the epochs."),
]
Prior = Annotated[
    str | None,
    typer.Option(metavar="SHARES", help="How often classes occur: uniform (default) or 0.9,0.1."),
]
Predictions = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Predictions as JSON lines, one per image.")
]
Online = Annotated[
    bool,
    typer.Option("--online", help="Paths on stdin: predict, print a line, adapt as they come."),
]


@learning_command
def tta(
    images: Images = None,
    classes: Classes = None,
    objective: Objective = None,
    tune: Tune = None,
    trusted_per_class: TrustedPerClass = None,
    power: Power = None,
    threshold: Threshold = None,
    prior: Prior = None,
    predictions: Predictions = None,
    online: Online = False,
    **shared: Any,
) -> None:
    """Adapt coefficients to images without labels, in a folder or as they come.

    Unless --select says last, the epoch is kept that predictions without labels speak for most
    clearly, or zero-shot if they speak for none.

    \b
    Example:
      atlas tta builtin:textures --split val --model builtin:tiny \\
        --vectors builtin:digits builtin:letters --epochs 1 -o adapted
    """
    own = {
        "classes": read_classes(classes) if classes else None,
        "objective": objective,
        "tune": tune,
        "trusted_per_class": trusted_per_class,
        "power": power,
        "threshold": threshold,
        "prior": prior,
    }
    keys, options, output = learning_options(shared, own)
    if online:
        if predictions:
            raise UsageError("--online prints its predictions; --predictions is for a folder")
        _run_online(images, keys, options, output)
    elif images is None:
        raise UsageError("no images given; name a folder, or pipe paths into --online")
    else:
        from atlas_cli.recipes.tta import TtaRecipe

        recipe = given_recipe(TtaRecipe, images, keys)
        from atlas_cli.learning.tta import tta as run

        run_learning(partial(run, recipe, options, predictions=predictions), output)


def read_classes(text: str) -> list[str]:
    """Class names from a file with one per line, or from a,b,c."""
    try:
        found = Path(text).expanduser().read_text("utf-8").splitlines()
    except OSError:  # no such file, or no name that a file could have
        found = text.split(",")
    except UnicodeDecodeError as problem:
        raise UsageError(f"--classes {text}: cannot be read as UTF-8 text") from problem
    return [name.strip() for name in found if name.strip()]


# Images that come one by one ------------------------------------------------------------------


def _run_online(
    images: str | None, keys: Mapping[str, Any], options: RunOptions, output: OutputOptions
) -> None:
    """Predict and adapt until stdin ends or the reader goes away."""
    if images is not None and not images.endswith((".yaml", ".yml")):
        raise UsageError(f"--online takes its images from stdin, not from {images}")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("--online reads paths from stdin, which is no pipe and no file")
    options.check()

    from atlas_cli.recipes.tta import TtaRecipe

    recipe = given_recipe(TtaRecipe, images or "stdin", keys)
    from atlas_cli.learning.tta import tta_online

    result = tta_online(recipe, _paths(), options, on_event=OnlineListener(quiet=output.quiet))
    if not output.quiet:
        learned_from = f"learned from {result.learned_from}"
        console.note(f"{result.ended} after {result.seen} images; {learned_from}")
    if result.interrupted:
        raise typer.Exit(130)


def _paths() -> Iterator[tuple[str, str]]:
    """The lines of stdin as they come, without waiting for more of them, and as JSON has them."""
    for line in sys.stdin.buffer:
        if path := os.fsdecode(line.rstrip(b"\r\n")):
            yield path, os.fsencode(path).decode("utf-8", "replace")


class OnlineListener:
    """Prints a line of JSON for every image, and minds interrupts.

    An interrupt ends the wait for a path at once, and is ignored while the result is written.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._training = ExitStack()
        self._warn = console.warner(quiet=quiet)

    def __call__(self, event: Event) -> None:
        """Print what was predicted."""
        import json

        from atlas_cli.learning.events import (
            Predicted,
            Saving,
            TrainingEnded,
            TrainingStarted,
            Warned,
        )

        match event:
            case Warned(text):
                self._warn(text)
            case TrainingStarted():
                self._training.enter_context(_interrupted_once())
            case Predicted(image, prediction, probability, error):
                row: dict[str, object] = {"image": image, "error": error}
                if error is None:
                    row = {"image": image, "prediction": prediction, "probability": probability}
                console.write(json.dumps(row, ensure_ascii=False) + "\n")
            case Saving():
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # raises one that is pending
            case TrainingEnded():
                self._training.close()


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """Raise KeyboardInterrupt at once and only once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
