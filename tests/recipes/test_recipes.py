"""Every recipe we ship is valid, says what runs it, and every key is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atlas_cli.errors import UsageError
from atlas_cli.recipes.evaluation import EvalRecipe
from atlas_cli.recipes.finetune import FinetuneRecipe
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.learned import LearnedRecipe
from atlas_cli.recipes.learning import AddRecipe, LearnRecipe, NegateRecipe
from atlas_cli.recipes.merge import read_merge
from atlas_cli.recipes.model import read_recipe
from atlas_cli.recipes.schema import json_schema, key_table
from atlas_cli.recipes.text import parse_mapping
from atlas_cli.recipes.tta import TtaRecipe
from atlas_cli.registry import MERGE_METHODS, POST_STEPS

ROOT = Path(__file__).parent.parent.parent
SCHEMAS = {"eval": EvalRecipe, "fit": FitRecipe, "negate": NegateRecipe, "add": AddRecipe}
SCHEMAS |= {"tta": TtaRecipe, "finetune": FinetuneRecipe}
LEARNING = (FitRecipe, NegateRecipe, AddRecipe, TtaRecipe)
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_valid_and_names_the_command_that_runs_it(path: Path):
    text = path.read_text("utf-8")
    found = re.search(rf"^#     atlas (\w+) recipes/{path.name}", text, re.MULTILINE)
    assert found
    read_recipe(SCHEMAS[found[1]], text, path.name)


def test_the_recipe_for_the_builtin_model_runs(call, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = call("eval", "recipes/eval.yaml", "--shots", "1")
    assert result.code == 0
    assert len(result.out.splitlines()) == 10


def test_every_key_is_explained():
    _, *sections = (ROOT / "recipes/README.md").read_text().split("\n## ")
    sections = [text for text in sections if not text.startswith("`atlas merge`")]
    schemas = (EvalRecipe, FinetuneRecipe, LearnRecipe, *LEARNING, LearnedRecipe)
    for section, schema in zip(sections, schemas, strict=True):
        keys, _, _ = section.partition("\n\nSelection")
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", keys, re.MULTILINE)
        shared = LearnRecipe.model_fields if schema in LEARNING else ()
        own = {key: row for key, row in key_table(schema).items() if key not in shared}
        assert rows == [(key, *row) for key, row in own.items()]


def test_the_json_schema_of_a_recipe_has_ranges_choices_and_defaults():
    keys = json_schema(TtaRecipe)["properties"]
    assert [*keys] == [*TtaRecipe.model_fields]
    rate = "Learning rate of AdamW; 0.03, for LayerNorms 0.003, for `sar` 0.3."
    assert keys["lr"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1e30,
        "description": rate,
        "default": 0.03,
    }
    assert keys["select"]["enum"] == ["guard", "last"]
    assert keys["trusted_per_class"]["minimum"] == 1
    assert json_schema(FitRecipe)["required"] == ["model", "data"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys and values, found NoneType"),
        ("- a", "expected keys and values, found list"),
        ("models: [a\n", "not valid YAML on line 2"),
        ("models: [a]\nmodels: [b]\ndata: [c]", "line 2: key 'models' is given twice"),
        ("models: [a]\ndata: [c]\nspilt: test", "unknown key 'spilt'; did you mean 'split'?"),
        ("models: [1]\ndata: [c]", r"recipe.models[0]: expected str, found int"),
        ("models: [a]\ndata: [c]\nseed: 1.5", "recipe.seed: expected int, found float"),
        ("models: [a]", "key 'data' is missing"),
        ("models: !!python/object:os.system [a]", "not valid YAML on line 1"),
        ("? [a]\n: b", "not valid YAML on line 1"),
        ("models: \x00", "not valid YAML"),
    ],
)
def test_a_broken_recipe_says_what_is_wrong(text: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        read_recipe(EvalRecipe, text)


def test_an_alias_bomb_does_not_go_off():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(UsageError):
        read_recipe(EvalRecipe, "\n".join(lines))


def test_the_recipe_of_fine_tuning_runs(call, tmp_path: Path):
    path = ROOT / "recipes" / "finetune.yaml"
    quick = ("--steps", "2", "--shots", "4", "--batch-size", "16", "--quiet")
    result = call("finetune", path, *quick, "--vectors-dir", tmp_path / "vectors")
    assert result.code == 0, result.err
    made = [Path(line) for line in result.out.splitlines()]
    assert [file.stem for file in made] == ["digits", "signs", "counts"]
    assert all(file.is_file() for file in made)


@pytest.mark.parametrize(
    ("command", "recipe", "quick"),
    [
        ("fit", "few_shot", ("--shots", "2")),
        ("negate", "negate", ("--shots", "2")),
        ("add", "add", ("--shots", "2")),
        ("tta", "tta", ("--split", "val")),
    ],
)
def test_a_recipe_of_learning_runs(call, command: str, recipe: str, quick: tuple[str, ...]):
    """With fewer steps than it asks for."""
    path = ROOT / "recipes" / f"{recipe}.yaml"
    steps = ("--epochs", "1", "--min-steps", "2", "--batch-size", "16")
    result = call(command, path, *quick, *steps, "--quiet")
    assert result.code == 0 or "nothing lowered" in result.err, result.err
    assert read_recipe(LearnedRecipe, result.out).base_model == "builtin:tiny"


MERGES = sorted((ROOT / "recipes" / "merge").glob("*.yaml"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models a step away from the built-in one, and the task vectors of two such steps."""
    import shutil

    import torch
    from makers import write_moved_tiny
    from safetensors.torch import load_file, save_file

    from atlas_cli.sources.locate import builtin_model

    folder = tmp_path_factory.mktemp("tuned")
    for seed, name in enumerate(("cars", "signs"), start=1):
        shutil.copytree(builtin_model("tiny"), folder / name)
        random = torch.Generator().manual_seed(seed)
        path = folder / name / "open_clip_model.safetensors"
        moved = {
            key: (tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=random))).to(
                tensor.dtype
            )
            for key, tensor in load_file(path).items()
        }
        save_file(moved, path, {"format": "pt"})
        write_moved_tiny(folder / "vectors" / f"{name}.safetensors", seed=seed)
    return folder


