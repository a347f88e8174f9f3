"""Fixtures for the emulator's SQL side: a fresh database and one session on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulator_sql import USER, Sql, open_database
from hana_emulator.sql.database import Database


@pytest.fixture
def database() -> Iterator[Database]:
    opened = open_database(lock_timeout=0.3)
    yield opened
    opened.close()


@pytest.fixture
def patient() -> Iterator[Database]:
    """A database where waits are bounded by the tests, not by the lock timeout."""
    opened = open_database(lock_timeout=30.0)
    yield opened
    opened.close()


@pytest.fixture
def sql(database: Database) -> Sql:
    return Sql(database.connect(USER))


@pytest.fixture(scope="module")
def shared_database() -> Iterator[Database]:
    """One that the module's tests share: for what does not change it."""
    opened = open_database(lock_timeout=0.3)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def shared(shared_database: Database) -> Sql:
    """A session on the database that the module's tests share: for what changes neither."""
    return Sql(shared_database.connect(USER))


@pytest.fixture
def other(database: Database) -> Sql:
    """A second session on the same database."""
    return Sql(database.connect(USER))
