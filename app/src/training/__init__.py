"""`owl-sap finetune`: adapt the embedding model to pairs of texts. Texts of rows are never logged or written; torch is
used in `core/finetune` only."""
