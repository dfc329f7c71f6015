"""What can happen to a command: each kind changes its surroundings, or acts while it runs."""

from __future__ import annotations

import http.server
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .commands import COMMANDS, Command

WITH_INPUTS = tuple(command for command in COMMANDS if command.inputs)
WITH_OUTPUT = tuple(command for command in COMMANDS if command.output)
SECONDS: dict[str, float] = {}  # that a command takes when nothing happens
RESUMABLE = tuple(command for command in COMMANDS if command.resumable)


@dataclass
class Fault:
    """One fault. `limit` runs in the new process, `act` beside it, `before` ahead of it."""

    command: Command
    detail: str
    before: Callable[[Path], None] = lambda folder: None
    limit: Callable[[], None] | None = None
    act: Callable[[subprocess.Popen[str], Path], None] = lambda process, folder: None
    surroundings: AbstractContextManager[dict[str, str]] = field(
        default_factory=lambda: nullcontext({})
    )
    arguments: Sequence[str] = ()
    shut: tuple[int, ...] = ()
    twin: bool = False  # two processes with the same command line
    harmless: bool = False  # the result must be there all the same
    stopped: bool = False  # what is left may be gone on with


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def signals(dice: random.Random, seconds: float) -> Fault:
    number = dice.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP))
    command = dice.choice(COMMANDS)
    moment = dice.uniform(0.02, SECONDS.get(command.name, seconds))

    def act(process: subprocess.Popen[str], folder: Path) -> None:
        _wait(process, moment)
        process.send_signal(number)

    return Fault(command, f"{number.name} after {moment:.2f} s", act=act, stopped=True)


def file_size(dice: random.Random, seconds: float) -> Fault:
    most = int(2 ** dice.uniform(3, 20))
    return Fault(
        dice.choice(WITH_OUTPUT),
        f"no file beyond {most} bytes",
        limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )


def open_files(dice: random.Random, seconds: float) -> Fault:
    most = dice.randint(4, 24)
    return Fault(
        dice.choice(COMMANDS),
        f"{most} open files",
        limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
    )


def memory(dice: random.Random, seconds: float) -> Fault:
    """The server of warm processes has taken what torch takes; this is what is left beyond it."""
    more = int(2 ** dice.uniform(20, 29))

    def limit() -> None:
        taken = _size_of_server()
        resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))

    return Fault(dice.choice(COMMANDS), f"{more >> 20} MB of memory", limit=limit)


def _size_of_server() -> int:
    return int(os.environ["FAULTS_SERVER_BYTES"])


def full_disk(dice: random.Random, seconds: float) -> Fault:
    """A disk of its own, on which some kilobytes are free."""
    free = int(2 ** dice.uniform(12, 18))

    @contextmanager
    def disk(folder: Path):
        place = folder / "disk"
        place.mkdir()
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={free}", "none", str(place)]
        subprocess.run(mounted, check=True, capture_output=True)
        try:
            yield {}
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    command = dice.choice(WITH_OUTPUT)
    fault = Fault(command, f"a disk of {free} bytes")
    fault.surroundings = disk  # type: ignore[assignment]
    fault.arguments = _with_output(command, f"disk/{command.output}")
    return fault


def _with_output(command: Command, place: str) -> list[str]:
    return [place if one == command.output else one for one in command.arguments]


def nowhere_to_write(dice: random.Random, seconds: float) -> Fault:
    command = dice.choice(WITH_OUTPUT)
    place = dice.choice(
        (
            "/proc/self/out",
            "/sys/kernel/out",
            "m1c/open_clip_config.json/out",
            "no/such/out",
            "/dev/null/out",
        )
    )
    return Fault(command, f"to {place}", arguments=_with_output(command, place))


def _some_file(folder: Path, command: Command, dice: random.Random) -> Path:
    name = dice.choice(list(command.inputs))
    path = folder / name
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return dice.choice(files)


