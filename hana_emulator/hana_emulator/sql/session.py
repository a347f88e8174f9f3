"""One session: run plans on its own SQLite connection, keep its transaction, return rows, translate errors."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from hana_emulator.errors import HanaError, invalid_schema
from hana_emulator.seam import FAILED, Outcome, Statement, Storage, StorageRow
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import rights
from hana_emulator.sql.control import READ_COMMITTED
from hana_emulator.sql.definition import definitions, tables
from hana_emulator.sql.definition.workbench import Workbench
from hana_emulator.sql.functions.registration import Context
from hana_emulator.sql.language.names import quoted as quoted_name
from hana_emulator.sql.language.names import quoted_key
from hana_emulator.sql.language.reader import Name
from hana_emulator.sql.planner import ControlPlan, DefinitionPlan, Prepared, QueryPlan
from hana_emulator.sql.query import search
from hana_emulator.sql.query.coercion import coerce
from hana_emulator.sql.query.locking import ResultRow
from hana_emulator.sql.query.scope import Bound
from hana_emulator.sql.query.writes import Step, WritePlan
from hana_emulator.sql.storage import failures, word_index
from hana_emulator.sql.storage.changes import install_triggers
from hana_emulator.sql.storage.locks import Blocked
from hana_emulator.sql.storage.row_versions import Version
from hana_emulator.sql.storage.transaction import Transaction
from hana_emulator.sql.storage.vectors import Column
from hana_emulator.sql.storage.word_index import WordIndex
from hana_emulator.sql.storage.writer import NO_PATIENCE, Writer

if TYPE_CHECKING:
    from hana_emulator.sql.database import Database

_FIRST_ROWS = 4_096  # Results with fewer rows are read at once; longer ones stay open on their own connection
_NEXT_ROWS = 2_048
BATCH_ERRORS = (HanaError, sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError)
_CHANGING = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_DROP_TABLE})
# For these actions, SQLite passes the table's name in the authorizer's second argument
_CHANGING_SECOND = frozenset({sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_DROP_INDEX})


def _note_changed(changed: set[str], action: int, first: str | None, second: str | None, *_: object) -> int:
    """A SQLite authorizer that allows everything and records the tables that a definition changes."""
    table = first if action in _CHANGING else second if action in _CHANGING_SECOND else None
    if table is not None and table.startswith("~"):
        changed.add(table)
    return sqlite3.SQLITE_OK


class Session:
    """Implements `seam.SqlConnection`.

    Reading opens no transaction, so each SELECT sees the committed state. Rows that a transaction writes or locks stay
    locked until commit or rollback; a wait beyond the lock timeout raises 131.
    """

    def __init__(self, database: Database, connection_id: int, user: str, schema: str) -> None:
        self.connection_id = connection_id
        self.context = Context(user=user, schema=schema, connection_id=connection_id)
        self._database = database
        self._scores: dict[int, float] = {}
        # During a search: by table, the version in the statement's snapshot, if that is a committed state
        self._versions: dict[str, Version] = {}
        self._writer = Writer(database)
        self._connection = self._open()
        self._spare: list[sqlite3.Connection] = []
        self._running = False
        self._autocommit = False
        self._read_only = False
        self._closed = False
        self._filled_temporary = False  # Whether a global temporary table may have rows of this session

    def _open(self) -> sqlite3.Connection:
        connection = self._database.open_connection(self.context, self._writer)
        connection.create_function(search.SCORE_FUNCTION, 1, lambda rowid: self._scores.get(rowid))
        connection.create_function(word_index.HOLDERS_FUNCTION, 3, self._holders)
        return connection

    # ------------------------------------------------------------------------------------------------------ the seam

    def prepare(self, sql: str) -> Prepared:
        return self._permitted(self._database.prepare(sql, self.context.schema, self.connection_id))

    def execute(
        self, statement: Statement, rows: Sequence[StorageRow], *, autocommit: bool, batch: bool = False
    ) -> Outcome:
        self._autocommit = autocommit
        with self._statement():
            prepared = self._current(statement)
            if not rows:
                raise HanaError(2, "general error: a statement runs for at least one row of parameters")
            if any(len(row) != len(prepared.parameters) for row in rows):
                raise HanaError(2, f"general error: the statement takes {len(prepared.parameters)} parameters")
            plan = prepared.plan
            # READ ONLY allows "only read operations with SELECT" (SAP HANA SQL reference, SET TRANSACTION). HanaError 7
            # is this emulator's choice; HANA's code is unknown.
            if self._read_only and (isinstance(plan, WritePlan | DefinitionPlan) or getattr(plan, "locks", None)):
                raise HanaError(
                    7, "feature not supported: writing in a READ ONLY transaction; SET TRANSACTION READ WRITE first"
                )
            match plan:
                case QueryPlan():
                    (row,) = self._converted(rows[:1], statement, prepared)
                    outcome = self._query(plan, row, autocommit=autocommit)
                    if prepared.columns != statement.columns:
                        outcome.columns = prepared.columns
                    return outcome
                case WritePlan():
                    return self._write(statement, rows, autocommit=autocommit, batch=batch)
                case DefinitionPlan():
                    self._define(plan, prepared.schema)
                case ControlPlan():
                    plan.control(self)
                case None:
                    raise HanaError(2, "general error: the statement was not prepared here")
                case _:
                    assert_never(plan)
            return Outcome()

    def commit(self) -> None:
        self._writer.close_snapshot(self._connection)
        self._writer.commit()

    def rollback(self) -> None:
        self._writer.close_snapshot(self._connection)
        self._writer.rollback()

    @property
    def in_transaction(self) -> bool:
        return self._writer.transaction is not None

    def cancel(self) -> None:
        if self._running:
            self._writer.cancel()
            self._connection.interrupt()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.rollback()
            # Tables that cannot be dropped because of another transaction's lock are dropped at the next start.
            if self._filled_temporary or tables.belongs_to(self._database.catalog, self.connection_id):
                with suppress(HanaError, sqlite3.Error):
                    self._define(DefinitionPlan(tables.sweep), self.context.schema, patience=NO_PATIENCE)
        finally:
            for connection in (self._connection, *self._spare):
                connection.close()
            self._spare.clear()
            self._database.forget(self)

    # ------------------------------------------------------------------------------------------------ running a plan

    @contextmanager
    def _statement(self) -> Iterator[None]:
        """Set a statement's clock and cancel flag, translate its errors, end the transaction if necessary."""
        self.context.begin_statement()
        self._writer.cancelled, self._running = False, True
        try:
            yield
        except HanaError as error:
            raise self._settled(error) from None
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as error:
            raise self._settled(failures.translate(error, self.context.error)) from None
        finally:
            self._running = False

    def _settled(self, error: HanaError) -> HanaError:
        """Return `error`, after ending the transaction if the error requires it. SQLite itself rolls back when a write
        is interrupted, the disk is full, I/O fails or memory is short (https://sqlite.org/lang_transaction.html,
        section 3)."""
        self._running = False
        if self._writer.undone_by_sqlite():
            error = failures.rolled_back(error)
        if error.rolls_back:
            self.rollback()
        return error

    def _current(self, statement: Statement) -> Prepared:
        if isinstance(statement, Prepared) and statement.version == self._database.catalog.version:
            return statement
        schema = statement.schema if isinstance(statement, Prepared) else self.context.schema
        return self._permitted(self._database.prepare(statement.sql, schema, self.connection_id))

    def _converted(self, rows: Sequence[StorageRow], old: Statement, new: Statement) -> Sequence[StorageRow]:
        """Convert rows for the parameters of `old` to the types that a change of structure gave them in `new`. Raises
        HanaError 266 or that of a value that does not convert."""
        converted = rows
        for place, (before, after) in enumerate(zip(old.parameters, new.parameters, strict=True)):
            if before.type != after.type:
                sql = f"SELECT {coerce(Bound('?1', before.type), after.type).sql}"
                converted = [
                    (*row[:place], *self._connection.execute(sql, (row[place],)).fetchone(), *row[place + 1 :])
                    for row in converted
                ]
        return converted

    def _permitted(self, prepared: Prepared) -> Prepared:
        """Check privileges; raises HanaError 258. Users share plans, so each execution is checked. A change of
        privileges changes the catalogue version, so statements are prepared again."""
        self._database.catalog.rights.require(self.context.user, prepared.touches)
        return prepared

    def _run(self, step: Step, row: StorageRow) -> sqlite3.Cursor:
        return self._connection.execute(step.sql, row if len(row) == step.parameters else row[: step.parameters])

    # ---------------------------------------------------------------------------------------------------- reading

    def _query(self, plan: QueryPlan, row: StorageRow, *, autocommit: bool) -> Outcome:
        """Inside a transaction, read through the writer to see its own changes."""
        if (locks := plan.locks) is not None:

            def attempt(transaction: Transaction) -> list[ResultRow]:
                found = [locks.split(result) for result in self._run(plan.step, row)]
                if locks.clause.skips_locked:
                    found = [result for result in found if self._is_free(result[1])]
                behind: dict[str, set[int]] = {table: set() for table in locks.tables}
                for _, rowids in found:
                    for table, rowid in rowids:
                        behind[table].add(rowid)
                for table, rowids_there in behind.items():
                    self._database.locks.check_rows(table, rowids_there)
                    transaction.lock_rows(table, rowids_there)
                return [result for result, _ in found]

            patience = locks.clause.patience
            return Outcome(
                rows=iter(self._writer.run(self._connection, attempt, autocommit=autocommit, patience=patience))
            )
        if self._writer.transaction is None:
            if self._writer.repeatable and not autocommit:
                self._writer.open_snapshot(self._connection)
            return self._read(plan, row)
        with self._writer.active(self._connection):
            return self._read(plan, row)

    def _is_free(self, rows: list[tuple[str, int]]) -> bool:
        try:
            for table, rowid in rows:
                self._database.locks.check_rows(table, {rowid})
        except Blocked:
            return False
        return True

    def _read(self, plan: QueryPlan, row: StorageRow) -> Outcome:
        with self._searching(plan.searched) if plan.searched else nullcontext():
            found = self._search(plan.search, row) if plan.search is not None else None
            return Outcome(rows=self._rows(self._run(plan.step, row)) if found is None else iter(found))

    def _rows(self, cursor: sqlite3.Cursor) -> Iterator[Sequence[Storage]]:
        """Read short results, and all results in a transaction, at once. A long result keeps its own connection,
        because SQLite would tie it and later statements to one snapshot."""
        first = cursor.fetchmany(_FIRST_ROWS)
        if len(first) < _FIRST_ROWS:
            return iter(first)
        if self._connection.in_transaction:
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
        table, column = plan.key
        version = self._versions.get(table)
        if version is None:
            return None

        def vectors() -> Column:
            return self._database.vectors.at(plan.key, version, partial(self._read_column, table, quoted_name(column)))

        ranking = search.rank(plan, vectors, self._fetch, row)
        if ranking is None:
            return None
        rowids, self._scores = ranking
        return self._fetch(plan.final, (*row, json.dumps(rowids)))

    def _holders(self, table: str, column: str, term: Storage) -> str:
        """Implements `word_index.HOLDERS_FUNCTION`. The session's uncommitted rows are read for each term."""
        read, version = partial(self._read_column, table, column), self._versions.get(table)
        index = (
            WordIndex.build(read(None)) if version is None else self._database.words.at((table, column), version, read)
        )
        return json.dumps(index.holders(term))

    def _read_column(self, table: str, column: str, rowids: AbstractSet[int] | None) -> Iterator[tuple[int, Any]]:
        """Implements `column_cache.Read`."""
        sql = f"SELECT _rowid_, {column} FROM {quoted_key(table)}"
        if rowids is None:
            return self._connection.execute(f"{sql} ORDER BY _rowid_")
        return self._connection.execute(
            f"{sql} WHERE _rowid_ IN (SELECT value FROM json_each(?))", (json.dumps(list(rowids)),)
        )

    def _fetch(self, sql: str, row: StorageRow) -> list[tuple[Storage, ...]]:
        return self._connection.execute(sql, row).fetchall()

    @contextmanager
    def _searching(self, tables: AbstractSet[str]) -> Iterator[None]:
        """Provide one snapshot for several statements, and each table's version. Tables have no version in an old
        snapshot or if this session's transaction has changed them."""
        if self._writer.snapshot is not None:
            yield
            return
        transaction = self._writer.transaction
        try:
            with self._database.commit_lock:
                known = tables - transaction.tables if transaction is not None else tables
                self._versions = {table: self._database.versions.current(table) for table in known}
                if transaction is None:
                    self._connection.execute("BEGIN")
                    self._connection.execute("SELECT 1 FROM owl_schemas LIMIT 1").fetchone()
            yield
        finally:
            self._versions = {}
            if transaction is None and self._connection.in_transaction:
                self._connection.execute("COMMIT")

    # ---------------------------------------------------------------------------------------------------- writing

    def _write(self, statement: Statement, rows: Sequence[StorageRow], *, autocommit: bool, batch: bool) -> Outcome:
        """Run a write, planned again for each attempt if a definition was committed."""

        def attempt(transaction: Transaction) -> Outcome:
            current = self._current(statement)
            plan = current.plan
            assert isinstance(plan, WritePlan)
            table = plan.table.table_key
            self._filled_temporary |= plan.table.is_shared_by_sessions

            def write(some: Sequence[StorageRow]) -> list[int]:
                action = partial(self._write_rows, plan, self._converted(some, statement, current))
                counts = self._writer.write(transaction, table, action, inserts=plan.inserts)
                transaction.weight += sum(counts)
                return counts

            if len(rows) == 1 or not batch:
                return Outcome(rows_affected=write(rows))
            with transaction.together():  # waiting for a row lock restarts the whole batch
                # Try all rows at once, which is fast; after a failure, repeat row by row.
                try:
                    return Outcome(rows_affected=write(rows))
                except BATCH_ERRORS as error:
                    if self._row_error(error).rolls_back:
                        raise
                outcome = Outcome()
                for row in rows:
                    try:
                        outcome.rows_affected += write([row])
                    except BATCH_ERRORS as error:
                        reason = self._row_error(error)
                        if reason.rolls_back:
                            raise
                        outcome.rows_affected.append(FAILED)
                        outcome.errors.append(reason)
                return outcome

        return self._writer.run(self._connection, attempt, autocommit=autocommit)

    def _row_error(self, error: Exception) -> HanaError:
        """Translate the error. If SQLite has undone the transaction, the result has `rolls_back`."""
        reason = error if isinstance(error, HanaError) else failures.translate(error, self.context.error)
        return failures.rolled_back(reason) if self._writer.undone_by_sqlite() else reason

    def _write_rows(self, plan: WritePlan, rows: Sequence[StorageRow]) -> list[int]:
        self.context.error = None
        converted = plan.convert(rows)
        if plan.one_row and not plan.chosen_identity and not plan.table.refers_to_itself:
            self._connection.executemany(plan.steps[0].sql, converted)
            counts = [1] * len(rows)
        else:
            counts = [self._write_row(plan, row) for row in converted]
        if plan.numbers_rows and plan.inserts:
            (self.context.last_identity,) = self._connection.execute("SELECT last_insert_rowid()").fetchone()
        return counts

    def _write_row(self, plan: WritePlan, row: StorageRow) -> int:
        with self._writer.one_statement(self._connection):
            collected = self._run(plan.collect, row).fetchall() if plan.collect is not None else []
            count = sum(self._write_step(plan, step, row) for step in plan.steps)
            if not count and plan.fallback is not None:
                count = self._write_step(plan, plan.fallback, row)
            for values in collected:
                self._write_step(plan, Step(plan.insert_collected, len(values)), values)
            return count + len(collected)

    def _write_step(self, plan: WritePlan, step: Step, row: StorageRow) -> int:
        """Run one step. Rows with an explicit identity may have any rowid, so SQLite reports them."""
        if not plan.chosen_identity or not step.sql.startswith("INSERT"):
            return self._run(step, row).rowcount
        returning = Step(f"{step.sql} RETURNING {plan.chosen_identity}", step.parameters)
        found = self._run(returning, row).fetchall()
        for (rowid,) in found:
            self._writer.touch(plan.table.table_key, rowid)
        return len(found)

    def _define(self, plan: DefinitionPlan, schema: str, *, patience: float | None = None) -> None:
        """Commit, run DDL alone and commit it. Waits for all locks on the tables that it changes. Names
        without a schema refer to `schema`, the current one at preparation."""
        self.commit()

        def attempt(transaction: Transaction) -> None:
            before = self._database.catalog.seen_by(self.connection_id)
            changed: set[str] = set()
            connection = transaction.connection
            bench = Workbench(connection, before, schema, self.context.user)
            connection.set_authorizer(partial(_note_changed, changed))
            try:
                plan.definition(bench)
            finally:
                connection.set_authorizer(None)
            rights.record_owner(connection, self.context.user)
            following = catalogue.load(connection, before.version + 1, before.lacking)
            before.rights.require(self.context.user, bench.touches)
            definitions.require_change(self.context.user, before, following)
            changed |= catalogue.reindexed(before, following) | catalogue.referred_anew(before, following)
            changed |= catalogue.triggered_anew(before, following)
            self._database.locks.check_unused(changed)
            install_triggers(connection)
            self._writer.commit_with(transaction, lambda: self._database.publish(following, bench.truncated))

        self._writer.run(self._connection, attempt, autocommit=False, patience=patience)

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
        with self._writer.active(self._connection) as transaction:
            transaction.savepoint(quoted_name(name))

    def rollback_to(self, name: str) -> None:
        with self._savepoint(name) as transaction:
            transaction.rollback_to(quoted_name(name))

    def release(self, name: str) -> None:
        with self._savepoint(name) as transaction:
            transaction.release(quoted_name(name))

    @contextmanager
    def _savepoint(self, name: str) -> Iterator[Transaction]:
        unknown = HanaError(128, f"transaction error: savepoint {name} not found")
        if self._writer.transaction is None:
            raise unknown
        with self._writer.active(self._connection) as transaction:
            try:
                yield transaction
            except ValueError:
                raise unknown from None

    def set_isolation(self, level: str) -> None:
        """Set the level from the next transaction on."""
        self._writer.repeatable = level != READ_COMMITTED
        self.context.isolation_level = level

    def set_read_only(self, read_only: bool) -> None:
        """Set the access mode until the next SET TRANSACTION; like the isolation level, it outlives the transaction."""
        self._read_only = read_only

    def set_lock_timeout(self, seconds: float) -> None:
        self._writer.lock_timeout = seconds

    def lock(self, table: Name, *, nowait: bool) -> None:
        """Lock a table; with autocommit, only during the statement. Raises HanaError 258 if the user has no write
        privilege on it."""
        catalog = self._database.catalog.seen_by(self.connection_id)
        found = catalog.table(table.schema or self.context.schema, table.name)
        if not any(catalog.rights.allows(self.context.user, found.touch(one)) for one in rights.CHANGING):
            catalog.rights.require(self.context.user, [found.touch("UPDATE")])
        key = found.table_key

        def attempt(transaction: Transaction) -> None:
            self._database.locks.check_unused((key,))
            transaction.lock_table(key)

        patience = NO_PATIENCE if nowait else None
        self._writer.run(self._connection, attempt, autocommit=self._autocommit, patience=patience)

    def reset_connect_attempts(self, user: str) -> None:
        self._database.catalog.rights.require(self.context.user, [rights.Touch("USER ADMIN")])
        self._database.logins.reset(user)

    def cancel_session(self, connection_id: int) -> None:
        self.require_control_of(connection_id)
        self._database.cancel(connection_id)

    def require_control_of(self, connection_id: int) -> None:
        if self._database.user_of(connection_id) != self.context.user:
            self._database.catalog.rights.require(self.context.user, [rights.Touch("SESSION ADMIN")])
