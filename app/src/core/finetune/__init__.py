"""Training of an embedding model on pairs of texts, which are never logged or written. Only `trainer` imports torch."""
