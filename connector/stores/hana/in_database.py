"""Compare and write rows of a source in the same database with single statements, so that no row leaves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from connector import failpoints
from connector.document.in_sql import SqlRows
from connector.errors import NoKey, RowRejected
from connector.hana.embedding import embedding, parameters
from connector.hana.source import HanaSource
from connector.hana.statement import Statement, with_bytes
from connector.model import DatabaseModel, Key, KeyRange, Lease
from connector.stores.hana.tables import VectorTable
from connector.stores.state import Session

# This module formats only quoted identifiers, constants and the expressions of `SqlRows` into SQL; values are bound.
# ruff: noqa: S608

State = Literal["ours", "blank", "emptied", "new", "changed", "meta", "same"]
_DOING = "comparing rows in HANA"


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by state. `ours`: only the renderer can finish it, or it is in quarantine. `blank`: its text is empty.
    `emptied`: so is that of a stored row. `new`: not stored. `changed`: stored with another text. `meta`: stored with
    other metadata. `same`: unchanged."""

    ours: int = 0
    blank: int = 0
    emptied: int = 0
    new: int = 0
    changed: int = 0
    meta: int = 0
    same: int = 0

    @property
    def rows(self) -> int:
        return self.ours + self.empty + self.embed + self.meta + self.same

    @property
    def empty(self) -> int:
        return self.blank + self.emptied

    @property
    def embed(self) -> int:
        return self.new + self.changed


