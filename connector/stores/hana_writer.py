"""A change set as rows of the HANA store's tables, written in one transaction. Knows the session it is given, no pool, no
lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector import failpoints
from connector.hana import Session
from connector.model import ChangeSet, Chunk
from connector.stores import records
from connector.stores.hana_tables import StateSql, VectorSql
from connector.stores.records import ModelStamp


@dataclass(frozen=True, slots=True)
class Place:
    """Where a collection's vectors stand, and which they are."""

    collection: str
    table: VectorSql
    stamp: ModelStamp


class HanaWriter:
    """A change set turned into rows of parameters, once; written in whichever transaction succeeds."""

    def __init__(self, sql: StateSql, place: Place, changes: ChangeSet) -> None:
        self._sql = sql
        self._place = place
        self._changes = changes
        vectors = records.fvecs(records.checked_vectors(changes, place.stamp.dimension))
        self._rows = [self._row(chunk, vector) for chunk, vector in zip(changes.chunks, vectors, strict=True)]
        self._metadata = [
            (records.metadata_text(chunk.metadata), chunk.content_hash, chunk.id, chunk.number)
            for chunk in changes.metadata_only
        ]
        # In key order, so that two transactions never wait for each other in a circle.
        ids = {*changes.deleted, *(chunk.id for chunk in changes.chunks)}
        self._deleted = [(id_,) for id_ in sorted(ids)]

    def _row(self, chunk: Chunk, vector: bytes) -> tuple[Any, ...]:
        meta = records.metadata_text(chunk.metadata)
        return (chunk.text, meta, vector, chunk.id, chunk.number, chunk.content_hash, self._place.stamp.id)

    def write(self, session: Session) -> None:
        table = self._place.table
        session.execute_many(table.delete(), self._deleted, doing="removing what is replaced")
        failpoints.reach("mid_upsert")
        session.execute_many(table.insert(), self._rows, doing="writing vectors")
        session.execute_many(table.update_metadata(), self._metadata, doing="replacing metadata")
        self._write_quarantine(session)

    def _write_quarantine(self, session: Session) -> None:
        name, changes = self._place.collection, self._changes
        released = [(name, id_) for id_ in sorted(changes.released)]
        session.execute_many(self._sql.release_quarantine(), released, doing="releasing from quarantine")
        if not changes.quarantined:
            return
        known = {row[0]: row[3] for row in session.query(self._sql.read_quarantine(), (name,))}
        rows = [
            (name, row.id, row.stage[:100], row.reason[:2000], row.attempts + known.get(row.id, 0))
            for row in changes.quarantined
        ]
        session.execute_many(self._sql.put_quarantine(), rows, doing="writing the quarantine")
