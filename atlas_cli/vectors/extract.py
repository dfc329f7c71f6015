"""A base and a fine-tuned model -> a task vector, block by block, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from atlas_cli import __version__
from atlas_cli.core import storage
from atlas_cli.core.packed import Packed, pack
from atlas_cli.core.storage import Block, Factors, Form
from atlas_cli.errors import AtlasError, CheckpointError, MismatchError, UsageError
from atlas_cli.io.checkpoint import TensorStream, open_safetensors, write_tensors
from atlas_cli.io.files import sha256_of, whole_file
from atlas_cli.parallel import torch_threads
from atlas_cli.sources.locate import Source, locate, parse_reference
from atlas_cli.vectors.bases import Base, open_base
from atlas_cli.vectors.differences import Choice, Difference, open_difference
from atlas_cli.vectors.format import BlockInfo, Header, natural, read_packed, to_metadata
from atlas_cli.vectors.targets import RTVQ, ExtractRequest, VectorTarget, is_integer
from atlas_cli.vectors.writer import (
    LONGEST_NUMBER,
    room_for,
    rounded,
    shortened,
    stored,
    stored_tensors,
)


def block_order(base: Base) -> list[str]:
    """The blocks as people count them; those that would upset alignment come last."""
    odd = {name: math.prod(tensor.shape) % 8 != 0 for name, tensor in base.blocks.items()}
    return sorted(base.blocks, key=lambda name: (odd[name], natural(name)))


def promised(
    name: str, base: Base, finetuned: Source, difference: Difference, scale: float
) -> Header:
    """The header with all that is known beforehand, and hashes that are only as long as theirs."""
    shapes = {name: base.blocks[name].shape for name in block_order(base)}
    return Header(
        name=name,
        base=_unhashed(base.source),
        finetuned={**_unhashed(finetuned), **difference.origin},
        architecture=base.architecture,
        activation=base.activation,
        scope=base.scope,
        scale=scale * difference.scale,
        fingerprint="0" * 64,
        blocks=tuple(BlockInfo(name, shape, "factors", 0, 0, 0) for name, shape in shapes.items()),
        dropped=(*difference.dropped, *base.integers),
        linearised=difference.linearised,
        atlas=__version__,
        base_norm=LONGEST_NUMBER,
    )


def _unhashed(source: Source) -> dict[str, Any]:
    hashes = dict.fromkeys(source.files, "0" * 64)
    return {"reference": source.reference.text, "commit": source.commit, "sha256": hashes}


def fulfilled(
    header: Header, infos: Sequence[BlockInfo], base: Base, difference: Difference
) -> Header:
    """The header with the numbers of the blocks; raises MismatchError if there is no vector."""
    finetuned = header.finetuned["reference"]
    kept = sorted((info for info in infos if info.norm), key=lambda info: natural(info.name))
    if not kept:
        raise MismatchError(f"{finetuned}: is identical to {base.name} in scope {header.scope}")
    found = base.hashes.fingerprint()
    if difference.fingerprint not in (None, found):
        raise MismatchError(f"{finetuned}: is a task vector of another base model than {base.name}")
    unchanged = [info.name for info in infos if not info.norm]
    return dataclasses.replace(
        header,
        fingerprint=found,
        blocks=tuple(shortened(info) for info in kept),
        dropped=tuple(sorted({*header.dropped, *unchanged}, key=natural)),
        base_norm=rounded(math.hypot(*(info.base_norm for info in infos))),
    )


_LARGEST_NORM = 0.5  # of |tau| / |theta0|; fine-tuning gives a few percent
SHARED = "mean.rtvq"  # beside vectors that share it
_HASHERS = 3  # threads: for the files of either model, and for the blocks of the base


@dataclass(frozen=True)
class Options:
    """What a vector is made of and kept in, and who is told of warnings and of blocks done.

    `left_out` is told the names of tensors that the source lacks; else a warning names them.
    `shared` names what a vector shares with others, for its header.
    """

    choice: Choice = field(default_factory=Choice)
    form: Form = field(default_factory=Form)
    scale: float = 1.0
    warn: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda count: None
    left_out: Callable[[Sequence[str]], None] | None = None
    shared: dict[str, str] | None = None
    force: bool = False


@dataclass(frozen=True)
class Extracted:
    """A task vector that was written. Shown as its path, or as JSON. Errors are relative."""

    path: str
    name: str
    blocks: int
    parameters: int
    bytes: int
    worst_error: float
    mean_error: float
    relative_norm: float
    dropped: int

    def __str__(self) -> str:
        return self.path


def options_of(
    request: ExtractRequest,
    warn: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Options:
    """How a request wants its vectors made."""
    choice = Choice(request.scope, tuple(request.ignore), tuple(request.allow))
    form = Form(request.dtype, request.rank, request.energy)
    return Options(choice, form, request.scale, warn, advance, force=request.force)


def extract(
    base: Base, finetuned: Sequence[Source], targets: Sequence[VectorTarget], options: Options
) -> Iterator[Extracted]:
    """Write the vector of each fine-tuned model to its target, and yield after each."""
    if options.form.dtype == RTVQ and options.form.shared is None:
        with _shared_mean(base, finetuned, targets, options) as residuals:
            yield from extract(base, finetuned, targets, residuals)
        return
    for target, source in zip(targets, finetuned, strict=True):
        assert target.path is not None
        with target.folder():
            yield extract_to(target.path, target.name, base, source, options)


@contextmanager
def _shared_mean(
    base: Base, finetuned: Sequence[Source], targets: Sequence[VectorTarget], options: Options
) -> Iterator[Options]:
    """Options by which vectors are kept as two bits of their difference from their mean.

    The mean of every matrix, in three bits, is written beside them, and removed if they fail.
    """
    assert targets[0].path is not None
    path = targets[0].path.parent / SHARED
    if path.exists() and not options.force:
        raise AtlasError(f"{path}: exists already; use --force to replace it")
    differences = [open_difference(one, base.tensors, options.choice) for one in finetuned]
    for source, difference in zip(finetuned, differences, strict=True):
        _check(base, source, difference, options.form)
    kept: dict[str, torch.Tensor] = {}
    changed = [False] * len(finetuned)
    for name, tensor in base.blocks.items():
        if not storage.is_matrix(tensor.shape):
            continue
        values, total = tensor.read().float(), torch.zeros(tensor.shape)
        for number, difference in enumerate(differences):
            if name in difference.blocks:
                found = storage.decode(difference.blocks[name](values))
                changed[number] |= bool(found.any())
                total += found
        mean = options.scale * total / len(differences)
        kept |= stored_tensors(name, pack(mean, storage.SHARED_BITS))
    if not all(changed):
        raise _no_matrix(finetuned[changed.index(False)], RTVQ)
    with targets[0].folder():
        write_tensors(path, kept)
        tensors = open_safetensors(path)
        told = {"file": SHARED, "sha256": sha256_of(path)}

        def shared(name: str) -> Packed:
            return read_packed(tensors, name, base.blocks[name].shape)

        form = Form(RTVQ, shared=shared, key=told["sha256"])
        try:
            yield dataclasses.replace(options, form=form, shared=told)
        except BaseException:  # what was written of the pool is of no use without the rest
            for made in (path, *(target.path for target in targets if target.path)):
                made.unlink(missing_ok=True)
            raise


def extract_to(path: Path, name: str, base: Base, finetuned: Source, options: Options) -> Extracted:
    """Write a task vector to `path`, where it appears when it is complete."""
    try:
        # Not "wb": a file that was cut to nothing is flushed to the disk when it is closed.
        with whole_file(path) as temporary, temporary.open("r+b") as file:
            made = write_vector(file, name, base, finetuned, options)
    except OSError as problem:
        raise AtlasError(f"{path}: cannot be written: {problem.strerror}") from problem
    return dataclasses.replace(made, path=str(path))


def extract_changed(
    path: Path, model: Source, changed: Mapping[str, torch.Tensor], told: str
) -> Extracted:
    """Write the change of some tensors of a model's image tower as a vector.

    `told` says in words where it is from, in place of a fine-tuned model.
    """
    base = open_base(model, "visual")
    tensors = {name: block.read() for name, block in base.blocks.items()}
    tensors |= {name: tensor.cpu().clone() for name, tensor in changed.items()}
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        tuned = Path(folder) / "tuned.safetensors"
        write_tensors(tuned, tensors)
        source = locate(parse_reference(str(tuned)))
        # The folder is gone afterwards, and its name would differ between runs.
        source = dataclasses.replace(
            source, reference=dataclasses.replace(source.reference, text=told)
        )
        return extract_to(path, path.stem, base, source, Options())


def write_vector(
    file: BinaryIO, name: str, base: Base, finetuned: Source, options: Options
) -> Extracted:
    """Write scale * (fine-tuned - base) to an open file, with one block in memory at a time."""
    difference = open_difference(finetuned, base.tensors, options.choice)
    _check(base, finetuned, difference, options.form)
    if difference.dropped and options.left_out:
        options.left_out(difference.dropped)
    elif difference.dropped:
        left = ", ".join(difference.dropped[:3]) + (", ..." if difference.dropped[3:] else "")
        options.warn(f"{finetuned.reference.text}: left out, so as in the base: {left}")
    header = promised(name, base, finetuned, difference, options.scale)
    header = dataclasses.replace(header, shared=options.shared)
    stream = TensorStream(file, room_for(header, difference.parts + options.form.is_low_rank))
    # One thread subtracts as fast as memory allows, beside another that hashes the files.
    cores = torch.get_num_threads() if options.form.is_low_rank else 1
    with ThreadPoolExecutor(_HASHERS) as pool, torch_threads(cores):
        origin = pool.submit(finetuned.provenance)
        if not base.provenance:
            base.provenance.append(pool.submit(base.source.provenance))
        infos = list(_write(stream, _read(base, pool), difference, options))
    if options.form.is_few and not any(
        info.norm and storage.is_matrix(info.shape) for info in infos
    ):
        raise _no_matrix(finetuned, options.form.dtype)
    header = dataclasses.replace(
        fulfilled(header, infos, base, difference),
        base=base.provenance[0].result(),
        finetuned={**origin.result(), **difference.origin},
    )
    return _summary(header, stream.finish(to_metadata(header)), options.warn)


def _check(base: Base, finetuned: Source, difference: Difference, form: Form) -> None:
    """Refuse what can be refused before any value is read."""
    if difference.parts and (form.is_low_rank or is_integer(form.dtype)):
        raise UsageError(
            f"{finetuned.reference.text}: is low-rank already and stays so; use --dtype fp32, "
            "fp16 or bf16 without --rank or --energy"
        )
    if difference.fingerprint is None:  # a task vector says more than its folder does
        base.check_activation(finetuned)


def _no_matrix(finetuned: Source, dtype: str) -> UsageError:
    changes = f"{finetuned.reference.text}: changes no matrix"
    return UsageError(f"{changes}, and --dtype {dtype} is for matrices; use bf16")


# Blocks ---------------------------------------------------------------------------------------


def _read(base: Base, pool: Executor) -> Iterator[tuple[BlockInfo, torch.Tensor]]:
    """The values of every block of the base in float32, while the pool hashes them."""
    for name in block_order(base):
        values = base.blocks[name].read().float()
        norm = _finite(name, base.hashes.add(name, values, pool))
        yield BlockInfo(name, tuple(values.shape), "", 0.0, norm, 0.0), values


def _write(
    stream: TensorStream,
    blocks: Iterator[tuple[BlockInfo, torch.Tensor]],
    difference: Difference,
    options: Options,
) -> Iterator[BlockInfo]:
    """Write every block that changed, and tell of every block; norm 0 means unchanged."""
    for unchanged, base in blocks:
        change = difference.blocks.get(unchanged.name)
        exact = storage.scaled(change(base), options.scale) if change else None
        block, info = _encoded(unchanged, exact, options.form)
        if block is not None:
            for key, tensor in stored_tensors(info.name, block).items():
                stream.add(key, tensor)
        options.advance(1)
        yield info


def _encoded(info: BlockInfo, exact: Block | None, form: Form) -> tuple[Block | None, BlockInfo]:
    """A block in the form it is kept in, or None if it is zero."""
    values = storage.decode(exact) if exact is not None else torch.zeros(1)
    if exact is None or (norm := _finite(info.name, storage.norm(values))) == 0:
        return None, info
    block, error = stored(exact, values, form, info.name)
    starts = tuple(part.start for part in block.parts) if isinstance(block, Factors) else ()
    kept = storage.storage_of(block)
    return block, dataclasses.replace(info, storage=kept, norm=norm, error=error, starts=starts)


def _finite(name: str, norm: float) -> float:
    if not math.isfinite(norm):
        raise CheckpointError(f"{name}: holds values that are not finite numbers")
    return norm


# Summary --------------------------------------------------------------------------------------


def _summary(header: Header, length: int, warn: Callable[[str], None]) -> Extracted:
    """What to tell the user, with a warning if the base cannot be the right one."""
    errors = [info.error for info in header.blocks]
    relative = header.norm if header.relative_norm is None else header.relative_norm
    if relative > _LARGEST_NORM * abs(header.scale):
        warn(
            f"{header.finetuned['reference']}: |tau|/|theta0| is {relative / abs(header.scale):.2f}"
            f", more than fine-tuning gives; is {header.base['reference']} really its base?"
        )
    return Extracted(
        path="-",
        name=header.name,
        blocks=len(header.blocks),
        parameters=sum(math.prod(info.shape) for info in header.blocks),
        bytes=length,
        worst_error=max(errors),
        mean_error=statistics.fmean(errors),
        relative_norm=float(f"{relative:.6e}"),
        dropped=len(header.dropped),
    )
