"""The database behind the emulator: one SQLite file, the catalogue in memory, locks and sessions."""

from __future__ import annotations

import fcntl
import itertools
import shutil
import sqlite3
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.nlp import Nlp
from hana_emulator.sql import explain
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.catalog import rights, system_views
from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.row_ids import RowIds
from hana_emulator.sql.definition import accounts, objects, tables
from hana_emulator.sql.functions import conversions
from hana_emulator.sql.functions import registration as functions
from hana_emulator.sql.functions.registration import Context
from hana_emulator.sql.language import limits
from hana_emulator.sql.logins import LoginBook
from hana_emulator.sql.planner import Prepared, prepare
from hana_emulator.sql.session import Session
from hana_emulator.sql.storage import failures, sequence_numbers, vectors, word_index
from hana_emulator.sql.storage.changes import (
    ENFORCING_FUNCTION,
    POSTPONE_FUNCTION,
    TOUCH_FUNCTION,
    Shape,
    install_triggers,
    read_shape,
)
from hana_emulator.sql.storage.column_cache import ColumnCache
from hana_emulator.sql.storage.locks import LockTable
from hana_emulator.sql.storage.row_versions import RowVersions
from hana_emulator.sql.storage.word_index import WordIndex
from hana_emulator.sql.storage.writer import Writer

LOCK_TIMEOUT_SECONDS = 10.0
_FILE = "hana.sqlite"
_PLANS = 2_000
_LONGEST_KEPT = 100_000  # Plans of longer statements are not cached: they contain the text and are rarely reused
_PRAGMAS = (
    "PRAGMA page_size = 16384",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = OFF",  # a killed process loses nothing; a power cut may
    "PRAGMA wal_autocheckpoint = 4000",  # 64 MB: otherwise a bulk load waits for the disk at every checkpoint
    "PRAGMA foreign_keys = ON",
    "PRAGMA recursive_triggers = ON",  # so that a self-referencing foreign key cascades
    "PRAGMA case_sensitive_like = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -8192",  # KiB for each connection; a session has one or more
    "PRAGMA mmap_size = 268435456",
)


