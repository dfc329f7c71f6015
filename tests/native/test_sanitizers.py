"""The loops in C touch no memory that is not theirs and do nothing that C leaves undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")


@pytest.mark.slow
def test_the_tests_of_the_loops_pass_under_sanitizers(tmp_path: Path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to build the loops with sanitizers")
    package = tmp_path / "atlas_cli"
    shutil.copytree(
        ROOT / "atlas_cli", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    source, built = package / "native" / "kernels.c", package / "native" / "_kernels.abi3.so"
    headers = f"-I{sysconfig.get_path('include')}"
    command = [compiler, *SANITIZERS, *FLAGS, "-shared", "-fPIC", headers, source, "-o", built]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this gcc has no libasan or libubsan")
    assert done.returncode == 0, done.stderr
    # An instrumented library in a program that is not: the runtime has to be loaded first.
    runtimes = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(found.stdout.strip() for found in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python itself frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(tmp_path),
    }
    tests = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests += ["-o", "addopts=", str(ROOT / "tests" / "native" / "test_kernels.py")]
    found = subprocess.run(tests, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "runtime error" not in found.stderr
