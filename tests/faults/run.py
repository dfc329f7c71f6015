"""One fault: a fresh folder, the command with the fault, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .commands import Command, digests
from .kinds import KINDS, Fault

LONGEST = 300.0  # seconds, far beyond what any of the commands takes
OLD = 3600.0
CODES = (0, 1, 2, 3, 130, 143, -1, -2, -9, -15)
TALK = ("atlas: ", "  ")  # how lines on stderr begin: messages, and rows of tables


@dataclass(frozen=True)
class Clean:
    """What a command gives when nothing happens."""

    out: str
    files: Mapping[str, str]
    seconds: float


@dataclass
class Outcome:
    """What became of a fault. `lost` and `left` say what went wrong; empty is good."""

    kind: str
    command: str
    detail: str
    seed: int
    code: int | None = None
    err: str = ""
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not (self.wrong or self.lost or self.left)


def begin(
    arguments: Sequence[str],
    folder: Path,
    limit: Callable[[], None] | None = None,
    shut: Sequence[int] = (),
    **more: str,
) -> subprocess.Popen[str]:
    """Start atlas in a folder, with a cache and a folder for temporary files of its own."""
    import warm

    environment = os.environ | {
        "ATLAS_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
        "HF_HOME": str(folder / "hf"),
        **more,
    }

    def prepare() -> None:
        if limit:
            limit()
        for number in shut:
            os.close(number)

    process = subprocess.Popen(
        [*warm.atlas(), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=prepare,
    )
    process.folder = folder.name  # type: ignore[attr-defined]
    return process


def fresh(inputs: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(inputs, place, symlinks=True)
    (place / "tmp").mkdir(exist_ok=True)
    return place


def clean(command: Command, inputs: Path, place: Path) -> Clean:
    """Run a command twice without any fault; files that differ are not compared."""
    found = []
    start = time.monotonic()
    for _ in range(2):
        folder = fresh(inputs, place)
        out, err = (process := begin(command.arguments, folder)).communicate(timeout=LONGEST)
        assert process.returncode == 0, (command.name, err)
        found.append((out, digests(folder / command.output) if command.output else {}))
    same = {name: one for name, one in found[0][1].items() if found[1][1].get(name) == one}
    return Clean(found[0][0], same, (time.monotonic() - start) / 2)


def one_fault(
    kind: str, seed: int, known: Mapping[str, Clean], inputs: Path, place: Path
) -> Outcome:
    """Let a fault of a kind happen, and look at what is there afterwards."""
    dice = random.Random(seed)
    make = KINDS[kind][0]
    seconds = sorted(one.seconds for one in known.values())[len(known) // 2]
    fault = make(dice, seconds)
    expected = known[fault.command.name]
    folder = fresh(inputs, place)
    outcome = Outcome(kind, fault.command.name, fault.detail, seed)
    fault.before(folder)
    outcome.detail = fault.detail
    around = fault.surroundings if not callable(fault.surroundings) else fault.surroundings(folder)
    with around or nullcontext({}) as more:
        _happen(fault, folder, more, outcome)
        outcome.detail = fault.detail
        target = _target(fault, folder)
        _judge(fault, outcome, expected, target, folder)
        again = fault.stopped or _cannot_remove(fault)
        if not outcome.wrong and again and target is not None:
            _go_on(fault, outcome, expected, target, folder)
    _look_for_orphans(folder, outcome)
    return outcome


def _happen(fault: Fault, folder: Path, more: Mapping[str, str], outcome: Outcome) -> None:
    arguments = list(fault.arguments or fault.command.arguments)
    processes = [
        begin(arguments, folder, fault.limit, fault.shut, **more) for _ in range(1 + fault.twin)
    ]
    try:
        fault.act(processes[0], folder)
        texts = [process.communicate(timeout=LONGEST) for process in processes]
    except subprocess.TimeoutExpired:
        outcome.wrong.append(f"still runs after {LONGEST:.0f} s")
        for process in processes:
            process.kill()
        texts = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    outcome.code = min(codes) if fault.twin else codes[0]
    outcome.out, outcome.err = texts[codes.index(outcome.code)][0], "".join(t[1] for t in texts)  # type: ignore[attr-defined]


def _target(fault: Fault, folder: Path) -> Path | None:
    if not fault.command.output:
        return None
    for before, given in zip(
        fault.command.arguments, fault.arguments or fault.command.arguments, strict=False
    ):
        if before == fault.command.output:
            return folder / given
    return folder / fault.command.output


def _judge(
    fault: Fault, outcome: Outcome, expected: Clean, target: Path | None, folder: Path
) -> None:
    errors = [line for line in outcome.err.splitlines() if line.startswith("atlas: error: ")]
    talk = [line for line in outcome.err.splitlines() if not line.startswith(TALK)]
    if outcome.code not in CODES:
        outcome.wrong.append(f"exit code {outcome.code}")
    if "Traceback" in outcome.err or talk:
        outcome.wrong.append(f"not one line: {talk[-1] if talk else ''}")
    if len(errors) > 1 + fault.twin and outcome.code != 2:
        outcome.wrong.append(f"{len(errors)} lines of errors")
    silent = 2 in fault.shut or fault.detail.startswith("write fails")  # also to stderr
    if outcome.code in (1, 2, 3) and not errors and not silent:
        outcome.wrong.append(f"exit code {outcome.code} without an error")
    if fault.harmless and outcome.code != 0:
        outcome.lost.append(f"exit code {outcome.code} for a fault that costs nothing")
    _compare(fault, outcome, expected, target)
    # What cannot be removed is removed by the next run, or told.
    told = ".lock" in fault.detail or "is in the way" in outcome.err
    cannot = told or _cannot_remove(fault)
    if outcome.code not in (-9, -1) and not fault.stopped and not cannot:
        _look_for_left_overs(folder, outcome)


def _cannot_remove(fault: Fault) -> bool:
    """Whether the system removes no file, or opens no folder to see what is in it."""
    return fault.detail.startswith(("unlink fails", "openat fails"))


def _compare(fault: Fault, outcome: Outcome, expected: Clean, target: Path | None) -> None:
    changed = bool(fault.command.inputs) and "while read" in outcome.kind
    same = outcome.kind not in ("damaged input", "lying Hub") and not changed
    if (
        outcome.code == 0
        and same
        and 1 not in fault.shut
        and outcome.out.replace("disk/", "") != expected.out
    ):  # type: ignore[attr-defined]
        outcome.lost.append("another text on stdout")
    if target is None or not os.path.lexists(target):
        if outcome.code == 0 and target is not None:
            outcome.lost.append("success without a result")
        return
    if outcome.code == 0 and same:
        found = digests(target)
        wrong = [name for name, one in expected.files.items() if found.get(name) != one]
        if wrong:
            outcome.lost.append(f"another result: {wrong[0]}")
        return
    alone = not (fault.command.again or fault.twin or fault.shut)
    found = digests(target) if outcome.code != 0 and alone else {}
    if found and any(found.get(name) != one for name, one in expected.files.items()):
        outcome.lost.append("something half-written looks whole")


def _go_on(fault: Fault, outcome: Outcome, expected: Clean, target: Path, folder: Path) -> None:
    """The same command again, or with --resume, gives what it would have given at once."""
    for path in folder.rglob(".*.part"):  # as if it had been left an hour ago
        if not path.is_symlink():
            os.utime(path, (time.time() - OLD,) * 2)
    if outcome.code == 0:
        return
    again = fault.command.again if target.exists() else ()
    if target.exists() and not again:
        found = digests(target)
        if any(found.get(name) != one for name, one in expected.files.items()):
            outcome.lost.append("what is there is not whole")
        return
    process = begin([*fault.command.arguments, *again], folder)
    _, err = process.communicate(timeout=LONGEST)
    if process.returncode:
        outcome.lost.append(f"cannot be gone on with: {err.splitlines()[-1:]}")
        return
    found = digests(target)
    wrong = [name for name, one in expected.files.items() if found.get(name) != one]
    if wrong:
        outcome.lost.append(f"goes on to another result: {wrong[0]}")
    _look_for_left_overs(folder, outcome)


def _look_for_left_overs(folder: Path, outcome: Outcome) -> None:
    parts = [p for p in folder.rglob("*") if p.name.startswith(".") and p.name not in (".locks",)]
    parts = [p for p in parts if "hf" not in p.relative_to(folder).parts]
    temporary = [
        p for p in (folder / "tmp").iterdir() if not p.name.startswith(("torchinductor", "pymp-"))
    ]
    outcome.left += [str(p.relative_to(folder)) for p in (*parts, *temporary)][:3]


def _look_for_orphans(folder: Path, outcome: Outcome) -> None:
    """No process still has this folder as its own; workers notice in 5 s that they are alone."""
    deadline = time.monotonic() + 30
    while orphans := _processes_in(folder):
        if time.monotonic() > deadline:
            outcome.left.append(f"processes {orphans}")
            return
        time.sleep(0.2)


def _processes_in(folder: Path) -> list[int]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found
