"""A moment of learning as tensors and JSON, and back, without losing a bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.learn import Step
from atlas_cli.runs import Saved
from atlas_cli.selection import Check, Material, Moment, Stage, begin, learn

_STATE = "state."


@dataclass(frozen=True)
class Descents:
    """Coefficients that are learned in stages. `measure` is what is told of a step's images."""

    material: Material
    plan: Sequence[Stage]
    measure: str = "accuracy"

    @property
    def steps(self) -> int:
        """How many steps all stages have."""
        return sum(self.material.problem(stage).steps for stage in self.plan)

    @property
    def batch_size(self) -> int:
        """The images of a step."""
        return self.material.training.batch_size

    def begin(self) -> Moment:
        """Before the first step."""
        return begin(self.material, self.plan)

    def learn(self, moment: Moment) -> Iterator[Moment]:
        """What comes after a moment, step by step."""
        return learn(self.material, self.plan, moment)

    def step_of(self, moment: Moment) -> Step:
        """The last step."""
        assert moment.step is not None
        return moment.step

    def is_over(self, moment: Moment) -> bool:
        """Whether all stages are done."""
        return moment.stage == len(self.plan)

    def row(self, moment: Moment) -> dict[str, object]:
        """One line of metrics.jsonl."""
        ended = not moment.state  # the moment is that of the next stage already
        stage = self.plan[moment.stage - ended]
        found = dataclasses.asdict(self.step_of(moment))
        row = {self.measure if key == "accuracy" else key: found[key] for key in found}
        return {"stage": stage.name, **row}

    def to_saved(self, moment: Moment) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What a run's folder keeps of a moment."""
        return to_saved(moment)

    def from_saved(self, saved: Saved) -> Moment:
        """The moment that was saved."""
        return from_saved(saved)


def to_saved(moment: Moment) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """What a run's folder keeps of a moment."""
    tensors = {"best": moment.best}
    tensors |= {f"{_STATE}{name}": tensor for name, tensor in moment.state.items()}
    checks = {
        name: [dataclasses.asdict(check) for check in found]
        for name, found in moment.checks.items()
    }
    step = dataclasses.asdict(moment.step) if moment.step else None
    return tensors, {"stage": moment.stage, "step": step, "checks": checks}


def from_saved(saved: Saved) -> Moment:
    """The moment that was saved. JSON keeps the 64 bits of a number."""
    try:
        return _moment(saved)
    except (KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{saved.path}: is not the state of a run: {problem!r}") from problem


def _check(rank: list[float], values: dict[str, float], valid: bool) -> Check:
    return Check(tuple(rank), values, valid)


def _moment(saved: Saved) -> Moment:
    facts = saved.facts
    checks = {name: [_check(**kept) for kept in found] for name, found in facts["checks"].items()}
    state = below(_STATE, saved.tensors)
    step = Step(**facts["step"]) if facts["step"] else None
    return Moment(facts["stage"], step, checks, saved.tensors["best"], state)


def below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
