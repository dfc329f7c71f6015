"""The page around its sections: the style, the script and the promise to load nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from atlas_cli import __version__
from atlas_cli.recipes.coefficients import summarise
from atlas_cli.reports import charts, markup
from atlas_cli.reports.grids import Grid, coefficient_grids
from atlas_cli.reports.markup import Cell, Rounded, Share
from atlas_cli.reports.runs import Classes, Record

_OURS = ("learned", "isotropic", "search")  # what a run is for, over what it is compared with
_MANY = 5000  # coefficients beyond which a page only shows the picture of them


def run_section(record: Record) -> str:
    """All of one run: in words, in pictures, and in tables that open on demand."""
    unfinished = "This run has no result yet; --resume goes on with it." if record.config else ""
    said = record.comment or ([unfinished] if unfinished and not record.table else [])
    return markup.section(
        record.name,
        markup.paragraphs(said),
        markup.section("Result", _scores(record), level=3),
        markup.section("Coefficients", *_coefficients(record), level=3),
        markup.section("Learning", *_learning(record), level=3),
        markup.section("Classes", *(_classes(found) for found in record.classes), level=3),
        markup.section("How it was made", *_origin(record), level=3),
    )


def pictures(record: Record) -> str:
    """The pictures of a run without its tables."""
    return markup.section(
        record.name,
        heat_map(coefficient_grids(record.table)) if record.table else "",
        _curves(record),
        markup.row(_class_figure(found) for found in record.classes) if record.classes else "",
    )


def heat_map(grids: Sequence[Grid], words: charts.Words | None = None) -> str:
    """Grids of numbers in colours, on one scale."""
    found = charts.heat_maps(grids, words or charts.Words())
    return markup.row((markup.figure(charts.to_spec(chart)) for chart in found), kind="heat")


# Parts ----------------------------------------------------------------------------------------


def _scores(record: Record) -> str:
    if record.scores is None:
        return ""
    share = record.scores.shares
    rows: list[list[Cell]] = [
        [name, *(None if n is None else Share(n) if share else Rounded(n) for n in row)]
        for name, row in record.scores.rows.items()
    ]
    return markup.table(["", *record.scores.columns], rows, "result")


def _coefficients(record: Record) -> Iterator[str]:
    if not record.table:
        return
    yield heat_map(coefficient_grids(record.table))
    columns = ["vector", "coefficients", "mean", "mean size", "lowest", "highest", "largest at"]
    rows: list[list[Cell]] = [
        [r.vector, r.blocks, *map(Rounded, (r.mean, r.mean_size, r.lowest, r.highest)), r.largest]
        for r in summarise(record.table)
    ]
    yield markup.table(columns, rows, "vectors")
    every: list[list[Cell]] = [
        [vector, block, value]
        for vector, row in record.table.items()
        for block, value in row.items()
    ]
    if len(every) <= _MANY:
        found = markup.table(["vector", "block", "coefficient"], every, "coefficients")
        yield markup.folded(f"All {len(every)} coefficients", found)


def _learning(record: Record) -> Iterator[str]:
    if not record.metrics:
        return
    yield _curves(record)
    columns = list(dict.fromkeys(key for row in record.metrics for key in row))
    rows = ([row.get(column) for column in columns] for row in record.metrics)
    found = markup.table(["step" if c == "number" else c for c in columns], rows, "metrics")
    yield markup.folded(f"All {len(record.metrics)} steps", found)


def _curves(record: Record) -> str:
    specs = [charts.to_spec(chart, fill=True) for chart in charts.curves(record)]
    return markup.row(markup.figure(spec, fill=True) for spec in specs) if specs else ""


def _classes(classes: Classes) -> str:
    rows: list[list[Cell]] = [
        [name, *(Share(n) if classes.shares else int(n) for n in values)]
        for name, *values in classes.rows
    ]
    table = markup.table(["class", "zero-shot", classes.after], rows, f"classes of {classes.task}")
    return markup.row([_class_figure(classes)], kind="tall") + markup.folded(
        f"All {len(rows)} classes of {classes.task}", table
    )


def _class_figure(classes: Classes) -> str:
    return markup.figure(charts.to_spec(charts.class_chart(classes), fill=True), fill=True)


def _origin(record: Record) -> Iterator[str]:
    if record.recipe:
        yield markup.folded("Learned recipe", markup.text(record.recipe))
    if record.config:
        found = markup.table(["key", "value"], _flat(record.config), "configuration")
        yield markup.folded("Configuration", found)


def _flat(found: Any, name: str = "") -> Iterator[list[Cell]]:
    """Nested keys as in recipe.seed, one row each."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _flat(value, f"{name}[{number}]")
    else:
        yield [name, found if isinstance(found, int | float) else str(found or "")]


# Several runs ---------------------------------------------------------------------------------


def comparison(records: Sequence[Record]) -> str:
    """A row for every task of every run, if there are several."""
    if len(records) < 2:
        return ""
    columns = ["run", "task", "zero-shot", "learned", "command"]
    columns += ["vectors", "coefficients", "steps", "last loss"]
    rows = [[*task, *_size(record)] for record in records for task in _tasks(record)]
    return markup.section("Runs", markup.table(columns, rows, "runs"))


def _tasks(record: Record) -> Iterator[list[Cell]]:
    """Every task with its accuracy before and after; without, where nobody knows labels."""
    command = str(record.config.get("command", ""))
    rows = record.scores.rows if record.scores and record.scores.shares else {}
    after = next((rows[name] for name in _OURS if name in rows), ())
    known = zip(rows.get("zero-shot", ()), after, strict=False)
    shares = [[None if n is None else Share(n) for n in pair] for pair in known]
    for name, pair in zip_longest(record.tasks, shares, fillvalue=None):
        yield [record.name, name, *(pair or (None, None)), command]


def _size(record: Record) -> list[Cell]:
    """How much was learned, and for how long."""
    numbers = sum(len(row) for row in record.table.values())
    last = record.metrics[-1].get("loss") if record.metrics else None
    return [len(record.table), numbers, len(record.metrics), last]


_HERE = Path(__file__).parent
# Whatever a name in a run may hold, the browser fetches nothing. Vega compiles its expressions.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'unsafe-inline'; img-src data:"
)


def report(records: Sequence[Record]) -> str:
    """The page of one run or of several."""
    return page("atlas report", comparison(records), *map(run_section, records))


def page(title: str, *sections: str) -> str:
    """A whole page of HTML. The same sections give the same bytes."""
    style = (_HERE / "page.css").read_text("utf-8")
    body = "\n".join(section for section in sections if section)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
<footer>atlas {__version__}</footer>
</main>
<script type="module">
{_script()}
</script>
</body>
</html>
"""


@cache
def _script() -> str:
    """The page's own script with Vega in it; to put them together takes seconds."""
    import vl_convert

    found: str = vl_convert.javascript_bundle((_HERE / "page.js").read_text("utf-8"))
    return found.replace("</script", "<\\/script")
