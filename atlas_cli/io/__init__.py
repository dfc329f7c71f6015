"""Bytes: atomic files, lazy tensors, safetensors, pickles read as data."""
