"""A recipe comes back as it was written, and all that is wrong with one is said at once."""

from __future__ import annotations

import math
import re
import struct

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atlas_cli.errors import UsageError
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.learned import LearnedRecipe, VectorEntry
from atlas_cli.recipes.learning import ADAMERGING, AddRecipe, NegateRecipe, parse_penalty
from atlas_cli.recipes.model import check_recipe, parse_bytes, parse_shots, read_recipe
from atlas_cli.recipes.text import MANY, to_table, write_recipe

# Recipes of fit -------------------------------------------------------------------------------

FIT = {"data": "shots", "model": "builtin:tiny", "vectors": ["v.safetensors"]}
WRONG = {
    "vectors": ([], "names no task vector, found []"),
    "shots": ("many", "expected a number of images, a fraction or all, found 'many'"),
    "select": ("best", "expected last, holdout, kfold or val:DATA, found 'best'"),
    "granularity": ("layer", "expected block, vector, qkv or partition:K, found 'layer'"),
    "augment": ("mirror", "expected flip, crop, slight or none, found 'mirror'"),
    "groups": (["("], "not a regular expression, found ['(']"),
    "penalty": ("l3:1", "expected l1:WEIGHT or l2:WEIGHT, found 'l3:1'"),
    "memory": ("lots", "expected a size such as 2GiB or 500MB, found 'lots'"),
    "epochs": (0, "expected more than 0, found 0"),
    "batch_size": (-1, "expected more than 0, found -1"),
    "accumulate": (0, "expected more than 0, found 0"),
    "min_steps": (0, "expected more than 0, found 0"),
    "lr": (0.0, "expected more than 0, found 0.0"),
    "clip": (-1.0, "expected more than 0, found -1.0"),
    "weight_decay": (-0.1, "expected 0 or more, found -0.1"),
    "seed": (-1, "expected 0 or more, found -1"),
}


SEVERAL = {**FIT, "data": ["a", "b"]}
OWN = {
    "keep": (NegateRecipe, 0.0, "expected more than 0, such as 0.95, found 0.0"),
    "forget": (NegateRecipe, "all", "expected unlikelihood, ascent, uniform, found 'all'"),
    "method": (NegateRecipe, "isotropic", "expected learned or search, found 'isotropic'"),
    "select": (NegateRecipe, "val:x", "expected same, val, last, holdout or kfold, found 'val:x'"),
    "data": (AddRecipe, [], "names no task, found []"),
    "objective": (AddRecipe, "loss", "expected labels or entropy, found 'loss'"),
    "clamp": (AddRecipe, "1:0", "expected LOW:HIGH, such as 0:1, found '1:0'"),
    "ties": (AddRecipe, 2.0, "expected a share such as 0.2, found 2.0"),
    "individual": (
        AddRecipe,
        ["a"],
        "expected DATA=ACCURACY in percent, such as builtin:digits=98.5, found ['a']",
    ),
    "init": (AddRecipe, math.inf, "expected a finite number, found inf"),
}


@pytest.mark.parametrize("key", OWN)
def test_a_wrong_value_of_negate_or_add_is_reported_with_its_key(key: str):
    schema, value, message = OWN[key]
    control = {"control": "c"} if schema is NegateRecipe else {}
    with pytest.raises(UsageError) as problem:
        check_recipe(schema, {**SEVERAL, **control, key: value}, "--")
    assert str(problem.value) == f"--{key}: {message}"


def test_entropy_has_the_defaults_of_adamerging_and_what_is_given_wins():
    recipe = check_recipe(AddRecipe, {**SEVERAL, "objective": "entropy", "lr": 0.5})
    assert recipe.lr == 0.5
    assert (recipe.init, recipe.clamp, recipe.weight_decay) == (0.3, "0:1", 0.0)
    assert all(getattr(recipe, key) == value for key, value in ADAMERGING.items() if key != "lr")


def test_isotropic_is_one_coefficient_for_each_vector():
    assert check_recipe(AddRecipe, {**SEVERAL, "method": "isotropic"}).granularity == "vector"


def test_the_defaults_of_a_fit_are_right():
    assert check_recipe(FitRecipe, FIT) == FitRecipe(**FIT)


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_of_a_fit_is_reported_with_its_key(key: str):
    value, message = WRONG[key]
    with pytest.raises(UsageError) as problem:
        check_recipe(FitRecipe, {**FIT, key: value}, "--")
    assert str(problem.value) == f"--{key}: {message}"


