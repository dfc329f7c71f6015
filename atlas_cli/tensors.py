"""Named tensors that have not been read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LazyTensor:
    """A named tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


LazyTensors = Mapping[str, LazyTensor]
