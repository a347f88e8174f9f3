"""A change set as rows of the HANA store's tables, written in one transaction. Knows the session it is given; no pool,
no lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector import failpoints
from connector.hana.connection import Session
from connector.model import ChangeSet, Chunk
from connector.stores import records
from connector.stores.hana.tables import StateSql, VectorSql
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
        """Raises RowRejected for what need not be sent to be refused."""
        self._sql = sql
        self._place = place
        self._changes = changes
        vectors = records.fvecs(records.checked_vectors(changes, place.stamp.dimension))
        metadata = records.checked_metadata(changes)
        count = len(changes.chunks)
        self._rows = [self._row(*row) for row in zip(changes.chunks, metadata[:count], vectors, strict=True)]
        self._metadata = [
            (text, chunk.content_hash, chunk.id, chunk.number)
            for chunk, text in zip(changes.metadata_only, metadata[count:], strict=True)
        ]
        # In key order, so that two transactions never wait for each other in a circle.
        ids = {*changes.deleted, *(chunk.id for chunk in changes.chunks)}
        self._deleted = [(id_,) for id_ in sorted(ids)]
        self._set_aside: list[tuple[Any, ...]] | None = None

    def _row(self, chunk: Chunk, metadata: str, vector: bytes) -> tuple[Any, ...]:
        return (chunk.text, metadata, vector, chunk.id, chunk.number, chunk.content_hash, self._place.stamp.id)

    def write(self, session: Session) -> None:
        """Raises RowRejected where HANA refuses one of the rows: which, it is not asked (`Session.execute_many`)."""
        table = self._place.table
        session.execute_many(table.delete(), self._deleted, doing="removing what is replaced")
        failpoints.reach("mid_upsert")
        session.execute_many(table.insert(), self._rows, doing="writing vectors")
        session.execute_many(table.update_metadata(), self._metadata, doing="replacing metadata")
        self._write_quarantine(session)

    def _write_quarantine(self, session: Session) -> None:
        name, changes = self._place.collection, self._changes
        released = [(name, id_) for id_ in sorted(changes.released)]
        if released and session.query(self._sql.count_quarantine(), (name,))[0][0]:  # mostly nobody is there
            session.execute_many(self._sql.release_quarantine(), released, doing="releasing from quarantine")
        if not changes.quarantined:
            return
        if self._set_aside is None:  # once: after a commit of which nobody knows, this attempt must not count twice
            known = session.query(self._sql.read_quarantine(), (name,))
            before = {id_: (attempts, digest) for id_, _, _, attempts, _, digest in known}
            self._set_aside = [
                (
                    name,
                    row.id,
                    row.stage[:100],
                    row.reason[:2000],
                    records.attempts(row, *before.get(row.id, (0, None))),
                    row.digest,
                )
                for row in sorted(changes.quarantined, key=lambda row: row.id)
            ]
        session.execute_many(self._sql.put_quarantine(), self._set_aside, doing="writing the quarantine")
