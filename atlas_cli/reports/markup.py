"""Tables, figures and sections as HTML. Text is escaped here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Number:
    """A number in a table: the text that is shown, and the exact value to sort by."""

    exact: float
    shown: str


Cell = str | int | float | Number | None


def percentage(value: float) -> Number:
    """Percent, with its sign."""
    return Number(value, f"{value:.2f} %")


def rounded(value: float) -> Number:
    """A number shown with three decimals, so that those of a column line up."""
    return Number(value, f"{value:.3f}")


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], name: str) -> str:
    """A table that can be sorted by each of its columns. `name` is its label."""
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
    return isinstance(value, int | float | Number)


def _cell(value: Cell) -> str:
    if isinstance(value, str) or value is None:
        return f"<td>{escape(value or '')}</td>"
    if not isinstance(value, Number):
        value = Number(value, str(value) if isinstance(value, int) else f"{value:.6g}")
    return f'<td class="number" data-value="{value.exact!r}">{value.shown}</td>'


def figure(spec: dict[str, Any], *, fill: bool = False) -> str:
    """A chart, which the script of the page draws."""
    text = json.dumps(spec, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    kind = "chart fill" if fill else "chart"
    return f'<figure class="{kind}"><script type="application/json">{text}</script></figure>'


def row(figures: Iterable[str], *, kind: str = "row") -> str:
    """Figures beside each other, as many as there is room for."""
    inside = "\n".join(figures)
    return f'<div class="{kind}">\n{inside}\n</div>'


def picture(uri: str, caption: str, name: str) -> str:
    """A small picture that is within the page, and what is said of it."""
    return (
        f'<figure class="picture"><img src="{escape(uri)}" alt="{escape(name)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def folded(summary: str, inside: str) -> str:
    """A part that opens when its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>\n{inside}\n</details>"


def text(content: str) -> str:
    """Text with its line breaks and spaces."""
    return f"<pre>{escape(content)}</pre>"


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and its parts, or nothing if all parts are empty."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h{level}>{escape(title)}</h{level}>\n{inside}\n</section>" if inside else ""


def paragraphs(lines: Iterable[str]) -> str:
    """A paragraph for every line."""
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)
