"""Make tests/fixtures: what mergekit, PEFT, FusionBench and clip-benchmark give for tiny inputs.

    ATLAS_MERGEKIT_PYTHON=/path/to/python python tests/make_fixtures.py [NAME ...]

mergekit 0.1.5 lives in an environment of its own, which the variable names; the others are in the
extra `oracle`. test_oracles.py compares what is kept with what they give today.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit_cases import (
    DRAWN,
    DTYPES,
    FIXTURES,
    FLAT,
    LLAMA,
    METHODS,
    MODELS,
    RECIPES,
    SETS,
    SHAPES,
    Case,
    Tensors,
    joined,
    key_of,
    parted,
)
from method_cases import DARE, DENSITIES, ISOTROPIC, NET_SHAPES, SHAPE, SIGNS, WEIGHTS
from safetensors.torch import load_file, save_file
from tiles import cut, merge, resolve

from atlas_cli.merge_methods.sparsify import AT_RANDOM, BY_RANK, delta_of, sparsify_
from atlas_cli.registry import MERGE_METHODS

HERE = Path(__file__).parent
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
SPARSIFIERS = {"dare": AT_RANDOM, "della": BY_RANK}

# mergekit -------------------------------------------------------------------------------------


def mergekit(script: str, *arguments: str | Path) -> None:
    """Run a script of this folder with the Python that mergekit lives in."""
    python = os.environ.get("ATLAS_MERGEKIT_PYTHON")
    assert python, "ATLAS_MERGEKIT_PYTHON does not name a python with mergekit 0.1.5"
    command = [python, HERE / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def draw_sets() -> Tensors:
    """A base and four models that are near it, of every shape and type; a few elements equal it."""
    found: Tensors = {}
    for number, chosen in enumerate(SETS):
        shape, dtype = chosen.split("-")
        generator = torch.Generator().manual_seed(number)
        base = torch.randn(SHAPES[shape], generator=generator)
        noise = [torch.randn(base.shape, generator=generator) for _ in range(4)]
        tuned = [base + 0.3 * tau * (tau.abs() > 0.1) for tau in noise]
        for label, tensor in zip(("base", *range(4)), (base, *tuned), strict=True):
            found[f"{chosen}/{label}"] = tensor.to(DTYPES[dtype])
    return found


def masks_of(case: Case, base: torch.Tensor, models: list[torch.Tensor]) -> Tensors:
    """What atlas draws of every task vector: mergekit keeps the same."""
    (tile,) = cut(base, models[: case.models], len(base))
    values = resolve(MERGE_METHODS[case.method], case.models, case.parameters, 0)
    sparsifier = SPARSIFIERS[case.method.split("_")[0]]
    deltas = [delta_of(tile, model) for model in range(case.models)]
    statistics = sparsifier.statistics(lambda: iter([tile]), values)
    for delta, found in zip(deltas, statistics, strict=True):
        sparsify_(sparsifier, delta, tile, found)
    return {f"mask{n}": (delta != 0).to(torch.uint8) for n, delta in enumerate(deltas)}


def run_methods(cases: list[dict[str, Any]], tensors: Tensors) -> Tensors:
    """What mergekit's methods make of cases; see mergekit_driver.py."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(tensors, folder / "inputs.safetensors")
        (folder / "cases.json").write_text(json.dumps(cases))
        files = ("inputs.safetensors", "cases.json", "outputs.safetensors")
        mergekit("mergekit_driver.py", *(folder / file for file in files))
        return load_file(folder / "outputs.safetensors")


def mergekit_methods(given: Tensors) -> Tensors:
    """What mergekit makes of all cases, in one run."""
    tensors = dict(given)
    for case, chosen in itertools.product(DRAWN, SETS):
        models = [given[f"{chosen}/{number}"] for number in range(4)]
        masks = masks_of(case, given[f"{chosen}/base"], models)
        tensors |= {f"{key_of(case, chosen)}/{name}": mask for name, mask in masks.items()}
    cases = [
        vars(case) | {"key": key_of(case, chosen), "set": chosen}
        for case, chosen in itertools.product(METHODS, SETS)
    ]
    return run_methods(cases, tensors)


