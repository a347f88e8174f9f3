"""Connections to SAP HANA: options, pool, transactions, retries, quoting, capabilities. Only this module imports the
driver (hdbcli), on the first connection.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from connector import cancellation
from connector.errors import (
    CANCELLED,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    ConnectorError,
    DatabaseError,
    LoginRefused,
    Overloaded,
    PermissionRefused,
    RowRejected,
    Unavailable,
    UnknownColumn,
    classify,
)
from connector.extras import install_command
from connector.retry import AS_USUAL, RetryPolicy

T = TypeVar("T")
Rows = list[tuple[Any, ...]]

LONGEST_IDENTIFIER = 127


def quote(identifier: str) -> str:
    """Return the name as a quoted SQL identifier, keeping its case. Raises ConfigurationError for an invalid name."""
    if not identifier or len(identifier) > LONGEST_IDENTIFIER:
        raise ConfigurationError(f"a HANA name must have 1 to {LONGEST_IDENTIFIER} characters, not {len(identifier)}")
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in identifier):
        raise ConfigurationError(f"{identifier!r} cannot be a name in HANA: it contains NUL or an unpaired surrogate")
    return '"' + identifier.replace('"', '""') + '"'


# -------------------------------------------------------------------------------------------------------- the driver


def load_driver() -> Any:
    """Import SAP's driver (DB-API; its errors carry `errorcode` and `errortext`). It is optional because of SAP's
    licence."""
    try:
        return importlib.import_module("hdbcli.dbapi")
    except ImportError as error:
        raise ConfigurationError(
            f"SAP's driver hdbcli is not installed (it has SAP's own licence): {install_command('hana')}"
        ) from error


# ------------------------------------------------------------------------------------------------------- the options


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionOptions:
    """Options of one HANA connection. Times in seconds. Rejects unknown properties: the driver ignores misspelt ones.

    `userkey` (SAP's secure user store) replaces `host`, `port`, `user` and `password`. `trust_store`: the path of a PEM
    file or the PEM itself. `schema`: the current schema of every session.
    """

    host: str = ""
    port: int = 443
    user: str = ""
    password: str = field(default="", repr=False)
    userkey: str = ""
    schema: str = ""
    encrypt: bool = True
    validate_certificate: bool = True
    trust_store: str = ""
    host_name_in_certificate: str = ""
    connect_timeout: float = 10.0
    communication_timeout: float = 120.0
    application: str = "owl-sap-connector"

    def __post_init__(self) -> None:
        if not self.userkey and not self.host:
            raise ConfigurationError("no HANA to connect to: set `host` (and `user`, `password`), or `userkey`")
        if not self.userkey and not 1 <= self.port <= 65535:
            raise ConfigurationError(f"`port` is {self.port}; it must be between 1 and 65535")
        for name in ("connect_timeout", "communication_timeout"):
            if not 0.001 <= getattr(self, name) <= 86_400:
                raise ConfigurationError(f"`{name}` is {getattr(self, name)}; it must be between 0.001 and 86400 s")

    @property
    def place(self) -> str:
        """Return the address, for messages."""
        return f"user store key {self.userkey}" if self.userkey else f"{self.host}:{self.port}"

    def properties(self) -> dict[str, str | int]:
        """Return the driver's properties in its exact spelling (`vectoroutputtype` only in lower case).

        Always sets encryption and both timeouts: by default, the driver uses plain text on any port but 443 and waits
        forever. `reconnect` is off, because a silent reconnect loses the transaction.
        """
        login: dict[str, str | int] = {"userkey": self.userkey}
        if not self.userkey:
            login = {"address": self.host, "port": self.port, "user": self.user, "password": self.password}
        certificate = {
            "sslTrustStore": self.trust_store,
            "sslHostNameInCertificate": self.host_name_in_certificate,
        }
        return (
            login
            | {name: value for name, value in certificate.items() if value}
            | {
                "encrypt": str(self.encrypt).lower(),
                "sslValidateCertificate": str(self.validate_certificate).lower(),
                "connectTimeout": str(round(self.connect_timeout * 1000)),
                "communicationTimeout": str(round(self.communication_timeout * 1000)),
                "reconnect": "false",
                "vectoroutputtype": "memoryview",
                "sessionVariable:APPLICATION": self.application,
            }
        )

    def check_trust_store(self) -> None:
        """Raise ConnectFailed for a missing file, because the driver would report an untrusted certificate."""
        inline = "-----BEGIN" in self.trust_store
        if self.encrypt and self.trust_store and not inline and not Path(self.trust_store).is_file():
            raise ConnectFailed(f"`trust_store` names a file that does not exist: {self.trust_store}")


# --------------------------------------------------------------------------------------------------------- a session


class Session:
    """One connection, used by one thread at a time. Statements are autocommitted outside `transaction`.

    Keeps one cursor per statement text until the connection is closed: closing a cursor with a prepared statement costs
    a round trip that holds the interpreter lock. `types`: version of the tables' types that the statements know.
    """

    CURSORS = 24

    def __init__(
        self, driver: Any, connection: Any, on_statement: Callable[[str], None] | None, types: int = 0
    ) -> None:
        self.types = types
        self._driver = driver
        self._connection = connection
        self._on_statement = on_statement
        self._cursors: OrderedDict[str, Any] = OrderedDict()
        self.broken = False  # True: do not use the connection again
        self.last_used = time.monotonic()

    def query(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "querying HANA") -> Rows:
        """Return all result rows as tuples."""
        cursor = self._run(sql, parameters, doing)
        return self._call(doing, lambda: list(map(tuple, cursor.fetchall())))

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "changing HANA") -> int:
        """Return the number of affected rows (-1 if the driver does not report it)."""
        return int(self._run(sql, parameters, doing).rowcount)

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = "writing to HANA") -> None:
        """Execute once per parameter row, in as few packets as possible.

        If HANA rejects a row, raises the first error. The transaction then contains the accepted rows and must be
        rolled back. Do not use the driver's `batcherrors`, which names the bad rows: hdbcli 2.30 crashes with a
        segmentation fault on an error text that is not ASCII.
        """
        if not rows:
            return
        cursor = self._cursor(sql, doing)
        if self._on_statement:
            self._on_statement(sql)
        self._call(doing, lambda: cursor.executemany(sql, rows))

    def _run(self, sql: str, parameters: Sequence[Any], doing: str) -> Any:
        # Statements without parameters are not prepared, so they share one cursor.
        cursor = self._cursor(sql if parameters else "", doing)
        if self._on_statement:
            self._on_statement(sql)
        if parameters:
            self._call(doing, lambda: cursor.execute(sql, tuple(parameters)))
        else:
            self._call(doing, lambda: cursor.execute(sql))
        return cursor

    def _cursor(self, purpose: str, doing: str) -> Any:
        cursor = self._cursors.pop(purpose, None)
        if cursor is None:
            full = len(self._cursors) >= self.CURSORS
            cursor = self._cursors.popitem(last=False)[1] if full else self._call(doing, self._connection.cursor)
        self._cursors[purpose] = cursor
        return cursor

    def _call(self, doing: str, work: Callable[[], T]) -> T:
        """Call the driver and convert its errors into ours, without the driver's text, which may contain row data."""
        mapped: ConnectorError
        try:
            return work()
        except self._driver.Error as error:
            mapped = _mapped(error, doing)
            if mapped.code == CANCELLED:
                self.broken = False
        except (TypeError, ValueError, OverflowError) as error:
            mapped = RowRejected(f"{doing}: the driver cannot convert a value ({type(error).__name__}).")
        finally:
            self.last_used = time.monotonic()
        if isinstance(mapped, ConnectionLost | ConnectFailed | Unavailable):
            self.broken = True
        raise mapped from None

    def begin(self) -> None:
        self._call("opening a transaction", lambda: self._connection.setautocommit(False))

    def commit(self, doing: str) -> None:
        self._call(f"{doing}: commit", self._connection.commit)
        self._autocommit_again()

    def rollback(self) -> None:
        """Roll back. Never raises: on failure marks the connection broken, and HANA rolls back when it closes."""
        try:
            self._call("rolling back", self._connection.rollback)
        except ConnectorError:
            self.broken = True
        self._autocommit_again()

    def _autocommit_again(self) -> None:
        """Turn autocommit on. Never raises, because the caller would repeat work that is already committed."""
        try:
            self._call("ending a transaction", lambda: self._connection.setautocommit(True))
        except ConnectorError:
            self.broken = True

    def cancel(self) -> None:
        """Cancel the statement that another thread runs here. The session counts as broken until HANA confirms, because
        the cancel might hit the next statement. Never raises."""
        self.broken = True
        with suppress(self._driver.Error):
            self._connection.cancel()

    def close(self) -> None:
        """Close the connection, then the cursors. Never raises."""
        self.broken = True
        with suppress(self._driver.Error):
            self._connection.close()
        self._cursors.clear()


def _mapped(error: Any, doing: str) -> ConnectorError:
    return classify(int(getattr(error, "errorcode", 0) or 0), str(getattr(error, "errortext", "")), doing=doing)


# ---------------------------------------------------------------------------------------------------------- the pool


class HanaPool:
    """At most `size` connections, each used by one thread at a time; a thread holds at most one.

    A connection idle for `idle_check` seconds is checked before use. `on_statement` receives every SQL text before it
    is sent, never its parameters.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        size: int = 8,
        *,
        retry: RetryPolicy = AS_USUAL,
        on_statement: Callable[[str], None] | None = None,
        driver: Any = None,
        idle_check: float = 30.0,
    ) -> None:
        if size < 1:
            raise ConfigurationError(f"`pool_size` is {size}; it must be at least 1")
        self.options = options
        self.size = size
        self.retry = retry
        self.on_statement = on_statement
        self._driver = driver
        self._idle_check = idle_check
        self._idle: list[Session] = []
        self._open = 0
        self._closed = False
        self._changed = threading.Condition()
        self._held = threading.local()
        self._login = threading.Lock()
        self._failed: tuple[float, ConnectorError] | None = None
        self._refused: ConnectorError | None = None
        self._types: dict[str, int] = {}  # hashes, by table
        self._types_version = 0

    def __enter__(self) -> HanaPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections now, and the others when they are returned. Safe to call twice."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._changed.notify_all()
        for session in idle:
            session.close()

    def allow_login(self) -> None:
        """Allow another login attempt after a refused one."""
        self._refused = None

    def note_types(self, table: str, types: Sequence[Any]) -> None:
        """Replace every connection before its next use if the table's types differ from those of the last call:
        statements that are already prepared would convert parameters to the old types."""
        with self._changed:
            found = hash(tuple(types))
            self._types_version += self._types.setdefault(table, found) != found
            self._types[table] = found

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Yield this thread's connection, with autocommit. Raises RuntimeError for a second one in the same thread:
        pass the session on instead."""
        if getattr(self._held, "session", None) is not None:
            raise RuntimeError("this thread already holds a connection of this pool")
        session = self._held.session = self._take()
        try:
            yield session
        except Exception:
            raise
        except BaseException:  # for example Ctrl-C during a call: the state of the protocol is unknown
            session.broken = True
            raise
        finally:
            self._held.session = None
            self._give_back(session)

    @contextmanager
    def transaction(self, *, doing: str = "writing to HANA") -> Iterator[Session]:
        """Commit at the end, or roll back on any exception. Not retried: see `in_transaction`."""
        with self.session() as session:
            try:
                session.begin()
                yield session
                session.commit(doing)
            except BaseException:
                session.rollback()
                raise

    def in_transaction(
        self, work: Callable[[Session], T], *, doing: str = "writing to HANA", overloaded: int | None = None
    ) -> T:
        """Run `work` in one transaction, and again after a retryable error. `overloaded`: see `RetryPolicy.call`.

        `work` must be idempotent: if the connection breaks during the commit, the commit may have succeeded.
        """

        def attempt() -> T:
            with self.transaction(doing=doing) as session:
                return work(session)

        return self.retry.call(attempt, overloaded=overloaded)

    def read(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "reading from HANA") -> Rows:
        """Run a reading statement, with retries. Raises Cancelled if this thread's call is cancelled."""
        call = cancellation.current()

        def attempt() -> Rows:
            with self.session() as session, call.calling(session.cancel):
                try:
                    return session.query(sql, parameters, doing=doing)
                except DatabaseError:
                    call.check()
                    raise

        return self.retry.call(attempt, cancellation=call)

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "changing HANA") -> int:
        """Run one autocommitted statement, such as DDL, without retries; return the affected rows."""
        with self.session() as session:
            return session.execute(sql, parameters, doing=doing)

    def _take(self) -> Session:
        """Return an idle session that works, else a new one."""
        timeout, call = self.options.communication_timeout, cancellation.current()
        with call.calling(self._wake), self._changed:
            free = self._changed.wait_for(
                lambda: call.cancelled or self._closed or self._idle or self._open < self.size, timeout
            )
            call.check()
            if self._closed:
                raise ConnectionLost("the connection pool is closed")
            if not free:
                raise Overloaded(f"all {self.size} connections were in use for {timeout:g} s: raise `pool_size`")
            session = self._idle.pop() if self._idle else None
            self._open += session is None
        try:
            if session is not None and session.types != self._types_version:
                session.close()
                session = None
            if session is None:
                return self._connect()
            if time.monotonic() - session.last_used >= self._idle_check:
                try:
                    session.query("SELECT 1 FROM DUMMY", doing="checking an idle connection")
                except DatabaseError:
                    session.close()
                    return self._connect()
            return session
        except BaseException:
            self._forget()
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _give_back(self, session: Session) -> None:
        with self._changed:
            keep = not (session.broken or self._closed)
            if keep:
                self._idle.append(session)
                self._changed.notify()
        if not keep:
            session.close()
            self._forget()

    def _forget(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _connect(self) -> Session:
        """Connect one thread at a time, so that a wrong password is sent once. Threads that waited during a failed
        attempt get its error and do not retry."""
        asked, types = time.monotonic(), self._types_version
        with self._login:
            known = self._refused or (self._failed[1] if self._failed and self._failed[0] >= asked else None)
            if known:  # raise a copy: two threads must not raise one exception object
                raise type(known)(str(known), code=known.code)
            try:
                self.options.check_trust_store()
                driver = self._driver = self._driver or load_driver()
                try:
                    connection = driver.connect(**self.options.properties())
                except driver.Error as error:
                    raise _mapped(error, f"connecting to {self.options.place}") from None
                session = Session(driver, connection, self.on_statement, types)
                if schema := self.options.schema:
                    try:
                        session.execute(f"SET SCHEMA {quote(schema)}", doing="setting `schema` as current schema")
                    except BaseException:
                        session.close()
                        raise
                return session
            except ConnectorError as error:
                self._failed = (time.monotonic(), error)
                if isinstance(error, LoginRefused):
                    self._refused = error
                raise


# ------------------------------------------------------------------------------------------------ what HANA can do


@dataclass(frozen=True, slots=True)
class HanaFeatures:
    """Capabilities that the server reports. `version`: of HANA Cloud or HANA on premise; "" if the user may not read
    it."""

    real_vector: bool
    half_vector: bool
    version: str = ""

    @classmethod
    def probe(cls, pool: HanaPool) -> HanaFeatures:
        """Probe the server by its data types, not by its version."""
        doing = "reading HANA's capabilities"
        types = {row[0] for row in pool.read("SELECT TYPE_NAME FROM SYS.DATA_TYPES", doing=doing)}
        version = ""
        for column in ("CLOUD_VERSION", "VERSION"):
            with suppress(UnknownColumn, PermissionRefused):
                rows = pool.read(f"SELECT {column} FROM SYS.M_DATABASE", doing=doing)  # noqa: S608 - one of these two
                version = version or str((rows[0][0] if rows else "") or "")
        return cls("REAL_VECTOR" in types, "HALF_VECTOR" in types, version)


def utc_now(pool: HanaPool) -> datetime:
    """Return the database's time, for leases and time stamps; precise to a second or better."""
    ((moment,),) = pool.read("SELECT CURRENT_UTCTIMESTAMP FROM DUMMY", doing="asking HANA for the time")
    found: datetime = moment
    return found.replace(tzinfo=UTC)
