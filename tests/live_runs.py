"""Both programs on the recipes of live_recipes.yaml, and how their results compare.

    ATLAS_MERGEKIT_PYTHON=/path/to/python python tests/live_runs.py

prints a table: whether each recipe runs in both, and how far the results are from each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from language_models import import_transformers, write_language_model, write_tokenizer
from merge_runs import ROOMY, read_model

from atlas_cli.models.language import is_vocabulary

HERE = Path(__file__).parent
EXACT = ("linear", "task_arithmetic", "passthrough")
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
SELECTING = ("ties", "breadcrumbs", "breadcrumbs_ties", "sce")
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"seed": seed} for seed, name in enumerate(("base", "a", "b", "c"))},
    "half": {"seed": 4, "dtype": "float16"},
    "deep": {"seed": 5, "num_hidden_layers": 12},
    "chat": {"seed": 6, "vocab_size": 66, "added": ["<|im_start|>", "<|im_end|>"]},
    "talk": {"seed": 7, "vocab_size": 67, "added": ["<|im_end|>", "<extra>", "<|im_start|>"]},
    "wide": {"seed": 8, "vocab_size": 80},
    "gpt2": {"seed": 9, "family": "gpt2"},
}


@dataclass(frozen=True)
class Run:
    """A recipe in both programs. `distance` is relative; None where one of them failed.

    `limit` is how far the results may be from each other.
    """

    group: str
    name: str
    mergekit: str
    atlas: str
    distance: float | None
    method: str
    limit: float
    nearer: bool = False

    @property
    def agrees(self) -> bool:
        """Whether both run, with results that are near, or atlas's nearer to those in float64."""
        near = self.distance is not None and self.distance <= self.limit
        return near or self.nearer


def write_models(folder: Path) -> None:
    """Every model that the recipes name, and an adapter."""
    for name, given in MODELS.items():
        settings = dict(given)
        family, added = settings.pop("family", "llama"), settings.pop("added", [])
        layers = {} if family == "gpt2" else {"num_hidden_layers": 8}
        write_language_model(folder / name, family, **(layers | settings))
        write_tokenizer(folder / name, added)
    write_adapter(folder / "a", folder / "adapter")


def write_adapter(model: Path, folder: Path) -> None:
    """A LoRA adapter by peft."""
    transformers = import_transformers()
    import peft

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(folder)


def recipes() -> dict[str, dict[str, str]]:
    """The recipes, group by group. What is drawn by chance is run with nothing dropped."""
    found = yaml.safe_load((HERE / "live_recipes.yaml").read_text("utf-8"))
    return {group: {n: _certain(text) for n, text in own.items()} for group, own in found.items()}


def _certain(text: str) -> str:
    documents = list(yaml.safe_load_all(text))
    if not any(one["merge_method"] in RANDOM for one in documents):
        return text
    for one in documents:
        tables = [one.get("parameters") or {}, *(m.get("parameters") or {} for m in one["models"])]
        for table in tables:
            table |= {key: 1.0 for key in table if key == "density"}
            table |= {key: 0.0 for key in table if key == "epsilon"}
    return yaml.safe_dump_all(documents)


