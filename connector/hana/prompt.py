"""Run a user's statements for `owl-sap emulator sql`: split at `;`, on one connection, with column names and HANA's own
error texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from connector.errors import classify
from connector.hana.connection import ConnectionOptions, load_driver

_PIECES = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|[^'"\-/;]+|.""", re.DOTALL)
_OPENED = ("'", '"')
_LEFT_OUT = ("--", "/*")
_TRIGGER = re.compile(r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?TRIGGER\b", re.IGNORECASE)
_BLOCKS = re.compile(r"\b(?:END\s+IF|END|BEGIN|CASE|IF)\b")  # open and close blocks in a trigger body


def split(text: str) -> list[str]:
    """Return the statements of `text`, the last with or without `;`. Quotes, comments and trigger bodies may contain
    `;`."""
    found, start, code = [], 0, ""  # code: of the statement so far, without quotes and comments
    for piece in _PIECES.finditer(text):
        if piece.group() in _OPENED or (text.startswith("/*", piece.start()) and len(piece.group()) == 1):
            break
        blocks: list[str] = _BLOCKS.findall(code.upper()) if piece.group() == ";" and _TRIGGER.match(code) else []
        if piece.group() == ";" and 2 * sum(word.startswith("END") for word in blocks) >= len(blocks):
            found.append(text[start : piece.start()].strip())
            start, code = piece.end(), ""
        else:
            code += " " if piece.group()[:2] in _LEFT_OUT or piece.group()[0] in _OPENED else piece.group()
    found.append(text[start:].strip())
    return [
        each for each in found if not all(part[:2] in _LEFT_OUT or part.isspace() for part in _PIECES.findall(each))
    ]


def run(
    options: ConnectionOptions, statements: Iterable[str], most_rows: int
) -> Iterator[tuple[list[str], list[tuple[Any, ...]], int, bool]]:
    """Run the statements on one autocommit connection and yield for each: columns (empty without a result set), at most
    `most_rows` rows, affected rows, and whether rows were omitted.

    Raises the errors of `classify`. The text of an error in a statement is HANA's own and may quote the statement: show
    it only to the user and do not log it.
    """
    driver = load_driver()
    options.check_trust_store()
    connection: Any = None
    try:
        connection = driver.connect(**options.properties() | {"vectoroutputtype": "list"})
        for statement in statements:
            cursor = connection.cursor()
            cursor.execute(statement)
            if not cursor.description:
                yield [], [], max(cursor.rowcount, 0), False
                continue
            rows = [tuple(row) for row in cursor.fetchmany(most_rows + 1)]
            more, rows = len(rows) > most_rows, rows[:most_rows]
            yield [str(column[0]) for column in cursor.description], rows, len(rows), more
    except driver.Error as error:
        code, text = int(getattr(error, "errorcode", 0) or 0), str(getattr(error, "errortext", "") or error)
        failure = classify(code, text, doing=f"connecting to {options.place}")
        if connection is not None:
            failure = type(failure)(f"{code}: {text}" if code else text, code=code)
        raise failure from None
    finally:
        if connection is not None:
            with suppress(driver.Error):
                connection.close()
