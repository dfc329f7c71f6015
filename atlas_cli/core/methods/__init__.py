"""Ways to merge aligned tensors, found by name: each a few pure functions with its formula."""
