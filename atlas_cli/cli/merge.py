"""atlas merge: merge models, or add task vectors to a base, by a recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli import __version__
from atlas_cli.cli import console
from atlas_cli.cli.console import progress, read_text
from atlas_cli.cli.options import AsJson, Device, KeepDownloads, Quiet
from atlas_cli.cli.push import EvaluationFile, upload
from atlas_cli.errors import UsageError, pattern_problem

if TYPE_CHECKING:
    from atlas_cli.merging.merge import Merged, MergeEvent, MergeOptions, MergePlan
    from atlas_cli.merging.model_card import Evaluated
    from atlas_cli.merging.slices import MergeSlice
    from atlas_cli.recipes.merge import Merge

    Shown = MergePlan | Merged | MergeSlice

RecipeFile = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="YAML recipe, the folder of a run, or - for stdin."),
]
Result = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="Folder of the model, instead of -o DIR.")
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
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Merge NaN and Inf instead of stopping.")
]
CopyTokenizer = Annotated[
    bool, typer.Option("--copy-tokenizer/--no-copy-tokenizer", help="Copy that of the base.")
]
WriteCard = Annotated[
    bool, typer.Option("--write-model-card/--no-write-model-card", help="Write README.md.")
]
Seed = Annotated[int | None, typer.Option(min=0, metavar="N", help="Instead of the recipe's seed.")]
KeepIntermediate = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep the results of merges that others need."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse recipes with parameters that have no effect.")
]
Slice = Annotated[
    str | None,
    typer.Option("--slice", metavar="I/N", help="Write the I-th of N parts only, in place."),
]
Finish = Annotated[
    bool, typer.Option("--finish", help="Make the model of slices that were written.")
]
MaxRank = Annotated[
    int | None, typer.Option(min=1, help="Of LoRA adapters: the best one of this rank, at most.")
]


def merge(
    recipe: RecipeFile = None,
    result: Result = None,
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
    strict: Strict = False,
    max_rank: MaxRank = None,
    keep_downloads: KeepDownloads = False,
    random_seed: Seed = None,
    keep_intermediate: KeepIntermediate = None,
    copy_tokenizer: CopyTokenizer = True,
    write_model_card: WriteCard = True,
    slice_: Slice = None,
    finish: Finish = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Merge models, or add task vectors to a base, by a recipe; print the path of the result.

    The recipe is a YAML file, mergekit's or a learned one, or the folder of a run of fit, negate,
    add or tta. Flags of mergekit are understood, or named and ignored.

    \b
    Example:
      atlas merge run -o merged
    """
    from atlas_cli.merging.merge import MergeOptions

    if schema:
        _show_schema()
        return
    name, target = _named(recipe, result, output, dry_run=dry_run, explain=explain)
    budget, shard = _size("--memory", memory), _size("--max-shard-size", max_shard_size)
    part = _slice(slice_, finish=finish, without={"--dry-run": dry_run, "--push": bool(push)})
    _check(push, explain)
    checked = _changed(_read_recipe(name, strict=strict), max_rank, random_seed)
    shown = _read_evaluation(evaluation) if evaluation else None
    options = MergeOptions(
        *(budget, threads, device, shard, force, shown, allow_nonfinite, keep_downloads),
        *(keep_intermediate, copy_tokenizer, write_model_card),
    )
    if dry_run:
        found: Shown = _plan(checked, target, options, explain, quiet=quiet)
    elif part:
        found = _write_slice(checked, target, options, part, quiet=quiet)
    else:
        found = _write(checked, target, options, push, finish=finish, quiet=quiet)
    _show(found, as_json=as_json)


def _named(
    recipe: str | None,
    result: Path | None,
    output: Path | None,
    *,
    dry_run: bool,
    explain: str | None,
) -> tuple[str, Path]:
    """The recipe and the folder of the result. Raises UsageError if one is not clear."""
    if recipe is None:
        raise UsageError("no recipe given; name a file, or - for stdin")
    if output is not None and result is not None:
        raise UsageError(f"two folders given: {result} and -o {output}")
    output = output or result
    if output is None and not dry_run:
        raise UsageError("no folder given; name it with -o DIR, or ask for --dry-run")
    if explain is not None and not dry_run:
        raise UsageError("--explain shows the plan; give --dry-run with it")
    return recipe, output or Path("merged")


def _size(option: str, text: str) -> int:
    from atlas_cli.recipes.model import parse_bytes

    if found := parse_bytes(text):
        return found
    raise UsageError(f"{option} {text}: expected a size such as 512MB or 2GiB")


def _slice(text: str | None, *, finish: bool, without: dict[str, bool]) -> tuple[int, int] | None:
    """The number of a slice, and how many there are. Raises UsageError for what makes no sense."""
    if finish and without["--dry-run"]:
        raise UsageError("--finish writes a model, and --dry-run writes nothing; give one of them")
    if text is None:
        return None
    others = [name for name, given in {"--finish": finish, **without}.items() if given]
    if others:
        raise UsageError(f"--slice writes a part of a model, without {others[0]}")
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(f"--slice {text}: expected I/N with I from 1 to N, such as 1/4")
    return int(found[1]), int(found[2])


