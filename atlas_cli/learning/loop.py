"""The training loop: compose, differentiate, step; score, save, and stop when asked."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from atlas_cli.core.optimizers import CoefficientOptimizer, make_optimizer
from atlas_cli.errors import AtlasError, CheckpointError
from atlas_cli.learning.batches import Step, TrainingConfig
from atlas_cli.learning.selection import Fold, Last, Policy, Score, Scoring, Selection, select
from atlas_cli.models.composed import ComposedModel, LossOf
from atlas_cli.registry import late

if TYPE_CHECKING:
    from atlas_cli.learning import ranks
    from atlas_cli.learning.run_folder import RunFolder, SavedRun
else:
    ranks = late("atlas_cli.learning.ranks")  # only where there are several processes

Values = TypeVar("Values")  # what is learned: a table of coefficients, or named weights
State = TypeVar("State")

_SAVE_EVERY = 1.0  # seconds, or if saving takes long:
_SAVE_SHARE = 0.02  # of the time
_OPTIMIZER_STATE = "state."


class Engine(Protocol[Values]):
    """What takes gradients: a module with something in it that is learned."""

    def load(self, values: Values, /) -> object:
        """From now on the module runs with these values."""

    def backward(self, images: torch.Tensor, loss_of: LossOf) -> torch.Tensor:
        """Add the gradients of a batch to those kept; gives the loss."""

    def gradient(self) -> Values:
        """The gradient of everything since the last call."""


class Optimizer(Protocol[Values]):
    """Moves values along gradients: AdamW, or one that takes two gradients per step."""

    number: int

    @property
    def scaler(self) -> torch.amp.GradScaler: ...

    @property
    def rate(self) -> float: ...

    @property
    def values(self) -> Values:
        """Where the next gradient is taken."""

    def step(self, gradient: Values, /) -> None:
        """Take a gradient; `number` grows once there were enough for a step."""

    back_to: int | None

    def goes_back(self, loss: float) -> bool: ...
    def skip(self) -> None: ...
    def reset(self) -> None: ...
    def state(self) -> dict[str, torch.Tensor]: ...
    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...


class TrainingData(Protocol):
    """Batches of images, each with the loss of its features."""

    epoch_steps: int
    steps: int

    def batches(self, step: int) -> Iterable[tuple[torch.Tensor, LossOf]]:
        """The parts of one step's batch; their losses add up to the step's loss."""

    def accuracy(self) -> float:
        """The share of the last step's images that were classified correctly."""

    def diverged(self) -> bool:
        """Whether the last step shows that training must start again."""

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on besides the values."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...


def descend(
    engine: Engine[Values], optimizer: Optimizer[Values], data: TrainingData
) -> Iterator[Step]:
    """Take the steps that remain and yield after each. The caller decides when to stop.

    Values are loaded once per gradient, however many parts its batch has. A batch without parts
    moves nothing.
    """
    while optimizer.number < data.steps:
        number, rate = optimizer.number, optimizer.rate
        while optimizer.number == number:
            loss = _gradient_at(engine, optimizer, data)
        if data.diverged():
            optimizer.reset()
        epoch = number // data.epoch_steps + 1
        yield Step(number + 1, epoch, loss, data.accuracy(), rate, optimizer.back_to)


def _gradient_at(engine: Engine[Values], optimizer: Optimizer[Values], data: TrainingData) -> float:
    """Give the optimizer one gradient at its values, and return the loss."""
    scaler, several = optimizer.scaler, torch.distributed.is_initialized()
    engine.load(optimizer.values)
    parts = data.batches(optimizer.number)
    losses = [
        engine.backward(images, _scaled(loss_of, scaler)).item() / scaler.get_scale()
        for images, loss_of in (ranks.shares(parts) if several else parts)
    ]
    loss, gradient = ranks.total(engine, data, losses) if several else (sum(losses), None)
    if optimizer.goes_back(loss):
        if losses and not several:
            engine.gradient()  # of no use
        return loss
    if not math.isfinite(loss):
        raise AtlasError(
            f"the loss became {loss} at step {optimizer.number + 1}; a lower learning rate may "
            f"help (it is {optimizer.rate:g} there)"
        )
    if gradient is not None or (losses and not several):
        optimizer.step(engine.gradient() if gradient is None else gradient)
    else:
        optimizer.skip()
    return loss


def _scaled(loss_of: LossOf, scaler: torch.amp.GradScaler) -> LossOf:
    return lambda features: scaler.scale(loss_of(features))


# Coefficients ---------------------------------------------------------------------------------


