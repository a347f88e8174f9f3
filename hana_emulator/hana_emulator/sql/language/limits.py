"""Limits of one statement: text, sources, memory, length of a value. A statement that exceeds one fails with an error,
so that it cannot block others or end the process."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hana_emulator.errors import HanaError, out_of_memory

LONGEST_STATEMENT = 64 << 20
# Characters of a statement outside strings and comments: Python needs several seconds to read them
LONGEST_CODE = 1_000_000
# Tables, views and subqueries of a statement; those in a view or WITH entry count each time it is read
MOST_SOURCES = 1_000
MOST_PARAMETERS = 32_767
MOST_VARIABLES = 100  # Of a block; each can be as long as a statement
LONGEST_VALUE = 256 << 20  # Bytes; the maximum length of a packet
# Characters of a value that one function may build, such as REPLACE: a running function cannot be cancelled
LONGEST_BUILT = 32 << 20
# Bytes by which the process may grow while a statement runs (similar to HANA's statement_memory_limit)
STATEMENT_BYTES = 2 << 30

_CHECK_EVERY = 100_000  # SQLite virtual machine instructions between two memory checks: some milliseconds
_LITERAL = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def check_text(sql: str) -> None:
    """Raise HanaError 2048 for a statement that would take too long to parse."""
    if len(sql) <= LONGEST_CODE:
        return
    if len(sql) > LONGEST_STATEMENT:
        raise _too_large(f"{len(sql)} characters, {LONGEST_STATEMENT} at most")
    code = len(sql) - sum(match.end() - match.start() for match in _LITERAL.finditer(sql))
    if code > LONGEST_CODE:
        raise _too_large(f"{code} characters outside strings, {LONGEST_CODE} at most")


def check_parameters(count: int) -> None:
    """Raise HanaError 2048 for too many parameters: SQLite's time grows with the square of their number."""
    if count > MOST_PARAMETERS:
        raise _too_large(f"{count} parameters, {MOST_PARAMETERS} at most")


def check_sources(count: int) -> None:
    """Raise HanaError 2048 for too many sources: nested views can read exponentially many."""
    if count > MOST_SOURCES:
        raise _too_large(f"more than {MOST_SOURCES} tables, with those of its views and WITH entries")


def check_block(length: int) -> None:
    """Raise HanaError 2048 for a block's statement that is too long: a variable can hold others many times."""
    if length > LONGEST_CODE:
        raise _too_large(f"{length} characters after its variables are replaced, {LONGEST_CODE} at most")


def check_variables(count: int) -> None:
    if count > MOST_VARIABLES:
        raise _too_large(f"more than {MOST_VARIABLES} variables in a block")


def check_built(length: int) -> None:
    """Raise HanaError 4 for a value that would be too long; call before creating it."""
    if length > LONGEST_BUILT:
        raise out_of_memory(f"a function would make a value of {length} characters, {LONGEST_BUILT} at most")


def _too_large(detail: str) -> HanaError:
    return HanaError(2048, f"column store error: the statement is too large for this emulator: {detail}")


@dataclass(slots=True)
class MemoryWatch:
    """Stop a session's statement when the process grows by more than `limit` bytes. Inactive without /proc."""

    limit: int = STATEMENT_BYTES
    _start: int | None = None

    def begin_statement(self) -> None:
        """Clear the start size. The first check sets it, so short statements cost nothing."""
        self._start = None

    def watch(self, connection: sqlite3.Connection, report: Callable[[HanaError], None]) -> None:
        """Watch a connection. SQLite reports 'interrupted'; `report` receives the reason."""
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)

        def is_too_much() -> int:
            size = int(_STATM.read_bytes().split()[1]) * _PAGE
            if self._start is None:
                self._start = size
            if size - self._start <= self.limit:
                return 0
            report(out_of_memory(f"the statement takes more than {self.limit >> 20} MB"))
            return 1

        if _STATM.exists():
            connection.set_progress_handler(is_too_much, _CHECK_EVERY)
