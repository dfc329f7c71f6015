"""Objectives, the training loop, selection, run folders."""