def test_every_merge_method_has_a_recipe():
    assert {path.stem for path in MERGES} == {*MERGE_METHODS, *POST_STEPS}


@pytest.mark.parametrize("path", MERGES, ids=lambda path: path.stem)
def test_a_merge_recipe_runs_on_tiny_models(
    path: Path, call, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tuned)
    text = path.read_text("utf-8")
    assert f"#     atlas merge recipes/merge/{path.name} -o merged\n" in text
    found = read_merge(text)
    assert path.stem in (found.method, *(found.recipe.post or {}))
    result = call("merge", path, "-o", tmp_path / "merged", "--memory", "8GB")
    assert result.code == 0, result.err
    assert call("inspect", tmp_path / "merged").code == 0


def _merge_keys() -> str:
    """Half a kilobyte in which every line merges nine times the one before it."""
    lines = ["k0: &a {x: 1}"]
    for number in range(1, 12):
        before, own = chr(96 + number), chr(97 + number)
        lines.append(f"k{number}: &{own} {{<<: [{', '.join([f'*{before}'] * 9)}]}}")
    return "\n".join([*lines, f"<<: *{own}"])


def test_a_text_that_would_become_too_much_is_refused_before_it_does():
    for text, problem in {
        _merge_keys(): "too many nodes",
        f"models: [{', '.join(['1'] * 700_000)}]": "too many nodes",
        f"models: {'[' * 5000}": "nodes within nodes too deep",
        "models: &a [*a]": "is within what it stands for",
    }.items():
        with pytest.raises(UsageError, match=f"not valid YAML on line \\d+: .*{problem}"):
            parse_mapping(text, "recipe")


ODD = (
    *("9" * 5000, "2024-99-99", "!!int abc", "!!float x", "2024-01-01T99:99:99"),
    *("!!timestamp x", "!!bool x", "!!int ''"),
)


def test_scalars_that_are_none_are_one_line():
    for scalar in ODD:
        with pytest.raises(
            UsageError, match=r"not valid YAML on line 1: '.{0,43}' is no"
        ) as problem:
            parse_mapping(f"seed: {scalar}", "recipe")
        assert len(str(problem.value)) < 200


@pytest.mark.parametrize("weight", ["1e308", f"1{'0' * 400}", "1e400", ".nan"])
def test_weights_beyond_all_measure_are_one_line(call, tmp_path: Path, weight: str):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "merge_method: linear\nmodels: [{model: builtin:tiny}, {model: builtin:tiny}]\n"
        f"parameters: {{weight: {weight}}}\n"
    )
    result = call("merge", recipe, "-o", tmp_path / "out")
    assert result.code in (1, 2)
    assert all(line.startswith("atlas: error: ") for line in result.error_lines), result.err
    assert not (tmp_path / "out").exists()
