"""The loops in C, and the Python doors to them."""
