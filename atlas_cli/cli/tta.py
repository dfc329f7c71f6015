"""atlas tta: adapt coefficients to images that nobody labelled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atlas_cli.cli.console import percent
from atlas_cli.cli.learning import LearningCommand, RunResult, facts_of, source_of
from atlas_cli.cli.options import RunOptions, given_flags, learning_command
from atlas_cli.datasets.dataset import Dataset, check_templates, content, open_dataset
from atlas_cli.errors import DataError, UsageError
from atlas_cli.io.files import write_text
from atlas_cli.recipes.learning import TtaRecipe

if TYPE_CHECKING:
    import torch

    from atlas_cli.learning.run_folder import RunFolder
    from atlas_cli.learning.selection import Selection
    from atlas_cli.learning.setup import ObjectiveFactory, PreparedRun
    from atlas_cli.recipes.reading import LearnedRecipe


_SHOWN = 20  # classes of a histogram


@dataclass(frozen=True)
class Adapting(LearningCommand):
    """Adapt to the images of one folder. `predictions` is where what they are goes, if anywhere."""

    predictions: Path | None = None
    name = "tta"
    schema = TtaRecipe
    many = False
    measure = "agreement"
    labelled = False

    def open_data(self, recipe: TtaRecipe) -> tuple[tuple[Dataset, ...], tuple[Dataset, ...]]:
        """The images, in an order that no label has a part in."""
        if str(self.predictions) == "-":
            raise UsageError("--predictions -: stdout has the recipe; name a file")
        templates = check_templates(recipe.templates, "templates")
        dataset = open_dataset(
            recipe.data,
            split=recipe.split,
            templates=templates,
            preferred=("test", "val", "train"),
        )
        return (without_labels(dataset, recipe.classes),), ()

    def objective_factory(self) -> ObjectiveFactory:
        """Whatever the recipe's objective is."""
        from atlas_cli.learning.tta import adapt

        return adapt

    def learned(
        self, ready: PreparedRun, selection: Selection, folder: RunFolder | None
    ) -> LearnedRecipe:
        """The recipe that merges what was learned."""
        return learned_recipe(ready, selection.coefficients, folder) or super().learned(
            ready, selection, folder
        )

    def result(self, ready: PreparedRun, selection: Selection, *, brief: bool) -> RunResult:
        """What the images look like to the model before and after, and which rule decided."""
        before, after = selection.before, selection.after
        assert before is not None
        assert after is not None
        found = {
            "zero-shot": ready.objective.predictions(0 * selection.coefficients),
            "adapted": ready.objective.predictions(selection.coefficients),
        }
        if self.predictions:
            write_text(self.predictions, _lines(ready.inputs.datasets[0], found["adapted"]))
        names = ready.inputs.datasets[0].classes
        histograms = {
            name: _histogram(names, rows.argmax(dim=1).tolist()) for name, rows in found.items()
        }
        decided = ready.objective.decision(selection)
        changes = ", ".join(
            f"{key} {old:.3f} -> {after.values[key]:.3f}" for key, old in before.values.items()
        )
        facts = {
            "rule": decided,
            "zero_shot": before.values,
            "adapted": after.values,
            "histogram": histograms,
            **facts_of(ready, selection),
        }
        comment = f"{source_of(ready)} No label was looked at.\n{decided}: {changes}."
        return RunResult(comment, (f"{decided}; {changes}",), facts, _rows(histograms))


def read_classes(text: str) -> list[str]:
    """Class names from a file with one per line, or from a,b,c."""
    try:
        found = Path(text).expanduser().read_text("utf-8").splitlines()
    except OSError:  # no such file, or no name that a file could have
        found = text.split(",")
    except UnicodeDecodeError as problem:
        raise UsageError(f"--classes {text}: cannot be read as UTF-8 text") from problem
    return [name.strip() for name in found if name.strip()]


