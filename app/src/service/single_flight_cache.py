"""A cache of what was computed over a collection's visible rows; concurrent callers share one computation."""

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

Value = TypeVar("Value")
Key = tuple[str, int, str]
"""Collection, generation, row filter."""


def key_of(stored: CollectionStatus, within: Filter | None) -> Key:
    """The row filter is part of the key, so that no caller gets what was computed over rows hidden from it."""
    return stored.collection, stored.generation, json.dumps(within, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Keep `most` entries for `seconds`. After a write to the collection, and for values that do not last: `worth`
    times as long as computing took, so that repeating it costs 1/`worth` of the time at most; 0: not at all."""

    most: int
    seconds: float
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Value]):
    value: Value
    at: float
    took: float
    lasts: bool


@dataclass(slots=True)
class _Flight:
    """A computation under way; `failed`: the error that its waiting callers get too."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: DatabaseError | None = None


class SingleFlightCache(Generic[Value]):
    """Thread-safe. Concurrent callers of one key share one computation and its DatabaseError: computing one after
    another, they would wait many times as long for a store that hangs."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry[Value]] = {}
        self._flights: dict[Key, _Flight] = {}
        self._writes: Counter[str] = Counter()

    def get(self, key: Key, compute: Callable[[], Value], lasts: Callable[[Value], bool] = lambda _: True) -> Value:
        """Return the remembered value or `compute` it; errors are not kept. `lasts`: whether to keep the value for all
        of `seconds` while nothing is written."""
        with self._lock:
            flight = self._flights.setdefault(key, _Flight())
        with flight.lock:
            if flight.failed is not None:
                raise make(type(flight.failed), str(flight.failed), flight.failed.code)  # one for each thread
            entry = self._entries.get(key)
            if entry is not None and self._clock() - entry.at < self._seconds(entry):
                return entry.value
            writes, began = self._writes[key[0]], self._clock()
            try:
                with cancelled_by(Cancellation()):  # others may wait for the value: it outlives the first caller
                    value = compute()
            except BaseException as error:
                flight.failed = error if isinstance(error, DatabaseError) else None
                with self._lock:
                    self._forget(key)
                raise
            now, stays = self._clock(), lasts(value)
            with self._lock:  # includes the writes until now; later ones find the entry here
                stays = stays and writes == self._writes[key[0]]
                self._keep(key, _Entry(value, now, now - began, stays))
            return value

    def changed(self, name: str) -> None:
        """The collection was written to."""
        with self._lock:
            self._writes[name] += 1
            for key, entry in self._entries.items():
                if key[0] == name:
                    self._entries[key] = replace(entry, lasts=False)

    def _seconds(self, entry: _Entry[Value]) -> float:
        bounds = self._bounds
        return bounds.seconds if entry.lasts else min(bounds.seconds, bounds.worth * entry.took)

    def _keep(self, key: Key, entry: _Entry[Value]) -> None:
        if self._seconds(entry) <= 0:
            self._forget(key)
            return
        self._entries.pop(key, None)
        self._entries[key] = entry
        for oldest in list(self._entries)[: -self._bounds.most]:
            self._forget(oldest)

    def _forget(self, key: Key) -> None:
        self._entries.pop(key, None)
        self._flights.pop(key, None)
