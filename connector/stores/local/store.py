"""The local store: one SQLite file, with exact vector search in memory and keyword search. Several processes and
threads may use it at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from connector import failpoints
from connector.errors import RowRejected
from connector.model import ChangeSet, Filter, Lease, StoredChunk, StoredRecord
from connector.stores import records
from connector.stores.local.search import FilterCache, Indexes
from connector.stores.local.sqlite_file import SqliteFile
from connector.stores.local.tables import IN_LIMIT, SCHEMA, by_ids, find
from connector.stores.local.view import LocalView
from connector.stores.scan.vector_scan import VectorScan
from connector.stores.state import Collection, LeaseTimes, Session, StateStore, StateTables

T = TypeVar("T")
FILE = "vectors.sqlite"
PAGE = 2000
GROUP = 64
"""Rows per statement. Fewer calls are faster, because a thread waits for the interpreter after each. More rows make
long statements."""
LONGEST_LEASE = 300
"""In seconds. A lease that ends later was taken before the clock was set back and would never expire."""
DELETE_PAGE = 5000
"""Records per delete transaction, which bounds how long other writers wait."""
TOMBSTONES_KEPT = 50_000
"""A reader further behind reloads the collection instead of following its changes."""
_REFUSED = (
    UnicodeError,
    OverflowError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
)
"""Errors of SQLite and its driver for values that cannot be stored."""


class _SqliteSession:
    """A `Session` in SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def query(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[Any]:
        return self._db.execute(sql, parameters).fetchall()

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        return self._db.execute(sql, parameters).rowcount

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = "") -> None:
        self._db.executemany(sql, rows)


class LocalStore(StateStore):
    """A `VectorStore` in `folder/vectors.sqlite`, created if absent. Not for network drives: SQLite needs local locks.

    Each process needs memory for every collection it searches: 2 bytes x dimension per chunk with the integer scan (0.8
    GB for a million chunks of 384 dimensions), 4 with NumPy. `scan`: None: the fastest available. `names`: as in
    StateStore. `read_only`: the file must exist. Raises StoreCorrupt for a damaged file.
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
            more=", id",
        )
        super().__init__(tables, "", names, lease_times or LeaseTimes())
        self._indexes = Indexes(scan)
        self._texts = FilterCache[Any]()

    def close(self) -> None:
        self._file.close()
        self._indexes.clear()

    # ------------------------------------------------------------------------------------------------------ state

    def _read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> list[Any]:
        with self._file.read() as db:
            return db.execute(sql, parameters).fetchall()

    def _execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str) -> int:
        return self._transaction(lambda session: session.execute(sql, parameters), doing=doing)

    def _transaction(self, work: Callable[[Session], T], *, doing: str, divisible: bool = False) -> T:
        with self._file.write() as db:
            try:
                return work(_SqliteSession(db))
            except _REFUSED as error:
                raise RowRejected(f"SQLite refuses a row's data ({type(error).__name__})") from None

    def _forget(self) -> None:
        """Do nothing: each read sees the file."""

    def _create_state(self) -> None:
        """Do nothing: the file has all tables."""

    def _table_name(self, collection: str, number: int) -> str:
        return "records"

    def _ensure_table(self, name: str, table: str, dimension: int) -> None:
        """Do nothing: all generations share the record tables."""

    def _drop_vectors(self, found: Collection, lease: Lease) -> None:
        """Delete page by page, so that other writers can work in between."""
        sql = "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE collection = ? LIMIT ?)"

        def delete_page(session: Session) -> int:
            self._check(session, lease)
            return session.execute(sql, (found.id, DELETE_PAGE))

        while self._transaction(delete_page, doing="deleting records"):
            pass
        self._execute("DELETE FROM tombstones WHERE collection = ?", (found.id,), doing="deleting tombstones")
        self._indexes.forget(found.name)

    def _counts(self, found: Collection) -> tuple[int, int, int]:
        sql = "SELECT count(*), count(DISTINCT document) FROM records WHERE collection = ?"
        chunks, rows = self._read(sql, (found.id,), doing="counting")[0]
        return chunks, chunks, rows

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
                sql = f"DELETE FROM records WHERE collection = ? AND document IN ({places})"  # noqa: S608
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
            sql = f"UPDATE records SET meta = ?, hash = ?, synced_at = ? WHERE {key}"  # noqa: S608
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
        names = self._names.get(collection)
        return LocalView(
            self._file, self._tables, self._indexes, self._texts, names, collection, generation, row_filter
        )

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

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
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
        session.execute(f"INSERT INTO {into} VALUES {values}", tuple(chain.from_iterable(some)))  # noqa: S608
