"""Whether two merges that keep the largest elements differ only where magnitudes are equal.

An independent reading of the formula: differences to the base in the dtype of the recipe, and how
many of them are kept in each tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def differ_only_in_ties(stem: Path, document: dict[str, Any], read: Any) -> bool:
    """Whether every element that differs is as large as the last one kept, or the first one cut.

    For recipes of `models`. A tensor of n elements keeps int(density n) of them, the largest, or
    those that come after the gamma n largest. `read` gives the tensors of folders by common names.
    """
    dtype = getattr(torch, document.get("dtype") or "float32")
    paths = [Path(one["model"]) for one in document["models"]]
    results = (Path(f"{stem}.{who}") for who in ("atlas", "mergekit"))
    ours, theirs, given, *models = read(*results, Path(document["base_model"]), *paths)
    base = {name: tensor.to(dtype) for name, tensor in given.items()}
    tied = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in base.items()}
    for entry, model in zip(document["models"], models, strict=True):
        for name, tensor in model.items():
            sizes = (tensor.to(dtype) - base[name]).abs().float()
            for limit in _limits(sizes, name, entry, document, base):
                tied[name] |= sizes == limit
    return all(torch.equal(t[~tied[n]], ours[n][~tied[n]]) for n, t in theirs.items())


def sce_is_nearer(stem: Path, document: dict[str, Any], read: Any) -> bool:
    """Whether sce's result is as near to its formula in float64 as mergekit's is, each to its own.

    What a result selects shows in the elements whose variance is that of the last one selected.
    """
    dtype = getattr(torch, document.get("dtype") or "float32")
    paths = [Path(one["model"]) for one in document["models"]]
    results = [Path(f"{stem}.{who}") for who in ("atlas", "mergekit")]
    *both, base, first, second = read(*results, Path(document["base_model"]), *paths)
    share, errors = document["parameters"]["select_topk"], [0.0, 0.0]
    for name, tensor in both[1].items():
        center = base[name].to(dtype)
        deltas = torch.stack([one[name].to(dtype) - center for one in (first, second)])
        spread = torch.var(deltas, dim=0, unbiased=False)
        last = spread.flatten().sort(descending=True).values[int((spread != 0).sum() * share) - 1]
        for number, result in enumerate((both[0][name], tensor)):
            kept = (spread > last) | ((spread == last) & (result != center))
            wanted = center.double() + _fused(deltas.double() * kept)
            errors[number] += float((result.double() - wanted).norm() ** 2)
    return errors[0] <= errors[1]


def _fused(deltas: torch.Tensor) -> torch.Tensor:
    """The mean of task vectors over those of the elected sign, weighted by their squares."""
    squares = deltas.square().flatten(1).mean(1)
    weights = (squares / squares.sum()).view(-1, *[1] * (deltas.dim() - 1))
    elected = (deltas.sum(0) >= 0).double() * 2 - 1
    weights = weights * (deltas.sign() == elected)
    return (deltas * weights).sum(0) / weights.sum(0).clamp(min=1e-6)


def _limits(
    sizes: torch.Tensor,
    name: str,
    entry: dict[str, Any],
    document: dict[str, Any],
    names: Any,
) -> list[float]:
    """The magnitudes of the last elements that are kept, at either end."""
    density = _value("density", 1.0, name, entry, document, names)
    count, kept = sizes.numel(), max(1, int(density * sizes.numel()))
    if density >= 1:
        return []
    ordered = sizes.flatten().sort(descending=True).values
    if not document["merge_method"].startswith("breadcrumbs"):
        return [float(ordered[kept - 1])]
    gamma = _value("gamma", 0.01, name, entry, document, names)
    first = count - max(0, count - kept - int(gamma * count)) - kept
    return [float(ordered[n]) for n in (first, first + kept - 1) if 0 <= n < count]


def _value(key: str, default: float, name: str, entry: Any, document: Any, names: Any) -> float:
    """A parameter of a tensor; lists run over the layers."""
    for table in (entry.get("parameters") or {}, document.get("parameters") or {}):
        if key in table:
            given = table[key]
            break
    else:
        return default
    if isinstance(given, int | float):
        return float(given)
    layers = [int(n.split(".layers.")[1].split(".")[0]) for n in names if ".layers." in n]
    layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
    if layer is None:
        return float(given[0] if "embed" in name else given[-1])
    place = layer / max(layers) * (len(given) - 1)
    low = min(int(place), len(given) - 2)
    return float(given[low] + (place - low) * (given[low + 1] - given[low]))
