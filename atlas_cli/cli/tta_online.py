"""`atlas tta --online`: a line of JSON for every path on stdin, as it comes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.learning import plan_recipe, resolve
from atlas_cli.cli.options import RunOptions
from atlas_cli.cli.tta import Adapting, check_classes, learned_recipe, prediction_row
from atlas_cli.datasets.dataset import DEFAULT_TEMPLATE, Dataset, check_templates
from atlas_cli.errors import ClosedError, DataError, UsageError
from atlas_cli.recipes.learning import TtaRecipe
from atlas_cli.recipes.reading import write_recipe

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.online import OnlineAdapter
    from atlas_cli.learning.run_folder import RunFolder
    from atlas_cli.learning.setup import PreparedRun

_STDIN = "stdin"
_INTERRUPTED = "interrupted"


class Streaming(Adapting):
    """Adapt to images that are named on stdin. There are none yet."""

    def open_data(self, recipe: TtaRecipe) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """No images, but their classes."""
        templates = check_templates(recipe.templates, "templates") or (DEFAULT_TEMPLATE,)
        return (Dataset(_STDIN, "all", check_classes(recipe.classes, _STDIN), templates, ()),), ()


def run_online(images: str | None, keys: Mapping[str, Any], options: RunOptions) -> None:
    """Check everything, then predict and adapt until stdin ends or the reader goes away."""
    if images is not None and not images.endswith((".yaml", ".yml")):
        raise UsageError(f"--online takes its images from stdin, not from {images}")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("--online reads paths from stdin, which is no pipe and no file")
    if options.resume and options.folder is None:
        raise UsageError("--resume goes on with the run in -o DIR; name it")
    command = Streaming()
    recipe = plan_recipe(command, [images or _STDIN], keys)
    if recipe.method == "search":
        raise UsageError("--method search looks at all images at once; it has no --online")
    inputs = resolve(command, recipe, options)

    from atlas_cli.learning.online import OnlineAdapter
    from atlas_cli.learning.run_folder import check_folder, open_run
    from atlas_cli.learning.setup import prepared  # torch is slow: only with good inputs

    if options.folder:
        check_folder(options.folder, resume=options.resume, force=options.force)
    with prepared(
        inputs, lambda setting: (OnlineAdapter(setting, console.warn), []), console.warn
    ) as ready:
        folder = None
        if options.folder:
            folder = open_run(options.folder, ready.config(), resume=options.resume)
            if options.resume and (saved := folder.restore()):
                ready.objective.restore(saved.tensors, saved.facts)
        _follow(ready, folder, quiet=options.quiet)


def _follow(ready: PreparedRun, folder: RunFolder | None, *, quiet: bool) -> None:
    """One line for every path. Whatever ends it, what was learned is kept."""
    stream: OnlineAdapter = ready.objective
    classes = ready.inputs.datasets[0].classes
    ended = "stdin ended"
    state = stream.state()
    with _plain_interrupts():
        try:
            for path in _paths():
                console.write(_line(stream, path, classes) + "\n")
                if stream.adapt() and folder:
                    folder.save(*stream.state())
                state = stream.state()  # of a whole step, wherever an interrupt comes
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that waits is raised here
        except ClosedError:
            ended = "the reader went away"
        except KeyboardInterrupt:
            ended = _INTERRUPTED
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was learned is kept, whoever hurries
        if folder:
            folder.save(*state)
            _finish(ready, folder, *state)
    if not quiet:
        seen, learned_from = state[1]["seen"], state[1]["learned_from"]
        console.note(f"{ended} after {seen} images; learned from {learned_from}")
    if ended == _INTERRUPTED:
        raise typer.Exit(130)


@contextmanager
def _plain_interrupts() -> Iterator[None]:
    """An interrupt ends the wait for a path at once, and is not repeated while state is saved."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _paths() -> Iterator[str]:
    """The lines of stdin as they come, without waiting for more of them."""
    for line in sys.stdin.buffer:
        if path := os.fsdecode(line.rstrip(b"\r\n")):
            yield path


def _line(stream: OnlineAdapter, path: str, classes: tuple[str, ...]) -> str:
    shown = os.fsencode(path).decode("utf-8", "replace")
    try:
        row = prediction_row(shown, classes, stream.predict(path))
    except DataError as problem:
        row = {"image": shown, "error": str(problem)}
    return json.dumps(row, ensure_ascii=False)


def _finish(
    ready: PreparedRun,
    folder: RunFolder,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, object],
) -> None:
    coefficients = tensors["walker.coefficients"]
    recipe = learned_recipe(ready, coefficients, folder)
    if recipe is None:
        file = folder.keep_large(coefficients) if ready.large else None
        recipe = ready.learned(coefficients, file)
    table = recipe.coefficients if isinstance(recipe.coefficients, dict) else None
    comment = f"Learned by atlas {__version__} from {facts['seen']} images on stdin."
    folder.finish(write_recipe(recipe, comment), table)
