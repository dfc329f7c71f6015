"""Captions say only what the picture shows, in words that prompts use too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atlas_cli.datasets.builtin.captions import any_concept, say
from atlas_cli.datasets.builtin.concepts import CLASSES, COLOURS, Concept


def some_captions(count: int) -> list[tuple[str, Concept, Concept]]:
    rng = np.random.default_rng(0)
    shown = [any_concept(rng) for _ in range(count)]
    return [(*say(concept, rng), concept) for concept in shown]


def test_a_caption_leaves_out_at_most_the_colour() -> None:
    for _, told, shown in some_captions(300):
        assert told in (shown, replace(shown, colour=""))


def test_a_caption_names_what_it_tells() -> None:
    for text, told, _ in some_captions(300):
        words = text.rstrip(".").split()
        assert set(told.name.split()) <= set(words)
        assert set(told.symbol.split()) <= set(words)
        assert told.colour == "" or told.colour in words


def test_a_caption_without_a_colour_mentions_none() -> None:
    for text, told, _ in some_captions(300):
        if not told.colour:
            assert not set(COLOURS) & set(text.rstrip(".").split())


def test_pre_training_shows_every_kind_of_concept() -> None:
    kinds = {concept.kind for task in CLASSES.values() for concept in task.values()}
    assert {shown.kind for _, _, shown in some_captions(300)} == kinds


def test_numbers_of_dots_agree_with_their_noun() -> None:
    rng = np.random.default_rng(0)
    one = {say(Concept("count", "one", "red"), rng)[0] for _ in range(50)}
    two = {say(Concept("count", "two", "red"), rng)[0] for _ in range(50)}
    assert not any("dots" in text for text in one)
    assert all("dots" in text for text in two)
