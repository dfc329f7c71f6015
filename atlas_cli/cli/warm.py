"""All that is slow to import. Processes are forked from one that has imported this."""

from __future__ import annotations

from atlas_cli.learning import baselines, evaluate, unlabelled, weights  # noqa: F401
from atlas_cli.merging import merge  # noqa: F401
from atlas_cli.models.open_clip_import import open_clip  # noqa: F401
from atlas_cli.vectors import extract  # noqa: F401
