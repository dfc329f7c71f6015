"""atlas as a process that starts at once: forked from a server that has imported what is slow.

    subprocess.run([*atlas(), "eval", "builtin:tiny", ...])

`atlas()` names a program, also for pipes in a shell, and starts the server when it is first
called. The program passes its arguments, environment, folder, limits, rights and open streams to
the server, which forks a child that becomes the command through the same `run()` as the installed
`atlas`. Signals go on to the child, and its exit code or the signal that ended it comes back. A
child is killed when the program is, and every child when the server ends, which it does together
with the tests.

Settings that libraries read while they are imported cannot change afterwards, except for those of
huggingface_hub, which are read anew, and folders in front of the server's PYTHONPATH, which come
to stand in front of sys.path: with others than the server's, the program starts a new Python
instead, which takes some seconds. `COLD` is the command that always does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import math
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# What libraries read from the environment when they are imported: names begin with one of these.
READ_ANEW = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN")
SETTINGS = ("HF_", "HUGGING", "PYTHON", "OMP_", "MKL_", "LD_", "LC_", "LANG")
COLD = [sys.executable, "-m", "atlas_cli"]
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_started: list[subprocess.Popen[Any]] = []
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG

PROGRAM = """#!{python} -IS
import json, os, resource, signal, socket, sys
SETTINGS, READ_ANEW, LIMITS = {settings!r}, {read_anew!r}, {limits!r}
found = {{k: v for k, v in os.environ.items() if k.startswith(SETTINGS) and k not in READ_ANEW}}
paths, known = found.pop("PYTHONPATH", ""), {known!r}
usual = known.pop("PYTHONPATH", "")
added = paths.removesuffix(usual)
if found != known or added + usual != paths or (added and usual and not added.endswith(":")):
    os.execv({python!r}, [{python!r}, "-m", "atlas_cli", *sys.argv[1:]])
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
streams = [number for number in (0, 1, 2) if is_open(number)]
child, early = 0, []
def forward(number, frame):
    os.kill(child, number) if child else early.append(number)
def rights():
    try:
        with open("/proc/self/status") as status:
            return int(status.read().partition("CapEff:")[2].split()[0], 16)
    except OSError:
        return None
ignored = [number for number in (2, 15) if signal.getsignal(number) == signal.SIG_IGN]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, forward)
os.umask(mask := os.umask(0))
asked = json.dumps({{
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "umask": mask,
    "streams": streams,
    "limits": [resource.getrlimit(limit) for limit in LIMITS],
    "ignored": ignored,
    "rights": rights(),
    "paths": [path for path in added.split(":") if path],
}}).encode("utf-8", "surrogateescape")
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [len(asked).to_bytes(8, "big")], streams)
server.sendall(asked)
answers = server.makefile()
child = int(answers.readline() or sys.exit("there is no server of warm processes"))
for number in early:
    os.kill(child, number)
status = answers.readline()
if not status:
    sys.exit("the server of warm processes has ended")
