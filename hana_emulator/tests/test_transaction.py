"""Parking and resuming a SQLite transaction whose tables have foreign keys, identities and odd columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hana_emulator.sql.storage import changes
from hana_emulator.sql.storage.changes import Shape
from hana_emulator.sql.storage.transaction import Transaction

Content = dict[str, list[tuple[object, ...]]]

TABLES = """
CREATE TABLE "~P"(K, N, PRIMARY KEY(K));
CREATE TABLE "~C"(K INTEGER PRIMARY KEY AUTOINCREMENT, P REFERENCES "~P"(K) ON DELETE CASCADE ON UPDATE CASCADE);
CREATE TABLE "~R"(K, P REFERENCES "~P"(K) ON DELETE RESTRICT ON UPDATE RESTRICT, UNIQUE(K));
CREATE TABLE "~S"(K, ABOVE REFERENCES "~S"(K) ON DELETE RESTRICT, PRIMARY KEY(K));
INSERT INTO "~P" VALUES (1, 'one'), (2, 'two'), (3, 'three');
INSERT INTO "~C"(P) VALUES (1), (1), (2);
INSERT INTO "~R" VALUES (1, 3);
INSERT INTO "~S" VALUES (1, NULL), (2, 1), (3, 2);
"""


REFERENCES = {"~C": [("~P", ["P"], ["K"])], "~R": [("~P", ["P"], ["K"])], "~S": [("~S", ["ABOVE"], ["K"])]}


def shape(connection: sqlite3.Connection, table: str) -> Shape:
    return changes.read_shape(connection, table, REFERENCES.get(table, ()))


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(tmp_path / "t.sqlite", isolation_level=None)
    opened.execute("PRAGMA foreign_keys = ON")
    opened.create_function(changes.TOUCH_FUNCTION, 2, lambda table, rowid: None)
    opened.executescript(TABLES)
    changes.install_triggers(opened)
    yield opened
    opened.close()


@pytest.fixture
def transaction(connection: sqlite3.Connection) -> Transaction:
    begun = Transaction(connection, partial(shape, connection), {})

    def touch(table: str, rowid: int) -> None:
        if begun.touched is not None:
            begun.touched.setdefault(table, set()).add(rowid)

    connection.create_function(changes.TOUCH_FUNCTION, 2, touch)
    return begun


def content(connection: sqlite3.Connection) -> Content:
    return {
        table: connection.execute(f'SELECT * FROM "{table}" ORDER BY 1').fetchall()
        for table in ("~P", "~C", "~R", "~S")
    }


def run(transaction: Transaction, *statements: str) -> None:
    for text in statements:
        if text.startswith("INSERT"):
            transaction.mark(text.split('"')[1])
        with transaction.statement():
            transaction.connection.execute(text)


CASES = [
    ['INSERT INTO "~P" VALUES (4, \'four\')', 'INSERT INTO "~C"(P) VALUES (4)', 'INSERT INTO "~R" VALUES (2, 4)'],
    ['DELETE FROM "~P" WHERE K = 1'],
    ['UPDATE "~P" SET K = 10 WHERE K = 1'],
    ['UPDATE "~P" SET N = \'new\'', 'DELETE FROM "~R"', 'DELETE FROM "~P" WHERE K = 3'],
    ['UPDATE "~P" SET N = \'new\'', 'UPDATE "~R" SET P = 2', 'UPDATE "~P" SET K = 30 WHERE K = 3'],
    ['DELETE FROM "~P" WHERE K = 1', 'INSERT INTO "~P" VALUES (1, \'again\')', 'INSERT INTO "~C"(P) VALUES (1)'],
    ['DELETE FROM "~S" WHERE K = 3', 'DELETE FROM "~S" WHERE K = 2', 'DELETE FROM "~S"'],
    ['INSERT INTO "~S" VALUES (4, 3)', 'INSERT INTO "~S" VALUES (5, 4)'],
    ['UPDATE "~R" SET K = 2', 'INSERT INTO "~R" VALUES (1, 2)', 'UPDATE "~R" SET K = K + 10'],
]  # fmt: skip


@pytest.mark.parametrize("statements", CASES)
def test_what_is_put_back_is_what_was_there(
    connection: sqlite3.Connection, transaction: Transaction, statements: list[str]
) -> None:
    before = content(connection)
    run(transaction, *statements)
    after = content(connection)
    assert after != before
    transaction.park()
    assert transaction.is_parked
    assert content(connection) == before
    transaction.resume()
    assert content(connection) == after
    transaction.park()
    transaction.resume()
    connection.execute("COMMIT")
    assert content(connection) == after
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("statements", CASES)
def test_rows_of_others_stay_where_they_are(
    connection: sqlite3.Connection, transaction: Transaction, statements: list[str]
) -> None:
    run(transaction, *statements)
    after = content(connection)
    transaction.park()
    connection.execute('INSERT INTO "~R" VALUES (100, NULL)')
    connection.execute("INSERT INTO \"~P\" VALUES (200, 'theirs')")
    transaction.resume()
    after["~R"].append((100, None))
    after["~P"].append((200, "theirs"))
    assert content(connection) == after


def test_a_foreign_key_holds_its_committed_parent(connection: sqlite3.Connection, transaction: Transaction) -> None:
    run(transaction, "INSERT INTO \"~P\" VALUES (4, 'four')", 'INSERT INTO "~C"(P) VALUES (4)', 'UPDATE "~R" SET P = 2')
    claims = transaction.park()
    assert claims["~P"].parents == {2}
    assert claims["~P"].rows == set()
    assert claims["~R"].rows == {1}
    assert claims["~P"].keys == {(0, (4,))}


def test_what_cannot_be_put_back_raises_and_leaves_nothing(
    connection: sqlite3.Connection, transaction: Transaction
) -> None:
    run(transaction, "INSERT INTO \"~P\" VALUES (4, 'four')")
    transaction.park()
    connection.execute("INSERT INTO \"~P\" VALUES (4, 'theirs')")
    with pytest.raises(sqlite3.IntegrityError):
        transaction.resume()
    assert not connection.in_transaction
    assert connection.execute('SELECT N FROM "~P" WHERE K = 4').fetchall() == [("theirs",)]


def test_triggers_follow_their_tables(connection: sqlite3.Connection) -> None:
    connection.execute('ALTER TABLE "~R" RENAME TO "~Q"')
    connection.execute('DROP TABLE "~C"')
    changes.install_triggers(connection)
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name").fetchall()
    assert [name for name, _ in found] == [
        f"owl_touched {event} {table}" for event in ("DELETE", "UPDATE") for table in ("~P", "~Q", "~S")
    ]
    assert all(name.split()[2] in sql.split("BEGIN")[1] for name, sql in found)
    version = connection.execute("PRAGMA schema_version").fetchall()
    changes.install_triggers(connection)
    assert connection.execute("PRAGMA schema_version").fetchall() == version
