"""A merge recipe -> plan -> tiles -> one model folder."""
