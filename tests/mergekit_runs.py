"""Run by a Python that has mergekit: every recipe of a folder, by mergekit's own program.

    python mergekit_runs.py FOLDER [raw]

`raw` merges weight files of any model, by the program that mergekit has for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.merge import MergeOptions, run_merge
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig, plan_flat_merge


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        found, target = yaml.safe_load(path.read_text()), str(path.with_suffix(""))
        options = MergeOptions(copy_tokenizer=False, random_seed=0, quiet=True)
        if "raw" in sys.argv:
            config = RawPyTorchMergeConfig.model_validate(found)
            Executor(plan_flat_merge(config, target, False, False, options)).execute()
        else:
            run_merge(MergeConfiguration.model_validate(found), target, options)


main()
