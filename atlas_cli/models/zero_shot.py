"""The zero-shot classification head: class names and templates -> weights, cached by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from atlas_cli.errors import CheckpointError
from atlas_cli.io.checkpoint import open_safetensors, write_tensors
from atlas_cli.models.clip import Clip
from atlas_cli.sources.locate import cache_folder

Warn = Callable[[str], None]
_PROMPTS_AT_ONCE = 256


def zero_shot_head(
    clip: Clip, classes: Sequence[str], templates: Sequence[str], warn: Warn
) -> torch.Tensor:
    """The head's weights, (classes, width), from the cache if they are there."""
    path = cache_folder() / "heads" / f"{_key(clip, classes, templates)}.safetensors"
    if path.is_file():
        try:
            return open_safetensors(path)["weight"].read().to(clip.device)
        except (CheckpointError, KeyError):
            warn(f"{path}: damaged, computed again")
    weight = compute_head(clip, classes, templates)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, {"weight": weight.cpu()})
    except OSError as problem:
        warn(
            f"{path.parent}: cannot keep the zero-shot head: {problem.strerror}; "
            "set ATLAS_CACHE to a folder that can be written"
        )
    return weight


def compute_head(clip: Clip, classes: Sequence[str], templates: Sequence[str]) -> torch.Tensor:
    """exp(s) * norm(mean over templates of norm(text(template of class))), for every class.

    s is the model's logit scale. Logits are head @ norm(image features).
    """
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    features = []
    with torch.no_grad():
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            tokens = clip.tokenize(prompts[start : start + _PROMPTS_AT_ONCE]).to(clip.device)
            features.append(clip.module.encode_text(tokens, normalize=True))  # type: ignore[operator]
        means = torch.cat(features).reshape(len(classes), len(templates), -1).mean(dim=1)
        scale = clip.module.logit_scale.exp()  # type: ignore[operator]
        return (scale * F.normalize(means, dim=-1)).clone()


def _key(clip: Clip, classes: Sequence[str], templates: Sequence[str]) -> str:
    """A hash of all that decides the head: text tower, its configuration, names and templates."""
    digest = hashlib.sha256()
    for name, tensor in clip.module.state_dict().items():
        if not name.startswith("visual."):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    text = {**clip.config, "vision_cfg": None}
    digest.update(json.dumps([text, list(classes), list(templates)], sort_keys=True).encode())
    return digest.hexdigest()
