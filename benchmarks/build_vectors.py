"""Make the task vectors that come with the built-in model.

    python benchmarks/build_vectors.py [-o DIR] [--work DIR]

Fine-tunes the built-in model on every task but the control and keeps each vector in 8-bit
integers: a minute or two for each on two cores. Fine-tuned weights are kept in --work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import storage

from atlas_cli.core.storage import Form
from atlas_cli.sources.locate import BUILTIN_VECTORS, locate, parse_reference, vector_file
from atlas_cli.vectors.bases import open_base
from atlas_cli.vectors.extract import Options, extract_to

STEPS, RATE = 400, 1e-3


def build(folder: Path, work: Path) -> None:
    """Write a file for each task. Provenance names files by relative paths: no folder of ours."""
    base = open_base(locate(parse_reference("builtin:tiny")), "visual")
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    for task in BUILTIN_VECTORS:
        tuned = storage.tuned_file(work, task, STEPS, RATE).resolve()
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            Path(f"{task}.safetensors").symlink_to(tuned)
            source = locate(parse_reference(f"./{task}.safetensors"))
            extract_to(
                folder / f"{task}.safetensors", task, base, source, Options(form=Form("int8"))
            )
            os.chdir(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=vector_file("builtin:digits").parent)
    parser.add_argument("--work", type=Path, help="keep the fine-tuned weights here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        build(options.output, (options.work or Path(temporary)).resolve())


if __name__ == "__main__":
    main()
