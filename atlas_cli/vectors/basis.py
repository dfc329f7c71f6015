"""Another basis for the coefficients of a pool: its directions, written as task vectors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_cli.errors import UsageError
from atlas_cli.registry import basis, find_basis, late

if TYPE_CHECKING:
    import torch

    from atlas_cli.core import basis as formulas
    from atlas_cli.core import storage
    from atlas_cli.core.storage import Block
    from atlas_cli.vectors.format import BlockInfo, StoredVector
    from atlas_cli.vectors.pool import GatheredVector
else:
    torch = late("torch")
    formulas, storage = late("atlas_cli.core.basis"), late("atlas_cli.core.storage")

START = "start.safetensors"  # coefficients that training starts from, if they are not zero
_NOT_WEIGHTS = ("positional_embedding", "token_embedding.weight", "text_projection")
# Blocks as they come: number of the vector, what is known of it, its values, and its start.
Piece = tuple[int, "BlockInfo", "Block", float]


def write_basis(
    text: str, paths: Sequence[str | GatheredVector], folder: Path, seed: int
) -> list[str]:
    """Write the vectors of a basis such as svd:12, and give their paths.

    Raises UsageError, with nothing written, if there are not so many directions.
    """
    from atlas_cli.io.checkpoint import write_tensors
    from atlas_cli.vectors.format import check_same_base, to_metadata
    from atlas_cli.vectors.pool import open_member
    from atlas_cli.vectors.writer import stored_tensors

    members = [open_member(path) for path in paths]
    check_same_base({member.path: member.vector.header for member in members})
    vectors = [member.vector for member in members]
    name, _, parameter = text.partition(":")
    made = find_basis(text).function(vectors, int(parameter or 0), seed)
    blocks: dict[int, dict[str, tuple[BlockInfo, Block]]] = {}
    starts: dict[str, list[float]] = {}
    for number, info, block, start in made:
        blocks.setdefault(number, {})[info.name] = (info, block)
        if start:
            starts.setdefault(info.name, []).append(start)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, kept in sorted(blocks.items()):
        own = f"{name}{number:03d}"
        tensors: dict[str, torch.Tensor] = {}
        for key, (_, block) in kept.items():
            tensors |= stored_tensors(key, block)
        told = {**vectors[0].header.finetuned, "reference": f"{text} of {len(vectors)} vectors"}
        infos = tuple(info for info, _ in kept.values())
        header = dataclasses.replace(
            vectors[0].header, name=own, blocks=infos, finetuned=told, dropped=()
        )
        path = folder / f"{own}.safetensors"
        write_tensors(path, tensors, to_metadata(header))
        found.append(str(path))
    if starts:
        kept_starts = {key: torch.tensor(values) for key, values in starts.items()}
        write_tensors(folder / START, kept_starts)
    return found


def read_start(paths: Sequence[str | GatheredVector]) -> dict[str, torch.Tensor]:
    """The coefficients that a basis starts from, by block, one for each vector that has it."""
    from atlas_cli.io.checkpoint import open_safetensors

    path = Path(str(paths[0])).parent / START
    if not path.is_file():
        return {}
    return {name: tensor.read().clone() for name, tensor in open_safetensors(path).items()}


@basis("svd", parameter="K")
def singular_directions(vectors: Sequence[StoredVector], terms: int, seed: int) -> Iterator[Piece]:
    """BOLT: the first K singular directions of every vector in every matrix, made orthogonal."""
    infos = {
        info.name: info
        for vector in vectors
        for info in vector.header.blocks
        if len(info.shape) == 2 and not info.name.endswith(_NOT_WEIGHTS)
    }
    most = max((min(info.shape) // len(vectors) for info in infos.values()), default=0)
    if terms > most:
        raise UsageError(
            f"--basis svd:{terms}: {len(vectors)} vectors have room for {most} directions each; "
            f"use svd:{most} or fewer vectors"
            if most
            else f"--basis svd:{terms}: the vectors have no matrix large enough for it"
        )
    for info in infos.values():
        own = min(terms, min(info.shape) // len(vectors))
        there = [storage.decode(v.read(info.name)) for v in vectors if info.name in v.names]
        if own == 0 or not there:
            continue
        found = formulas.singular_basis(there, own)
        for number, start in enumerate(found.start.tolist()):
            up, down = found.up[:, number : number + 1], found.down[number : number + 1]
            part = storage.BlockPart(0, up.float().contiguous(), down.float().contiguous())
            block = storage.Factors(info.shape, (part,))
            yield number, _info(info, block, 1.0), block, start


@basis("random")
def random_directions(vectors: Sequence[StoredVector], terms: int, seed: int) -> Iterator[Piece]:
    """A random direction for every block of every vector, of the same norm."""
    for number, vector in enumerate(vectors):
        for info in vector.header.blocks:
            digest = hashlib.sha256(f"{seed}:{number}:{info.name}".encode()).digest()[:7]
            random = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            values = formulas.random_like(storage.decode(vector.read(info.name)), random)
            block = storage.Dense(values)
            yield number, _info(info, block, storage.norm(values)), block, 0.0


@basis("pca", parameter="K")
def principal_directions(vectors: Sequence[StoredVector], terms: int, seed: int) -> Iterator[Piece]:
    """The first K principal directions of whole vectors, through their Gram matrix."""
    if terms > len(vectors):
        raise UsageError(
            f"--basis pca:{terms}: {len(vectors)} vectors have no more than {len(vectors)} "
            "principal directions"
        )
    infos = {info.name: info for vector in vectors for info in vector.header.blocks}

    def read(name: str) -> list[Block | None]:
        return [vector.read(name) if name in vector.names else None for vector in vectors]

    products = torch.stack([storage.gram(read(name)) for name in infos]).sum(dim=0)
    weights = formulas.principal_weights(products, terms).tolist()
    for name, info in infos.items():
        there = [storage.decode(block) if block else None for block in read(name)]
        for number, row in enumerate(weights):
            pairs = zip(row, there, strict=True)
            total = sum(weight * values for weight, values in pairs if values is not None)
            block = storage.Dense(total)
            yield number, _info(info, block, storage.norm(total)), block, 0.0


def _info(info: BlockInfo, block: Block, norm: float) -> BlockInfo:
    starts = (0,) if isinstance(block, storage.Factors) else ()
    kind = storage.storage_of(block)
    return dataclasses.replace(info, storage=kind, norm=norm, error=0.0, starts=starts)
