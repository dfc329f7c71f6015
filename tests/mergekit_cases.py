"""What is merged by mergekit and by atlas: methods on tensors, and recipes on models.

What mergekit gave is kept in tests/fixtures, together with the tensors that it was given, which
other machines may draw with other last bits. make_fixtures.py makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).parent / "fixtures"
Tensors = dict[str, torch.Tensor]

# Methods --------------------------------------------------------------------------------------

SHAPES = {"matrix": (14, 24), "vector": (37,), "kernel": (4, 5, 3, 3)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETS = [f"{shape}-{dtype}" for shape in SHAPES for dtype in DTYPES]
WEIGHTS = {"weight": [0.7, 0.4, -0.2]}


@dataclass(frozen=True)
class Case:
    """A merge of a base, if there is one, and some models."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    models: int = 3
    base: bool = True

    def __str__(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in self.parameters.items())
        return f"{self.method}({given})x{self.models}{'+base' if self.base else ''}"


# Elementwise arithmetic: the same bits.
EXACT = [
    Case("linear", WEIGHTS, base=False),
    Case("linear", WEIGHTS | {"normalize": False}, base=False),
    Case("linear", {"weight": [1.0, 1.0, 1.0, 1.0]}, 4, base=False),
    Case("passthrough", {"scale": 0.3}, 1, base=False),
    Case("passthrough", {}, 1, base=False),
    Case("task_arithmetic", WEIGHTS),
    Case("task_arithmetic", WEIGHTS | {"normalize": True, "lambda": 0.7}),
    Case("task_arithmetic", {"weight": [1.0, -1.0], "normalize": False}, 2),
    Case("task_arithmetic", {"weight": [0.9]}, 1),
    Case("ties", WEIGHTS),
    Case("ties", {"weight": [1.0] * 4, "int8_mask": True}, 4),
    Case("ties", WEIGHTS | {"normalize": False, "lambda": 1.3}),
    Case("dare_ties", WEIGHTS),
    Case("dare_linear", WEIGHTS),
    Case("della", WEIGHTS),
    Case("della_linear", WEIGHTS),
    Case("breadcrumbs", WEIGHTS),
    Case("nearswap", {"t": 0.05}, 1),
    Case("nearswap", {"t": 0.3}, 1),
    Case("ram", {}),
    Case("ram", {"epsilon": 0.2}, 4),
    Case("arcee_fusion", {}, 1),
]
# Chosen by magnitude: the same bits, but for elements as large as the last one chosen.
CHOSEN = [
    Case("ties", WEIGHTS | {"density": [0.5, 0.2, 0.9]}),
    Case("ties", WEIGHTS | {"density": [1.0, 0.0, 0.001]}),
    Case("ties", WEIGHTS | {"density": 0.3, "normalize": False}),
    Case("breadcrumbs", WEIGHTS | {"density": 0.5, "gamma": [0.01, 0.1, 0.7]}),
    Case("breadcrumbs", WEIGHTS | {"density": [0.9, 0.3, 0.0], "gamma": 0.0}),
    Case("breadcrumbs_ties", WEIGHTS | {"density": [0.5, 0.2, 0.9], "gamma": 0.1}),
    Case("sce", {"select_topk": 0.3, "int8_mask": True}),
    Case("sce", {"select_topk": 0.9}, 4),
]
# By chance: the same numbers, given what is kept.
KEPT = {"density": [0.5, 0.3, 0.8]}
DRAWN = [
    Case("dare_linear", WEIGHTS | KEPT),
    Case("dare_linear", WEIGHTS | KEPT | {"rescale": False}),
    Case("dare_ties", WEIGHTS | KEPT),
    Case("della", WEIGHTS | KEPT),
    Case("della", WEIGHTS | KEPT | {"normalize": False, "lambda": 0.8}),
    Case("della_linear", WEIGHTS | KEPT | {"epsilon": 0.1}),
]
# Through a norm or an angle of the whole tensor.
MEASURED = [
    Case("slerp", {"t": 0.3}, 1),
    Case("slerp", {"t": 1.4}, 1),
    Case("nuslerp", {"weight": [0.3, 0.7]}, 2),
    Case("nuslerp", {"weight": [1.0, -1.0]}, 2, base=False),
    Case("nuslerp", {"weight": [2.0, 0.5], "nuslerp_flatten": False}, 2),
    Case("nuslerp", {"weight": [1.0, 0.5], "nuslerp_flatten": False}, 2, base=False),
    Case("nuslerp", {"weight": [1.0, 0.5], "nuslerp_flatten": False, "nuslerp_row_wise": True}, 2),
    Case("multislerp", {"weight": [0.5, 0.3, 0.9]}),
    Case("multislerp", {"weight": [0.5, 0.3, 0.9], "normalize_weights": False}, base=False),
    Case("multislerp", {"weight": [1.0]}, 1),
    Case("karcher", {}, base=False),
    Case("karcher", {}, 4, base=False),
    Case("karcher", {"max_iter": 2, "tol": 1e-3}, 2, base=False),
    Case("karcher", {}, 1, base=False),
    Case("model_stock", {}),
    Case("model_stock", {}, 4),
    Case("model_stock", {"filter_wise": True}),
    Case("sce", {}),
    Case("sce", {"select_topk": 0.0}),
    Case("ramplus_tl", {}),
    Case("ramplus_tl", {"r": 0.5, "alpha": 3.0, "epsilon": 0.2}, 4),
]
METHODS = [*EXACT, *CHOSEN, *DRAWN, *MEASURED]


