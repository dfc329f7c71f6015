"""The engine of `atlas merge`: inputs, a plan from headers, tiles, and a folder at the end."""