def test_all_wrong_values_of_a_fit_are_reported_at_once():
    with pytest.raises(UsageError) as problem:
        check_recipe(FitRecipe, {**FIT, **{key: value for key, (value, _) in WRONG.items()}})
    assert str(problem.value).splitlines() == [f"{k}: {text}" for k, (_, text) in WRONG.items()]


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_is_refused(key: str, value: float):
    with pytest.raises(UsageError, match=f"^{key}: expected"):
        check_recipe(FitRecipe, {**FIT, key: value})


def test_a_clip_that_is_infinite_clips_nothing_and_is_right():
    check_recipe(FitRecipe, {**FIT, "clip": math.inf})


@pytest.mark.parametrize(
    ("text", "shots"),
    [("all", None), (4, 4), ("4", 4), (4.0, 4), (0.25, 0.25), ("0.25", 0.25), (1, 1)],
)
def test_shots_are_a_number_a_fraction_or_all(text: str | int | float, shots: object):
    assert parse_shots(text) == shots
    check_recipe(FitRecipe, {**FIT, "shots": text})


@pytest.mark.parametrize("text", [0, -1, 1.5, "1.5", "", "half", "nan", "inf", math.nan, math.inf])
def test_other_shots_are_refused(text: str | int | float):
    with pytest.raises(UsageError, match=r"^shots: expected"):
        check_recipe(FitRecipe, {**FIT, "shots": text})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("2GiB", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2g", 2_000_000_000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("GiB", None),
        ("-1GiB", None),
        ("1PB", None),
        ("1i", None),
        ("", None),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int | None):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("l1:1", (1, 1.0)),
        ("l2:0.01", (2, 0.01)),
        ("l2:.5", (2, 0.5)),
        ("l1:1e-3", (1, 1e-3)),
        ("l1:", (0, 0.0)),
        ("l1:-1", (0, 0.0)),
        ("l1:nan", (0, 0.0)),
        ("l0:1", (0, 0.0)),
        ("1", (0, 0.0)),
    ],
)
def test_penalties_are_a_norm_and_a_weight(text: str, found: tuple[int, float]):
    assert parse_penalty(text) == found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr: fast", "recipe.lr: expected float, found str"),
        ("epochs: 2.5", "recipe.epochs: expected int, found float"),
        ("linearised: 1", "recipe.linearised: expected bool, found int"),
        ("epochs: true", "recipe.epochs: expected int, found bool"),
        ("shots: [1]", "recipe.shots: expected str or int or float, found list"),
        ("groups: [a, 2]", "recipe.groups[1]: expected str, found int"),
        ("split: 3", "recipe.split: expected str, found int"),
        ("epoch: 3", "unknown key 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_a_wrong_type_in_a_fit_is_named(line: str, message: str):
    text = f"data: d\nmodel: m\nvectors: [v]\n{line}\n"
    with pytest.raises(UsageError, match=re.escape(message)):
        read_recipe(FitRecipe, text)


def test_a_whole_number_is_a_good_rate():
    recipe = read_recipe(FitRecipe, "data: d\nmodel: m\nvectors: [v]\nlr: 1\n")
    assert recipe.lr == 1


# Learned recipes ------------------------------------------------------------------------------

SHA = "ab" * 32
LEARNED = LearnedRecipe(
    merge_method="atlas",
    base_model="builtin:tiny",
    vectors=[VectorEntry(name="cars", file="v/cars.safetensors", sha256=SHA)],
    coefficients={"cars": {"visual.proj": 0.25}},
)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(recipe: LearnedRecipe, comment: str = "Learned.") -> LearnedRecipe:
    return read_recipe(LearnedRecipe, write_recipe(recipe, comment))


def test_a_learned_recipe_reads_like_this():
    assert write_recipe(LEARNED, "From 8 images.\nSeed 0.") == (
        "# From 8 images.\n"
        "# Seed 0.\n"
        "merge_method: atlas\n"
        "base_model: builtin:tiny\n"
        "vectors:\n"
        "- name: cars\n"
        "  file: v/cars.safetensors\n"
        f"  sha256: {SHA}\n"
        "coefficients:\n"
        "  cars:\n"
        "    visual.proj: 0.25\n"
        "granularity: block\n"
        "groups: []\n"
        "linearised: false\n"
        "scope: visual\n"
        "seed: 0\n"
    )


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=3))
def test_a_table_comes_back_exactly_whatever_its_names_and_numbers(table: dict):
    rows = [list(row.values()) for row in table.values()]
    tidy = {
        vector: to_table([vector], list(row), [values])[vector]
        for (vector, row), values in zip(table.items(), rows, strict=True)
    }
    found = round_trip(LEARNED.model_copy(update={"coefficients": tidy}))
    assert found.coefficients == tidy
    for row, wanted in zip(found.coefficients.values(), rows, strict=True):
        assert [struct.pack("f", value) for value in row.values()] == [
            struct.pack("f", value) for value in wanted
        ]


