"""A session's writes: its turn on SQLite's only writer, its transaction, and its waits for locks.

A statement runs first; then its touched rows are compared with the locks of parked transactions. On a conflict the
statement is undone, waits, and runs again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hana_emulator.errors import HanaError
from hana_emulator.sql.storage import changes, failures
from hana_emulator.sql.storage.locks import Blocked, Holder
from hana_emulator.sql.storage.transaction import Transaction

if TYPE_CHECKING:
    from hana_emulator.sql.database import Database

_POLL_SECONDS = 0.1
_LIGHT, _SECONDS_PER_ROW, _LONGEST_SECONDS = 1_000, 2e-5, 1.0
NO_PATIENCE = 0.0  # NOWAIT
Result = TypeVar("Result")


class Writer:
    def __init__(self, database: Database) -> None:
        self.lock_timeout = database.lock_timeout
        self.transaction: Transaction | None = None
        self.cancelled = False
        self.repeatable = False  # REPEATABLE READ and SERIALIZABLE: see `open_snapshot`
        self.snapshot: int | None = None  # Number of commits that the open snapshot includes
        # Maps a query and its parameters to the error to raise if the query finds a row
        self._postponed: dict[tuple[str, tuple[object, ...]], str] = {}
        self._turns = 0  # Nesting depth: a session that has the turn can take it again
        self._database = database

    def touch(self, table: str, rowid: int) -> None:
        """Record a changed row; called by triggers."""
        if self.transaction is not None and (touched := self.transaction.touched) is not None:
            touched.setdefault(table, set()).add(rowid)

    def postpone(self, query: str, message: str, *values: object) -> None:
        """Postpone a check to the end of the statement; called by triggers, see `changes.POSTPONE_FUNCTION`."""
        self._postponed[query, values] = message

    @contextmanager
    def one_statement(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Run one statement for one row of parameters, then its postponed checks. Raises sqlite3.IntegrityError."""
        self._postponed.clear()
        yield
        for (query, values), message in self._postponed.items():
            if connection.execute(query, values).fetchone() is not None:
                raise sqlite3.IntegrityError(message)

    def is_enforcing(self) -> bool:
        """Return whether constraint triggers act. They do not while rows are restored."""
        return self.transaction is None or not self.transaction.restoring

    def cancel(self) -> None:
        self.cancelled = True
        self._database.locks.wake()

    # ---------------------------------------------------------------------------------------------------------- turns

    @contextmanager
    def turn(self, *, cancellable: bool = False) -> Iterator[None]:
        """Prevent other sessions from writing, parking and resuming. The body must not wait for a lock."""
        turn = self._database.turn
        while not turn.acquire(timeout=_POLL_SECONDS):
            if cancellable:
                self._check_cancelled()
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1
            turn.release()

    def _check_cancelled(self) -> None:
        if self.cancelled:
            raise failures.cancelled()

    # ------------------------------------------------------------------------------------------------------- snapshots

    def open_snapshot(self, connection: sqlite3.Connection) -> None:
        """Make all further reads of `connection` see the current state until the transaction ends.

        SQLite cannot write to an older state. A transaction that writes, or reads after writing, fails with 138 if any
        session has committed since. HANA fails only for conflicts in the same rows.
        """
        if self.snapshot is None:
            with self._database.commit_lock:
                self.snapshot = self._database.commits
                connection.execute("BEGIN")
                connection.execute("SELECT 1 FROM owl_schemas LIMIT 1").fetchone()

    def close_snapshot(self, connection: sqlite3.Connection) -> None:
        if self.transaction is None and self.snapshot is not None:
            self.snapshot = None
            connection.execute("COMMIT")

    def _check_snapshot(self) -> None:
        if self.snapshot is not None and self.snapshot != self._database.commits:
            raise failures.serialization_failure()

    def _begin(self, connection: sqlite3.Connection) -> Transaction:
        self._check_snapshot()
        if connection.in_transaction:  # a snapshot of the current state
            connection.execute("COMMIT")
        if self.repeatable:
            self.snapshot = self._database.commits
        return Transaction(connection, partial(self._database.shape, connection), self._database.identities)

    @contextmanager
    def active(self, connection: sqlite3.Connection, *, ending: bool = False) -> Iterator[Transaction]:
        """Yield the session's transaction on SQLite's writer, begun if necessary, after parking any other there.
        `ending`: for a commit, which may have an old snapshot."""
        self._give_time()
        with self.turn(cancellable=True):
            other = self._database.active
            if other is not None and other is not self:
                other.park()
            if self.transaction is None:
                self.transaction = self._begin(connection)
            elif self.transaction.lost is not None:
                raise self.transaction.lost
            elif self.transaction.is_parked:
                if not ending:
                    self._check_snapshot()
                try:
                    self.transaction.resume()
                except (sqlite3.Error, MemoryError) as error:
                    raise _lost(error) from None
                self._database.locks.withdraw(self.transaction)
            self._database.active = self
            yield self.transaction

    def _give_time(self) -> None:
        """Wait briefly before parking a transaction with many rows: parking costs time for each row."""
        other = self._database.active
        transaction = other.transaction if other is not None and other is not self and not self._turns else None
        if transaction is not None and transaction.weight > _LIGHT:
            self._database.locks.await_end(transaction, min(transaction.weight * _SECONDS_PER_ROW, _LONGEST_SECONDS))

    def park(self) -> None:
        """Park the transaction. Called by another session's thread, which has the turn, while this session is idle."""
        transaction = self.transaction
        assert transaction is not None
        self._database.active = None
        try:
            self._database.locks.enter(transaction, transaction.park())
        except (sqlite3.Error, MemoryError, HanaError) as error:
            transaction.rollback()
            transaction.lost = _lost(error)
            self._database.locks.end(transaction)

    # ------------------------------------------------------------------------------------------------------- statements

    def run(
        self,
        connection: sqlite3.Connection,
        attempt: Callable[[Transaction], Result],
        *,
        autocommit: bool,
        patience: float | None = None,
    ) -> Result:
        """Run `attempt` until it is not Blocked. Raises HanaError 131 after `patience` seconds of waiting (default: the
        lock timeout), 146 at once with NO_PATIENCE, 133 on a deadlock, 139 if cancelled. An error ends a transaction
        that began here."""
        until: float | None = None
        while True:
            begun = self.transaction is None
            try:
                with self.active(connection) as transaction:
                    try:
                        result = attempt(transaction)
                    except BaseException:
                        if begun:
                            self.rollback()
                        raise
                    if autocommit:
                        self.commit()
                    return result
            except Blocked as blocked:
                holder = blocked.holder
            if patience == NO_PATIENCE:
                raise HanaError(146, "resource busy and NOWAIT specified")
            if until is None:
                until = time.monotonic() + (self.lock_timeout if patience is None else patience)
            self._database.locks.wait(self.transaction or Holder(), holder, until, self._check_cancelled)

    def write(self, transaction: Transaction, table: str, action: Callable[[], Result], *, inserts: bool) -> Result:
        """Run `action`, a statement that writes `table`, within an attempt of `run`; undo it if it raises Blocked."""
        locks = self._database.locks
        locks.check_open(table)
        connection = transaction.connection
        fired = self._database.catalog.fired.get(table, ())
        starts: dict[str, int] = {}
        for name in {table, *fired} if inserts else fired:
            transaction.mark(name)
            if locks.any_claims:
                starts[name] = changes.highest(connection, self._database.shape(connection, name))
        try:
            with transaction.statement() as touched:
                result = action()
                self._check(connection, {name: set() for name in (table, *fired)} | touched, starts)
        except (sqlite3.IntegrityError, HanaError) as error:
            for name in {table, *fired}:
                self._ask_holders(transaction, name, action, error)
            raise
        return result

    def _check(self, connection: sqlite3.Connection, touched: dict[str, set[int]], starts: dict[str, int]) -> None:
        """Raise Blocked if the statement conflicts with other transactions' locks, also through a foreign key.
        `starts`: the highest rowid of each table before the statement inserted rows."""
        locks = self._database.locks
        for name, rowids in touched.items():
            shape = self._database.shape(connection, name)
            parents = [parent for parent in shape.parents if locks.claims(parent.table)]
            if not locks.claims(name) and not parents:
                continue
            locks.check_rows(name, rowids)
            written = list(changes.rows_at(connection, shape, rowids).values())
            if name in starts:
                written += changes.rows_above(connection, shape, starts[name]).values()
            locks.check_keys(name, shape.keys_of(written))
            for parent in parents:
                parent_shape = self._database.shape(connection, parent.table)
                locks.check_parents(parent.table, changes.parent_rows(connection, parent, parent_shape, written))

    def _ask_holders(
        self, transaction: Transaction, table: str, action: Callable[[], object], error: Exception
    ) -> None:
        """Retry without the rows that other transactions changed or deleted: they may free a conflicting unique key.
        Raises Blocked for the first transaction whose rows prevented the write."""
        unique = error.code == 301 if isinstance(error, HanaError) else "UNIQUE" in str(error)
        if not unique or transaction.undone_by_sqlite:
            return
        connection = transaction.connection
        shape = self._database.shape(connection, table)
        for holder, claims in list(self._database.locks.claims(table).items()):
            if not claims.vacated:
                continue
            with transaction.probe():
                try:
                    with transaction.unconstrained():  # so that referenced rows can be deleted
                        changes.delete_rows(connection, shape, claims.vacated)
                    action()
                except (sqlite3.Error, HanaError):
                    continue
            raise Blocked(holder)

    # ------------------------------------------------------------------------------------------------------------- ends

    def commit(self) -> None:
        """Commit. On failure, roll back and raise HanaError."""
        transaction = self.transaction
        if transaction is None:
            return
        self._give_time()
        try:
            with self.turn():
                if transaction.lost is not None:
                    raise transaction.lost
                if transaction.has_changes:

                    def publish() -> None:
                        for table in transaction.tables:
                            self._database.versions.advance(table, partial(transaction.written, table))

                    self.commit_with(transaction, publish)
                else:
                    transaction.rollback()
                    self._end()
        except HanaError:
            self.rollback()
            raise
        except sqlite3.Error as error:
            self.rollback()
            raise failures.rolled_back(failures.translate(error, None)) from None

    def commit_with(self, transaction: Transaction, publish: Callable[[], None]) -> None:
        """Commit, and call `publish` so that its changes become visible at the same time."""
        with self.active(transaction.connection, ending=True), self._database.commit_lock:
            transaction.connection.execute("COMMIT")
            self._database.commits += 1
            self._database.identities.clear()
            publish()
            self._end()

    def rollback(self) -> None:
        if self.transaction is None:
            return
        with self.turn():
            try:
                if self.transaction is not None:
                    self.transaction.rollback()
            finally:
                self._end()

    def _end(self) -> None:
        """End the transaction, unless another thread has closed the session."""
        transaction, self.transaction = self.transaction, None
        self.snapshot = None
        if transaction is None:
            return
        if self._database.active is self:
            self._database.active = None
        self._database.locks.end(transaction)

    def undone_by_sqlite(self) -> bool:
        with self.turn():
            return self.transaction is not None and self.transaction.undone_by_sqlite


def _lost(error: Exception) -> HanaError:
    """Return the error for a parked transaction that could not be saved or restored."""
    code = failures.translate(error, None).code if isinstance(error, sqlite3.Error) else 2
    return HanaError(129, f"transaction rolled back by an internal error (code {code})", rolls_back=True)
