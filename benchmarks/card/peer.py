"""What our engine is compared with on a card: sentence-transformers at its best, and bare matrix products."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from app.src.benchmark.harness import wall
from app.src.core.backends.torch.process import on_compute_thread
from app.src.core.device import DeviceProfile

BATCH_SIZES = (32, 64, 128, 256, 512)
PRODUCTS_SECONDS = 0.3
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


class Peer:
    """sentence-transformers over one folder: scaled dot-product attention where transformers has it; on a card weights
    in half precision."""

    def __init__(self, folder: Path, profile: DeviceProfile) -> None:
        self._folder, self._profile = folder, profile
        self.precision = next((name for name in DTYPES if name in profile.tensor_cores), "fp32")
        self._models: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], batch_size: int, precision: str | None = None) -> Any:
        """Return unit vectors in order."""
        model = self._model(precision or self.precision)

        def run() -> Any:
            return model.encode(list(texts), batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)

        return on_compute_thread(run) if self._profile.kind == "cpu" else run()

    def exact(self, texts: Sequence[str]) -> Any:
        """Return unit vectors computed in fp32 on the same device."""
        vectors = self.encode(texts, BATCH_SIZES[0], "fp32")
        if self.precision != "fp32":
            del self._models["fp32"]  # a large fp32 model would leave batches too little memory
        return vectors

    def best_batch_size(self, texts: Sequence[str], sizes: Sequence[int] = BATCH_SIZES) -> int:
        """Return the fastest size that fits into memory."""
        import torch

        took: dict[int, float] = {}
        self.encode(texts[: sizes[0]], sizes[0])
        for size in sizes:
            try:
                took[size] = wall(partial(self.encode, texts, size))()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        return min(took, key=lambda size: took[size])

    def _model(self, precision: str) -> Any:
        if precision not in self._models:
            import torch
            from sentence_transformers import SentenceTransformer

            dtype = getattr(torch, DTYPES.get(precision, "float32"))
            kind = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))["model_type"]
            self._models[precision] = SentenceTransformer(
                str(self._folder),
                device=self._profile.torch_name,
                local_files_only=True,
                model_kwargs={"dtype": dtype, "attn_implementation": "eager" if kind == "mpnet" else "sdpa"},
            )
        return self._models[precision]


class Products:
    """Bare products of large square matrices in the engine's precision: the rate that the device really reaches.
    `operations`: floating-point operations per call, which takes about a third of a second."""

    def __init__(self, profile: DeviceProfile, precision: str, edge: int | None = None) -> None:
        import torch
        from torch.utils.benchmark import Timer

        self._profile = profile
        self.edge = edge or (1024 if profile.kind == "cpu" else 8192 if profile.memory_bytes > 20 << 30 else 4096)
        dtype = getattr(torch, DTYPES.get(precision, "float32"))
        generator = torch.Generator(profile.torch_name).manual_seed(7)
        pair = [
            torch.randn(self.edge, self.edge, generator=generator, device=profile.torch_name).to(dtype)
            for _ in range(2)
        ]
        given = {"multiply": torch.mm, "pair": pair}
        self.timer = Timer("multiply(*pair)", globals=given, num_threads=torch.get_num_threads())
        self._times = 1
        self()
        self._times = max(1, round(PRODUCTS_SECONDS / max(self(), 1e-4)))

    @property
    def operations(self) -> int:
        return 2 * self.edge**3 * self._times

    def __call__(self) -> float:
        """Return the seconds of one call, by the card's clock."""
        return on_compute_thread(self._run) if self._profile.kind == "cpu" else self._run()

    def _run(self) -> float:
        import torch

        card = torch.cuda.device(self._profile.index) if self._profile.kind == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), card:
            return self._times * float(self.timer.timeit(self._times).mean)
