"""The local store: one SQLite file, with exact vector search in memory and keyword search. Several processes and
threads may use it at once.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.model import (
    ChangeSet,
    Filter,
    Hit,
    IndexUse,
    Lease,
    Order,
    Place,
    Sample,
    StoredChunk,
    StoredRecord,
    StoredText,
    Vectors,
)
from connector.stores import filters, records
from connector.stores.local import keywords
from connector.stores.local.search import CollectionIndex, FilterCache, Search, answering
from connector.stores.local.sqlite_file import SqliteDatabase, SqliteFile
from connector.stores.local.tables import IN_LIMIT, SCHEMA, by_ids, find, only
from connector.stores.records import SPREAD_FACTOR, SPREAD_MODULUS
from connector.stores.scan import Int8Scan, VectorScan, searching
from connector.stores.state import Collection, LeaseTimes, Session, StateTables, changed
from connector.stores.store import VectorStore
from connector.stores.words import as_key_value

# The statements are built only from constants, checked names and placeholders.
# ruff: noqa: S608

T = TypeVar("T")
FILE = "vectors.sqlite"
PAGE = 2000
GROUP = 250  # rows per statement: fewer rows mean more waits for the interpreter lock, more rows mean long statements
LONGEST_LEASE = 300  # seconds; a lease that ends later was taken before the clock was set back
DELETE_PAGE = 5000  # records per delete transaction, which bounds how long other writers wait
TOMBSTONES_KEPT = 50_000  # A reader further behind reloads the collection instead of following its changes


class LocalStore(VectorStore):
    """A store in `folder/vectors.sqlite`, created if absent. Not for network drives: SQLite needs local locks.

    Each process needs memory for every collection it searches: 2 bytes x dimension per chunk with the integer scan (0.8
    GB for a million chunks of 384 dimensions). Words need 28 bytes per chunk, keys their length and 16 bytes; all
    collections together are limited to about 112 MB of words and 48 MB of keys, or to the needs of one. `scan`: None
    means `Int8Scan`. `read_only`: the file must exist. Raises StoreCorrupt for a damaged file.
    """

    kind = "local"

    def __init__(
        self,
        folder: Path,
        *,
        scan: VectorScan | None = None,
        names: Mapping[str, Mapping[str, str]] | None = None,
        lease_times: LeaseTimes | None = None,
        read_only: bool = False,
    ) -> None:
        self._file = SqliteFile(folder / FILE, SCHEMA, read_only=read_only)
        tables = StateTables(
            "the local store",
            "collections",
            "quarantine",
            now="owl_now()",
            later="owl_now() + ?",
            expired=f'"LEASE_UNTIL" NOT BETWEEN owl_now() AND owl_now() + {LONGEST_LEASE}',
            corrupt=self._file.corrupt,
            id="id",
        )
        super().__init__(SqliteDatabase(self._file), tables, "", names, lease_times or LeaseTimes())
        self._scan = scan or Int8Scan()
        self._lock = threading.Lock()
        self._indexes: dict[str, CollectionIndex] = {}
        self._texts = FilterCache[Any]()
        self._keys = FilterCache[Any]()

    def close(self) -> None:
        self._file.close()
        self._indexes.clear()

    # ------------------------------------------------------------------------------------------------------ state

    def _forget(self) -> None:
        """Do nothing: each read goes to the file."""

    def _create_table(self, name: str, collection: str, number: int, dimension: int) -> str:
        return "records"  # all generations share the record tables

    def _ensure_table(self, table: str, dimension: int) -> None:
        """Do nothing: the table was created with the file."""

    def _drop_vectors(self, found: Collection, lease: Lease) -> None:
        """Delete page by page, so that other writers can work in between."""
        sql = "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE collection = ? LIMIT ?)"

        def delete_page(session: Session) -> int:
            self._check(session, lease)
            return session.execute(sql, (found.id, DELETE_PAGE))

        while self._database.in_transaction(delete_page):
            pass
        self._database.execute("DELETE FROM tombstones WHERE collection = ?", (found.id,))
        self._indexes.pop(found.name, None)

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        sql = "SELECT count(*), count(DISTINCT document) FROM records WHERE collection = ?"
        chunks, rows = self._database.read(sql, (found.id,))[0]
        return chunks, chunks, rows

    def _index(self, found: Collection) -> CollectionIndex:
        """Return the collection's index. After a switch, replace the index of the previous generation."""
        with self._lock:
            known = self._indexes.get(found.name)
            if known is None or known.of != (found.id, found.stamp.dimension):
                known = self._indexes[found.name] = CollectionIndex(found.id, found.stamp.dimension, self._scan)
            return known

    # --------------------------------------------------------------------------------------------------- writing

    def _writer(self, found: Collection, changes: ChangeSet) -> Callable[[Session], None]:
        stamp, now, chunks = found.stamp, datetime.now(UTC).isoformat(), changes.chunks
        data, size = records.checked_vectors(changes, stamp.dimension).tobytes(), 4 * stamp.dimension
        metadata = records.checked_metadata(changes)
        replaced = list(dict.fromkeys([*changes.deleted, *(chunk.id for chunk in chunks)]))
        described = [
            (meta, chunk.content_hash, now, found.id, chunk.id, chunk.number)
            for chunk, meta in zip(changes.metadata_only, metadata[len(chunks) :], strict=True)
        ]

        def write(session: Session) -> None:
            for start in range(0, len(replaced), GROUP):  # triggers remove the vectors and add tombstones
                some = replaced[start : start + GROUP]
                places = ", ".join("?" * len(some))
                sql = f"DELETE FROM records WHERE collection = ? AND document IN ({places})"
                session.execute(sql, (found.id, *some))
            failpoints.reach("mid_upsert")
            last = session.query("SELECT seq FROM sqlite_sequence WHERE name = 'records'")
            first = (last[0][0] if last else 0) + 1
            rows = [
                (id_, found.id, chunk.id, chunk.number, chunk.content_hash, stamp.id, now, meta, chunk.text)
                for id_, (chunk, meta) in enumerate(zip(chunks, metadata, strict=False), first)
            ]
            _insert(session, "records (id, collection, document, number, hash, model, synced_at, meta, text)", rows)
            vectors = [
                (first + place, stamp.dimension, data[place * size : (place + 1) * size])
                for place in range(len(chunks))
            ]
            _insert(session, "vectors (record, dimension, vector)", vectors)
            key = "collection = ? AND document = ? AND number = ?"
            sql = f"UPDATE records SET meta = ?, hash = ?, synced_at = ? WHERE {key}"
            session.execute_many(sql, described)

        return write

    def optimise(self, collection: str) -> None:
        """Delete old tombstones and run SQLite's optimiser. Search needs no index."""
        id_ = self._known(collection).id
        with self._file.write() as db:
            (newest,) = db.execute("SELECT max(seq) FROM tombstones").fetchone()
            horizon = (newest or 0) - TOMBSTONES_KEPT
            if db.execute("DELETE FROM tombstones WHERE collection = ? AND seq <= ?", (id_, horizon)).rowcount:
                db.execute("UPDATE collections SET pruned = ? WHERE id = ?", (horizon, id_))
            db.execute("PRAGMA optimize")

    # --------------------------------------------------------------------------------------------------- reading

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> LocalView:
        return LocalView(self, collection, generation, row_filter)

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        if ids is None:
            sql = "SELECT id, document, number, hash FROM records WHERE collection = ? AND id > ? ORDER BY id LIMIT ?"
            for rows in self._pages(collection, sql):
                yield list(map(StoredChunk._make, rows))
            return
        for start in range(0, len(ids), IN_LIMIT):
            with self._file.read() as db:
                only = ("collection = ?", (find(db, self._tables, collection).id,))
                select = "SELECT id, document, number, hash FROM records"
                found = list(by_ids(db, select, "document", ids[start : start + IN_LIMIT], only))
            yield list(map(StoredChunk._make, found))

    def records(self, collection: str, *, vectors: bool = True) -> Iterator[list[StoredRecord]]:
        sql = (
            "SELECT r.id, r.document, r.number, r.hash, r.model, r.text, r.meta, v.vector "
            "FROM records r LEFT JOIN vectors v ON v.record = r.id "
            "WHERE r.collection = ? AND r.id > ? ORDER BY r.id LIMIT ?"
        )
        dimension = self._known(collection).stamp.dimension
        for rows in self._pages(collection, sql):
            page = []
            for id_, document, number, digest, model, text, meta, vector in rows:
                usable = isinstance(vector, bytes) and len(vector) == 4 * dimension
                numbers = np.frombuffer(vector, dtype="<f4").astype(np.float32) if usable else None
                metadata = records.metadata_of(meta)
                page.append(StoredRecord(id_, document, number, digest, model, text, metadata, numbers))
            yield page

    def _pages(self, collection: str, sql: str) -> Iterator[list[Any]]:
        """Yield pages by id. Each page is one transaction, so that SQLite can truncate its log."""
        after = 0
        while True:
            with self._file.read() as db:
                rows = db.execute(sql, (find(db, self._tables, collection).id, after, PAGE)).fetchall()
            if not rows:
                return
            yield rows
            after = rows[-1][0]


