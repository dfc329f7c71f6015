"""Charts of coefficients, learning curves, classes and task vectors, as Altair objects."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError

if TYPE_CHECKING:
    from atlas_cli.reports.grids import Grid
    from atlas_cli.reports.runs import ClassScores, Run

_CELL, _LABELLED_CELL, _ROW = 18, 30, 20  # pixels
_BAR = (60, 360)  # pixels: the shortest and the longest colour bar
_POINTS = 1000  # of a curve; of a longer one, every so many steps
# The curves of a run: their titles, and where the axis begins if it ends at 100.
_MEASURES: dict[str, tuple[str, int | None]] = {
    "loss": ("loss of every step", None),
    "top1_percent": ("training top-1 of every step, in percent", 0),
    "val_top1_percent": ("validation top-1, in percent", 0),
    "agreement_percent": ("agreement of every step, in percent", 0),
}
_DIVERGING, _SEQUENTIAL = "purpleorange", "cividis"
_BEFORE, _AFTER, _MISSING = "#8b929c", "#3987e5", "#ededed"
CONFIG: dict[str, Any] = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {"anchor": "start", "fontSize": 12, "fontWeight": "normal", "offset": 6},
    "axis": {
        "labelFontSize": 11,
        "labelLimit": 220,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "legend": {"labelFontSize": 11, "titleFontSize": 11, "orient": "bottom", "offset": 4},
    "range": {"category": {"scheme": "tableau10"}},
}
_DESCRIPTORS = 16  # vl-convert takes up to 12; where there are fewer, it panics all over stderr


def renderer() -> Any:
    """The module vl_convert. Raises AtlasError if too few files can be opened for it."""
    try:
        with ExitStack() as opened:
            for _ in range(_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    except OSError as problem:
        raise AtlasError(f"charts cannot be drawn: {problem.strerror}") from problem
    return importlib.import_module("vl_convert")


def to_spec(chart: Any, *, fill: bool = False) -> dict[str, Any]:
    """A chart as Vega-Lite's JSON; with `fill`, as wide as its container on a page."""
    found: dict[str, Any] = chart.to_dict()
    if fill:
        found |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**found, "config": CONFIG, "background": None}


# Heat maps of coefficients --------------------------------------------------------------------


@dataclass(frozen=True)
class Titles:
    """What the rows, the columns and the numbers of a heat map are called."""

    row: str = "vector"
    column: str = "block"
    value: str = "coefficient"


def heat_maps(grids: Sequence[Grid], titles: Titles) -> list[Any]:
    """A colour bar with zero in the middle, then a heat map for every grid, all on that scale."""
    found = [abs(cell) for grid in grids for row in grid.cells for cell in row if cell is not None]
    limit = max(found, default=0.0) or 1.0
    return [_colour_bar(limit, titles), *(_heat_map(grid, limit, titles) for grid in grids)]


def _heat_map(grid: Grid, limit: float, titles: Titles) -> Any:
    import altair as alt

    names = grid.names or grid.columns
    cells = [
        {"row": row, "column": column, "name": name, "value": value}
        for row, values in zip(grid.rows, grid.cells, strict=True)
        for column, name, value in zip(grid.columns, names, values, strict=True)
        if value is not None
    ]
    axis = alt.Axis(ticks=False, domain=False, title=None)
    below = alt.Axis(ticks=False, domain=False, title=None, labelAngle=_angle(grid))
    return (
        alt.Chart(alt.Data(values=cells), title=grid.title)
        .mark_rect()
        .encode(
            alt.X("column:N", sort=list(grid.columns), axis=below),
            alt.Y("row:N", sort=list(grid.rows), axis=axis),
            alt.Color("value:Q", scale=_diverging(limit), legend=None),
            tooltip=[
                alt.Tooltip("row:N", title=titles.row),
                alt.Tooltip("name:N", title=titles.column),
                alt.Tooltip("value:Q", title=titles.value, format=".4f"),
            ],
        )
        .properties(width=alt.Step(_CELL), height=alt.Step(_CELL))
    )


def _angle(grid: Grid) -> int:
    """Long names below the columns are turned upright."""
    return -90 if max(map(len, grid.columns)) > 3 else 0


def _diverging(limit: float) -> Any:
    import altair as alt

    return alt.Scale(scheme=_DIVERGING, domain=[-limit, limit])


