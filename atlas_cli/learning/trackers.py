"""The metrics of a run for TensorBoard or Weights & Biases, beside metrics.jsonl in its folder.

A tracker is told what metrics.jsonl holds and nothing else. A run that is resumed tells it all rows
again, so that a log never has a step that the run does not have.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from atlas_cli.errors import AtlasError, UsageError, install_hint, nearest

_ID = "id"  # the file that keeps the name of a run on the server of Weights & Biases


class Tracker(Protocol):
    """What takes numbers by name and step."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder))
        text = json.dumps(config, indent=1, sort_keys=True)
        self._writer.add_text("config", f"```json\n{text}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `atlas`, or of the one that WANDB_PROJECT names.

    Whoever is not logged in logs offline, to be uploaded with `wandb sync`: asking for a key would
    stop a command that runs unattended.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")
        kept = folder / _ID
        name = kept.read_text("utf-8") if kept.exists() else secrets.token_hex(4)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kept.write_text(name, "utf-8")
        try:
            mode = mode or ("online" if wandb.setup().settings.api_key else "offline")
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "atlas",
                dir=str(folder.parent),
                name=folder.absolute().parent.name,
                id=name,
                resume="allow",
                config=dict(config),
                mode=mode,
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )
        except (wandb.Error, ValueError) as problem:  # its settings raise ValueError
            said = " ".join(str(problem).split())
            way_out = "WANDB_MODE=offline logs without a network"
            raise AtlasError(f"--log wandb: {said}; {way_out}") from problem

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_trackers(names: Sequence[str], folder: Path | None) -> None:
    """Raise UsageError unless these can follow a run, with the way to have what is missing."""
    for name in names:
        if name not in _KINDS:
            expected = f"expected {' or '.join(_KINDS)}"
            raise UsageError(f"--log {name}: {expected}{nearest(name, _KINDS)}")
        if find_spec(name) is None:
            raise UsageError(f"--log {name} needs {name}; run: {install_hint(name)}")
    if folder is None:
        raise UsageError("--log writes beside metrics.jsonl in the run's folder; name it: -o DIR")


class Trackers:
    """The trackers of one run. Rows count as steps, in the order of metrics.jsonl."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, object]) -> None:
        # Of several processes, the first one writes.
        chosen = dict.fromkeys(names) if os.environ.get("RANK", "0") == "0" else ()
        self._trackers: list[Tracker] = []
        for name in chosen:
            self._trackers.append(_KINDS[name](folder / name, config))
        self._rows = 0

    def rows(self, lines: Iterable[str]) -> None:
        """Log further rows of metrics.jsonl."""
        for line in lines:
            row = json.loads(line)
            self._rows += 1
            stage = str(row.pop("stage", "all")).replace("all", "train").replace(" ", "_")
            row.pop("number", None)
            self._log({f"{stage}/{key}": value for key, value in row.items()})

    def result(self, result: Mapping[str, object]) -> None:
        """Log what a run came to, at its last step."""
        self._log(dict(_numbers(result)))

    def _log(self, values: Mapping[str, object]) -> None:
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, self._rows)

    def close(self) -> None:
        """Write what waits, and let go of the files."""
        while self._trackers:
            self._trackers.pop().close()


def _numbers(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The accuracies of a result by name: on the images that selected, and on test images."""
    for key in ("zero_shot", "learned", "accuracy"):
        if isinstance(result.get(key), int | float):
            yield f"result/{key}", result[key]
    for score in result.get("test") or ():
        for key in ("zero_shot", "learned"):
            yield f"test/{score['task']}/{key}", score[key]
