"""Every case is run, and what it did is written down."""

from __future__ import annotations

import fnmatch
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cases import every_case
from plain import LONGEST, Plain
from running import find_main, run, warm_up

MANY = 100  # files of one case, which are told together
SLOWEST = 5  # cases that are told
Stamp = tuple[int, int, int]


def make(target: Path, keep: Path | None, only: str) -> None:
    """Run every case, or those whose names match, and write down what they did."""
    target = target.resolve()
    folder = keep.resolve() if keep else Path(tempfile.mkdtemp(prefix="golden-")).resolve()
    began = time.monotonic()
    try:
        found = _make(folder, only)
    finally:
        if not keep:
            os.chdir("/")
            shutil.rmtree(folder)
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(found['cases'])} cases in {time.monotonic() - began:.0f} s -> {target}")


def _make(folder: Path, only: str) -> dict[str, Any]:
    work, between = folder / "work", folder / "between"
    for place in (work, between, folder / "home", folder / "tmp"):
        place.mkdir(parents=True)
    _surround(folder)
    os.chdir(work)
    warm_up()
    main = find_main()
    facts, versions = _facts()
    print(f"atlas of {importlib.import_module('atlas_cli').__path__[0]}", flush=True)
    plain = Plain(folder, versions)
    gc.set_threshold(100_000)
    gc.collect()
    gc.freeze()  # a fork that looks for garbage would copy everything
    cases: dict[str, Any] = {}
    took: dict[str, float] = {}
    before: dict[str, Stamp] = {}
    for one in every_case(work):
        if not fnmatch.fnmatchcase(one.name, only):
            continue
        assert one.name not in cases, f"two cases are called {one.name}"
        before = _learn_files(plain, work, before)
        found = run(one, main, between)
        took[one.name] = found.seconds
        after = stamps(work)
        files = _written(plain, work, before, after)  # first: others tell their digests
        cases[one.name] = {
            "line": plain.text(shlex.join(one.words)),
            "exit": found.code,
            "stdout": _shown(plain, found.out),
            "stderr": plain.text(found.err.decode("utf-8", "replace")),
            "files": files,
        }
        before = after
    for name in sorted(took, key=lambda name: -took[name])[:SLOWEST]:
        print(f"{took[name]:6.1f} s  {name}")
    return {"metadata": facts, "cases": cases, "contents": plain.contents}


def _surround(folder: Path) -> None:
    """Caches of its own, no network, one thread, plain text."""
    given = {
        "HOME": folder / "home",
        "ATLAS_CACHE": folder / "home" / "atlas",
        "HF_HOME": folder / "home" / "hf",
        "MPLCONFIGDIR": folder / "home" / "matplotlib",
        "TMPDIR": folder / "tmp",
        "HF_HUB_OFFLINE": 1,
        "COLUMNS": 200,
        "NO_COLOR": 1,
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": 1,
        "OPENBLAS_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in given.items()})
    for name in ("HF_TOKEN", "HF_ENDPOINT", "PYTHONWARNINGS"):
        os.environ.pop(name, None)
    tempfile.tempdir = None
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    if PathFinder.find_spec("atlas_cli"):  # an editable installation would fill its gaps
        sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in _module_of(one)]


def _module_of(finder: object) -> str:
    return str(getattr(finder, "__module__", ""))


def _facts() -> tuple[dict[str, Any], dict[str, str]]:
    """What results may depend on beside the code, and versions that are printed."""
    torch = importlib.import_module("torch")
    package = importlib.import_module("atlas_cli")
    kernels = [path for folder in package.__path__ for path in Path(folder).rglob("_kernels*.so")]
    facts = {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "kernels": bool(kernels),
    }
    versions = {name: facts[name] for name in ("torch", "python")}
    return facts, {**versions, "atlas": package.__version__}


def _learn_files(plain: Plain, work: Path, before: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """Take the digests of inputs that were made since the last case.

    What torch.save has written is known by its name: the older layout has addresses in it.
    """
    now = stamps(work)
    for name in now:
        if before.get(name) != now[name]:
            content = (work / name).read_bytes()
            plain.digest(content, name.encode() if name.endswith(".pt") else None)
    return now


def _shown(plain: Plain, out: bytes) -> str:
    """What went to stdout: as it is, or its beginning and its digest."""
    try:
        text = plain.text(out.decode())
    except UnicodeDecodeError:
        return f"{len(out)} bytes, sha256 {plain.digest(out)}"
    return text if len(text) <= LONGEST else f"{len(text)} letters, sha256 {plain.keep(text)}"


def _written(
    plain: Plain, work: Path, before: Mapping[str, Stamp], after: Mapping[str, Stamp]
) -> dict[str, str]:
    changed = [name for name in after if before.get(name) != after[name]]
    # Those first that others tell the digest of.
    changed.sort(key=lambda name: (not name.endswith(".safetensors"), name))
    found: dict[str, str] = {}
    for name in changed:
        found |= plain.parts(name, (work / name).read_bytes())
    found |= {name: "removed" for name in before if name not in after}
    return _in_short(dict(sorted(found.items())))


def _in_short(found: dict[str, str]) -> dict[str, str]:
    """Digests of files, with one for all if there are very many."""
    if len(found) <= MANY:
        return found
    text = json.dumps(found)
    return {f"{len(found)} files": hashlib.sha256(text.encode()).hexdigest()}


def stamps(folder: Path) -> dict[str, Stamp]:
    """Every file below a folder, and what tells whether it was changed."""
    found: dict[str, Stamp] = {}
    waiting = [(str(folder), "")]
    while waiting:
        place, prefix = waiting.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                    continue
                status = entry.stat(follow_symlinks=False)
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                found[f"{prefix}{entry.name}"] = stamp
    return dict(sorted(found.items()))
