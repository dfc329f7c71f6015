"""The loops in C give what torch gives, in every form that this processor can run."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise, product
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tiles import merge

from atlas_cli.core.stacks import DenseStack, MappedStack, QuantisedStack, add, dot
from atlas_cli.core.storage import Dense, decode, quantise
from atlas_cli.io.tensors import FileSpan
from atlas_cli.native import kernels
from atlas_cli.native.operands import Operands, Sum, in_memory

LEVELS = (3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 15, 16, 17, 63, 64, 65, 1000, 2048, 5000)  # whole registers and groups, and not

pytestmark = pytest.mark.skipif(
    kernels.library() is None and not shutil.which("cc"), reason="there is no C compiler"
)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """A form of the loops, as far as there is one here."""
    library = kernels.library()
    assert library is not None
    yield library.atlas_take_level(request.param)
    library.atlas_take_level(max(LEVELS))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(size: int, dtype: torch.dtype, count: int = 3) -> list[torch.Tensor]:
    """A base and models that are near it."""
    base = random(size)
    return [(base + 0.3 * random(size, seed=i) * (i > 0)).to(dtype) for i in range(count + 1)]


def without_loops(monkeypatch: pytest.MonkeyPatch, *arguments, **options) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        return merge(*arguments, **options)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def test_the_loops_were_built():
    assert kernels.library() is not None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("linear", {"weight": [0.3, 0.5, -0.7]}),
        ("linear", {"weight": [0.3, 0.5, 0.7], "normalize": False}),
        ("task_arithmetic", {"weight": [0.3, 0.5, -0.7]}),
        ("task_arithmetic", {"weight": [1.0, 0.5, 0.7], "normalize": True, "lambda": 0.9}),
    ],
)
def test_sums_of_models_have_the_bits_that_torch_gives(
    level: int, name: str, parameters: dict, monkeypatch
):
    for size, dtype in product(SIZES, DTYPES):
        base, *models = near(size, dtype)
        given = (name, None if name == "linear" else base, models, parameters)
        found, wanted = merge(*given), without_loops(monkeypatch, *given)
        assert found.dtype == dtype
        if dtype == torch.float32 and name == "linear":  # torch fuses whole registers only
            assert torch.allclose(found, wanted, rtol=3e-7, atol=1e-7), size
        else:
            assert torch.equal(bits_of(found), bits_of(wanted)), (size, dtype)


@pytest.mark.parametrize("name", ["slerp", "model_stock"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_methods_that_survey_agree_with_torch(
    level: int, name: str, dtype: torch.dtype, monkeypatch
):
    for shape in ((7,), (5, 300), (3, 5000), (2, 3, 33)):
        base, *models = (values.view(shape) for values in near(math.prod(shape), dtype))
        given = (name, base, models[:1] if name == "slerp" else models)
        options = {"t": 0.3} if name == "slerp" else {}
        wanted = without_loops(monkeypatch, *given, options)
        torch.testing.assert_close(merge(*given, options), wanted)
        torch.testing.assert_close(merge(*given, options, rows=2), wanted)


def test_numbers_at_the_ends_are_rounded_as_torch_does(level: int, monkeypatch):
    values, names = (math.nan, math.inf, 3e38, 1e-40), ("linear", "task_arithmetic")
    for value, dtype, name in product(values, DTYPES, names):
        tensors = [torch.full((40,), value).to(dtype), torch.full((40,), -0.0).to(dtype)]
        given = (name, None if name == "linear" else tensors[1], tensors, {"weight": 1.5})
        found, wanted = merge(*given), without_loops(monkeypatch, *given)
        assert torch.equal(found.isnan(), wanted.isnan()), (value, dtype, name)
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), (value, dtype, name)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("origin", [False, True])
def test_products_are_those_of_every_pair(level: int, count: int, origin: bool):
    start, *terms = (values.view(4, -1) for values in near(4 * 3000, torch.bfloat16, count))
    found = kernels.products(in_memory([start, *terms][not origin :]), from_first=origin)
    exact = [t.double().flatten() - origin * start.double().flatten() for t in terms]
    pairs = list(combinations_with_replacement(exact, 2))
    scale = max(float(s @ s) for s in exact)
    assert found == pytest.approx([float(s @ t) for s, t in pairs], rel=1e-6, abs=1e-8 * scale)


def test_every_form_gives_the_same_bits_for_models_and_nearly_the_same_sums():
    library = kernels.library()
    assert library is not None
    terms = near(4999, torch.bfloat16)
    found = []
    for wanted in LEVELS:
        library.atlas_take_level(wanted)
        found.append(
            (
                kernels.products(in_memory(terms), from_first=False),
                kernels.add(in_memory(terms), Sum([0.1, 0.2, 0.3, 0.4], 3.0)).tolist(),
                kernels.dot_vectors(terms, None, random(4999)).tolist(),
            )
        )
    library.atlas_take_level(max(LEVELS))
    assert all(one[1] == other[1] for one, other in pairwise(found))
    for one, other in pairwise(found):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        assert one[2] == pytest.approx(other[2], rel=1e-5)


# Files ------------------------------------------------------------------------------------------


def in_files(folder: Path, tensors: list[torch.Tensor]) -> Operands:
    """The same operands in files, each somewhere else, which nothing but the loops may read."""
    places = []
    for number, tensor in enumerate(tensors):
        path, before = folder / f"{number}.bin", bytes(8 * number)
        path.write_bytes(before + tensor.view(torch.uint8).numpy().tobytes() + b"after")
        now = path.stat()
        stamp = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
        places.append(FileSpan(os.fsencode(path), stamp, len(before)))

    def read(start: int, stop: int) -> NoReturn:
        raise AssertionError("was read into memory")

    first = tensors[0]
    return Operands(tuple(first.shape), first.dtype, first.device, read, places=tuple(places))


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5000), (2, 150_000), (300, 513), (2, 3, 33)])
def test_what_is_read_from_files_meanwhile_gives_the_same_bits(
    tmp_path: Path, shape: tuple[int, ...]
):
    counts = (2, 4, 40)
    for count, dtype in product(counts, DTYPES):
        tensors = [t.view(shape) for t in near(math.prod(shape), dtype, count - 1)]
        here, there = in_memory(tensors), in_files(tmp_path, tensors)
        weights = [0.5 / (i + 1) for i in range(count)]
        for total in (Sum(weights, 3.0), Sum(weights[1:], 1.5, scale=0.7)):
            wanted = bits_of(kernels.add(here, total))
            assert torch.equal(bits_of(kernels.add(there, total)), wanted), (count, dtype)
        for first in (False, True):
            found = kernels.products(there, from_first=first)
            assert found == kernels.products(here, from_first=first), (count, dtype)


def test_rows_of_files_are_the_rows_of_their_tensors(tmp_path: Path):
    tensors = [values.view(8, 5) for values in near(40, torch.bfloat16)]
    rows = in_files(tmp_path, tensors).rows(3, 20)
    wanted = kernels.add(in_memory([tensor[3:] for tensor in tensors]), Sum([0.25] * 4))
    assert rows.shape == (5, 5)
    assert torch.equal(kernels.add(rows, Sum([0.25] * 4)), wanted)


@pytest.mark.parametrize("harm", ["gone", "longer", "touched", "replaced"])
def test_a_file_that_is_not_the_same_any_more_is_not_read(tmp_path: Path, harm: str):
    tensors = near(5000, torch.float32, 1)
    terms = in_files(tmp_path, tensors)
    path = tmp_path / "1.bin"
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "longer":
        path.write_bytes(content + b"more")
    elif harm == "touched":
        os.utime(path, ns=(0, 0))
    else:
        other = tmp_path / "other"
        other.write_bytes(content)
        os.utime(other, ns=(0, path.stat().st_mtime_ns))
        other.replace(path)
    assert kernels.add(terms, Sum([0.5, 0.5])) is None
    assert kernels.add(terms, Sum([0.5], scale=1.0)) is None
    assert kernels.products(terms, from_first=False) is None


def test_files_are_closed_when_they_have_been_read_and_when_they_could_not_be(tmp_path: Path):
    terms = in_files(tmp_path, near(5000, torch.float32))
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(2):
        for _ in range(20):
            kernels.add(terms, Sum([0.25] * 4))
            kernels.products(terms, from_first=True)
        (tmp_path / "3.bin").unlink(missing_ok=True)
    assert len(list(Path("/dev/fd").iterdir())) == before


# Vectors ----------------------------------------------------------------------------------------

STORED = ("float32", "bfloat16", "float16", "int8")


def stack_of(stored: str, count: int, shape: tuple[int, int], *, mapped: bool):
    blocks = [
        quantise(random(*shape, seed=i)) if stored == "int8" else Dense(random(*shape, seed=i))
        for i in range(count)
    ]
    if stored not in ("int8", "float32"):
        blocks = [Dense(block.values.to(getattr(torch, stored))) for block in blocks]
    members, exact = tuple(range(count)), torch.stack([decode(b).double() for b in blocks])
    if mapped:
        return MappedStack(members, tuple(blocks)), exact
    if stored == "int8":
        codes = torch.stack([block.values for block in blocks])
        return QuantisedStack(members, codes, torch.stack([b.scales for b in blocks])), exact
    return DenseStack(members, torch.stack([block.values.flatten() for block in blocks])), exact


@pytest.mark.parametrize("stored", STORED)
def test_vectors_are_added_and_multiplied_as_they_are_stored(level: int, stored: str):
    shapes = ((1, 7), (3, 50), (5, 769), (2, 9000))
    for count, shape, mapped in product((1, 2, 3, 4, 5, 9), shapes, (False, True)):
        sums_and_products_are_exact(stored, count, shape, mapped)


def sums_and_products_are_exact(
    stored: str, count: int, shape: tuple[int, int], mapped: bool
) -> None:
    stack, exact = stack_of(stored, count, shape, mapped=mapped)
    base, weights = random(shape[0] * shape[1], seed=77), random(count, seed=78)
    for first, last in ((0, shape[0]), (shape[0] - 1, shape[0])):
        span = first * shape[1], last * shape[1]
        total = torch.zeros_like(base)
        add(total, stack, span, weights, base)
        rows = exact[:, first:last].flatten(1)
        wanted = base[slice(*span)].double() + weights.double() @ rows
        assert (total[slice(*span)] - wanted).norm() <= 1e-6 * wanted.norm()
        assert not total[: span[0]].any()
        slope = base[slice(*span)].double()
        sizes = rows.norm(dim=1) * slope.norm()
        assert ((dot(base, stack, span) - rows @ slope).abs() <= 1e-6 * sizes).all()


def test_vectors_of_several_storages_in_mapped_files_are_added_together():
    blocks = (Dense(random(4, 9)), quantise(random(4, 9)), Dense(random(4, 9).half()))
    stack, weights = MappedStack((0, 1, 2), blocks), torch.tensor([0.5, -2.0, 3.0])
    base, total = random(36, seed=5), torch.empty(36)
    add(total, stack, (0, 36), weights, base)
    exact = torch.stack([decode(block).flatten().double() for block in blocks])
    wanted = base.double() + weights.double() @ exact
    assert (total - wanted).norm() <= 1e-6 * wanted.norm()
    sizes = exact.norm(dim=1) * base.double().norm()  # float32 sums, in an order of the processor's
    assert ((dot(base, stack, (0, 36)) - exact @ base.double()).abs() <= 1e-6 * sizes).all()


@pytest.mark.parametrize("width", [1, 7, 300, 5000])
def test_rows_are_sorted(width: int):
    values = torch.randint(0, 1 << 15, (5, width), dtype=torch.int16)
    out = torch.full((5, width + 2), -1, dtype=torch.int16)
    kernels.sort_rows(values, out[:, 1:-1])
    assert torch.equal(out[:, 1:-1], values.sort(dim=1).values)
    assert (out[:, [0, -1]] == -1).all()
