"""One SQLite file as a durable database: created atomically, checked on opening, with a connection pool. Maps SQLite's
errors to those of `connector.errors`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from connector.errors import (
    ConnectorError,
    DatabaseError,
    PermissionRefused,
    RowRejected,
    StatementFailed,
    StoreCorrupt,
    TransactionRolledBack,
)

if TYPE_CHECKING:
    from connector.stores.state import Session

T = TypeVar("T")
BUSY_SECONDS = 30.0
PAGE_BYTES = 8192  # of a new file; five vectors of 384 dimensions fill it, but two leave a quarter of 4 KB empty
CHECKPOINT_PAGES = 2000  # of the log, 16 MB; SQLite's default would copy the same pages for every second change set
_REFUSED = (
    UnicodeError,
    OverflowError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
)
"""Errors of SQLite and its driver for values that cannot be stored."""
_UNDECODED = "Could not decode to UTF-8"  # the start of Python's message; the rest quotes the text


class Damaged(Exception):
    """The file's content is corrupt. Becomes StoreCorrupt at the end of a transaction."""


@dataclass(frozen=True, slots=True)
class Schema:
    """`application_id` identifies our files. `script` creates the tables. `version`: the version of this layout; files
    of other versions are refused."""

    application_id: int
    version: int
    script: str
    prepare: Callable[[sqlite3.Connection], None] = lambda connection: None
    """Called for every new connection, to register functions."""
    called: str = "the store"  # the file's name in messages
    remedy: str = "run a full sync (owl-sap sync --all --full); clients write their documents again"
    """What to do once the file is gone."""