def without_labels(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """The images, with classes to choose from but nothing that says which they are of.

    Files are put in the order of their contents' hashes: the names of folders tell classes, too.
    """
    names = check_classes(classes or dataset.classes, dataset.name)
    samples = dataset.unlabelled().samples
    if not dataset.keys_identify:
        ranks = {sample.key: sha256(content(dataset, sample)).digest() for sample in samples}
        samples = tuple(sorted(samples, key=lambda sample: (ranks[sample.key], sample.key)))
    return replace(dataset, classes=names, samples=samples)


def check_classes(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Two class names or more, none of them twice."""
    if not names:
        raise UsageError(f"{where}: has no class names; give them with --classes a,b,c")
    if len(names) < 2:
        raise DataError(f"{where}: has one class only; there is nothing to tell apart")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UsageError(f"{where}: class '{twice}' is named twice")
    return tuple(names)


def learned_recipe(
    ready: PreparedRun, coefficients: torch.Tensor, folder: RunFolder | None
) -> LearnedRecipe | None:
    """For tuned LayerNorms: their task vector, written into the folder, with coefficient 1."""
    if ready.inputs.recipe.tune != "layernorm":
        return None
    from atlas_cli.learning.tuned import write_tuned

    if folder is None:
        raise UsageError("--tune layernorm writes a task vector; give a folder with -o DIR")
    return write_tuned(ready, coefficients, folder.folder / "layernorm.safetensors")


# What is said ---------------------------------------------------------------------------------


def _lines(dataset: Dataset, probabilities: torch.Tensor) -> str:
    rows = zip(dataset.samples, probabilities, strict=True)
    return "".join(
        json.dumps(prediction_row(sample.key, dataset.classes, row), ensure_ascii=False) + "\n"
        for sample, row in sorted(rows, key=lambda pair: pair[0].key)
    )


def prediction_row(
    image: str, classes: Sequence[str], probabilities: torch.Tensor
) -> dict[str, object]:
    """What is said of one image."""
    best = int(probabilities.argmax().item())
    probability = round(probabilities[best].item(), 4)
    return {"image": image, "prediction": classes[best], "probability": probability}


def _histogram(names: Sequence[str], predicted: Sequence[int]) -> dict[str, int]:
    counts = [0] * len(names)
    for number in predicted:
        counts[number] += 1
    return dict(zip(names, counts, strict=True))


def _rows(histograms: Mapping[str, Mapping[str, int]]) -> list[dict[str, str]]:
    """The classes that are predicted most often, as shares of all images."""
    before, after = histograms["zero-shot"], histograms["adapted"]
    total = sum(before.values())
    order = sorted(before, key=lambda name: -before[name] - after[name])
    rows = [
        {
            "predicted": name,
            "zero-shot": percent(before[name] / total),
            "adapted": percent(after[name] / total),
        }
        for name in order[:_SHOWN]
    ]
    if rest := order[_SHOWN:]:
        shares = [percent(sum(found[name] for name in rest) / total) for found in (before, after)]
        rows.append(
            {"predicted": f"{len(rest)} others", "zero-shot": shares[0], "adapted": shares[1]}
        )
    return rows


Images = Annotated[
    str | None,
    typer.Argument(metavar="IMAGES", help="Images whose labels are not looked at, or a recipe."),
]
Classes = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Class names: a,b,c or a file with one per line."),
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
    *,
    flags: dict[str, Any],
    options: RunOptions,
) -> None:
    """Adapt coefficients to images without labels, and print the learned recipe.

    --select is guard (default: the best epoch that nothing speaks against, else zero-shot) or last.

    Example: atlas tta photos/ --classes cat,dog --model ViT-B-32/openai --vectors v/*.safetensors
    """
    from atlas_cli.cli.learning import run
    from atlas_cli.cli.tta_online import run_online
    from atlas_cli.errors import UsageError

    own = {
        "classes": read_classes(classes) if classes else None,
        "objective": objective,
        "tune": tune,
        "trusted_per_class": trusted_per_class,
        "power": power,
        "threshold": threshold,
        "prior": prior,
    }
    keys = {**flags, **given_flags(own)}
    if online:
        if predictions:
            raise UsageError("--online prints its predictions; --predictions is for a folder")
        run_online(images, keys, options)
    elif images is None:
        raise UsageError("no images given; name a folder, or pipe paths into --online")
    else:
        run(Adapting(predictions), [images], keys, options)
