"""atlas: learn, merge and evaluate task vectors of CLIP models."""

__version__ = "0.1.0"
