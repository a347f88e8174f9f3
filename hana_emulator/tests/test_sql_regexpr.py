"""LIKE_REGEXPR and REPLACE_REGEXPR on the emulator, by what SAP's SQL reference says of them."""

from __future__ import annotations

import pytest

from emulator_sql import Sql
from hana_emulator.sql.functions.builtin import regular

DATE = r"'([[:digit:]]{4})([[:digit:]]{2})([[:digit:]]{2})'"
CASES = [
    (f"REPLACE_REGEXPR({DATE} IN '20140401' WITH '\\3.\\2.\\1')", "01.04.2014"),
    ("REPLACE_REGEXPR('a' IN 'banana' WITH 'o')", "bonono"),
    ("REPLACE_REGEXPR('a' IN 'banana' WITH 'o' OCCURRENCE ALL)", "bonono"),
    ("REPLACE_REGEXPR('a' IN 'banana' WITH 'o' OCCURRENCE 2)", "banona"),
    ("REPLACE_REGEXPR('a' IN 'banana' WITH 'o' FROM 3)", "banono"),
    ("REPLACE_REGEXPR('a' IN 'banana')", "bnn"),
    ("REPLACE_REGEXPR('A' FLAG 'i' IN 'banana' WITH '[\\0]' OCCURRENCE 1)", "b[a]nana"),
    ("CASE WHEN 'Banana' LIKE_REGEXPR '^b.*a$' FLAG 'i' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN 'Banana' LIKE_REGEXPR '^b' THEN 1 ELSE 0 END", 0),
    ("CASE WHEN 'Banana' NOT LIKE_REGEXPR '^b' THEN 1 ELSE 0 END", 1),
    ("CASE WHEN NULL LIKE_REGEXPR 'b' THEN 1 WHEN NOT (NULL LIKE_REGEXPR 'b') THEN 2 ELSE 3 END", 3),
]


@pytest.mark.parametrize(("expression", "expected"), CASES)
def test_value(shared: Sql, expression: str, expected: object) -> None:
    assert shared.evaluate(expression) == expected


def test_over_rows_and_with_parameters(sql: Sql) -> None:
    sql.run("CREATE TABLE T (ID INTEGER, N NVARCHAR(20), C NCLOB)")
    sql.many("INSERT INTO T VALUES (?, ?, ?)", [(1, "M-100", "M-100"), (2, "X", "X"), (3, None, None)])
    assert sql.column("SELECT ID FROM T WHERE N LIKE_REGEXPR ? ORDER BY ID", "^M-[0-9]+$") == [1]
    assert sql.column("SELECT ID FROM T WHERE C NOT LIKE_REGEXPR '[0-9]' ORDER BY ID") == [2]
    assert sql.result_types("SELECT REPLACE_REGEXPR('M' IN C WITH 'N') FROM T") == ["NCLOB"]


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("REPLACE_REGEXPR('(' IN 'a')", 306),
        ("REPLACE_REGEXPR('a' FLAG 'q' IN 'a')", 306),
        ("REPLACE_REGEXPR('a' IN 'a' FROM 0)", 306),
        ("REPLACE_REGEXPR('a' IN 'a' OCCURRENCE -1)", 306),
        ("REPLACE_REGEXPR('a', 'a')", 257),
        ("REPLACE_REGEXPR('a' IN 'a' GROUP 1)", 257),
    ],
)
def test_refuses(shared: Sql, expression: str, code: int) -> None:
    assert shared.code(f"SELECT {expression} FROM DUMMY") == code


def test_a_pattern_that_never_ends_is_stopped(shared: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular, "_SECONDS", 0.2)
    assert shared.code("SELECT REPLACE_REGEXPR('(a|aa)+$' IN ?) FROM DUMMY", "a" * 60 + "b") == 306
