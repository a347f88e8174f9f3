"""Statements about the session itself: transactions, savepoints, current schema, session variables, cancelling."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.reader import Parsers, TokenReader

if TYPE_CHECKING:
    from hana_emulator.sql.session import Session

_CONNECTION_ID = re.compile(r"[0-9]{1,18}")

READ_COMMITTED = "READ COMMITTED"
# The last two are the same in HANA: all reads in a transaction see one snapshot
ISOLATION_LEVELS = (READ_COMMITTED, "REPEATABLE READ", "SERIALIZABLE")


Control = Callable[["Session"], None]
_PARSERS: Parsers[Control] = Parsers()


def parse_control(reader: TokenReader) -> Control | None:
    """Parse a control statement; None if the statement is not one."""
    if reader.take("ALTER", "USER"):
        # Connection attempts are counted in memory, not in the catalogue, so this statement is not a definition.
        name = reader.identifier()
        if reader.take("RESET", "CONNECT", "ATTEMPTS"):
            reader.end()
            return lambda session: session.reset_connect_attempts(name)
        reader.index = 0
    return _PARSERS.parse(reader)


@_PARSERS("COMMIT")
def _commit(reader: TokenReader) -> Control:
    reader.take("WORK")
    return lambda session: session.commit()


@_PARSERS("ROLLBACK")
def _rollback(reader: TokenReader) -> Control:
    reader.take("WORK")
    if reader.take("TO", "SAVEPOINT") or reader.take("TO"):
        name = reader.identifier()
        return lambda session: session.rollback_to(name)
    return lambda session: session.rollback()


@_PARSERS("SAVEPOINT")
def _savepoint(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.savepoint(name)


@_PARSERS("RELEASE", "SAVEPOINT")
def _release(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.release(name)


@_PARSERS("SET", "SCHEMA")
def _set_schema(reader: TokenReader) -> Control:
    name = reader.identifier()
    return lambda session: session.set_schema(name)


@_PARSERS("SET", "TRANSACTION", "ISOLATION", "LEVEL")
def _set_isolation(reader: TokenReader) -> Control:
    level = next((level for level in ISOLATION_LEVELS if reader.take(*level.split())), None)
    if level is None:
        raise reader.error(" or ".join(ISOLATION_LEVELS))
    return lambda session: session.set_isolation(level)


@_PARSERS("SET", "TRANSACTION", "READ")
def _set_access_mode(reader: TokenReader) -> Control:
    read_only = reader.take("ONLY")
    if not read_only:
        reader.expect("WRITE")
    return lambda session: session.set_read_only(read_only)


@_PARSERS("SET")
def _set_variable(reader: TokenReader) -> Control:
    name = reader.string()
    reader.expect("=")
    value = reader.string()
    return lambda session: session.set_variable(name, value)


@_PARSERS("UNSET")
def _unset_variable(reader: TokenReader) -> Control:
    name = reader.string()
    return lambda session: session.set_variable(name, None)


@_PARSERS("LOCK", "TABLE")
def _lock_table(reader: TokenReader) -> Control:
    name = reader.name()
    reader.expect("IN", "EXCLUSIVE", "MODE")
    nowait = reader.take("NOWAIT")
    return lambda session: session.lock(name, nowait=nowait)


@_PARSERS("SET", "TRANSACTION", "LOCK", "WAIT", "TIMEOUT")
def _set_lock_timeout(reader: TokenReader) -> Control:
    milliseconds = reader.number()
    if milliseconds < 0:
        raise HanaError(306, "invalid argument: LOCK WAIT TIMEOUT takes milliseconds, 0 or more")
    return lambda session: session.set_lock_timeout(milliseconds / 1000)


@_PARSERS("ALTER", "SYSTEM", "CANCEL", "SESSION")
def _cancel(reader: TokenReader) -> Control:
    text = reader.string()
    if not _CONNECTION_ID.fullmatch(text):
        raise HanaError(1093, "invalid connection id in ALTER SYSTEM CANCEL SESSION")
    return lambda session: session.cancel_session(int(text))
