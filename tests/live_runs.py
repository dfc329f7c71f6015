"""Both programs on mergekit's own recipes and on those of public cards, and how they compare.

    ATLAS_MERGEKIT_PYTHON=/path/to/python python tests/live_runs.py [GROUP ...]

prints a table: whether each recipe runs in both, how far the results are from each other, and by
which rule they agree (see Run.verdict). Recipes are in live_recipes.yaml, those of mergekit's tests
in mergekit_repository.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from language_models import SPECIAL, import_transformers, write_language_model, write_tokenizer
from live_ties import differ_only_in_ties, sce_is_nearer
from merge_runs import ROOMY, read_model
from mergekit_repository import of_tests

from atlas_cli.models.language import is_vocabulary

HERE = Path(__file__).parent
NEAR = 1e-6  # of the norm, in float32
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
SELECTING = ("ties", "breadcrumbs", "breadcrumbs_ties")
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"seed": seed} for seed, name in enumerate(("base", "a", "b", "c"))},
    "half": {"seed": 4, "dtype": "float16"},
    "deep": {"seed": 5, "num_hidden_layers": 12},
    "chat": {"seed": 6, "vocab_size": 66, "added": ["<|im_start|>", "<|im_end|>"]},
    "talk": {"seed": 7, "vocab_size": 67, "added": ["<|im_end|>", "<extra>", "<|im_start|>"]},
    "wide": {"seed": 8, "vocab_size": 80},
    "padded": {"seed": 10, "added": [f"<UNUSED_{n}>" for n in range(4)]},
    "special": {"seed": 11, "vocab_size": 65, "added": [SPECIAL]},
    "gpt2": {"seed": 9, "family": "gpt2"},
    **{
        f"{word}{number}": {"seed": number, "family": family}
        for word, family in (
            *(("granite", "granite"), ("llava", "llava"), ("t5", "t5"), ("whisper", "whisper")),
            *(("qwen3_vl", "qwen3_vl"), ("tied", "qwen2_tied")),
        )
        for number in range(3 if word == "llava" else 2)
    },
}
FILES = ("io_files", "20KB")  # a recipe, and the size of the files that it is written to


@dataclass(frozen=True)
class Run:
    """A recipe in both programs. `distance` is relative; None where one of them failed."""

    group: str
    name: str
    method: str
    mergekit: str
    atlas: str
    distance: float | None
    verdict: str
    """same bits: no byte of any tensor differs.
    1e-6: the difference is at most 1e-6 of the norm.
    equal magnitudes: all elements have the same bits but those whose magnitude equals the last
    one that is kept, which mergekit picks from by an unstable sort.
    nearer: atlas is at least as near as mergekit to what mergekit gives in float64 for inputs that
    are rounded to the dtype of the recipe; for sce, to its formula in float64 with what either
    selects, since most variances in 16 bits are equal.
    both refuse; only atlas runs; differs."""
    lacks: int = 0  # tensors that mergekit left out without a word

    @property
    def agrees(self) -> bool:
        return self.verdict != "differs"


# Models and recipes ---------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    """Every model that the recipes name, and an adapter."""
    for name, given in MODELS.items():
        settings = dict(given)
        family, added = settings.pop("family", "llama"), settings.pop("added", [])
        layers = {"num_hidden_layers": 8} if family == "llama" else {}
        write_language_model(folder / name, family, **(layers | settings))
        write_tokenizer(folder / name, added)
    write_adapter(folder / "a", folder / "adapter")
    _copy_weights(folder, "a", "pickled").unlink()
    torch.save(read_model(folder / "a"), folder / "pickled" / "pytorch_model.bin")
    _copy_weights(folder, "a", "mixed", torch.bfloat16, lambda name: "norm" not in name)


def _copy_weights(
    folder: Path,
    model: str,
    target: str,
    dtype: torch.dtype | None = None,
    chosen: Any = lambda name: True,
) -> Path:
    """A model once more, with some tensors rounded to a dtype."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(folder / model, folder / target)
    tensors = {
        name: tensor.to(dtype) if dtype and chosen(name) else tensor
        for name, tensor in read_model(folder / model).items()
    }
    path = folder / target / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path


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
    dumped = {name: yaml.safe_dump(one, sort_keys=False) for name, one in of_tests().items()}
    found = {"repository": found.pop("repository"), "tests": dumped, **found}
    return {group: {n: _certain(text) for n, text in own.items()} for group, own in found.items()}


def _certain(text: str) -> str:
    documents = list(yaml.safe_load_all(text))
    if not any(one.get("merge_method") in RANDOM for one in documents):
        return text
    for one in documents:
        tables = [one.get("parameters") or {}, *(m.get("parameters") or {} for m in one["models"])]
        for table in tables:
            if table.get("epsilon", 0) < 1:  # what is out of range stays so
                table |= {key: 1.0 for key in table if key == "density"}
                table |= {key: 0.0 for key in table if key == "epsilon"}
    return yaml.safe_dump_all(documents)


