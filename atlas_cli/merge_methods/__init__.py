"""Merge methods, one file per family."""
