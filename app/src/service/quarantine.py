"""Rows that could not be synced: list, retry and drop them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.src.service.collections import Collections
from app.src.service.generations import Generations
from app.src.service.sync import run_options
from app.src.service.wiring import Parts
from connector.protocols import Observer
from connector.sync import quarantine
from connector.sync.quarantine import Entry, GivenKey, RetryReport
from connector.sync.run import Ends, Stop, Watch, never


class Quarantine:
    """Thread-safe. `wanted` None: all rows in quarantine. Raises UnknownCollection, and UnknownKey for `wanted`."""

    def __init__(self, parts: Parts, collections: Collections, generations: Generations) -> None:
        self._parts = parts
        self._collections = collections
        self._generations = generations

    def entries(self, name: str, wanted: Sequence[GivenKey] | None = None) -> list[Entry]:
        """In the order of their keys."""
        self._collections.spec(name)
        stored = self._collections.stored(name)
        rows = [] if stored is None else self._parts.store.quarantine(name)
        columns = self._collections.key_columns(name, stored) if rows else ()
        attempts = self._parts.settings.sync.max_attempts
        return quarantine.chosen([quarantine.entry(row, columns, attempts) for row in rows], wanted)

    def ids(self, name: str, wanted: Sequence[GivenKey] | None) -> list[str] | None:
        """The ids of these entries; None: of all, without looking."""
        return None if wanted is None else [entry.id for entry in self.entries(name, wanted)]

    def retry(
        self,
        name: str,
        wanted: Sequence[GivenKey] | None = None,
        observer: Observer | None = None,
        stop: Stop = never,
    ) -> RetryReport:
        """Sync these rows again. Raises as a sync."""
        return self.retry_ids(name, self.ids(name, wanted), observer, stop)

    def retry_ids(self, name: str, ids: list[str] | None, observer: Observer | None, stop: Stop) -> RetryReport:
        """As `retry`, by the ids of the entries."""
        maker = self._generations.maker(self._collections.spec_of_table(name))
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        options = run_options(self._parts.settings, "retry")
        report = quarantine.retry(maker.spec, ends, ids, options, Watch(observer, stop))
        self._collections.changed(name)
        return report

    def drop(self, name: str, wanted: Sequence[GivenKey] | None = None, lease_wait: float | None = None) -> int:
        """Delete entries and return how many; the next sync meets the rows again. Raises LeaseLost when another worker
        holds the collection longer than `lease_wait` seconds."""
        ids = [entry.id for entry in self.entries(name, wanted)]
        if not ids:
            return 0
        options = run_options(self._parts.settings, "drop")
        options = options if lease_wait is None else replace(options, lease_wait=lease_wait)
        dropped = quarantine.drop(self._parts.store, name, ids, options)
        self._collections.changed(name)
        return dropped
