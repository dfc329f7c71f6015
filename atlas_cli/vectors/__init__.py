"""The task-vector file: format, extract, pool, describe."""
