"""A short way for tests to talk to the emulator's SQL side without a socket."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.nlp import Nlp
from hana_emulator.seam import Statement
from hana_emulator.sql.database import Database
from hana_emulator.sql.session import Session

USER, PASSWORD, SCHEMA = "OWL", "secret", "S"


_IN_MEMORY = Path("/dev/shm")
"""Half of the time to open a database goes into making its files and deleting them, if they are on a disk."""
_ROOM = 1 << 30


def open_database(path: Path | None = None, *, lock_timeout: float = 10.0, nlp: Nlp | None = None) -> Database:
    before = tempfile.tempdir
    if path is None and os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free > _ROOM:
        tempfile.tempdir = str(_IN_MEMORY)
    try:
        return Database(path, USER, PASSWORD, SCHEMA, lock_timeout=lock_timeout, nlp=nlp)
    finally:
        tempfile.tempdir = before


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


STATEMENTS = [
    "SELECT A , COUNT ( * ) FROM T WHERE B LIKE 'x%' AND D > 1 GROUP BY A HAVING COUNT ( * ) > 0 ORDER BY A LIMIT 5",
    "INSERT INTO T ( A , B ) VALUES ( ? , 'x' )",
    "UPDATE T SET B = 'y' , D = D + 1 WHERE A IN ( 1 , 2 )",
    "MERGE INTO T USING ( SELECT 1 AS A FROM DUMMY ) S ON T . A = S . A WHEN MATCHED THEN UPDATE SET B = 'z'",
    "UPSERT T ( A , B ) VALUES ( 1 , 'q' ) WITH PRIMARY KEY",
    "WITH X AS ( SELECT * FROM T ) SELECT TOP 3 A , TO_REAL_VECTOR ( '[1,2]' ) AS S FROM X ORDER BY A DESC",
    "CREATE TABLE U ( A INTEGER DEFAULT 1 NOT NULL , PRIMARY KEY ( A ) )",
    "SELECT CASE A WHEN 1 THEN B END , SUM ( D ) OVER ( PARTITION BY B ORDER BY A ) FROM T",
    "SELECT A FROM T UNION SELECT 1 FROM DUMMY EXCEPT SELECT 'x' FROM DUMMY ORDER BY 1",
    "CREATE OR REPLACE VIEW W AS SELECT A FROM T",
    "COMMENT ON COLUMN T . A IS 'x'",
]
