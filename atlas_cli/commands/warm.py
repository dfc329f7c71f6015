"""All that is slow to import. Processes are forked from one that has imported this."""

from __future__ import annotations

from atlas_cli import evaluate, extract, finetune, learning, merge, tta  # noqa: F401
from atlas_cli.vision import import_open_clip

import_open_clip()