def damage(path: Path, dice: random.Random) -> str:
    """Change a file as disks, networks and other programs do; say how."""
    content = path.read_bytes()
    how = dice.choice(("cut", "flip", "empty", "garbage", "delete", "link", "pipe", "folder"))
    if how == "cut":
        os.truncate(path, dice.randrange(len(content) + 1))
    elif how == "flip":
        changed = bytearray(content or b"x")
        for _ in range(dice.choice((1, 3, 30))):
            changed[
                dice.randrange(min(len(changed), 4096) if dice.random() < 0.7 else len(changed))
            ] ^= 1 << dice.randrange(8)
        path.write_bytes(changed)
    elif how in ("empty", "garbage"):
        path.write_bytes(dice.randbytes(300) if how == "garbage" else b"")
    else:
        path.unlink()
        if how == "link":
            path.symlink_to(dice.choice((path.name, "/etc/hostname", "missing")))
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
    return how


def damaged_input(dice: random.Random, seconds: float) -> Fault:
    command = dice.choice(WITH_INPUTS)
    fault = Fault(command, "")

    def before(folder: Path) -> None:
        path = _some_file(folder, command, dice)
        fault.detail = f"{path.relative_to(folder)}: {damage(path, dice)}"

    fault.before = before
    return fault


def changed_while_read(dice: random.Random, seconds: float) -> Fault:
    command = dice.choice(WITH_INPUTS)
    moment = dice.uniform(0.0, seconds)
    fault = Fault(command, "")

    def act(process: subprocess.Popen[str], folder: Path) -> None:
        path = _some_file(folder, command, dice)
        _wait(process, moment)
        fault.detail = f"{path.relative_to(folder)}: {damage(path, dice)} after {moment:.2f} s"

    fault.act = act
    return fault


def two_writers(dice: random.Random, seconds: float) -> Fault:
    return Fault(dice.choice(WITH_OUTPUT), "the same command twice", twin=True)


def closed_descriptors(dice: random.Random, seconds: float) -> Fault:
    shut = tuple(sorted(dice.sample((0, 1, 2), dice.randint(1, 3))))
    return Fault(dice.choice(COMMANDS), f"without {shut}", shut=shut, harmless=1 not in shut)


def damaged_cache(dice: random.Random, seconds: float) -> Fault:
    fault = Fault(dice.choice(COMMANDS), "", harmless=True)

    def before(folder: Path) -> None:
        shutil.copytree(folder.parent / "filled", folder / "cache")
        files = sorted(p for p in (folder / "cache").rglob("*") if p.is_file())
        path = dice.choice(files)
        how = damage(path, dice)
        fault.detail = f"{path.relative_to(folder / 'cache')}: {how}"

    fault.before = before
    return fault


def damaged_left_overs(dice: random.Random, seconds: float) -> Fault:
    """A run is killed, something in what it left is damaged, and it is gone on with."""
    command = dice.choice(RESUMABLE)
    fault = Fault(command, "", arguments=[*command.arguments, *command.again])

    def before(folder: Path) -> None:
        from .run import begin

        process = begin(command.arguments, folder)
        state = folder / ("out/state.safetensors" if command.again else ".out.part/journal")
        while process.poll() is None and not state.exists():
            time.sleep(0.001)
        _wait(process, dice.choice((0.0, 0.0, 0.01, 0.2)))
        process.kill()
        process.communicate()
        for path in folder.rglob(".*.part"):  # as if it had been killed an hour ago
            if not path.is_symlink():
                os.utime(path, (time.time() - 3600,) * 2)
        left = [
            p
            for p in folder.rglob("*")
            if p.is_file() and {"out", ".out.part"} & set(p.relative_to(folder).parts)
        ]
        if left and not (command.name == "merge" and (folder / "out").exists()):
            path = dice.choice(sorted(left))
            fault.detail = f"{path.relative_to(folder)}: {damage(path, dice)}"
        elif (folder / "out").exists():
            shutil.rmtree(folder / "out")

    fault.before = before
    return fault


