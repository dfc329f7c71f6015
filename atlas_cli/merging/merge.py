"""A recipe and the files behind it -> one model in a folder, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_cli.errors import AtlasError
from atlas_cli.io.checkpoint import header_text
from atlas_cli.io.files import write_text
from atlas_cli.io.tensors import LazyTensors
from atlas_cli.merging.execute import Limits, check_device, check_memory, run
from atlas_cli.merging.inputs import Located, check_fit, open_layout, open_like
from atlas_cli.merging.learned import open_learned
from atlas_cli.merging.lockfile import (
    check_hashes,
    identity_of,
    lock_text,
    locked,
    promised_hashes,
    take_hashes,
    written_hashes,
)
from atlas_cli.merging.model_card import Evaluated, Shown, card_text
from atlas_cli.merging.plan import Plan, Resolved, check_together, lay_out, plan_files, resolve_all
from atlas_cli.merging.produce import ByMethod, Conversion, Model, Producer
from atlas_cli.merging.staging import MANIFEST, StagingFolder, check_space, check_target
from atlas_cli.models.folders import companion_files, copy_companion_files
from atlas_cli.models.tensor_names import is_clip, is_transformers
from atlas_cli.recipes.merge import Merge
from atlas_cli.registry import MERGE_METHODS

_HASHERS = 2
_KEY = "atlas_recipe"


@dataclass(frozen=True)
class MergeRequest:
    """What is to be merged, and where to."""

    merge: Merge
    located: Mapping[str, Located]
    target: Path
    limits: Limits = field(default_factory=Limits)
    shard: int = 5_000_000_000
    force: bool = False
    evaluation: Evaluated | None = None


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that is ready to be written: all inputs opened and found to fit."""

    request: MergeRequest
    maker: Producer
    plan: Plan
    resolved: Mapping[str, Resolved]
    peak: int

    @property
    def read(self) -> int:
        """The bytes of the tensors that are read, once each."""
        found = self.request.located.values()
        return sum(path.stat().st_size for one in found for path in one.model.weights)

    @property
    def copied(self) -> list[str]:
        """The files of the base that go with the weights."""
        layout = self.request.located[self.request.merge.layout]
        return [path.name for path in companion_files(layout.model)]


@dataclass(frozen=True)
class Merged:
    """A model that was written. Shown as its path, or as JSON."""

    model: str
    method: str
    tensors: int
    parameters: int
    bytes: int
    files: dict[str, str]

    def __str__(self) -> str:
        return self.model


# Opening --------------------------------------------------------------------------------------


def prepare(request: MergeRequest) -> PreparedMerge:
    """Open every header, check that all fits, and plan every byte. Reads no values of models."""
    merge, located = request.merge, request.located
    layout = Model(merge.layout, open_layout(merge.layout, located[merge.layout]))
    maker, resolved, names = _maker(request, layout)
    clip = is_clip(layout.tensors) and not is_transformers(layout.tensors)
    # open_clip looks for one file of this name.
    stem, limit = ("open_clip_model", 1 << 62) if clip else ("model", request.shard)
    groups = lay_out(layout.tensors, names, merge, limit=limit, stem=stem)
    promise = locked(merge, located, promised_hashes(merge, located))
    plan = plan_files(groups, _metadata(promise))
    check_device(plan, request.limits)
    return PreparedMerge(request, maker, plan, resolved, check_memory(plan, maker, request.limits))


