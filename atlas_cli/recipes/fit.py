"""The recipe of `fit`, which learns from a few labelled images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from atlas_cli.errors import UsageError, nearest
from atlas_cli.recipes.learning import SELECT, VECTORS, LearnRecipe, split_without
from atlas_cli.recipes.model import Check, Positive, about, expect, one_of, parse_bytes
from atlas_cli.registry import ADAPTERS, BASES, find_basis

# What `fit` does where a recipe does not say; see benchmarks/RESULTS.md for what decided it.
_FAST: Mapping[str, Any] = {
    "adapter": "probe",
    "batch_size": 16,
    "epochs": 6,
    "augment": "slight",
}
# The schedule of BOLT; see core/basis.py.
BOLT: Mapping[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "batch_size": 32,
    "epochs": 20,
    "min_steps": 1,
}
RANKINGS = ("greedy", "gradient", "features", "random")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "fast": _FAST,
    "best": {**_FAST, "adapter": "auto", "granularity": "partition:20"},
}


def _basis_problem(text: str) -> str | None:
    try:
        find_basis(text)
    except UsageError as problem:
        return str(problem).removeprefix("basis: ")
    return None


def _basis_pattern() -> str:
    return f"^({'|'.join(one.expression for one in BASES.values())})$"


def _adapters() -> list[str]:
    return ["none", "auto", *ADAPTERS]


def _adapter_problem(word: str) -> str | None:
    if word in ("none", "auto") or word in ADAPTERS:
        return None
    return f"expected {', '.join(_adapters())}, found {word!r}{nearest(word, _adapters())}"


def parse_images_of(text: str) -> tuple[str, str] | None:
    """The name of a vector and a data reference from VECTOR=DATA; None if it is neither."""
    name, _, data = text.partition("=")
    return (name, data) if name and data else None


class FitRecipe(LearnRecipe):
    """What `atlas fit` learns from: a few labelled images of one task."""

    split: Annotated[
        str | None, split_without("`train`, or the folder as it is. Test images score the result")
    ] = None

    select: Annotated[
        str,
        expect(
            lambda text: bool(re.fullmatch("last|holdout|kfold|val:.+", text, re.DOTALL)),
            "expected last, holdout, kfold or val:DATA",
            pattern="^(last|holdout|kfold|val:.+)$",
            examples=["last", "holdout", "kfold", "val:DATA"],
        ),
        SELECT,
    ] = "last"
    vectors: Annotated[list[str], VECTORS] = []
    data: Annotated[str, about("Labelled images to learn from: a data reference.")]
    allow_target: Annotated[bool, about("Take vectors that are named like the data, too.")] = False
    augment: Annotated[
        str,
        one_of("flip", "crop", "slight", "none"),
        about("`flip`, `crop`, `slight` (crops of nine tenths or more) or `none`."),
    ] = "flip"
    basis: Annotated[
        Annotated[str, Check(_basis_problem, lambda: {"pattern": _basis_pattern()})] | None,
        about(
            "Directions instead of the vectors themselves: `svd:K` (singular directions of every "
            "matrix, with BOLT's schedule), `pca:K` or `random` (of the same norms)."
        ),
    ] = None
    budget: Annotated[
        Annotated[
            str,
            expect(
                lambda text: parse_bytes(text) is not None, "expected a size such as 500MB or 2GiB"
            ),
        ]
        | None,
        about(
            "Bytes of vectors that are kept: the blocks that help most, in fewer bits if needed."
        ),
    ] = None
    keep_vectors: Annotated[
        Positive | None, about("Or how many vectors are kept in every block.")
    ] = None
    rank_by: Annotated[
        str,
        one_of(*RANKINGS),
        about(
            "What is kept first: `greedy` (gain per byte, less what is kept already), `gradient` "
            "(the steepest blocks), `features` (whole vectors, those first whose images look most "
            "like the data) or `random` (whole vectors)."
        ),
    ] = "greedy"
    images_of: Annotated[
        list[str],
        expect(
            lambda texts: all(parse_images_of(text) for text in texts), "expected VECTOR=DATA each"
        ),
        about("Images that vectors were learned from, for `rank_by: features`: `VECTOR=DATA`."),
    ] = []
    init: Annotated[
        str | None,
        about("Folder of a run whose coefficients are the start, by the names of their vectors."),
    ] = None
    preset: Annotated[
        str,
        one_of(*PRESETS),
        about(
            "Values for keys that are not given: `paper` (coefficients alone, as the paper has "
            "them), `fast` (60 steps of 16 images, with a linear head) or `best` (20 coefficients "
            "per block, the mean of several passes, and folds decide which head)."
        ),
    ] = "paper"
    adapter: Annotated[
        str,
        Check(_adapter_problem, lambda: {"enum": [*_adapters()]}),
        about(
            "A head on top of the features: `tip`, `tip-f`, `lpp`, `probe` or `prolip`; `none`; "
            "`auto`: folds of the shots decide. Without `vectors` it is fitted to the base."
        ),
    ] = "none"
    adapter_stage: Annotated[
        str,
        one_of("joint", "after"),
        about(
            "`joint`: the head is trained with the coefficients (`tip-f`, `probe`, `prolip`); "
            "`after`: on the features of the composed model."
        ),
    ] = "after"

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        preset = found.get("preset")
        found = {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **found}
        if str(found.get("basis", "")).startswith("svd:"):
            return {**BOLT, **found}
        entry = ADAPTERS.get(name) if isinstance(name := found.get("adapter"), str) else None
        if name == "auto" or (entry and entry.joint and found.get("vectors")):
            return {"adapter_stage": "joint", **found}
        return found

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        name, vectors = found.get("adapter", "none"), found.get("vectors")
        entry = ADAPTERS.get(name) if isinstance(name, str) else None
        joint = found.get("adapter_stage") == "joint"
        if name == "none" and not vectors:
            yield "vectors", f"names no task vector, found {vectors or []}"
        if basis := found.get("basis"):
            if not vectors:
                yield "basis", f"there are no vectors to take directions of, found {basis!r}"
            if joint and str(basis).startswith("svd:"):
                yield "adapter_stage", "singular directions are trained alone, found 'joint'"
            if found.get("method", "learned") != "learned":
                yield "method", f"a basis has no uniform scale, found {found['method']!r}"
            if (kind := found.get("granularity", "block")) != "block" or found.get("groups"):
                yield "granularity", f"a basis has a coefficient per block, found {kind!r}"
        if found.get("budget") and found.get("keep_vectors"):
            yield "budget", "and keep_vectors both say how much is kept; give one of them"
        limited = found.get("budget") or found.get("keep_vectors")
        if limited and (basis or not vectors):
            yield "budget", "is for the vectors themselves: there are none, or another basis"
        if not limited and "rank_by" in found:
            yield "rank_by", f"needs budget or keep_vectors, found {found['rank_by']!r}"
        if found.get("images_of") and found.get("rank_by") != "features":
            yield "images_of", f"is for rank_by features, found {found['images_of']!r}"
        if found.get("init") and (basis or not vectors):
            yield "init", "starts coefficients of the vectors themselves: there are none here"
        if joint and name == "none":
            yield "adapter_stage", "there is no adapter, found 'joint'"
        if joint and entry and not entry.rates:
            yield "adapter_stage", f"{name} has nothing to train with coefficients, found 'joint'"
        if joint and name != "none" and not vectors:
            yield "vectors", f"{name} is trained with coefficients, and there are no vectors"
        if name == "auto" and (select := found.get("select", "last")) != "last":
            yield "select", f"auto selects by folds of its own, found {select!r}"
        if joint and found.get("penalty"):
            yield "penalty", f"is for coefficients alone, not joint, found {found['penalty']!r}"
        if joint and found.get("method") == "search":
            yield "method", "a search has no steps for the head; say after, found 'search'"
        if entry and entry.pooled and found.get("linearised"):
            yield "linearised", f"{name} has no first-order expansion, found True"