def run_mergekit(folder: Path) -> dict[str, str]:
    """Run every recipe of a folder by mergekit, and give why some failed."""
    python = os.environ.get("ATLAS_MERGEKIT_PYTHON")
    assert python, "ATLAS_MERGEKIT_PYTHON does not name a python with mergekit 0.1.5"
    command = [python, HERE / "mergekit_live.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "failed.json").read_text())


def run_all(folder: Path) -> list[Run]:
    """Every recipe in both programs."""
    from atlas_cli.cli.app import main

    write_models(folder)
    groups = recipes()
    for own in groups.values():
        for name, text in own.items():
            (folder / f"{name}.yaml").write_text(text)
    failed = run_mergekit(folder)
    runs, here = [], Path.cwd()
    os.chdir(folder)
    try:
        for group, own in groups.items():
            for name, text in own.items():
                code = main(["merge", f"{name}.yaml", f"{name}.atlas", *ROOMY, "-q"])
                both = not code and name not in failed
                *_, last = yaml.safe_load_all(text)
                run = Run(
                    *(group, name, failed.get(name, "runs"), f"exit {code}" if code else "runs"),
                    distance(folder / name) if both else None,
                    last["merge_method"],
                    limit(text),
                )
                if both and run.distance > run.limit and run.method not in SELECTING:
                    run = replace(run, nearer=is_nearer(folder / name, text))
                runs.append(run)
    finally:
        os.chdir(here)
    return runs


def limit(text: str) -> float:
    """0 for sums of elements, rounding for what has norms; more where a sort is not stable.

    The rows that pad a vocabulary, and products of factors, are summed in another order.
    """
    documents = list(yaml.safe_load_all(text))
    methods = {one["merge_method"] for one in documents}
    short = {one.get("dtype") for one in documents} & {"bfloat16", "float16"}
    if methods <= {*EXACT, *RANDOM} and "pad_to" not in text and "+./" not in text:
        return 0.0
    if short:
        return 0.08 if methods & {*SELECTING} else 4e-3
    return 1e-6


def is_nearer(stem: Path, text: str) -> bool:
    """Whether atlas's result is nearer than mergekit's to that of the recipe in float64."""
    from atlas_cli.cli.app import main

    recipe = yaml.safe_load(text) | {"dtype": "float64"}
    exact = stem.with_suffix(".float64")
    stem.with_suffix(".float64.json").write_text(json.dumps(recipe))
    assert main(["merge", f"{stem}.float64.json", str(exact), *ROOMY, "-q"]) == 0
    wanted = read_model(exact)
    ours, theirs = (read_model(stem.with_suffix(f".{who}")) for who in ("atlas", "mergekit"))

    def far(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n].double() - t).norm() ** 2) for n, t in wanted.items())

    return far(ours) <= far(theirs)


def distance(stem: Path) -> float:
    """How far two models are from each other, relative to the second; inf if they do not fit."""
    ours, theirs = (read_model(stem.with_suffix(f".{who}")) for who in ("atlas", "mergekit"))
    if ours.keys() != theirs.keys():
        return float("inf")
    order = tokens_of(stem)
    total, size = 0.0, 0.0
    for name, wanted in theirs.items():
        found = ours[name]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            return float("inf")
        if is_vocabulary(name) and order is not None:
            found = found[order]
        total += float((found.double() - wanted.double()).norm() ** 2)
        size += float(wanted.double().norm() ** 2)
    return (total / size) ** 0.5


def tokens_of(stem: Path) -> torch.Tensor | None:
    """Where atlas has the rows of mergekit's tokens; None if they differ in their tokens."""
    vocabularies = []
    for who in ("atlas", "mergekit"):
        path = stem.with_suffix(f".{who}") / "tokenizer.json"
        if not path.is_file():
            return None
        raw = json.loads(path.read_text())
        added = {one["content"]: one["id"] for one in raw["added_tokens"]}
        vocabularies.append(raw["model"]["vocab"] | added)
    ours, theirs = vocabularies
    assert ours.keys() == theirs.keys(), stem
    config = json.loads((stem.with_suffix(".mergekit") / "config.json").read_text())
    order = torch.arange(config["vocab_size"])
    for token, number in theirs.items():
        order[number] = ours[token]
    return order


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = run_all(Path(folder))
    print("| group | recipe | method | mergekit | atlas | distance | allowed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in runs:
        far = "" if one.distance is None else "0" if not one.distance else f"{one.distance:.1e}"
        print(
            f"| {one.group} | {one.name} | {one.method} | {one.mergekit} | {one.atlas} | {far} "
            f"| {'nearer to float64' if one.nearer else f'{one.limit:g}'} |"
        )
    for group in dict.fromkeys(one.group for one in runs):
        mine = [one for one in runs if one.group == group]
        good = [one for one in mine if one.agrees]
        print(f"{group}: {len(good)} of {len(mine)} run and agree", file=sys.stderr)


if __name__ == "__main__":
    main()
