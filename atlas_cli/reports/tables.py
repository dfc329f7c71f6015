"""The numbers of `atlas inspect` as rows of text: CSV for a pipe, tables for a terminal."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atlas_cli import __version__
from atlas_cli.recipes.model import UNIT
from atlas_cli.recipes.text import summarise
from atlas_cli.reports.runs import read_learned

if TYPE_CHECKING:
    from atlas_cli.models.facts import ModelFacts
    from atlas_cli.recipes.learned import LearnedRecipe
    from atlas_cli.recipes.text import Table
    from atlas_cli.reports.runs import Run
    from atlas_cli.vectors.describe import BlockFacts, Comparison, KindFacts, Matrix, VectorFacts

Row = dict[str, str]
Captioned = tuple[list[Row], str]
_RANKS = (1, 4, 16, 64)
TENSOR_COLUMNS = ("model", "tensor", "dtype", "shape", "parameters")
COEFFICIENT_COLUMNS = ("vector", "block", "coefficient")
EPOCH_COLUMNS = ("epoch", "step", "loss", "val_top1")
BLOCK_COLUMNS = (
    *("vector", "block", "layer", "kind", "shape", "storage", "parameters", "norm"),
    *("relative_norm", "error", "effective_rank", *(f"energy_{count}" for count in _RANKS)),
)
RANK_CAPTION = (
    "norm: |tau| / |theta0| in %; rank: effective rank, exp of the entropy of the singular "
    "values; top r: % of |tau|^2 in the first r of them; both of the stored values, and the mean "
    "over the blocks of a kind"
)
VECTOR_CAPTION = "norm: |tau| / |theta0| in %; error: worst relative error of storage in %"


# Cards of one model or vector -----------------------------------------------------------------


def model_card(model: ModelFacts) -> list[Row]:
    """The facts of a model, one per row."""
    return _lines(
        "model",
        model.model,
        {
            "tensors": f"{len(model.tensors)} ({_counts(model.dtypes)})",
            "parameters": f"{model.parameters:,}",
            "size": _size(model.bytes),
            "architecture": _architecture(model.architecture or {}) or "unknown; name it by --arch",
            "activation": model.activation or "",
            "commit": model.commit or "",
            "sha256": _digests(model.sha256),
        },
    )


def vector_card(vector: VectorFacts) -> list[Row]:
    """The facts of a task vector, one per row."""
    worst, mean = _percent(vector.worst_error), _percent(vector.mean_error)
    blocks = f"{len(vector.blocks)} ({_counts(vector.storage)})"
    return _lines(
        "task vector",
        vector.label,
        {
            "base": _source(vector.base),
            "fine-tuned": _source(vector.finetuned),
            "architecture": _architecture(vector.architecture),
            "activation": vector.activation,
            "scope": vector.scope,
            "scale": f"{vector.scale:g}",
            "linearised": "yes" if vector.linearised else "",
            "fingerprint": vector.fingerprint[:12],
            "atlas": vector.atlas,
            "blocks": blocks,
            "dropped": _dropped(vector.dropped),
            "parameters": f"{vector.parameters:,}",
            "size": _size(vector.bytes),
            "error": f"worst {worst} %, mean {mean} %",
            "|tau| / |theta0|": f"{_percent(vector.relative_norm)} %",
        },
    )


def _lines(left: str, right: str, facts: Mapping[str, str]) -> list[Row]:
    return [{left: name, right: value} for name, value in facts.items() if value]


def _percent(value: float | None) -> str:
    """A fraction as percent with three digits; nothing for None."""
    return "" if value is None else f"{100 * value:.3g}"


def _shape(shape: Sequence[int]) -> str:
    """A shape as in 768x512; a scalar is 1."""
    return "x".join(map(str, shape)) or "1"


def _size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def _counts(found: Mapping[str, int]) -> str:
    """One name alone, or each with how often it occurs."""
    return ", ".join(f"{n} {name}" if len(found) > 1 else name for name, n in found.items())


def _dropped(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _source(found: Mapping[str, Any]) -> str:
    """A reference with its commit and the checksums of its files, shortened."""
    words = [str(found.get("reference", "unknown"))]
    if found.get("commit"):
        words.append(f"commit {str(found['commit'])[:12]}")
    if isinstance(found.get("sha256"), dict) and found["sha256"]:
        words.append(f"sha256 {_digests(found['sha256'])}")
    return ", ".join(words)


def _digests(digests: Mapping[str, Any]) -> str:
    return " ".join(str(digest)[:12] for digest in digests.values())


def _architecture(config: Mapping[str, Any]) -> str:
    """An open_clip configuration in a few words."""
    vision = config.get("vision_cfg")
    if not isinstance(vision, dict):
        return ", ".join(f"{k} {v}" for k, v in config.items() if isinstance(v, str | int | float))
    if "timm_model_name" in vision:
        return str(vision["timm_model_name"])
    layers = vision.get("layers", 12)
    depth = "-".join(map(str, layers)) if isinstance(layers, list) else layers
    return (
        f"{'ResNet' if isinstance(layers, list) else 'ViT'}, {depth} layers of width "
        f"{vision.get('width', 768)}, patches of {vision.get('patch_size', 16)}, "
        f"images of {vision.get('image_size', 224)} pixels"
    )


# CSV ------------------------------------------------------------------------------------------


def block_rows(vectors: Sequence[VectorFacts]) -> list[list[str]]:
    """A row for each block of each vector."""
    return [
        [
            *(vector.label, block.name, block.layer, block.kind, _shape(block.shape)),
            *(block.storage, str(block.parameters), _exact(block.norm)),
            *(_exact(block.relative_norm), _exact(block.error), _exact(block.effective_rank)),
            *(_exact(block.energy.get(count)) for count in _RANKS),
        ]
        for vector in vectors
        for block in vector.blocks
    ]


def cosine_rows(comparison: Comparison) -> list[list[str]]:
    """The cosine matrix over all blocks, and then that of each kind."""
    matrices = {"all": comparison.cosine, **comparison.cosine_by_kind}
    return [
        [kind, label, *map(_exact, row)]
        for kind, matrix in matrices.items()
        for label, row in zip(comparison.vectors, matrix, strict=True)
    ]


def tensor_rows(models: Sequence[ModelFacts]) -> list[list[str]]:
    """A row for each tensor of each model."""
    return [
        [model.model, name, tensor.dtype, _shape(tensor.shape), str(tensor.parameters)]
        for model in models
        for name, tensor in model.tensors.items()
    ]


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# Tables --------------------------------------------------------------------------------------


def vector_table(vectors: Sequence[VectorFacts]) -> list[Row]:
    """A row for each of several vectors."""
    return [
        {
            "vector": vector.label,
            "fine-tuned": str(vector.finetuned.get("reference", "")),
            "blocks": str(len(vector.blocks)),
            "parameters": f"{vector.parameters:,}",
            "storage": _counts(vector.storage),
            "size": _size(vector.bytes),
            "error": _percent(vector.worst_error),
            "norm": _percent(vector.relative_norm),
        }
        for vector in vectors
    ]


def kind_table(vector: VectorFacts) -> list[Row]:
    """A row for each kind of block."""
    return [
        {
            "kind": kind.kind,
            "blocks": str(kind.blocks),
            "parameters": f"{kind.parameters:,}",
            **_measures(kind, kind.worst_error),
        }
        for kind in vector.kinds
    ]


def block_table(vector: VectorFacts) -> list[Row]:
    """A row for each block."""
    mixed = len(vector.storage) > 1
    return [
        {
            vector.label: f"{block.layer}.{block.kind}".strip("."),
            "shape": _shape(block.shape),
            "storage": block.storage if mixed else "",
            **_measures(block, block.error),
        }
        for block in vector.blocks
    ]


def _measures(facts: BlockFacts | KindFacts, error: float) -> Row:
    top = {f"top {count}": _percent(facts.energy.get(count)) for count in _RANKS}
    return {
        "norm": _percent(facts.relative_norm),
        "rank": "" if facts.effective_rank is None else f"{facts.effective_rank:.1f}",
        **top,
        "error": _percent(error),
    }


def comparison_tables(comparison: Comparison) -> list[Captioned]:
    """The cosines, those of each kind in short, and the principal components."""
    found = comparison.spectrum, comparison.centred_spectrum
    ratios = " and ".join(f"{spectrum.participation_ratio:.2f}" for spectrum in found)
    return [
        (_cosine_table(comparison), "cosine over all blocks"),
        (_kind_angles(comparison), "cosine of pairs of vectors, by kind of block"),
        (
            _spectrum_table(comparison),
            "principal components of the stacked vectors, and without their mean; "
            f"participation ratio (intrinsic dimension) {ratios} of {len(comparison.vectors)}",
        ),
    ]


def _cosine_table(comparison: Comparison) -> list[Row]:
    return [
        {"": label, **dict(zip(comparison.vectors, map(_cosine, row), strict=True))}
        for label, row in zip(comparison.vectors, comparison.cosine, strict=True)
    ]


def _kind_angles(comparison: Comparison) -> list[Row]:
    rows = []
    for kind, matrix in comparison.cosine_by_kind.items():
        if pairs := _pairs(matrix):
            found = {"mean": statistics.fmean(pairs), "lowest": min(pairs), "highest": max(pairs)}
            found = found if len(comparison.vectors) > 2 else {"cosine": pairs[0]}
            rows.append({"kind": kind, **{name: _cosine(value) for name, value in found.items()}})
    return rows or [{"kind": "none that two vectors share"}]


def _pairs(matrix: Matrix) -> list[float]:
    """The cosines of different vectors, each pair once."""
    below = [cell for i, row in enumerate(matrix) for cell in row[:i]]
    return [cell for cell in below if cell is not None]


def _spectrum_table(comparison: Comparison) -> list[Row]:
    rows, total, centred_total = [], 0.0, 0.0
    whole, centred = comparison.spectrum, comparison.centred_spectrum
    for number, value in enumerate(whole.singular_values):
        total += whole.share[number]
        centred_total += centred.share[number]
        rows.append(
            {
                "component": str(number + 1),
                "s": f"{value:.4g}",
                "% of s^2": _percent(whole.share[number]),
                "sum": _percent(total),
                "centred s": f"{centred.singular_values[number]:.4g}",
                "% of s^2 ": _percent(centred.share[number]),
                "sum ": _percent(centred_total),
            }
        )
    return rows


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


# Coefficients ---------------------------------------------------------------------------------


def coefficient_facts(run: Run) -> dict[str, object]:
    """The learned recipe, or the coefficients if there is none, with a summary; for --json."""
    recipe = _recipe(run)
    found = {"recipe": recipe.model_dump()} if recipe else {"coefficients": run.table}
    summary = [dataclasses.asdict(row) for row in summarise(run.table)]
    return {"atlas": __version__, **found, "summary": summary}


def coefficient_rows(table: Table) -> list[list[str]]:
    """A row for each block of each vector."""
    return [
        [vector, block, repr(value)]
        for vector, row in table.items()
        for block, value in row.items()
    ]


def coefficient_table(run: Run) -> Captioned:
    """A row for each vector."""
    recipe = _recipe(run)
    caption = f"{recipe.base_model}, one coefficient per {recipe.granularity}" if recipe else ""
    rows = [
        {
            "vector": row.vector,
            "coefficients": str(row.blocks),
            "mean": f"{row.mean:.3f}",
            "mean size": f"{row.mean_size:.3f}",
            "lowest": f"{row.lowest:.3f}",
            "highest": f"{row.highest:.3f}",
            "largest at": row.largest.removeprefix("visual."),
        }
        for row in summarise(run.table)
    ]
    return rows, caption


def _recipe(run: Run) -> LearnedRecipe | None:
    return read_learned(run.recipe, run.name) if run.recipe else None


# Fine-tuning ----------------------------------------------------------------------------------


def finetuned_facts(run: Run) -> dict[str, object]:
    """The epochs of a fine-tuned model and how it was made; for --json."""
    epochs = [dict(zip(EPOCH_COLUMNS, row, strict=True)) for row in _epochs(run)]
    facts = {"atlas": __version__, "unit": UNIT, "run": run.name, "epochs": epochs}
    return {**facts, "config": run.config}


def epoch_rows(run: Run) -> list[list[str]]:
    """A row for every epoch: its last step, and the accuracy on images not trained on."""
    return [["" if cell is None else f"{cell:.6g}" for cell in row] for row in _epochs(run)]


def finetuned_table(run: Run) -> Captioned:
    """The same for people."""
    rows = [dict(zip(EPOCH_COLUMNS, row, strict=True)) for row in epoch_rows(run)]
    return rows, f"{', '.join(run.tasks)}: the model is in {run.name}/model"


def _epochs(run: Run) -> list[tuple[Any, ...]]:
    last = {row.get("epoch"): row for row in run.metrics}
    keys = ("epoch", "number", "loss", "val_top1_percent")
    return [tuple(row.get(key) for key in keys) for row in last.values()]
