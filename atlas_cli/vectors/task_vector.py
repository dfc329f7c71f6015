"""Task vectors as values: sums and multiples of them, read lazily and saved as files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

from atlas_cli import __version__
from atlas_cli.core import storage
from atlas_cli.core.storage import Block, Dense, Factors, Form
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import TensorStream
from atlas_cli.io.files import whole_file
from atlas_cli.sources.locate import is_of_zoo, vector_file
from atlas_cli.vectors.format import (
    BlockInfo,
    Header,
    StoredVector,
    check_same_base,
    natural,
    open_checked,
    to_metadata,
)
from atlas_cli.vectors.targets import (
    VectorTarget,
    check_dtype,
    check_targets,
    is_integer,
    plain_dtype,
)
from atlas_cli.vectors.writer import LONGEST_NUMBER, room_for, shortened, stored, stored_tensors


@dataclass(frozen=True, repr=False)
class TaskVector(StoredVector):
    """A task vector to compute with.

    Vectors of the same base are added and scaled: `a - b`, `0.3 * a`, `-a`, `(a + b) / 2`. Nothing
    is read until a block of the result is; its header then has no norms, which are nan.
    """

    @classmethod
    def open(cls, reference: str | Path, base: str | Path | None = None) -> TaskVector:
        """The vector in a file, of a built-in task (builtin:digits) or of the zoo.

        With the name of its base, the one of a fine-tuned model or adapter, which is extracted.
        """
        text = str(reference)
        if base is None and not is_of_zoo(text):
            stored = open_checked(vector_file(text))
            return cls(stored.header, stored.read)
        from atlas_cli.vectors.gather import gather_by_name  # most vectors are files

        found = gather_by_name([text], str(base) if base is not None else None)
        if len(found) > 1:
            raise UsageError(f"{text}: stands for {len(found)} vectors, not for one")
        stored = open_checked(found[0].file)
        called = found[0].name or stored.header.name
        return cls(replace(stored.header, name=called), stored.read)

    @property
    def norm(self) -> float:
        """|tau|; for a sum, of values that are read for it."""
        if math.isfinite(self.header.norm):
            return self.header.norm
        return math.hypot(*(storage.norm(self.values(name)) for name in self.names))

    def __repr__(self) -> str:
        base, blocks = self.header.base.get("reference"), len(self.header.blocks)
        return f"<TaskVector {self.name}: {blocks} blocks of {base}, {self.header.scope}>"

    def __add__(self, other: object) -> TaskVector:
        return _sum(self, other) if isinstance(other, TaskVector) else NotImplemented

    def __sub__(self, other: object) -> TaskVector:
        return _sum(self, -other) if isinstance(other, TaskVector) else NotImplemented

    def __mul__(self, scale: object) -> TaskVector:
        return _scaled(self, float(scale)) if isinstance(scale, Real) else NotImplemented

    def __truediv__(self, divisor: object) -> TaskVector:
        return _scaled(self, 1 / float(divisor)) if isinstance(divisor, Real) else NotImplemented

    def __neg__(self) -> TaskVector:
        return _scaled(self, -1.0)

    __rmul__ = __mul__

    def save(
        self, path: str | Path, *, name: str | None = None, dtype: str = "fp32", force: bool = False
    ) -> TaskVector:
        """Write the vector to a file, block by block, and open it. Blocks of zeros are left out."""
        path = Path(path)
        dtype = plain_dtype(dtype)
        check_dtype(dtype)
        check_targets([VectorTarget(name or path.stem, path)], force=force)
        try:
            with whole_file(path) as temporary, temporary.open("r+b") as file:
                _write(self, file, name or path.stem, Form(dtype))
        except OSError as problem:
            raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem
        return TaskVector.open(path)


# Arithmetic -----------------------------------------------------------------------------------


def _scaled(vector: TaskVector, scale: float) -> TaskVector:
    """scale * vector, block by block."""
    if not math.isfinite(scale):
        raise UsageError(f"{scale} * {vector.name}: expected a finite number")
    header, size = vector.header, abs(scale)
    blocks = (
        replace(
            info,
            norm=size * info.norm,
            storage="factors" if info.storage == "factors" else "fp32",
        )
        for info in header.blocks
    )
    terms = [{**term, "scale": scale * term["scale"]} for term in _terms(vector)]
    made = replace(_of_terms(header, terms), blocks=tuple(blocks), scale=scale * header.scale)
    return TaskVector(made, lambda name: storage.scaled(vector.read(name), scale))


def _sum(left: TaskVector, right: TaskVector) -> TaskVector:
    """left + right in float32; a block that one of them lacks is zero there.

    Raises MismatchError unless both were taken from the same base.
    """
    other = right.name if right.name != left.name else f"the other {right.name}"
    check_same_base({left.name: left.header, other: right.header})
    infos = {info.name: info for info in right.header.blocks}
    for info in left.header.blocks:
        shape = infos.get(info.name, info).shape
        if shape != info.shape:
            raise MismatchError(f"{info.name}: shape {info.shape} against {shape}")
    infos |= {info.name: info for info in left.header.blocks}
    first, both = set(left.names), set(left.names) & set(right.names)

    def read(name: str) -> Block:
        if name in both:
            return Dense(left.values(name) + right.values(name))
        return (left if name in first else right).read(name)

    blocks = (
        replace(
            infos[name],
            norm=math.nan,
            error=0.0,
            storage="fp32" if name in both or not infos[name].starts else "factors",
            starts=() if name in both else infos[name].starts,
        )
        for name in sorted(infos, key=natural)
    )
    made = replace(
        _of_terms(left.header, [*_terms(left), *_terms(right)]),
        blocks=tuple(blocks),
        scale=1.0,
        dropped=tuple(name for name in left.header.dropped if name not in infos),
        linearised=left.header.linearised or right.header.linearised,
    )
    return TaskVector(made, read)


def _terms(vector: TaskVector) -> list[dict[str, Any]]:
    """What a vector is the sum of: itself, unless it was computed."""
    header = vector.header
    alone = {"scale": 1.0, "name": header.name, "finetuned": header.finetuned}
    terms: list[dict[str, Any]] = header.finetuned.get("sum_of", [alone])
    return terms


def _of_terms(header: Header, terms: list[dict[str, Any]]) -> Header:
    """The header of a sum: called by its terms, which are also its provenance."""
    signed = [f"{'-+'[term['scale'] >= 0]} {_in_words(term)}" for term in terms]
    text = " ".join(signed).removeprefix("+ ")
    finetuned: dict[str, Any] = {"reference": text, "commit": None, "sha256": {}, "sum_of": terms}
    return replace(header, name=text, finetuned=finetuned)


def _in_words(term: Mapping[str, Any]) -> str:
    size = abs(term["scale"])
    return str(term["name"]) if size == 1 else f"{size:g} * {term['name']}"


def _write(vector: TaskVector, file: BinaryIO, name: str, form: Form) -> None:
    """Write a vector to an open file, with one block in memory at a time."""
    header = replace(
        vector.header, name=name, atlas=__version__, base_norm=LONGEST_NUMBER, shared=None
    )
    parts = max(len(info.starts) for info in header.blocks)
    stream = TensorStream(file, room_for(header, parts))
    kept: list[BlockInfo] = []
    # Blocks that would upset the alignment of others come last.
    for info in sorted(header.blocks, key=lambda info: math.prod(info.shape) % 8 != 0):
        exact = vector.read(info.name)
        values = storage.decode(exact)
        norm = storage.norm(values)
        if not math.isfinite(norm):
            raise CheckpointError(f"{info.name}: holds values that are not finite numbers")
        if not norm:
            continue
        whole = is_integer(form.dtype) and isinstance(exact, Factors)  # factors have no such form
        block, error = stored(Dense(values) if whole else exact, values, form, info.name)
        for key, tensor in stored_tensors(info.name, block).items():
            stream.add(key, tensor)
        starts = tuple(part.start for part in block.parts) if isinstance(block, Factors) else ()
        word = storage.storage_of(block)
        kept.append(replace(info, storage=word, norm=norm, error=error, starts=starts))
    if not kept:
        raise MismatchError(f"{vector.name}: is zero; there is nothing to save")
    blocks = tuple(shortened(info) for info in sorted(kept, key=lambda info: natural(info.name)))
    zero = set(vector.names) - {info.name for info in blocks}
    dropped = tuple(sorted({*header.dropped, *zero}, key=natural))
    base_norm = vector.header.base_norm
    stream.finish(to_metadata(replace(header, blocks=blocks, dropped=dropped, base_norm=base_norm)))
