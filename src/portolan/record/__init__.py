"""The open record: an append-only, hash-chained, signed journal that a stranger can verify."""
