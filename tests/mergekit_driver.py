"""Merge given tensors with mergekit's own methods; run by the python that mergekit lives in.

    python mergekit_driver.py inputs.safetensors cases.json outputs.safetensors

Inputs are named set/base, set/0, set/1, ...; a case names a set, a method and its parameters.
What a random method keeps is drawn here by mergekit, or given as key/mask0, key/mask1, ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.registry import get
from safetensors.torch import load_file, save_file

BERNOULLI = torch.bernoulli


def merge(case: dict, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    models = [tensors[f"{case['set']}/{number}"] for number in range(case["models"])]
    base = [tensors[f"{case['set']}/base"]] if case["base"] else []
    group = TensorGroup.from_tensors(base + models, base_index=0 if base else None)
    torch.manual_seed(0)
    masks = iter([tensors[name] for name in sorted(tensors) if name.startswith(f"{case['key']}/")])
    if f"{case['key']}/mask0" in tensors:
        torch.bernoulli = lambda chances: next(masks).to(chances.dtype).view(chances.shape)
    else:
        torch.bernoulli = BERNOULLI
    (result,) = get(case["method"])((group,), parameters=case["parameters"])
    # Some methods widen short numbers; atlas rounds to the dtype of the tensors.
    return result.to(models[0].dtype).contiguous().clone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    inputs = load_file(sys.argv[1])
    cases = json.loads(Path(sys.argv[2]).read_text())
    save_file({case["key"]: merge(case, inputs) for case in cases}, sys.argv[3])
