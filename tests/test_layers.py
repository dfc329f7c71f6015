"""Imports point to the left: this table says what each part of the package may import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "atlas_cli"
STANDARD = set(sys.stdlib_module_names)
WORLD = {"io", "os", "pathlib", "random", "shutil", "subprocess", "sys", "tempfile", "time"}

# module or folder -> (modules of atlas it may import, libraries it may import)
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "files": ({"errors"}, set()),
    "cache": ({"files"}, set()),
    "builtin": ({"builtin", "errors"}, {"numpy"}),
    "recipe": ({"errors"}, {"yaml"}),
    "learning_recipe": ({"errors", "recipe"}, set()),
    "finetune_recipe": ({"errors", "learning_recipe", "names"}, set()),
    "coefficients": (set(), set()),
    "method_table": (set(), set()),
    "settings": ({"errors", "method_table"}, set()),
    "vector_files": ({"builtin", "errors"}, set()),
    "learned_checks": ({"coefficients", "errors", "vector_files"}, set()),
    "merge_checks": ({"errors", "learned_checks", "method_table", "settings", "sources"}, set()),
    "merge_recipe": ({"errors", "merge_checks", "method_table", "recipe"}, set()),
    "merge_schema": ({"merge_checks", "method_table"}, set()),
    "core": ({"core", "errors"}, {"torch", "numpy", "xxhash"}),
    "tensors": ({"core"}, {"torch"}),
    "vision": (set(), {"torch"}),
    "hub": ({"errors"}, {"huggingface_hub"}),
    "sources": ({"builtin", "cache", "errors", "hub", "vision"}, set()),
    "pickles": ({"pickles", "errors", "tensors"}, {"torch", "numpy"}),
    "checkpoint": ({"core", "errors", "files", "pickles", "tensors"}, {"torch", "safetensors"}),
    "layouts": ({"errors", "tensors"}, {"torch"}),
    "data": ({"builtin", "errors"}, set()),
    "names": ({"data"}, set()),
    "images": ({"builtin", "data", "errors"}, {"PIL"}),
    "batches": ({"data", "errors", "images"}, {"torch", "PIL"}),
    "models": (
        {"batches", "checkpoint", "errors", "layouts", "sources", "tensors", "vision"},
        {"torch"},
    ),
    "headers": ({"checkpoint", "errors"}, set()),
    "vectors": ({"checkpoint", "core", "errors", "headers", "tensors"}, {"torch"}),
    "lora": ({"core", "errors", "layouts", "models", "sources", "tensors"}, set()),
    "lora_torch": ({"core", "errors", "models", "tensors"}, set()),
    "linearised": ({"errors", "tensors"}, {"torch"}),
    "differences": (
        {"checkpoint", "core", "errors", "layouts", "linearised", "lora", "lora_torch", "models"}
        | {"sources", "tensors", "vectors"},
        {"torch"},
    ),
    "hashes": ({"cache", "core"}, {"torch"}),
    "bases": ({"errors", "hashes", "models", "sources", "tensors", "vectors"}, set()),
    "labels": ({"bases", "checkpoint", "differences", "errors", "headers", "sources"}, set()),
    "extract": (
        {"bases", "checkpoint", "core", "differences", "errors", "files", "labels", "sources"}
        | {"headers", "vectors"},
        {"torch"},
    ),
    "trim": ({"checkpoint", "core", "errors", "headers", "vector_files", "vectors"}, {"torch"}),
    "workers": (set(), {"torch"}),
    "describe": ({"checkpoint", "core", "headers", "sources", "vectors", "workers"}, set()),
    "census": ({"errors", "models", "sources"}, set()),
    "compare": ({"core", "errors", "vectors", "workers"}, {"torch"}),
    "demo": (set(), set()),
    "grids": ({"core"}, set()),
    "plots": ({"errors", "files"}, {"matplotlib"}),
    "records": ({"checkpoint", "coefficients", "errors", "recipe"}, set()),
    "charts": ({"errors", "files"}, {"altair", "vl_convert"}),
    "pages": ({"charts", "coefficients", "grids", "pages", "records"}, {"vl_convert"}),
    "heads": ({"cache", "checkpoint", "errors", "models"}, {"torch"}),
    "evaluate": (
        {"batches", "core", "data", "errors", "heads", "models", "sources"},
        {"torch"},
    ),
    "pixels": ({"batches", "core", "data", "errors", "images"}, {"torch", "numpy", "PIL"}),
    "pools": (
        {"core", "errors", "headers", "sources", "tensors", "vector_files", "vectors"},
        {"torch"},
    ),
    "towers": ({"core"}, {"torch"}),
    "norms": ({"core", "towers"}, {"torch"}),
    "learn": ({"errors", "towers"}, {"torch"}),
    "streams": ({"core", "learn", "pixels", "towers"}, {"torch"}),
    "selection": ({"core", "errors", "learn", "pixels", "streams", "towers"}, {"torch"}),
    "joint": ({"pixels", "selection", "streams", "towers"}, {"torch"}),
    "runs": ({"checkpoint", "errors", "files"}, {"torch"}),
    "resuming": ({"errors", "learn", "runs", "selection"}, {"torch"}),
    "learning": (
        {"coefficients", "core", "data", "errors", "heads", "learning_recipe", "models", "pixels"}
        | {"names", "norms", "pools", "recipe", "selection", "sources", "streams", "towers"},
        {"torch"},
    ),
    "blind": ({"core", "learn", "pixels", "streams", "towers"}, {"torch"}),
    "tta": (
        {"blind", "core", "errors", "learn", "learning", "learning_recipe", "pixels", "selection"}
        | {"streams"},
        {"torch"},
    ),
    "online": (
        {"blind", "core", "errors", "learn", "learning", "pixels", "selection", "towers", "tta"},
        {"torch"},
    ),
    "tuned": (
        {"bases", "checkpoint", "extract", "learning", "recipe", "sources", "vectors"},
        {"torch"},
    ),
    "classwise": ({"learning", "pixels", "streams"}, {"torch"}),
    "tunable": ({"errors", "norms", "towers"}, {"torch"}),
    "adapters": ({"errors", "towers", "tunable"}, {"torch"}),
    "model_folders": ({"checkpoint", "errors", "merging", "models"}, {"torch"}),
    "finetune": (
        {"adapters", "core", "errors", "finetune_recipe", "heads", "learn", "learning", "names"}
        | {"model_folders", "models", "pixels", "resuming", "runs", "selection", "streams"}
        | {"towers", "tunable"},
        {"torch"},
    ),
    "fit": ({"joint", "learning", "selection", "streams"}, set()),
    "negate": ({"core", "joint", "learning", "learning_recipe", "selection", "streams"}, {"torch"}),
    "add": (
        {"core", "joint", "learning", "learning_recipe", "pixels", "selection", "streams"},
        {"torch"},
    ),
    "contest": (
        {
            "add",
            "core",
            "errors",
            "learning",
            "learning_recipe",
            "method_table",
            "pools",
            "selection",
        }
        | {"settings", "streams", "vectors"},
        {"torch"},
    ),
    "merging": (
        {"checkpoint", "core", "errors", "layouts", "lora", "merge_recipe", "merging", "models"}
        | {"method_table", "pools", "recipe", "settings", "sources", "tensors", "vectors"}
        | {"vector_files"},
        {"torch"},
    ),
    "merge": (
        {"checkpoint", "core", "errors", "files", "layouts", "merge_recipe", "merging", "tensors"},
        set(),
    ),
    "export": ({"data", "errors", "images"}, set()),
    "__main__": ({"commands"}, set()),
    "commands": (
        {"add", "coefficients", "contest", "fit", "hub", "learning", "learning_recipe", "negate"}
        | {"finetune", "finetune_recipe", "names"}
        | {"online", "resuming", "runs", "selection", "settings", "trim", "tta", "tuned"}
        | {"merge", "merge_recipe", "merge_schema", "merging"}
        | {"builtin", "commands", "data", "errors", "evaluate", "export", "files", "models"}
        | {"bases", "core", "differences", "extract"}
        | {"census", "compare", "describe", "grids", "plots", "recipe", "sources", "vectors"}
        | {"charts", "classwise", "demo", "names", "pages", "records", "vector_files", "vision"},
        {"typer", "rich"},
    ),
}


def imports_of(path: Path) -> set[str]:
    """Dotted names a file imports, also inside functions; not those for the type checker."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return names


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    inside, libraries = ALLOWED[layer]
    standard = STANDARD - WORLD if layer == "core" else STANDARD
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "atlas_cli":
            assert parts[1] in inside | {"__version__"}, f"{layer} imports {name}"
        else:
            assert parts[0] in libraries | standard, f"{layer} imports {name}"


def test_every_row_of_the_table_is_a_module():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert set(ALLOWED) == found


def test_only_one_module_prints():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                raise AssertionError(f"{path} prints")
