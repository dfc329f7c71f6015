"""What a merge reads: models brought to the same names and tensors, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.io.files import write_text
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.adapters import CONFIG, MergedAdapter, are_adapters, merge_adapters
from atlas_cli.merging.plan import (
    Resolved,
    check_fit,
    check_together,
    dtype_of,
    open_layout,
    open_like,
    promoted,
    resolve_all,
)
from atlas_cli.merging.post import ByPostSteps, with_post_steps
from atlas_cli.merging.produce import ByMethod, BySegment, Conversion, Producer, open_learned
from atlas_cli.merging.provenance import TOKENIZER, Located, tokenizer_of
from atlas_cli.merging.segments import (
    Model,
    Segment,
    changed_config,
    check_outputs,
    left_out,
    restacked,
    segments_of,
)
from atlas_cli.merging.vocabulary import Vocabulary, aligned, build_vocabulary, rows_of
from atlas_cli.models.folders import copy_companion_files
from atlas_cli.models.language import (
    is_head,
    is_untied,
    reconciled,
    with_special_ids,
    with_vocabulary,
)
from atlas_cli.models.tokenizers import (
    Tokenizer,
    differing,
    read_template,
    read_tokenizer,
    tokenizer_files,
    write_template,
    write_tokenizer,
)
from atlas_cli.recipes.chat_templates import chat_template
from atlas_cli.recipes.merge import Merge, MergeRecipe
from atlas_cli.recipes.merge_checks import long_dtype
from atlas_cli.recipes.merge_entries import VectorFile
from atlas_cli.recipes.merge_tokenizer import BASE, UNION
from atlas_cli.registry import MERGE_METHODS
from atlas_cli.sources.locate import Source
from atlas_cli.sources.vector_names import VectorName, name_vectors
from atlas_cli.vectors.format import read_header
from atlas_cli.vectors.gather import GatheredVector, Gathering, gather

_DTYPE_KEYS = ("torch_dtype", "dtype")


@dataclass(frozen=True)
class Inputs:
    """All that a merge reads, opened and found to fit.

    `layout` has the tensors of the result in their order, of which `merged` are computed in the
    dtypes of `compute`, and all others copied. `base` are the tensors of the model whose
    configuration the result has.
    """

    layout: Mapping[str, LazyTensor]
    merged: Sequence[str]
    compute: Mapping[str, torch.dtype]
    base: LazyTensors
    producer: Producer
    resolved: Mapping[str, Resolved]
    segments: Sequence[Segment] = ()
    untied: bool = False  # whether the result has a head that the layout's model does not store
    vocabulary: Vocabulary | None = None  # of the result, if it is not that of the layout's model
    doubts: Sequence[str] = ()
    adapter: MergedAdapter | None = None  # the result, if it is no model

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Where the layers come from of a result that is put together of slices."""
        return [origin for segment in self.segments for origin in segment.origins]


def open_inputs(
    merge: Merge,
    located: Mapping[str, Located],
    how: Conversion,
    vectors: Sequence[GatheredVector] = (),
) -> Inputs:
    """Open every model, and check that all fit each other. No value is read."""
    if merge.method != "atlas" and are_adapters(merge, located):
        return _adapters(merge, located, how)
    if merge.recipe.max_rank is not None:
        raise UsageError("max_rank is for merges of LoRA adapters into one; these are models")
    layout = Model(merge.layout, open_layout(merge.layout, located[merge.layout]))
    if merge.method == "atlas":
        learned = open_learned(merge.recipe, located[merge.layout].model, layout, how, vectors)
        names = [name for name in layout.tensors if learned.changes(name)]
        return Inputs(layout.tensors, names, {}, layout.tensors, learned, {})
    opened = {merge.layout: layout.tensors}
    for reference in merge.references:
        if reference not in opened:
            opened[reference] = open_like(reference, located[reference], layout.tensors)
    configs = {who: located[who].model.config("config.json") or {} for who in opened}
    opened = reconciled(opened, [who for who, config in configs.items() if is_untied(config)])
    vocabulary, doubts = open_vocabulary(merge, located, opened)
    found = _arrange(merge, opened, how, vocabulary)
    found = replace(found, vocabulary=vocabulary, doubts=doubts)
    heads = [name for name in found.layout if is_head(name) and name.endswith("weight")]
    return replace(found, untied=any(name not in layout.tensors for name in heads))


def open_vocabulary(
    merge: Merge, located: Mapping[str, Located], opened: Mapping[str, LazyTensors]
) -> tuple[Vocabulary | None, list[str]]:
    """The vocabulary that a recipe asks for, and what should be known about it."""
    wish = merge.tokenizer
    if wish is None:
        folders = {who: located[who].model.folder for who in opened}
        return None, differing(folders, merge.layout) if merge.parts[0].ranges is None else []
    rows = {who: rows_of(tensors, who) for who, tensors in opened.items()}

    def read(who: str) -> Tokenizer:
        found = located.get(tokenizer_of(who))
        return read_tokenizer((found or located[who]).model.folder, who)

    base = read(merge.layout)
    lacking = [who for who in opened if tokenizer_of(who) not in located]
    tokenizers = {who: base if who in lacking else read(who) for who in opened}
    source = read(wish.source) if wish.source not in (BASE, UNION) else None
    doubts = [f"{who}: has no {TOKENIZER}; that of {merge.layout} is taken" for who in lacking]
    return build_vocabulary(wish, merge.layout, tokenizers, rows, source), doubts


