"""The local store: one SQLite file, with exact vector search in memory and keyword search. Several processes and
threads may use it at once.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from connector import failpoints
from connector.errors import RowRejected
from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Filter,
    Generation,
    Lease,
    QuarantinedRow,
    Recipe,
    StoredChunk,
    StoredRecord,
    generation_name,
    is_generation,
)
from connector.protocols import Embedder
from connector.stores import records
from connector.stores.generations import DROPPED, Collection, droppable, free_number, resumable, switching
from connector.stores.lease import DEFAULT_TIMES, LeaseTimes, held, lost
from connector.stores.local import keywords as local_keywords
from connector.stores.local.search import Indexes
from connector.stores.local.sqlite_file import SqliteFile, undamaged
from connector.stores.local.tables import IN_LIMIT, SCHEMA, find, generations, known, unknown
from connector.stores.local.view import LocalView
from connector.stores.records import ModelStamp
from connector.stores.scan.vector_scan import VectorScan

FILE = "vectors.sqlite"
PAGE = 2000
GROUP = 64
"""Rows per statement. Fewer calls are faster, because a thread waits for the interpreter after each. More rows make
long statements."""
LONGEST_LEASE = 300.0
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


class LocalStore:
    """A `VectorStore` in `folder/vectors.sqlite`, created if absent. Not for network drives: SQLite needs local locks.

    Each process needs memory for every collection it searches: 2 bytes x dimension per chunk with the integer scan (0.8
    GB for a million chunks of 384 dimensions), 4 with NumPy. `scan`: None: the fastest available. `names`: per
    collection, source column to metadata name if they differ, for filters. `read_only`: the file must exist. Raises
    StoreCorrupt for a damaged file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        scan: VectorScan | None = None,
        names: Mapping[str, Mapping[str, str]] | None = None,
        lease_times: LeaseTimes = DEFAULT_TIMES,
        read_only: bool = False,
    ) -> None:
        self._names = names or {}
        self._times = lease_times
        self._indexes = Indexes(scan)
        self._file = SqliteFile(folder / FILE, SCHEMA, read_only=read_only)
        self._texts = local_keywords.TextCache()
        self.generations = LocalGenerations(self)

    def close(self) -> None:
        self._file.close()
        self._indexes.clear()

    # ---------------------------------------------------------------------------------------------------- opening

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        stamp = ModelStamp.of(embedder)
        with self._file.write() as db:
            found = find(db, collection)
            if found is None:
                if is_generation(collection):
                    raise unknown(collection)
                self._add(db, collection, 1, collection, stamp, None)
                return Checkpoint()
            if found.stamp != stamp:
                sql = "SELECT 1 FROM collections WHERE id = ? AND lease_until >= ?"
                leased = db.execute(sql, (found.id, time.time())).fetchone()
                if is_generation(collection) or leased or _counts(db, found) != (0, 0):
                    raise found.stamp.mismatch(collection, stamp)
                db.execute(
                    "UPDATE collections SET generation = ?, model = ?, fingerprint = ?, dimension = ?, "
                    "checkpoint = NULL, last_sync = NULL, lease_epoch = lease_epoch + 1 WHERE id = ?",
                    (free_number(generations(db, collection)), stamp.id, stamp.fingerprint, stamp.dimension, found.id),
                )
                return Checkpoint()
            names = self._names.get(collection)
            if names is not None and dict(names) != dict(found.names):
                db.execute("UPDATE collections SET names = ? WHERE id = ?", (json.dumps(dict(names)), found.id))
            return found.checkpoint

    def _add(
        self, db: sqlite3.Connection, name: str, number: int, collection: str, stamp: ModelStamp, spec: str | None
    ) -> None:
        names = json.dumps(dict(self._names.get(collection, {})))
        db.execute(
            "INSERT INTO collections (name, generation, model, fingerprint, dimension, names, spec, created) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (name, number, stamp.id, stamp.fingerprint, stamp.dimension, names, spec, _now()),
        )

    # ---------------------------------------------------------------------------------------------------- leases

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        return held(self, collection, owner, wait, self._times)

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        now = time.time()
        with self._file.write() as db:
            id_ = known(db, collection).id
            row = db.execute(
                "UPDATE collections SET lease_owner = ?, lease_epoch = lease_epoch + 1, lease_until = ? "
                "WHERE id = ? AND (lease_until IS NULL OR lease_until NOT BETWEEN ? AND ?) RETURNING lease_epoch",
                (owner, now + ttl, id_, now, now + max(ttl, LONGEST_LEASE)),
            ).fetchall()
            if row:
                return int(row[0][0])
            (holder,) = db.execute("SELECT lease_owner FROM collections WHERE id = ?", (id_,)).fetchone()
            return str(holder)

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        with self._file.write() as db:
            changed = db.execute(
                "UPDATE collections SET lease_until = ? WHERE name = ? AND lease_epoch = ?",
                (time.time() + ttl, lease.collection, lease.epoch),
            )
            return changed.rowcount == 1

    def release_lease(self, lease: Lease) -> None:
        with self._file.write() as db:
            db.execute(
                "UPDATE collections SET lease_until = NULL, lease_owner = NULL, lease_epoch = lease_epoch + 1 "
                "WHERE name = ? AND lease_epoch = ?",
                (lease.collection, lease.epoch),
            )

    # --------------------------------------------------------------------------------------------------- writing

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        with self._file.write() as db:
            collection = _owned(db, lease)
            try:
                _write(db, collection, changes)
            except _REFUSED as error:
                raise RowRejected(f"SQLite refuses a row's data ({type(error).__name__})") from None

    def optimise(self, collection: str) -> None:
        """Delete old tombstones and run SQLite's optimiser. Search needs no index."""
        with self._file.write() as db:
            id_ = known(db, collection).id
            (newest,) = db.execute("SELECT max(seq) FROM tombstones").fetchone()
            horizon = (newest or 0) - TOMBSTONES_KEPT
            if db.execute("DELETE FROM tombstones WHERE collection = ? AND seq <= ?", (id_, horizon)).rowcount:
                db.execute("UPDATE collections SET pruned = ? WHERE id = ?", (horizon, id_))
            db.execute("PRAGMA optimize")

    # --------------------------------------------------------------------------------------------------- reading

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> LocalView:
        names = self._names.get(collection)
        return LocalView(self._file, self._indexes, self._texts, names, collection, generation, row_filter)

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        if ids is None:
            sql = "SELECT id, document, number, hash FROM records WHERE collection = ? AND id > ? ORDER BY id LIMIT ?"
            for rows in self._pages(collection, sql):
                yield list(map(StoredChunk._make, rows))
            return
        for start in range(0, len(ids), IN_LIMIT):
            some = ids[start : start + IN_LIMIT]
            places = ", ".join("?" * len(some))
            sql = f"SELECT id, document, number, hash FROM records WHERE collection = ? AND document IN ({places})"  # noqa: S608
            with self._file.read() as db:
                found = list(map(StoredChunk._make, db.execute(sql, (known(db, collection).id, *some))))
            yield found

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        sql = (
            "SELECT r.id, r.document, r.number, r.hash, r.model, r.text, r.meta, v.vector "
            "FROM records r LEFT JOIN vectors v ON v.record = r.id "
            "WHERE r.collection = ? AND r.id > ? ORDER BY r.id LIMIT ?"
        )
        with self._file.read() as db:
            dimension = known(db, collection).stamp.dimension
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
                rows = db.execute(sql, (known(db, collection).id, after, PAGE)).fetchall()
            if not rows:
                return
            yield rows
            after = rows[-1][0]

    def quarantine(self, collection: str) -> list[QuarantinedRow]:
        with self._file.read() as db:
            rows = db.execute(
                "SELECT document, stage, reason, attempts, last_seen, row_digest FROM quarantine WHERE collection = ? "
                "ORDER BY document",
                (known(db, collection).id,),
            ).fetchall()
            with undamaged("the list of rows that are set aside"):
                return [
                    QuarantinedRow(id_, stage, reason, attempts, datetime.fromisoformat(seen), digest)
                    for id_, stage, reason, attempts, seen, digest in rows
                ]

    def status(self, collection: str) -> CollectionStatus | None:
        with self._file.read() as db:
            found = find(db, collection)
            if found is None:
                return None
            chunks, rows = _counts(db, found)
            (quarantined,) = db.execute("SELECT count(*) FROM quarantine WHERE collection = ?", (found.id,)).fetchone()
        return found.status("local", None, rows=rows, chunks=chunks, quarantined=quarantined)


