"""How long each stage of a run was busy. Knows no stage but by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from connector.protocols import Observer

STAGES = ("read", "render", "tokenize", "embed", "apply")


class StageClock:
    """Seconds each stage was busy, told to an observer as they pass. Thread-safe."""

    def __init__(self, observer: Observer | None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._observer = observer
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str, items: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start, items)

    def add(self, stage: str, seconds: float, items: int = 0) -> None:
        with self._lock:
            self.seconds[stage] += seconds
        if self._observer is not None:
            self._observer.stage(stage, seconds, items)
