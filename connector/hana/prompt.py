"""Run a user's statements for `owl-sap emulator sql`: split at `;`, on one connection, with column names and HANA's own
error texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from connector.errors import ConnectFailed, ConnectionLost, ConnectorError, Unavailable, classify
from connector.hana.connection import ConnectionOptions, load_driver

T = TypeVar("T")
_PIECES = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|[^'"\-/;]+|.""", re.DOTALL)
_OPENED = ("'", '"')
_LEFT_OUT = ("--", "/*")
_TRIGGER = re.compile(r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?TRIGGER\b", re.IGNORECASE)
_BLOCKS = re.compile(r"\b(?:END\s+IF|END|BEGIN|CASE|IF)\b")  # open and close blocks in a trigger body


def split(text: str) -> tuple[list[str], str]:
    """Return the statements of `text` that end with `;`, and the rest. Quotes, comments and trigger bodies may contain
    `;`."""
    found, start, code = [], 0, ""
    for piece in _PIECES.finditer(text):
        if piece.group() in _OPENED or (text.startswith("/*", piece.start()) and len(piece.group()) == 1):
            break
        if piece.group() == ";" and not _is_in_body(code):
            found.append(text[start : piece.start()].strip())
            start, code = piece.end(), ""
        else:
            code += " " if piece.group()[:2] in _LEFT_OUT or piece.group()[0] in _OPENED else piece.group()
    return [statement for statement in found if not is_blank(statement)], text[start:]


def _is_in_body(code: str) -> bool:
    """Return whether a `;` after `code` (without quotes and comments) is inside a trigger body."""
    if not _TRIGGER.match(code):
        return False
    words: list[str] = _BLOCKS.findall(code.upper())
    return 2 * sum(word.startswith("END") for word in words) < len(words)


def is_blank(text: str) -> bool:
    """Return whether the text has only white space and comments."""
    return all(piece[:2] in _LEFT_OUT or piece.isspace() for piece in _PIECES.findall(text))


class StatementRefused(Exception):
    """HANA rejected a user's statement. `kind`: the connector's error class. The text may quote the statement: show it
    only to the user and do not log it."""

    def __init__(self, code: int, text: str, kind: type[ConnectorError]) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a statement. `columns`: empty without a result set. `more`: rows were omitted."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    affected: int
    more: bool = False


class _Cursor(Protocol):
    description: Sequence[Sequence[Any]] | None
    rowcount: int

    def execute(self, sql: str, parameters: Any = ..., /) -> Any: ...
    def fetchmany(self, size: int, /) -> Sequence[Any]: ...


class Prompt:
    """One autocommit connection, opened at once. After a loss, the next statement reconnects."""

    def __init__(self, options: ConnectionOptions) -> None:
        """Connect. Raises LoginRefused, ConnectFailed and the other connection errors."""
        self._options = options
        self._driver = load_driver()
        self._connection: Any = None
        self._connect()

    def _connect(self) -> None:
        self._options.check_trust_store()
        failure: ConnectorError | None = None
        try:
            self._connection = self._driver.connect(**self._options.properties() | {"vectoroutputtype": "list"})
        except self._driver.Error as error:
            code, text = _code_and_text(error)
            failure = classify(code, text, doing=f"connecting to {self._options.place}")
        if failure is not None:
            raise failure

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._driver.Error):
                connection.close()

    def run(self, sql: str, most_rows: int) -> Answer:
        """Return at most `most_rows` rows. Raises StatementRefused and connection errors."""
        if self._connection is None:
            self._connect()
        cursor = cast(_Cursor, self._call(self._connection.cursor))
        self._call(lambda: cursor.execute(sql))
        if not cursor.description:
            return Answer((), [], max(cursor.rowcount, 0))
        rows = self._call(lambda: [tuple(row) for row in cursor.fetchmany(most_rows + 1)])
        columns = tuple(str(column[0]) for column in cursor.description)
        return Answer(columns, rows[:most_rows], len(rows[:most_rows]), len(rows) > most_rows)

    def _call(self, work: Callable[[], T]) -> T:
        refused: StatementRefused
        try:
            return work()
        except self._driver.Error as error:
            code, text = _code_and_text(error)
            refused = StatementRefused(code, text, type(classify(code, text, doing="")))
        if issubclass(refused.kind, ConnectionLost | ConnectFailed | Unavailable):
            self.close()
        raise refused


def _code_and_text(error: Exception) -> tuple[int, str]:
    return int(getattr(error, "errorcode", 0) or 0), str(getattr(error, "errortext", "") or error)