class LocalGenerations:
    """A `Generations` over rows of `collections`; all generations share the record tables."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._file = store._file

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        sql = "SELECT count(DISTINCT document) FROM records WHERE collection = ?"
        with self._file.read() as db, undamaged("the record of a generation"):
            return [
                row.generation(collection, db.execute(sql, (row.id,)).fetchone()[0] if counted else None)
                for row in generations(db, collection)
            ]

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        stamp = ModelStamp.of(embedder)
        with self._file.write() as db:
            rows = generations(db, collection)
            found = resumable(collection, rows, stamp, recipe)
            if found is not None:
                db.execute("UPDATE collections SET retired = NULL WHERE name = ?", (found.name,))
                return found.name
            number = free_number(rows)
            name = generation_name(collection, number)
            self._store._add(db, name, number, collection, stamp, records.recipe_text(recipe))
            return name

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        text = records.recipe_text(recipe)
        with self._file.read() as db:
            if all(row.number != number or row.spec == text for row in generations(db, collection)):
                return
        with self._file.write() as db:
            for row in generations(db, collection):
                if row.number == number:
                    db.execute("UPDATE collections SET spec = ? WHERE id = ?", (text, row.id))

    def switch(self, collection: str, number: int) -> None:
        sql = (
            "UPDATE collections SET name = ?, retired = ?, checkpoint = ?, lease_epoch = ?, lease_owner = NULL, "
            "lease_until = NULL WHERE name = ?"
        )
        with self._file.write() as db:
            switch = switching(collection, generations(db, collection), number)
            if switch is None:
                return
            target, retiring, epoch = switch

            def rename(row: Collection, name: str, retired: str | None) -> None:
                db.execute(sql, (name, retired, records.to_compare_whole(row.checkpoint), epoch, row.name))

            for row in retiring:
                rename(row, generation_name(collection, row.number), _now())
            failpoints.reach("mid_alias_swap")
            rename(target, collection, None)

    def drop(self, collection: str, number: int) -> None:
        """Mark the generation first and delete it page by page: after an interruption it can be dropped again, but not
        resumed or activated."""
        with self._file.read() as db:
            name = droppable(collection, generations(db, collection), number).name
        with self._store.lease(name, "drop", 0) as lease:
            with self._file.write() as db:
                mark = "UPDATE collections SET fingerprint = ?, checkpoint = NULL, last_sync = NULL WHERE id = ?"
                db.execute(mark, (DROPPED, _owned(db, lease).id))
            while self._delete_page(lease):
                pass
            with self._file.write() as db:
                row, highest = _owned(db, lease), free_number(generations(db, collection)) - 1
                db.execute("UPDATE collections SET highest = ? WHERE name = ?", (highest, collection))
                db.execute("DELETE FROM tombstones WHERE collection = ?", (row.id,))
                db.execute("DELETE FROM collections WHERE id = ?", (row.id,))
        self._store._indexes.forget(name)

    def _delete_page(self, lease: Lease) -> bool:
        sql = "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE collection = ? LIMIT ?)"
        with self._file.write() as db:
            return db.execute(sql, (_owned(db, lease).id, DELETE_PAGE)).rowcount > 0


def _write(db: sqlite3.Connection, collection: Collection, changes: ChangeSet) -> None:
    """Apply a change set within an open transaction."""
    stamp, now, chunks = collection.stamp, _now(), changes.chunks
    vectors = records.checked_vectors(changes, stamp.dimension)
    metadata = records.checked_metadata(changes)
    # Triggers remove the vectors and add tombstones.
    replaced = dict.fromkeys([*changes.deleted, *(chunk.id for chunk in chunks)])
    _remove(db, "records", collection, list(replaced))
    failpoints.reach("mid_upsert")
    last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
    first = (last[0] if last else 0) + 1
    _add(
        db,
        "records (id, collection, document, number, hash, model, synced_at, meta, text)",
        [
            (id_, collection.id, chunk.id, chunk.number, chunk.content_hash, stamp.id, now, meta, chunk.text)
            for id_, (chunk, meta) in enumerate(zip(chunks, metadata, strict=False), first)
        ],
    )
    data, size = vectors.tobytes(), 4 * stamp.dimension
    _add(
        db,
        "vectors (record, dimension, vector)",
        [(first + place, stamp.dimension, data[place * size : (place + 1) * size]) for place in range(len(chunks))],
    )
    db.executemany(
        "UPDATE records SET meta = ?, hash = ?, synced_at = ? WHERE collection = ? AND document = ? AND number = ?",
        (
            (meta, chunk.content_hash, now, collection.id, chunk.id, chunk.number)
            for chunk, meta in zip(changes.metadata_only, metadata[len(chunks) :], strict=True)
        ),
    )
    _remove(db, "quarantine", collection, changes.released)
    db.executemany(
        "INSERT INTO quarantine (collection, document, stage, reason, attempts, last_seen, row_digest) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (collection, document) DO UPDATE "
        "SET stage = excluded.stage, reason = excluded.reason, last_seen = excluded.last_seen, "
        "attempts = excluded.attempts + CASE WHEN row_digest <> excluded.row_digest THEN 0 ELSE attempts END, "
        "row_digest = excluded.row_digest",
        ((collection.id, row.id, row.stage, row.reason, row.attempts, now, row.digest) for row in changes.quarantined),
    )
    if changes.checkpoint is not None:
        db.execute(
            "UPDATE collections SET checkpoint = ?, last_sync = CASE WHEN ? THEN last_sync ELSE ? END WHERE id = ?",
            (records.checkpoint_text(changes.checkpoint), changes.partial, now, collection.id),
        )
        failpoints.reach("mid_checkpoint")


def _remove(db: sqlite3.Connection, table: str, collection: Collection, documents: Sequence[str]) -> None:
    for start in range(0, len(documents), GROUP):
        some = documents[start : start + GROUP]
        sql = f"DELETE FROM {table} WHERE collection = ? AND document IN ({', '.join('?' * len(some))})"  # noqa: S608
        db.execute(sql, (collection.id, *some))


def _add(db: sqlite3.Connection, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows. `into`: table and columns."""
    for start in range(0, len(rows), GROUP):
        some = rows[start : start + GROUP]
        values = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
        insert = f"INSERT INTO {into} VALUES {values}"  # noqa: S608
        db.execute(insert, tuple(chain.from_iterable(some)))


def _owned(db: sqlite3.Connection, lease: Lease) -> Collection:
    """Return the collection. Call inside the write transaction, which stops other workers from taking the lease."""
    row = db.execute("SELECT lease_epoch FROM collections WHERE name = ?", (lease.collection,)).fetchone()
    if row is None or row[0] != lease.epoch:
        raise lost(lease)
    return known(db, lease.collection)


def _counts(db: sqlite3.Connection, found: Collection) -> tuple[int, int]:
    """Count chunks and documents."""
    sql = "SELECT count(*), count(DISTINCT document) FROM records WHERE collection = ?"
    chunks, rows = db.execute(sql, (found.id,)).fetchone()
    return int(chunks), int(rows)


def _now() -> str:
    return datetime.now(UTC).isoformat()
