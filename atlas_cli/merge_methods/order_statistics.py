"""The element of a given rank by magnitude, exactly, without sorting and in little memory.

Elements are ordered by magnitude, and those of equal magnitude by their position in the tensor.
The bits of a magnitude are looked at 16 at a time: one pass over the tensor for numbers of two
bytes, two for four. A sort that is not stable leaves open which of several equal elements it
takes; this order does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from atlas_cli.registry import late

if TYPE_CHECKING:
    import torch

    # One pass: the position of each piece, and a function that gives the piece of a series.
    Passes = Callable[[], Iterator[tuple[int, Callable[[int], torch.Tensor]]]]
else:
    torch = late("torch")


@cache
def _integer(size: int) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """A view of floating point numbers as integers of the same size."""
    return values.view(_integer(values.element_size()))


def largest(bits: torch.Tensor) -> int:
    """The greatest integer, which is also every bit but the sign."""
    return torch.iinfo(bits.dtype).max


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The bits of |values|, in order of magnitude."""
    bits = bits_of(values)
    return bits & largest(bits)


def negative_(bits: torch.Tensor) -> torch.Tensor:
    """-1 where bits < 0, else 0; in place."""
    return bits.bitwise_right_shift_(8 * bits.element_size() - 1)


def nonzero(values: torch.Tensor) -> torch.Tensor:
    """-1 where a value is not zero, else 0."""
    return negative_(magnitudes(values).neg_())


def at_least(magnitude: torch.Tensor, least: int) -> torch.Tensor:
    """-1 where magnitude >= least, else 0."""
    return negative_(torch.rsub(magnitude, least - 1))


def below(magnitude: torch.Tensor, limit: int) -> torch.Tensor:
    """-1 where magnitude < limit, else 0."""
    return negative_(magnitude - limit)


def where_(mask: torch.Tensor, value: float, dtype: torch.dtype) -> torch.Tensor:
    """`value` where the mask is -1, zero elsewhere; in place of the mask."""
    bits = bits_of(torch.tensor(value, dtype=dtype))
    return mask.bitwise_and_(int(bits)).view(dtype)


_DIGIT = 16


@dataclass(frozen=True)
class Cut:
    """Between two elements: those of smaller magnitude than `value` come before it, and those of
    equal magnitude at a position smaller than `position`.
    """

    value: int
    position: int


@dataclass
class _Search:
    """The cut before rank `rank` in one series, as far as it is known."""

    series: int
    rank: int  # among the elements that begin with `prefix`
    prefix: int = 0
    equal: int = 0  # elements that begin with `prefix`
    position: int = 0
    count: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    waiting: list[torch.Tensor] = field(default_factory=list)

    def add(self, bits: torch.Tensor) -> None:
        """Add elements whose lowest digits are to be counted; many are counted at a time."""
        self.waiting.append(bits.bitwise_and_((1 << _DIGIT) - 1))
        if sum(map(len, self.waiting)) > 1 << 18:
            self.add_up()

    def add_up(self) -> None:
        """Count the digits that were added."""
        if self.waiting:
            self.count += torch.bincount(torch.cat(self.waiting), minlength=1 << _DIGIT).cpu()
            self.waiting.clear()

    def descend(self) -> None:
        """Extend the prefix by the digit that holds the rank."""
        upto = self.count.cumsum(0)
        digit = int(torch.searchsorted(upto, self.rank, right=True))
        self.equal = int(self.count[digit])
        self.rank -= int(upto[digit]) - self.equal
        self.prefix = (self.prefix << _DIGIT) | digit


def find_cuts(passes: Passes, ranks: Sequence[Sequence[int]]) -> list[list[Cut]]:
    """For each series, the cuts with `rank` elements before them. Ranks are below the size."""
    searches = [[_Search(i, rank) for rank in of] for i, of in enumerate(ranks)]
    flat = [search for some in searches for search in some]
    width = _first_digit(passes, flat) if flat else 0
    for shift in range(width - 2 * _DIGIT, -1, -_DIGIT):
        _next_digit(passes, flat, shift)
    _find_positions(passes, [search for search in flat if search.rank and search.prefix])
    return [[Cut(search.prefix, search.position) for search in some] for some in searches]


def values_at(passes: Passes, ranks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """For each series, its elements of the given ranks, from the most negative to the largest.

    Zeros if there are no elements.
    """
    size, dtype = 0, torch.float32
    for _, piece_of in passes():
        piece = piece_of(0)
        size, dtype = size + piece.numel(), piece.dtype
    if size == 0:
        return [torch.zeros(len(some), dtype=dtype) for some in ranks]

    def parts() -> Iterator[tuple[int, Callable[[int], torch.Tensor]]]:
        """Series 2i is max(x, 0), series 2i + 1 is max(-x, 0): both are ordered by magnitude."""
        for start, piece_of in passes():

            def part(number: int, piece_of: Callable[[int], torch.Tensor] = piece_of) -> Any:
                values = piece_of(number // 2)
                return (-values if number % 2 else values).clamp(min=0)

            yield start, part

    both = [side for some in ranks for side in (some, [size - 1 - rank for rank in some])]
    cuts = find_cuts(parts, both)
    above, below_ = ([[cut.value for cut in some] for some in cuts[side::2]] for side in (0, 1))
    return [
        _as_values(up, dtype) - _as_values(down, dtype)
        for up, down in zip(above, below_, strict=True)
    ]


def _as_values(bits: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=_integer(dtype.itemsize)).view(dtype)


def _first_digit(passes: Passes, searches: Sequence[_Search]) -> int:
    """Count the highest 15 bits of each series once for all cuts. Gives the bits per number."""
    width, counts = 0, {search.series: torch.zeros(1 << 15).long() for search in searches}
    for _, piece_of in passes():
        for number, count in counts.items():
            bits = magnitudes(piece_of(number)).view(-1)
            width = 8 * bits.element_size()
            digits = bits if width == _DIGIT else bits.bitwise_right_shift_(width - _DIGIT)
            count += torch.bincount(digits, minlength=1 << 15).cpu()
    for search in searches:
        search.count = counts[search.series]
        search.descend()
    return width


def _next_digit(passes: Passes, searches: Sequence[_Search], shift: int) -> None:
    """Count the next 16 bits of the elements that share the bits of the cut so far."""
    some = {number: [s for s in searches if s.series == number] for number in _series(searches)}
    for search in searches:
        search.count = torch.zeros(1 << _DIGIT).long()
    for _, piece_of in passes():
        for number, of_series in some.items():
            bits = magnitudes(piece_of(number)).view(-1)
            begin = bits >> (shift + _DIGIT)
            for search in of_series:
                search.add(bits[begin == search.prefix] >> shift)
    for search in searches:
        search.add_up()
        search.descend()


def _series(searches: Sequence[_Search]) -> list[int]:
    return sorted({search.series for search in searches})


def _find_positions(passes: Passes, searches: list[_Search]) -> None:
    """Find the position of the `rank`-th element that equals the cut; zeros need no order."""
    for start, piece_of in passes() if searches else ():
        for search in list(searches):
            equal = magnitudes(piece_of(search.series)).view(-1) == search.prefix
            seen = int(equal.count_nonzero())
            if search.rank < seen:
                search.position = start + int(equal.nonzero()[search.rank])
                searches.remove(search)
            search.rank -= seen
        if not searches:
            return
