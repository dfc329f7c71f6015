"""atlas extract: write task vectors, fine-tuned minus base."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.options import AllowGlobals, Architecture, AsJson, Force, Quiet
from atlas_cli.errors import UsageError, nearest
from atlas_cli.sources.locate import Source, locate
from atlas_cli.sources.references import check_architecture, parse_reference
from atlas_cli.vectors.targets import VectorTarget, check_inputs, check_targets, choose_targets

if TYPE_CHECKING:
    from atlas_cli.vectors.bases import Base
    from atlas_cli.vectors.extract import Extracted, Options


@dataclass(frozen=True)
class ExtractRequest:
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
    request: ExtractRequest,
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

    from atlas_cli.core.storage import Form
    from atlas_cli.vectors.bases import open_base  # torch is slow: only with good inputs
    from atlas_cli.vectors.differences import Choice
    from atlas_cli.vectors.extract import Options

    choice = Choice(request.scope, tuple(request.ignore), tuple(allow))
    opened = open_base(sources[0], request.scope, choice.allow, arch)
    total = len(targets) * len(opened.blocks)
    with console.progress("extracting", total, quiet=quiet) as advance:
        options = Options(
            choice,
            Form(request.dtype, request.rank, request.energy),
            request.scale,
            console.warn,
            advance,
        )
        results = []
        for result in _run(targets, opened, sources[1:], options):
            results.append(dataclasses.asdict(result))
            if not quiet:
                console.note(_tell(result))
            if request.path != "-" and not as_json:
                console.emit(result)
    if as_json:
        console.emit({"atlas": __version__, "vectors": results}, as_json=True)


def _check_form(request: ExtractRequest) -> None:
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
    targets: Sequence[VectorTarget], base: Base, sources: Sequence[Source], options: Options
) -> Iterator[Extracted]:
    """Write every vector; to stdout by way of a temporary file, for its header comes first."""
    from atlas_cli.vectors.extract import extract as write
    from atlas_cli.vectors.extract import extract_to

    for target, source in zip(targets, sources, strict=True):
        if target.path is not None:
            with target.folder():
                yield extract_to(target.path, target.name, base, source, options)
            continue
        with tempfile.TemporaryFile(prefix="atlas-") as file:
            made = write(file, target.name, base, source, options)
            file.seek(0)
            console.write_file(file)
        yield made


def _tell(result: Extracted) -> str:
    """A line for people."""
    return (
        f"{result.name}: {result.blocks} blocks, {result.parameters:,} parameters, "
        f"{result.bytes / 1e6:,.1f} MB, |tau|/|theta0| {result.relative_norm:.4f}, relative error "
        f"worst {result.worst_error:.2g} mean {result.mean_error:.2g}, {result.dropped} dropped"
    )


SCOPES = ("visual", "text", "all")
DTYPES = ("fp32", "fp16", "bf16", "int8")


def _one_of(choices: Sequence[str], option: str, value: str) -> str:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(f"{option} {value}: expected {listed}{nearest(value, choices)}")
    return value


BaseModel = Annotated[str, typer.Argument(metavar="BASE", help="The model before fine-tuning.")]
Finetuned = Annotated[
    list[str],
    typer.Argument(metavar="FINETUNED...", help="Models, LoRA adapters, or vectors to rewrite."),
]
Output = Annotated[
    str,
    typer.Option(
        *("--output", "-o"),
        metavar="FILE",
        help="A .safetensors file, a folder for several, or - for stdout.",
    ),
]
Scope = Annotated[
    str,
    typer.Option(
        metavar="SCOPE",
        help="visual, text or all.",
        callback=lambda value: _one_of(SCOPES, "--scope", value),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="fp32 loses nothing; fp16, bf16, or int8 with a scale for each row.",
        callback=lambda value: _one_of(DTYPES, "--dtype", value),
    ),
]
Rank = Annotated[int | None, typer.Option(min=1, help="Keep matrices as factors of this rank.")]
Energy = Annotated[
    float | None, typer.Option(help="Or of the rank that holds this share of the energy, as 0.99.")
]
Scale = Annotated[float, typer.Option(help="Multiply the vector; -1 negates it.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="REGEX", help="Tensors that may be missing or not fit."),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the vector is called; else by the model.")
]


def extract(
    base: BaseModel,
    finetuned: Finetuned,
    path: Output,
    scope: Scope = "visual",
    dtype: Dtype = "fp32",
    rank: Rank = None,
    energy: Energy = None,
    scale: Scale = 1.0,
    ignore: Ignore = None,
    allow_global: AllowGlobals = None,
    arch: Architecture = None,
    name: Name = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the task vector of each fine-tuned model: its weights minus those of the base.

    Example: atlas extract ViT-B-32/openai cars/finetuned.pt -o cars.safetensors --dtype fp16
    """

    run(
        ExtractRequest(
            base, finetuned, path, scope, dtype, rank, energy, scale, ignore or [], name
        ),
        allow_global or [],
        arch,
        force=force,
        as_json=as_json,
        quiet=quiet,
    )