def _colour_bar(limit: float, titles: Titles) -> Any:
    import altair as alt

    steps = 40
    edges = [limit * (2 * step / steps - 1) for step in range(steps + 1)]
    cells = [{"from": a, "to": b, "value": (a + b) / 2} for a, b in pairwise(edges)]
    axis = alt.Axis(title=None, values=[-limit, 0, limit], format=".3~g", grid=False, domain=False)
    return (
        alt.Chart(alt.Data(values=cells), title=titles.value)
        .mark_rect()
        .encode(
            alt.X("from:Q", scale=alt.Scale(domain=[-limit, limit], nice=False), axis=axis),
            alt.X2("to:Q"),
            alt.Color("value:Q", scale=_diverging(limit), legend=None),
        )
        .properties(width=160, height=12)
    )


# Heat maps of task vectors --------------------------------------------------------------------


def vector_chart(norms: Sequence[Grid], cosines: Grid | None) -> Any:
    """Heat maps beside each other: the norms of task vectors, and the cosines between them."""
    import altair as alt

    panels = [*_norm_maps(norms), *([_cosine_map(cosines)] if cosines else [])]
    return alt.hconcat(*panels).resolve_scale(color="independent")


def _norm_maps(grids: Sequence[Grid]) -> list[Any]:
    """Norms on one logarithmic scale; the last panel has the colour bar."""
    import altair as alt

    found = [cell for grid in grids for row in grid.cells for cell in row if cell]
    low, high = min(found), max(max(found), 1.01 * min(found))
    middle = math.sqrt(low * high)
    scale = alt.Scale(type="log", domain=[low, high], nice=False, scheme=_SEQUENTIAL)
    charts = []
    for grid in grids:
        legend = _legend(grid, _ticks(low, high)) if grid is grids[-1] else None
        colour = alt.Color("value:Q", scale=scale, legend=legend)
        below = "layer" if any(grid.columns) else None
        charts.append(
            _labelled_map(grid, colour, ".2g", is_dark=lambda value: value < middle, below=below)
        )
    return charts


def _cosine_map(grid: Grid) -> Any:
    """Cosines on a scale as wide as they are."""
    import altair as alt

    found = [abs(cell) for row in grid.cells for cell in row if cell is not None]
    limit = max([0.05, *found])
    colour = alt.Color("value:Q", scale=_diverging(limit), legend=_legend(grid))
    # The purple end of the scale is darker than the orange one.
    return _labelled_map(
        grid, colour, ".2f", is_dark=lambda value: not -0.5 < value / limit < 0.8, below=None
    )


def _labelled_map(
    grid: Grid, colour: Any, form: str, *, is_dark: Callable[[float], bool], below: str | None
) -> Any:
    """A heat map with numbers in its cells, white on dark colours; cells without one are grey."""
    import altair as alt

    cells = [
        {
            "row": row,
            "column": column,
            "value": value,
            "text": _number(value, form),
            "ink": "white" if is_dark(value) else "black",
        }
        for row, values in zip(grid.rows, grid.cells, strict=True)
        for column, value in zip(grid.columns, values, strict=True)
        if value is not None
    ]
    # Domains keep the rows and columns in which every cell is empty.
    across, down = (alt.Scale(domain=list(names)) for names in (grid.columns, grid.rows))
    plain = {"ticks": False, "domain": False, "labelLimit": 400}
    axis = alt.Axis(**plain, title=below, labelAngle=_angle(grid)) if any(grid.columns) else None
    base = alt.Chart(alt.Data(values=cells)).encode(
        alt.X("column:N", scale=across, sort=None, axis=axis),
        alt.Y("row:N", scale=down, sort=None, axis=alt.Axis(**plain, title=None)),
    )
    ink = alt.Color("ink:N", scale=None)
    layers = [
        base.mark_rect().encode(colour),
        base.mark_text(fontSize=10).encode(ink, text="text:N"),
    ]
    return (
        alt.layer(*layers, title=grid.title, view=alt.ViewBackground(fill=_MISSING))
        .properties(width=alt.Step(_LABELLED_CELL), height=alt.Step(_LABELLED_CELL))
        .resolve_scale(color="independent")
    )


