"""Recipes of merges: what they mean, and everything that can be wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from imports import outcomes

from atlas_cli.errors import UsageError
from atlas_cli.recipes.merge import Merge, MergeRecipe, split_adapter
from atlas_cli.recipes.merge import read_merge as read_with
from atlas_cli.recipes.merge_parameters import depths_of, resolve, value_of
from atlas_cli.recipes.schema import key_table, merge_schema
from atlas_cli.sources.locate import source_problems

ROOT = Path(__file__).parent.parent.parent
TINY = "builtin:tiny"
ONE = "parameters: {weight: 1}"
TWO = f"models: [{{model: builtin:tiny, {ONE}}}, {{model: ./m, {ONE}}}]"


def read_merge(text: str) -> Merge:
    return read_with(text, check_source=source_problems)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
    return tmp_path


# Parameters -----------------------------------------------------------------------------------


def test_a_scalar_holds_for_every_tensor():
    assert value_of(0.3, "a", 0.7) == 0.3


@pytest.mark.parametrize(("depth", "value"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.5), (1, 0)])
def test_a_gradient_is_interpolated_between_its_nearest_values(depth: float, value: float):
    assert value_of([0, 1, 0], "a", depth) == value


def test_the_first_filter_in_the_name_wins_and_an_entry_without_one_is_the_default():
    setting = [{"filter": "attn", "value": [0, 1]}, {"filter": "a", "value": 2}, {"value": 3}]
    assert value_of(setting, "x.attn.y", 0.5) == 0.5
    assert value_of(setting, "bath", 0.5) == 2
    assert value_of(setting, "mlp", 0.5) == 3
    assert value_of(setting[:1], "mlp", 0.5) is None


def test_a_star_is_a_filter_for_all():
    assert value_of([{"filter": "*", "value": 4}], "mlp", 0.0) == 4


def test_the_most_special_table_that_says_something_decides():
    levels = [{"w": [{"filter": "mlp", "value": 1}]}, {"w": 2}, {"w": 3}]
    assert resolve(levels, "w", "mlp", None) == 1
    assert resolve(levels, "w", "attn", None) == 2
    assert resolve(levels, "v", "attn", None) is None


def test_depth_counts_the_layers_of_each_tower_and_the_rest_has_none():
    names = ["a.0.w", "a.1.w", "a.2.w", "b.0.w", "head"]
    wanted = {"a.0.w": 0.0, "a.1.w": 0.5, "a.2.w": 1.0, "b.0.w": 1.0, "head": None}
    assert depths_of(names) == wanted


# Normal form ----------------------------------------------------------------------------------


def test_one_slice_of_all_layers_is_a_list_of_models():
    merge = read_merge(
        "slices: [{sources: [{model: ./m, layer_range: [0, 4]}, {model: ./n, layer_range: [0, 4]}],"
        " parameters: {t: 0.2}}]\nmerge_method: slerp\nbase_model: ./m\nparameters: {t: 0.9}"
    )
    (part,) = merge.parts
    assert (merge.layout, part.base, part.ranges) == ("./m", "./m", {"./m": (0, 4), "./n": (0, 4)})
    assert [model for model, _ in part.models] == ["./n"]
    assert resolve(part.levels, "t", "x", None) == 0.2


def test_a_base_is_no_model_for_methods_that_need_one_and_one_of_them_for_linear():
    text = (
        "{}\nbase_model: ./m\nmodels: [{{model: ./m}}, {{model: ./n}}]\nparameters: {{weight: 1}}"
    )
    (ties,) = read_merge(text.format("merge_method: task_arithmetic")).parts
    assert (ties.base, [model for model, _ in ties.models]) == ("./m", ["./n"])
    (linear,) = read_merge(text.format("merge_method: linear")).parts
    assert (linear.base, [model for model, _ in linear.models]) == (None, ["./m", "./n"])


def test_an_adapter_follows_a_plus():
    assert split_adapter("owner/name@main+./m") == ("owner/name@main", "./m")
    assert split_adapter("./m") == ("./m", None)


# Twenty broken recipes ------------------------------------------------------------------------

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
ARITHMETIC = (
    "merge_method: ties\nbase_model: ./m\nmodels:\n  - {model: ./n, parameters: {weight: 1, "
)
BROKEN = {
    "unknown method": (
        f"merge_method: tise\n{TWO}",
        ["unknown method 'tise'; did you mean 'ties'?"],
    ),
    "misspelt key": (
        f"merge_method: linear\n{TWO}\ndtyp: float32\noutdtype: float32",
        ["unknown key 'dtyp'; did you mean 'dtype'?", "'outdtype'; did you mean 'out_dtype'?"],
    ),
    "wrong type": (
        f"merge_method: linear\n{TWO}\nseed: one",
        ["recipe.seed: expected int, found str"],
    ),
    "alias bomb": (BOMB, ["not valid YAML on line 6: too many nodes"]),
    "key twice": (
        f"merge_method: linear\nmerge_method: ties\n{TWO}",
        ["'merge_method' is given twice"],
    ),
    "missing base": (
        "merge_method: slerp\nmodels: [{model: ./m}]\nparameters: {t: 0.5}",
        ["key 'base_model' is missing; slerp needs it"],
    ),
    "no models": ("merge_method: linear\nmodels: []", ["expected 1 or more models, found 0"]),
    "negative density": (
        ARITHMETIC + "density: -0.5}}",
        ["models[0].parameters.density: expected 0 or more, found -0.5"],
    ),
    "density in a filter": (
        ARITHMETIC + "density: [{filter: mlp, value: [0, 7]}]}}",
        ["models[0].parameters.density[0].value[1]: expected 1 or less, found 7"],
    ),
    "unknown key of a filter": (
        ARITHMETIC + "density: [{fitler: mlp, value: 1}]}}",
        ["density[0]: unknown key 'fitler'; did you mean 'filter'?"],
    ),
    "filter without value": (
        ARITHMETIC + "density: [{filter: mlp}]}}",
        ["density[0]: key 'value' is missing"],
    ),
    "a python object": (
        "merge_method: !!python/object/apply:os.getcwd []",
        ["not valid YAML on line 1"],
    ),
    "unreadable references": (
        "merge_method: linear\nparameters: {weight: 1}\n"
        "models: [{model: ./nowhere}, {model: builtin:tny}, {model: a b/c}]",
        [
            "models[0].model: no such file or folder: ./nowhere",
            "models[1].model: unknown model 'builtin:tny'; did you mean 'tiny'?",
            "models[2].model: 'a b/c' is no model reference",
        ],
    ),
    "missing and unknown parameters": (
        "merge_method: linear\nmodels: [{model: ./m, parameters: {wieght: 1}}, {model: ./n}]",
        [
            "models[0].parameters: unknown parameter 'wieght'; did you mean 'weight'?",
            "models[0]: parameter 'weight' is missing",
            "models[1]: parameter 'weight' is missing",
        ],
    ),
    "what mergekit has and atlas has not": (
        f"merge_method: linear\n{TWO}\nexperts: []\ngate_mode: random",
        [
            "'experts' is not supported: mergekit-moe builds mixtures of experts",
            "'gate_mode' is not supported",
        ],
    ),
    "a word of the wrong kind": (
        f"merge_method: linear\n{TWO}\ndtype: bfloat61\nparameters: {{normalize: maybe}}",
        [
            "'bfloat61'; did you mean 'bfloat16'?",
            "normalize: expected true or false, found 'maybe'",
        ],
    ),
    "a model twice": (
        "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: ./m}, {model: ./m}]",
        ["recipe.models: ./m is given twice"],
    ),
    "vectors without coefficients": (
        "merge_method: atlas\nbase_model: builtin:tiny\nvectors: [none.safetensors]\nmodels: []",
        [
            "key 'coefficients' is missing; merge_method atlas needs it",
            "'models' has no meaning with merge_method atlas",
            "recipe.vectors: no such task vector: none.safetensors",
        ],
    ),
    "linearised": (
        "merge_method: atlas\nbase_model: ./m\nvectors: []\ncoefficients: {}\nlinearised: true",
        ["learned for the first-order expansion", "recipe.vectors: names no task vector"],
    ),
    "vectors that are no list": (
        "merge_method: atlas\nbase_model: builtin:tiny\nvectors: 3\ncoefficients: {}",
        ["recipe.vectors: expected a list, found int"],
    ),
    "models that are null": (
        "merge_method: linear\nmodels: null",
        ["expected either 'models', 'slices' or 'modules'"],
    ),
    "a base without a name": (
        "merge_method: atlas\nbase_model: ''\nvectors: [builtin:letters]\ncoefficients: {}",
        ["key 'base_model' is missing; merge_method atlas needs it"],
    ),
    "coefficients elsewhere": (
        f"merge_method: linear\n{TWO}\ncoefficients: {{}}",
        ["belongs to merge_method atlas"],
    ),
    "nothing": ("", ["expected keys and values, found NoneType"]),
}


@pytest.mark.parametrize(("text", "messages"), BROKEN.values(), ids=[*BROKEN])
def test_a_broken_recipe_is_told_everything_at_once(text: str, messages: list[str]):
    with pytest.raises(UsageError) as caught:
        read_merge(text)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages), lines
    for message in messages:
        assert any(message in line for line in lines), (message, lines)


def test_broken_recipes_end_with_code_2_and_all_lines_without_torch():
    found = outcomes({text: ["merge", "-", "-o", "out"] for text, _ in BROKEN.values()})
    for (name, (_, messages)), outcome in zip(BROKEN.items(), found, strict=True):
        assert (outcome.code, outcome.heavy) == (2, []), (name, outcome)
        lines = outcome.err.splitlines()
        assert len(lines) == len(messages), name
        assert all(line.startswith("atlas: error: stdin") for line in lines), lines
    assert len(BROKEN) >= 20


# The table, the schema and the words -----------------------------------------------------------


def test_the_schema_has_the_keys_of_the_recipe():
    assert [*merge_schema()["properties"]] == [*MergeRecipe.model_fields]


def section() -> str:
    text = (ROOT / "recipes/README.md").read_text("utf-8")
    return text.partition("\n## `atlas merge`\n")[2].partition("\n## ")[0]


def test_every_key_is_explained_as_in_the_schema():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", section(), re.MULTILINE)
    keys = key_table(MergeRecipe)
    assert [row for row in rows if row[0] in keys] == [(key, *row) for key, row in keys.items()]


def test_the_schema_is_printed_as_json(call):
    result = call("merge", "--schema")
    assert result.code == 0
    assert json.loads(result.out) == merge_schema()


def test_a_dtype_has_a_long_and_a_short_spelling():
    from atlas_cli.recipes.merge_checks import DTYPES, dtype_problem, long_dtype
    from atlas_cli.vectors.targets import plain_dtype

    for long, short in (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")):
        for name in (long, short, f"torch.{long}"):
            assert (long_dtype(name), plain_dtype(name)) == (long, short)
            assert dtype_problem(name) is None
        assert long in DTYPES
    assert "expected float32" in (dtype_problem("float8") or "")
    assert plain_dtype("int8") == "int8"
