"""A base, task vectors and images, opened and ready to learn coefficients with."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from atlas_cli import __version__
from atlas_cli.core.compose import Layout, Placement, Segments, Shapes, choose_layout
from atlas_cli.core.optimizers import OptimizerConfig
from atlas_cli.datasets.dataset import Dataset, content, plain_name, task_name
from atlas_cli.datasets.pixels import Pixels, view_of
from atlas_cli.errors import MismatchError
from atlas_cli.learning.batches import TrainingConfig
from atlas_cli.learning.selection import Policy
from atlas_cli.models.clip import Clip, open_model, zero_shot_head
from atlas_cli.models.composed import ComposedModel, FunctionalModel, LayerNormModel
from atlas_cli.models.folders import read_tensors
from atlas_cli.models.headed import HeadedModel
from atlas_cli.models.heads import head_of
from atlas_cli.parallel import thread_pool_for
from atlas_cli.recipes.fit import FitRecipe
from atlas_cli.recipes.learned import LearnedRecipe, VectorEntry
from atlas_cli.recipes.learning import LearnRecipe, parse_penalty
from atlas_cli.recipes.model import parse_bytes
from atlas_cli.recipes.text import MANY, Table, to_table
from atlas_cli.recipes.tta import TtaRecipe
from atlas_cli.registry import late
from atlas_cli.vectors.pool import (
    GatheredVector,
    Gathering,
    Member,
    Pool,
    compose_pool,
    open_pool,
    same_task,
    stored_vectors,
)

if TYPE_CHECKING:
    from atlas_cli.core.adapters import Head
    from atlas_cli.learning import sharded
    from atlas_cli.learning.run import RunInputs
    from atlas_cli.models import accelerator
else:  # only where they are asked for
    sharded = late("atlas_cli.learning.sharded")
    accelerator = late("atlas_cli.models.accelerator")

_PREFIX = "visual."
_PIXELS = 2**30  # bytes of decoded images that are kept


@dataclass(frozen=True)
class Setup:
    """The model, task vectors and images of a run, opened and made ready."""

    inputs: RunInputs
    clip: Clip
    pool: Pool
    layout: Layout
    model: ComposedModel
    tasks: tuple[Pixels, ...]
    heads: tuple[torch.Tensor | Head, ...]
    judges: tuple[Pixels, ...]

    def table(self, value: float = 0.0) -> torch.Tensor:
        """Coefficients that all have one value."""
        return torch.full(self.model.composition.shape, value, device=self.clip.device)

    def scales(self, last: float) -> Iterator[torch.Tensor]:
        """One scale for everything, in twenty steps to the last."""
        for number in range(1, _SCALES + 1):
            yield self.table(last * number / _SCALES)

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, since the model runs in half precision."""
        return self.model.accelerator is not None and self.model.accelerator.scaled


_SCALES = 20
ObjectiveFactory = Callable[[Setup], tuple[Any, Policy]]  # Any: an Objective of its own kind


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start."""

    setup: Setup
    objective: Any
    policy: Policy

    @property
    def inputs(self) -> RunInputs:
        """What the command was given."""
        return self.setup.inputs

    @property
    def pool(self) -> Pool:
        """The task vectors."""
        return self.setup.pool

    @property
    def layout(self) -> Layout:
        """The columns of the table of coefficients."""
        return self.setup.layout

    @property
    def large(self) -> bool:
        """Whether there are too many coefficients to write them as text."""
        return len(self.pool.members) * len(self.layout.labels) > MANY

    @property
    def unnamed(self) -> bool:
        """Whether coefficients are not listed one by one: too many, or of no task vector."""
        return self.large or not self.pool.members

    @property
    def source(self) -> str:
        """What is learned from, in a few words."""
        datasets = self.inputs.datasets
        images = sum(len(dataset.samples) for dataset in datasets)
        names = ", ".join(dataset.name for dataset in datasets)
        return f"from {images} images of {names}, seed {self.inputs.recipe.seed}."

    def table(self, coefficients: torch.Tensor) -> Table:
        """Coefficients under their names. A block that a vector lacks has none."""
        names = [member.name for member in self.pool.members]
        table = to_table(names, self.layout.labels, coefficients.tolist())
        for member in self.pool.members:
            unused = set(self.layout.labels) - labels_of(self.layout, member)
            for label in unused:
                del table[member.name][label]
        return table

    @cached_property
    def config(self) -> dict[str, Any]:
        """All that decides the result, as JSON. It hashes all images, so it is made once."""
        return config_of(self.inputs, self.setup.clip) | {
            "vectors": [_entry(member) for member in self.pool.members],
            "storage": self.pool.storage,
        }

    def plan(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is about to be learned, in words; and what was decided on the way there."""
        pool, memory = self.pool, self.inputs.recipe.memory
        rows, columns = self.setup.model.composition.shape
        if not pool.members and self.setup.inputs.command == "fit":
            adapter = self.inputs.recipe.adapter
            return (f"no vectors: {adapter} is fitted to the base's features",), ()
        if not pool.members:
            return (f"{columns:,} trainable parameters: those of the LayerNorms",), ()
        kept = f"{pool.bytes / 1e6:.1f} MB in memory, {pool.storage}"
        if pool.storage == "mapped":
            kept = f"read from their files each step, since they exceed --memory {memory}"
        elif pool.storage != "as stored":
            kept = f"{pool.bytes / 1e6:.1f} MB in memory as {pool.storage} (--memory {memory})"
        counted = f"{rows * columns:,} trainable parameters"
        each = f"for each of {rows} task vectors" if rows > 1 else "for one task vector"
        first = f"{counted}: {columns} coefficients {each}"
        details = [f"device: {self.setup.clip.device}; threads: {self.inputs.options.cores}"]
        details.append(f"vectors: {kept}")
        if pool.left:
            left = f"{len(pool.left)} blocks stay those of the base, such as {pool.left[0]}"
            details.append(f"{left}: they are no parameters")
        return (first,), tuple(details)

    def learned(self, coefficients: torch.Tensor, file: str | None) -> LearnedRecipe:
        """The recipe that merges what was learned; the table is in it unless it has a file."""
        recipe = self.inputs.recipe
        return LearnedRecipe(
            merge_method="atlas",
            base_model=recipe.model,
            vectors=[VectorEntry(**_entry(member)) for member in self.pool.members],
            coefficients=file or self.table(coefficients),
            granularity=recipe.granularity,
            groups=recipe.groups,
            linearised=recipe.linearised,
            seed=recipe.seed,
        )


