"""Statements about the session itself: transactions, savepoints, current schema, session variables, cancelling."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.reader import Name, TokenReader

_CONNECTION_ID = re.compile(r"[0-9]{1,18}")

READ_COMMITTED = "READ COMMITTED"
ISOLATION_LEVELS = (READ_COMMITTED, "REPEATABLE READ", "SERIALIZABLE")
"""The last two are the same in HANA: all reads of a transaction see one snapshot."""


class Controlled(Protocol):
    """What a control statement may do to its session."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def set_schema(self, name: str) -> None: ...
    def set_variable(self, name: str, value: str | None) -> None: ...
    def savepoint(self, name: str) -> None: ...
    def rollback_to(self, name: str) -> None: ...
    def release(self, name: str) -> None: ...
    def lock(self, table: Name, *, nowait: bool) -> None: ...
    def set_isolation(self, level: str) -> None: ...
    def set_read_only(self, read_only: bool) -> None: ...
    def set_lock_timeout(self, seconds: float) -> None: ...
    def cancel_session(self, connection_id: int) -> None: ...
    def reset_connect_attempts(self, user: str) -> None: ...


Control = Callable[[Controlled], None]


def parse_control(reader: TokenReader) -> Control | None:
    """The action that the statement asks for; None when it is no control statement."""
    if control := _reset_attempts(reader):
        return control
    for words, parser in _PARSERS.items():
        if reader.take(*words):
            control = parser(reader)
            reader.end()
            return control
    return None


def _reset_attempts(reader: TokenReader) -> Control | None:
    """ALTER USER name RESET CONNECT ATTEMPTS: no definition, since logins are counted in memory."""
    if not reader.take("ALTER", "USER"):
        return None
    name = reader.identifier()
    if not reader.take("RESET", "CONNECT", "ATTEMPTS"):
        reader.index = 0
        return None
    reader.end()
    return lambda session: session.reset_connect_attempts(name)


def _commit(reader: TokenReader) -> Control:
    reader.take("WORK")
    return lambda session: session.commit()


def _rollback(reader: TokenReader) -> Control:
    reader.take("WORK")
    if reader.take("TO", "SAVEPOINT") or reader.take("TO"):
        name = reader.identifier()
        return lambda session: session.rollback_to(name)
    return lambda session: session.rollback()


def _savepoint(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.savepoint(name)


def _release(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.release(name)


def _set_schema(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.set_schema(name)


def _set_isolation(reader: TokenReader) -> Control:
    level = next((level for level in ISOLATION_LEVELS if reader.take(*level.split())), None)
    if level is None:
        raise reader.error(" or ".join(ISOLATION_LEVELS))
    return lambda session: session.set_isolation(level)


def _set_access_mode(reader: TokenReader) -> Control:
    read_only = reader.take("ONLY")
    if not read_only:
        reader.expect("WRITE")
    return lambda session: session.set_read_only(read_only)


def _set_variable(reader: TokenReader) -> Control:
    name = reader.string()
    reader.expect("=")
    value = reader.string()
    return lambda session: session.set_variable(name, value)


def _unset_variable(reader: TokenReader) -> Control:
    name = reader.string()
    return lambda session: session.set_variable(name, None)


def _lock_table(reader: TokenReader) -> Control:
    name = reader.name()
    reader.expect("IN", "EXCLUSIVE", "MODE")
    nowait = reader.take("NOWAIT")
    return lambda session: session.lock(name, nowait=nowait)


def _set_lock_timeout(reader: TokenReader) -> Control:
    milliseconds = reader.number()
    if milliseconds < 0:
        raise HanaError(306, "invalid argument: LOCK WAIT TIMEOUT takes milliseconds, 0 or more")
    return lambda session: session.set_lock_timeout(milliseconds / 1000)


def _cancel(reader: TokenReader) -> Control:
    text = reader.string()
    if not _CONNECTION_ID.fullmatch(text):
        raise HanaError(1093, "invalid connection id in ALTER SYSTEM CANCEL SESSION")
    return lambda session: session.cancel_session(int(text))


_PARSERS: dict[tuple[str, ...], Callable[[TokenReader], Control]] = {
    ("COMMIT",): _commit,
    ("ROLLBACK",): _rollback,
    ("SAVEPOINT",): _savepoint,
    ("RELEASE", "SAVEPOINT"): _release,
    ("SET", "SCHEMA"): _set_schema,
    ("SET", "TRANSACTION", "ISOLATION", "LEVEL"): _set_isolation,
    ("SET", "TRANSACTION", "LOCK", "WAIT", "TIMEOUT"): _set_lock_timeout,
    ("SET", "TRANSACTION", "READ"): _set_access_mode,
    ("SET",): _set_variable,
    ("UNSET",): _unset_variable,
    ("LOCK", "TABLE"): _lock_table,
    ("ALTER", "SYSTEM", "CANCEL", "SESSION"): _cancel,
}
