"""Models that a method merges, brought to the same names and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from atlas_cli.errors import MismatchError, UsageError
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.adapters import merge_adapters
from atlas_cli.merging.plan import Inputs, dtype_of, open_layout, open_like, word_of
from atlas_cli.merging.post import ByPostSteps, with_post_steps
from atlas_cli.merging.produce import ByMethod, BySegment, Conversion, Producer
from atlas_cli.merging.provenance import TOKENIZER, Located, tokenizer_of
from atlas_cli.merging.segments import (
    Model,
    Resolved,
    check_outputs,
    check_together,
    left_out,
    resolve_all,
    segments_of,
)
from atlas_cli.merging.vocabulary import Vocabulary, aligned, build_vocabulary, rows_of
from atlas_cli.models.language import is_head, is_untied, is_vocabulary, reconciled
from atlas_cli.models.tokenizers import Tokenizer, differing, read_tokenizer
from atlas_cli.recipes.merge import Merge
from atlas_cli.recipes.merge_tokenizer import BASE, UNION
from atlas_cli.registry import MERGE_METHODS

_SHOWN = 5  # problems of an error message


def open_models(merge: Merge, located: Mapping[str, Located], how: Conversion) -> Inputs:
    """Open every model, and check that all fit each other. No value is read."""
    layout = Model(merge.layout, open_layout(merge.layout, located[merge.layout]))
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


def open_adapters(merge: Merge, located: Mapping[str, Located], how: Conversion) -> Inputs:
    """Open LoRA adapters; the merged one computes its values when they are read."""
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


# Fitting --------------------------------------------------------------------------------------


def check_fit(layout: LazyTensors, models: Mapping[str, LazyTensors]) -> None:
    """Raise MismatchError that lists every tensor which is missing, extra, or of another kind."""
    problems = [
        f"{reference}: {line}"
        for reference, tensors in models.items()
        for line in _problems(layout, tensors)
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise MismatchError(
            "the models do not fit each other: " + "; ".join(problems[:_SHOWN] + more)
        )


def _problems(layout: LazyTensors, tensors: LazyTensors) -> Sequence[str]:
    lines = []
    for name, wanted in layout.items():
        if not wanted.dtype.is_floating_point:
            continue
        found = tensors.get(name)
        if found is None:
            lines.append(f"{name} is missing")
        elif found.shape != wanted.shape and {found.shape, wanted.shape} != {(), (1,)}:
            rows = found.shape[1:] == wanted.shape[1:] and is_vocabulary(name)
            way = " (tokenizer_source: base or union aligns vocabularies)" if rows else ""
            lines.append(f"{name} has shape {found.shape}, expected {wanted.shape}{way}")
        elif not found.dtype.is_floating_point:
            lines.append(
                f"{name} has dtype {word_of(found.dtype)}, expected {word_of(wanted.dtype)}"
            )
    extra = [n for n, t in tensors.items() if n not in layout and t.dtype.is_floating_point]
    return lines + [f"{name} is unknown" for name in extra]


def promoted(tensors: Iterable[LazyTensor]) -> torch.dtype:
    """The dtype that tensors of several are merged in: one that holds the values of all."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
