"""The page around its sections: the style, the script and the promise to load nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from atlas_cli import __version__
from atlas_cli.pages.sections import comparison, run_section
from atlas_cli.records import Record

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
