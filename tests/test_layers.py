"""Imports point to the left: this table says what each package may import."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "atlas_cli"
STANDARD = set(sys.stdlib_module_names)
WORLD = {"io", "os", "pathlib", "random", "shutil", "subprocess", "sys", "tempfile", "time"}
ANYONE = {"__version__", "errors", "registry"}

# package or top-level module -> (what of atlas it may import, libraries it may import)
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "registry": (set(), set()),
    "parallel": (set(), {"torch"}),
    "recipes": (set(), {"pydantic", "pydantic_core", "yaml"}),
    "io": (set(), {"blake3", "torch", "numpy", "safetensors", "xxhash"}),
    "sources": ({"io", "recipes"}, {"huggingface_hub"}),
    "native": ({"io"}, {"torch"}),
    "core": ({"native"}, {"torch", "numpy", "regex"}),
    "merge_methods": ({"core", "native"}, {"numpy", "torch"}),
    "datasets": (
        {"core", "io", "sources"},
        {"torch", "numpy", "PIL", "datasets", "huggingface_hub", "pyarrow"},
    ),
    "models": (
        {"core", "io", "parallel", "sources"},
        {"tokenizers", "torch"},
    ),
    "vectors": (
        {"core", "io", "merge_methods", "models", "parallel", "sources"},
        {"torch", "xxhash"},
    ),
    "learning": (
        {"core", "datasets", "io", "merge_methods", "models", "parallel", "recipes", "sources"}
        | {"vectors"},
        {"torch", "wandb"},
    ),
    "merging": (
        {"core", "io", "merge_methods", "models", "native", "parallel", "recipes", "sources"}
        | {"vectors"},
        {"torch"},
    ),
    "reports": (
        {"core", "datasets", "io", "learning", "models", "recipes", "sources", "vectors"},
        {"altair", "vl_convert"},
    ),
    "publishing": (
        {"io", "merging", "recipes", "reports", "sources", "vectors"},
        set(),
    ),
    "cli": (
        {"core", "datasets", "io", "learning", "merging", "models", "parallel", "recipes"}
        | {"publishing", "reports", "sources", "vectors"},
        {"rich", "typer"},
    ),
    "api": (
        {"datasets", "learning", "merging", "models", "publishing", "recipes", "sources"}
        | {"vectors"},
        set(),
    ),
    "__main__": ({"cli"}, set()),
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
LONGEST = 400  # lines of a file
WITHOUT_FILES = {"core", "merge_methods"}


def imports_of(path: Path) -> set[str]:
    """Dotted names a file imports, inside functions and late too; not only for the type checker."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "late":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        waiting += ast.iter_child_nodes(node)
    return names


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_a_module_imports_only_what_its_package_may():
    wrong = []
    for path in MODULES:
        layer = layer_of(path)
        inside, libraries = ALLOWED[layer]
        standard = STANDARD - WORLD if layer in WITHOUT_FILES else STANDARD
        for name in imports_of(path):
            first, _, rest = name.partition(".")
            if first == "atlas_cli":
                good = rest.split(".")[0] in inside | ANYONE | {layer}
            else:
                good = first in libraries | standard
            if not good:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_every_row_of_the_table_is_a_package_or_module():
    assert set(ALLOWED) == {layer_of(path) for path in MODULES}


def test_no_c_source_in_a_package_without_files_reads_or_writes_any():
    for layer in WITHOUT_FILES:
        sources = [*(PACKAGE / layer).rglob("*.c"), *(PACKAGE / layer).rglob("*.h")]
        assert not [
            path
            for path in sources
            if re.search(r"\b(open|pread|pwrite|fopen)\(", path.read_text())
        ]


def test_only_one_module_prints():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                raise AssertionError(f"{path} prints")


def test_no_file_is_long():
    lengths = {str(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_no_two_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_no_imports_go_in_a_circle_not_even_those_inside_functions():
    names = {_dotted(path): path for path in MODULES}
    waiting = {
        name: {found for full in imports_of(path) if (found := _module_in(full, names))} - {name}
        for name, path in names.items()
    }
    while free := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert waiting == {}


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module_in(full: str, names: dict[str, Path]) -> str | None:
    """The module of a dotted name: itself, or the one that it is a part of."""
    return next((name for name in (full, full.rpartition(".")[0]) if name in names), None)