def config_of(inputs: RunInputs, clip: Clip) -> dict[str, Any]:
    """All that decides a result apart from task vectors, as JSON."""
    return {
        "command": inputs.command,
        "recipe": inputs.recipe.model_dump(),
        "device": clip.device.type,
        "model": inputs.model.provenance(),
        "data": [describe_data(dataset) for dataset in inputs.datasets],
        "judges": [describe_data(dataset) for dataset in inputs.judges],
        **({"precision": inputs.options.precision} if inputs.options.precision != "auto" else {}),
        **({"compile": True} if inputs.options.compile else {}),
        "versions": {
            "atlas": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def labels_of(layout: Layout, member: Member) -> set[str]:
    """The coefficients that scale something of a vector."""
    found: set[str] = set()
    for name, placement in layout.placements.items():
        if name in member.vector.names:
            found |= set(placed_labels(layout, placement))
    return found


def placed_labels(layout: Layout, placement: Placement) -> list[str]:
    """The coefficients that scale something of a block."""
    if isinstance(placement, Segments):
        return [layout.labels[column] for column in placement.columns]
    return list(layout.labels[placement.first : placement.first + placement.parts])


def _entry(member: Member) -> dict[str, str]:
    kept = {"storage": member.storage} if member.storage else {}
    return {"name": member.name, "file": member.path, "sha256": member.sha256, **kept}


def describe_data(dataset: Dataset) -> dict[str, object]:
    """A dataset in a few words: its name and a hash of its images and labels, if it has any."""
    digest = hashlib.sha256(repr((dataset.classes, dataset.templates)).encode())
    for sample in dataset.samples:
        # The names of files tell classes: without labels, they must not matter.
        if sample.label is not None or dataset.keys_identify:
            facts = f"{sample.key}\0{sample.label}\0"
            digest.update(facts.encode("utf-8", "surrogateescape"))
        if not dataset.keys_identify:
            digest.update(sample.sha256 or content(dataset, sample))
    images = len(dataset.samples)
    return {
        "name": dataset.name,
        "split": dataset.split,
        "images": images,
        "sha256": digest.hexdigest(),
    }


def gathered(
    inputs: RunInputs, tell: Callable[[str], None], warn: Callable[[str], None]
) -> tuple[GatheredVector, ...]:
    """The files of the task vectors that a run names; those that are none yet are extracted."""
    recipe = inputs.recipe
    if not inputs.vectors:
        return ()
    target = (
        inputs.datasets[0] if isinstance(recipe, FitRecipe) and not recipe.allow_target else None
    )
    how = Gathering(
        storage=recipe.storage,
        exclude=tuple(recipe.exclude),
        keep_downloads=inputs.options.keep_downloads,
        architecture=recipe.arch,
        is_own=lambda name: target is not None and is_of(name, target),
        tell=tell,
        warn=warn,
    )
    found = stored_vectors(inputs.vectors, how)
    if found is None:
        from atlas_cli.vectors.gather import gather  # most vectors are files

        found = gather(inputs.vectors, inputs.model, how)
    return tuple(found)


@contextmanager
def prepared(
    inputs: RunInputs, objective_factory: ObjectiveFactory, warn: Callable[[str], None]
) -> Iterator[PreparedRun]:
    """Open everything, check that it fits together, and make it ready to learn."""
    recipe = inputs.recipe
    clip = open_model(inputs.model, inputs.opening)
    for doubt in clip.blueprint.doubts:
        warn(doubt)
    module: torch.nn.Module = clip.module.visual  # type: ignore[assignment]
    base = {f"{_PREFIX}{name}": tensor for name, tensor in module.named_parameters()}
    shares = inputs.options.shard_vectors and torch.distributed.is_initialized()
    budget = parse_bytes(recipe.memory)
    if shares and budget is not None:
        budget *= torch.distributed.get_world_size()  # it is that of each process
    norms = isinstance(recipe, TtaRecipe) and recipe.tune == "layernorm"
    pool = Pool((), (), (), "as stored", 0)
    if inputs.files and not norms:
        pool = open_pool(inputs.files, read_tensors(inputs.model), list(base), budget=budget)
    if isinstance(recipe, FitRecipe) and not recipe.allow_target:
        refuse_target(pool.members, inputs.datasets[0])
    layout = layout_of(recipe, pool.shapes)
    view = view_of(clip.preprocess)
    room = _PIXELS // (len(inputs.datasets) + len(inputs.judges))
    how = (view, room, clip.device, inputs.options.workers)
    tasks = tuple(Pixels(dataset, *how) for dataset in inputs.datasets)
    judges = tuple(Pixels(dataset, *how) for dataset in inputs.judges)
    # What is fitted with labels starts from the texts; what adapts takes the head that there is.
    choose = head_of if isinstance(recipe, TtaRecipe) and clip.has_head else zero_shot_head
    heads = tuple(
        choose(clip, dataset.classes, dataset.templates, warn) for dataset in inputs.datasets
    )
    limit = parse_bytes(inputs.options.device_memory or "") if clip.device.type != "cpu" else None
    hosted = limit is not None and pool.bytes > limit
    home = torch.device("cpu") if hosted else clip.device
    rows = sharded.own_rows(len(pool.members)) if shares else None
    composition = compose_pool(pool, base, layout, home, rows)
    if hosted:
        stacks = accelerator.HostedStacks(composition.stacks, clip.device)
        composition = replace(composition, stacks=stacks)
    with thread_pool_for(module, inputs.options.cores) as thread_pool:
        if norms:
            model: ComposedModel = LayerNormModel(module, prefix=_PREFIX, thread_pool=thread_pool)
        else:
            heads_too = isinstance(recipe, FitRecipe) and recipe.adapter != "none"
            kind = HeadedModel if heads_too else ComposedModel
            kind = sharded.sharded(kind) if shares else kind
            model = kind(
                module,
                composition,
                prefix=_PREFIX,
                thread_pool=thread_pool,
                linear=recipe.linearised,
            )
        accelerate(model, inputs, clip, warn)
        setup = Setup(inputs, clip, pool, layout, model, tasks, heads, judges)
        yield PreparedRun(setup, *objective_factory(setup))


def accelerate(
    model: FunctionalModel, inputs: RunInputs, clip: Clip, warn: Callable[[str], None]
) -> None:
    """Have the passes of a model run as its device and the options want; a plain CPU needs none."""
    precision, device = inputs.options.precision, clip.device
    if device.type != "cpu" or precision not in ("auto", "fp32"):
        last = accelerator.prefers_channels_last(clip.module.visual, device)  # type: ignore[arg-type]
        model.accelerator = accelerator.Accelerator(device, precision, warn, channels_last=last)
    if inputs.options.compile and inputs.recipe.linearised:
        warn("--compile: torch does not compile the derivatives of --linearised; it is not used")
    elif inputs.options.compile:
        accelerator.compile_model(model, warn)


def training_of(recipe: LearnRecipe, bounds: tuple[float, float] | None = None) -> TrainingConfig:
    """How a recipe wants images shown and coefficients moved."""
    order, weight = parse_penalty(recipe.penalty) if recipe.penalty else (1, 0.0)
    low, high = bounds or (-math.inf, math.inf)
    optimizer_config = OptimizerConfig(
        rate=recipe.lr,
        decay=recipe.weight_decay,
        clip=recipe.clip,
        penalty_order=order,
        penalty_weight=weight,
        schedule=recipe.schedule,
        backs_off=True,
        low=low,
        high=high,
    )
    return TrainingConfig(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        min_steps=recipe.min_steps,
        augment=recipe.augment,
        seed=recipe.seed,
        optimizer_config=optimizer_config,
    )


def layout_of(recipe: LearnRecipe | LearnedRecipe, shapes: Shapes) -> Layout:
    """The columns of the coefficient table that a recipe asks for."""
    return choose_layout(shapes, recipe.granularity, recipe.groups, recipe.seed)


def refuse_target(members: Iterable[Member], dataset: Dataset) -> None:
    """Refuse a vector that by its name was learned on the very data it is to be fitted to."""
    for member in members:
        if is_of(member.name, dataset):
            raise MismatchError(
                f"{member.path}: vector {member.name} seems to be learned on {dataset.name} "
                "itself; leave it out, or say --allow-target"
            )


def own_vector(pool: Pool, dataset: Dataset) -> int | None:
    """The number of the vector that by its name was learned on a dataset, if there is one."""
    owns = [is_of(member.name, dataset) for member in pool.members]
    return owns.index(True) if any(owns) else None


def is_of(name: str, dataset: Dataset) -> bool:
    """Whether by its name a vector was learned on a dataset."""
    return same_task(plain_name(name), plain_name(task_name(dataset)))
