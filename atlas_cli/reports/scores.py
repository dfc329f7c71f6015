"""The scores of `atlas eval`: CSV for a pipe, a table for a terminal, JSON, and predictions."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atlas_cli import __version__
from atlas_cli.recipes.text import UNIT

if TYPE_CHECKING:
    from atlas_cli.learning.evaluate import Evaluation, ModelScore
    from atlas_cli.reports.tables import Captioned

SCORE_COLUMNS = (
    *("model", "data", "split", "images", "skipped", "top1", "low", "high", "top5"),
    *("mean_class", "delta", "p_value"),
)


def score_facts(results: Sequence[Evaluation], seed: int, device: str) -> dict[str, Any]:
    """Every score, and where every model comes from; for --json."""
    models = {result.score.model: result.provenance for result in results}
    return {
        "atlas": __version__,
        "seed": seed,
        "device": device,
        "unit": UNIT,
        "models": list(models.values()),
        "results": [dataclasses.asdict(result.score) for result in results],
    }


def score_rows(results: Sequence[Evaluation]) -> list[list[str]]:
    """A row for each model on each dataset; accuracies in percent."""
    return [_row(result.score) for result in results]


def _row(score: ModelScore) -> list[str]:
    return [
        *(score.model, score.data, score.split, str(score.images), str(score.skipped)),
        *(_percent(score.top1), _percent(score.low), _percent(score.high), _percent(score.top5)),
        *(_percent(score.mean_class), _percent(score.delta, sign=True)),
        "" if score.p_value is None else f"{score.p_value:.3g}",
    ]


def score_table(results: Sequence[Evaluation]) -> Captioned:
    """The same rows, shorter, for a terminal."""
    scores = [result.score for result in results]
    return [_cells(score) for score in scores], _caption(scores)


def _cells(score: ModelScore) -> dict[str, str]:
    return {
        "model": score.model,
        "data": score.data.removeprefix("builtin:"),
        "images": str(score.images),
        "skipped": str(score.skipped or ""),
        "top-1": _percent(score.top1),
        "95 %": f"{score.low:.1f}-{score.high:.1f}",
        "top-5": _percent(score.top5),
        "by class": _percent(score.mean_class),
        "vs first": _percent(score.delta, sign=True),
        "p": "" if score.p_value is None else f"{score.p_value:.2g}",
    }


def _caption(scores: Sequence[ModelScore]) -> str:
    """The splits, and the mean top-1 of each model if there are several datasets."""
    models = dict.fromkeys(score.model for score in scores)
    means = {
        model: statistics.mean(score.top1 for score in scores if score.model == model)
        for model in models
    }
    caption = f"split: {', '.join(dict.fromkeys(score.split for score in scores))}"
    if len(scores) > len(models):
        listed = ", ".join(f"{model} {mean:.2f}" for model, mean in means.items())
        caption += f"; mean top-1: {listed}"
    return caption


def _percent(value: float | None, *, sign: bool = False) -> str:
    """Percent with two decimals; nothing for None."""
    return "" if value is None else f"{value:+.2f}" if sign else f"{value:.2f}"


def prediction_lines(
    results: Sequence[Evaluation], classes: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """One JSON object per line and image. `classes` are the names of each dataset's classes."""
    for result in results:
        names = classes[result.score.data]
        for prediction in result.predictions:
            row = {
                "model": result.score.model,
                "data": result.score.data,
                "image": prediction.key,
                "label": names[prediction.label],
                "prediction": names[prediction.ranked[0]],
                "correct": prediction.correct,
                "probability": round(prediction.probability, 4),
                "top5": [names[index] for index in prediction.ranked],
            }
            yield json.dumps(row, ensure_ascii=False) + "\n"
