"""The recipe of `tta`, which learns from images without labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from atlas_cli.recipes.learning import SELECT, VECTORS, LearnRecipe, split_without
from atlas_cli.recipes.model import (
    Number,
    Positive,
    Rate,
    Scalar,
    about,
    expect,
    objective_of,
    one_of,
)


def parse_schedule(text: str) -> tuple[float, float] | None:
    """START and END within 0 and 1 from text such as 0.9:1; 0.9 alone is both. None if neither."""
    start, _, end = text.partition(":")
    try:
        found = float(start), float(end or start)
    except ValueError:
        return None
    return found if all(0 <= value <= 1 for value in found) else None


def parse_shares(text: str) -> list[float] | None:
    """Positive numbers from text such as 0.9,0.1; None if the text is not a list of them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return found if all(0 < share < math.inf for share in found) else None


class TtaRecipe(LearnRecipe):
    """What `atlas tta` adapts to: images without labels, and the names of their classes."""

    vectors: Annotated[list[str], VECTORS] = []
    shots: Annotated[
        Scalar,
        expect(
            lambda value: value == "all", "nothing is drawn by class without labels", const="all"
        ),
        about("`all`: nothing is drawn by class without labels."),
    ] = "all"
    split: Annotated[
        str | None, split_without("`test`, else `val`, else `train`, or the folder as it is")
    ] = None
    data: Annotated[str, about("Images; labels that they may have are not looked at.")]
    classes: Annotated[
        list[str], about("Class names, if the data has none or others are wanted.")
    ] = []
    objective: Annotated[
        str,
        objective_of("tta"),
        about("`ufm`, `entropy`, `balanced-entropy`, `sar` or `simclr`."),
    ] = "ufm"
    tune: Annotated[
        str,
        one_of("coefficients", "layernorm"),
        about("`coefficients`, or `layernorm`: weights and biases of the LayerNorms instead."),
    ] = "coefficients"
    trusted_per_class: Annotated[
        Annotated[int, expect(lambda number: number > 0, "expected 1 or more", minimum=1)] | None,
        about(
            "`ufm`: images of a class taken at their prediction; a quarter of an even share, 1 to "
            "100, if it is not given."
        ),
    ] = None
    power: Annotated[
        Number,
        expect(
            lambda power: 0 < power < math.inf,
            "expected more than 0, such as 0.5",
            exclusiveMinimum=0,
        ),
        about("`ufm`: exponent of predictions; above 1 sharpens, below 1 flattens; 0.5."),
    ] = 0.5
    threshold: Annotated[
        str,
        expect(
            lambda text: parse_schedule(text) is not None,
            "expected START:END within 0 and 1, such as 0.9:1",
        ),
        about(
            "`ufm`: how sure a prediction must then be, from the first epoch to the last; `0.9:1`."
        ),
    ] = "0.9:1"
    prior: Annotated[
        str,
        expect(
            lambda text: text == "uniform" or parse_shares(text) is not None,
            "expected uniform, or a share for every class such as 0.9,0.1",
        ),
        about("How often classes occur: `uniform`, or a share for every class such as `0.9,0.1`."),
    ] = "uniform"
    select: Annotated[str, one_of("guard", "last"), SELECT] = "guard"
    epochs: Annotated[Positive, about("Passes over the images; 4.")] = 4
    lr: Annotated[
        Rate, about("Learning rate of AdamW; 0.03, for LayerNorms 0.003, for `sar` 0.3.")
    ] = 0.03
    batch_size: Annotated[Positive, about("Images per step; 64.")] = 64
    min_steps: Annotated[Positive, about("Steps per epoch at least; 1.")] = 1
    augment: Annotated[
        str,
        one_of("mild", "flip", "crop"),
        about("`mild` (small crops, other light, noise), `crop` or `flip`."),
    ] = "mild"

    @classmethod
    def completed(cls, found: Mapping[str, Any]) -> Mapping[str, Any]:
        if found.get("tune") == "layernorm":
            return {"lr": 0.003, **found}
        if found.get("objective") == "sar":
            return {"lr": 0.3, "weight_decay": 0.0, **found}
        return found

    @classmethod
    def conflicts(cls, found: Mapping[str, Any], context: Any) -> Iterator[tuple[str, str]]:
        tune = found.get("tune", "coefficients")
        if tune != "layernorm" and not found.get("vectors"):
            yield "vectors", f"names no task vector, found {found.get('vectors', [])}"
        if tune == "layernorm" and (method := found.get("method", "learned")) != "learned":
            yield "method", f"LayerNorms have no scale to search, found {method!r}"
        if tune != "coefficients" and found.get("linearised"):
            yield "linearised", "LayerNorms are not composed, found True"