class _Liar(http.server.BaseHTTPRequestHandler):
    """A Hub that answers anything with anything."""

    dice = random.Random(0)

    def do_GET(self) -> None:
        how = self.dice.choice(
            ("html", "garbage", "json", "huge", "cut", "other", "500", "redirect", "empty")
        )
        body = {
            "html": b"<html><title>Sign in</title></html>",
            "garbage": self.dice.randbytes(200),
            "json": self.dice.choice(
                (
                    b"[]",
                    b"{}",
                    b"null",
                    b'{"siblings":[{"rfilename":"../../x"}],"sha":"1"}',
                    b'{"siblings": 3}',
                )
            ),
            "huge": b"x",
            "cut": b"{",
            "other": b'{"id":"x/y","sha":"'
            + b"0" * 40
            + b'","siblings":[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]}',
            "500": b"broken",
            "redirect": b"",
            "empty": b"",
        }[how]
        with suppress(OSError):
            self.send_response({"500": 500, "redirect": 302}.get(how, 200))
            if how == "redirect":
                self.send_header("Location", "/elsewhere")
            length = {"huge": 10**13, "cut": 1000}.get(how, len(body))
            self.send_header("Content-Length", str(length))
            self.send_header("ETag", f'"{self.dice.choice(("a", "../../x", "0" * 40))}"')
            self.send_header("X-Repo-Commit", self.dice.choice(("0" * 40, "1" * 40, "../../x")))
            self.end_headers()
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815
    do_POST = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


def lying_hub(dice: random.Random, seconds: float) -> Fault:
    @contextmanager
    def served(folder: Path):
        handler = type("Liar", (_Liar,), {"dice": random.Random(dice.random())})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            port = server.server_address[1]
            yield {
                "HF_ENDPOINT": f"http://127.0.0.1:{port}",
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
            }
        finally:
            server.shutdown()
            server.server_close()

    wanted = dice.choice(("inspect", "eval"))
    command = next(one for one in COMMANDS if one.name == wanted)
    fault = Fault(command, "any answer to anything")
    fault.surroundings = served  # type: ignore[assignment]
    given = [
        one if one not in ("builtin:tiny", "v.safetensors") else "hf:owner/name"
        for one in command.arguments
    ]
    fault.arguments = given
    return fault


CALLS = (
    "write",
    "openat",
    "rename",
    "read",
    "mkdir",
    "unlink",
    "ftruncate",
    "fstat",
    "mmap",
    "clone3",
)
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT", "ENOMEM", "EMFILE")


def system_calls(dice: random.Random, seconds: float) -> Fault:
    """The n-th call of a kind that the command makes fails; strace sees to it."""
    call, error = dice.choice(CALLS[:7]), dice.choice(ERRORS)
    first = int(2 ** dice.uniform(0, 7))
    fault = Fault(dice.choice(WITH_OUTPUT), f"{call} fails with {error} from the {first}th on")

    def act(process: subprocess.Popen[str], folder: Path) -> None:
        child = _child_of(process)
        if child is None:
            return
        inject = f"inject={call}:error={error}:when={first}+{dice.choice((1, 5))}"
        tracer = subprocess.Popen(
            ["strace", "-f", "-q", "-p", str(child), "-o", "/dev/null", "-e", inject],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        tracer.terminate()
        tracer.wait()

    fault.act = act
    return fault


def _child_of(process: subprocess.Popen[str]) -> int | None:
    """The process that the server of warm processes has made for a command."""
    mark = os.environ["FAULTS_MARK"].encode()
    for _ in range(200):
        for status in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pid = int(status.parent.name)
                name = (status.parent / "cmdline").read_bytes()
                if b"warm.py" in name and (status.parent / "cwd").readlink().name == process.folder:  # type: ignore[attr-defined]
                    return pid
        if process.poll() is not None:
            return None
        time.sleep(0.005)
    return int(mark) if mark.isdigit() else None


KINDS: dict[str, tuple[Callable[[random.Random, float], Fault], int]] = {
    "signal at a random moment": (signals, 200),
    "full disk": (full_disk, 80),
    "limit of file size": (file_size, 80),
    "limit of open files": (open_files, 60),
    "limit of memory": (memory, 60),
    "failing system call": (system_calls, 60),
    "nowhere to write": (nowhere_to_write, 40),
    "damaged input": (damaged_input, 140),
    "input changed while read": (changed_while_read, 100),
    "two writers": (two_writers, 40),
    "closed descriptors": (closed_descriptors, 40),
    "damaged cache": (damaged_cache, 40),
    "damaged left-overs": (damaged_left_overs, 80),
    "lying Hub": (lying_hub, 40),
}
