"""Coverage-guided fuzzing of PREPARE and EXECUTE: `python -m tests.fuzz.sql_target CORPUS...`

An input is the text of one statement. Only HanaErrors that tell what is wrong with it may come out.
"""

from __future__ import annotations

import atexit
import sys

import atheris

with atheris.instrument_imports(include=["hana_emulator"]):
    from emulator_sql import USER, Sql, open_database
    from tests.fuzz.statements import TABLES
    from tests.fuzz.verdict import run_statement

_FRESH_AFTER = 300
"""Statements on one database: some drop what others need."""


class Target:
    """Statements on a database of their own, made anew from time to time."""

    def __init__(self) -> None:
        self.count = 0
        self._open()
        atexit.register(lambda: self.database.close())

    def _open(self) -> None:
        self.database = open_database(lock_timeout=0.05)
        self.sql = Sql(self.database.connect(USER))
        for text in TABLES:
            run_statement(self.sql, text)

    def run(self, data: bytes) -> None:
        if self.count >= _FRESH_AFTER:
            self.database.close()
            self._open()
            self.count = 0
        self.count += 1
        run_statement(self.sql, data.decode("utf-8", "surrogateescape"), autocommit=bool(self.count % 2))


if __name__ == "__main__":
    atheris.Setup(sys.argv, Target().run)
    atheris.Fuzz()
