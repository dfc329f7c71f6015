"""Fixtures: a cache of its own for every test, tiny models, and two ways to run atlas."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import json
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import warm
from faults import messages
from PIL import Image

TIMEOUT = 300  # seconds for another process; a busy machine may be ten times as slow as a quiet one
LONGEST = 3600  # seconds of a test, after which it fails and ends what it has started

# Small tensors gain nothing from several threads, and on a busy machine lose much to waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HF_TOKEN", None)
os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
# What atlas sets before it imports huggingface_hub, also in this process: see warm.py.
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_VERBOSITY": "error"}

# The same examples in every run, however long each takes; -m slow tries more.
_patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", derandomize=True, max_examples=25, **_patient)
hypothesis.settings.register_profile("slow", max_examples=200, **_patient)

TINY_CONFIG = {
    "embed_dim": 32,
    "quick_gelu": False,
    "vision_cfg": {
        "image_size": 32,
        "patch_size": 16,
        "width": 64,
        "layers": 2,
        "head_width": 32,
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 49408,
        "width": 32,
        "heads": 2,
        "layers": 1,
    },
}
_NUMBERS = itertools.count()
_ENVIRONMENT: dict[str, str] = {}  # as it was when the tests began
HALF = {"size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("markexpr")
    hypothesis.settings.load_profile("slow" if chosen == "slow" else "default")
    if messages.LOG not in os.environ:  # the processes of xdist share the notes of this one
        handle, os.environ[messages.LOG] = tempfile.mkstemp(prefix="atlas-messages-")
        os.close(handle)
        config.add_cleanup(Path(os.environ[messages.LOG]).unlink)
    messages.record()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """After a whole run, list the errors that no test has produced; .ci/run fails for them."""
    if hasattr(config, "workerinput") or not _is_whole(config):  # xdist asks its processes, too
        return
    if never := messages.missing(Path(os.environ[messages.LOG]))[0]:
        terminalreporter.section(f"{len(never)} errors that no test produces")
        for line in never:
            terminalreporter.line(line)


def _is_whole(config: pytest.Config) -> bool:
    """Whether all tests of the default suite run."""
    chosen = (config.getoption(name, None) for name in ("keyword", "deselect", "lf", "maxfail"))
    by_default = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return by_default and config.getoption("markexpr").startswith("not slow") and not any(chosen)


# These take longest: whoever began with one of them at the end would be waited for.
_FIRST = ("test_pretend_device.py", "test_walk.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _FIRST)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for caches: no test sees those of the user."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["HF_HOME"] = str(folder / "hf")
    _ENVIRONMENT.update(os.environ)
    return folder


@pytest.fixture(autouse=True)
def own_surroundings(home: Path) -> Iterator[None]:
    """Every test begins with an empty cache, ends, and leaves no process behind.

    What commands that ran in this process have set in its environment is forgotten: a warm process
    would have to start a new Python for it.
    """
    _restore(_ENVIRONMENT)
    os.environ["ATLAS_CACHE"] = str(home / f"cache{next(_NUMBERS)}")
    signal.signal(signal.SIGALRM, _fail)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    warm.kill_started()


def _restore(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)


def _fail(number: int, frame: object) -> None:
    pytest.fail(f"still runs after {LONGEST} s")


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run atlas as a process of its own, after `before`; `cold` is one without a warm start."""

    def run_atlas(
        *arguments: str | Path,
        stdin: str = "",
        before: Callable[[], None] | None = None,
        cold: bool = False,
        **environment: str,
    ) -> Result:
        done = subprocess.run(
            [*(warm.COLD if cold else warm.atlas()), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            env=os.environ | environment,
            timeout=TIMEOUT,
            preexec_fn=before,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run_atlas


@pytest.fixture
def on_terminal() -> Callable[..., str]:
    """Run atlas on a terminal of 100 columns and give all that it shows."""

    def show(*arguments: str | Path, columns: int = 100, **environment: str) -> str:
        reader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            [*warm.atlas(), *map(str, arguments)],
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm"} | environment,
        )
        os.close(terminal)
        shown = b""
        try:
            with contextlib.suppress(OSError):  # how the end of a terminal is told
                while piece := os.read(reader, 65536):
                    shown += piece
            assert process.wait(TIMEOUT) == 0, shown
        finally:
            process.kill()
            process.wait()
            os.close(reader)
        return shown.decode()

    return show


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a piece of Python in a process of its own and give what it prints."""

    def run_code(code: str, *arguments: str, **environment: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(
            command,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_code


@pytest.fixture
def as_ordinary_user(run: Callable[..., Result]) -> Callable[..., Result]:
    """Run atlas where file permissions hold: root loses the right to ignore them."""

    def run_restricted(*arguments: str | Path, **environment: str) -> Result:
        return run(*arguments, before=_respect_permissions, **environment)

    return run_restricted


def _respect_permissions() -> None:
    """Drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from what a program run by root gets."""
    if os.geteuid() == 0:
        for capability in (1, 2):
            assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run atlas within the test's own process: quicker, and the same code."""
    from atlas_cli.cli import console
    from atlas_cli.cli.app import main

    monkeypatch.setattr(console, "PAUSE", math.inf)  # as warm.py does

    def call_main(*arguments: str | Path) -> Result:
        capsys.readouterr()
        environment = dict(os.environ)
        code = main([str(argument) for argument in arguments])
        _restore(environment)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call_main


@pytest.fixture
def merge(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Merge a recipe into a folder, where ./base and ./m1 to ./m3 are, and give the folder."""
    from merge_runs import ROOMY, llama, write_model, write_recipe

    monkeypatch.chdir(tmp_path)
    for number in range(4):
        write_model(tmp_path / ("base" if number == 0 else f"m{number}"), llama(number))

    def run(recipe: dict[str, Any], *flags: str, to: str = "out") -> Path:
        path = write_recipe(tmp_path / f"{to}.yaml", recipe)
        result = call("merge", path, "-o", to, *ROOMY, *flags)
        assert (result.code, result.out) == (0, f"{to}\n"), result.err
        return tmp_path / to

    return run


@pytest.fixture
def refused(call, merge: Callable[..., Path], tmp_path: Path):
    """What a merge says when it fails, and that it leaves nothing behind."""
    from merge_runs import ROOMY, write_recipe

    def run(recipe: dict[str, Any], *flags: str, code: int = 1) -> str:
        before = {path.name for path in tmp_path.iterdir()} | {"bad.yaml"}
        result = call(
            "merge", write_recipe(tmp_path / "bad.yaml", recipe), "-o", "out", *ROOMY, *flags
        )
        assert (result.code, result.out) == (code, ""), result.err
        assert {path.name for path in tmp_path.iterdir()} == before
        assert len(result.error_lines) == 1
        return result.err

    return run


def write_open_clip(
    folder: Path, config: dict = TINY_CONFIG, preprocess: dict = HALF, *, seed: int = 0
) -> Path:
    """A folder as open_clip writes it, with random weights."""
    import torch
    from safetensors.torch import save_file

    from atlas_cli.models.clip import build
    from atlas_cli.models.folders import Blueprint

    torch.manual_seed(seed)
    module, _ = build(Blueprint(config, preprocess))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    (folder / "open_clip_config.json").write_text(text)
    weights = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def open_clip_folder(tmp_path: Path) -> Path:
    return write_open_clip(tmp_path / "model")


def write_images(
    folder: Path, classes: Sequence[str] = ("cat", "dog"), count: int = 3, seed: int = 0
) -> Path:
    """A folder with a sub-folder per class, of noise that differs by class."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_images(tmp_path / "photos")
