"""atlas export: a run or a merged model as an image classifier that runs without atlas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atlas_cli.cli import console
from atlas_cli.cli.options import Architecture, AsJson, OutputFolder, Quiet, TextModel
from atlas_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from atlas_cli.core.adapters import Head
    from atlas_cli.models.clip import Clip

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a fit, a learned recipe, or a model.")
]
AsClassifier = Annotated[
    bool, typer.Option("--classifier", help="Fold the head in: images to logits of classes.")
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", metavar="NAME...", help="torch, onnx (extra: onnx); default both."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="Whose classes, if no head was learned."),
]


def export(
    run: Run,
    folder: OutputFolder,
    classifier: AsClassifier = False,
    formats: Formats = None,
    data: Data = None,
    arch: Architecture = None,
    text: TextModel = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the model of a run, with its head, as an image classifier that needs no atlas.

    The folder has classifier.pt2 for torch.export.load, classifier.onnx, labels.json,
    preprocess.json and a README that calls them.

    \b
    Example:
      atlas export run --classifier -o classifier
    """
    from atlas_cli.errors import nearest

    chosen = tuple(dict.fromkeys(formats or ("torch", "onnx")))
    for name in chosen:
        if name not in ("torch", "onnx"):
            hint = nearest(name, ["torch", "onnx"])
            raise UsageError(f"--format {name}: expected torch or onnx{hint}")
    if not classifier:
        raise UsageError("say what to export: --classifier (a model alone is what merge writes)")
    if folder.exists():
        raise UsageError(f"{folder}: exists already; write to another folder")

    warn = console.warner(quiet=quiet)
    clip, head, classes = _opened(run, data, arch, text, warn)

    from atlas_cli.learning.classifier import write_classifier

    result = write_classifier(clip, head, classes, chosen, folder)
    if not quiet and not result.linear:
        console.note("the head is no linear layer: it is part of the classifier as it is")
    console.emit(result, as_json=as_json)


def _opened(
    run: str, data: str | None, arch: str | None, text: str | None, warn: Callable[[str], None]
) -> tuple[Clip, torch.Tensor | Head, tuple[str, ...]]:
    """The model that a run learned or that a folder holds, its head and its classes."""
    from atlas_cli.sources.locate import check_architecture, locate, parse_reference

    check_architecture(arch)
    folder, learned = Path(run), Path(run) / "recipe.yaml"
    if run.endswith((".yaml", ".yml")):
        learned, folder = Path(run), Path(run).parent
    if not learned.is_file():
        from atlas_cli.models.clip import Opening, open_model

        completed = locate(parse_reference(text)) if text else None
        clip = open_model(locate(parse_reference(run)), Opening(arch, completed, "cpu"))
        return clip, *_head_of_model(clip, data, warn)
    from atlas_cli.recipes.merge import read_merge
    from atlas_cli.sources.locate import source_problems

    recipe = read_merge(*console.read_text(str(learned)), source_problems).recipe
    if recipe.merge_method != "atlas" or recipe.base_model is None:
        raise UsageError(f"{run}: is no learned recipe; merge it first, and export the model")

    from atlas_cli.merging.in_memory import compose_model
    from atlas_cli.merging.learned import open_entry
    from atlas_cli.models.clip import Opening

    completed = locate(parse_reference(text)) if text else None
    source = locate(parse_reference(recipe.base_model))
    clip = compose_model(source, None, recipe, Opening(arch, completed, "cpu"))
    if recipe.head:
        saved = open_entry(recipe.head)
        return clip, saved.head, saved.classes
    return clip, *_zero_shot(clip, data or _data_of(folder), warn)


def _head_of_model(
    clip: Clip, data: str | None, warn: Callable[[str], None]
) -> tuple[torch.Tensor | Head, tuple[str, ...]]:
    """The head beside a model, or the zero-shot head of the classes of some data."""
    from atlas_cli.models.clip import HEAD
    from atlas_cli.models.heads import open_head

    path = clip.source.folder / HEAD
    if data is None and path.is_file():
        saved = open_head(path)
        return saved.head, saved.classes
    return _zero_shot(clip, data, warn)


def _zero_shot(
    clip: Clip, data: str | None, warn: Callable[[str], None]
) -> tuple[torch.Tensor, tuple[str, ...]]:
    from atlas_cli.datasets.dataset import open_dataset
    from atlas_cli.models.clip import zero_shot_head

    if data is None:
        raise UsageError(f"{clip.name}: no head was learned; name the classes with --data DATA")
    dataset = open_dataset(data, preferred=("test", "val", "train"))
    head = zero_shot_head(clip, dataset.classes, dataset.templates, warn)
    return head, dataset.classes


def _data_of(folder: Path) -> str | None:
    """What a run learned from, as its configuration says."""
    from atlas_cli.sources.locate import read_object

    path = folder / "config.json"
    recipe = read_object(path).get("recipe") if path.is_file() else None
    data = recipe.get("data") if isinstance(recipe, dict) else None
    return data if isinstance(data, str) else None