class Objective(Protocol):
    """What coefficients are trained and scored with. They descend from `start`."""

    @property
    def model(self) -> ComposedModel: ...

    @property
    def training(self) -> TrainingConfig: ...

    @property
    def start(self) -> torch.Tensor:
        """The coefficients before the first step."""

    @property
    def backtrack(self) -> tuple[float, ...]:
        """Shares of the last coefficients that are tried if no epoch is valid."""

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, as half precision needs."""

    def judge(self, fold: Fold, coefficients: torch.Tensor) -> Score:
        """The score of coefficients on the images that score a fold."""

    def training_data(self, fold: Fold) -> TrainingData: ...


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a step: all that going on depends on, and the best so far.

    `fold` counts the folds that are done. `state` is None between two folds.
    """

    fold: int
    step: Step | None
    scores: dict[str, list[Score]]
    best: torch.Tensor
    state: dict[str, torch.Tensor] | None = field(repr=False)


@dataclass(frozen=True)
class CoefficientTrainer:
    """Trains coefficients fold by fold. `measure` is what a step's accuracy is called."""

    objective: Objective
    policy: Policy
    measure: str = "top1"

    @property
    def steps(self) -> int:
        """How many steps all folds have."""
        return sum(self.objective.training_data(fold).steps for fold in self.policy.folds)

    @property
    def batch_size(self) -> int:
        return self.objective.training.batch_size

    def begin(self) -> Checkpoint:
        """Before the first step: zero-shot, which every fold that is scored must beat."""
        zero = torch.zeros_like(self.objective.start)
        scored = [fold for fold in self.policy.folds if fold.scoring is not Scoring.NEVER]
        scores = {fold.name: [self.objective.judge(fold, zero)] for fold in scored}
        return Checkpoint(0, None, scores, zero, None)

    def learn(self, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        """Train the folds that remain and yield after every step. The last has the result."""
        for number in range(checkpoint.fold, len(self.policy.folds)):
            for found in self._train_fold(number, checkpoint):
                checkpoint = found
                yield checkpoint

    def _train_fold(self, number: int, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
        objective, fold = self.objective, self.policy.folds[number]
        data = objective.training_data(fold)
        config, scaled = objective.training.optimizer_config, objective.scaled
        optimizer = make_optimizer(objective.start, data.steps, config, scaled=scaled)
        if checkpoint.state is not None:
            optimizer.restore(checkpoint.state)
            data.restore(checkpoint.state)
        scores, best = dict(checkpoint.scores), checkpoint.best
        limit = self.policy.steps(fold, scores, data.steps, data.epoch_steps)
        if optimizer.number >= limit:
            return
        for step in descend(objective.model, optimizer, data):
            last = step.number == limit
            if last and isinstance(optimizer, CoefficientOptimizer) and optimizer.is_lost:
                rates = f"from {config.rate:g} down to {optimizer.base_rate:g}"
                raise AtlasError(f"the loss diverged at every rate {rates}; try a lower one (--lr)")
            if _is_scored(fold, last=last, ends_epoch=step.number % data.epoch_steps == 0):
                best, found = self._score(fold, scores[fold.name], optimizer.values, best, last)
                scores = {**scores, fold.name: [*scores[fold.name], *found]}
            if last:
                best = self.policy.after_pass(number, optimizer.values, best)
            state = None if last else {**data.state(), **optimizer.state()}
            yield Checkpoint(number + last, step, scores, best, state)
            if last:
                return

    def _score(
        self, fold: Fold, before: list[Score], values: torch.Tensor, best: torch.Tensor, last: bool
    ) -> tuple[torch.Tensor, list[Score]]:
        """The best coefficients with these counted in, and the scores that are new."""
        found = self.objective.judge(fold, values)
        if self.policy.keeps(found, before):
            best = values
        if not (last and self.policy.backtracks and not best.any()):
            return best, [found]
        best, tried = self._backtrack(fold, values)
        return best, [found, *tried]

    def _backtrack(self, fold: Fold, last: torch.Tensor) -> tuple[torch.Tensor, list[Score]]:
        """The best of the last coefficients scaled down; zero if none of them is valid."""
        tables = [share * last for share in self.objective.backtrack]
        tried = [self.objective.judge(fold, table) for table in tables]
        valid = [number for number, score in enumerate(tried) if score.valid]
        if not valid:
            return torch.zeros_like(last), tried
        return tables[max(valid, key=lambda number: tried[number])], tried

    def select(self, checkpoint: Checkpoint) -> Selection:
        """What a run comes to. If it was stopped, its last coefficients may be kept as well."""
        scores, best = dict(checkpoint.scores), checkpoint.best
        if isinstance(self.policy, Last) and checkpoint.state is not None:
            fold = self.policy.fold
            config = self.objective.training.optimizer_config
            current = config.bounded(checkpoint.state["coefficients"])
            if fold.scoring is Scoring.NEVER:
                best = current
            else:
                found = self.objective.judge(fold, current)
                if self.policy.keeps(found, scores[fold.name]):
                    best = current
                scores[fold.name] = [*scores[fold.name], found]
        return select(best, scores)

    def step_of(self, checkpoint: Checkpoint) -> Step:
        assert checkpoint.step is not None
        return checkpoint.step

    def is_over(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.fold == len(self.policy.folds)

    def row(self, checkpoint: Checkpoint) -> dict[str, object]:
        """One line of metrics.jsonl."""
        ended = checkpoint.state is None  # then `fold` is the number of the next one
        fold = self.policy.folds[checkpoint.fold - ended]
        return {"stage": fold.name, **self.step_of(checkpoint).row(self.measure)}

    @staticmethod
    def to_saved(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a run's folder keeps of a checkpoint: named tensors, and the rest as JSON."""
        state = checkpoint.state or {}
        tensors = {f"{_OPTIMIZER_STATE}{name}": tensor for name, tensor in state.items()}
        scores = {
            name: [dataclasses.asdict(score) for score in found]
            for name, found in checkpoint.scores.items()
        }
        step = dataclasses.asdict(checkpoint.step) if checkpoint.step else None
        facts: dict[str, object] = {"stage": checkpoint.fold, "step": step, "checks": scores}
        return {"best": checkpoint.best, **tensors}, facts

    @staticmethod
    def from_saved(saved: SavedRun) -> Checkpoint:
        """The checkpoint that was saved, to the bit: JSON keeps the 64 bits of a number."""
        facts = saved.facts
        try:
            scores = {
                name: [Score(tuple(s["rank"]), s["values"], s["valid"]) for s in found]
                for name, found in facts["checks"].items()
            }
            step = Step(**facts["step"]) if facts["step"] else None
            state = saved.below(_OPTIMIZER_STATE) or None
            return Checkpoint(facts["stage"], step, scores, saved.tensors["best"], state)
        except (KeyError, TypeError, AttributeError) as problem:
            message = f"{saved.path}: is not the state of a run: {problem!r}"
            raise CheckpointError(message) from problem


def _is_scored(fold: Fold, *, last: bool, ends_epoch: bool) -> bool:
    if fold.scoring is Scoring.NEVER:
        return False
    return last or (fold.scoring is Scoring.EVERY_EPOCH and ends_epoch)


# Any training, saved as it goes ---------------------------------------------------------------


class Trainer(Protocol[State]):
    """A way to train: where it begins, what comes next, and how that is saved."""

    @property
    def steps(self) -> int: ...

    def begin(self) -> State: ...

    def learn(self, checkpoint: State, /) -> Iterator[State]: ...

    def step_of(self, checkpoint: State, /) -> Step: ...

    def is_over(self, checkpoint: State, /) -> bool: ...

    def row(self, checkpoint: State, /) -> dict[str, object]: ...

    def to_saved(self, checkpoint: State, /) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """The tensors and the facts that a run's folder keeps."""

    def from_saved(self, saved: SavedRun, /) -> State: ...


def train(
    trainer: Trainer[State],
    folder: RunFolder | None,
    *,
    resume: bool,
    stop: Callable[[], bool],
    on_checkpoint: Callable[[State, Step | None], None],
) -> State:
    """Train to the end, or until `stop` says so after a step.

    `on_checkpoint` gets the first checkpoint with None, and every other one with its step.
    """
    saved = folder.restore() if folder and resume else None
    saved = ranks.same(saved) if torch.distributed.is_initialized() else saved
    start = checkpoint = trainer.from_saved(saved) if saved else trainer.begin()
    on_checkpoint(checkpoint, None)
    clock, pause = time.monotonic(), _SAVE_EVERY
    for checkpoint in trainer.learn(start):
        on_checkpoint(checkpoint, trainer.step_of(checkpoint))
        if folder:
            folder.record(trainer.row(checkpoint))
            began = time.monotonic()
            if began - clock > pause or trainer.is_over(checkpoint):
                folder.save(*trainer.to_saved(checkpoint))
                clock = time.monotonic()
                pause = max(_SAVE_EVERY, (clock - began) / _SAVE_SHARE)
        if stop():
            break
    if folder and checkpoint is not start and not trainer.is_over(checkpoint):
        folder.save(*trainer.to_saved(checkpoint))  # stopped, or the last fold had no step to take
    return checkpoint
