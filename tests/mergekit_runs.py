"""Run by a Python that has mergekit: every recipe of a folder, by mergekit's own program."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        found = MergeConfiguration.model_validate(yaml.safe_load(path.read_text()))
        options = MergeOptions(copy_tokenizer=False, random_seed=0, quiet=True)
        run_merge(found, str(path.with_suffix("")), options)


main()
