"""Weights from pickled checkpoints, read as data: no code that a file names is ever run."""

from atlas_cli.io.pickles.reader import open_pickle

__all__ = ["open_pickle"]