code = os.waitstatus_to_exitcode(int(status))
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def atlas() -> list[str]:
    """The program, as the beginning of a command line; its server ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="atlas-warm-")
    address, program = Path(folder.name) / "server", Path(folder.name) / "atlas"
    found = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    with socket.socket(socket.AF_UNIX) as listening:  # at once: the first client need not wait
        listening.bind(str(address))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
        )
    program.write_text(
        PROGRAM.format(
            python=sys.executable,
            settings=SETTINGS,
            read_anew=READ_ANEW,
            limits=LIMITS,
            known={name: value for name, value in found.items() if name not in READ_ANEW},
            address=str(address),
        )
    )
    program.chmod(0o755)

    def end() -> None:
        assert server.stdin
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return [str(program)]


def start(*arguments: str | Path, **more: Any) -> subprocess.Popen[Any]:
    """A process of atlas with pipes; it is killed after the test if it still runs."""
    pipe = subprocess.PIPE
    given = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, **more}
    process = subprocess.Popen([*atlas(), *map(str, arguments)], **given)
    _started.append(process)
    return process


def kill_started() -> None:
    """End what start() began and the test left running."""
    while _started:
        process = _started.pop()
        with process:  # closes its pipes and waits for it
            if process.poll() is None:
                process.kill()


def serve(listening: socket.socket) -> None:
    """Fork a child for every client until stdin is closed, then kill all that are left."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as run() does, before numpy is there

    from faults import messages

    from atlas_cli import __main__  # noqa: F401
    from atlas_cli.cli import app, console, warm  # noqa: F401
    from atlas_cli.models.clip import open_tokenizer

    messages.record()
    console.PAUSE = math.inf  # how slow the machine is today is no part of what a command says
    for length in (16, 32, 77):  # of the models in tests, of the built-in one and of CLIP
        open_tokenizer({"text_cfg": {"context_length": length}}, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: the tests decide
    wakeup, ended = os.pipe()
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(ended)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    gc.freeze()
    children: dict[int, socket.socket] = {}  # by process id
    with selectors.DefaultSelector() as selector:
        for one in (sys.stdin.fileno(), wakeup, listening):
            selector.register(one, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            for client in set(ready) & set(children.values()):  # before any new one is begun
                _kill(next(pid for pid, known in children.items() if known is client))
            if sys.stdin.fileno() in ready:
                break
            if wakeup in ready:
                os.read(wakeup, 1024)
            for pid, status in _ended(children):
                client = children.pop(pid)
                selector.unregister(client)
                with contextlib.suppress(OSError), client:
                    client.sendall(f"{status}\n".encode())
            if listening in ready:
                client, _ = listening.accept()
                if pid := _begin(client, [listening, *children.values()]):
                    children[pid] = client
                    selector.register(client, selectors.EVENT_READ)
    for pid in children:
        _kill(pid)


def _kill(pid: int) -> None:
    """End a child whose client has gone, and wait until it has; it is still to be waited for."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _ended(children: dict[int, socket.socket]) -> list[tuple[int, int]]:
    return [found for pid in children if (found := os.waitpid(pid, os.WNOHANG))[0]]


def _begin(client: socket.socket, others: list[socket.socket]) -> int:
    """The process of the command that a client asks for; 0 if the client left before asking."""
    try:
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        if not size:
            client.close()
            return 0
        asked = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
    except ConnectionError:
        client.close()
        return 0
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            client.sendall(f"{pid}\n".encode())
        return pid
    try:
        for other in (client, *others):
            other.close()
        _become(asked, streams)
    finally:
        os._exit(70)  # only if what makes a process of it fails


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Run the command as a process that was started with these arguments and surroundings."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
    known = {name: os.environ.get(name) for name in READ_ANEW}
    os.environ.clear()
    os.environ.update(asked["environment"])
    if known != {name: os.environ.get(name) for name in READ_ANEW}:
        importlib.reload(sys.modules["huggingface_hub.constants"])
    sys.path[:0] = asked["paths"]
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    for limit, (soft, hard) in zip(LIMITS, asked["limits"], strict=True):
        resource.setrlimit(limit, (soft, hard))
    os.closerange(0, 3)
    for number, stream in zip(asked["streams"], streams, strict=True):
        os.dup2(stream, number)
    os.closerange(3, 256)
    _open_streams(asked["streams"])
    _take_rights(asked["rights"])

    from atlas_cli import __main__

    sys.argv = [__main__.__file__, *asked["arguments"]]
    try:
        __main__.run()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else bool(leaving.code)
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.flush()
        os._exit(code)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def _take_rights(capabilities: int | None) -> None:
    """Have the client's capabilities, which a test may have taken from it, and no others."""
    if capabilities is not None:
        low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
        version = struct.pack("Ii", 0x20080522, 0)
        asked = struct.pack("6I", low, low, 0, high, high, 0)  # effective, permitted, inheritable
        assert ctypes.CDLL(None).capset(version, asked) == 0


def _open_streams(numbers: list[int]) -> None:
    """stdin, stdout and stderr as a new Python makes them."""
    for number, name, mode, errors in (
        (0, "stdin", "rb", "strict"),
        (1, "stdout", "wb", "strict"),
        (2, "stderr", "wb", "backslashreplace"),
    ):
        made = None
        if number in numbers:
            buffered = open(number, mode, closefd=False)  # noqa: SIM115
            buffered.raw.name = f"<{name}>"
            lines = number == 2 or (number == 1 and os.isatty(number))
            made = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=lines)
            made.mode = mode[0]
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
