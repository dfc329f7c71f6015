"""The recipe of `eval`."""

from __future__ import annotations

from typing import Annotated

from atlas_cli.recipes.model import Architecture, Recipe, Templates, TextModel, about


class EvalRecipe(Recipe):
    """What `atlas eval` compares: models and datasets, and how both are read."""

    models: Annotated[
        list[str], about("Model references. The first is what the others are compared with.")
    ]
    data: Annotated[
        list[str], about("Data references; `builtin:all` stands for every built-in task.")
    ]
    split: Annotated[
        str | None,
        about(
            "`train`, `val` or `test`. Without it: `test`, else `val`, else the folder as it is."
        ),
    ] = None
    templates: Templates = []
    shots: Annotated[
        int | None, about("Take this many images of every class, drawn by the seed.")
    ] = None
    arch: Architecture = None
    text: TextModel = None
    seed: Annotated[int, about("Decides everything that is random; 0 if it is not given.")] = 0
