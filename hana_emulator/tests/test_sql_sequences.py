"""Sequences: their options, NEXTVAL and CURRVAL in statements, and that no rollback gives a number back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from emulator_sql import USER, Sql, open_database

GREATEST = 4611686018427387903


def next_numbers(sql: Sql, count: int, name: str = "Q") -> list[int]:
    return [sql.evaluate(f"{name}.NEXTVAL") for _ in range(count)]


OPTIONS = [
    ("", [1, 2, 3]),
    ("START WITH 10", [10, 11, 12]),
    ("INCREMENT BY 5", [1, 6, 11]),
    ("INCREMENT BY -1", [-1, -2, -3]),
    ("INCREMENT BY -2 MAXVALUE 10 MINVALUE 0", [10, 8, 6]),
    ("START WITH 2 MINVALUE 1 MAXVALUE 3 CYCLE", [2, 3, 1, 2]),
    ("INCREMENT BY -1 START WITH 2 MINVALUE 1 MAXVALUE 3 CYCLE", [2, 1, 3, 2]),
    ("START WITH 7 CACHE 20 NO CYCLE NO MAXVALUE NO MINVALUE", [7, 8]),
    ("NO CACHE START WITH -5 MINVALUE -10", [-5, -4]),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS)
def test_options(sql: Sql, options: str, expected: list[int]) -> None:
    sql.run(f"CREATE SEQUENCE Q {options}")
    assert next_numbers(sql, len(expected)) == expected
    assert sql.result_types("SELECT Q.NEXTVAL FROM DUMMY") == ["BIGINT"]


def test_in_statements(sql: Sql) -> None:
    sql.run('CREATE SEQUENCE "my seq"')
    sql.run("CREATE TABLE T (A BIGINT, B NVARCHAR(9))")
    sql.many('INSERT INTO T VALUES ("my seq".NEXTVAL, ?)', [("a",), ("b",)])
    sql.run('INSERT INTO T SELECT S."my seq".NEXTVAL, B FROM T')
    sql.run("INSERT INTO T (A, B) VALUES (\"my seq\".CURRVAL, 'now')")
    sql.run("UPDATE T SET A = \"my seq\".NEXTVAL + 100 WHERE B = 'now'")
    sql.run("UPSERT T VALUES (\"my seq\".NEXTVAL, 'up')")
    assert sql.rows("SELECT A, B FROM T ORDER BY A, B") == [
        (1, "a"), (2, "b"), (3, "a"), (4, "b"), (6, "up"), (105, "now"),
    ]  # fmt: skip
    sql.run("CREATE TABLE SEQ (NEXTVAL INTEGER)")
    sql.run("INSERT INTO SEQ VALUES (42)")
    assert sql.rows("SELECT SEQ.NEXTVAL FROM SEQ") == [(42,)], "a column of that name is a column"


def test_a_rollback_gives_no_number_back(sql: Sql, other: Sql) -> None:
    sql.run("CREATE SEQUENCE Q")
    sql.run("CREATE TABLE T (A BIGINT PRIMARY KEY)")
    sql.autocommit = False
    sql.run("INSERT INTO T VALUES (Q.NEXTVAL)")
    assert other.evaluate("Q.NEXTVAL") == 2, "nobody waits for another's transaction"
    sql.session.rollback()
    assert sql.evaluate("Q.NEXTVAL") == 3
    assert sql.rows("SELECT * FROM T") == []


def test_currval_belongs_to_the_session(sql: Sql, other: Sql) -> None:
    sql.run("CREATE SEQUENCE Q")
    assert sql.code("SELECT Q.CURRVAL FROM DUMMY") == 326
    assert next_numbers(sql, 2) == [1, 2]
    assert other.code("SELECT Q.CURRVAL FROM DUMMY") == 326
    assert other.evaluate("Q.NEXTVAL") == 3
    assert (sql.evaluate("Q.CURRVAL"), other.evaluate("Q.CURRVAL")) == (2, 3)


def test_numbers_are_given_once(sql: Sql) -> None:
    """Eight sessions at once, each with its own connection."""
    sql.run("CREATE SEQUENCE Q")
    found: list[int] = []
    sessions = [Sql(sql.session._database.connect(USER)) for _ in range(8)]
    threads = [threading.Thread(target=lambda s=s: found.extend(next_numbers(s, 50))) for s in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 401))


def test_exhausted(sql: Sql) -> None:
    sql.run("CREATE SEQUENCE Q MAXVALUE 2")
    assert next_numbers(sql, 2) == [1, 2]
    assert sql.code("SELECT Q.NEXTVAL FROM DUMMY") == 312
    assert sql.evaluate("Q.CURRVAL") == 2
    sql.run("ALTER SEQUENCE Q MAXVALUE 3")
    assert next_numbers(sql, 1) == [3]
    sql.run("ALTER SEQUENCE Q CYCLE")
    assert next_numbers(sql, 2) == [1, 2]
    sql.run("ALTER SEQUENCE Q RESTART WITH 2 INCREMENT BY -1 NO CYCLE")
    assert next_numbers(sql, 2) == [2, 1]
    assert sql.code("SELECT Q.NEXTVAL FROM DUMMY") == 312


REFUSED = [
    ("CREATE SEQUENCE Q", 324),
    ("CREATE SEQUENCE NOSUCH.R", 362),
    ("CREATE SEQUENCE R INCREMENT BY 0", 313),
    ("CREATE SEQUENCE R START WITH 5 MAXVALUE 4", 313),
    ("CREATE SEQUENCE R MINVALUE 5 MAXVALUE 4", 313),
    ("CREATE SEQUENCE R RESTART WITH 4", 257),
    ("CREATE SEQUENCE R START 4", 257),
    ("ALTER SEQUENCE Q START WITH 4", 257),
    ("ALTER SEQUENCE NOSUCH CYCLE", 313),
    ("DROP SEQUENCE NOSUCH", 313),
    ("SELECT NOSUCH.NEXTVAL FROM DUMMY", 313),
    ("CREATE TABLE T (A INTEGER DEFAULT Q.NEXTVAL)", 336),
    ("DROP SCHEMA HAS_ONE", 419),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused(sql: Sql, text: str, code: int) -> None:
    sql.run("CREATE SEQUENCE Q")
    sql.run("CREATE SCHEMA HAS_ONE")
    sql.run("CREATE SEQUENCE HAS_ONE.Q")
    assert sql.code(text) == code
    assert sql.column("SELECT SEQUENCE_NAME FROM SYS.SEQUENCES") == ["Q", "Q"]


def test_the_view_and_dropping(sql: Sql) -> None:
    sql.run("CREATE SEQUENCE Q INCREMENT BY 2 CYCLE CACHE 5")
    found = sql.rows(
        "SELECT MIN_VALUE, MAX_VALUE, INCREMENT_BY, IS_CYCLED, CACHE_SIZE, START_NUMBER FROM SYS.SEQUENCES"
    )
    assert found == [(1, GREATEST, 2, "TRUE", 5, 1)]
    next_numbers(sql, 3)
    sql.run("DROP SEQUENCE Q")
    assert sql.code("SELECT Q.NEXTVAL FROM DUMMY") == 313
    sql.run("CREATE SEQUENCE Q")
    assert sql.code("SELECT Q.CURRVAL FROM DUMMY") == 326
    assert next_numbers(sql, 1) == [1]


def test_a_restart_goes_on_or_resets(tmp_path: Path) -> None:
    first = open_database(tmp_path)
    sql = Sql(first.connect(USER))
    sql.run("CREATE SEQUENCE Q START WITH 5")
    assert next_numbers(sql, 2) == [5, 6]
    first.close()
    second = open_database(tmp_path)
    sql = Sql(second.connect(USER))
    assert next_numbers(sql, 1) == [7]
    second.close()
