"""One HTML page for learning runs: it shows everything they hold and loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from atlas_cli import __version__
from atlas_cli.recipes.text import summarise
from atlas_cli.reports import charts, markup
from atlas_cli.reports.grids import Grid, coefficient_grids
from atlas_cli.reports.markup import Cell, percentage, rounded
from atlas_cli.reports.pictures import Thumbnails, differences, image_section
from atlas_cli.reports.runs import TUNED, ClassScores, Evaluations, Run

_HERE = Path(__file__).parent
_METHODS = (
    "learned",
    "isotropic",
    "search",
    TUNED,
)  # of a run; other rows are what it is compared with
_LONG = 50  # classes beyond which their chart is scrolled
_MANY = 5000  # coefficients beyond which a page has no table of them, only the heat maps
# Whatever a name in a run may hold, the browser fetches nothing. Vega compiles its expressions.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'unsafe-inline'; img-src data:"
)


def report_page(runs: Sequence[Run], evaluations: Sequence[Evaluations] = ()) -> str:
    """The page of one run or of several, and of what `atlas eval --json` printed."""
    thumbnails = Thumbnails()
    return page(
        "atlas report",
        _comparison(runs, thumbnails),
        *map(_evaluation_section, evaluations),
        *(_run_section(run, thumbnails) for run in runs),
    )


def _evaluation_section(found: Evaluations) -> str:
    columns = ["model", "data", "split", "images", "top-1", "low", "high", "vs first"]
    rows: list[list[Cell]] = [
        [
            *(row["model"], row["data"], row["split"], row["images"]),
            *(percentage(row[key]) for key in ("top1", "low", "high")),
            None if row.get("delta") is None else percentage(row["delta"]),
        ]
        for row in found.rows
    ]
    return markup.section(found.name, markup.table(columns, rows, f"scores of {found.name}"))


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
    """The page's own script bundled with Vega, which takes seconds."""
    found: str = charts.renderer().javascript_bundle((_HERE / "page.js").read_text("utf-8"))
    return found.replace("</script", "<\\/script")


# One run --------------------------------------------------------------------------------------


def _run_section(run: Run, thumbnails: Thumbnails) -> str:
    """A run in words, in charts, and in tables that open on demand."""
    unfinished = "This run has no result yet; --resume goes on with it."
    said = run.comment or ([] if run.finished else [unfinished])
    return markup.section(
        run.name,
        markup.paragraphs(said),
        markup.section("Result", _scores(run), _tests(run), level=3),
        markup.section("Images", *image_section(run, thumbnails), level=3),
        markup.section("Coefficients", *_coefficients(run), level=3),
        markup.section("Learning", *_learning(run), level=3),
        markup.section("Classes", *(_classes(scores) for scores in run.classes), level=3),
        markup.section("How it was made", *_origin(run), level=3),
    )


def picture_section(run: Run) -> str:
    """The charts of a run without its tables."""
    return markup.section(
        run.name,
        heat_map(coefficient_grids(run.table)) if run.table else "",
        _curves(run),
        markup.row(_class_figure(scores) for scores in run.classes) if run.classes else "",
    )


def heat_map(grids: Sequence[Grid], titles: charts.Titles | None = None) -> str:
    """Grids of numbers as heat maps on one scale."""
    found = charts.heat_maps(grids, titles or charts.Titles())
    return markup.row((markup.figure(charts.to_spec(chart)) for chart in found), kind="heat")


def _scores(run: Run) -> str:
    if run.scores is None:
        return ""
    shown = percentage if run.scores.is_accuracy else rounded
    rows: list[list[Cell]] = [
        [name, *(None if n is None else shown(n) for n in row)]
        for name, row in run.scores.rows.items()
    ]
    on = f"{run.scores.on} images" if run.scores.on else ""
    return markup.table([on, *run.scores.columns], rows, "result")


def _tests(run: Run) -> str:
    if not run.tests:
        return ""
    rows: list[list[Cell]] = [
        [one["task"], one["images"], percentage(one["zero_shot"]), percentage(one["learned"])]
        for one in run.tests
    ]
    return markup.table(["test images of", "images", "zero-shot", "learned"], rows, "test scores")


