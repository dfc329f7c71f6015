"""Where the vectors of a command go, settled before any work is done."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.sources.locate import Source
from atlas_cli.sources.references import Reference

# File names that say nothing of the task; their folder does.
_PLAIN = re.compile(
    r"(open_clip_)?(pytorch_)?(adapter_)?model|(linear_|nonlinear_)?finetuned|weights|checkpoint"
)


@dataclass(frozen=True)
class VectorTarget:
    """A vector to be made: its name, and its file unless it goes to stdout."""

    name: str
    path: Path | None

    @contextlib.contextmanager
    def folder(self) -> Iterator[None]:
        """With the folder of the file, which goes again if it was made in vain."""
        folder = self.path.parent if self.path else Path()
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                if made:
                    folder.rmdir()
            raise


def choose_targets(
    path: str, references: Sequence[Reference], name: str | None
) -> list[VectorTarget]:
    """One target for each model: a file, files in a folder, or stdout for -."""
    if name and len(references) > 1:
        raise UsageError("--name is for one fine-tuned model")
    names = [name or name_of(reference) for reference in references]
    if path == "-":
        _check_stdout(references)
        return [VectorTarget(names[0], None)]
    if Path(path).suffix != ".safetensors":
        return [VectorTarget(n, Path(path) / f"{_as_file(n)}.safetensors") for n in names]
    if len(references) > 1:
        raise UsageError(f"{path}: is one file for {len(references)} models; give a folder")
    if not Path(path).absolute().parent.is_dir():
        raise AtlasError(f"{Path(path).parent}: no such folder")
    return [VectorTarget(names[0], Path(path))]


def _check_stdout(references: Sequence[Reference]) -> None:
    if len(references) > 1:
        raise UsageError("-o - takes one fine-tuned model")
    if sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("-o - writes a binary file: send it to a pipe or a file")


def check_targets(targets: Sequence[VectorTarget], *, force: bool) -> None:
    """Raise if a file would be lost, or could not be written."""
    paths = [target.path for target in targets if target.path]
    for number, path in enumerate(paths):
        folder = path.absolute().parent
        if path in paths[:number]:
            raise UsageError(f"two vectors would be written to {path}; extract them one by one")
        if path.is_dir() or (folder.exists() and not folder.is_dir()):
            kind = "folder" if path.is_dir() else "file"
            raise AtlasError(f"{path if path.is_dir() else path.parent}: is a {kind}")
        if path.exists() and not force:
            raise AtlasError(f"{path}: exists already; use --force to replace it")
        if not folder.exists() and not folder.parent.is_dir():
            raise AtlasError(f"{path.parent.parent}: no such folder")


def check_inputs(targets: Sequence[VectorTarget], sources: Sequence[Source]) -> None:
    """Raise if a target is one of the files that are read."""
    inputs = {path.resolve() for source in sources for path in source.weights}
    for target in targets:
        if target.path is not None and target.path.resolve() in inputs:
            raise UsageError(f"{target.path}: is one of the inputs; write to another file")


def name_of(reference: Reference) -> str:
    """A name for a vector, from what its model is called."""
    if reference.kind == "open_clip":
        return f"{reference.name}-{reference.tag}"
    if reference.kind != "path":
        return Path(reference.file or reference.name.partition("/")[2] or reference.name).stem
    path = Path(reference.name).resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if _PLAIN.fullmatch(path.stem) and path.parent.name else path.stem


def _as_file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "vector"
