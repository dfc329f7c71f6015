"""Many small merges and fits in one process: `python -m tests.faults.soak`.

Memory, descriptors, threads and temporary files are looked at after every run of the second fifth
of the work, when all that is kept for good is there, and of the last fifth; medians are compared.
Memory that the C library has freed and not yet given back is given back first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import atlas_cli as atlas


def seen(temporary: Path) -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "RSS in kB": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "temporary files": len(list(temporary.iterdir())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--merges", type=int, default=500)
    parser.add_argument("--fits", type=int, default=200)
    given = parser.parse_args()
    from conftest import write_images
    from merge_runs import linear, llama, write_model, write_recipe

    with tempfile.TemporaryDirectory(prefix="atlas-soak-") as name:
        place = Path(name)
        os.environ["ATLAS_CACHE"], temporary = str(place / "cache"), place / "tmp"
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        os.chdir(place)
        for number in (1, 2):
            write_model(place / f"m{number}", llama(number))
        recipe = write_recipe(place / "r.yaml", linear(1, 2))
        photos = str(write_images(place / "photos", count=2))
        early: list[dict[str, int]] = []
        late: list[dict[str, int]] = []
        total = given.merges + given.fits
        for number in range(total):
            if number * given.fits // total != (number + 1) * given.fits // total:
                options = {"epochs": 1, "min_steps": 1, "batch_size": 4}
                atlas.fit(photos, model="builtin:tiny", vectors=["builtin:letters"], **options)
            else:
                atlas.merge(recipe, place / "out", threads=1)
                shutil.rmtree(place / "out")
            if number * 5 // total in (1, 4):
                (early if number * 5 // total == 1 else late).append(seen(temporary))
    print("| | second fifth | last fifth | growth |\n| --- | ---: | ---: | ---: |")
    grown = []
    for key in early[0]:
        first, last = (round(statistics.median(s[key] for s in group)) for group in (early, late))
        growth = 100 * (last - first) / first if first else 100.0 * last
        print(f"| {key} | {first} | {last} | {growth:.2f} % |")
        grown += [key] if growth >= (2 if "RSS" in key else 1e-9) else []
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