def draw_models() -> Tensors:
    """A base and three models near it, of a Llama and of a bare file."""
    found: Tensors = {}
    for chosen, shapes in MODELS.items():
        random = torch.Generator().manual_seed(1)  # in which no two magnitudes in float32 are equal
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        base = torch.randn(size, generator=random)
        for name in ("base", "a", "b", "c"):
            moved = base + 0.1 * (name != "base") * torch.randn(size, generator=random)
            found[f"{chosen}/{name}"] = moved.to(DTYPES[chosen.split("-")[1]])
    return found


def write_models(folder: Path, given: Tensors, chosen: str) -> None:
    """The models of a set, as folders of transformers or as bare files."""
    for name in ("base", "a", "b", "c"):
        tensors = parted(given[f"{chosen}/{name}"], MODELS[chosen])
        if chosen.startswith("raw"):
            save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
        else:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(CONFIG))
            save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})


def write_recipes(folder: Path, chosen: str) -> list[str]:
    """The recipes for a set; mergekit knows no layers in a bare file."""
    suffix = ".safetensors" if chosen.startswith("raw") else ""
    names = FLAT if suffix else [*RECIPES]
    for name in names:
        recipe = {"merge_method": name, **RECIPES[name]}
        models = [{**m, "model": f"{folder / m['model']}{suffix}"} for m in recipe["models"]]
        recipe["models"] = models
        if "base_model" in recipe:
            recipe["base_model"] = f"{folder / recipe['base_model']}{suffix}"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return names


def mergekit_recipes(given: Tensors) -> Tensors:
    """What mergekit's own programs make of all recipes."""
    found: Tensors = {}
    for chosen in MODELS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_models(folder, given, chosen)
            names = write_recipes(folder, chosen)
            mergekit("mergekit_runs.py", folder, *["raw"] * chosen.startswith("raw"))
            for name in names:
                tensors: Tensors = {}
                for path in (folder / name).glob("*.safetensors"):
                    tensors |= load_file(path)
                dtype = DTYPES[chosen.split("-")[1]]  # mergekit leaves a scalar in float32
                assert tensors.keys() == MODELS[chosen].keys()
                assert all(t.dtype == dtype for t in tensors.values() if t.ndim), name
                joint = joined({key: tensor.to(dtype) for key, tensor in tensors.items()})
                found[f"{chosen}/{name}"] = joint
    return found


# PEFT -----------------------------------------------------------------------------------------


def draw_deltas() -> Tensors:
    """A base and three models near it."""
    base = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    noise = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)]
    return {"peft/base": base} | {f"peft/{n}": base + 0.1 * tau for n, tau in enumerate(noise)}


def peft_methods(given: Tensors) -> Tensors:
    """What PEFT makes of the task vectors."""
    from atlas_cli.models.open_clip_import import import_open_clip

    import_open_clip()  # mends torchvision, which PEFT imports
    from peft.utils import merge_utils

    base = given["peft/base"]
    deltas = [given[f"peft/{number}"] - base for number in range(3)]
    weights = torch.tensor(WEIGHTS)
    found = {"peft/task_arithmetic": merge_utils.task_arithmetic(deltas, weights)}
    for density, theirs in itertools.product(DENSITIES, SIGNS):
        merged = merge_utils.ties(deltas, weights, density, majority_sign_method=theirs)
        found[f"peft/ties-{density}-{theirs}"] = merged
    for name in DARE:
        masks = []
        for number, delta in enumerate(deltas):
            alone = [float(number == other) for other in range(3)]
            asked = {"density": 0.5, "rescale": False, "weight": alone}
            masks.append((merge("dare_linear", 0 * base, deltas, asked) != 0).to(delta.dtype))
        drawn, usual = iter(masks), torch.bernoulli
        torch.bernoulli = lambda chances, drawn=drawn: next(drawn)
        try:
            found[f"peft/{name}"] = getattr(merge_utils, name)(deltas, weights, 0.5)
        finally:
            torch.bernoulli = usual
    return {name: tensor.contiguous() for name, tensor in found.items()}


# FusionBench ----------------------------------------------------------------------------------


def draw_nets() -> Tensors:
    """A base and three models near it: a matrix, a wide matrix, a vector and a kernel."""
    found: Tensors = {}
    for name, shape in NET_SHAPES.items():
        random = torch.Generator().manual_seed(len(name))
        base = torch.randn(shape, generator=random)
        found[f"nets/base/{name}"] = base
        for number in range(3):
            found[f"nets/{number}/{name}"] = base + 0.1 * torch.randn(shape, generator=random)
    return found