@given(NAMES, NAMES, NAMES, st.lists(NAMES, max_size=3), st.integers(0, 2**63))
def test_names_and_paths_come_back_exactly(
    base: str, name: str, file: str, groups: list[str], seed: int
):
    recipe = LearnedRecipe(
        merge_method="atlas",
        base_model=base,
        vectors=[VectorEntry(name=name, file=file, sha256=SHA)],
        coefficients=file,
        granularity="qkv",
        groups=groups,
        linearised=True,
        seed=seed,
    )
    assert round_trip(recipe) == recipe


@pytest.mark.parametrize(
    "name",
    ["on", "null", "1e3", "0x1F", "<<", "=", "~", "2026-11-16", "1:30", "a: b", "- a", "#", ""],
)
def test_names_that_yaml_takes_for_something_else_stay_names(name: str):
    entry = VectorEntry(name=name, file=name, sha256=name)
    recipe = LEARNED.model_copy(update={"vectors": [entry], "coefficients": {name: {name: 1e-07}}})
    assert round_trip(recipe) == recipe


def test_a_table_of_the_largest_size_that_is_kept_as_text_is_read():
    table = {f"v{n}": {f"block {b}": b / 7 for b in range(MANY // 10)} for n in range(10)}
    recipe = LEARNED.model_copy(update={"coefficients": table})
    assert round_trip(recipe).coefficients == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "x"}, "recipe.seed: expected int, found str"),
        ({"vectors": "v"}, "recipe.vectors: expected a list, found str"),
        ({"vectors": ["v"]}, "recipe.vectors[0]: expected keys and values, found str"),
        ({"vectors": [{"name": "a", "file": "b"}]}, "recipe.vectors[0]: key 'sha256' is missing"),
        (
            {"vectors": [{"name": "a", "file": "b", "sha256": 7}]},
            "recipe.vectors[0].sha256: expected str, found int",
        ),
        (
            {"vectors": [{"name": "a", "file": "b", "sha265": "c"}]},
            "recipe.vectors[0]: unknown key 'sha265'; did you mean 'sha256'?",
        ),
        ({"coefficients": [1]}, "recipe.coefficients: expected keys and values or str, found list"),
        (
            {"coefficients": {"cars": 0.5}},
            "recipe.coefficients.cars: expected keys and values, found float",
        ),
        (
            {"coefficients": {"cars": {"a": "big"}}},
            "recipe.coefficients.cars.a: expected float, found str",
        ),
        (
            {"coefficients": {"cars": {"a": None}}},
            "recipe.coefficients.cars.a: expected float, found NoneType",
        ),
        ({"coefficients": {3: {"a": 1.0}}}, "recipe.coefficients.3: expected a name, found int"),
        ({"coefficients": {"v": {True: 1.0}}}, "recipe.coefficients.v.True: expected a name"),
        ({"merge_method": None}, "recipe.merge_method: expected str, found NoneType"),
    ],
)
def test_a_wrong_type_in_a_learned_recipe_is_named_with_its_path(change: dict, message: str):
    found = yaml.safe_dump({**LEARNED.model_dump(), **change})
    with pytest.raises(UsageError) as problem:
        read_recipe(LearnedRecipe, found)
    assert str(problem.value).startswith(message)
    assert len(str(problem.value).splitlines()) <= 2


def test_all_that_is_wrong_with_a_learned_recipe_is_reported_at_once():
    text = "merge_method: 1\nvectors: [{name: 2}]\ncoefficients: {a: {b: c, d: e}}\n"
    with pytest.raises(UsageError) as problem:
        read_recipe(LearnedRecipe, text, "learned.yaml")
    assert sorted(str(problem.value).splitlines()) == [
        "learned.yaml.coefficients.a.b: expected float, found str",
        "learned.yaml.coefficients.a.d: expected float, found str",
        "learned.yaml.merge_method: expected str, found int",
        "learned.yaml.vectors[0].name: expected str, found int",
        "learned.yaml.vectors[0]: key 'file' is missing",
        "learned.yaml.vectors[0]: key 'sha256' is missing",
        "learned.yaml: key 'base_model' is missing",
    ]
