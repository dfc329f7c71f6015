"""Run by a Python that has mergekit: every recipe of a folder, by mergekit's own programs.

    python mergekit_live.py FOLDER

A recipe NAME.yaml is merged to NAME.mergekit; one with several documents by mergekit-multi. What
failed, and why, is in FOLDER/failed.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import LoaderCache
from mergekit.merge import MergeOptions, run_merge
from mergekit.scripts.multimerge import load_config, make_tasks


def run(path: Path) -> None:
    text, target = path.read_text(), str(path.with_suffix(".mergekit"))
    options = MergeOptions(copy_tokenizer=True, random_seed=0, quiet=True, allow_crimes=True)
    options = options.model_copy(update={"write_model_card": False})  # it would ask the Hub
    options = options.model_copy(update={"lora_merge_cache": str(path.parent / "adapted")})
    if path.stem == "io_files":  # several files, written by a thread
        options = options.model_copy(update={"out_shard_size": 20_000, "async_write": True})
    documents = list(yaml.safe_load_all(text))
    if len(documents) == 1:
        run_merge(MergeConfiguration.model_validate(documents[0]), target, options)
        return
    between = str(path.with_suffix(".between"))
    Path(between).mkdir(exist_ok=True)
    configs, needed = load_config(text, between)
    last = target if None in configs else None
    tasks = make_tasks(configs, needed, options, between, last, True)
    Executor(tasks, math_device="cpu", storage_device="cpu").execute()


def main() -> None:
    os.chdir(sys.argv[1])
    failed = {}
    for path in sorted(Path().glob("*.yaml")):
        LoaderCache().loaders.clear()
        try:
            run(path)
        except Exception as problem:
            failed[path.stem] = f"{type(problem).__name__}: {problem}"
            if "-v" in sys.argv:
                traceback.print_exc()
    Path("failed.json").write_text(json.dumps(failed, indent=1))


main()
