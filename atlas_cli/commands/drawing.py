"""What `--plot` of `atlas inspect` draws: task vectors, or a run and its coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli.charts import Words, check_charts, class_chart, curves, draw_charts, heat_maps
from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.files import write_text
from atlas_cli.grids import coefficient_grids, cosine_grid, norm_grids
from atlas_cli.plots import check_matplotlib, draw

if TYPE_CHECKING:
    from atlas_cli.compare import Comparison
    from atlas_cli.describe import VectorFacts
    from atlas_cli.records import Record


def check_drawing(path: Path) -> None:
    """Raise unless task vectors can be drawn in the format of a file."""
    if _is_page(path):
        check_charts("--plot")
    else:
        check_matplotlib()


def draw_vectors(path: Path, vectors: Sequence[VectorFacts], comparison: Comparison | None) -> None:
    """The norms of task vectors and, of several, the cosines."""
    if not (norms := norm_grids(vectors)):
        raise AtlasError("--plot: no block has a norm relative to the base")
    cosines = cosine_grid(comparison) if comparison else None
    if not _is_page(path):
        draw(path, norms, cosines)
        return
    from atlas_cli.pages.page import page
    from atlas_cli.pages.sections import heat_map

    parts = [heat_map(norms, Words("kind", "layer", "norm in %"))]
    if cosines:
        parts.append(heat_map([cosines], Words("vector", "other", "cosine")))
    write_text(path, page("Task vectors", *parts))


def draw_record(path: Path, record: Record) -> None:
    """The coefficients, and of a whole run its learning curves and its classes."""
    if path.suffix.lower() == ".pdf":  # Vega's would be other bytes each time
        raise UsageError(f"--plot {path}: coefficients are drawn as .png, .svg or .html")
    check_charts("--plot")
    if not record.table and not record.metrics:
        raise AtlasError(f"{record.name}: has nothing to draw yet; --resume goes on with it")
    if _is_page(path):
        from atlas_cli.pages.page import page
        from atlas_cli.pages.sections import pictures

        write_text(path, page("Coefficients", pictures(record)))
        return
    heat = heat_maps(coefficient_grids(record.table), Words()) if record.table else []
    draw_charts(path, [heat, curves(record), [class_chart(found) for found in record.classes]])


def _is_page(path: Path) -> bool:
    return path.suffix.lower() == ".html"
