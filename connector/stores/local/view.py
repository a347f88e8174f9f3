"""Read one collection of the local store: search, rows by id, samples. Each call is one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.model import Filter, Hit, IndexUse, Sample, StoredText, Vectors
from connector.stores import filters, records
from connector.stores.local import keywords as local_keywords
from connector.stores.local.search import FilterCache, Indexes, Search, answering
from connector.stores.local.sqlite_file import SqliteFile
from connector.stores.local.tables import by_ids, find, only
from connector.stores.records import SPREAD_FACTOR, SPREAD_MODULUS
from connector.stores.state import Collection, StateTables, changed
from connector.stores.words import as_key_value

# The statements are built from constants, checked names and parameter places.
# ruff: noqa: S608


@dataclass(frozen=True, slots=True)
class LocalView:
    """A `View`. `names`: source column to metadata name, None: as stored. The local store has no foreign rows."""

    file: SqliteFile
    tables: StateTables
    indexes: Indexes
    texts_seen: FilterCache[Any]
    names: Mapping[str, str] | None
    collection: str
    generation: int | None
    row_filter: Filter | None

    @contextmanager
    def _read(
        self, where: Filter | None = None
    ) -> Iterator[tuple[sqlite3.Connection, Collection, filters.Condition | None]]:
        with self.file.read() as db:
            found = find(db, self.tables, self.collection)
            if self.generation not in (None, found.number):
                raise changed(self.collection, self.generation, found.number)
            names = found.names if self.names is None else self.names
            yield db, found, filters.narrowed(where, self.row_filter, names)

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Return the exact best `k` by cosine."""
        while True:
            with self._read(where) as (db, found, condition):
                query = records.unit_query(vector, found.stamp.dimension)
                index = self.indexes.of(found)
                snapshot = index.snapshot(db)
                if snapshot is None:
                    continue  # another thread has loaded a later state: retry
                with answering(db, condition, where):
                    return Search(db, found.id, snapshot, index.scans)(query, k, condition)

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Search with SQLite's FTS5. A word counts once per text."""
        with self._read(where) as (db, found, condition), answering(db, condition, where):
            return local_keywords.search(db, self.texts_seen, found.id, text, k, condition)

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        whole = as_key_value(number)
        with self._read(where) as (db, found, condition), answering(db, condition, where):
            within, parameters = only(condition)
            sql = (
                "SELECT document, text, meta, number, id FROM records WHERE instr(document, ?) > 0 AND number = 0 "
                f"AND collection = ? AND {within} "
                f"ORDER BY NOT ({' OR '.join(['instr(document, ?) > 0'] * len(whole))}), document LIMIT ?"
            )
            rows = db.execute(sql, (number, found.id, *parameters, *whole, count))
            return [Hit(id_, 0.0, text, records.metadata_of(meta), *place) for id_, text, meta, *place in rows]

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        with self._read() as (db, found, condition):
            return records.in_order_of(ids, _texts(db, found, "document", records.asked_ids(ids)[0], condition))

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        ids = [chunk.record for chunk in chunks]
        with self._read() as (db, found, _):
            dimension = found.stamp.dimension
            stored = dict(by_ids(db, "SELECT record, vector FROM vectors", "record", list(set(ids))))
        gathered = np.zeros((len(ids), dimension), np.float32)
        for place, id_ in enumerate(ids):
            data = stored.get(id_, b"")
            if len(data) == 4 * dimension:
                gathered[place] = np.frombuffer(data, dtype="<f4")
        return gathered

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        """Sample in one pass, because a condition costs about 3 µs per row. Needs 8 bytes per row."""
        with self._read() as (db, found, condition):
            within, parameters = only(condition)
            sql = f"SELECT id FROM records WHERE number = 0 AND collection = ? AND {within}"
            ids = np.fromiter((id_ for (id_,) in db.execute(sql, (found.id, *parameters))), np.int64)
            spread = ids % SPREAD_MODULUS * SPREAD_FACTOR % SPREAD_MODULUS
            chosen = ids[np.lexsort((ids, spread))[:count]].tolist()
            rows = _texts(db, found, "id", chosen, condition, "text" if texts else "''")
            read = {text.record: text for text in rows}
            return Sample([read[id_] for id_ in chosen], len(ids))

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        return IndexUse(False, "the local store looks at every row's vector: its search is exact")


def _texts(
    db: sqlite3.Connection,
    found: Collection,
    column: str,
    ids: Sequence[Any],
    condition: filters.Condition | None,
    text: str = "text",
) -> list[StoredText]:
    within, parameters = only(condition)
    select = f"SELECT document, number, {text}, meta, id FROM records"
    rows = by_ids(db, select, column, ids, (f"collection = ? AND {within}", (found.id, *parameters)))
    return [
        StoredText(id_, number, read, records.metadata_of(meta), record) for id_, number, read, meta, record in rows
    ]
