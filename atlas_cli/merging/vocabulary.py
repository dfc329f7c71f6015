"""Embeddings and heads of models with different tokenizers, brought to one vocabulary.

A row of a result belongs to a token. A model that has the token gives its own row; one that lacks
it gets the row of the base, of the only model that has it, or the mean of those that do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from atlas_cli.errors import AtlasError, UsageError
from atlas_cli.io.tensors import LazyTensor, LazyTensors
from atlas_cli.merging.segments import Model, Segment, with_tensors
from atlas_cli.models.language import is_vocabulary
from atlas_cli.models.tokenizers import Tokenizer, union, with_tokens, without_tokens
from atlas_cli.recipes.merge_tokenizer import TokenizerWish, TokenRow

_CHUNK = 1 << 20  # elements that are averaged at a time
_DEFAULT, _PADDING = -1, -2  # in place of a row of the model itself


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a result, and what is to be known of the others to align with it."""

    tokenizer: Tokenizer
    models: Mapping[str, Mapping[str, int]]
    size: int
    wished: Mapping[str, TokenRow]
    base: str | None = None


def rows_of(tensors: LazyTensors, where: str) -> int:
    """How many tokens a model has rows for."""
    counts = [t.shape[0] for name, t in tensors.items() if is_vocabulary(name) and t.shape]
    if not counts:
        raise UsageError(f"{where}: has no embedding of tokens that a tokenizer could be of")
    return min(counts)


