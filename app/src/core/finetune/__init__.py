"""Training of an embedding model on pairs of texts: `recipe` (how, without torch), `checkpoints` (what a run left
behind), `trainer` (the loop around sentence-transformers' trainer), `saving` (the model folder). Knows no rows, no
collections and no settings; texts are never logged or written.
"""
