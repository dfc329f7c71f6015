"""Charts of learned coefficients, of learning and of classes, drawn by Altair and Vega."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError
from atlas_cli.io.files import whole_file

if TYPE_CHECKING:
    from atlas_cli.reports.grids import Grid
    from atlas_cli.reports.runs import Classes, Record

_CELL, _ROW = 18, 20  # pixels
_POINTS = 1000  # of a curve; of a longer one, every so many steps
_PANELS = 4  # beside each other in a picture
_SCHEME = "purpleorange"
_BEFORE, _AFTER = "#8b929c", "#3987e5"
_CONFIG: dict[str, Any] = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {"anchor": "start", "fontSize": 12, "fontWeight": "normal", "offset": 6},
    "axis": {
        "labelFontSize": 11,
        "labelLimit": 220,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "legend": {"labelFontSize": 11, "titleFontSize": 11, "orient": "top", "offset": 4},
    "range": {"category": {"scheme": "tableau10"}},
}


@dataclass(frozen=True)
class Words:
    """What the rows, the columns and the numbers of a heat map are."""

    row: str = "vector"
    column: str = "block"
    value: str = "coefficient"


def check_charts(what: str) -> None:
    """Raise unless the libraries that draw charts are there."""
    for module in ("altair", "vl_convert"):
        if importlib.util.find_spec(module) is None:
            raise AtlasError(f"{what} needs {module}; run: pip install 'atlas-cli[plot]'")


# Charts ---------------------------------------------------------------------------------------


def heat_maps(grids: Sequence[Grid], words: Words) -> list[Any]:
    """The grids on one scale, which comes first and has zero in the middle."""
    found = [abs(cell) for grid in grids for row in grid.cells for cell in row if cell is not None]
    limit = max(found, default=0.0) or 1.0
    return [_scale(limit, words), *(_heat(grid, limit, words) for grid in grids)]


def _heat(grid: Grid, limit: float, words: Words) -> Any:
    import altair as alt

    names = grid.names or grid.columns
    cells = [
        {"row": row, "column": column, "name": name, "value": value}
        for row, values in zip(grid.rows, grid.cells, strict=True)
        for column, name, value in zip(grid.columns, names, values, strict=True)
        if value is not None
    ]
    angle = -90 if max(map(len, grid.columns)) > 3 else 0
    axis = alt.Axis(ticks=False, domain=False, title=None)
    below = alt.Axis(ticks=False, domain=False, title=None, labelAngle=angle)
    return (
        alt.Chart(alt.Data(values=cells), title=grid.title)
        .mark_rect()
        .encode(
            alt.X("column:N", sort=list(grid.columns), axis=below),
            alt.Y("row:N", sort=list(grid.rows), axis=axis),
            alt.Color("value:Q", scale=_colours(limit), legend=None),
            tooltip=[
                alt.Tooltip("row:N", title=words.row),
                alt.Tooltip("name:N", title=words.column),
                alt.Tooltip("value:Q", title=words.value, format=".4f"),
            ],
        )
        .properties(width=alt.Step(_CELL), height=alt.Step(_CELL))
    )


def _colours(limit: float) -> Any:
    import altair as alt

    return alt.Scale(scheme=_SCHEME, domain=[-limit, limit])


def _scale(limit: float, words: Words) -> Any:
    """The colours of a heat map from its lowest to its highest number."""
    import altair as alt

    steps = 40
    edges = [limit * (2 * step / steps - 1) for step in range(steps + 1)]
    cells = [{"from": a, "to": b, "value": (a + b) / 2} for a, b in pairwise(edges)]
    axis = alt.Axis(title=None, values=[-limit, 0, limit], format=".3~g", grid=False, domain=False)
    return (
        alt.Chart(alt.Data(values=cells), title=words.value)
        .mark_rect()
        .encode(
            alt.X("from:Q", scale=alt.Scale(domain=[-limit, limit], nice=False), axis=axis),
            alt.X2("to:Q"),
            alt.Color("value:Q", scale=_colours(limit), legend=None),
        )
        .properties(width=160, height=12)
    )


def curves(record: Record) -> list[Any]:
    """The loss and what was told of the images of every step, by stage; not what never moves."""
    known = [key for key in ("loss", "accuracy", "agreement") if _moves(record, key)]
    return [_curve(record, key) for key in known]


def _moves(record: Record, key: str) -> bool:
    return len({row[key] for row in record.metrics if key in row}) > 1


def _curve(record: Record, key: str) -> Any:
    import altair as alt

    rows = [row for row in record.metrics if isinstance(row.get(key), int | float)]
    every = -(-len(rows) // _POINTS)
    points = [
        {"step": row["number"], "stage": str(row.get("stage", "")), "value": row[key]}
        for row in rows[::every]
    ]
    several = len({point["stage"] for point in points}) > 1
    colour = alt.Color("stage:N", title="stage") if several else alt.value(_AFTER)
    chart = alt.Chart(alt.Data(values=points), title=f"{key} of every step")
    lines = chart.encode(
        alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d")),
        alt.Y("value:Q", title=None, axis=alt.Axis(format=".3~g")),
        color=colour,
    )
    shown = [
        alt.Tooltip("step:Q"),
        alt.Tooltip("stage:N"),
        alt.Tooltip("value:Q", title=key, format=".4f"),
    ]
    dots = lines.mark_circle(size=60, opacity=0).encode(tooltip=shown)
    return (lines.mark_line() + dots).properties(width=360, height=200)


def class_chart(classes: Classes) -> Any:
    """Every class before and after, joined by a line."""
    import altair as alt

    after = classes.after
    measure = "accuracy" if classes.shares else "images"
    form = ".1%" if classes.shares else "d"
    spans = [{"class": name, "from": low, "to": high} for name, low, high in classes.rows]
    dots = [
        {"class": name, "when": when, "value": value}
        for name, *values in classes.rows
        for when, value in zip(("zero-shot", after), values, strict=True)
    ]
    side = alt.Y("class:N", sort=[row[0] for row in classes.rows], title=None)
    scale = alt.Scale(domain=[0, 1]) if classes.shares else alt.Scale(zero=True)
    axis = alt.Axis(format=".0%" if classes.shares else "d", title=measure, tickCount=5)
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
        title=f"{classes.task}: {classes.on}",
    ).properties(width=360, height=_ROW * len(classes.rows))


# Out of charts --------------------------------------------------------------------------------


def to_spec(chart: Any, *, fill: bool = False) -> dict[str, Any]:
    """A chart as Vega-Lite's JSON; as wide as its place on a page if it is to fill it."""
    found: dict[str, Any] = chart.to_dict()
    if fill:
        found |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**found, "config": _CONFIG, "background": None}


def draw_charts(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write one picture, charts in rows below each other: .png or .svg."""
    import altair as alt
    import vl_convert

    parts = [alt.concat(*row, columns=_PANELS) for row in rows if row]
    spec = {**to_spec(alt.vconcat(*parts).resolve_scale(color="independent")), "background": "#fff"}
    if path.suffix.lower() == ".svg":
        drawn = vl_convert.vegalite_to_svg(spec).encode()
    else:
        drawn = vl_convert.vegalite_to_png(spec, scale=2)
    try:
        with whole_file(path) as temporary:
            temporary.write_bytes(drawn)
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem
