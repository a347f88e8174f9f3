"""What was found out about the rows that somebody may see, kept for a while and within bounds. Knows no store, and
nothing of what it keeps.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from connector.cancellation import Cancellation, cancelled_by
from connector.errors import DatabaseError, make
from connector.model import CollectionStatus, Filter

Found = TypeVar("Found")
Seen = tuple[str, int, str]
"""A collection, its generation, and which of its rows may be seen."""


def seen_of(stored: CollectionStatus, within: Filter | None) -> Seen:
    """By what may be seen, so that nobody is told what another may see."""
    return stored.collection, stored.generation, json.dumps(within, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Bounds:
    """`most` entries, for `seconds`. After the collection was written to, and for what does not last: `worth` times as
    long as finding it took, so that looking again and again costs one part in `worth` at most; 0: not at all."""

    most: int
    seconds: float
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Found]):
    found: Found
    at: float
    took: float
    lasts: bool


@dataclass(slots=True)
class _Look:
    """One that is under way; `failed`: how it ended for whoever has waited for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: DatabaseError | None = None


class Remembered(Generic[Found]):
    """Thread-safe. Of several who ask for the same at once one looks, and the others wait for him. Where the store
    fails him, it fails them: looking one after another they would wait many times as long for one that hangs."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Seen, _Kept[Found]] = {}
        self._looking: dict[Seen, _Look] = {}
        self._writes: Counter[str] = Counter()

    def get(self, key: Seen, look: Callable[[], Found], lasts: Callable[[Found], bool] = lambda _: True) -> Found:
        """What is kept, or what `look` finds; its errors are not kept. `lasts`: whether it is kept as long as nothing
        is written."""
        with self._lock:
            looking = self._looking.setdefault(key, _Look())
        with looking.lock:
            if looking.failed is not None:
                raise make(type(looking.failed), str(looking.failed), looking.failed.code)  # one for each thread
            kept = self._kept.get(key)
            if kept is not None and self._clock() - kept.at < self._seconds(kept):
                return kept.found
            writes, began = self._writes[key[0]], self._clock()
            try:
                with cancelled_by(Cancellation()):  # others may wait for what is found: it outlives who asked first
                    found = look()
            except BaseException as error:
                looking.failed = error if isinstance(error, DatabaseError) else None
                with self._lock:
                    self._forget(key)
                raise
            now, stays = self._clock(), lasts(found)
            with self._lock:  # with what was written until now: later writes find it here
                stays = stays and writes == self._writes[key[0]]
                self._keep(key, _Kept(found, now, now - began, stays))
            return found

    def written(self, name: str) -> None:
        """The rows of this collection have changed."""
        with self._lock:
            self._writes[name] += 1
            for key, kept in self._kept.items():
                if key[0] == name:
                    self._kept[key] = replace(kept, lasts=False)

    def _seconds(self, kept: _Kept[Found]) -> float:
        bounds = self._bounds
        return bounds.seconds if kept.lasts else min(bounds.seconds, bounds.worth * kept.took)

    def _keep(self, key: Seen, kept: _Kept[Found]) -> None:
        if self._seconds(kept) <= 0:
            self._forget(key)
            return
        self._kept.pop(key, None)
        self._kept[key] = kept
        for oldest in list(self._kept)[: -self._bounds.most]:
            self._forget(oldest)

    def _forget(self, key: Seen) -> None:
        self._kept.pop(key, None)
        self._looking.pop(key, None)