def fusion_bench_methods(given: Tensors) -> Tensors:
    """What algorithms of FusionBench make of the models; they talk and work in place."""
    from atlas_cli.models.open_clip_import import import_open_clip

    import_open_clip()
    import fusion_bench
    from fusion_bench.method.isotropic_merging.iso import ISO_C_Merge, ISO_CTS_Merge
    from fusion_bench.method.task_singular_vector.TSVM import TaskSingularVectorMerging
    from fusion_bench.method.ties_merging.ties_merging import TiesMergingAlgorithm

    def fused(algorithm: Any, names: list[str]) -> Tensors:
        nets = {
            label: torch.nn.ParameterDict({n: given[f"nets/{label}/{n}"].clone() for n in names})
            for label in ("base", "0", "1", "2")
        }
        pool = fusion_bench.BaseModelPool(
            {"_pretrained_": nets["base"]}
            | {f"t{n}": copy.deepcopy(nets[str(n)]) for n in range(3)}
        )
        with contextlib.redirect_stdout(io.StringIO()):
            merged = algorithm.run(pool).state_dict()
        return {name: tensor.detach().contiguous().clone() for name, tensor in merged.items()}

    every = [*NET_SHAPES]
    ties = TiesMergingAlgorithm(
        scaling_factor=0.3, threshold=20, remove_keys=[], merge_func="mean"
    )  # takes a model as one vector, also one of a single tensor
    runs = {
        "tsv": fused(TaskSingularVectorMerging(alpha=1.0, exclude_keys=[]), every),
        "tsv-weighted": fused(TaskSingularVectorMerging(alpha=WEIGHTS, exclude_keys=[]), every),
        "iso_c": fused(ISO_C_Merge(scaling_factor=1.5, exclude_keys=[]), every),
        "ties-tall": fused(ties, ["tall"]),
        "ties-all": fused(ties, every),
    }
    for fraction in ISOTROPIC:
        algorithm = ISO_CTS_Merge(1.5, fraction, exclude_keys=[])
        runs[f"iso_cts-{fraction}"] = fused(algorithm, every)
    return {f"nets/{run}/{name}": t for run, merged in runs.items() for name, t in merged.items()}


# clip-benchmark -------------------------------------------------------------------------------


def clip_benchmark_scores(given: Tensors) -> Tensors:
    """What clip-benchmark counts on the digits of the built-in model, and its zero-shot head."""
    from atlas_cli.cli.app import main
    from atlas_cli.datasets import builtin
    from atlas_cli.models.open_clip_import import import_open_clip
    from atlas_cli.sources.locate import builtin_model

    open_clip = import_open_clip()
    from clip_benchmark.metrics.zeroshot_classification import evaluate, zero_shot_classifier
    from torchvision.datasets import ImageFolder

    name = f"local-dir:{builtin_model('tiny')}"
    model, _, transform = open_clip.create_model_and_transforms(name)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        assert main(["draw", "builtin:digits", "-o", f"{folder}/digits", "-q"]) == 0
        images = ImageFolder(f"{folder}/digits/test", transform)
        names = [one.replace("_", " ") for one in images.classes]
        templates = [one.replace("{}", "{c}") for one in builtin.TASKS["digits"].templates]
        asked = (open_clip.get_tokenizer(name), names, templates, "cpu")
        loader = torch.utils.data.DataLoader(images, batch_size=50)
        scores = evaluate(model, loader, *asked, amp=False, verbose=False)
        weights = zero_shot_classifier(model, *asked, amp=False)
    right = torch.tensor(round(scores["acc1"] * len(images)))
    return {"right": right, "weights": weights.detach().contiguous()}


MAKERS: dict[str, list[tuple[Callable[[], Tensors], Callable[[Tensors], Tensors]]]] = {
    "mergekit_methods": [(draw_sets, mergekit_methods)],
    "mergekit_recipes": [(draw_models, mergekit_recipes)],
    "clip_benchmark": [(dict, clip_benchmark_scores)],
    "methods": [(draw_deltas, peft_methods), (draw_nets, fusion_bench_methods)],
}


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MAKERS:
        found: Tensors = {}
        for draw, make in MAKERS[name]:
            given = draw()
            made = make(given)
            assert not given.keys() & made.keys()
            found |= given | made
        save_file(found, FIXTURES / f"{name}.safetensors")
        print(name, len(found), (FIXTURES / f"{name}.safetensors").stat().st_size)


if __name__ == "__main__":
    main()
