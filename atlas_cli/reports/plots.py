"""Pictures of task vectors: norms over layers and kinds, and the angles between vectors."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.files import whole_file

if TYPE_CHECKING:
    from atlas_cli.reports.grids import Grid

FORMATS = ("png", "svg", "pdf", "html")
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "atlas",
    "font.size": 9,
    "axes.titlesize": 9,
}
# Without dates and versions, the same picture is the same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# In inches: a cell, a letter, a colour bar with its numbers, the room for titles.
_CELL, _LETTER, _BAR, _TOP = 0.42, 0.072, 0.75, 0.4
_LETTERS: dict[str, Any] = {"ha": "center", "va": "center", "size": 7}


def check_plot(path: Path) -> None:
    """Raise unless `path` says in which of the formats a picture is, and where."""
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise UsageError(f"--plot {path}: expected a name that ends in .png, .svg, .pdf or .html")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no such folder: {path.parent}")


def check_matplotlib() -> None:
    """Raise unless task vectors can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise AtlasError("--plot needs matplotlib; run: pip install 'atlas-cli[plot]'")


def draw(path: Path, norms: Sequence[Grid], cosines: Grid | None) -> None:
    """Write the picture: the norms, and beside them the cosines of several vectors."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    form = path.suffix.lower().removeprefix(".")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type, unused-ignore]
        figure = _figure(_norm_panels(norms) + ([_cosine_panel(cosines)] if cosines else []))
        try:
            with whole_file(path) as temporary:
                figure.savefig(temporary, format=form, dpi=150, metadata=_METADATA[form])
        except OSError as problem:
            raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem


# How it is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A heat map: what is in it, how numbers are written and coloured, what stands below it."""

    grid: Grid
    text: str
    colours: dict[str, Any]
    below: str = ""
    bar: bool = True

    @property
    def width(self) -> float:
        """In inches, with the names of the rows to the left and the bar to the right."""
        cells = _CELL * len(self.grid.columns) + (_BAR if self.bar else 0)
        return self.left + max(cells, _LETTER * len(self.grid.title))

    @property
    def height(self) -> float:
        """In inches, with the title above and the names of the columns below."""
        names = _LETTER * max(map(len, self.grid.columns))
        return _TOP + _CELL * len(self.grid.rows) + names + 0.5

    @property
    def left(self) -> float:
        """The room that the names of the rows take."""
        return _LETTER * max(map(len, self.grid.rows)) + 0.3


def _figure(panels: Sequence[Panel]) -> Any:
    from matplotlib.figure import Figure

    height = max(panel.height for panel in panels)
    width = sum(panel.width for panel in panels) + 0.2
    figure = Figure((width, height))
    edge = 0.0
    for panel in panels:
        rows, columns = len(panel.grid.rows), len(panel.grid.columns)
        box = (edge + panel.left, height - _TOP - rows * _CELL, columns * _CELL, rows * _CELL)
        axis = figure.add_axes(_shares(box, width, height))
        image = _heat(axis, panel)
        if panel.bar:
            tall = min(rows, 12) * _CELL
            bar = (box[0] + box[2] + 0.12, height - _TOP - tall, 0.14, tall)
            figure.colorbar(image, cax=figure.add_axes(_shares(bar, width, height)), format="%g")
        edge += panel.width
    return figure


def _shares(box: tuple[float, float, float, float], width: float, height: float) -> Any:
    """A box in inches as shares of the figure."""
    return box[0] / width, box[1] / height, box[2] / width, box[3] / height


def _norm_panels(grids: Sequence[Grid]) -> list[Panel]:
    from matplotlib.colors import LogNorm

    found = [cell for grid in grids for row in grid.cells for cell in row if cell]
    scale = LogNorm(min(found), max(max(found), 1.01 * min(found)))
    return [
        Panel(
            grid,
            text="{:.2g}",
            colours={"cmap": "cividis", "norm": scale},
            below="layer" if any(grid.columns) else "",
            bar=grid is grids[-1],
        )
        for grid in grids
    ]


def _cosine_panel(grid: Grid) -> Panel:
    """The cosines, on a scale as wide as they are."""
    found = [abs(cell) for row in grid.cells for cell in row if cell is not None]
    limit = max([0.05, *found])
    return Panel(grid, "{:.2f}", {"cmap": "PuOr", "vmin": -limit, "vmax": limit})


def _heat(axis: Any, panel: Panel) -> Any:
    """A heat map with a number in each cell, and grey where there is none."""
    grid = panel.grid
    cells = [[math.nan if cell is None else cell for cell in row] for row in grid.cells]
    image = axis.imshow(cells, aspect="auto", **panel.colours)
    axis.set_facecolor("0.93")
    axis.set_xticks(range(len(grid.columns)), grid.columns)
    axis.set_yticks(range(len(grid.rows)), grid.rows)
    axis.tick_params(length=0, rotation=0)
    if max(map(len, grid.columns)) > 3:
        axis.tick_params(axis="x", rotation=90)
    axis.set_title(grid.title, loc="left")
    axis.set_xlabel(panel.below)
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            if not math.isnan(value):
                text = _number(value, panel.text)
                axis.text(j, i, text, **_LETTERS, color=_shade(image, value))
    return image


def _shade(image: Any, value: float) -> str:
    """Black on a bright cell, white on a dark one."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _number(value: float, form: str) -> str:
    """A number in a cell, without the sign of zero and the exponent of a hundred."""
    text = f"{value:.0f}" if abs(value) >= 99.5 else form.format(value)
    return text if float(text) else text.removeprefix("-")
