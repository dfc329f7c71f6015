"""Recipes of merges that are wrong, or whose models are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from lines import ROOM, as_yaml
from running import Case, case, words
from wrong_recipes import KINDS

ONE = "parameters: {weight: 1}"
PAIR = f"models: [{{model: builtin:tiny, {ONE}}}, {{model: ./in/m1, {ONE}}}]"
TIES = "merge_method: ties\nbase_model: ./in/m0\nmodels:\n  - {model: ./in/m1, parameters: "
ATLAS = "merge_method: atlas\nbase_model: builtin:tiny\nvectors: [vectors/cars.safetensors]\n"
PASS = "merge_method: passthrough\nslices: "
SUMS = "merge_method: linear\nparameters: {weight: 1}\nmodels: "
BROKEN = {
    "unknown method": f"merge_method: tise\n{PAIR}",
    "method of one model": f"merge_method: nearswap\n{PAIR}",
    "misspelt keys": f"merge_method: linear\n{PAIR}\ndtyp: float32\noutdtype: float32",
    "wrong type": f"merge_method: linear\n{PAIR}\nseed: one",
    "negative seed": f"merge_method: linear\n{PAIR}\nseed: -1",
    "key twice": f"merge_method: linear\nmerge_method: ties\n{PAIR}",
    "missing base": "merge_method: slerp\nmodels: [{model: ./in/m1}]\nparameters: {t: 0.5}",
    "short gradient": "merge_method: slerp\nbase_model: ./in/m0\nmodels: [{model: ./in/m1}]\n"
    "parameters: {t: [0.5]}",
    "no models": "merge_method: linear\nmodels: []",
    "models and slices": f"merge_method: linear\n{PAIR}\nslices: []",
    "too many models": "merge_method: slerp\nbase_model: ./in/m0\nparameters: {t: 0.5}\n"
    "models: [{model: ./in/m1}, {model: ./in/m2}]",
    "too few models": "merge_method: nuslerp\nmodels: [{model: ./in/m1, parameters: {weight: 1}}]",
    "negative density": f"{TIES}{{weight: 1, density: -0.5}}}}",
    "density in a filter": f"{TIES}{{weight: 1, density: [{{filter: mlp, value: [0, 7]}}]}}}}",
    "key of a filter": f"{TIES}{{weight: 1, density: [{{fitler: mlp, value: 1}}]}}}}",
    "filter without value": f"{TIES}{{weight: 1, density: [{{filter: mlp}}]}}}}",
    "filter of a number": f"{TIES}{{weight: 1, density: [{{filter: 3, value: 1}}, 2]}}}}",
    "value of a table": f"{TIES}{{weight: 1, density: {{value: {{a: 1}}}}}}}}",
    "not a table": f"{TIES}7}}",
    "no parameters": f"{TIES}{{}}}}",
    "unreadable references": f"{SUMS}[{{model: ./nowhere}}, {{model: builtin:tny}},"
    " {model: a b/c}, {model: ./in/m1+./nowhere}, {model: owner/name@}]",
    "entries of other types": f"{SUMS}[x, 7, {{}}, {{model: 7}}, {{model: ./in/m1, parameters: 7}},"
    " {model: ./in/m2, weight: 1}, null]",
    "parameter in the wrong place": "merge_method: linear\n"
    "models: [{model: ./in/m1, parameters: {weight: 1, normalize: false}}]",
    "missing and unknown parameters": "merge_method: linear\n"
    "models: [{model: ./in/m1, parameters: {wieght: 1}}, {model: ./in/m2}]",
    "base without weight": "merge_method: linear\nbase_model: ./in/m0\n"
    "models: [{model: ./in/m1, parameters: {weight: 1}}]",
    "two slices": f"{PASS}\n  - sources: [{{model: ./in/m1, layer_range: [0, 8]}}]\n"
    "  - sources: [{model: ./in/m2, layer_range: [4, 12]}]",
    "slice of some layers": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [2, 8]}}]}}]",
    "slice of too many layers": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [0, 8]}}]}}]",
    "slice without sources": f"{PASS}[{{sources: []}}]",
    "slices of nothing": f"{PASS}[]",
    "slices of other types": f"{PASS}[{{sources: x, base_model: 7, parameters: [], more: 1}}]",
    "sources of other types": f"{PASS}[{{sources: [x, {{model: 1, layer_range: [a]}},"
    " {layer_range: 3}]}]",
    "residual weight": f"{PASS}[{{sources: [{{model: ./in/m1, layer_range: [0, 3]}}],"
    " residual_weight: 1}]",
    "what mergekit has": f"merge_method: linear\n{PAIR}\ntokenizer_source: union\n"
    "chat_template: auto\nmodules: {}\nexperts: []\ntokenizer: {source: union}\ngate_mode: x\n",
    "wrong words": f"merge_method: linear\n{PAIR}\ndtype: bfloat61\nout_dtype: int8\n"
    "parameters: {normalize: maybe}",
    "a model twice": f"{SUMS}[{{model: ./in/m1}}, {{model: ./in/m1}}]",
    "coefficients elsewhere": f"merge_method: linear\n{PAIR}\ncoefficients: {{}}\nscope: all",
    "vectors without coefficients": "merge_method: atlas\nbase_model: builtin:tiny\n"
    "vectors: [none.safetensors]\nmodels: []",
    "linearised": "merge_method: atlas\nbase_model: ./in/m0\nvectors: []\ncoefficients: {}\n"
    "linearised: true",
    "atlas alone": "merge_method: atlas",
    "unknown vector": f"{ATLAS}coefficients: {{three: {{}}}}",
    "unknown block": f"{ATLAS}granularity: vector\ncoefficients: {{cars: {{al: 1.0}}}}",
    "unknown granularity": f"{ATLAS}granularity: layer\nscope: x\ncoefficients: {{}}",
    "infinite coefficients": f"{ATLAS}coefficients: {{cars: {{a: .inf, b: .nan}}}}",
    "coefficients of text": f"{ATLAS}coefficients: {{cars: {{a: big, b: null}}, 3: 4, x: 0.5}}",
    "coefficients of numbers": f"{ATLAS}coefficients: {{cars: {{3: 1.0, true: 2.0}}}}",
    "no such coefficients": f"{ATLAS}coefficients: nowhere.json",
    "coefficients of nothing": f"{ATLAS}coefficients: bad/tables/none.json",
    "coefficients of nonsense": f"{ATLAS}coefficients: bad/tables/nonsense.json",
    "coefficients of other shape": f"{ATLAS}coefficients: vectors/signs.safetensors",
    "another scope": f"{ATLAS}scope: text\ngranularity: vector\ncoefficients: {{cars: {{all: 1}}}}",
    "another base": "merge_method: atlas\nbase_model: ./cars\nvectors: [vectors/cars.safetensors]\n"
    "granularity: vector\ncoefficients: {cars: {all: 0.5}}",
    "another file": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    f"vectors: [{{file: vectors/cars.safetensors, name: cars, sha256: '{'00' * 32}'}}]\n"
    "coefficients: {cars: {all: 0.5}}",
    "another name": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    "vectors: [{file: vectors/cars.safetensors, name: bars}]\ncoefficients: {bars: {all: 0.5}}",
    "vectors of other types": "merge_method: atlas\nbase_model: 7\ncoefficients: [1]\n"
    "vectors: [7, {name: a}, {file: 1, name: 2, sha256: 3}, {fiel: x}]\ngroups: x\nlinearised: 1",
    "bad vector": "merge_method: atlas\nbase_model: builtin:tiny\ngranularity: vector\n"
    "vectors: [bad/vectors/nan.safetensors]\ncoefficients: {cars: {all: 0.5}}",
    "bad group": f"{ATLAS}groups: ['(']\ncoefficients: {{cars: {{}}}}",
    "locks of other types": f"merge_method: linear\n{PAIR}\n"
    "locked: {a: 1, b: {sha256: x}, c: {commit: 3}, d: {sha256: {e: 1}, more: 2}}",
    "another lock": f"{SUMS}[{{model: ./in/m1}}]\n"
    f"locked: {{./in/m1: {{sha256: {{model.safetensors: '{'00' * 32}'}}}}}}",
    "lock of what is gone": f"{SUMS}[{{model: ./in/m1}}]\n"
    f"locked: {{./in/m7: {{sha256: {{model.safetensors: '{'00' * 32}'}}}}}}",
    "models that do not fit": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/misfit2}}]",
    "models of two kinds": f"{SUMS}[{{model: ./in/m1}}, {{model: builtin:tiny}}]",
    "two dtypes": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/half2}}]",
    "nan": f"{SUMS}[{{model: ./in/m1}}, {{model: ./bad/nan2}}]",
    "nan in ties": "merge_method: ties\nbase_model: ./bad/nan1\nparameters: {weight: 1}\n"
    "models: [{model: ./in/m2}]",
    "infinite": f"{SUMS}[{{model: ./bad/inf1}}, {{model: ./in/m2}}]",
    "overflow": "merge_method: linear\nparameters: {weight: 1.0e+6, normalize: false}\n"
    "out_dtype: float16\nmodels: [{model: ./in/m1}, {model: ./in/m2}]",
    "a filter for few": "merge_method: linear\nmodels: [{model: ./in/m1, parameters: "
    "{weight: [{filter: mlp, value: 1}]}}]",
    "a whole model by layer": "merge_method: ties\nbase_model: ./in/b0\nmodels: [{model: ./in/b1}]"
    "\nparameters: {scope: model, weight: [0.1, 0.9], density: 0.3}",
    "density and epsilon": "merge_method: della\nbase_model: ./in/m0\nmodels: [{model: ./in/m1}]\n"
    "parameters: {weight: 1, density: 0.9, epsilon: 0.3}",
    "models that cancel out": "merge_method: multislerp\nmodels:\n"
    "- {model: ./in/m1, parameters: {weight: 1}}\n- {model: ./in/m2, parameters: {weight: -1}}",
    "offline": f"{SUMS}[{{model: me/one}}, {{model: me/two@main}}]",
    "an adapter that is none": "merge_method: passthrough\nmodels: [{model: ./in/m1+./in/m2}]",
    "an adapter of another": "merge_method: passthrough\nmodels: [{model: ./in/m1+./in/adapter}]",
}


def wrong_merges() -> Iterator[Case]:
    """Recipes of merges that are wrong, or whose models are."""
    for name, text in BROKEN.items():
        yield case(f"recipe merge: {name}", f"merge - -o out/x {ROOM}", stdin=text)
    for name in ("nan", "overflow"):
        line = f"merge - -o out/nonfinite-{name} --allow-nonfinite {ROOM}"
        yield case(f"merge allowing {name}", line, stdin=BROKEN[name])
    line = "merge recipes/merge/linear.yaml -o out/x --memory 100MB"
    yield case("merge in too little memory", f"{line} --threads 1")


PARAMETERS = (
    *words("weight density epsilon gamma scale threshold normalize rescale lambda int8_mask"),
    *words("scope rounding rescale_by elect zero_sign weigh divisor t nuslerp_flatten"),
    *words("nuslerp_row_wise normalize_weights eps max_iter tol filter_wise select_topk"),
    *words("alpha beta agreement common_space_fraction wieght"),
)


def wrong_parameters(work: Path) -> Iterator[Case]:
    """Every parameter of every method with a value of many kinds, for a model and for the merge."""
    values = {name: KINDS[name] for name in ("text", "less than zero", "a list of numbers", "null")}
    values |= {"a table": {"value": "x"}, "seven": 7, "infinite": math.inf, "true": True}
    values |= {"a gradient": [0, "x", 7], "filters": [{"filter": "a", "value": -1}, {"value": [2]}]}
    for path in sorted((work / "recipes" / "merge").glob("*.yaml")):
        for kind, value in values.items():
            table = dict.fromkeys(PARAMETERS, value)
            models = [{"model": "./in/m1", "parameters": table}, {"model": "./in/m2"}]
            keys = {"merge_method": path.stem, "base_model": "./in/m0", "models": models}
            text = as_yaml({**keys, "parameters": table})
            yield case(f"parameters {path.stem} of {kind}", "merge - -o out/x", stdin=text)
