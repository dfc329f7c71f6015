"""What is merged by PEFT, by FusionBench and by atlas; see make_fixtures.py."""

from __future__ import annotations

SHAPE = (20, 15)
WEIGHTS = [0.7, 0.4, 0.9]
DENSITIES = (0.2, 0.5, 0.9)
SIGNS = {"total": "sum", "frequency": "count"}  # PEFT's words for how signs are elected, and ours
DARE = ("dare_linear", "dare_ties")
NET_SHAPES = {"tall": (20, 15), "wide": (8, 25), "bias": (9,), "kernel": (4, 3, 2, 2)}
ISOTROPIC = (0.8, 0.5)  # shares of the common space
