"""The ids of `"$rowid$"`: a rising counter for each column table. Rollback, deletion and restart never free an id.

Each column table has a hidden column whose default is the next id. Statements that change a row give it a new id. Only
TRUNCATE restarts the counter.

Source: Qlik Replicate, SAP HANA source, limitations of "$rowid$"; SAP does not document it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

NAME = "$rowid$"  # The pseudo-column. Statements must quote it; unquoted, it would be upper-cased and not recognized
COLUMN = '"^0rowid"'  # The hidden column, quoted for SQLite text; encoded names never have a digit after ^
FUNCTION = "owl_next_row_id"
_FILE = "row-ids.sqlite"
_RESERVED = 10_000  # Ids recorded as used in one write, so that an emulator restarted after a kill reuses none of them


class RowIds:
    """Row id counters. Used only by the thread that has the turn to write."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / _FILE, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS ids(relation INTEGER PRIMARY KEY, unused INTEGER NOT NULL)"
        )
        self._last: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def register(self, connection: sqlite3.Connection) -> None:
        connection.create_function(FUNCTION, 1, self.next)

    def next(self, relation: int) -> int:
        """Return the next id, from 1, of the table with this number in the catalogue."""
        last = self._last.get(relation)
        if last is None:
            found = self._connection.execute("SELECT unused FROM ids WHERE relation = ?", (relation,)).fetchone()
            last = (found[0] if found is not None else 1) - 1
            self._limits[relation] = last
        number = last + 1
        if number > self._limits[relation]:
            self._limits[relation] = last + _RESERVED
            self._keep(relation, last + _RESERVED + 1)
        self._last[relation] = number
        return number

    def restart(self, relation: int) -> None:
        """Restart at 1 after TRUNCATE."""
        self._last.pop(relation, None)
        self._keep(relation, 1)

    def _keep(self, relation: int, unused: int) -> None:
        self._connection.execute("INSERT OR REPLACE INTO ids VALUES (?, ?)", (relation, unused))

    def close(self) -> None:
        """Release the reserved ids that were not used."""
        for relation, last in self._last.items():
            self._keep(relation, last + 1)
        self._connection.close()
