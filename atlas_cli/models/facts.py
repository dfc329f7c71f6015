"""What is in a model: its tensors, counted, and where it came from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from atlas_cli.errors import UsageError
from atlas_cli.models import transformers_config
from atlas_cli.models.clip import check_activation, read_blueprint
from atlas_cli.models.folders import CONFIG, Blueprint, read_tensors
from atlas_cli.sources.locate import Source


@dataclass(frozen=True)
class TensorFacts:
    """One tensor, unread."""

    dtype: str
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class ModelFacts:
    """One model, told in open_clip's names. Nothing is known of the architecture of a bare file."""

    model: str
    parameters: int
    dtypes: dict[str, int]
    bytes: int
    architecture: dict[str, Any] | None
    activation: str | None
    commit: str | None
    sha256: dict[str, str]
    tensors: dict[str, TensorFacts]


def describe_model(source: Source, architecture: str | None = None) -> ModelFacts:
    """Count the tensors of a model without reading them, and say where it came from."""
    tensors = {
        name: TensorFacts(
            str(tensor.dtype).removeprefix("torch."), tensor.shape, math.prod(tensor.shape)
        )
        for name, tensor in read_tensors(source).items()
    }
    config = _config(source, architecture)
    found = source.provenance()
    return ModelFacts(
        model=source.reference.text,
        parameters=sum(tensor.parameters for tensor in tensors.values()),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors.values())),
        bytes=sum(path.stat().st_size for path in source.weights),
        architecture=config,
        activation=_activation(config),
        commit=source.commit,
        sha256=found["sha256"],  # type: ignore[arg-type]
        tensors=tensors,
    )


def _config(source: Source, architecture: str | None) -> dict[str, Any] | None:
    try:
        return read_blueprint(source, architecture).model
    except UsageError:  # a bare weight file, and no --arch
        return None


def _activation(config: dict[str, Any] | None) -> str | None:
    return None if config is None else "quick_gelu" if config.get("quick_gelu") else "gelu"


def read_architecture(source: Source, architecture: str | None = None) -> dict[str, Any]:
    """Architecture and activation alone, for work that never preprocesses an image."""
    config = source.config("config.json")
    beside = source.config(CONFIG)
    if architecture or config is None or beside or source.reference.kind == "open_clip":
        return read_blueprint(source, architecture).model
    model = transformers_config.model_config(config, source.reference.text)
    check_activation(source, Blueprint(model, {}), "its configuration")
    return model
