"""atlas merge: merge models, or add task vectors to a base, by a recipe."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import read_text
from atlas_cli.cli.options import AsJson, Device, Quiet
from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.merging.model_card import Evaluated, read_evaluation
from atlas_cli.recipes.values import parse_bytes
from atlas_cli.sources.locate import COMPANION_FILES, Source, locate
from atlas_cli.sources.references import parse_reference, source_problems

if TYPE_CHECKING:
    from atlas_cli.merging.merge import PreparedMerge
    from atlas_cli.recipes.merge import Merge


_MANY = 8  # threads; beyond, the disk and memory are what is waited for


@dataclass(frozen=True)
class MergeOptions:
    """What concerns this run only and does not change its result."""

    folder: Path | None
    force: bool
    dry_run: bool
    explain: str | None
    memory: str
    threads: int | None
    device: str
    shard: str
    evaluation: Path | None
    push: str | None
    allow_nonfinite: bool
    as_json: bool
    quiet: bool


def show_schema() -> None:
    """Print the JSON Schema of recipes."""
    from atlas_cli.recipes.schema import merge_schema

    console.emit(merge_schema(), as_json=True)


def run(name: str | None, options: MergeOptions) -> None:
    """Check everything, then show the plan or write the model."""
    if name is None:
        raise UsageError("no recipe given; name a file, or - for stdin")
    _check(options)
    from atlas_cli.recipes.merge import read_merge

    merge = read_merge(*read_text(name), source_problems)
    evaluation = _read_evaluation(options.evaluation) if options.evaluation else None
    target = options.folder or Path("merged")
    _check_place(target, options)
    found = _locate(merge)
    _check_inputs(target, found)

    from atlas_cli.merging.execute import Limits
    from atlas_cli.merging.inputs import Located
    from atlas_cli.merging.merge import (  # torch is slow: only with good inputs
        MergeRequest,
        prepare,
        write,
    )
    from atlas_cli.merging.plan import idle_filters
    from atlas_cli.models.clip import choose_device

    located = {reference: Located(*pair) for reference, pair in found.items()}

    threads = options.threads or min(_MANY, os.cpu_count() or 1)
    device = choose_device(options.device)
    limits = Limits(_bytes(options.memory), threads, device, options.allow_nonfinite)
    request = MergeRequest(
        merge, located, target, limits, _bytes(options.shard), options.force, evaluation
    )
    prepared = prepare(request)
    for text in idle_filters(merge, [made.name for made in prepared.plan.outputs]):
        console.warn(f"filter '{text}' is in the name of no tensor")
    if options.dry_run:
        _show_plan(prepared, options)
        return
    with console.progress("merging", prepared.plan.bytes, quiet=options.quiet) as advance:
        merged = write(prepared, advance)
    if options.push:
        _push(target, options)
    told = {"atlas": __version__, **dataclasses.asdict(merged)}
    console.emit(told if options.as_json else merged, as_json=options.as_json)


def _check(options: MergeOptions) -> None:
    if options.folder is None and not options.dry_run:
        raise UsageError("no folder given; name it with -o DIR, or ask for --dry-run")
    if options.explain is not None and not options.dry_run:
        raise UsageError("--explain shows the plan; give --dry-run with it")
    for option, text in (("--memory", options.memory), ("--max-shard-size", options.shard)):
        if not parse_bytes(text):
            raise UsageError(f"{option} {text}: expected a size such as 512MB or 2GiB")
    if options.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push):
        raise UsageError(f"--push {options.push}: expected OWNER/NAME")
    try:
        re.compile(options.explain or "")
    except re.error as problem:
        raise UsageError(f"--explain: not a regular expression: {problem}") from None


def _read_evaluation(path: Path) -> Evaluated:
    try:
        return read_evaluation(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--evaluation {path}: cannot be read as UTF-8 text") from problem


def _bytes(text: str) -> int:
    return parse_bytes(text) or 0


def _check_place(target: Path, options: MergeOptions) -> None:
    """What is wrong with the target is said before models are looked for."""
    if options.dry_run:
        return
    if not target.absolute().parent.is_dir():
        raise AtlasError(f"{target.parent}: no such folder")
    if target.is_dir() and any(target.iterdir()) and not options.force:
        raise AtlasError(f"{target}: exists already; use --force to replace it")


def _locate(merge: Merge) -> dict[str, tuple[Source, Source | None]]:
    """The files behind every reference, downloaded if need be: a model, and its adapter."""
    from atlas_cli.recipes.merge import split_adapter

    found = {}
    for reference in merge.references:
        model, adapter = split_adapter(reference)
        beside = COMPANION_FILES if reference == merge.layout else ()
        other = locate(parse_reference(adapter)) if adapter else None
        found[reference] = (locate(parse_reference(model), beside), other)
    return found


def _check_inputs(target: Path, found: Mapping[str, tuple[Source, Source | None]]) -> None:
    """Raise if the model would be written over what it is made of."""
    for reference, (source, _) in found.items():
        if target.resolve() in [path.resolve().parent for path in source.weights]:
            raise UsageError(f"{target}: is the folder of {reference}; write to another one")


# The plan -------------------------------------------------------------------------------------


def _show_plan(prepared: PreparedMerge, options: MergeOptions) -> None:
    found = _plan(prepared, options)
    if options.as_json:
        console.emit(found, as_json=True)
        return
    lines = [
        f"method   {found['method']}",
        f"tensors  {found['tensors']} ({found['merged']} merged, {found['copied']} copied)",
        f"read     {found['bytes_read'] / 1e6:,.1f} MB",
        f"written  {found['bytes_written'] / 1e6:,.1f} MB in {len(found['files'])} file(s)",
        f"memory   {found['peak_memory'] / 1e6:,.1f} MB at most, {found['threads']} threads",
        f"beside   {', '.join(found['beside']) or 'nothing'}",
    ]
    for one in found["explained"]:
        values = {key: one[key] for key in ("parameters", "models")}
        lines.append(f"{one['tensor']}: {json.dumps(values)}")
    console.write("".join(f"{line}\n" for line in lines))


def _plan(prepared: PreparedMerge, options: MergeOptions) -> dict[str, Any]:
    from atlas_cli.merging.execute import peak_memory
    from atlas_cli.merging.plan import explain

    plan, merge = prepared.plan, prepared.request.merge
    merged = sum(made.merged for made in plan.outputs)
    return {
        "atlas": __version__,
        "method": merge.method,
        "tensors": len(plan.outputs),
        "merged": merged,
        "copied": len(plan.outputs) - merged,
        "bytes_read": prepared.read,
        "bytes_written": plan.bytes,
        "peak_memory": peak_memory(prepared.peak, prepared.request.limits),
        "threads": prepared.request.limits.threads,
        "beside": prepared.copied,
        "files": [{"file": shard.file, "bytes": shard.bytes} for shard in plan.shards],
        "explained": explain(merge, prepared.resolved, options.explain) if options.explain else [],
        "outputs": [
            {
                "tensor": made.name,
                "shape": list(made.shape),
                "dtype": str(made.dtype).removeprefix("torch."),
                "file": made.file,
                "offset": made.start,
                "bytes": made.bytes,
                "merged": made.merged,
            }
            for made in plan.outputs
        ],
    }


def _push(target: Path, options: MergeOptions) -> None:
    from atlas_cli.sources.hub import push_folder

    assert options.push is not None
    address = push_folder(target, options.push)
    if not options.quiet:
        console.note(f"pushed to {address}")


RecipeFile = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="YAML recipe, or - for stdin.")
]
Folder = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder of the model.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a folder that atlas merge has written.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Explain = Annotated[
    str | None,
    typer.Option(metavar="REGEX", help="With --dry-run: parameters of the tensors named so."),
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory to use, whatever the size of the model.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; default all cores, up to 8.")]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Begin another file beyond it.")]
Schema = Annotated[
    bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
]
Push = Annotated[
    str | None, typer.Option(metavar="OWNER/NAME", help="Upload the model to the Hub, too.")
]
EvaluationFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What atlas eval --json found, for the card.")
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Merge NaN and Inf instead of stopping.")
]


def merge(
    recipe: RecipeFile = None,
    output: Folder = None,
    force: Force = False,
    dry_run: DryRun = False,
    explain: Explain = None,
    memory: Memory = "512MB",
    threads: Threads = None,
    device: Device = "cpu",
    max_shard_size: ShardSize = "5GB",
    schema: Schema = False,
    evaluation: EvaluationFile = None,
    push: Push = None,
    allow_nonfinite: AllowNonfinite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Merge models by a recipe and print the path of the result.

    Example: atlas merge recipes/merge/linear.yaml -o merged
    """

    if schema:
        show_schema()
        return
    options = MergeOptions(
        *(output, force, dry_run, explain, memory, threads, device, max_shard_size),
        *(evaluation, push, allow_nonfinite, as_json, quiet),
    )
    run(recipe, options)