class SqliteFile:
    """Open the file, creating it if absent. Raises StoreCorrupt if it is damaged, or of another program or version.

    A new file is built under a temporary name and then put in place, so an empty or truncated file is damaged, never a
    new store. With `read_only` nothing is created, `write` fails, and write permission is not needed.
    """

    def __init__(self, path: Path, schema: Schema, *, read_only: bool = False) -> None:
        self.path = path
        self._schema = schema
        self._name = f"{schema.called} {path}"
        self._read_only = read_only
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        with self._mapped():
            if not read_only:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the file contains texts of rows
                if not path.exists():
                    self._create()
            # Check without opening the file: closing it would release this process's POSIX locks on it, and another
            # process could then remove the write-ahead log. SQLite itself detects files of other formats.
            if not path.stat().st_size:
                raise self.corrupt("it is empty")
            with self._lent() as connection:
                (identity,) = connection.execute("PRAGMA application_id").fetchone()
                (version,) = connection.execute("PRAGMA user_version").fetchone()
            if identity != schema.application_id:
                raise self.corrupt("it belongs to another program")
            layouts = f"({version}; this one has {schema.version})"
            if version < schema.version:
                raise StoreCorrupt(
                    f"{self._name} has the layout of an earlier commit {layouts}, which is not upgraded: delete it "
                    f"with its -wal and -shm files, and {schema.remedy}"
                )
            if version > schema.version:
                raise StoreCorrupt(
                    f"{self._name} has the layout of a later version {layouts}: install that version, or move the file "
                    f"away and {schema.remedy}"
                )

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
        """Open the only write transaction of all threads and processes; any exception rolls it back."""
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
        with suppress(sqlite3.Error):  # SQLite has already rolled back, for example on a full disk
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    @contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise StatementFailed(f"{self._name} is closed")
            connection = self._idle.pop() if self._idle else None
        usable, connection = True, connection or self._connect(self.path)
        try:
            yield connection
        except sqlite3.Error:
            usable = False
            raise
        finally:
            with self._lock:
                usable = usable and not self._closed
                if usable:
                    self._idle.append(connection)
            if not usable:
                connection.close()

    # --------------------------------------------------------------------------------------------- opening the file

    def _connect(self, path: Path) -> sqlite3.Connection:
        try:
            # Open for writing even with `read_only`: the last connection that may write removes the log files.
            return self._opened(path, "mode=rw")
        except sqlite3.OperationalError:
            # A reader also needs the log's index file. If SQLite cannot create that file and no log exists now, no
            # process is writing, and the database file is complete.
            if not self._read_only or Path(f"{path}-wal").exists():
                raise
            return self._opened(path, "mode=ro&immutable=1")

    def _opened(self, path: Path, mode: str) -> sqlite3.Connection:
        address = f"{path.absolute().as_uri()}?{mode}"
        connection = sqlite3.connect(
            address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES:d}")
            if self._read_only:
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA user_version").fetchone()  # the first read of the file
            self._schema.prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self) -> None:
        """Build the file under a temporary name and link it into place. If another process was first, use its file."""
        leftovers = [name for name in ("-wal", "-journal") if Path(f"{self.path}{name}").exists()]
        if leftovers:
            raise self.corrupt(f"the file is gone but its {leftovers[0]} is still there")
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            temporary.touch()
            connection = self._connect(temporary)
            try:
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES:d}")  # before the first page is written
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA application_id = {self._schema.application_id:d}")
                connection.execute(f"PRAGMA user_version = {self._schema.version:d}")
                connection.executescript(f"BEGIN; {self._schema.script}; COMMIT")
            finally:
                connection.close()
            try:
                os.link(temporary, self.path)  # never overwrite a file from another process
            except FileExistsError:
                pass
            except OSError:  # the file system has no hard links
                if not self.path.exists():
                    temporary.rename(self.path)
            with suppress(OSError):  # make the new name survive a power failure, if the system can sync folders
                descriptor = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            for name in ("", "-wal", "-shm"):
                Path(f"{temporary}{name}").unlink(missing_ok=True)

    def corrupt(self, what: str) -> StoreCorrupt:
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
            raise self.corrupt(str(error)) from None
        except UnicodeDecodeError:  # from SQLite's own message, which quotes the damaged data
            raise self.corrupt("what SQLite says of it is not UTF-8") from None

    def _error(self, error: sqlite3.Error) -> ConnectorError:
        # SQLite's messages contain no stored values, but this message of Python quotes the text: do not repeat it.
        if str(error).startswith(_UNDECODED):
            return self.corrupt("a text in it is not UTF-8")
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_NOTADB:
                return self.corrupt(f"it is not a SQLite file, or its first page is damaged: SQLite says {error}")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_FORMAT:
                return self.corrupt(f"SQLite says {error}")
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return TransactionRolledBack(f"{self._name} was locked by another writer for {BUSY_SECONDS:g} s")
            case sqlite3.SQLITE_FULL:
                return DatabaseError(f"no space left on the disk for {self._name}; nothing was written")
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                return PermissionRefused(f"{self._name} cannot be opened for writing: {error}")
            case sqlite3.SQLITE_IOERR:
                return DatabaseError(f"the disk failed while {self._name} was used: {error}")
            case _:
                return StatementFailed(f"{self._name}: {error}")


class _SqliteSession:
    """A `Session` in SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def query(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[Any]:
        return self._db.execute(sql, parameters).fetchall()

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        return self._db.execute(sql, parameters).rowcount

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = "") -> None:
        self._db.executemany(sql, rows)


class SqliteDatabase:
    """A `Database` in SQLite."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> list[Any]:
        with self._file.read() as db:
            try:
                return db.execute(sql, parameters).fetchall()
            except UnicodeEncodeError as error:  # not UnicodeDecodeError, which means a damaged file
                raise _refused(error) from None

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        return self.in_transaction(lambda session: session.execute(sql, parameters))

    def in_transaction(self, work: Callable[[Session], T], *, doing: str = "", overloaded: int | None = None) -> T:
        with self._file.write() as db:
            try:
                return work(_SqliteSession(db))
            except _REFUSED as error:
                raise _refused(error) from None


def _refused(error: Exception) -> RowRejected:
    return RowRejected(f"SQLite refuses a row's data ({type(error).__name__})")