def _check(push: str | None, explain: str | None) -> None:
    if push:
        from atlas_cli.sources.hub import check_repository

        check_repository(push, "--push ")
    if explain and (wrong := pattern_problem(explain)):
        raise UsageError(f"--explain: not a regular expression: {wrong}")


def _read_recipe(name: str, *, strict: bool) -> Merge:
    from atlas_cli.publishing.fetch import HUB, read_published, with_own_files
    from atlas_cli.recipes.merge import read_merge  # pydantic is slow to import
    from atlas_cli.sources.locate import source_problems

    if name.startswith(HUB):
        return read_merge(*read_published(name), source_problems, strict=strict)
    text, where = read_text(_recipe_of(name))
    if Path(name).is_dir():
        text = with_own_files(text, Path(name))
    return read_merge(text, where, source_problems, strict=strict)


def _changed(merge: Merge, max_rank: int | None, seed: int | None) -> Merge:
    """The recipe with what flags say instead of it."""
    from atlas_cli.merging.merge import with_max_rank

    if max_rank is not None:
        merge = with_max_rank(merge, max_rank)
    return merge if seed is None else merge.with_seed(seed)


def _recipe_of(name: str) -> str:
    """The recipe that a folder holds: the one that a run has learned."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    if (learned := folder / "recipe.yaml").is_file():
        return str(learned)
    if (folder / "model").is_dir():
        raise UsageError(f"{name}: holds a fine-tuned model, not coefficients; see atlas extract")
    if (folder / "metrics.jsonl").exists():
        raise UsageError(f"{name}: this run has learned nothing yet; --resume goes on with it")
    raise UsageError(f"{name}: is a folder without a recipe.yaml; name a recipe, or a run")


def _plan(
    merge: Merge, target: Path, options: MergeOptions, explain: str | None, *, quiet: bool
) -> MergePlan:
    from atlas_cli.merging.merge import plan_merge

    listener = _Listener(quiet=quiet)
    return plan_merge(merge, options, output=target, explain=explain, on_event=listener)


def _write_slice(
    merge: Merge, target: Path, options: MergeOptions, part: tuple[int, int], *, quiet: bool
) -> MergeSlice:
    from atlas_cli.merging.slices import merge_slice

    with _Listener(quiet=quiet) as listener:
        return merge_slice(merge, target, *part, options, on_event=listener)


def _write(
    merge: Merge,
    target: Path,
    options: MergeOptions,
    push: str | None,
    *,
    finish: bool,
    quiet: bool,
) -> Merged:
    with _Listener(quiet=quiet) as listener:
        if finish:
            from atlas_cli.merging.slices import finish_merge

            merged = finish_merge(merge, target, options, on_event=listener)
        else:
            from atlas_cli.merging.merge import merge as run

            merged = run(merge, target, options, on_event=listener)
    if push:
        _push(target, push, quiet=quiet)
    return merged


class _Listener(ExitStack):
    """Shows a bar on stderr while a merge writes, and warns of what has no effect."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._warn = console.warner(quiet=quiet)
        self._advance: Callable[[int], None] = lambda count: None

    def __call__(self, event: MergeEvent) -> None:
        from atlas_cli.merging.merge import (
            BytesWritten,
            Doubt,
            FilterUnused,
            MergeStarted,
            RankReduced,
            SettingsUnused,
            VectorNoted,
        )

        match event:
            case FilterUnused(text):
                self._warn(f"filter '{text}' is in the name of no tensor")
            case SettingsUnused(paths):
                self._warn(f"no effect here: {', '.join(paths)}")
            case Doubt(text):
                self._warn(text)
            case VectorNoted(text, warning):
                if warning:
                    self._warn(text)
                elif not self._quiet:
                    console.note(text)
            case MergeStarted(total):
                bar = progress("merging", total, quiet=self._quiet)
                self._advance = self.enter_context(bar)
            case BytesWritten(count):
                self._advance(count)
            case RankReduced(rank, error):
                console.note(f"rank {rank}: relative error {error:.2g} of the exact sum")


def _show(result: Shown, *, as_json: bool) -> None:
    facts = {"atlas": __version__, **dataclasses.asdict(result)}
    console.emit(facts if as_json else result, as_json=as_json)


def _show_schema() -> None:
    from atlas_cli.recipes.schema import merge_schema

    console.emit(merge_schema(), as_json=True)


def _read_evaluation(path: Path) -> Evaluated:
    from atlas_cli.publishing.publication import read_evaluation_file

    return read_evaluation_file(path)


def _push(target: Path, repository: str, *, quiet: bool) -> None:
    from atlas_cli.publishing.publication import prepare

    found = prepare([target], repository)
    address = upload(found, f"atlas push {target} {repository}")
    if not quiet:
        console.note(f"pushed to {address}")
