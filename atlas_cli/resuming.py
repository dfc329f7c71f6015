"""A moment of learning as tensors and JSON, and back, without losing a bit."""

from __future__ import annotations

import dataclasses

import torch

from atlas_cli.errors import CheckpointError
from atlas_cli.learn import Step
from atlas_cli.runs import Saved
from atlas_cli.selection import Check, Moment

_STATE = "state."


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
    state = {
        name.removeprefix(_STATE): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(_STATE)
    }
    step = Step(**facts["step"]) if facts["step"] else None
    return Moment(facts["stage"], step, checks, saved.tensors["best"], state)