# Running --------------------------------------------------------------------------------------


def run_mergekit(folder: Path) -> dict[str, str]:
    """Run every recipe of a folder by mergekit, and give why some failed."""
    python = os.environ.get("ATLAS_MERGEKIT_PYTHON")
    assert python, "ATLAS_MERGEKIT_PYTHON does not name a python with mergekit 0.1.5"
    command = [python, HERE / "mergekit_live.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "failed.json").read_text())


def run_atlas(name: str, target: str) -> str:
    """Merge NAME.yaml in the current folder; `runs`, or the code of the failure."""
    from atlas_cli.cli.app import main

    more = ["--max-shard-size", FILES[1]] if name == FILES[0] else []
    code = main(["merge", f"{name}.yaml", target, *ROOMY, "-q", *more])
    return f"exit {code}" if code else "runs"


def run_all(folder: Path, chosen: tuple[str, ...] = ()) -> list[Run]:
    """Every recipe in both programs."""
    write_models(folder)
    groups = {group: own for group, own in recipes().items() if not chosen or group in chosen}
    for own in groups.values():
        for name, text in own.items():
            (folder / f"{name}.yaml").write_text(text)
    failed = run_mergekit(folder)
    runs, texts, here = [], {}, Path.cwd()
    os.chdir(folder)
    try:
        for group, own in groups.items():
            for name, text in own.items():
                told = failed.get(name, "runs"), run_atlas(name, f"{name}.atlas")
                for one, step in _steps(Run(group, name, _methods(text), *told, None, ""), text):
                    runs.append(_compared(one, step))
                    texts[one.name] = step
        open_ones = [one.name for one in runs if one.verdict == "?"]
        exact = _exact_results(folder, {name: texts[name] for name in open_ones})
        runs = [_against(one, exact.get(one.name)) for one in runs]
        return runs
    finally:
        os.chdir(here)


def _methods(text: str) -> str:
    """The methods of a recipe's documents."""
    found = (one.get("merge_method", "mixture of experts") for one in yaml.safe_load_all(text))
    return ", ".join(dict.fromkeys(found))


def _compared(run: Run, text: str) -> Run:
    """The run with its distance and verdict; `?` if a result in float64 has to tell."""
    if (run.mergekit, run.atlas) != ("runs", "runs"):
        alone = "only atlas runs" if run.atlas == "runs" else "differs"
        neither = "runs" not in (run.mergekit, run.atlas)
        return replace(run, verdict="both refuse" if neither else alone)
    document = yaml.safe_load(text)
    far = distance(Path(run.name))
    run = replace(run, distance=far, lacks=lacking(Path(run.name)))
    if far == 0:
        return replace(run, verdict="same bits")
    if far <= NEAR:
        return replace(run, verdict="1e-6")
    if run.method in SELECTING and differ_only_in_ties(Path(run.name), document, read_both):
        return replace(run, verdict="equal magnitudes")
    if run.method == "sce":
        nearer = sce_is_nearer(Path(run.name), document, read_both)
        return replace(run, verdict="nearer" if nearer else "differs")
    return replace(run, verdict="?" if far < float("inf") else "differs")


def _steps(run: Run, text: str) -> Iterator[tuple[Run, str]]:
    """The run, or one for each of several documents, on the results between that mergekit gave."""
    documents = list(yaml.safe_load_all(text))
    if len(documents) == 1 or "runs" not in (run.mergekit, run.atlas):
        yield run, text
        return
    between = Path(f"{run.name}.between")
    names = {one["name"]: f"./{between / one['name']}" for one in documents if "name" in one}
    for number, one in enumerate(documents, start=1):
        step, text = f"{run.name}_{number}", yaml.safe_dump(_renamed(one, names))
        Path(f"{step}.yaml").write_text(text)
        theirs = between / one["name"] if "name" in one else Path(f"{run.name}.mergekit")
        Path(f"{step}.mergekit").symlink_to(theirs.absolute())
        told = run_atlas(step, f"{step}.atlas") if run.atlas == "runs" else run.atlas
        yield replace(run, name=step, method=one["merge_method"], atlas=told), text


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(one, names) for key, one in value.items() if key != "name"}
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


# Results in float64 ---------------------------------------------------------------------------


