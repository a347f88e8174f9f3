"""infinity: its engine for torch in fp32, within this process and without its HTTP layer, best of its batch sizes."""

from __future__ import annotations

from typing import Any

from embedding import BATCH_SIZES, Loaded, Wish, serve


def load(wish: Wish) -> Loaded:
    import torch
    from infinity_emb import EngineArgs, SyncEngineArray

    torch.set_num_threads(wish.threads)
    on_gpu = wish.device != "cpu"
    engines: dict[int, Any] = {}

    def engine(size: int) -> Any:
        if size not in engines:
            engines[size] = SyncEngineArray.from_args(
                [
                    EngineArgs(
                        model_name_or_path=wish.model,
                        engine="torch",
                        device=wish.device,
                        batch_size=size,
                        dtype="float16" if on_gpu else "float32",
                        bettertransformer=False,
                        model_warmup=False,
                    )
                ]
            )
        return engines[size]

    def encode(texts: list[str], size: int) -> Any:
        vectors, _ = engine(size).embed(model=wish.model, sentences=texts).result()
        return vectors

    return Loaded(encode, BATCH_SIZES, {"precision": "fp16" if on_gpu else "fp32"})


if __name__ == "__main__":
    serve(("infinity-emb", "sentence-transformers", "transformers", "torch"), load)