def key_of(case: Case, chosen: str) -> str:
    return f"{case}@{chosen}"


# Recipes --------------------------------------------------------------------------------------

LAYERS = 4
GRADIENT = {"weight": [0.2, 0.9, 0.5]}
FILTERED = {"weight": [{"filter": "self_attn", "value": 0.3}, {"filter": "mlp", "value": [0, 1]}]}
FILTERED["weight"].append({"value": 0.5})


def plain(*models: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("a", "b", "c")
    return [
        {"model": name, "parameters": given} for name, given in zip(names, models, strict=False)
    ]


RECIPES: dict[str, dict[str, Any]] = {
    "linear": {"models": plain({"weight": 0.7}, {"weight": 0.4})},
    "linear_gradient": {"merge_method": "linear", "models": plain(GRADIENT, {"weight": 0.5})},
    "linear_filter": {"merge_method": "linear", "models": plain(FILTERED, {"weight": [1, 0]})},
    "slerp": {"models": plain({}, {}), "base_model": "a", "parameters": {"t": 0.3}},
    "slerp_gradient": {
        "merge_method": "slerp",
        "models": plain({}, {}),
        "base_model": "a",
        "parameters": {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
                {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
                {"value": 0.5},
            ]
        },
    },
    "task_arithmetic": {"models": plain({"weight": 0.6}, {"weight": -1.4}), "base_model": "base"},
    "task_arithmetic_gradient": {
        "merge_method": "task_arithmetic",
        "models": plain({"weight": 0.6}, GRADIENT),
        "base_model": "base",
    },
    "ties": {
        "models": plain({"weight": 0.6, "density": 0.5}, {"weight": 0.3, "density": 0.7}),
        "base_model": "base",
        "parameters": {"normalize": True, "lambda": 0.9},
    },
    "breadcrumbs": {
        "models": plain(*[{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2),
        "base_model": "base",
    },
    "model_stock": {"models": plain({}, {}, {}), "base_model": "base"},
    "nuslerp": {"models": plain({"weight": 0.4}, {"weight": 0.6})},
    "sce": {
        "models": plain({}, {}, {}),
        "base_model": "base",
        "parameters": {"select_topk": 0.6},
    },
    "multislerp": {"models": plain(*({"weight": w} for w in (0.5, 0.3))), "base_model": "base"},
    "karcher": {"models": plain({}, {}, {})},
    "passthrough": {"models": plain({"scale": 0.3})},
    "breadcrumbs_ties": {
        "models": plain(*[{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2),
        "base_model": "base",
    },
}
# What is drawn by chance is compared in test_mergekit_methods.py; here nothing is dropped.
RECIPES |= {
    name: {"models": plain(*({"weight": w} for w in (0.6, 0.2, -0.3))), "base_model": "base"}
    for name in ("dare_linear", "dare_ties", "della", "della_linear")
}


def any_gradient(found: Any) -> bool:
    """Whether a list of numbers is anywhere in it."""
    if isinstance(found, dict):
        return any(map(any_gradient, found.values()))
    return isinstance(found, list) and (
        isinstance(found[0], int | float) or any(map(any_gradient, found))
    )


# mergekit knows no layers in a bare file, so that a gradient has no meaning there.
FLAT = [name for name, recipe in RECIPES.items() if not any_gradient(recipe)]
# All tensors of a small Llama.
LLAMA = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}
_LAYER = {
    "input_layernorm.weight": (4,),
    "mlp.down_proj.weight": (4, 6),
    "mlp.gate_proj.weight": (6, 4),
    "mlp.up_proj.weight": (6, 4),
    "post_attention_layernorm.weight": (4,),
    "self_attn.k_proj.weight": (2, 4),
    "self_attn.o_proj.weight": (4, 4),
    "self_attn.q_proj.weight": (4, 4),
    "self_attn.v_proj.weight": (2, 4),
}
LLAMA_SHAPES = {
    "lm_head.weight": (16, 4),
    "model.embed_tokens.weight": (16, 4),
    "model.norm.weight": (4,),
    **{f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in _LAYER.items()},
}
# Weights of some of CLIP's shapes, as a bare file.
RAW_SHAPES = {
    "logit_scale": (),
    "positional_embedding": (6, 8),
    "text_projection": (8, 5),
    "visual.class_embedding": (8,),
    "visual.conv1.weight": (8, 3, 2, 2),
    "visual.transformer.resblocks.0.attn.in_proj_weight": (24, 8),
    "visual.transformer.resblocks.0.ln_1.weight": (8,),
}
MODELS = {
    f"{kind}-{dtype}": shapes
    for kind, shapes in (("llama", LLAMA_SHAPES), ("raw", RAW_SHAPES))
    for dtype in ("float32", "bfloat16")
}


def joined(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All tensors of a model as one vector, by name."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def parted(vector: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The tensors of a model again."""
    names = sorted(shapes)
    pieces = vector.split([torch.Size(shapes[name]).numel() for name in names])
    return {n: piece.view(shapes[n]).clone() for n, piece in zip(names, pieces, strict=True)}


def fixture(name: str) -> Tensors:
    """What is kept under a name."""
    return load_file(FIXTURES / f"{name}.safetensors")
