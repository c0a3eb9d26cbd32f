"""The reference model: pure functions over plain trees of arrays."""
