"""What may come of a statement that nobody meant: rows of the promised shape, or an error that says what is wrong."""

from __future__ import annotations

from emulator_sql import Sql
from hana_emulator.errors import HanaError

CODES_OF_FAULTS = (2, 2048)
"""A general error means that SQLite refused what was let through; 2048 that a value is not of its declared type."""
MEANT = ("surrogate", "too large", "vector", "session", "index")
LONGEST_MESSAGE = 1_000


def run_statement(sql: Sql, text: str, *, autocommit: bool = True) -> HanaError | None:
    """The error of running `text`, 1 for each parameter. Any other exception is a fault of the emulator."""
    try:
        prepared = sql.session.prepare(text)
        row = [(1,) * len(prepared.parameters)]
        for values in sql.session.execute(prepared, row, autocommit=autocommit).rows or ():
            assert len(values) == len(prepared.columns)
    except HanaError as error:
        found = error
    else:
        return None
    assert found.code not in CODES_OF_FAULTS or any(word in found.text for word in MEANT), (found, text)
    assert len(found.text) < LONGEST_MESSAGE, "the message repeats the statement"
    return found
