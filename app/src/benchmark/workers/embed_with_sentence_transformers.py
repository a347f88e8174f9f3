"""sentence-transformers: `encode` on torch in fp32, at the best of its batch sizes; on a GPU in fp16 and with larger
batches, which is its best there.
"""

from __future__ import annotations

from typing import Any

from embedding import BATCH_SIZES, Loaded, Wish, serve

_ON_GPU = (64, 128, 256, 512, 1024)


def load(wish: Wish) -> Loaded:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(wish.threads)
    model = SentenceTransformer(wish.model, device=wish.device, local_files_only=True)
    on_gpu = wish.device != "cpu"
    if on_gpu:
        model = model.half()

    def encode(texts: list[str], size: int) -> Any:
        return model.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    return Loaded(encode, _ON_GPU if on_gpu else BATCH_SIZES, {"precision": "fp16" if on_gpu else "fp32"})


if __name__ == "__main__":
    serve(("sentence-transformers", "transformers", "torch"), load)
