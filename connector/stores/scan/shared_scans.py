"""Concurrent searches share passes: those that arrive during a pass run together in the next one."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.stores.scan.vector_scan import Ranking, ScanView

TOGETHER = 16
"""Queries per pass; each needs 4 bytes per row."""


@dataclass(slots=True, eq=False)
class _Asked:
    view: ScanView
    query: NDArray[np.float32]
    allowed: NDArray[np.bool_] | None
    woken: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    ranking: Ranking | None = None
    error: BaseException | None = None

    def joins(self, other: _Asked) -> bool:
        return self.view is other.view and self.allowed is other.allowed


class SharedScans:
    """Share passes. At most `passes` run at once, by default one per core. Thread-safe."""

    def __init__(self, passes: int | None = None) -> None:
        self._passes = passes or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: list[_Asked] = []

    def rank(self, view: ScanView, query: NDArray[np.float32], allowed: NDArray[np.bool_] | None) -> Ranking:
        asked = _Asked(view, query, allowed)
        with self._lock:
            asked.leads = self._running < self._passes
            if asked.leads:
                self._running += 1
            else:
                self._waiting.append(asked)
        if not asked.leads:
            self._wait(asked)
        if asked.leads:
            self._lead(asked)
        if asked.error is not None:
            raise asked.error
        assert asked.ranking is not None
        return asked.ranking

    def _wait(self, asked: _Asked) -> None:
        try:
            asked.woken.wait()
        except BaseException:  # for example Ctrl-C: release the waiting searches
            with self._lock:
                if asked in self._waiting:
                    self._waiting.remove(asked)
                elif asked.leads:
                    self._hand_over()
            raise

    def _lead(self, first: _Asked) -> None:
        """Run one pass for `first` and the searches waiting for the same rows, then hand over to the next one."""
        with self._lock:
            joining = [other for other in self._waiting if other.joins(first)][: TOGETHER - 1]
            self._waiting = [other for other in self._waiting if other not in joining]
        together = [first, *joining]
        try:
            rankings = first.view.rank(np.stack([asked.query for asked in together]), first.allowed)
            for asked, ranking in zip(together, rankings, strict=True):
                asked.ranking = ranking
        except BaseException as error:
            for asked in together:
                asked.error = error
        finally:
            with self._lock:
                self._hand_over()
            for asked in joining:
                asked.woken.set()

    def _hand_over(self) -> None:
        """Let the longest-waiting search lead. Call under the lock."""
        if not self._waiting:
            self._running -= 1
            return
        following = self._waiting.pop(0)
        following.leads = True
        following.woken.set()
