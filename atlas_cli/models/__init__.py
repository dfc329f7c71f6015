"""CLIP and other models: build, rename, run with other weights, save."""
