"""References of a merge -> files: models, adapters, and tokenizers that are aligned.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli.errors import UsageError
from atlas_cli.merging.provenance import TOKENIZER, Located, tokenizer_of
from atlas_cli.sources.locate import COMPANION_FILES, locate, locate_file, parse_reference

if TYPE_CHECKING:
    from atlas_cli.recipes.merge import Merge


def locate_inputs(merge: Merge) -> dict[str, Located]:
    """Find the files behind every reference, and download them if need be."""
    from atlas_cli.recipes.merge import split_adapter

    found = {}
    for reference in merge.references:
        model, adapter = split_adapter(reference)
        companions = COMPANION_FILES if reference == merge.layout else ()
        added = locate(parse_reference(adapter)) if adapter else None
        found[reference] = Located(locate(parse_reference(model), companions), added)
    return found | _tokenizers(merge)


def _tokenizers(merge: Merge) -> dict[str, Located]:
    """The tokenizers that a recipe aligns models with, each as an input of its own."""
    from atlas_cli.recipes.merge import split_adapter

    wish = merge.tokenizer
    if wish is None:
        return {}
    named = [] if wish.source in ("base", "union") else [wish.source]
    found = {}
    for reference in dict.fromkeys([*merge.references, *named]):
        source = locate_file(parse_reference(split_adapter(reference)[0]), TOKENIZER)
        if source is not None:
            found[tokenizer_of(reference)] = Located(source)
    return found


def check_inputs(target: Path, located: Mapping[str, Located]) -> None:
    """Raise UsageError if the result would be written over a model that it is made of."""
    for reference, found in located.items():
        if target.resolve() in [path.resolve().parent for path in found.model.weights]:
            raise UsageError(f"{target}: is the folder of {reference}; write to another one")
