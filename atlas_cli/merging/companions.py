"""What lies beside the weights of a result: configuration, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from atlas_cli.io.files import write_text
from atlas_cli.merging.adapters import CONFIG
from atlas_cli.merging.inputs import Inputs
from atlas_cli.merging.provenance import Located
from atlas_cli.merging.segments import changed_config, restacked
from atlas_cli.models.folders import copy_companion_files
from atlas_cli.models.language import with_special_ids, with_vocabulary
from atlas_cli.models.tokenizers import (
    read_template,
    tokenizer_files,
    write_template,
    write_tokenizer,
)
from atlas_cli.recipes.chat_templates import chat_template
from atlas_cli.recipes.merge import Merge
from atlas_cli.recipes.merge_checks import long_dtype

_DTYPE_KEYS = ("torch_dtype", "dtype")


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
