"""Faults: real commands as child processes, and what happens to them at random moments."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]  # where warm, merge_runs and conftest are
