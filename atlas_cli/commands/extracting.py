"""What `atlas extract` does with its arguments: checks first, then one vector after another."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlas_cli import __version__
from atlas_cli.commands import output
from atlas_cli.commands.targets import Target, check_inputs, check_targets, choose_targets
from atlas_cli.errors import UsageError
from atlas_cli.sources import Source, check_architecture, locate, parse_reference

if TYPE_CHECKING:
    from atlas_cli.bases import Base
    from atlas_cli.extract import Extracted, Options


@dataclass(frozen=True)
class Request:
    """What the user asked for: which models, and the form of their vectors."""

    base: str
    finetuned: list[str]
    path: str
    scope: str
    dtype: str
    rank: int | None
    energy: float | None
    scale: float
    ignore: list[str]
    name: str | None


def run(
    request: Request,
    allow: Sequence[str],
    arch: str | None,
    *,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check everything, then write every vector and tell of it."""
    if as_json and request.path == "-":
        raise UsageError("--json and -o - both write to stdout")
    _check_form(request)
    _check_patterns(request.ignore)
    check_architecture(arch)
    origin = parse_reference(request.base)
    references = [parse_reference(text) for text in request.finetuned]
    targets = choose_targets(request.path, references, request.name)
    check_targets(targets, force=force)
    sources = [locate(reference) for reference in (origin, *references)]
    check_inputs(targets, sources)

    from atlas_cli.bases import open_base  # torch is slow: only with good inputs
    from atlas_cli.core.storage import Form
    from atlas_cli.differences import Choice
    from atlas_cli.extract import Options

    choice = Choice(request.scope, tuple(request.ignore), tuple(allow))
    opened = open_base(sources[0], request.scope, choice.allow, arch)
    total = len(targets) * len(opened.blocks)
    with output.progress("extracting", total, quiet=quiet) as advance:
        options = Options(
            choice,
            Form(request.dtype, request.rank, request.energy),
            request.scale,
            output.warn,
            advance,
        )
        results = []
        for result in _run(targets, opened, sources[1:], options):
            results.append(dataclasses.asdict(result))
            if not quiet:
                output.note(_tell(result))
            if request.path != "-" and not as_json:
                output.emit(result)
    if as_json:
        output.emit({"atlas": __version__, "vectors": results}, as_json=True)


def _check_form(request: Request) -> None:
    rank, energy, scale = request.rank, request.energy, request.scale
    if rank is not None and energy is not None:
        raise UsageError("--rank and --energy both set the rank; give one of them")
    if energy is not None and not 0 < energy < 1:
        raise UsageError(f"--energy {energy}: expected a share between 0 and 1, such as 0.99")
    if request.dtype == "int8" and (rank or energy):
        raise UsageError("--dtype int8 is for whole matrices; use fp16 with --rank or --energy")
    if scale == 0 or not math.isfinite(scale):
        raise UsageError(f"--scale {scale}: expected a number other than 0")


def _check_patterns(patterns: Sequence[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as problem:
            raise UsageError(f"--ignore {pattern}: not a regular expression: {problem}") from None


def _run(
    targets: Sequence[Target], base: Base, sources: Sequence[Source], options: Options
) -> Iterator[Extracted]:
    """Write every vector; to stdout by way of a temporary file, for its header comes first."""
    from atlas_cli.extract import extract as write
    from atlas_cli.extract import extract_to

    for target, source in zip(targets, sources, strict=True):
        if target.path is not None:
            with target.folder():
                yield extract_to(target.path, target.name, base, source, options)
            continue
        with tempfile.TemporaryFile(prefix="atlas-") as file:
            made = write(file, target.name, base, source, options)
            file.seek(0)
            output.write_file(file)
        yield made


def _tell(result: Extracted) -> str:
    """A line for people."""
    return (
        f"{result.name}: {result.blocks} blocks, {result.parameters:,} parameters, "
        f"{result.bytes / 1e6:,.1f} MB, |tau|/|theta0| {result.relative_norm:.4f}, relative error "
        f"worst {result.worst_error:.2g} mean {result.mean_error:.2g}, {result.dropped} dropped"
    )