@dataclass(frozen=True, slots=True)
class RowsInDatabase:
    """The rows of a collection beside its `table`. `stamp`: MODEL_ID. `check`: raises LeaseLost after a
    takeover."""

    rows: SqlRows
    source: HanaSource
    collection: str
    table: VectorTable
    quarantine: str
    stamp: str
    model: DatabaseModel
    check: Callable[[Session, Lease], None]

    def first(self, size: int, within: KeyRange) -> list[KeyRange]:
        """Return the first `size` rows of a range, and the others, if any, as ranges."""
        return self.source.ranges(self.rows.renderer.query, 2, 2 * size, within)

    def compare(self, within: KeyRange) -> Counts:
        """Count the rows of a range by state. Raises NoKey if two rows have the same key."""
        sql, values = self._compared(within)
        by_key = f'SELECT MAX("STATE") AS "STATE", COUNT(*) AS "ROWS" FROM ({sql}) GROUP BY "SRC_KEY"'
        counted = f'SELECT "STATE", SUM("ROWS"), COUNT(*) FROM ({by_key}) GROUP BY "STATE"'
        found = self.source.pool.read(counted, values, doing=_DOING)
        if any(rows != keys for _, rows, keys in found):
            query = self.rows.renderer.query
            raise NoKey(f"`key` ({', '.join(query.key)}) does not identify the rows of {query.table}")
        return Counts(**{state: int(rows) for state, rows, _ in found})

    def keys(self, within: KeyRange, states: Sequence[State]) -> list[Key]:
        """Return the keys of a range's rows in these states."""
        sql, values = self._compared(within, states)
        names = ", ".join(f'"K{place}"' for place in range(len(self.rows.renderer.key)))
        rows = self.source.pool.read(f"SELECT {names} FROM ({sql})", values, doing=_DOING)
        return [tuple(row) for row in with_bytes(rows)]

    def write(self, lease: Lease, within: KeyRange, found: Counts) -> tuple[int, int]:
        """Embed the rows of a range that are new or have another text, and replace the metadata of those in `meta`, in
        one transaction. Return the numbers of rows. `found`: states without rows take no statement. Raises LeaseLost
        after a takeover, RowRejected for a text without a vector."""
        table = self.table.sql
        meta, meta_values = self._compared(within, ("meta",))
        merge = (
            f'MERGE INTO {table} AS "OLD" USING ({meta}) AS "NEW" ON "OLD"."SRC_KEY" = "NEW"."SRC_KEY" '
            'WHEN MATCHED THEN UPDATE SET "VEC_META" = "NEW"."VEC_META", "CONTENT_HASH" = '
            f'HEXTOBIN("NEW"."HASH"||\'{"0" * 32}\'), "SYNCED_AT" = CURRENT_UTCTIMESTAMP'
        )
        vector = self.table.of_real(embedding(self.model, '"VEC_TEXT"'))
        changed, changed_values = self._compared(within, ("changed",))
        delete = f'DELETE FROM {table} WHERE "SRC_KEY" IN (SELECT "SRC_KEY" FROM ({changed}))'
        # Only rows that are not stored now: one that changes after the DELETE would otherwise be stored twice.
        fresh, fresh_values = self._compared(within, ("new",))
        insert = (
            f'INSERT INTO {table} ("VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", '
            f'"MODEL_ID", "SYNCED_AT") SELECT "VEC_TEXT", "VEC_META", {vector}, "SRC_KEY", 0, '
            f"HEXTOBIN(\"HASH\"||'{'0' * 32}'), TO_NVARCHAR(?), CURRENT_UTCTIMESTAMP FROM ({fresh})"
        )
        ids, ids_values = self._ids(within)
        mute = f'SELECT COUNT(*) FROM {table} WHERE "SRC_KEY" IN ({ids}) AND COALESCE(L2NORM("VEC_VECTOR"), 0) < 0.5'

        done = 0, 0  # by attempts so far: the next one does not find rows whose commit succeeded without a reply

        def work(session: Session) -> tuple[int, int]:
            nonlocal done
            self.check(session, lease)
            described = session.execute(merge, meta_values, doing="replacing metadata in HANA") if found.meta else 0
            if found.changed:
                session.execute(delete, changed_values, doing="removing what is replaced")
            failpoints.reach("mid_upsert")
            embedded = 0
            if found.embed:
                given = (*parameters(self.model), self.stamp, *fresh_values)
                embedded = session.execute(insert, given, doing="embedding rows in HANA")
                if session.query(mute, ids_values, doing="looking for texts without a vector")[0][0]:
                    raise RowRejected("HANA's model gave no vector for a text")
            self.check(session, lease)
            done = max(done[0], embedded), max(done[1], described)
            return done

        return self.source.pool.in_transaction(work, doing=f"writing to collection {self.collection!r}", overloaded=1)

    def gone(self) -> int:
        """Count the stored documents whose row has left the source."""
        sql = f'SELECT COUNT(DISTINCT "SRC_KEY") {self._gone()}'
        return int(self.source.pool.read(sql, doing=_DOING)[0][0])

    def gone_ids(self) -> list[str]:
        """Return the stored documents that `gone` counts."""
        sql = f'SELECT DISTINCT "SRC_KEY" {self._gone()}'
        return [str(row[0]) for row in self.source.pool.read(sql, doing=_DOING)]

    def _gone(self) -> str:
        ids, _ = self._ids(KeyRange())
        return f'FROM {self.table.sql} WHERE "SRC_KEY" IS NOT NULL AND "SRC_KEY" NOT IN ({ids})'

    def _ids(self, within: KeyRange) -> tuple[str, tuple[Any, ...]]:
        statement = Statement(self.rows.renderer.query, within.upto)
        condition, values = statement.between(within.after)
        return statement.of_all(self.rows.id, condition), values

    def _compared(self, within: KeyRange, states: Sequence[State] = ()) -> tuple[str, tuple[Any, ...]]:
        """Return a SELECT, and its parameters, of a range's rows with their STATE; only those in `states`, if given."""
        statement = Statement(self.rows.renderer.query, within.upto)
        condition, values = statement.between(within.after)
        ids = statement.of_all(self.rows.id, condition)
        stored = (
            f'SELECT "SRC_KEY", COUNT(*) AS "CHUNKS", MIN("CHUNK_NO") AS "FIRST", '
            f'MIN(LEFT(BINTOHEX("CONTENT_HASH"), 32)) AS "HASH" FROM {self.table.sql} WHERE "SRC_KEY" IN ({ids}) '
            'GROUP BY "SRC_KEY"'
        )
        state = (
            """CASE WHEN "R"."LARGE" = 1 OR "Q"."SRC_KEY" IS NOT NULL THEN 'ours' """
            """WHEN "R"."VEC_TEXT" = '' AND "C"."CHUNKS" IS NULL THEN 'blank' """
            """WHEN "R"."VEC_TEXT" = '' THEN 'emptied' """
            """WHEN "C"."CHUNKS" IS NULL THEN 'new' """
            """WHEN "C"."CHUNKS" <> 1 OR COALESCE("C"."FIRST", -1) <> 0 """
            """OR LEFT(COALESCE("C"."HASH", ''), 16) <> LEFT("R"."HASH", 16) THEN 'changed' """
            """WHEN "C"."HASH" <> "R"."HASH" THEN 'meta' ELSE 'same' END"""
        )
        sql = (
            f'SELECT "R".*, {state} AS "STATE" FROM ({self.rows.select(statement, condition)}) AS "R" '
            f'LEFT JOIN ({stored}) AS "C" ON "C"."SRC_KEY" = "R"."SRC_KEY" '
            f'LEFT JOIN (SELECT "SRC_KEY" FROM {self.quarantine} WHERE "COLLECTION" = ?) AS "Q" '
            'ON "Q"."SRC_KEY" = "R"."SRC_KEY"'
        )
        if states:
            sql = f"""SELECT * FROM ({sql}) WHERE "STATE" IN ({", ".join(f"'{state}'" for state in states)})"""
        return sql, (*values, *values, self.collection)
