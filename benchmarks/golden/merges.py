"""Merges that succeed: every recipe, and parameters of every method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lines import ROOM, listed
from running import Case, case


def merging(work: Path) -> Iterator[Case]:
    """Every recipe, and what is told of it."""
    for path in sorted((work / "recipes" / "merge").glob("*.yaml")):
        name = path.stem
        yield case(f"merge {name}", f"merge recipes/merge/{path.name} -o out/merge-{name} {ROOM}")
        line = f"merge recipes/merge/{path.name} --dry-run --json {ROOM}"
        yield case(f"merge plan {name}", line)
    ties, slerp = "recipes/merge/ties.yaml", "recipes/merge/slerp.yaml"
    table = {
        "text plan": f"merge {ties} --dry-run",
        "explain": f"merge {slerp} --dry-run --explain 'resblocks.1.*(attn|mlp)'",
        "explain json": f"merge {slerp} --dry-run --json --explain ln_1",
        "json": f"merge {ties} -o @ --json",
        "shards": f"merge {ties} -o @ --max-shard-size 1MB",
        "quiet force": f"merge {ties} -o out/merge-linear --force -q",
        "lock": "merge out/merge-dare_ties/atlas_recipe.lock.yaml -o @",
        "lock of vectors": "merge out/merge-atlas/atlas_recipe.lock.yaml -o @",
    }
    yield from listed("merge", ROOM, table)
    yield case("merge schema", "merge --schema")
    text = (work / ties).read_text()
    yield case("merge stdin", f"merge - -o out/merge-stdin {ROOM}", stdin=text)


def _recipe(method: str, own: Mapping[str, Any], together: Mapping[str, Any], **more: Any) -> str:
    """A merge of small models: two of them, or as many as `count`, beside a base if `base`."""
    kind, count, base = more.pop("kind", "m"), more.pop("count", 2), more.pop("base", True)
    models = [{"model": f"./in/{kind}{n}", "parameters": dict(own)} for n in range(1, count + 1)]
    found = {"merge_method": method, "models": models, "parameters": dict(together), **more}
    return json.dumps(found | ({"base_model": f"./in/{kind}0"} if base else {}))


HALF = {"weight": 0.6, "density": 0.5}
ELECTION = {"elect": "count", "zero_sign": "majority", "weigh": "after", "divisor": "count"}
BY_LAYER: dict[str, Any] = {
    "weight": [{"filter": "mlp", "value": [0, 1]}, {"value": [0.2, 0.4, 0.9]}]
}
OPTIONS: dict[str, str] = {
    "linear sum": _recipe("linear", {"weight": 0.5}, {"normalize": False}, base=False),
    "linear by layer": _recipe("linear", BY_LAYER, {"normalize": False}, base=False),
    "linear of a base": _recipe("linear", {}, {"weight": 1}),
    "linear float64": _recipe("linear", {"weight": 1}, {}, base=False, dtype="float64"),
    "linear bfloat16": _recipe("linear", {"weight": 1}, {}, base=False, out_dtype="bfloat16"),
    "linear up": _recipe("linear", {}, {"weight": 1}, kind="b", dtype="torch.float32"),
    "linear tokenizer": _recipe("linear", {}, {"weight": 1}, tokenizer_source="base"),
    "unknown filter": _recipe(
        "linear", {"weight": [{"filter": "mpl", "value": 1}, {"value": 2}]}, {}, base=False
    ),
    "nuslerp rows": _recipe(
        "nuslerp", {"weight": 0.7}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    ),
    "nuslerp columns": _recipe("nuslerp", {"weight": 0.7}, {"nuslerp_flatten": False}, base=False),
    "multislerp": _recipe(
        "multislerp", {"weight": 0.7}, {"normalize_weights": False, "eps": 0.001}, count=3
    ),
    "karcher": _recipe("karcher", {}, {"max_iter": 3, "tol": 0.001}, count=3, base=False),
    "task arithmetic": _recipe(
        "task_arithmetic", HALF, {"normalize": True, "rescale": True, "lambda": 0.7}, count=3
    ),
    "task arithmetic by layer": _recipe("task_arithmetic", BY_LAYER, {}),
    "ties": _recipe("ties", HALF, {**ELECTION, "rounding": "ceil"}, count=3),
    "ties above": _recipe("ties", HALF, {"rounding": "above", "normalize": False}, count=3),
    "ties model": _recipe("ties", HALF, {"scope": "model", **ELECTION}, kind="b", count=3),
    "ties bfloat16": _recipe("ties", HALF, {"int8_mask": True, "rescale": True}, kind="b"),
    "dare_linear": _recipe("dare_linear", HALF, {"rescale_by": "density"}, seed=7),
    "dare_ties": _recipe("dare_ties", HALF, {**ELECTION, "rescale": False}, kind="b", seed=7),
    "della": _recipe("della", {**HALF, "epsilon": 0.3}, {**ELECTION, "lambda": 1.5}, count=3),
    "della_linear": _recipe("della_linear", {**HALF, "epsilon": 0.2}, {"rescale": False}, kind="b"),
    "breadcrumbs": _recipe("breadcrumbs", {**HALF, "gamma": 0.1}, {"scope": "model"}, kind="b"),
    "breadcrumbs_ties": _recipe("breadcrumbs_ties", {**HALF, "gamma": 0.1}, ELECTION, count=3),
    "model_stock": _recipe("model_stock", {}, {"filter_wise": True}, count=3),
    "sce": _recipe("sce", {}, {"select_topk": 0.3, "int8_mask": True}, count=3),
    "wise_ft": _recipe("wise_ft", {}, {"alpha": 0.3}, count=1),
    "lines": _recipe("lines", {"weight": 0.5}, {"alpha": 0.1, "beta": 0.8}, count=3),
    "metagpt": _recipe("metagpt", {}, {"lambda": 0.5}, count=3),
    "consensus": _recipe("consensus", {"threshold": 0.7}, {"agreement": 1}, count=3),
    "tsv": _recipe("tsv", {"weight": 0.5}, {"lambda": 2}, count=3),
    "iso_c": _recipe("iso_c", {"weight": 0.5}, {"lambda": 2}, count=3),
    "iso_cts": _recipe("iso_cts", {"weight": 0.5}, {"common_space_fraction": 0.3}, count=3),
    "slices": json.dumps(
        {
            "merge_method": "slerp",
            "base_model": "./in/m0",
            "parameters": {"t": 0.3},
            "slices": [
                {"sources": [{"model": f"./in/m{n}", "layer_range": [0, 3]} for n in (0, 1)]}
            ],
        }
    ),
    "adapter": '{"merge_method": "passthrough", "models": [{"model": "./in/m1+./in/lora"}]}',
    "clip": '{"merge_method": "linear", "parameters": {"weight": 1}, '
    '"models": [{"model": "./in/clip1"}, {"model": "./in/clip2"}]}',
    "vectors by name": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": [{"file": "builtin:digits", "name": "digits"}, "vectors/cars.safetensors"],
            "granularity": "vector",
            "coefficients": {"digits": {"all": 0.4}, "cars": {"all": -0.25}},
            "out_dtype": "float32",
        }
    ),
    "vectors by file": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": ["builtin:digits", "builtin:signs"],
            "granularity": "vector",
            "coefficients": "in/table.json",
            "scope": "visual",
        }
    ),
    "vectors in factors": json.dumps(
        {
            "merge_method": "atlas",
            "base_model": "builtin:tiny",
            "vectors": ["out/extract-adapter.safetensors"],
            "coefficients": {"adapter": {"visual.transformer.resblocks.1.mlp.c_fc.weight": 0.5}},
        }
    ),
}


def merging_options(work: Path) -> Iterator[Case]:
    """Parameters of methods, dtypes, slices, adapters, vectors."""
    table = {"digits": {"all": 0.5}, "signs": {"all": 0.25}}
    (work / "in" / "table.json").write_text(json.dumps(table))
    for number, (name, text) in enumerate(OPTIONS.items()):
        line = f"merge - -o out/options-{number} {ROOM}"
        yield case(f"merge with {name}", line, stdin=text)
