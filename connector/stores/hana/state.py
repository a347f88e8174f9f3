"""The state tables of the HANA store: rows of OWL_STATE, cached briefly for searches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from connector.errors import ConfigurationError, DatabaseError, UnknownCollection, UnknownTable
from connector.hana.connection import HanaPool
from connector.model import Checkpoint
from connector.stores import records
from connector.stores.generations import changed
from connector.stores.hana.tables import StateSql, VectorSql
from connector.stores.records import ModelStamp

REMEMBERED = 2.0
"""Seconds for which searches cache a collection's row."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Collection:
    """A row of OWL_STATE. `names`: source column to metadata name if they differ, for filters."""

    name: str
    table: VectorSql
    generation: int
    stamp: ModelStamp
    names: Mapping[str, str]
    checkpoint: Checkpoint


class Collections:
    """`names`: as in HanaStore."""

    def __init__(self, pool: HanaPool, schema: str, names: Mapping[str, Mapping[str, str]]) -> None:
        self.pool = pool
        self.schema = schema
        self.names = names
        self._sql = StateSql(schema)
        self._remembered: dict[str, tuple[float, Collection]] = {}

    def forget(self) -> None:
        self._remembered.clear()

    def names_of(self, found: Collection) -> Mapping[str, str]:
        """Return the configured names, otherwise the stored ones."""
        return self.names.get(found.name, found.names)

    def find(self, collection: str) -> Collection | None:
        try:
            rows = self.pool.read(self._sql.find(), (collection,), doing=f"opening collection {collection!r}")
        except UnknownTable:
            return None
        if not rows:
            return None
        table, generation, model, fingerprint, dimension, names, checkpoint, last_sync = rows[0]
        return Collection(
            collection,
            VectorSql(self.schema, table),
            generation,
            ModelStamp(model, fingerprint, dimension),
            json.loads(names or "{}"),
            records.checkpoint_of(checkpoint, records.in_utc(last_sync)),
        )

    def known(self, collection: str) -> Collection:
        found = self.find(collection)
        if found is None:
            self._remembered.pop(collection, None)
            raise self.unknown(collection)
        self._remembered[collection] = (time.monotonic(), found)
        return found

    def recent(self, collection: str) -> Collection:
        """Return the same as `known`, at most REMEMBERED seconds old."""
        at, found = self._remembered.get(collection, (-REMEMBERED, None))
        return found if found is not None and time.monotonic() - at < REMEMBERED else self.known(collection)

    def unknown(self, collection: str) -> UnknownCollection:
        return UnknownCollection(f"schema {self.schema} has no collection {collection!r}; `sync` creates it")

    def reading(self, collection: str, generation: int | None, read: Callable[[Collection], T]) -> T:
        """Call `read` with the active generation. If it fails because another process switched and dropped that
        generation, call it once more with the one active now. Raises GenerationChanged unless that is `generation`
        (None: any)."""
        found = self.recent(collection)
        if generation is None or found.generation == generation:
            try:
                return read(found)
            except (ConfigurationError, DatabaseError):  # no such table, or a vector of another dimension
                before, found = found, self.known(collection)
                if found.table == before.table:
                    raise
        else:
            found = self.known(collection)
        if generation is not None and found.generation != generation:
            raise changed(collection, generation, found.generation)
        return read(found)
