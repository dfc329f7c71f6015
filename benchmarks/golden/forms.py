"""Forms of text in which two versions of the program can be compared: one line for each value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Accuracies that were shares of one. Names of tasks and classes stand between dots, too.
_SHARES = re.compile(
    r"accuracy\..*|individual\[\d+\]|normalised\..*|disentanglement\..*|zero_shot|learned|search"
    r"|classes\[\d+\]\.classes\..*\.(zero_shot|learned)|(zero_shot|adapted)\.agreement"
    r"|results\[\d+\]\.(top1|top5|mean_class|low|high)"
    r"|runs\[\d+\]\.(zero_shot|accuracy|accuracies\[\d+\])|\[\d+\]\.(accuracy|val_accuracy|agreement)"
)
_RENAMED = {  # in metrics.jsonl
    "accuracy": "top1_percent",
    "val_accuracy": "val_top1_percent",
    "agreement": "agreement_percent",
}


def as_json(text: str, old: bool) -> str:
    """JSON, or a JSON value on every line, as `path = value`, in the order of paths."""
    return _lines(_flat(_read(text), ""))


def as_percent(text: str, old: bool) -> str:
    """As `as_json`, with the accuracies of a version that told shares in percent."""
    found = _flat(_read(text), "")
    return _lines(_in_percent(path, value) for path, value in found) if old else _lines(found)


def _read(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
    return [found] if text.count("\n") == 1 else found  # one line of many


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{number}]")
    else:
        yield path, value


def _in_percent(path: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SHARES.fullmatch(path):
        return path, value
    row, dot, key = path.partition("].")
    if re.fullmatch(r"\[\d+", row):
        path = f"{row}{dot}{_RENAMED[key]}"
    return path, round(100 * value, 6)


def _lines(found: Any) -> str:
    ordered = sorted(found, key=lambda one: re.sub(r"\d+", lambda n: n[0].zfill(9), one[0]))
    return "".join(f"{path} = {json.dumps(value)}\n" for path, value in ordered)


def as_options(text: str, old: bool) -> str:
    """Of a page of help, the names of arguments, commands and options alone."""
    lines = [line for line in text.splitlines() if re.match(r"  (-|[A-Z]{2,}\b|[a-z]+  )", line)]
    entries = [line.strip().partition("  ")[0] for line in lines]
    found = {
        word.strip() for entry in entries for word in re.findall(r"^\w+|(?:^| )--?[a-z-]+", entry)
    }
    return "".join(f"{word}\n" for word in sorted(found))


def as_shares(text: str, old: bool) -> str:
    """A text in which agreement is a share of one again."""
    if old:
        return text
    return re.sub(
        r"(?<=agreement )([\d.]+) -> ([\d.]+)",
        lambda found: " -> ".join(f"{float(number) / 100:.3f}" for number in found.groups()),
        text,
    )


def as_coefficients(text: str, old: bool) -> str:
    """Of a page with charts, the coefficients that are drawn."""
    lines = []
    for chart in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL):
        rows = json.loads(chart).get("data", {}).get("values", [])
        lines += [f"{row['row']} {row['name']} {row['value']}\n" for row in rows if "name" in row]
    return "".join(lines)


# Of several, the last is used: percent is json, and more.
FORMS = {
    "options": as_options,
    "coefficients": as_coefficients,
    "shares": as_shares,
    "json": as_json,
    "percent": as_percent,
}