def _coefficients(run: Run) -> Iterator[str]:
    if not run.table:
        return
    yield heat_map(coefficient_grids(run.table))
    columns = ["vector", "coefficients", "mean", "mean size", "lowest", "highest", "largest at"]
    rows: list[list[Cell]] = [
        [r.vector, r.blocks, *map(rounded, (r.mean, r.mean_size, r.lowest, r.highest)), r.largest]
        for r in summarise(run.table)
    ]
    yield markup.table(columns, rows, "vectors")
    every: list[list[Cell]] = [
        [vector, block, value] for vector, row in run.table.items() for block, value in row.items()
    ]
    if len(every) <= _MANY:
        found = markup.table(["vector", "block", "coefficient"], every, "coefficients")
        yield markup.folded(f"All {len(every)} coefficients", found)


def _learning(run: Run) -> Iterator[str]:
    if not run.metrics:
        return
    yield _curves(run)
    columns = list(dict.fromkeys(key for row in run.metrics for key in row))
    rows = ([row.get(column) for column in columns] for row in run.metrics)
    found = markup.table(["step" if c == "number" else c for c in columns], rows, "metrics")
    yield markup.folded(f"All {len(run.metrics)} steps", found)


def _curves(run: Run) -> str:
    specs = [charts.to_spec(chart, fill=True) for chart in charts.curves(run)]
    return markup.row(markup.figure(spec, fill=True) for spec in specs) if specs else ""


def _classes(scores: ClassScores) -> str:
    rows: list[list[Cell]] = [
        [name, *(percentage(n) if scores.is_accuracy else int(n) for n in values)]
        for name, *values in scores.rows
    ]
    table = markup.table(["class", "zero-shot", scores.after], rows, f"classes of {scores.task}")
    kind = "tall long" if len(rows) > _LONG else "tall"
    return markup.row([_class_figure(scores)], kind=kind) + markup.folded(
        f"All {len(rows)} classes of {scores.task}", table
    )


def _class_figure(scores: ClassScores) -> str:
    return markup.figure(charts.to_spec(charts.class_chart(scores), fill=True), fill=True)


def _origin(run: Run) -> Iterator[str]:
    if run.recipe:
        yield markup.folded("Learned recipe", markup.text(run.recipe))
    if run.config:
        found = markup.table(["key", "value"], _flat(run.config), "configuration")
        yield markup.folded("Configuration", found)


def _flat(found: Any, name: str = "") -> Iterator[list[Cell]]:
    """A row for every value, under a key such as recipe.seed or data[0].name."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _flat(value, f"{name}[{number}]")
    else:
        yield [name, found if isinstance(found, int | float) else str(found or "")]


# Several runs ---------------------------------------------------------------------------------


def _comparison(runs: Sequence[Run], thumbnails: Thumbnails) -> str:
    """A row for every task of every run, if there are several."""
    if len(runs) < 2:
        return ""
    columns = ["run", "task", "test, zero-shot", "test", "scored on", "zero-shot", "learned"]
    columns += ["command", "vectors", "coefficients", "steps", "last loss"]
    rows = [[*task, *_size(run)] for run in runs for task in _tasks(run)]
    table = markup.table(columns, rows, "runs")
    return markup.section("Runs", table, differences(runs, thumbnails))


def _tasks(run: Run) -> Iterator[list[Cell]]:
    """Every task with its accuracy before and after, which are empty without labels."""
    rows = run.scores.rows if run.scores and run.scores.is_accuracy else {}
    after = next((rows[name] for name in _METHODS if name in rows), ())
    known = zip(rows.get("zero-shot", ()), after, strict=False)
    shown = [[None if n is None else percentage(n) for n in pair] for pair in known]
    for name, pair in zip_longest(run.tasks, shown, fillvalue=None):
        test = next((one for one in run.tests if one["task"] == name), None)
        tested = [percentage(test[key]) if test else None for key in ("zero_shot", "learned")]
        on = run.scores.on if run.scores and pair else ""
        yield [run.name, name, *tested, on, *(pair or (None, None)), run.command]


def _size(run: Run) -> list[Cell]:
    """How many coefficients were learned, and in how many steps."""
    numbers = sum(len(row) for row in run.table.values())
    last = run.metrics[-1].get("loss") if run.metrics else None
    return [len(run.table), numbers, len(run.metrics), last]
