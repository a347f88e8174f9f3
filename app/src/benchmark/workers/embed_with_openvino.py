"""OpenVINO through sentence-transformers' own backend. Computes in bf16 where the CPU has it. Fed with batches sorted
by length in tokens, which its `encode` alone does not do (it sorts by characters and counts texts).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from embedding import BUDGETS, Loaded, Wish, by_length, serve


def load(wish: Wish) -> Loaded:
    import openvino
    from sentence_transformers import SentenceTransformer

    copy = wish.cache / "model"
    if not copy.exists():
        draft = wish.cache / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(Path(wish.model), draft)
        draft.rename(copy)
    config = {"INFERENCE_NUM_THREADS": str(wish.threads), "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
    arguments = {"device": "CPU", "ov_config": config}
    exists = any(copy.rglob("openvino_model.xml"))
    model = SentenceTransformer(
        str(copy),
        backend="openvino",
        device="cpu",
        local_files_only=True,
        model_kwargs=arguments | {"export": not exists},
    )
    if not exists:
        model.save_pretrained(str(copy))
    tokenizer = model.tokenizer

    def encode(texts: list[str], budget: int) -> Any:
        lengths = [len(ids) for ids in tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]]
        vectors: Any = None
        for batch in by_length(lengths, budget):
            some = [texts[position] for position in batch]
            found = model.encode(some, batch_size=len(some), normalize_embeddings=True, show_progress_bar=False)
            if vectors is None:
                vectors = np.empty((len(texts), found.shape[1]), dtype=np.float32)
            vectors[batch] = found
        return vectors

    kept = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
    return Loaded(encode, BUDGETS, {"precision": str(kept)})


if __name__ == "__main__":
    serve(("openvino", "optimum-intel", "optimum", "sentence-transformers", "transformers", "torch"), load)