def _maker(request: MergeRequest, layout: Model) -> tuple[Producer, dict[str, Resolved], list[str]]:
    """How values are made, the parameters by tensor, and the tensors that are merged at all."""
    merge, limits = request.merge, request.limits
    how = Conversion(merge.recipe.seed, limits.device, limits.allow_nonfinite)
    if merge.method == "atlas":
        source = request.located[merge.layout].model
        learned = open_learned(merge.recipe, source, layout, how)
        return learned, {}, [name for name in layout.tensors if learned.changes(name)]
    names = [n for n, t in layout.tensors.items() if t.dtype.is_floating_point and 0 not in t.shape]
    opened: dict[str, LazyTensors] = {merge.layout: layout.tensors}
    for reference in merge.references:
        if reference not in opened:
            opened[reference] = open_like(reference, request.located[reference], layout.tensors)
    check_fit(layout.tensors, opened, cast=merge.recipe.dtype is not None)
    resolved = resolve_all(merge, names)
    models = tuple(Model(reference, opened[reference]) for reference, _ in merge.models)
    base = Model(merge.base, opened[merge.base]) if merge.base else None
    method = MERGE_METHODS[merge.method]
    maker = ByMethod(method, layout, base, models, resolved, how)
    if maker.together:
        check_together(merge, resolved, {layout.tensors[name].dtype for name in names})
    return maker, resolved, names


def _metadata(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {_KEY: json.dumps(recipe, sort_keys=True, ensure_ascii=False)}


# Writing --------------------------------------------------------------------------------------


def write(prepared: PreparedMerge, advance: Callable[[int], None] = lambda count: None) -> Merged:
    """Write the model. What a stopped run left behind is gone on with."""
    request, plan = prepared.request, prepared.plan
    merge, located, target = request.merge, request.located, request.target
    check_target(target, force=request.force)
    check_space(target, plan.bytes)
    with ThreadPoolExecutor(_HASHERS) as pool:
        taken = pool.submit(take_hashes, merge, located, pool)
        if merge.recipe.locked:
            check_hashes(merge, taken.result())
        try:
            part = StagingFolder(
                target,
                identity_of(merge, located, plan, request.limits.device.type),
                {s.file: s.bytes for s in plan.shards},
            )
        except OSError as problem:
            raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem
        try:
            run(plan, prepared.maker, part, request.limits, advance)
            _finish(prepared, part, locked(merge, located, taken.result()))
        except OSError as problem:
            part.abandon()
            raise AtlasError(f"{target}: cannot be written: {problem.strerror}") from problem
        except AtlasError:
            part.abandon()
            raise
        finally:
            part.close()
    return _merged(prepared)


def _finish(prepared: PreparedMerge, part: StagingFolder, recipe: dict[str, Any]) -> None:
    """Write headers and all that stands beside the weights, and give the folder its name."""
    for number, shard in enumerate(prepared.plan.shards):
        metadata = {**(_metadata(recipe) if number == 0 else {}), "format": "pt"}
        text = header_text(shard.entries, metadata).ljust(shard.header)
        part.write_bytes(shard.file, 0, shard.header.to_bytes(8, "little") + text)
    request = prepared.request
    copy_companion_files(request.located[request.merge.layout].model, part.folder, _dtype(prepared))
    if (index := prepared.plan.index) is not None:
        listed = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(part.folder / "model.safetensors.index.json", listed)
    write_text(part.folder / MANIFEST, lock_text(recipe))
    card = card_text(request.merge, recipe, request.located, _shown(prepared, part))
    write_text(part.folder / "README.md", card)
    part.finish()


def _shown(prepared: PreparedMerge, part: StagingFolder) -> Shown | None:
    """The evaluation of the card, if there is one: weights are hashed to find what is of them."""
    request = prepared.request
    if request.evaluation is None:
        return None
    digests = written_hashes(prepared.plan, part.folder)
    return Shown(request.evaluation, request.target.absolute().name, digests)


def _dtype(prepared: PreparedMerge) -> str | None:
    """The dtype of the result, if the recipe sets it."""
    recipe = prepared.request.merge.recipe
    word = recipe.out_dtype or recipe.dtype
    return word.removeprefix("torch.") if word else None


def _merged(prepared: PreparedMerge) -> Merged:
    plan, request = prepared.plan, prepared.request
    return Merged(
        str(request.target),
        request.merge.method,
        len(plan.outputs),
        sum(output.size for output in plan.outputs),
        plan.bytes,
        {shard.file: str(request.target / shard.file) for shard in plan.shards},
    )