def build_vocabulary(
    wish: TokenizerWish,
    base: str,
    tokenizers: Mapping[str, Tokenizer],
    rows: Mapping[str, int],
    source: Tokenizer | None,
) -> Vocabulary:
    """The vocabulary that a recipe asks for. `source` is the tokenizer of the model it names."""
    first = without_tokens(tokenizers[base], rows[base])
    chosen = source or first
    if wish.source == "union":
        others = (without_added(tokenizers[who], rows[who]) for who in tokenizers if who != base)
        chosen = union(first, others)
    chosen = with_tokens(chosen, {token: {} for token in wish.tokens})
    size = max(len(chosen.vocabulary), 1 + max(chosen.vocabulary.values()))
    if wish.multiple:
        size = -(-size // wish.multiple) * wish.multiple
    models = {who: one.vocabulary for who, one in tokenizers.items()}
    return Vocabulary(chosen, models, size, wish.tokens)


def without_added(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """The tokens that have a row; rules of merging play no part for them."""
    kept = {token: n for token, n in tokenizer.vocabulary.items() if n < rows}
    return Tokenizer(tokenizer.folder, kept, tokenizer.added, tokenizer.raw)


# Alignment ------------------------------------------------------------------------------------


def aligned(
    segment: Segment, vocabulary: Vocabulary, base: str | None, dtype: torch.dtype | None
) -> Segment:
    """The segment with every embedding and head in the order of the vocabulary.

    A token that the `base` has is taken from it by models that lack it. `dtype` is the one to
    compute in; without it, one that holds the values of all models.
    """

    def change(name: str, inputs: Mapping[str, Model]) -> Mapping[str, LazyTensor]:
        if not is_vocabulary(name):
            return {}
        tensors = {who: model.tensors[name] for who, model in inputs.items()}
        return align(tensors, replace(vocabulary, base=segment.part.base or base), dtype)

    return with_tensors(segment, change)


def align(
    tensors: Mapping[str, LazyTensor], vocabulary: Vocabulary, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Tensors with a row for every token, in the order of the vocabulary."""
    kind = dtype
    for tensor in tensors.values():
        kind = kind if dtype else torch.promote_types(kind or tensor.dtype, tensor.dtype)
    assert kind is not None
    widths = {who: tensor.shape[1:] for who, tensor in tensors.items()}
    if len(set(widths.values())) > 1:
        return dict(tensors)  # they do not fit, and whoever compares them says so
    table = _Table(tensors, vocabulary, kind)
    return {who: table.tensor(who) for who in tensors}


class _Table:
    """Which rows of which models the rows of a result are made of."""

    def __init__(
        self, tensors: Mapping[str, LazyTensor], vocabulary: Vocabulary, dtype: torch.dtype
    ) -> None:
        self._tensors, self._vocabulary, self._dtype = tensors, vocabulary, dtype
        first = next(iter(tensors.values()))
        self._rest, self._width = first.shape[1:], math.prod(first.shape[1:])
        self._own = {
            who: torch.full((vocabulary.size,), _PADDING, dtype=torch.int64) for who in tensors
        }
        self._default: dict[int, list[tuple[str, int]]] = {}
        for token, number in vocabulary.tokenizer.vocabulary.items():
            self._place(token, number)

    def _place(self, token: str, number: int) -> None:
        vocabulary, wish = self._vocabulary, self._vocabulary.wished.get(token)
        has = {
            who: row
            for who, tensor in self._tensors.items()
            if (row := vocabulary.models[who].get(token, -1)) in range(tensor.shape[0])
        }
        for who, own in self._own.items():
            own[number] = _DEFAULT if wish and wish.force else has.get(who, _DEFAULT)
        if (wish and wish.force) or len(has) < len(self._tensors):
            self._default[number] = self._donors(token, wish, has)

    def _donors(
        self, token: str, wish: TokenRow | None, has: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Rows whose mean takes the place of the one that a model lacks; none for zeros."""
        base = self._vocabulary.base
        if wish is not None:
            return self._wished(token, wish)
        if len(has) > 1 and base is not None and base in has:
            return [(base, has[base])]
        return list(has.items())

    def _wished(self, token: str, wish: TokenRow) -> list[tuple[str, int]]:
        if wish.model is None:
            return []
        if wish.model not in self._tensors:
            raise UsageError(
                f"tokenizer.tokens.{token}: {wish.model} is no model of what is merged there"
            )
        known = self._vocabulary.models[wish.model]
        row = known.get(wish.token or token, -1) if wish.number is None else wish.number
        if row not in range(self._tensors[wish.model].shape[0]):
            what = repr(wish.token or token) if wish.number is None else f"with id {wish.number}"
            raise AtlasError(f"tokenizer.tokens.{token}: {wish.model} has no token {what}")
        return [(wish.model, row)]

    def tensor(self, who: str) -> LazyTensor:
        """A model's tensor in the new order; itself, where nothing changes."""
        own, stored = self._own[who], self._tensors[who]
        same = len(own) == stored.shape[0] and stored.dtype == self._dtype
        if same and torch.equal(own, torch.arange(len(own))):
            return stored
        shape = (len(own), *self._rest)
        padding = _Once(lambda: self._mean(who))

        def part(start: int, stop: int) -> torch.Tensor:
            width = self._width or 1
            first, last = start // width, -(-stop // width)
            rows = self._rows(who, first, last, padding).reshape(-1)
            return rows[start - first * width : stop - first * width]

        size = math.prod(shape)
        return LazyTensor(shape, self._dtype, lambda: part(0, size).reshape(shape), part)

    def _rows(self, who: str, first: int, last: int, padding: _Once) -> torch.Tensor:
        own, stored = self._own[who][first:last], self._tensors[who]
        result = torch.zeros((last - first, self._width), dtype=self._dtype)
        for begin, end in _runs(own):
            row = int(own[begin])
            if row >= 0:
                span = stored.span(row * self._width, (row + end - begin) * self._width)
                result[begin:end] = span.to(self._dtype).reshape(end - begin, self._width)
            elif row == _PADDING:
                result[begin:end] = padding()
            else:
                for at in range(begin, end):
                    result[at] = self._mean_of(self._default[first + at])
        return result

    def _mean_of(self, donors: Sequence[tuple[str, int]]) -> torch.Tensor:
        total = torch.zeros(self._width, dtype=self._dtype)
        for who, row in donors:
            span = self._tensors[who].span(row * self._width, (row + 1) * self._width)
            total = total + span.to(self._dtype)
        return total / len(donors) if len(donors) > 1 else total

    def _mean(self, who: str) -> torch.Tensor:
        """The mean of all rows that belong to a token, for those that do not."""
        numbers = torch.nonzero(self._own[who] != _PADDING).reshape(-1)
        total = torch.zeros(self._width, dtype=torch.float64)
        step = max(1, _CHUNK // max(self._width, 1))
        end = int(numbers.max()) + 1 if len(numbers) else 0
        empty = _Once(lambda: torch.zeros(self._width, dtype=self._dtype))
        for first in range(0, end, step):
            total += self._rows(who, first, min(first + step, end), empty).double().sum(0)
        return (total / max(len(numbers), 1)).to(self._dtype)


def _runs(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Where rows follow each other in the model, or are made in the same way."""
    if not len(rows):
        return
    after, before = rows[1:], rows[:-1]
    together = ((before >= 0) & (after == before + 1)) | ((before < 0) & (after == before))
    cuts = (torch.nonzero(~together).reshape(-1) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(rows)], strict=True)


class _Once:
    """A value that is computed when it is first asked for, by whichever thread asks first."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._value: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        with self._lock:
            if self._value is None:
                self._value = self._make()
        return self._value
