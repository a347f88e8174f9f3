"""What the wire side needs of the SQL side, on one screen. Neither side imports the other's insides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from hana_emulator.errors import HanaError
from hana_emulator.types import Column, Parameter

Storage = None | int | float | str | bytes
"""A storage value: see the table in `types.py`."""
StorageRow = Sequence[Storage]


class FunctionCode(IntEnum):
    """What a statement does; hdbcli derives `rowcount` and `has_result_set` from it."""

    NIL = 0
    DDL = 1
    INSERT = 2
    UPDATE = 3
    DELETE = 4
    SELECT = 5
    SELECT_FOR_UPDATE = 6
    CALL = 8


@dataclass(frozen=True, slots=True)
class Statement:
    """A prepared statement. `columns` is empty unless it yields rows."""

    sql: str
    function: FunctionCode
    parameters: tuple[Parameter, ...] = ()
    columns: tuple[Column, ...] = ()


UNKNOWN = -1
"""Stands for the count of affected rows of an input row that has not arrived whole."""
FAILED = -3
"""Stands for the count of affected rows of an input row that failed."""


@dataclass(slots=True)
class Outcome:
    """What one execution gave: affected rows per input row, or an iterator over result rows (in column order).

    `errors`: of a batch, why each row with count FAILED was not written, in the order of the rows. `columns`: those of
    `rows`, where a change of structure has made them others than the statement was prepared with.
    """

    rows_affected: list[int] = field(default_factory=list)
    rows: Iterator[Sequence[Storage]] | None = None
    errors: list[HanaError] = field(default_factory=list)
    columns: tuple[Column, ...] | None = None


class SqlConnection(Protocol):
    """One session's view of the database. Used by one thread, except `cancel`."""

    connection_id: int

    def prepare(self, sql: str) -> Statement:
        """Parse, resolve and type. Raises HanaError (257, 259, 260, 362, 7 ...). Cheap for a text seen before."""
        ...

    def execute(
        self, statement: Statement, rows: Sequence[StorageRow], *, autocommit: bool, batch: bool = False
    ) -> Outcome:
        """Run once per parameter row (`[()]` when there are none). A failing statement is undone as a whole, the
        transaction before it stays unless the error says `rolls_back`. With `autocommit` it is committed afterwards.
        With `batch` a row that fails is left out and reported in the outcome; the others are written. Raises HanaError.

        `rows` of the outcome stay readable after commit and after later statements (cursors are held over commit).
        """
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    @property
    def in_transaction(self) -> bool:
        """True when uncommitted writes exist."""
        ...

    def require_control_of(self, connection_id: int) -> None:
        """Raises HanaError 258 when this session's user may not cancel or end that session."""
        ...

    def set_variable(self, name: str, value: str | None) -> None:
        """A session variable, as SESSION_CONTEXT gives it; None takes it away."""
        ...

    def cancel(self) -> None:
        """From another thread: make the running statement fail with 139."""
        ...

    def close(self) -> None:
        """Roll back and let go of everything. Called at once when the client's socket dies."""
        ...


class SqlDatabase(Protocol):
    """The whole database behind a server; shared by its sessions."""

    def connect(self, user: str) -> SqlConnection: ...

    def password(self, user: str) -> str | None:
        """The clear password of a user of this emulator (test data, never a real secret), None if unknown."""
        ...

    def admit(self, user: str, *, proven: bool) -> None:
        """Count a login of `user`. Raises HanaError 10 when it is not proven, 415 when the user is deactivated, 416
        when it is locked after too many failures."""
        ...

    def close(self) -> None: ...
