"""One session: runs plans on its own SQLite connection, keeps its transaction, hands out rows, translates errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, assert_never

from hana_emulator.errors import HanaError, invalid_schema, lock_wait_timeout
from hana_emulator.seam import Outcome, Statement, Storage, StorageRow
from hana_emulator.sql import catalog as catalogue
from hana_emulator.sql import failures, search, temporary
from hana_emulator.sql.functions import Context
from hana_emulator.sql.names import quoted as quoted_name
from hana_emulator.sql.planner import ControlPlan, DefinitionPlan, Prepared, QueryPlan
from hana_emulator.sql.workbench import Workbench
from hana_emulator.sql.writes import Step, WritePlan

if TYPE_CHECKING:
    from hana_emulator.sql.database import Database

_FIRST_ROWS = 4_096
"""Results up to this long are read at once; longer ones stay open on a connection of their own."""
_NEXT_ROWS = 2_048
_LOCK_POLL_SECONDS = 0.1


class Session:
    """Implements `seam.SqlConnection`.

    Reading opens no transaction, so every SELECT sees what is committed. The first write takes the database's only
    write lock and keeps it until commit or rollback; waiting longer than the database's lock timeout raises 131.
    """

    def __init__(self, database: Database, connection_id: int, user: str, schema: str) -> None:
        self.connection_id = connection_id
        self.context = Context(user=user, schema=schema, connection_id=connection_id)
        self._database = database
        self._scores: dict[int, float] = {}
        self._connection = self._open()
        self._spare: list[sqlite3.Connection] = []
        self._writing = False
        self._dirty: set[str] = set()
        self._running = False
        self._cancelled = False
        self._closed = False
        self._filled_temporary = False
        """Whether a global temporary table may have rows of this session."""

    def _open(self) -> sqlite3.Connection:
        connection = self._database.open_connection(self.context)
        connection.create_function(search.SCORE_FUNCTION, 1, lambda rowid: self._scores.get(rowid))
        return connection

    # ------------------------------------------------------------------------------------------------------ the seam

    def prepare(self, sql: str) -> Prepared:
        return self._database.prepare(sql, self.context.schema, self.connection_id)

    def execute(self, statement: Statement, rows: Sequence[StorageRow], *, autocommit: bool) -> Outcome:
        with self._statement():
            prepared = self._current(statement)
            self._check_parameters(prepared, rows)
            plan = prepared.plan
            match plan:
                case QueryPlan():
                    return self._query(plan, rows[0], autocommit=autocommit)
                case WritePlan():
                    return self._write(plan, rows, autocommit=autocommit)
                case DefinitionPlan():
                    self._define(plan)
                case ControlPlan():
                    plan.control(self)
                case None:
                    raise HanaError(2, "general error: the statement was not prepared here")
                case _:
                    assert_never(plan)
            return Outcome()

    def commit(self) -> None:
        if not self._writing:
            return
        try:
            with self._database.commit_lock:
                self._connection.execute("COMMIT")
                self._database.touch(self._dirty)
        except sqlite3.Error as error:
            self.rollback()
            raise failures.rolled_back(failures.translate(error, None)) from None
        self._end_write()

    def rollback(self) -> None:
        if self._writing:
            try:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            finally:
                self._end_write()

    @property
    def in_transaction(self) -> bool:
        return self._writing

    def cancel(self) -> None:
        if self._running:
            self._cancelled = True
            self._connection.interrupt()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.rollback()
            self._drop_temporary()
        finally:
            for connection in (self._connection, *self._spare):
                connection.close()
            self._spare.clear()
            self._database.forget(self)

    def _drop_temporary(self) -> None:
        """What cannot be dropped now, since another transaction holds the lock, goes when the stand-in starts again."""
        if self._filled_temporary or temporary.belongs_to(self._database.catalog, self.connection_id):
            with suppress(HanaError, sqlite3.Error):
                self._define(DefinitionPlan(temporary.sweep))

    # ------------------------------------------------------------------------------------------------ running a plan

    @contextmanager
    def _statement(self) -> Iterator[None]:
        """One statement at a time: its clock, its errors in HANA's codes, its cancel flag, what an error ends."""
        self.context.begin_statement()
        self._cancelled, self._running = False, True
        try:
            yield
        except HanaError as error:
            raise self._settled(error) from None
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as error:
            raise self._settled(failures.translate(error, self.context.error)) from None
        finally:
            self._running = False

    def _settled(self, error: HanaError) -> HanaError:
        """`error`, after ending the transaction if it is one that does. SQLite undoes the whole transaction by itself
        when a write is interrupted, and at a full disk, an I/O error or lack of memory
        (https://sqlite.org/lang_transaction.html, section 3)."""
        self._running = False
        if self._writing and not self._connection.in_transaction:
            error = failures.rolled_back(error)
        if error.rolls_back:
            self.rollback()
        return error

    def _current(self, statement: Statement) -> Prepared:
        """The statement itself, or prepared anew when the catalogue has changed since."""
        if isinstance(statement, Prepared) and statement.version == self._database.catalog.version:
            return statement
        schema = statement.schema if isinstance(statement, Prepared) else self.context.schema
        return self._database.prepare(statement.sql, schema, self.connection_id)

    def _check_parameters(self, prepared: Prepared, rows: Sequence[StorageRow]) -> None:
        if not rows:
            raise HanaError(2, "general error: a statement runs for at least one row of parameters")
        if any(len(row) != len(prepared.parameters) for row in rows):
            raise HanaError(2, f"general error: the statement takes {len(prepared.parameters)} parameters")

    def _run(self, step: Step, row: StorageRow) -> sqlite3.Cursor:
        return self._connection.execute(step.sql, row if len(row) == step.parameters else row[: step.parameters])

    # ---------------------------------------------------------------------------------------------------- reading

    def _query(self, plan: QueryPlan, row: StorageRow, *, autocommit: bool) -> Outcome:
        if plan.locks and not autocommit:
            self._begin_write()
        if plan.search is not None:
            found = self._search(plan.search, row)
            if found is not None:
                return Outcome(rows=iter(found))
        return Outcome(rows=self._rows(self._run(plan.step, row)))

    def _rows(self, cursor: sqlite3.Cursor) -> Iterator[Sequence[Storage]]:
        """A short result, or any result inside a transaction, is read now. A long one stays open beside later
        statements: it takes its connection with it, since SQLite would tie both to one snapshot."""
        first = cursor.fetchmany(_FIRST_ROWS)
        if len(first) < _FIRST_ROWS:
            return iter(first)
        if self._writing:
            return iter(first + cursor.fetchall())
        connection = self._connection
        self._connection = self._spare.pop() if self._spare else self._open()
        return self._remaining(first, cursor, connection)

    def _remaining(
        self, batch: list[tuple[Storage, ...]], cursor: sqlite3.Cursor, connection: sqlite3.Connection
    ) -> Iterator[Sequence[Storage]]:
        try:
            while batch:
                yield from batch
                batch = cursor.fetchmany(_NEXT_ROWS)
        except sqlite3.Error as error:
            raise failures.translate(error, self.context.error) from None
        finally:
            cursor.close()
            if self._closed:
                connection.close()
            else:
                self._spare.append(connection)

    def _search(self, plan: search.SearchPlan, row: StorageRow) -> list[tuple[Storage, ...]] | None:
        table = plan.key[0]
        if table in self._dirty:
            return None
        with self._snapshot(table) as version:
            ranking = search.rank(self._database.vectors, plan, version, self._fetch, row)
            if ranking is None:
                return None
            self._scores = ranking.scores
            return self._fetch(plan.final, (*row, ranking.as_json))

    def _fetch(self, sql: str, row: StorageRow) -> list[tuple[Storage, ...]]:
        return self._connection.execute(sql, row).fetchall()

    @contextmanager
    def _snapshot(self, table: str) -> Iterator[tuple[int, int]]:
        """One state of the database for several statements, with the version of `table` in it."""
        if self._writing:
            yield self._database.table_version(table)
            return
        try:
            with self._database.commit_lock:
                version = self._database.table_version(table)
                self._connection.execute("BEGIN")
                self._connection.execute("SELECT 1 FROM owl_schemas LIMIT 1").fetchone()
            yield version
        finally:
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")

    # ---------------------------------------------------------------------------------------------------- writing

    def _begin_write(self) -> None:
        """Take the write lock, waiting for whoever has it. Raises 131 after the lock timeout, 139 when cancelled."""
        if self._writing:
            return
        waited, limit = 0.0, self._database.lock_timeout
        while not self._database.write_lock.acquire(timeout=min(_LOCK_POLL_SECONDS, limit)):
            waited += _LOCK_POLL_SECONDS
            if self._cancelled:
                raise failures.cancelled()
            if waited >= limit:
                raise lock_wait_timeout(f"waited {limit:g} s for another transaction")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._database.write_lock.release()
            raise
        self._writing = True

    def _end_write(self) -> None:
        self._dirty.clear()
        self._writing = False
        self._database.write_lock.release()

    def _write(self, plan: WritePlan, rows: Sequence[StorageRow], *, autocommit: bool) -> Outcome:
        continues = self._writing
        self._begin_write()
        try:
            counts = self._guarded_write(plan, rows, continues=continues)
        except BaseException:
            if not continues:
                self.rollback()
            raise
        self._dirty |= plan.tables
        self._filled_temporary |= plan.table.is_shared_by_sessions
        if autocommit:
            self.commit()
        return Outcome(rows_affected=counts)

    def _guarded_write(self, plan: WritePlan, rows: Sequence[StorageRow], *, continues: bool) -> list[int]:
        """An error undoes this statement only; the transaction before it stays, unless SQLite has undone it too."""
        if not continues:
            return self._write_rows(plan, rows)
        self._connection.execute("SAVEPOINT owl_statement")
        try:
            counts = self._write_rows(plan, rows)
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK TO owl_statement")
                self._connection.execute("RELEASE owl_statement")
            raise
        self._connection.execute("RELEASE owl_statement")
        return counts

    def _write_rows(self, plan: WritePlan, rows: Sequence[StorageRow]) -> list[int]:
        converted = plan.convert(rows)
        if plan.one_row:
            self._connection.executemany(plan.steps[0].sql, converted)
            counts = [1] * len(rows)
        else:
            counts = [self._write_row(plan, row) for row in converted]
        if plan.has_identity and plan.inserts:
            (self.context.last_identity,) = self._connection.execute("SELECT last_insert_rowid()").fetchone()
        return counts

    def _write_row(self, plan: WritePlan, row: StorageRow) -> int:
        collected = self._run(plan.collect, row).fetchall() if plan.collect is not None else []
        count = sum(self._run(step, row).rowcount for step in plan.steps)
        if not count and plan.fallback is not None:
            count = self._run(plan.fallback, row).rowcount
        if collected:
            self._connection.executemany(plan.insert_collected, collected)
        return count + len(collected)

    def _define(self, plan: DefinitionPlan) -> None:
        """DDL commits what came before, runs alone, and commits itself."""
        self.commit()
        self._begin_write()
        try:
            catalog = self._database.catalog.seen_by(self.connection_id)
            bench = Workbench(self._connection, catalog, self.context.schema, self.context.user)
            plan.definition(bench)
            following = catalogue.load(self._connection, self._database.catalog.version + 1)
            with self._database.commit_lock:
                self._connection.execute("COMMIT")
                self._database.publish(following)
        except BaseException:
            self.rollback()
            raise
        self._end_write()

    # --------------------------------------------------------------------------------- control statements (control.py)

    def set_schema(self, name: str) -> None:
        if name not in self._database.catalog.schemas and name not in catalogue.SYSTEM_SCHEMAS:
            raise invalid_schema(name)
        self.context.schema = name

    def set_variable(self, name: str, value: str | None) -> None:
        if value is None:
            self.context.session_variables.pop(name, None)
        else:
            self.context.session_variables[name] = value

    def savepoint(self, name: str) -> None:
        self._begin_write()
        self._connection.execute(f"SAVEPOINT {quoted_name(name)}")

    def rollback_to(self, name: str) -> None:
        self._with_savepoint(f"ROLLBACK TO {quoted_name(name)}", name)

    def release(self, name: str) -> None:
        self._with_savepoint(f"RELEASE {quoted_name(name)}", name)

    def _with_savepoint(self, sql: str, name: str) -> None:
        try:
            self._connection.execute(sql)
        except sqlite3.OperationalError:
            raise HanaError(128, f"transaction error: savepoint {name} not found") from None

    def lock(self) -> None:
        self._begin_write()

    def cancel_session(self, connection_id: int) -> None:
        self._database.cancel(connection_id)
