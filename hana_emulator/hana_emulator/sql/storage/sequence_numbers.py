"""Sequence numbers, which a rollback does not give back, and the SQLite functions for NEXTVAL and CURRVAL.

The numbers have their own SQLite file, because another session may hold the database's write lock.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from hana_emulator.errors import HanaError
from hana_emulator.sql.catalog.schema_objects import Sequence
from hana_emulator.sql.functions.registration import Context
from hana_emulator.sql.language.names import hana_identifier

_FILE = "sequences.sqlite"


class Numbers:
    """The next number of every sequence, shared by all sessions."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(folder / _FILE, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS numbers(id INTEGER PRIMARY KEY, version INTEGER NOT NULL, next TEXT NOT NULL)"
        )

    def next(self, sequence: Sequence) -> int:
        """The next number. Raises HanaError 312 if the sequence is exhausted."""
        with self._lock:
            row = self._connection.execute(
                "SELECT next FROM numbers WHERE id = ? AND version = ?", (sequence.id, sequence.version)
            ).fetchone()
            number = int(row[0]) if row is not None else sequence.start
            if not sequence.minimum <= number <= sequence.maximum:
                if not sequence.cycles:
                    raise HanaError(312, f"sequence is exhausted: {hana_identifier(sequence.name)}")
                number = sequence.minimum if sequence.increment > 0 else sequence.maximum
            self._keep(sequence, number + sequence.increment)
            return number

    def _keep(self, sequence: Sequence, number: int) -> None:
        values = (sequence.id, sequence.version, str(number))
        self._connection.execute("INSERT OR REPLACE INTO numbers VALUES (?,?,?)", values)

    def close(self) -> None:
        self._connection.close()


def register(connection: sqlite3.Connection, context: Context, numbers: Numbers) -> None:
    """Register NEXTVAL and CURRVAL of one session with its SQLite connection."""

    def next_value(*definition: int | str) -> int | None:
        number, name, start, increment, minimum, maximum, cycles, version = definition
        sequence = Sequence(
            id=int(number), schema="", name=str(name), start=int(start), increment=int(increment),
            minimum=int(minimum), maximum=int(maximum), cycles=bool(cycles), version=int(version),
        )  # fmt: skip
        try:
            found = numbers.next(sequence)
        except HanaError as error:
            context.error = error
            raise
        context.current_numbers[sequence.id] = found
        if sequence.is_of_identity:
            context.last_identity = found
        return found

    def current_value(number: int, name: str) -> int:
        if number not in context.current_numbers:
            text = "CURRVAL of given sequence is not yet defined in this session"
            context.error = HanaError(326, f"{text}: {hana_identifier(name)}")
            raise context.error
        return context.current_numbers[number]

    connection.create_function("owl_nextval", 8, next_value)
    connection.create_function("owl_currval", 2, current_value)
