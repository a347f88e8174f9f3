"""Whatever the text, the SQL side answers or raises a HanaError with a meaningful code; messages leak nothing."""

from __future__ import annotations

import logging
import random

import pytest

from hana_emulator.errors import HanaError
from tests.emulator.sql_session import Sql

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
WORDS = [
    *("SELECT", "FROM", "T", "WHERE", "A", "B", "C", "*", ",", "(", ")", "=", "<>", "<", "+", "-", "/", "||", "?", "1"),
    *("'x'", "NULL", "AND", "OR", "NOT", "IN", "LIKE", "BETWEEN", "IS", "CASE", "WHEN", "THEN", "END", "AS", "ORDER"),
    *("GROUP", "BY", "LIMIT", "TOP", "DISTINCT", "UNION", "EXCEPT", "JOIN", "ON", "COUNT", "SUM", "CAST", "INSERT"),
    *(
        "INTO",
        "VALUES",
        "UPDATE",
        "SET",
        "DELETE",
        "UPSERT",
        "WITH",
        "PRIMARY",
        "KEY",
        "CREATE",
        "TABLE",
        "VIEW",
        "DROP",
    ),
    *(
        "COMMENT",
        '"q"',
        ".",
        ";",
        "OVER",
        "EXISTS",
        "DUMMY",
        "DATE",
        "TRIM",
        "ESCAPE",
        "FOR",
        "HINT",
        "INTERVAL",
        "2.5",
    ),
    *("[", "]", ":", "@", "::", "%"),
]


def garbled(chance: random.Random) -> str:
    """A known statement with one to four words replaced, added, dropped or moved."""
    words = chance.choice(STATEMENTS).split()
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(words))
        kind = chance.random()
        if kind < 0.4:
            words[place] = chance.choice(WORDS)
        elif kind < 0.7:
            words.insert(place, chance.choice(WORDS))
        elif len(words) > 2:
            words.append(words.pop(place))
    return " ".join(words)


@pytest.mark.parametrize("seed", range(4))
def test_garbled_statements_end_in_a_hana_error_or_run(sql: Sql, seed: int) -> None:
    sql.run("CREATE TABLE T (A INTEGER PRIMARY KEY, B NVARCHAR(10), C NCLOB, D DECIMAL(5,2))")
    chance = random.Random(seed)
    codes = set()
    for _ in range(250):
        try:
            statement = sql.prepare(garbled(chance))
            row = (None,) * len(statement.parameters)
            list(sql.session.execute(statement, [row], autocommit=True).rows or ())
        except HanaError as error:
            codes.add(error.code)
    assert 257 in codes
    assert 2 not in codes, "a general error means that SQLite refused what we let through"
    assert sql.evaluate("1") == 1


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 3000 + "1" + ")" * 3000 + " FROM DUMMY",
        "SELECT " + "NOT " * 3000 + "1=1 FROM DUMMY",
        "(" * 5000,
        "'",
    ],
)
def test_deep_nesting_is_refused(sql: Sql, text: str) -> None:
    assert sql.code(text) == 257


def test_neither_log_nor_message_repeats_the_statement(sql: Sql, caplog: pytest.LogCaptureFixture) -> None:
    sql.run("CREATE TABLE T (A INTEGER, N NVARCHAR(3))")
    caplog.set_level(logging.DEBUG)
    for text in (
        "SELECT A FROM T WHERE N = 'hush-hush' AND",
        "SELECT A FROM T WHERE N = 'x' 'hush-hush'",
        "COMMENT 'hush-hush' COLUMN",
        "INSERT INTO T (N) VALUES ('hush-hush')",
        "INSERT INTO T (A) VALUES ('hush-hush')",
        "SELECT CAST('hush-hush' AS DATE) FROM DUMMY",
        "SELECT * FROM T WHERE A = 'hush-hush'",
        "INSERT INTO T VALUES (1, 2, 'hush-hush')",
    ):
        sql.run("INSERT INTO T VALUES (1, 'x')")
        with pytest.raises(HanaError) as caught:
            sql.rows(text)
        assert "hush" not in caught.value.text
    assert "hush" not in caplog.text
    assert "hush" not in str(caplog.records)


def test_half_a_surrogate_pair_is_refused_clearly(sql: Sql) -> None:
    sql.run("CREATE TABLE T (N NVARCHAR(3))")
    assert sql.code("INSERT INTO T VALUES (?)", "\ud83d") == 2
    assert sql.rows("SELECT * FROM T") == []


def test_text_with_nul_and_control_characters_is_kept(sql: Sql) -> None:
    sql.run("CREATE TABLE T (N NVARCHAR(9), C NCLOB)")
    sql.run("INSERT INTO T VALUES (?, ?)", "a\0b\n\x7f", "\0")
    assert sql.rows("SELECT * FROM T") == [("a\0b\n\x7f", "\0")]
