"""Translate SQLite's errors to HANA's codes. Messages name objects, never values."""

from __future__ import annotations

import sqlite3

from hana_emulator.errors import (
    HanaError,
    invalid_number,
    lock_wait_timeout,
    null_not_allowed,
    out_of_memory,
    unique_violated,
)
from hana_emulator.sql.catalog.schema_objects import SESSION_COLUMN
from hana_emulator.sql.language.names import decode, hana_identifier

ERROR_MARK = "owl-error:"  # Errors that triggers raise begin with this mark: 'owl-error:CODE:message'


def cancelled() -> HanaError:
    return HanaError(139, "current operation cancelled by request and transaction rolled back")


def serialization_failure() -> HanaError:
    return HanaError(138, "transaction serialization failure: rows have changed since the snapshot", rolls_back=True)


def rolled_back(error: HanaError) -> HanaError:
    if error.rolls_back:
        return error
    return HanaError(error.code, f"{error.text}; the transaction was rolled back", rolls_back=True)


def translate(error: Exception, reported: HanaError | None) -> HanaError:
    """Translate an error. `reported` is the HanaError behind SQLite's 'user-defined function raised exception'."""
    text = str(error)
    if reported is not None and ("user-defined" in text or (text == "interrupted" and reported.code == _NO_MEMORY)):
        return reported
    if isinstance(error, sqlite3.IntegrityError):
        return _integrity(text)
    if isinstance(error, UnicodeError):
        return HanaError(2, "general error: a string contains an unpaired surrogate, which this emulator cannot store")
    if isinstance(error, MemoryError):
        return out_of_memory("this emulator has run out")
    if isinstance(error, OverflowError):
        return HanaError(314, "numeric overflow: a number does not fit in 64 bits")
    for part, (code, message) in _OPERATIONAL.items():
        if part in text:
            return HanaError(code, message)
    if "locked" in text or "busy" in text:
        return lock_wait_timeout("the database file is in use elsewhere")
    return HanaError(2, f"general error: {text} (in this emulator's SQLite)")


_NO_MEMORY = 4
_TOO_LARGE = "column store error: the statement is too large for this emulator"
_OPERATIONAL = {
    "syntax error": (257, "sql syntax error: the statement is not understood by this emulator"),
    "incomplete input": (257, "sql syntax error: the statement ends too early"),
    "ESCAPE expression": (306, "invalid argument: ESCAPE takes one character"),
    "levels of trigger recursion": (465, "Cannot execute trigger: triggers fire each other without end"),
    "parser stack overflow": (257, "sql syntax error: the statement is nested too deeply for this emulator"),
    "non-deterministic functions prohibited": (7, "feature not supported: a changing function in a generated column"),
    "misuse of": (257, "sql syntax error: an aggregate or window function is not allowed here"),
    "interrupted": (139, "current operation cancelled by request and transaction rolled back"),
    "no such table": (259, "invalid table name: the table has been dropped"),
    "no such column": (260, "invalid column name: the column has been dropped"),
    "integer overflow": (314, "numeric overflow in SUM"),
    "too many SQL variables": (257, "sql syntax error: too many parameters in one statement"),
    "term out of range": (277, "invalid column number in ORDER BY or GROUP BY"),
    "too many columns": (2048, f"{_TOO_LARGE}: too many columns"),
    "tables in a join": (2048, f"{_TOO_LARGE}: it joins more than 64 tables"),
    "too many terms": (2048, f"{_TOO_LARGE}: too many parts of UNION"),
    "too many arguments": (2048, f"{_TOO_LARGE}: too many arguments of a function"),
    "pattern too complex": (306, "invalid argument: the pattern of LIKE is too long"),
    "too large": (2048, "column store error: the statement or a value is too large for this emulator"),
    "too big": (2048, "column store error: a value is too large for this emulator"),
    "disk is full": (2048, "column store error: the disk of this emulator is full"),
}


def _integrity(text: str) -> HanaError:
    """Translate a message such as 'UNIQUE constraint failed: ~S.T.A, ~S.T.B'."""
    if text.startswith(ERROR_MARK):
        code, _, message = text.removeprefix(ERROR_MARK).partition(":")
        return HanaError(int(code), message)
    if text == "datatype mismatch":
        return invalid_number("TOP, LIMIT and OFFSET take a whole number")
    kind, _, places = text.partition(" constraint failed: ")
    columns = [
        hana_identifier(decode(place.rsplit(".", 1)[-1]))
        for place in places.split(", ")
        if not place.endswith(f".{SESSION_COLUMN}")
    ]
    if kind == "NOT NULL":
        return null_not_allowed(columns[0])
    if kind == "UNIQUE":
        # '~SCHEMA.TABLE.COLUMN'; dots inside names are escaped as '^.'.
        parts = places.split(", ")[0].replace("^.", "\0").split(".")
        table = parts[-2].replace("\0", "^.") if len(parts) > 1 else places
        return unique_violated(f"Table({hana_identifier(decode(table))}), columns ({', '.join(columns)})")
    return HanaError(2, f"general error: {kind} constraint failed (in this emulator's SQLite)")
