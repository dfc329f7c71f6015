"""atlas extract: write task vectors, fine-tuned minus base."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import progress
from atlas_cli.cli.options import AllowGlobals, Architecture, AsJson, Force, Quiet
from atlas_cli.cli.push import upload
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    from atlas_cli.vectors.extract import Extracted
    from atlas_cli.vectors.targets import ExtractRequest


def run(request: ExtractRequest, push: str | None, *, as_json: bool, quiet: bool) -> None:
    """Write every vector, show each when it is complete, and publish them if asked to."""

    from atlas_cli.vectors.targets import resolve

    if as_json and request.path == "-":
        raise UsageError("--json and -o - both write to stdout")
    if request.path == "-" and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("-o - writes a binary file: send it to a pipe or a file")
    if push:
        from atlas_cli.sources.hub import check_repository

        check_repository(push, "--push ")
        if request.path == "-":
            raise UsageError("--push publishes files; name one with -o, not -")
    targets, source, finetuned = resolve(request)

    from atlas_cli.vectors.bases import open_base  # torch is slow: only with good inputs
    from atlas_cli.vectors.extract import extract, options_of, write_vector

    base = open_base(source, request.scope, tuple(request.allow), request.arch)
    results = []
    with progress("extracting", len(targets) * len(base.blocks), quiet=quiet) as advance:
        options = options_of(request, console.warner(quiet=quiet), advance)
        if request.path == "-":  # by way of a temporary file, since the header comes first
            import shutil
            import tempfile

            with tempfile.TemporaryFile(prefix="atlas-") as file:
                made = write_vector(file, targets[0].name, base, finetuned[0], options)
                file.seek(0)
                with console.open_stdout() as stdout:
                    shutil.copyfileobj(file, stdout.buffer, 1 << 15)  # half of what a pipe holds
            written = iter([made])
        else:
            written = extract(base, finetuned, targets, options)
        for result in written:
            results.append(dataclasses.asdict(result))
            if not quiet:
                console.note(_in_words(result))
            if request.path != "-" and not as_json:
                console.emit(result)
    if push:
        _push([target.path for target in targets if target.path], push, quiet=quiet)
    if as_json:
        console.emit({"atlas": __version__, "vectors": results}, as_json=True)


def run_adapters(request: ExtractRequest, *, as_json: bool, quiet: bool) -> None:
    """Write every adapter, and show each when it is complete."""

    from atlas_cli.sources.locate import locate, parse_reference
    from atlas_cli.vectors.targets import adapter_targets

    request.check()
    targets = adapter_targets(request)
    base, *finetuned = [
        locate(parse_reference(text)) for text in (request.base, *request.finetuned)
    ]

    from atlas_cli.vectors.adapter import AdapterForm, check_folder, extract_adapter
    from atlas_cli.vectors.differences import Choice

    if len(targets) > 1:
        Path(request.path).mkdir(exist_ok=True)
    for _, folder in targets:
        check_folder(folder, force=request.force)
    lora = request.lora or 0.0
    rank, energy = (None, lora) if lora < 1 else (int(lora), request.energy)
    form = AdapterForm(rank, energy, request.dtype)
    choice = Choice("all", tuple(request.ignore), tuple(request.allow))
    results = []
    for target, source in zip(targets, finetuned, strict=True):
        with progress("extracting", None, quiet=quiet) as advance:
            made = extract_adapter(base, source, form, choice, target, advance, request.arch)
        results.append(dataclasses.asdict(made))
        if made.left_out:
            listed = ", ".join(made.left_out[:3])
            more = f" and {len(made.left_out) - 3} more" if len(made.left_out) > 3 else ""
            console.warner(quiet=quiet)(
                f"{made.name}: peft cannot adapt {listed}{more}; they stay the base's"
            )
        if not quiet:
            console.note(
                f"{made.name}: {made.modules} modules of rank {made.rank} or less, {made.saved} "
                f"saved whole, {made.parameters:,} parameters, {made.bytes / 1e6:,.1f} MB, "
                f"relative error {made.error:.2g}"
            )
        if not as_json:
            console.emit(made)
    if as_json:
        console.emit({"atlas": __version__, "adapters": results}, as_json=True)


def _push(paths: list[Path], repository: str, *, quiet: bool) -> None:
    from atlas_cli.publishing.publication import prepare

    what = paths[0] if len(paths) == 1 else paths[0].parent
    address = upload(prepare(paths, repository), f"atlas push {what} {repository}")
    if not quiet:
        console.note(f"pushed to {address}")


def _in_words(result: Extracted) -> str:
    return (
        f"{result.name}: {result.blocks} blocks, {result.parameters:,} parameters, "
        f"{result.bytes / 1e6:,.1f} MB, |tau|/|theta0| {result.relative_norm:.4f}, relative error "
        f"worst {result.worst_error:.2g} mean {result.mean_error:.2g}, {result.dropped} dropped"
    )


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
    typer.Option(metavar="SCOPE", help="visual, text or all."),
]


def _short_dtype(name: str) -> str:
    from atlas_cli.vectors.targets import plain_dtype

    return plain_dtype(name)


Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="fp32 loses nothing; fp16, bf16, int8, int4, int3, int2, or rtvq for several.",
        callback=_short_dtype,
    ),
]
Rank = Annotated[int | None, typer.Option(min=1, help="Keep matrices as factors of this rank.")]
Energy = Annotated[
    float | None, typer.Option(help="Or of the rank that holds this share of the energy, as 0.99.")
]
Lora = Annotated[
    float | None,
    typer.Option(
        metavar="R", help="Write peft adapters of rank R, or of the share R < 1 of the energy."
    ),
]
Scale = Annotated[float, typer.Option(help="Multiply the vector; -1 negates it.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="REGEX", help="Tensors that may be missing or not fit."),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the vector is called; else by the model.")
]


Push = Annotated[
    str | None, typer.Option(metavar="OWNER/NAME", help="Upload the vectors to the Hub, too.")
]


def extract(
    base: BaseModel,
    finetuned: Finetuned,
    path: Output,
    scope: Scope = "visual",
    dtype: Dtype = "fp32",
    rank: Rank = None,
    energy: Energy = None,
    lora: Lora = None,
    scale: Scale = 1.0,
    ignore: Ignore = None,
    allow_global: AllowGlobals = None,
    arch: Architecture = None,
    name: Name = None,
    force: Force = False,
    push: Push = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the task vector of each fine-tuned model: its weights minus those of the base.

    \b
    Example:
      atlas extract builtin:tiny signs/model -o signs16.safetensors --dtype fp16
    """

    from atlas_cli.vectors.targets import ExtractRequest

    request = ExtractRequest(
        *(base, finetuned, path, scope, dtype, rank, energy, scale),
        *(ignore or [], name, allow_global or [], arch, force, lora),
    )
    if lora is not None:
        if push:
            raise UsageError("--push publishes task vectors; atlas push publishes an adapter")
        run_adapters(request, as_json=as_json, quiet=quiet)
        return
    run(request, push, as_json=as_json, quiet=quiet)
