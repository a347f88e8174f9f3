"""`owl-sap finetune`: adapts the embedding model to one's own texts. `pairs` (where they come from), `split` (which are
held out), `evaluation` (how well they are found), `card` (what the folder says of itself), `work` (an unfinished run),
`run` (all of it in order). Row text is never logged, never written. torch stays in `core/finetune`.
"""