class Database:
    """Implements `seam.SqlDatabase`. `path` is a folder, created if absent and used by one process at a time. None: a
    temporary folder, deleted on close.

    `user` logs in with `password` and starts in `schema`, which always exists.
    """

    def __init__(
        self,
        path: Path | None,
        user: str,
        password: str,
        schema: str,
        *,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        nlp: Nlp | None = None,
    ) -> None:
        self.lock_timeout = lock_timeout
        self.nlp = nlp or Nlp()
        self.statement_memory = limits.STATEMENT_BYTES
        # Held while a session runs a statement of its writing transaction or parks another session's transaction
        self.turn = threading.RLock()
        # The writer whose transaction is open in SQLite, which allows only one; accessed only while holding `turn`
        self.active: Writer | None = None
        self.locks = LockTable()
        # By table: the last identity value assigned by parked or rolled-back transactions
        self.identities: dict[str, int] = {}
        # Held so that a commit and its new row versions become visible together
        self.commit_lock = threading.Lock()
        self.commits = 0  # Number of commits so far; changed with `commit_lock` held
        self.versions = RowVersions()
        self.vectors = ColumnCache(self.versions, vectors.Column.build, vectors.MOST_BYTES)
        self.words = ColumnCache(self.versions, WordIndex.build, word_index.MOST_BYTES)
        self.logins = LoginBook()
        # By name: functions that return rows of the emulator's own views as JSON arrays of objects; can be replaced
        self.monitors: dict[str, Callable[[], str]] = {"logins": self.logins.as_json, "faults": lambda: "[]"}
        self._temporary = Path(tempfile.mkdtemp(prefix="hana-emulator-")) if path is None else None
        self.folder = path or self._temporary or Path()
        self.folder.mkdir(parents=True, exist_ok=True)
        # The operating system releases this lock when the process ends. Only one process may use the folder, because
        # catalogue and vectors are cached in memory.
        guard = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            guard.close()
            raise RuntimeError(
                f"another emulator is using the folder {self.folder}; stop it or choose another --data"
            ) from None
        self._guard = guard
        self.numbers = sequence_numbers.Numbers(self.folder)
        self.row_ids = RowIds(self.folder)
        self._user, self._schema = user.upper(), schema
        self._plans: OrderedDict[tuple[str, str, int, int], Prepared] = OrderedDict()
        self._plans_lock = threading.Lock()
        self._shapes: dict[str, Shape] = {}
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(200_001)
        self.catalog = self._initialise(password)

    def _initialise(self, password: str) -> Catalog:
        connection = self.open_connection(Context())
        try:
            catalogue.create_storage(connection)
            install_triggers(connection)
            known = catalogue.load(connection, 0, {})
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM owl_users WHERE name = ?", (self._user,))
            accounts.add_user(connection, self._user, password)
            rights.appoint(connection, self._user)
            for schema in {self._user, self._schema} - known.schemas:
                objects.add_schema(connection, schema, self._user)
            tables.sweep_all(connection, known)
            explain.create_storage(connection, known)

            rights.record_owner(connection, self._user)
            connection.execute("COMMIT")
            return catalogue.load(connection, 1, self.nlp.refusals())
        finally:
            connection.close()

    def open_connection(self, context: Context, writer: Writer | None = None) -> sqlite3.Connection:
        """Open a connection. `writer` receives each changed row and each check that triggers postpone."""
        connection = sqlite3.connect(
            self.folder / _FILE,
            timeout=self.lock_timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        for pragma in _PRAGMAS:
            connection.execute(pragma)
        functions.register(connection, context, self.nlp)
        writer = writer or Writer(self)
        connection.create_function(TOUCH_FUNCTION, 2, writer.touch)
        connection.create_function(ENFORCING_FUNCTION, 0, writer.is_enforcing)
        connection.create_function(POSTPONE_FUNCTION, -1, writer.postpone)

        def report(error: HanaError) -> None:
            context.error = error

        context.memory.limit = self.statement_memory
        context.memory.watch(connection, report)
        conversions.register(connection, report)
        system_views.register(connection)
        connection.create_function(
            system_views.SEES_FUNCTION, 1, lambda relation: self.catalog.rights.sees(context.user, relation)
        )
        connection.create_function(system_views.MONITOR_FUNCTION, 1, lambda name: self.monitors[name]())
        sequence_numbers.register(connection, context, self.numbers)
        self.row_ids.register(connection)
        return connection

    def connect(self, user: str) -> Session:
        name = user.upper() if user.upper() in self.catalog.users else user
        schema = self._schema if name == self._user else name
        session = Session(self, next(self._numbers), name, schema)
        self._sessions[session.connection_id] = session
        return session

    def password(self, user: str) -> str | None:
        return self.catalog.users.get(user) or self.catalog.users.get(user.upper())

    def admit(self, user: str, *, proven: bool) -> None:
        name = user if user in self.catalog.users else user.upper()
        self.logins.admit(name, proven=proven, deactivated=name in self.catalog.rights.deactivated)

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.cancel()
            session.close()
        self.numbers.close()
        self.row_ids.close()
        self._guard.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ for its sessions

    def prepare(self, sql: str, schema: str, session: int) -> Prepared:
        """Plan `sql` with the current catalogue. Plans are cached by text, and by session if it may name a local
        temporary table."""
        catalog = self.catalog.seen_by(session if "#" in sql else 0)
        key = (sql, schema, catalog.version, catalog.session)
        with self._plans_lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        try:
            found = prepare(sql, catalog, schema)
        except RecursionError:
            raise syntax_error("the statement is nested too deeply") from None
        except UnicodeError as error:
            raise failures.translate(error, None) from None
        if len(sql) > _LONGEST_KEPT:
            return found
        with self._plans_lock:
            self._plans[key] = found
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return found

    def publish(self, catalog: Catalog, truncated: Iterable[int] = ()) -> None:
        """Set a definition's catalogue; rows may have changed too. Call with `commit_lock`, right after COMMIT."""
        self.catalog = catalog
        for number in truncated:
            self.row_ids.restart(number)
        self.versions.begin_epoch()
        self.vectors.clear()
        self.words.clear()
        self._shapes.clear()

    def shape(self, connection: sqlite3.Connection, table: str) -> Shape:
        """The table's shape in SQLite, read once per change of structure. Call while holding `turn`."""
        found = self._shapes.get(table)
        if found is None:
            found = self._shapes[table] = read_shape(connection, table, self.catalog.foreign_keys_of(table))
        return found

    def cancel(self, connection_id: int) -> None:
        self._session(connection_id).cancel()

    def user_of(self, connection_id: int) -> str:
        return self._session(connection_id).context.user

    def _session(self, connection_id: int) -> Session:
        session = self._sessions.get(connection_id)
        if session is None:
            raise HanaError(1093, f"no session with connection id {connection_id}")
        return session

    def forget(self, session: Session) -> None:
        self._sessions.pop(session.connection_id, None)