def _insert(session: Session, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows. `into`: table and columns."""
    for start in range(0, len(rows), GROUP):
        some = rows[start : start + GROUP]
        values = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
        sql = f"INSERT INTO {into} VALUES {values}"
        session.execute(sql, tuple(chain.from_iterable(some)))


@dataclass(frozen=True, slots=True)
class LocalView:
    """A `View`: search, rows by id, samples. Each call is one transaction. The local store has no foreign rows."""

    store: LocalStore
    collection: str
    generation: int | None
    row_filter: Filter | None

    @contextmanager
    def _read(
        self, where: Filter | None = None
    ) -> Iterator[tuple[sqlite3.Connection, Collection, filters.Condition | None]]:
        with self.store._file.read() as db:
            found = find(db, self.store._tables, self.collection)
            if self.generation not in (None, found.number):
                raise changed(self.collection, self.generation, found.number)
            names = self.store._names.get(self.collection, found.names)
            yield db, found, filters.narrowed(where, self.row_filter, names)

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Return the exact best `k` by cosine."""
        while True:
            with self._read(where) as (db, found, condition):
                query = records.unit_query(vector, found.stamp.dimension)
                index = self.store._index(found)
                snapshot = index.snapshot(db)
                if snapshot is None:
                    continue  # another thread has loaded a later state: retry
                with answering(db, condition, where), searching():
                    return Search(db, found.id, snapshot, index.scans)(query, k, condition)

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Search with SQLite's FTS5. A word counts once per text."""
        with self._read(where) as (db, found, condition), answering(db, condition, where):
            return keywords.search(db, self.store._texts, found.id, text, k, condition)

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        whole = as_key_value(number)
        with self._read(where) as (db, found, condition), answering(db, condition, where):
            within, parameters = only(condition)
            select = "SELECT document, text, meta, number, id FROM records"
            holders = keywords.key_holders(db, self.store._keys, found.id, number)
            if holders is not None:
                few = [row for row in by_ids(db, select, "id", holders, (within, parameters)) if number in row[0]]
                rows = sorted(few, key=lambda row: (not any(each in row[0] for each in whole), row[0]))[:count]
            else:
                sql = (
                    f"{select} WHERE instr(document, ?) > 0 AND number = 0 AND collection = ? AND {within} "
                    f"ORDER BY NOT ({' OR '.join(['instr(document, ?) > 0'] * len(whole))}), document LIMIT ?"
                )
                rows = db.execute(sql, (number, found.id, *parameters, *whole, count)).fetchall()
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

    def places(self, count: int, order: Order, after: Place | None = None, where: Filter | None = None) -> list[Place]:
        with self._read(where) as (db, found, condition), answering(db, condition, where):
            (within, parameters), rest = only(condition), filters.behind(order, after)
            # With a limit SQLite computes each value once; without one it can follow the index of ids.
            once = "" if order.field is None else " LIMIT -1"
            sql = (
                f'SELECT "ROW_ID", "PLACE" FROM (SELECT document AS "ROW_ID", {filters.sqlite_place(order)} AS "PLACE" '
                f"FROM records WHERE collection = ? AND number = 0 AND {within}{once}) WHERE {rest.sql or '1'} "
                f"ORDER BY {rest.projection} LIMIT ?"
            )
            rows = db.execute(sql, (found.id, *parameters, *rest.parameters, count))
            return [Place(id_, None if order.field is None else value) for id_, value in rows]

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