def _legend(grid: Grid, ticks: Sequence[float] = ()) -> Any:
    import altair as alt

    length = min(max(_LABELLED_CELL * len(grid.rows), _BAR[0]), _BAR[1])
    bar = {"gradientLength": length, "format": "~g", "offset": 10}
    return alt.Legend(orient="right", title=None, **bar, **({"values": ticks} if ticks else {}))


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between two numbers, or those two if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [tick for power in powers for tick in (10**power, 2 * 10**power, 5 * 10**power)]
    within = [float(f"{tick:.0e}") for tick in found if low <= tick <= high]
    return within if len(within) > 1 else [float(f"{low:.2g}"), float(f"{high:.2g}")]


def _number(value: float, form: str) -> str:
    """A number in a cell: large ones without an exponent, zero without a sign."""
    text = f"{value:.0f}" if abs(value) >= 99.5 else format(value, form)
    return text if float(text) else text.removeprefix("-")


# Learning curves and classes ------------------------------------------------------------------


def curves(run: Run) -> list[Any]:
    """A chart of every measure of the steps that changes while learning; a line for each stage."""
    return [_curve(run, key) for key in _MEASURES if _changes(run, key)]


def _changes(run: Run, key: str) -> bool:
    return len({row[key] for row in run.metrics if key in row}) > 1


def _curve(run: Run, key: str) -> Any:
    import altair as alt

    rows = [row for row in run.metrics if isinstance(row.get(key), int | float)]
    every = -(-len(rows) // _POINTS)
    points = [
        {"step": row["number"], "stage": str(row.get("stage", "")), "value": row[key]}
        for row in rows[::every]
    ]
    several = len({point["stage"] for point in points}) > 1
    colour = alt.Color("stage:N", title="stage") if several else alt.value(_AFTER)
    title, lowest = _MEASURES[key]
    scale = alt.Scale(domain=[0, 100]) if lowest == 0 else alt.Scale()
    chart = alt.Chart(alt.Data(values=points), title=title)
    lines = chart.encode(
        alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d")),
        alt.Y("value:Q", title=None, scale=scale, axis=alt.Axis(format=".3~g")),
        color=colour,
    )
    shown = [
        alt.Tooltip("step:Q"),
        alt.Tooltip("stage:N"),
        alt.Tooltip("value:Q", title=title, format=".4f"),
    ]
    dots = lines.mark_circle(size=60, opacity=0).encode(tooltip=shown)  # to point at
    return (lines.mark_line() + dots).properties(width=360, height=200)


def class_chart(scores: ClassScores) -> Any:
    """Every class before and after, joined by a line."""
    import altair as alt

    after = scores.after
    measure = "top-1 in percent" if scores.is_accuracy else "images"
    form = ".1f" if scores.is_accuracy else "d"
    spans = [{"class": name, "from": low, "to": high} for name, low, high in scores.rows]
    dots = [
        {"class": name, "when": when, "value": value}
        for name, *values in scores.rows
        for when, value in zip(("zero-shot", after), values, strict=True)
    ]
    side = alt.Y("class:N", sort=[row[0] for row in scores.rows], title=None)
    scale = alt.Scale(domain=[0, 100]) if scores.is_accuracy else alt.Scale(zero=True)
    # On top, where it is seen although a chart of many classes is scrolled.
    axis = alt.Axis(format="d", title=measure, tickCount=5, orient="top")
    colours = alt.Scale(domain=["zero-shot", after], range=[_BEFORE, _AFTER])
    lines = alt.Chart(alt.Data(values=spans)).mark_rule(strokeWidth=2, color=_BEFORE)
    sizes = alt.Scale(domain=["zero-shot", after], range=[120, 70])  # both show in one place
    points = alt.Chart(alt.Data(values=dots)).mark_circle(opacity=1)
    return alt.layer(
        lines.encode(alt.X("from:Q", scale=scale, axis=axis), side, alt.X2("to:Q")),
        points.encode(
            alt.X("value:Q", scale=scale, axis=axis),
            side,
            alt.Color("when:O", scale=colours, title=None),
            alt.Size("when:O", scale=sizes, title=None),
            tooltip=[
                alt.Tooltip("class:N"),
                alt.Tooltip("when:N", title="when"),
                alt.Tooltip("value:Q", title=measure, format=form),
            ],
        ),
        title=f"{scores.task}: {scores.on}",
    ).properties(width=360, height=_ROW * len(scores.rows))
