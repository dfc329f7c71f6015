"""What is wrong with recipes: the same sentences, in the same order, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from atlas_cli.errors import UsageError
from atlas_cli.recipes.evaluation import EvalRecipe
from atlas_cli.recipes.finetune import FinetuneRecipe
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.learned import LearnedRecipe
from atlas_cli.recipes.learning import AddRecipe, NegateRecipe
from atlas_cli.recipes.merge import read_merge
from atlas_cli.recipes.model import check_recipe, read_recipe
from atlas_cli.recipes.tta import TtaRecipe
from atlas_cli.sources.locate import source_problems

SCHEMAS = {
    **{"eval": EvalRecipe, "fit": FitRecipe, "negate": NegateRecipe, "add": AddRecipe},
    **{"tta": TtaRecipe, "finetune": FinetuneRecipe, "learned": LearnedRecipe},
}
CASES = yaml.safe_load(Path(__file__).with_name("problems.yaml").read_text("utf-8"))


def read(command: str, recipe: str | None, flags: dict) -> object:
    if command == "merge":
        return read_merge(recipe, "r.yaml", source_problems)
    if recipe is None:
        return check_recipe(SCHEMAS[command], flags, "--")
    return read_recipe(SCHEMAS[command], recipe, "r.yaml", flags)


def test_every_problem_keeps_its_sentence_and_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m", "n"):
        Path(name).mkdir()
    Path("v.safetensors").touch()
    for case in CASES:
        with pytest.raises(UsageError) as caught:
            read(case["command"], case.get("recipe"), case.get("flags", {}))
        assert str(caught.value).splitlines() == case["problems"].splitlines(), case


def test_a_number_stays_as_it_is_written():
    recipe = read_recipe(FitRecipe, "data: d\nmodel: m\nvectors: [v]\nlr: 1\nclip: 2.0\n")
    assert str(recipe.model_dump()["lr"]) == "1"
    assert str(recipe.model_dump()["clip"]) == "2.0"


def test_flags_repair_the_values_of_a_recipe_but_not_its_types():
    text = "data: d\nmodel: m\nvectors: [v]\nlr: {}\n"
    assert read_recipe(FitRecipe, text.format(-1), flags={"lr": 0.5}).lr == 0.5
    with pytest.raises(UsageError, match=r"^recipe\.lr: expected float, found str$"):
        read_recipe(FitRecipe, text.format("x"), flags={"lr": 0.5})
