"""YAML or flags in, typed and checked recipes out."""
