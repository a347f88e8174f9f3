"""Training of an embedding model on pairs of texts. `recipe` works without torch; `trainer` imports it, and is imported
late. Texts are never logged or written."""
