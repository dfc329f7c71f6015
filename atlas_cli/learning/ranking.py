"""The blocks of a pool that help most with some images, found in one pass over the pool.

The gradient of the loss at the base is taken once. Every vector is then read block by block, and
let go: no more than a few blocks are in memory, however many vectors there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cosine_similarity, normalize

from atlas_cli.core import stacks, storage
from atlas_cli.core.budget import RANKINGS, STORED, Budget, Pick, Slopes
from atlas_cli.core.compose import map_blocks
from atlas_cli.core.losses import cross_entropy
from atlas_cli.core.storage import Block, Dense, Form, Quantised
from atlas_cli.datasets.dataset import Dataset, open_dataset
from atlas_cli.datasets.pixels import Pixels, view_of
from atlas_cli.errors import CheckpointError, UsageError, nearest
from atlas_cli.io.checkpoint import write_tensors
from atlas_cli.learning.setup import refuse_target
from atlas_cli.models.clip import logits_of, open_model, zero_shot_head
from atlas_cli.models.folders import read_tensors
from atlas_cli.models.trainable import TrainableModel
from atlas_cli.parallel import thread_pool_for
from atlas_cli.recipes.fit import FitRecipe, parse_images_of
from atlas_cli.recipes.model import parse_bytes
from atlas_cli.sources.locate import vector_file
from atlas_cli.vectors.format import BlockInfo, Header, open_vector, to_metadata
from atlas_cli.vectors.pool import GatheredVector, Member, check_members
from atlas_cli.vectors.writer import stored_tensors

if TYPE_CHECKING:
    from atlas_cli.learning.run import RunInputs

_PREFIX = "visual."
_PIXELS = 2**30  # bytes of decoded images that are kept
_LOOKED_AT = 256  # images of a vector whose mean feature is taken
_AT_ONCE = 64  # images of one backward pass
_READ_AHEAD = 2  # blocks
_SAMPLED = 2048  # elements of a block from which angles are estimated


@dataclass(frozen=True)
class Ranking:
    """The blocks that are kept, best first, and what they take together."""

    rank_by: str
    bytes: int
    of_bytes: int
    vectors: tuple[str, ...]
    picks: tuple[dict[str, object], ...]


def gradient_at_base(inputs: RunInputs) -> dict[str, torch.Tensor]:
    """dL/dtheta0 of the image tower, of the mean cross-entropy of all shots as they are scored."""
    clip = open_model(inputs.model, inputs.opening)
    module: torch.nn.Module = clip.module.visual  # type: ignore[assignment]
    dataset = inputs.datasets[0]
    pixels = Pixels(dataset, view_of(clip.preprocess), _PIXELS, clip.device, inputs.options.workers)
    head = zero_shot_head(clip, dataset.classes, dataset.templates, lambda text: None)
    names = [name for name, _ in module.named_parameters()]
    count = len(dataset.samples)
    with thread_pool_for(module, inputs.options.cores) as thread_pool:
        model = TrainableModel(module, names, prefix=_PREFIX, thread_pool=thread_pool)
        for start in range(0, count, _AT_ONCE):
            some = list(range(start, min(start + _AT_ONCE, count)))
            labels = pixels.labels[some].to(clip.device)

            def loss(features: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
                found = cross_entropy(logits_of(features, head), labels)
                return found * len(labels) / count

            model.backward(pixels.fixed(some), loss)
        return {name: tensor.cpu() for name, tensor in model.gradients().items()}


def measure(
    members: Sequence[Member], names: Sequence[str], gradient: Mapping[str, torch.Tensor]
) -> Slopes:
    """<G, tau> of every block of every vector. A few blocks are in memory at a time."""
    shape = len(members), len(names)
    slopes, squares, sizes = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    shapes: dict[str, tuple[int, ...]] = {}
    samples: list[dict[str, torch.Tensor]] = [{} for _ in members]
    column = {name: number for number, name in enumerate(names)}
    elements: dict[str, torch.Tensor] = {}
    flat = {name: gradient[name].float().flatten() for name in names}
    for number, info, block in _blocks(members, set(names)):
        place, along = column[info.name], flat[info.name]
        span = 0, len(along)
        slope = sum(stacks.dot(along, part, span)[0].item() for part in map_blocks({0: block}))
        if not math.isfinite(slope):
            path = members[number].path
            raise CheckpointError(f"{path}: block {info.name} holds no finite values")
        slopes[number, place], squares[number, place] = slope, info.norm**2
        sizes[number, place] = storage.bytes_of(block)
        shapes[info.name] = info.shape
        if info.name not in elements:
            elements[info.name] = _elements(info)
        samples[number][info.name] = _some(block, elements[info.name]).half()
    return Slopes(tuple(names), shapes, slopes, squares, sizes, samples)


def _blocks(
    members: Sequence[Member], names: Collection[str]
) -> Iterator[tuple[int, BlockInfo, Block]]:
    """Every block of every vector, with the number of its vector.

    A thread reads the next one meanwhile, so that the disk never waits for the arithmetic.
    """
    wanted = [
        (number, info)
        for number, member in enumerate(members)
        for info in member.vector.header.blocks
        if info.name in names
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="atlas-read") as reader:
        coming: deque[Future[Block]] = deque()
        for place, (number, info) in enumerate(wanted):
            for later, told in wanted[place + len(coming) : place + 1 + _READ_AHEAD]:
                coming.append(reader.submit(members[later].vector.read, told.name))
            yield number, info, coming.popleft().result()


def similarities(inputs: RunInputs, members: Sequence[Member]) -> torch.Tensor:
    """The cosine of the mean feature of every vector's images and that of the shots, at the base.

    Features have length 1 before they are averaged.
    """
    images_of = _images_of(inputs.recipe, members)
    clip = open_model(inputs.model, inputs.opening)
    module: torch.nn.Module = clip.module.visual  # type: ignore[assignment]

    def mean(dataset: Dataset) -> torch.Tensor:
        how = (view_of(clip.preprocess), _PIXELS, clip.device, inputs.options.workers)
        pixels, count = Pixels(dataset, *how), len(dataset.samples)
        few = min(count, _LOOKED_AT)
        some = [number * count // few for number in range(few)]
        with torch.no_grad():
            found = torch.cat([module(pixels.fixed(batch)) for batch in _batches(some)])
        return normalize(found.double(), dim=1).mean(0).cpu()

    own = mean(inputs.datasets[0])
    theirs = [mean(open_dataset(text, preferred=("train", "val"))) for text in images_of]
    return cosine_similarity(torch.stack(theirs), own[None], dim=1)


def _batches(places: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(places), _AT_ONCE):
        yield places[start : start + _AT_ONCE]


def _images_of(recipe: FitRecipe, members: Sequence[Member]) -> list[str]:
    """The images that every vector was learned from: as they are given, or built-in ones."""
    given = dict(filter(None, map(parse_images_of, recipe.images_of)))
    known = [member.name for member in members]
    for name in given:
        if name not in known:
            raise UsageError(f"--images-of {name}: no such vector{nearest(name, known)}")
    found = []
    for member in members:
        reference = member.vector.header.finetuned.get("reference")
        built_in = reference if isinstance(reference, str) and reference[:8] == "builtin:" else None
        if (text := given.get(member.name, built_in)) is None:
            raise UsageError(
                f"--rank-by features: nothing says what {member.name} was learned from; "
                f"give --images-of {member.name}=DATA"
            )
        found.append(text)
    return found


def _elements(info: BlockInfo) -> torch.Tensor:
    """Which elements of a block angles are estimated from."""
    size = math.prod(info.shape)
    if size <= _SAMPLED:
        return torch.arange(size)
    digest = hashlib.sha256(info.name.encode()).digest()[:7]
    random = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randint(size, (_SAMPLED,), generator=random)


def _some(block: Block, places: torch.Tensor) -> torch.Tensor:
    """Some elements, scaled to a largest magnitude of 1: only angles are wanted of them."""
    if isinstance(block, Dense):
        found = block.values.flatten()[places].float()
    elif isinstance(block, Quantised):
        width = block.values.numel() // len(block.scales)
        found = block.values.flatten()[places].float() * block.scales[places // width]
    else:
        found = storage.decode(block).flatten()[places]
    return found / found.abs().max().clamp(min=1e-30)


def rank(inputs: RunInputs) -> tuple[list[Member], Slopes, list[Pick]]:
    """The vectors of a run, what is known of them, and what is kept."""
    recipe = inputs.recipe
    members = [opened(path) for path in inputs.files]
    if not recipe.allow_target:
        refuse_target(members, inputs.datasets[0])
    gradient = gradient_at_base(inputs)
    names, _ = check_members(members, read_tensors(inputs.model), list(gradient))
    pool = measure(members, names, gradient)
    if recipe.rank_by == "features":
        pool = dataclasses.replace(pool, similarities=similarities(inputs, members))
    total = parse_bytes(recipe.budget) if recipe.budget else None
    smallest = pool.bytes[pool.bytes > 0].min().item()
    if total is not None and total < smallest:
        raise UsageError(
            f"--budget {recipe.budget}: the smallest block of the vectors takes {smallest:,.0f} "
            "bytes; nothing would be left"
        )
    picks = RANKINGS[recipe.rank_by](pool, Budget(total, recipe.keep_vectors, recipe.seed))
    if not any(pick.gain for pick in picks):
        raise UsageError("no block of the vectors changes the loss of these images")
    return members, pool, picks


def opened(path: str | GatheredVector) -> Member:
    """A vector that is not hashed: it is read once, and what is kept of it is written anew."""
    file = vector_file(path) if isinstance(path, str) else path.file
    vector = open_vector(file)
    called = (None if isinstance(path, str) else path.name) or vector.header.name
    vector = dataclasses.replace(vector, header=dataclasses.replace(vector.header, name=called))
    text = path if isinstance(path, str) else path.text
    return Member(called, text, "", vector, file)


def ranking_of(inputs: RunInputs) -> Ranking:
    """What `--rank-only` shows."""
    members, pool, picks = rank(inputs)
    rows = tuple(
        {
            **asdict(pick),
            "vector": members[pick.vector].name,
            "block": pool.names[pick.block],
            "storage": _word(members[pick.vector].vector.header, pool.names[pick.block], pick),
        }
        for pick in picks
    )
    kept = dict.fromkeys(members[pick.vector].name for pick in picks)
    size = sum(pick.bytes for pick in picks)
    whole = int(pool.bytes.sum().item())
    return Ranking(inputs.recipe.rank_by, size, whole, tuple(kept), rows)


def _word(header: Header, name: str, pick: Pick) -> str:
    if pick.storage != STORED:
        return pick.storage
    return next(info.storage for info in header.blocks if info.name == name)


def write_picked(inputs: RunInputs, folder: Path, tell: Callable[[str], None]) -> list[str]:
    """Write what is kept of every vector as a vector of its own, and give the paths."""
    members, pool, picks = rank(inputs)
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[int, dict[str, Pick]] = {}
    for pick in picks:
        wanted.setdefault(pick.vector, {})[pool.names[pick.block]] = pick
    found = []
    for number, own in sorted(wanted.items()):
        header = members[number].vector.header
        tensors: dict[str, torch.Tensor] = {}
        infos = []
        for info in header.blocks:
            if info.name in own:
                block, told = _kept(members[number], info, own[info.name])
                tensors |= stored_tensors(info.name, block)
                infos.append(told)
        path = folder / f"{number:03d}.safetensors"
        made = dataclasses.replace(header, blocks=tuple(infos), shared=None)
        write_tensors(path, tensors, to_metadata(made))
        found.append(str(path))
    size, whole = sum(pick.bytes for pick in picks), pool.bytes.sum().item()
    tell(
        f"kept {len(picks)} blocks of {len(found)} vectors, {size / 1e6:,.1f} of "
        f"{whole / 1e6:,.1f} MB (by {inputs.recipe.rank_by})"
    )
    return found


def _kept(member: Member, info: BlockInfo, pick: Pick) -> tuple[Block, BlockInfo]:
    block = member.vector.read(info.name)
    if pick.storage == STORED and info.storage != "rtvq":
        return block, info
    exact = storage.decode(block)
    few = storage.encode(Dense(exact), Form(pick.storage if pick.storage != STORED else "int4"))
    error = math.hypot(info.error, storage.relative_error(exact, few))
    return few, dataclasses.replace(info, storage=storage.storage_of(few), error=error, starts=())
