"""The cards of task vectors, runs and models: what they are, how they are used, how good."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_cli import __version__
from atlas_cli.merging.model_card import (
    USE,
    ZERO_SHOT,
    Card,
    Evaluated,
    EvaluationResult,
    Shown,
    code,
    code_block,
    front_matter,
    model_index,
    on_hub,
    read_card,
    with_evaluation,
)
from atlas_cli.recipes.text import parse_mapping
from atlas_cli.reports.runs import Run
from atlas_cli.sources.locate import read_object
from atlas_cli.vectors.format import Header

_LICENCES = "The licence of the base model holds for what is made with it, too."


def with_results(
    card: Card, repository: str, evaluation: Evaluated, digests: Sequence[str]
) -> Card:
    """The card with the results of an evaluation; its own are those of these weights."""
    name = repository.partition("/")[2]
    return with_evaluation(card, Shown(evaluation, name, tuple(digests)))


def _block(*lines: str) -> str:
    return code_block("sh", "\n".join(lines))


# Task vectors ---------------------------------------------------------------------------------


def vector_card(
    repository: str,
    headers: Mapping[str, Header],
    evaluation: Evaluated | None,
) -> Card:
    """The card of one task vector or several of one base."""
    first = next(iter(headers.values()))
    base = str(first.base.get("reference", ""))
    bases = list(dict.fromkeys(name for h in headers.values() if (name := _base_of(h))))
    what = "Task vectors" if len(headers) > 1 else "A task vector"
    given = base if on_hub(base) else (bases or [base])[0]
    use = _block(
        f"atlas inspect hf://{repository}",
        f"atlas fit photos/ --model {shlex.quote(given)} --vectors hf://{repository} -o run",
        "atlas merge run -o mine",
    )
    card = Card(
        repository.partition("/")[2],
        f"{what} of {code(given)}: fine-tuned minus base, made with atlas "
        f"{first.atlas or __version__}. {_LICENCES}",
        front_matter(bases, "adapter", "atlas", ["task-vector", "clip"]),
    )
    card = card.with_section(USE, use).with_section("Provenance", _provenance(headers))
    if evaluation:
        own = _digests(first.finetuned) if len(headers) == 1 else []
        card = with_results(card, repository, evaluation, own)
    return card


def _base_of(header: Header) -> str | None:
    return on_hub(str(header.base.get("reference", "")))


def _digests(source: Mapping[str, Any]) -> list[str]:
    found = source.get("sha256")
    return list(found.values()) if isinstance(found, dict) else []


def _provenance(headers: Mapping[str, Header]) -> str:
    """A table with a row for every vector."""
    rows = ["| file | fine-tuned | base | storage | blocks | norm / base |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for file, header in headers.items():
        storages = ", ".join(sorted({block.storage for block in header.blocks}))
        norm = header.relative_norm
        cells = (
            _in_table(code(file)),
            _source(header.finetuned),
            _source(header.base),
            storages,
            str(len(header.blocks)),
            f"{norm:.4f}" if norm is not None else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    prints = sorted({header.fingerprint for header in headers.values()})
    return "\n".join(rows) + f"\n\nFingerprint of the base: {', '.join(map(code, prints))}."


def _source(found: Mapping[str, Any]) -> str:
    """A model by its name, commit and digest; of a path on some machine, only the last part."""
    name = str(found.get("reference", ""))
    if not on_hub(name) and ":" not in name:
        name = Path(name).name
    commit = found.get("commit")
    digest = next(iter(_digests(found)), "")
    parts = [code(name), f"at {code(str(commit)[:12])}" if commit else ""]
    parts.append(f"sha256 {code(str(digest)[:12])}" if digest else "")
    return _in_table(" ".join(part for part in parts if part))


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


# Runs -----------------------------------------------------------------------------------------


def run_card(repository: str, run: Run, recipe: str, picture: str | None) -> Card:
    """The card of learned coefficients."""
    found = parse_mapping(recipe, "the run's recipe")
    base = str(found.get("base_model", ""))
    hub = on_hub(base)
    use = _block(
        f"atlas merge hf://{repository} -o mine",
        f"atlas eval {shlex.quote(base)} mine --data photos/",
        "atlas inspect mine",
    )
    vectors = found.get("vectors") or []
    listed = "\n".join(f"- {code(one['name'])}: {code(one['file'])}" for one in vectors)
    card = Card(
        repository.partition("/")[2],
        f"Coefficients that scale task vectors of {code(base)}, one for every block, learned by "
        f"`atlas {run.command}` {run.config.get('versions', {}).get('atlas', __version__)} on "
        f"{', '.join(run.tasks) or 'images without labels'}. {_LICENCES}",
        front_matter([hub] if hub else [], "adapter", "atlas", ["task-vector", "merge", "clip"]),
    ).with_section(USE, use)
    if run.comment:
        card = card.with_section("Results", "\n".join(run.comment))
    if own := _own_results(run):
        card = card.with_front(model_index=model_index(repository.partition("/")[2], own))
    if picture:
        card = card.with_section("Coefficients", f"![learned coefficients]({picture})")
    text = f"Vectors:\n\n{listed}\n\n`recipe.yaml` has the coefficients and a digest of every "
    text += "vector, `config.json` all that decided the result."
    return card.with_section("Provenance", text)


def _own_results(run: Run) -> list[EvaluationResult]:
    """What the run measured of itself, as results; the split says on which images."""
    if run.scores is None or not run.scores.is_accuracy:
        return []
    method = str(run.config.get("recipe", {}).get("method", "learned"))
    on = {scores.task: scores.on for scores in run.classes}
    return [
        EvaluationResult(run.name, task, on.get(task, "selected by"), 0, value, value, value)
        for task, value in zip(run.tasks, run.scores.rows.get(method, ()), strict=False)
        if value is not None
    ]


# Models ---------------------------------------------------------------------------------------


def model_card(repository: str, folder: Path, text: str, picture: str | None) -> Card:
    """The card that a model folder has, or a new one, with what the Hub wants to know."""
    name = repository.partition("/")[2]
    card = read_card(text) if text.strip() else Card(name, f"Made with atlas {__version__}.", {})
    library, pipeline = _library(folder)
    usual = {**front_matter([], "", library, []), **card.front}
    if pipeline:
        usual["pipeline_tag"] = card.front.get("pipeline_tag", pipeline)
    elif "pipeline_tag" not in card.front:
        usual.pop("pipeline_tag")
    usual["library_name"] = library
    lines = [f"atlas eval {repository} --data photos/"] if pipeline == ZERO_SHOT else []
    lines += [f"hf download {repository} --local-dir {name}", f"atlas inspect {name}"]
    card = Card(card.title or name, card.lead, usual, card.sections)
    card = card.with_section(USE, _block(*lines), first=True)
    if picture:
        card = card.with_section("Coefficients", f"![learned coefficients]({picture})")
    return card


def _library(folder: Path) -> tuple[str, str | None]:
    """The library that opens a model, and the task that it is for, if that is known."""
    if (folder / "open_clip_config.json").is_file():
        return "open_clip", ZERO_SHOT
    if (folder / "adapter_config.json").is_file():
        return "peft", None
    config = folder / "config.json"
    named = read_object(config).get("architectures") if config.is_file() else None
    first = str(named[0]) if isinstance(named, list) and named else ""
    if "CLIP" in first or "Siglip" in first:
        return "transformers", ZERO_SHOT
    return "transformers", "text-generation" if first.endswith("ForCausalLM") else None
