"""Brings the state tables that an earlier version of this program made to the shape of now. Knows the pool and the
tables, no collection.
"""

from __future__ import annotations

from connector.errors import DatabaseError
from connector.hana import catalog
from connector.hana.connection import HanaPool
from connector.stores.hana.tables import QUARANTINE, STATE, UpgradeSql
from connector.stores.records import CHECKPOINT_LENGTH


class HanaUpgrade:
    """Looks once, at the first call that finds the tables. Another worker may do the same at the same moment."""

    def __init__(self, pool: HanaPool, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self._sql = UpgradeSql(schema)
        self._done = False

    def __call__(self) -> bool:
        """Whether there are state tables; if so they are as this version wants them. Raises DatabaseError where the
        user may not change them."""
        if self._done:
            return True
        there = self._lengths(STATE)
        if not there:
            return False
        if "HIGHEST" not in there:
            self._change(STATE, self._sql.add_columns(), "HIGHEST")
        if there["CHECKPOINT"] < CHECKPOINT_LENGTH:
            self._change(STATE, self._sql.widen_checkpoint(), "CHECKPOINT", CHECKPOINT_LENGTH)
        quarantine = self._lengths(QUARANTINE)
        if quarantine and "ROW_DIGEST" not in quarantine:
            self._change(QUARANTINE, self._sql.add_row_digest(), "ROW_DIGEST")
        self._done = True
        return True

    def _change(self, table: str, sql: str, column: str, length: int = 0) -> None:
        """Afterwards `column` is there, and that long."""
        try:
            self._pool.execute(sql, doing=f"bringing {table} to this version's shape")
        except DatabaseError:
            if self._lengths(table).get(column, -1) < length:
                raise

    def _lengths(self, table: str) -> dict[str, int]:
        """Of its columns; none where there is no such table yet."""
        rows = self._pool.read(catalog.FIND_COLUMNS, (self._schema, table), doing=f"looking at {table}")
        return {row[0]: int(row[2] or 0) for row in rows}
