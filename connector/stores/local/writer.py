"""Writes of the local store: one change set within the transaction it is given. Reads nothing for anybody."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from connector import failpoints
from connector.model import ChangeSet, Chunk, QuarantinedRow, Vectors
from connector.stores import records
from connector.stores.records import ModelStamp

GROUP = 64
"""Rows of one statement. Each call into SQLite lets other threads run and then waits for its turn again, so fewer calls
cost less than their rows; few enough that a statement's text is soon made."""


def _places(count: int) -> str:
    return ", ".join("?" * count)


class Writer:
    """Applies a change set within an open transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, stamp: ModelStamp) -> None:
        self._db = db
        self._collection = collection
        self._stamp = stamp
        self._now = datetime.now(UTC).isoformat()

    def apply(self, changes: ChangeSet) -> None:
        vectors = records.checked_vectors(changes, self._stamp.dimension)
        metadata, count = records.checked_metadata(changes), len(changes.chunks)
        self._delete([*changes.deleted, *(chunk.id for chunk in changes.chunks)])
        failpoints.reach("mid_upsert")
        self._insert(changes.chunks, metadata[:count], vectors)
        self._replace_metadata(changes.metadata_only, metadata[count:])
        self._quarantine(changes.quarantined, changes.released)
        if changes.checkpoint is not None:
            self._db.execute(
                "UPDATE collections SET checkpoint = ?, last_sync = CASE WHEN ? THEN last_sync ELSE ? END WHERE id = ?",
                (records.checkpoint_text(changes.checkpoint), changes.partial, self._now, self._collection),
            )
            failpoints.reach("mid_checkpoint")

    def _delete(self, documents: Sequence[str]) -> None:
        """Triggers remove the vectors and leave tombstones."""
        self._remove("records", list(dict.fromkeys(documents)))

    def _remove(self, table: str, documents: Sequence[str]) -> None:
        for start in range(0, len(documents), GROUP):
            some = documents[start : start + GROUP]
            sql = f"DELETE FROM {table} WHERE collection = ? AND document IN ({_places(len(some))})"  # noqa: S608
            self._db.execute(sql, (self._collection, *some))

    def _add(self, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """`into`: table and columns."""
        for start in range(0, len(rows), GROUP):
            some = rows[start : start + GROUP]
            values = ", ".join([f"({_places(len(some[0]))})"] * len(some))
            sql = f"INSERT INTO {into} VALUES {values}"  # noqa: S608
            self._db.execute(sql, tuple(chain.from_iterable(some)))

    def _insert(self, chunks: Sequence[Chunk], metadata: Sequence[str], vectors: Vectors) -> None:
        last = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
        first = (last[0] if last else 0) + 1
        collection, stamp = self._collection, self._stamp
        self._add(
            "records (id, collection, document, number, hash, model, synced_at, meta, text)",
            [
                (
                    first + place,
                    collection,
                    chunk.id,
                    chunk.number,
                    chunk.content_hash,
                    stamp.id,
                    self._now,
                    metadata[place],
                    chunk.text,
                )
                for place, chunk in enumerate(chunks)
            ],
        )
        data, size = vectors.tobytes(), 4 * stamp.dimension
        self._add(
            "vectors (record, dimension, vector)",
            [(first + place, stamp.dimension, data[place * size : (place + 1) * size]) for place in range(len(chunks))],
        )

    def _replace_metadata(self, chunks: Sequence[Chunk], metadata: Sequence[str]) -> None:
        self._db.executemany(
            "UPDATE records SET meta = ?, hash = ?, synced_at = ? WHERE collection = ? AND document = ? AND number = ?",
            (
                (text, chunk.content_hash, self._now, self._collection, chunk.id, chunk.number)
                for chunk, text in zip(chunks, metadata, strict=True)
            ),
        )

    def _quarantine(self, rows: Sequence[QuarantinedRow], released: Sequence[str]) -> None:
        collection = self._collection
        self._remove("quarantine", released)
        self._db.executemany(
            "INSERT INTO quarantine (collection, document, stage, reason, attempts, last_seen, row_digest) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (collection, document) DO UPDATE "
            "SET stage = excluded.stage, reason = excluded.reason, last_seen = excluded.last_seen, "
            "attempts = excluded.attempts + CASE WHEN row_digest <> excluded.row_digest THEN 0 ELSE attempts END, "
            "row_digest = excluded.row_digest",
            ((collection, row.id, row.stage, row.reason, row.attempts, self._now, row.digest) for row in rows),
        )
