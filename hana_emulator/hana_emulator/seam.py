"""The interface between the wire side and the SQL side; neither imports the other's internals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from hana_emulator.errors import HanaError
from hana_emulator.types import Column, Parameter

Storage = None | int | float | str | bytes  # A storage value: see the table in `types.py`
StorageRow = Sequence[Storage]


class FunctionCode(IntEnum):
    """The kind of a statement, from which hdbcli derives `rowcount` and `has_result_set`."""

    NIL = 0
    DDL = 1
    INSERT = 2
    UPDATE = 3
    DELETE = 4
    SELECT = 5
    SELECT_FOR_UPDATE = 6


@dataclass(frozen=True, slots=True)
class Statement:
    """A prepared statement. `columns` is empty if it returns no rows."""

    sql: str
    function: FunctionCode
    parameters: tuple[Parameter, ...] = ()
    columns: tuple[Column, ...] = ()


UNKNOWN = -1  # Replaces the count of affected rows of an input row that has not arrived completely
FAILED = -3  # Replaces the count of affected rows of an input row that failed


@dataclass(slots=True)
class Outcome:
    """The result of one execution: affected rows for each input row, or an iterator over result rows.

    `errors`: for a batch, the error of each row with count FAILED, in row order. `columns`: the columns of `rows`, if a
    change of structure has made them differ from the prepared ones.
    """

    rows_affected: list[int] = field(default_factory=list)
    rows: Iterator[Sequence[Storage]] | None = None
    errors: list[HanaError] = field(default_factory=list)
    columns: tuple[Column, ...] | None = None


class SqlConnection(Protocol):
    """One session's database connection. Used by one thread, except `cancel`."""

    connection_id: int

    def prepare(self, sql: str) -> Statement:
        """Parse, resolve and type a statement. Raises HanaError (257, 259, 260, 362, 7 ...). Fast for a known text."""

    def execute(
        self, statement: Statement, rows: Sequence[StorageRow], *, autocommit: bool, batch: bool = False
    ) -> Outcome:
        """Run once for each parameter row (`[()]` for none). Raises HanaError.

        A failed statement is undone completely; earlier changes stay unless the error has `rolls_back`. `autocommit`
        commits afterwards. With `batch`, failed rows are reported in the outcome and the others are written. The
        outcome's `rows` stay readable after commit and later statements.
        """

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    @property
    def in_transaction(self) -> bool:
        """Whether uncommitted writes exist."""

    def require_control_of(self, connection_id: int) -> None:
        """Raise HanaError 258 if this session's user may not cancel or end that session."""

    def set_variable(self, name: str, value: str | None) -> None:
        """Set a session variable of SESSION_CONTEXT; None removes it."""

    def cancel(self) -> None:
        """Make the running statement fail with 139. Call from another thread."""

    def close(self) -> None:
        """Roll back and release all resources. Called at once when the client's socket closes."""


class SqlDatabase(Protocol):
    def connect(self, user: str) -> SqlConnection: ...

    def password(self, user: str) -> str | None:
        """The clear password of an emulator user (test data, never a real secret); None for an unknown user."""

    def admit(self, user: str, *, proven: bool) -> None:
        """Count a login. Raises HanaError 10 for a wrong password, 415 for a deactivated user, 416 for one locked after
        too many failures."""

    def close(self) -> None: ...
