"""atlas: learn, merge and evaluate task vectors of CLIP models.

The verbs of the command line are functions here, with the few values that they take and give:

    import atlas_cli as atlas

    run = atlas.fit("photos/", model="ViT-B-32/openai", vectors=["v/"], shots=4)
    atlas.merge(run, "mine")

Everything is imported on first use, so that `import atlas_cli` stays quick and free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atlas_cli.api import (
        add,
        compose,
        evaluate,
        extract,
        finetune,
        fit,
        merge,
        negate,
        push,
        tta,
    )
    from atlas_cli.datasets.dataset import Dataset, Sample
    from atlas_cli.errors import (
        AtlasError,
        CheckpointError,
        DataError,
        MismatchError,
        UnreachableError,
        UsageError,
    )
    from atlas_cli.learning.evaluate import ModelScore
    from atlas_cli.learning.finetune import FinetuneResult
    from atlas_cli.learning.results import LearningResult
    from atlas_cli.merge_methods.method import Parameter, merge_method
    from atlas_cli.merging.merge import Merged
    from atlas_cli.models.clip import Clip
    from atlas_cli.registry import dataset_kind, granularity, objective
    from atlas_cli.vectors.task_vector import TaskVector

__all__ = [
    "AtlasError",
    "CheckpointError",
    "Clip",
    "DataError",
    "Dataset",
    "FinetuneResult",
    "LearningResult",
    "Merged",
    "MismatchError",
    "ModelScore",
    "Parameter",
    "Sample",
    "TaskVector",
    "UnreachableError",
    "UsageError",
    "add",
    "compose",
    "dataset_kind",
    "evaluate",
    "extract",
    "finetune",
    "fit",
    "granularity",
    "merge",
    "merge_method",
    "negate",
    "objective",
    "push",
    "tta",
]

# The module of each name; the imports above are for type checkers.
_EXPORTS = {
    **dict.fromkeys(
        ("add", "compose", "evaluate", "extract", "finetune", "fit", "merge", "negate"),
        "atlas_cli.api",
    ),
    **dict.fromkeys(("push", "tta"), "atlas_cli.api"),
    **dict.fromkeys(("Dataset", "Sample"), "atlas_cli.datasets.dataset"),
    **dict.fromkeys(
        ("AtlasError", "CheckpointError", "DataError", "MismatchError"), "atlas_cli.errors"
    ),
    **dict.fromkeys(("UnreachableError", "UsageError"), "atlas_cli.errors"),
    "ModelScore": "atlas_cli.learning.evaluate",
    "FinetuneResult": "atlas_cli.learning.finetune",
    "LearningResult": "atlas_cli.learning.results",
    **dict.fromkeys(("Parameter", "merge_method"), "atlas_cli.merge_methods.method"),
    "Merged": "atlas_cli.merging.merge",
    "Clip": "atlas_cli.models.clip",
    **dict.fromkeys(("dataset_kind", "granularity", "objective"), "atlas_cli.registry"),
    "TaskVector": "atlas_cli.vectors.task_vector",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'atlas_cli' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
