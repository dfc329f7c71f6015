"""The card of what is published: front matter that the Hub reads, and what people want to know.

One writer for the cards of merged models, task vectors and learning runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from atlas_cli import __version__
from atlas_cli.errors import UsageError
from atlas_cli.recipes.model import UNIT
from atlas_cli.recipes.text import parse_mapping, write_mapping
from atlas_cli.sources.locate import parse_reference
from atlas_cli.sources.open_clip_table import open_clip_repository

if TYPE_CHECKING:
    from atlas_cli.merging.provenance import Located
    from atlas_cli.recipes.merge import Merge

ZERO_SHOT = "zero-shot-image-classification"
USE, EVALUATION = "Use", "Evaluation"  # headings
_UNKNOWN = "unknown"  # the Hub's word for a licence that nobody stated


# The writer -----------------------------------------------------------------------------------


def code(text: object) -> str:
    """A text as code within a line of Markdown, which no backtick in it ends."""
    line = " ".join(str(text).split())
    marks = "`" * (_longest_run(line) + 1)
    space = " " if len(marks) > 1 else ""
    return f"{marks}{space}{line}{space}{marks}"


def code_block(language: str, text: str) -> str:
    """Lines of code in Markdown, which no backticks in them end."""
    marks = "`" * max(3, _longest_run(text) + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


@dataclass(frozen=True)
class Card:
    """A card: `front` is what the Hub reads, `sections` are headings with their text."""

    title: str
    lead: str
    front: Mapping[str, Any]
    sections: tuple[tuple[str, str], ...] = ()

    def with_section(self, heading: str, text: str, *, first: bool = False) -> Card:
        """The card with a section replaced, or added at the end or before all others."""
        if heading in dict(self.sections):
            kept = ((h, text if h == heading else old) for h, old in self.sections)
            return replace(self, sections=tuple(kept))
        new = ((heading, text),)
        return replace(self, sections=new + self.sections if first else self.sections + new)

    def with_front(self, **values: Any) -> Card:
        """The card with other values in front; None leaves a key as it is."""
        given = {key.replace("model_index", "model-index"): v for key, v in values.items()}
        return replace(self, front={**self.front, **{k: v for k, v in given.items() if v}})

    def __str__(self) -> str:
        parts = [f"---\n{write_mapping(dict(self.front), '')}---\n\n# {self.title}\n"]
        parts += [f"{self.lead.strip()}\n"] if self.lead.strip() else []
        parts += [f"## {heading}\n\n{text.strip()}\n" for heading, text in self.sections]
        return "\n".join(parts)


def front_matter(
    base_models: Sequence[str], relation: str, library: str, tags: Sequence[str]
) -> dict[str, Any]:
    """What the Hub shows beside a model: base models, library, kind of task, tags and licence."""
    bases = {"base_model": list(base_models), "base_model_relation": relation}
    return {
        **(bases if base_models else {}),
        "library_name": library,
        "pipeline_tag": ZERO_SHOT,
        "license": _UNKNOWN,
        "tags": ["atlas", *tags],
    }


def read_card(text: str) -> Card:
    """A card that was written before, by anybody. What has no front matter gets an empty one."""
    found = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    front = parse_mapping(found[1], "the card") if found else {}
    body = found[2] if found else text
    head, *rest = re.split(r"^## ", body, flags=re.MULTILINE)
    title = re.search(r"^# (.*)$", head, re.MULTILINE)
    lead = head.replace(title[0], "", 1) if title else head
    sections = tuple((h.strip(), t.strip()) for h, _, t in (one.partition("\n") for one in rest))
    return Card(title[1] if title else "", lead.strip(), front or {}, sections)


def on_hub(reference: str) -> str | None:
    """The repository that a model reference means on the Hub, if it is there."""
    try:
        found = parse_reference(reference)
    except UsageError:
        return None  # a folder that was there once
    if found.kind == "hub":
        return found.name
    if found.kind == "open_clip":
        address = open_clip_repository(found.name, found.tag or "")
        return "/".join(address.split("/")[:2]) if address else None
    return None


# An evaluation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationResult:
    """A model on a dataset, as `atlas eval` tells it; accuracies in percent."""

    model: str
    data: str
    split: str
    images: int
    top1: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: its results, and the digests of the weights of every model in it."""

    atlas: str
    results: tuple[EvaluationResult, ...]
    weights: Mapping[str, frozenset[str]]

    def of(self, digests: Iterable[str]) -> list[EvaluationResult]:
        """The results of the model whose weight files have these digests."""
        wanted = frozenset(digests)
        return [result for result in self.results if self.weights.get(result.model) == wanted]


