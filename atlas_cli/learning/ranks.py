"""Learning in several processes of torch.distributed: each takes its share of every batch.

Every process ("rank") composes the same model and sees the same batches. It runs its share of the
images, and the ranks sum what is small: the gradient of the coefficients with the loss and a few
counts, in one message per gradient. Objectives that look at a batch as a whole, such as those
without labels, gather the features of the batch as well. Everything else is computed by all alike.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from atlas_cli.errors import AtlasError
from atlas_cli.models.composed import LossOf

_TIMEOUT = 600.0  # seconds for an answer; ATLAS_TIMEOUT says otherwise
GRACE = 10.0  # seconds in which the launcher ends a rank whose peer failed
Value = TypeVar("Value")
# What this rank sends, as a ring does; of `blocks` those of shared vectors, beside the gradients.
sent = {"messages": 0, "bytes": 0, "blocks": 0, "steps": 0}


def start(count: int, command: list[str]) -> tuple[int, str]:
    """Run a command in some processes by torch's launcher: the exit code, and what to say of it."""
    logging.disable(logging.CRITICAL)  # torch's loggers each have a level of their own
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"atlas-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as ended:
        return (130, "interrupted") if ended.sigval == signal.SIGINT else (143, "terminated")
    except ChildFailedError as problem:
        return _first_cause({rank: one.exitcode for rank, one in problem.failures.items()})
    return 0, ""


def _first_cause(codes: Mapping[int, int]) -> tuple[int, str]:
    """The exit code of a run whose ranks ended so; the launcher ends the others by SIGTERM."""
    ended = {128 + signal.SIGTERM, -signal.SIGTERM}
    for code in codes.values():
        if code > 0 and code not in {130, *ended}:
            return code, ""
    if {130, -signal.SIGINT} & set(
        codes.values()
    ):  # all others were asked to stop and save, and then terminated
        return 130, "interrupted"
    for rank, code in codes.items():
        if code < 0 and code not in ended:
            name = signal.Signals(-code).name
            return 1, f"error: process {rank} was ended by {name}; --resume goes on"
    return 143, "terminated"


def join(device: str) -> None:
    """Join the processes that the environment tells of, as torchrun sets it."""
    backend = "nccl" if device.startswith("cuda") and torch.cuda.is_available() else "gloo"
    seconds = float(os.environ.get("ATLAS_TIMEOUT") or _TIMEOUT)
    with _answered():
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))


def leave() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _answered() -> Iterator[None]:
    """Turn what torch says of a peer that went into one line, unless the launcher comes first."""
    try:
        yield
    except RuntimeError as problem:
        time.sleep(GRACE)
        raise AtlasError(
            "another process of this run ended or does not answer; its own message says why, and "
            "--resume goes on with any number of processes"
        ) from problem


def _count(tensor: torch.Tensor, rounds: int, kind: str = "bytes") -> None:
    ranks = dist.get_world_size()
    sent["messages"] += 1
    sent[kind] += rounds * (ranks - 1) * tensor.numel() * tensor.element_size() // ranks


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    with _answered():
        dist.all_reduce(tensor)
    _count(tensor, 2)
    return tensor


class BlockSums:
    """Sums of tensors over the ranks, in place, under way while the next tensors are made."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to sum tensors; all ranks give the same ones in the same order."""
        for tensor in tensors:
            with _answered():
                self._waiting.append(dist.all_reduce(tensor, async_op=True))
            _count(tensor, 2, "blocks")

    def wait(self) -> None:
        """Wait until all are summed."""
        with _answered():
            for one in self._waiting:
                one.wait()
        self._waiting = []


def number() -> int:
    """The number of this rank; 0 where there is one process only."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def same(value: Value) -> Value:
    """What the first rank has, on every rank."""
    found = [value]
    with _answered():
        dist.broadcast_object_list(found)
    return found[0]


def share(values: Sequence[Value]) -> Sequence[Value]:
    """This rank's share of a list: a contiguous part; all of it if there are too few."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if len(values) < ranks:
        return values
    return values[len(values) * rank // ranks : len(values) * (rank + 1) // ranks]


def joined(values: Sequence[Value], count: int) -> list[Value]:
    """The shares of all ranks, one after the other; `values` if they are all there were."""
    if count < dist.get_world_size():
        return list(values)
    found: list[Any] = [None] * dist.get_world_size()
    with _answered():
        dist.all_gather_object(found, list(values))
    return [value for some in found for value in some]


# Stopping -------------------------------------------------------------------------------------

_asked: dict[str, Any] = {"stop": None, "agreed": None}


def agreed(stop: Callable[[], bool]) -> Callable[[], bool]:
    """Stop once any rank is asked to: all learn of it with the next gradient, or when they ask."""
    _asked["stop"] = stop

    def ask() -> bool:
        known, _asked["agreed"] = _asked["agreed"], None
        return bool(_sum(torch.tensor(float(stop()))) > 0) if known is None else bool(known)

    return ask


# Batches --------------------------------------------------------------------------------------


def shares(
    parts: Iterable[tuple[torch.Tensor, LossOf]],
) -> Iterator[tuple[torch.Tensor, LossOf]]:
    """This rank's share of every part of a batch; the losses of all ranks add up to the part's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for images, loss_of in parts:
        rows = torch.arange(len(images)).tensor_split(ranks)
        if hasattr(loss_of, "of_rows"):
            if len(rows[rank]):
                yield images[rows[rank].to(images.device)], loss_of.of_rows(rows[rank].tolist())
        elif len(images) < ranks:  # too few to share: all run all
            yield images, _divided(loss_of, ranks)
        else:
            sizes = [len(some) for some in rows]
            yield images[rows[rank].to(images.device)], _of_all(loss_of, sizes)


def _divided(loss_of: LossOf, ranks: int) -> LossOf:
    return lambda features: loss_of(features) / ranks


def _of_all(loss_of: LossOf, sizes: list[int]) -> LossOf:
    """The loss of a whole batch, as a function of the features of this rank's images."""
    return lambda features: loss_of(_Gathered.apply(features, sizes)) / len(sizes)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """The features of all ranks. The loss that follows is divided by their number."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        padded = features.new_zeros((max(sizes), *features.shape[1:]))
        padded[: len(features)] = features
        found = [torch.empty_like(padded) for _ in sizes]
        with _answered():
            dist.all_gather(found, padded)
        _count(padded, len(sizes))
        return torch.cat([some[:size] for some, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.split(ctx.sizes)[dist.get_rank()] * len(ctx.sizes), None


def total(engine: Any, data: Any, losses: list[float]) -> tuple[float, Any]:
    """The loss and the gradient of all ranks' shares; no gradient if no rank had an image."""
    values = getattr(engine, "values", None)
    gradient = engine.gradient() if losses or values is None else {}
    if isinstance(values, Mapping):
        tensors = [gradient.get(n, torch.zeros_like(t)) for n, t in values.items()]
    else:
        tensors = [gradient]
    stop = _asked["stop"] or (lambda: False)
    facts = [sum(losses), len(losses), data.hits, data.seen, float(stop())]
    flat = torch.cat([*(t.flatten() for t in tensors), tensors[0].new_tensor(facts)])
    loss, parts, data.hits, data.seen, stopping = _sum(flat)[-len(facts) :].tolist()
    sent["steps"] += 1
    _asked["agreed"] = stopping > 0
    pieces = flat[: -len(facts)].split([tensor.numel() for tensor in tensors])
    made = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
    found = dict(zip(values, made, strict=True)) if isinstance(values, Mapping) else made[0]
    return loss, found if parts else None
