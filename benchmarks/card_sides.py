"""What `benchmarks/card.py` lets take turns: our engine, `encode` of sentence-transformers at its best, bare products;
and what the driver says of the card meanwhile. Part of that program: benchmarks/card_sides.py measures nothing itself.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.core.backends.torch.compute_thread import on_compute_thread  # noqa: E402
from app.src.core.device import DeviceProfile  # noqa: E402
from app.src.core.loading import EngineOptions  # noqa: E402
from app.src.core.measuring.clocks import clock_of  # noqa: E402
from app.src.core.measuring.sampling import driver_of  # noqa: E402
from app.src.core.nvml import GpuState  # noqa: E402

BATCH_SIZES = (32, 64, 128, 256, 512)
PRODUCTS_SECONDS = 0.3
SWITCHES = ("overlap", "pinned", "graphs")
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_SAMPLE_SECONDS = 0.2


def switched_off() -> dict[str, Any]:
    """The engine's switches that there are, and what turns each off."""
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    return {name: False if isinstance(defaults[name], bool) else "off" for name in SWITCHES if name in defaults}


# -------------------------------------------------------------------------------------------- sentence-transformers


@dataclass(frozen=True, slots=True)
class Setting:
    precision: str
    batch_size: int


class Peer:
    """sentence-transformers over one folder: scaled dot-product attention, weights in half precision on a card."""

    def __init__(self, folder: Path, profile: DeviceProfile) -> None:
        self._folder, self._profile = folder, profile
        self.precisions = [name for name in DTYPES if name in profile.tensor_cores] or ["fp32"]
        if profile.kind == "cuda" and self.precisions == ["fp32"] and profile.capability != (6, 1):
            self.precisions.append("fp16")  # a P100's is fast without tensor cores, a P4's is not
        self._models: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], setting: Setting) -> Any:
        """Unit vectors in order, as a NumPy array."""
        model = self._model(setting.precision)

        def run() -> Any:
            return model.encode(
                list(texts), batch_size=setting.batch_size, normalize_embeddings=True, show_progress_bar=False
            )

        return on_compute_thread(run) if self._profile.kind == "cpu" else run()

    def exact(self, texts: Sequence[str]) -> Any:
        """In fp32, on the same device."""
        vectors = self.encode(texts, Setting("fp32", BATCH_SIZES[0]))
        if "fp32" not in self.precisions:
            del self._models["fp32"]  # a large one takes the room of batches
        return vectors

    def best(self, texts: Sequence[str], sizes: Sequence[int] = BATCH_SIZES) -> tuple[Setting, dict[str, float]]:
        """The fastest setting for them, and the seconds of each that the memory held: all sizes in the first precision,
        the best of them in the others."""
        took: dict[Setting, float] = {}
        wanted = list(sizes)
        for precision in self.precisions:
            self.encode(texts[: sizes[0]], Setting(precision, sizes[0]))
            for size in wanted:
                setting = Setting(precision, size)
                seconds = self._seconds(texts, setting)
                if seconds is not None:
                    took[setting] = seconds
            wanted = [self._fastest(took).batch_size]
        tried = {f"{one.precision}, batch {one.batch_size}": round(seconds, 4) for one, seconds in took.items()}
        return self._fastest(took), tried

    @staticmethod
    def _fastest(took: Mapping[Setting, float]) -> Setting:
        return min(took, key=lambda one: took[one])

    def _seconds(self, texts: Sequence[str], setting: Setting) -> float | None:
        import torch

        started = time.perf_counter()
        try:
            self.encode(texts, setting)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        return time.perf_counter() - started

    def _model(self, precision: str) -> Any:
        if precision not in self._models:
            import torch
            from sentence_transformers import SentenceTransformer

            self._models[precision] = SentenceTransformer(
                str(self._folder),
                device=self._profile.torch_name,
                local_files_only=True,
                model_kwargs={
                    "dtype": getattr(torch, DTYPES.get(precision, "float32")),
                    "attn_implementation": "sdpa",
                },
            )
        return self._models[precision]


def cosines(one: Any, other: Any) -> tuple[float, float]:
    """The least and the mean of those of row and row."""
    found = np.einsum("ij,ij->i", one, other, dtype=np.float64)
    found /= np.linalg.norm(one, axis=1).astype(np.float64) * np.linalg.norm(other, axis=1)
    return float(found.min()), float(found.mean())


# ---------------------------------------------------------------------------------------------------------- products


class Products:
    """Bare products of large squares in the engine's precision: what the device really gives. `operations`: floating-
    point operations of one call, which takes about a third of a second."""

    def __init__(self, profile: DeviceProfile, precision: str, edge: int | None = None) -> None:
        import torch

        self._profile, self._clock = profile, clock_of(profile)
        self.edge = edge or (1024 if profile.kind == "cpu" else 8192 if profile.memory_bytes > 20 << 30 else 4096)
        dtype = getattr(torch, DTYPES.get(precision, "float32"))
        generator = torch.Generator(profile.torch_name).manual_seed(7)
        self._left, self._right = (
            torch.randn(self.edge, self.edge, generator=generator, device=profile.torch_name).to(dtype)
            for _ in range(2)
        )
        self._times = 1
        self()
        self._times = max(1, round(PRODUCTS_SECONDS / max(self(), 1e-4)))

    @property
    def operations(self) -> int:
        return 2 * self.edge**3 * self._times

    def __call__(self) -> float:
        """Seconds of one call, by the clock of the very card that works."""
        return on_compute_thread(self._run) if self._profile.kind == "cpu" else self._run()

    def _run(self) -> float:
        import torch

        with torch.inference_mode():
            return self._times * self._clock(lambda: torch.mm(self._left, self._right), self._times)


# -------------------------------------------------------------------------------------------- what the driver says


class Watch:
    """Looks at the card five times a second, while a context; each look belongs to what was last named."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._name: tuple[str, str] | None = None
        self._seen: dict[tuple[str, str], list[GpuState]] = defaultdict(list)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="card-watch", daemon=True)
        self._ask, self.reason = driver_of(profile)
        """What is asked, or why nothing is seen."""

    def __enter__(self) -> Watch:
        if self._ask is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def now(self, what: str, work: str | None) -> None:
        """`work` of `what` comes next; None: nothing that counts."""
        self._name = None if work is None else (what, work)

    def looking(self, what: str) -> Callable[[int, str], None]:
        """For `interleaved`: names what comes next; what only warms up does not count."""
        return lambda turn, work: self.now(what, work if turn else None)

    def summary(self, what: str, work: str) -> dict[str, Any] | None:
        """Medians of clock and power, the highest temperature, and everything that held the clock back."""
        seen = self._seen.get((what, work))
        if not seen:
            return None
        reasons = {reason for state in seen for reason in state.throttle_reasons or ()} - {"gpu_idle"}
        return {
            "sm_clock_mhz": _median([state.sm_clock_mhz for state in seen]),
            "power_watts": _median([state.power_watts for state in seen]),
            "power_limit_watts": seen[-1].power_limit_watts,
            "temperature_celsius": max((state.temperature_celsius or 0 for state in seen), default=0) or None,
            "throttle_reasons": sorted(reasons),
            "looks": len(seen),
        }

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Once. What is seen while one work follows another belongs to neither."""
        name, state = self._name, None if self._ask is None else self._ask()
        if state is not None and name is not None and name == self._name:
            self._seen[name].append(state)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None
