"""One SQLite file as a durable database: created whole or not at all, checked when opened, with a pool of connections
and SQLite's errors mapped to ours.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from connector.errors import (
    ConnectorError,
    DatabaseError,
    PermissionRefused,
    StatementFailed,
    StoreCorrupt,
    TransactionRolledBack,
)

BUSY_SECONDS = 30.0
_UNDECODED = "Could not decode to UTF-8"
"""The beginning of Python's message, which then quotes the text."""


class Damaged(Exception):
    """The file's content cannot be what was written. Becomes StoreCorrupt inside a transaction."""


@contextmanager
def undamaged(what: str) -> Iterator[None]:
    """Raise Damaged for text that cannot be parsed: SQLite does not notice a changed bit in it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{what} cannot be read") from None


@dataclass(frozen=True, slots=True)
class Schema:
    """`application_id` marks files as ours. `migrations[i]` is a script that leads from version i to i + 1."""

    application_id: int
    migrations: tuple[str, ...]
    prepare: Callable[[sqlite3.Connection], None] = lambda connection: None
    """Called for every new connection: functions to register."""
    called: str = "the store"
    """The file's name in messages."""
    remedy: str = "sync again: everything in it can be built anew from the source"
    """The advice once a damaged file is moved away."""

    @property
    def version(self) -> int:
        return len(self.migrations)


class SqliteFile:
    """Opened on construction. Raises StoreCorrupt for a file that is not a whole one of ours or is of a later version.

    An absent file is created complete under another name and put in place at once, so an empty or cut-off file under
    the real name is damage, and is never taken for a new store. With `read_only` nothing is created or migrated,
    `write` fails, and the process needs no write permission.
    """

    def __init__(self, path: Path, schema: Schema, *, read_only: bool = False) -> None:
        self.path = path
        self._schema = schema
        self._read_only = read_only
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        with self._mapped():
            if not read_only:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it contains texts of rows
                if not path.exists():
                    self._create()
            # Not opened to look at it: closing it would release the locks that other connections of this process hold
            # on it (POSIX), and another process would then remove the log. SQLite detects other files itself.
            if not path.stat().st_size:
                raise self._corrupt("it is empty")
            with self._lent() as connection:
                self._migrate(connection)

    @property
    def _name(self) -> str:
        return f"{self._schema.called} {self.path}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ------------------------------------------------------------------------------------------------ transactions

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction with a consistent view of the file."""
        with self._mapped(), self._lent() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                self._roll_back(connection)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction, the only writer of all threads and processes; rolled back by any exception."""
        with self._mapped(), self._lent() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise

    @staticmethod
    def _roll_back(connection: sqlite3.Connection) -> None:
        with suppress(sqlite3.Error):  # a full disk has rolled back by itself
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    @contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise StatementFailed(f"{self._name} is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect(self.path)
        try:
            yield connection
        except sqlite3.Error:
            connection.close()
            raise
        except BaseException:
            self._give_back(connection)
            raise
        self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    # --------------------------------------------------------------------------------------------- opening the file

    def _connect(self, path: Path) -> sqlite3.Connection:
        try:
            # For readers too: a connection that may write tidies the log's files away when it is the last one.
            return self._opened(path, "mode=rw")
        except sqlite3.OperationalError:
            # Even a reader needs the log's index beside the file. Where that cannot be created and there is no log,
            # no process is writing, and the file is complete.
            if not self._read_only or Path(f"{path}-wal").exists():
                raise
            return self._opened(path, "mode=ro&immutable=1")

    def _opened(self, path: Path, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            if self._read_only:
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA user_version").fetchone()  # the first look at the file
            self._schema.prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self) -> None:
        """Build the file beside its place and link it there; another process that was first wins."""
        leftovers = [name for name in ("-wal", "-journal") if Path(f"{self.path}{name}").exists()]
        if leftovers:
            raise self._corrupt(f"the file is gone but its {leftovers[0]} is still there")
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            temporary.touch()
            connection = self._connect(temporary)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA application_id = {self._schema.application_id:d}")
                self._run_migrations(connection, 0)
            finally:
                connection.close()
            try:
                os.link(temporary, self.path)  # never over a file that another process put there first
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not self.path.exists():
                    temporary.rename(self.path)
            with suppress(OSError):  # make the new name survive a power cut, where folders can be synced
                descriptor = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            for name in ("", "-wal", "-shm"):
                Path(f"{temporary}{name}").unlink(missing_ok=True)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (identity,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if identity != self._schema.application_id:
            raise self._corrupt("it belongs to another program")
        if version > self._schema.version:
            raise StoreCorrupt(
                f"{self._name} was written by a later version of owl-sap-connector (layout {version}, this "
                f"one knows {self._schema.version}): upgrade, or use another folder"
            )
        if version < self._schema.version and not self._read_only:
            self._run_migrations(connection, version)

    def _run_migrations(self, connection: sqlite3.Connection, version: int) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            for script in self._schema.migrations[version:]:
                for statement in script.split(";\n\n"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {self._schema.version:d}")
            connection.execute("COMMIT")
        except BaseException:
            self._roll_back(connection)
            raise

    def _corrupt(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"{self._name} cannot be trusted: {what}. Restore it from a backup, or move it and its -wal and -shm files "
            f"away and {self._schema.remedy}"
        )

    # ------------------------------------------------------------------------------------------------------- errors

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._error(error) from None
        except OSError as error:
            message = f"{self._name} cannot be used: {error.strerror or type(error).__name__}"
            raise (PermissionRefused if isinstance(error, PermissionError) else DatabaseError)(message) from None
        except Damaged as error:
            raise self._corrupt(str(error)) from None
        except UnicodeDecodeError:  # of SQLite's own message, which quotes what is damaged
            raise self._corrupt("what SQLite says of it is not UTF-8") from None

    def _error(self, error: sqlite3.Error) -> ConnectorError:
        # Text of SQLite's own, never of the data: but for one of Python's these messages name no value.
        if str(error).startswith(_UNDECODED):
            return self._corrupt("a text in it is not UTF-8")
        code = getattr(error, "sqlite_errorcode", None)
        primary = code & 0xFF if code is not None else -1
        match primary:
            case sqlite3.SQLITE_NOTADB:
                return self._corrupt(f"it is no SQLite file, or its first page is damaged: SQLite says {error}")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_FORMAT:
                return self._corrupt(f"SQLite says {error}")
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return TransactionRolledBack(f"{self._name} was locked by another writer for {BUSY_SECONDS:g} s")
            case sqlite3.SQLITE_FULL:
                return DatabaseError(f"no room left on the disk for {self._name}; nothing was written")
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                return PermissionRefused(f"{self._name} cannot be opened for writing: {error}")
            case sqlite3.SQLITE_IOERR:
                return DatabaseError(f"the disk failed under {self._name}: {error}")
            case _:
                return StatementFailed(f"{self._name}: {error}")
