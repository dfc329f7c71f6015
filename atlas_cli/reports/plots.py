"""Pictures of task vectors and runs, written as .png, .svg, .pdf or .html."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError, UsageError, install_hint
from atlas_cli.io.files import whole_file, write_text
from atlas_cli.reports import charts
from atlas_cli.reports.grids import coefficient_grids, cosine_grid, norm_grids

if TYPE_CHECKING:
    from atlas_cli.reports.runs import Run
    from atlas_cli.vectors.describe import Comparison, VectorFacts

_FORMATS = (".png", ".svg", ".pdf", ".html")
_LIBRARIES = ("altair", "vl_convert")
_PANELS = 4  # beside each other in a picture
# vl-convert writes several fonts into a PDF in random order. So that the same picture is the same
# bytes, there is only one: nothing is bold.
_CONFIG = {**charts.CONFIG, "legend": {**charts.CONFIG["legend"], "titleFontWeight": "normal"}}


def missing_library() -> str | None:
    """The name of a library of the extra `plot` that is not installed."""
    return next((name for name in _LIBRARIES if importlib.util.find_spec(name) is None), None)


def check_libraries(what: str) -> None:
    """Raise AtlasError, on behalf of `what`, unless charts can be drawn."""
    if name := missing_library():
        raise AtlasError(f"{what} needs {name}; run: {install_hint('plot')}")


def check_plot(path: Path) -> None:
    """Raise UsageError unless `path` has a known format and a folder that exists."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot {path}: expected a name that ends in .png, .svg, .pdf or .html")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no such folder: {path.parent}")


def plot_vectors(path: Path, vectors: Sequence[VectorFacts], comparison: Comparison | None) -> None:
    """Draw the norms of task vectors by kind and layer and, of several, the cosines."""
    if not (norms := norm_grids(vectors)):
        raise AtlasError("--plot: no block has a norm relative to the base")
    cosines = cosine_grid(comparison) if comparison else None
    if not _is_page(path):
        _write_picture(path, [[charts.vector_chart(norms, cosines)]])
        return
    from atlas_cli.reports.page import heat_map, page

    sections = [heat_map(norms, charts.Titles("kind", "layer", "norm in %"))]
    if cosines:
        sections.append(heat_map([cosines], charts.Titles("vector", "other", "cosine")))
    write_text(path, page("Task vectors", *sections))


def plot_run(path: Path, run: Run) -> None:
    """Draw the coefficients and, of a whole run, its learning curves and its classes."""
    if not run.table and not run.metrics:
        raise AtlasError(f"{run.name}: has nothing to draw yet; --resume goes on with it")
    if _is_page(path):
        from atlas_cli.reports.page import page, picture_section

        write_text(path, page("Coefficients", picture_section(run)))
        return
    heat = charts.heat_maps(coefficient_grids(run.table), charts.Titles()) if run.table else []
    classes = [charts.class_chart(scores) for scores in run.classes]
    _write_picture(path, [heat, charts.curves(run), classes])


def _is_page(path: Path) -> bool:
    return path.suffix.lower() == ".html"


def _write_picture(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write charts, in rows below each other, in the format that the file's name asks for."""
    import altair as alt

    # Scales of their own: each chart has its legend, beside it and nowhere else.
    own = {"color": "independent", "size": "independent"}
    parts = [alt.concat(*row, columns=_PANELS).resolve_scale(**own) for row in rows if row]
    whole = alt.vconcat(*parts).resolve_scale(**own)
    spec = {**charts.to_spec(whole), "config": _CONFIG, "background": "#fff"}
    drawn = _render(spec, path.suffix.lower())
    try:
        with whole_file(path) as temporary:
            temporary.write_bytes(drawn)
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem


def _render(spec: dict[str, Any], form: str) -> bytes:
    vl_convert = charts.renderer()
    if form == ".svg":
        return _renumbered(vl_convert.vegalite_to_svg(spec)).encode()
    if form == ".pdf":
        return _sorted_resources(vl_convert.vegalite_to_pdf(spec))
    return bytes(vl_convert.vegalite_to_png(spec, scale=2))


def _sorted_resources(pdf: bytes) -> bytes:
    """Sort the entries of dictionaries that refer to objects, which vl-convert writes at random.

    Objects keep their length, so the table of their offsets stays right.
    """
    entries = re.compile(rb"(?:^ +/\w+ \d+ 0 R\n){2,}", re.MULTILINE)
    return entries.sub(lambda found: b"".join(sorted(found[0].splitlines(keepends=True))), pdf)


def _renumbered(svg: str) -> str:
    """Number gradients from 0: Vega goes on counting from one picture of a process to the next."""
    numbers: dict[str, int] = {}
    return re.sub(
        r"\bgradient_(\d+)", lambda m: f"gradient_{numbers.setdefault(m[1], len(numbers))}", svg
    )