def _adapters(merge: Merge, located: Mapping[str, Located], how: Conversion) -> Inputs:
    """Nothing is left to compute but what the merged adapter computes when it is read."""
    found = merge_adapters(merge, located)
    producer = BySegment({}, Model(merge.layout, found.tensors), how)
    return Inputs(found.tensors, [], {}, found.tensors, producer, {}, adapter=found)


def _arrange(
    merge: Merge,
    opened: Mapping[str, LazyTensors],
    how: Conversion,
    vocabulary: Vocabulary | None,
) -> Inputs:
    segments = segments_of(merge, opened)
    check_outputs(segments)
    if vocabulary:
        dtype, named = dtype_of(merge.recipe.dtype), merge.recipe.base_model
        segments = [aligned(segment, vocabulary, named, dtype) for segment in segments]
    producers: dict[str, ByMethod | ByPostSteps] = {}
    layout: dict[str, LazyTensor] = {}
    resolved: dict[str, Resolved] = {}
    compute: dict[str, torch.dtype] = {}
    for segment in segments:
        check_fit(segment.layout.tensors, {one.reference: one.tensors for one in segment.inputs})
        tensors = segment.layout.tensors
        names = [n for n, t in tensors.items() if t.dtype.is_floating_point and 0 not in t.shape]
        own = resolve_all(segment, names)
        made = ByMethod(MERGE_METHODS[segment.part.method], segment, own, how)
        producers |= dict.fromkeys(tensors, with_post_steps(merge, made))
        layout |= tensors
        resolved |= own
        compute |= {n: promoted(model.tensors[n] for model in segment.inputs) for n in names}
    copies = left_out(merge, opened)
    base = opened[merge.layout]
    many = BySegment(producers, Model(merge.layout, copies), how)
    first = next(iter(producers.values()))
    producer: Producer = first if len(segments) == 1 and not copies else many
    if any(one.together for one in producers.values()):
        if producer is many:
            raise UsageError("scope: model needs one list of models; slices and modules have more")
        kinds = set() if merge.recipe.dtype else set(compute.values())
        check_together(merge.method, resolved, kinds)
    if wanted := dtype_of(merge.recipe.dtype):
        compute = dict.fromkeys(compute, wanted)
    return Inputs({**layout, **copies}, [*resolved], compute, base, producer, resolved, segments)


# Task vectors ---------------------------------------------------------------------------------


def gather_vectors(recipe: MergeRecipe, base: Source, gathering: Gathering) -> list[GatheredVector]:
    """The files of a recipe's vectors; what is no vector yet is extracted from its model.

    Raises MismatchError for one that is not what the recipe says of it.
    """
    entries: list[VectorFile] = []
    names: list[VectorName] = []
    for entry in recipe.vectors or []:
        given = name_vectors([entry.file], gathering.tell)
        if len(given) > 1 and (entry.name or entry.sha256):
            raise UsageError(f"{entry.file}: stands for {len(given)} vectors, not for one")
        names += [replace(name, storage=entry.storage) for name in given]
        entries += [entry] * len(given)
    found = gather(names, base, replace(gathering, scope=recipe.scope))
    return [_checked_entry(entry, one) for entry, one in zip(entries, found, strict=True)]


def _checked_entry(entry: VectorFile, found: GatheredVector) -> GatheredVector:
    if entry.sha256 is not None and entry.sha256 != found.sha256:
        raise MismatchError(
            f"{entry.file}: is not the file that the recipe speaks of: its sha256 is "
            f"{found.sha256[:12]}..., expected {entry.sha256[:12]}..."
        )
    if found.storage:  # a vector has the name that it is given; a file has its own
        return replace(found, name=entry.name or found.name)
    called = read_header(found.file).name
    if entry.name is not None and entry.name != called:
        raise MismatchError(f"{entry.file}: is called {called}, not {entry.name}")
    return found


# Files beside the weights --------------------------------------------------------------------


def write_companions(
    merge: Merge,
    located: Mapping[str, Located],
    inputs: Inputs,
    folder: Path,
    *,
    tokenizer: bool = True,
) -> None:
    """Copy the files beside the layout's model, with what the recipe changes in them."""
    change = partial(_changed, merge, located, inputs)
    copy_companion_files(located[merge.layout].model, folder, change)
    if inputs.adapter:
        write_text(folder / CONFIG, json.dumps(inputs.adapter.config, indent=2) + "\n")
    if not tokenizer:
        for path in tokenizer_files(folder):
            path.unlink()
    if inputs.vocabulary:
        write_tokenizer(inputs.vocabulary.tokenizer, folder)
    if merge.recipe.chat_template:
        models = [located[who].model.folder for who in merge.references]
        text = chat_template(merge.recipe.chat_template, map(read_template, models))
        if text is not None:
            write_template(folder, text)


def _changed(
    merge: Merge,
    located: Mapping[str, Located],
    inputs: Inputs,
    name: str,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """A configuration with the dtype, layers, head and vocabulary of the result."""
    result = dict(found)
    if inputs.vocabulary:
        old = inputs.vocabulary.models[merge.layout]
        result = with_special_ids(result, old, inputs.vocabulary.tokenizer.vocabulary)
    if name == "generation_config.json":
        return result
    word = merge.recipe.out_dtype or merge.recipe.dtype
    dtype = long_dtype(word) if word else None
    result |= {key: dtype for key in _DTYPE_KEYS if dtype and result.get(key) is not None}
    if inputs.untied:
        result["tie_word_embeddings"] = False
    if inputs.segments:
        configs = {who: one.model.config("config.json") or {} for who, one in located.items()}
        result = changed_config(result, restacked(inputs.segments, inputs.base, configs))
    if inputs.vocabulary:
        result = with_vocabulary(result, inputs.vocabulary.size)
    return result
