"""Statements at random against the emulator's SQL side: each is answered or ends in a HanaError that says something,
and whatever they were, the database stays whole and its catalogue true."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator_sql import USER, Sql, open_database
from hana_emulator.errors import HanaError
from hana_emulator.sql.catalog import catalog as catalogue
from hana_emulator.sql.functions.registration import Context
from tests.fuzz import statements
from tests.fuzz.verdict import run_statement

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # hostile constants are long
QUICKLY = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


_CLEARED = ("DELETE FROM T", "DELETE FROM U")
_FRESH_AFTER = 100
"""Examples on one database: some drop what others need, and some double tables."""


class Shared:
    """A database that many examples work on, and one session of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._examples = 0
        self._open()

    def _open(self) -> None:
        folder = self._folder / str(self._examples)
        self.database = open_database(folder, lock_timeout=0.05)
        self.sql = Sql(self.database.connect(USER))

    def close(self) -> None:
        """What is left must be a database that can be opened again."""
        self.database.close()
        open_database(self.database.folder).close()

    def begin(self) -> None:
        """The tables that statements speak of, made again where a statement has dropped them."""
        self._examples += 1
        if self._examples % _FRESH_AFTER == 0:
            self.close()
            self._open()
        self.sql.session.rollback()
        for text in ("SET SCHEMA S", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", *_CLEARED, *statements.TABLES):
            self.refusal(text)

    def refusal(self, text: str, *, autocommit: bool = True) -> HanaError | None:
        return run_statement(self.sql, text, autocommit=autocommit)

    def check(self) -> None:
        """SQLite finds its file whole, and the catalogue says of every table what SQLite has."""
        self.sql.session.rollback()
        connection = sqlite3.connect(self.database.folder / "hana.sqlite")
        try:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for relation in self.database.catalog.relations.values():
                if not relation.is_view:
                    assert relation.sqlite_name in {quoted(name) for name in tables}, relation.name
                    assert self.sql.session.prepare(f"SELECT * FROM {quoted(relation.schema)}.{quoted(relation.name)}")
        finally:
            connection.close()
        other = self.database.open_connection(Context())
        try:
            assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            loaded = catalogue.load(other, self.database.catalog.version, {})
            assert loaded.relations.keys() == self.database.catalog.relations.keys()
        finally:
            other.close()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("fuzzed"))
    yield shared
    shared.close()


def try_out(shared: Shared, texts: list[str], autocommit: bool) -> None:
    shared.begin()
    for text in texts:
        shared.refusal(text, autocommit=autocommit)
    shared.check()


few = st.lists(statements.statements, min_size=1, max_size=4)
few_damaged = st.lists(statements.damaged_statements, min_size=1, max_size=4)


@settings(QUICKLY, max_examples=40)
@given(texts=few, autocommit=st.booleans())
def test_statements_of_the_grammar(shared: Shared, texts: list[str], autocommit: bool) -> None:
    try_out(shared, texts, autocommit)


@settings(QUICKLY, max_examples=40)
@given(texts=few_damaged, autocommit=st.booleans())
def test_damaged_statements(shared: Shared, texts: list[str], autocommit: bool) -> None:
    try_out(shared, texts, autocommit)


@pytest.mark.slow
@settings(QUICKLY, max_examples=2_500)
@given(texts=st.one_of(few, few_damaged), autocommit=st.booleans())
def test_statements_for_minutes(shared: Shared, texts: list[str], autocommit: bool) -> None:
    try_out(shared, texts, autocommit)