def read_evaluation(text: str, where: str) -> Evaluated:
    """Read what `atlas eval --json` printed. Raises UsageError if it is anything else."""
    try:
        found = json.loads(text)
        scale = 1 if found.get("unit") == UNIT else 100  # earlier versions wrote shares
        results = tuple(_result(row, scale) for row in found["results"])
        weights = {one["reference"]: frozenset(one["sha256"].values()) for one in found["models"]}
        version = str(found["atlas"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise UsageError(f"{where}: is not what `atlas eval --json` prints") from problem
    if not results:
        raise UsageError(f"{where}: holds no results")
    return Evaluated(version, results, weights)


def _result(row: Mapping[str, Any], scale: int) -> EvaluationResult:
    kinds = get_type_hints(EvaluationResult)
    values = {field.name: row[field.name] for field in fields(EvaluationResult)}
    for name, value in values.items():
        if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
            raise TypeError(name)
    values |= {name: scale * values[name] for name in ("top1", "low", "high")}
    return EvaluationResult(**values)


# In the card ----------------------------------------------------------------------------------


def evaluation_text(found: Evaluated, own: Iterable[EvaluationResult]) -> str:
    """A section of the card; the results of this very model are marked."""
    mine = set(own)
    return (
        f"Zero-shot accuracy in percent, by `atlas eval` {found.atlas}, with 95 % "
        "intervals. Rows in bold are of these weights.\n\n"
        "| model | data | split | images | top-1 | 95 % |\n| --- | --- | --- | --- | --- | --- |\n"
        + "".join(_line(result, bold=result in mine) for result in found.results)
        + "\n"
    )


def _line(result: EvaluationResult, *, bold: bool) -> str:
    name, score = _cell(result.model), f"{result.top1:.2f}"
    name, score = (f"**{name}**", f"**{score}**") if bold else (name, score)
    interval = f"{result.low:.1f}-{result.high:.1f}"
    cells = (name, _cell(result.data), _cell(result.split), str(result.images), score, interval)
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def model_index(name: str, own: Iterable[EvaluationResult]) -> list[dict[str, Any]]:
    """The front matter that the Hub shows beside a model."""
    return [{"name": name, "results": list(_entries(own))}]


def _entries(own: Iterable[EvaluationResult]) -> Iterator[dict[str, Any]]:
    for result in own:
        yield {
            "task": {"type": "zero-shot-image-classification"},
            "dataset": {"name": result.data, "type": result.data, "split": result.split},
            "metrics": [
                {"type": "accuracy", "name": "top-1 in percent", "value": round(result.top1, 6)}
            ],
        }


# Merged models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """An evaluation for the card of a model: its name, and the digests of its weights."""

    found: Evaluated
    name: str
    digests: tuple[str, ...]

    @property
    def own(self) -> list[EvaluationResult]:
        """The results that are of this model."""
        return self.found.of(self.digests)


def with_evaluation(card: Card, shown: Shown) -> Card:
    """The card with the results of an evaluation, and in front those that are of this model."""
    index = model_index(shown.name, shown.own) if shown.own else None
    text = evaluation_text(shown.found, shown.own)
    return card.with_section(EVALUATION, text, first=True).with_front(model_index=index)


def card_text(
    merge: Merge,
    recipe: dict[str, Any],
    located: Mapping[str, Located],
    shown: Shown | None = None,
) -> str:
    """A model card: front matter that the Hub reads, what was merged, results, and the recipe."""
    sources = [found.model.reference.text for found in located.values()]
    bases = list(dict.fromkeys(name for text in sources if (name := on_hub(text))))
    folders = [found.model.folder for found in located.values()]
    clip = any((folder / "open_clip_config.json").is_file() for folder in folders)
    front = front_matter(
        bases, "merge", "open_clip" if clip else "transformers", ["merge", merge.method]
    )
    if not clip:
        front.pop("pipeline_tag")  # `atlas merge` takes models for any task
    steps = {key: value for key, value in recipe.items() if key != "locked"}
    if isinstance(steps.get("coefficients"), dict):
        steps["coefficients"] = "(see atlas_recipe.lock.yaml)"
    listed = "\n".join(f"- {code(name)}" for name in recipe["locked"])
    card = Card(
        f"Merged by {merge.method}",
        f"Made with atlas {__version__} by the method `{merge.method}` from:\n\n{listed}\n\n"
        "The licences of all these sources hold for this model too; look them up before you pass "
        "it on.",
        front,
    ).with_section(
        "Recipe",
        f"{code_block('yaml', write_mapping(steps, ''))}\n\n"
        "`atlas_recipe.lock.yaml` holds the same with a digest of every input: "
        "`atlas merge atlas_recipe.lock.yaml -o DIR` gives this model again, to the byte.",
    )
    return str(with_evaluation(card, shown) if shown else card)
