"""Tables, figures and folded parts as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Share:
    """A fraction that is shown as percent."""

    value: float


@dataclass(frozen=True)
class Rounded:
    """A number that is shown with three decimals, so that those of a column line up."""

    value: float


Cell = str | int | float | Share | Rounded | None


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], name: str) -> str:
    """A table that can be sorted by each of its columns. `name` says what is in it."""
    listed = list(rows)
    head = "".join(
        _head(column, any(_is_number(row[number]) for row in listed))
        for number, column in enumerate(columns)
    )
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in listed)
    return (
        f'<div class="scroll"><table aria-label="{escape(name)}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _head(column: str, numbers: bool) -> str:
    kind = ' class="number"' if numbers else ""
    return f'<th scope="col"{kind}><button>{escape(column)}</button></th>'


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float | Share | Rounded)


def _cell(value: Cell) -> str:
    """A cell; a number has its exact value beside what is shown."""
    if isinstance(value, str) or value is None:
        return f"<td>{escape(value or '')}</td>"
    exact = value.value if isinstance(value, Share | Rounded) else value
    return f'<td class="number" data-value="{exact!r}">{_shown(value)}</td>'


def _shown(value: int | float | Share | Rounded) -> str:
    if isinstance(value, Share):
        return f"{100 * value.value:.2f} %"
    if isinstance(value, Rounded):
        return f"{value.value:.3f}"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def figure(spec: dict[str, Any], *, fill: bool = False) -> str:
    """A chart; the script of the page draws it."""
    text = json.dumps(spec, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    kind = "chart fill" if fill else "chart"
    return f'<figure class="{kind}"><script type="application/json">{text}</script></figure>'


def row(figures: Iterable[str], *, kind: str = "row") -> str:
    """Figures beside each other, as many as there is room for."""
    inside = "\n".join(figures)
    return f'<div class="{kind}">\n{inside}\n</div>'


def folded(summary: str, inside: str) -> str:
    """A part that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary>\n{inside}\n</details>"


def text(content: str) -> str:
    """Text as it is written."""
    return f"<pre>{escape(content)}</pre>"


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and what belongs to it; nothing if that is nothing."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h{level}>{escape(title)}</h{level}>\n{inside}\n</section>" if inside else ""


def paragraphs(lines: Iterable[str]) -> str:
    """A paragraph for every line."""
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)
