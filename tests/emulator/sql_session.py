"""A short way for tests to talk to the stand-in's SQL side without a socket."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.seam import Statement
from hana_emulator.sql.database import Database
from hana_emulator.sql.session import Session

USER, PASSWORD, SCHEMA = "OWL", "secret", "S"


def open_database(path: Path | None = None, *, lock_timeout: float = 10.0) -> Database:
    return Database(path, USER, PASSWORD, SCHEMA, lock_timeout=lock_timeout)


def vector(*values: float) -> bytes:
    """The fvecs form of a REAL_VECTOR."""
    return struct.pack(f"<I{len(values)}f", len(values), *values)


class Sql:
    """One session; autocommit unless told otherwise."""

    def __init__(self, session: Session, *, autocommit: bool = True) -> None:
        self.session = session
        self.autocommit = autocommit

    def prepare(self, sql: str) -> Statement:
        return self.session.prepare(sql)

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> list[int]:
        return self.session.execute(self.prepare(sql), rows, autocommit=self.autocommit).rows_affected

    def run(self, sql: str, *parameters: Any) -> int:
        """Affected rows of one execution."""
        return sum(self.many(sql, [parameters]))

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        found = self.session.execute(self.prepare(sql), [parameters], autocommit=self.autocommit).rows
        assert found is not None, "the statement gave no result set"
        return [tuple(row) for row in found]

    def column(self, sql: str, *parameters: Any) -> list[Any]:
        return [row[0] for row in self.rows(sql, *parameters)]

    def value(self, sql: str, *parameters: Any) -> Any:
        ((found,),) = self.rows(sql, *parameters)
        return found

    def evaluate(self, expression: str, *parameters: Any) -> Any:
        return self.value(f"SELECT {expression} FROM DUMMY", *parameters)

    def result_types(self, sql: str) -> list[str]:
        return [column.type.name for column in self.prepare(sql).columns]

    def code(self, sql: str, *parameters: Any) -> int:
        """The error code that the statement ends with, at PREPARE, EXECUTE or while rows are read."""
        try:
            found = self.session.execute(self.prepare(sql), [parameters], autocommit=self.autocommit).rows
            list(found or ())
        except HanaError as error:
            return error.code
        raise AssertionError("the statement raised nothing")


def transacting(database: Database) -> Sql:
    """A new session that commits when told to."""
    return Sql(database.connect(USER), autocommit=False)