def _exact_results(folder: Path, texts: dict[str, str]) -> dict[str, Path]:
    """What mergekit gives in float64 for inputs that are rounded to the dtype of the recipe."""
    place = folder / "float64"
    place.mkdir()
    for name, text in texts.items():
        document = yaml.safe_load(text)
        dtype = getattr(torch, document.get("dtype") or "float32")
        names = {}
        for model in {*_models(document)}:
            rounded = (
                place / f"{model.removeprefix('./').replace('/', '_')}.{document.get('dtype')}"
            )
            if not rounded.exists():
                _copy_weights(folder, model.removeprefix("./"), str(rounded), dtype)
            names[model] = f"./{rounded.name}"
        document = _renamed(document, names) | {"dtype": "float64"}
        document.pop("out_dtype", None)
        (place / f"{name}.yaml").write_text(yaml.safe_dump(document))
    failed = run_mergekit(place) if texts else {}
    return {name: place / f"{name}.mergekit" for name in texts if name not in failed}


def _models(value: Any) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        if key in ("model", "base_model"):
            yield one
        elif isinstance(one, dict | list):
            yield from _models(one)


def _against(run: Run, exact: Path | None) -> Run:
    if run.verdict != "?" or exact is None:
        return replace(run, verdict="differs") if run.verdict == "?" else run
    folders = (Path(f"{run.name}.{who}") for who in ("atlas", "mergekit"))
    wanted, *both = read_both(exact, *folders)
    ours, theirs = (
        sum(float((one[name].double() - t).norm() ** 2) for name, t in wanted.items())
        for one in both
    )
    return replace(run, verdict="nearer" if ours <= theirs else "differs")


# Distances ------------------------------------------------------------------------------------


def read_both(*folders: Path) -> list[dict[str, torch.Tensor]]:
    """Tensors by name; where names differ, by those that transformers has for them.

    mergekit writes some models under the names of transformers' modules, which are not those of
    the files. transformers reads either, and gives no tensor that a file lacks.
    """
    found = [read_model(folder) for folder in folders]
    if all(one.keys() == found[0].keys() for one in found):
        return found
    return [_loaded(folder) for folder in folders]


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    transformers = import_transformers()
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    dtype = next(iter(read_model(folder).values())).dtype
    model, told = getattr(transformers, kind).from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not told["mismatched_keys"], told
    return {n: t for n, t in model.state_dict().items() if n not in told["missing_keys"]}


def lacking(stem: Path) -> int:
    """How many tensors mergekit left out without a word."""
    ours, theirs = read_both(*(Path(f"{stem}.{who}") for who in ("atlas", "mergekit")))
    return len(ours.keys() - theirs.keys())


def distance(stem: Path) -> float:
    """How far both results are from each other, relative to mergekit's; inf if they do not fit.

    In the dtype of atlas's result, which is that of the recipe.
    """
    ours, theirs = read_both(*(Path(f"{stem}.{who}") for who in ("atlas", "mergekit")))
    if not theirs.keys() <= ours.keys():
        return float("inf")
    order = tokens_of(stem)
    total, size = 0.0, 0.0
    for name, wanted in theirs.items():
        found = ours[name]
        if found.shape != wanted.shape:
            return float("inf")
        wanted = wanted.to(found.dtype)  # arcee_fusion and ramplus_tl of mergekit write float32
        if is_vocabulary(name) and order is not None:
            found = found[order]
        total += float((found.double() - wanted.double()).norm() ** 2)
        size += float(wanted.double().norm() ** 2)
    return (total / size) ** 0.5


def tokens_of(stem: Path) -> torch.Tensor | None:
    """Where atlas has the rows of mergekit's tokens; None if they differ in their tokens."""
    vocabularies = []
    for who in ("atlas", "mergekit"):
        path = Path(f"{stem}.{who}") / "tokenizer.json"
        if not path.is_file():
            return None
        raw = json.loads(path.read_text())
        added = {one["content"]: one["id"] for one in raw["added_tokens"]}
        vocabularies.append(raw["model"]["vocab"] | added)
    ours, theirs = vocabularies
    assert ours.keys() == theirs.keys(), stem
    config = json.loads((Path(f"{stem}.mergekit") / "config.json").read_text())
    order = torch.arange(size := config.get("vocab_size") or config["text_config"]["vocab_size"])
    for token, number in theirs.items():
        if number < size:  # a token may have no row
            order[number] = ours[token]
    return order


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        runs = run_all(Path(folder), tuple(sys.argv[1:]))
    print("| group | recipe | method | mergekit | atlas | distance | agreement |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in runs:
        far = "" if one.distance is None else "0" if not one.distance else f"{one.distance:.1e}"
        theirs = " ".join(one.mergekit.split())[:60].replace("|", "/")
        print(
            f"| {one.group} | {one.name} | {one.method} | {theirs} | {one.atlas} | {far} "
            f"| {one.verdict}{f' (mergekit lacks {one.lacks} tensors)' if one.lacks else ''} |"
        )
    for group in dict.fromkeys(one.group for one in runs):
        mine = [one for one in runs if one.group == group]
        counts = Counter(one.verdict for one in mine)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        print(f"{group}: {len(mine)} recipes: {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
