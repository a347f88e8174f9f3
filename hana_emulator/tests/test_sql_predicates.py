"""LIKE with its escapes, three-valued logic, and where NULL stands in order, groups, windows and joins."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator_sql import Sql

LIKES = [
    # text, pattern, escape, matches
    ("abc", "abc", None, True),
    ("abc", "ab", None, False),
    ("abc", "a%", None, True),
    ("abc", "%c", None, True),
    ("abc", "%b%", None, True),
    ("abc", "_b_", None, True),
    ("abc", "__", None, False),
    ("abc", "ABC", None, False),
    ("abc", "a[b]c", None, False),
    ("abc", "a*", None, False),
    ("abc", "a.c", None, False),
    ("", "", None, True),
    ("", "%", None, True),
    ("", "_", None, False),
    ("abc ", "abc", None, False),
    ("a\nb", "a%b", None, True),
    ("a\nb", "a_b", None, True),
    ("é", "_", None, True),
    ("Ä", "ä", None, False),
    ("100%", "100%", None, True),
    ("100%", "100#%", "#", True),
    ("1000", "100#%", "#", False),
    ("a_c", "a!_c", "!", True),
    ("abc", "a!_c", "!", False),
    ("a#c", "a##c", "#", True),
    ("a\\b", "a\\b", None, True),
    ("a%b", "a\\%b", "\\", True),
    ("axb", "a\\%b", "\\", False),
    ("it's", "it's", None, True),
    ("é%", "_é%", "é", True),
    ("x%", "xé%", "é", True),
    (None, "%", None, None),
    ("abc", None, None, None),
    ("abc", "abc", "NULL", None),
]


@pytest.mark.parametrize(("text", "pattern", "escape", "expected"), LIKES)
def test_like(shared: Sql, text: str | None, pattern: str | None, escape: str | None, expected: bool | None) -> None:
    tail = "" if escape is None else " ESCAPE NULL" if escape == "NULL" else f" ESCAPE '{escape}'"
    yes = shared.rows(f"SELECT 1 FROM DUMMY WHERE ? LIKE ?{tail}", text, pattern)
    no = shared.rows(f"SELECT 1 FROM DUMMY WHERE ? NOT LIKE ?{tail}", text, pattern)
    assert (bool(yes), bool(no)) == (expected is True, expected is False)


@pytest.mark.parametrize("escape", ["''", "'##'", "'ab'"])
def test_escape_takes_one_character(shared: Sql, escape: str) -> None:
    assert shared.code(f"SELECT 1 FROM DUMMY WHERE 'a' LIKE 'a' ESCAPE {escape}") == 306


def test_like_on_other_types_reads_their_text(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER, D DECIMAL(5,2), DT DATE, C NCLOB, B BOOLEAN)")
    sql.run("INSERT INTO T VALUES (120, 1.50, '2024-02-29', ?, TRUE)", "long " * 2000)
    for column, pattern in (("I", "12_"), ("D", "%.50"), ("DT", "2024-__-29"), ("C", "%long long%"), ("B", "TR%")):
        assert sql.column(f"SELECT 1 FROM T WHERE {column} LIKE '{pattern}'") == [1]
        assert sql.column(f"SELECT 1 FROM T WHERE {column} LIKE 'x{pattern}'") == []


LETTERS = st.sampled_from(["a", "B", "%", "_", "#", "\\", "é", "😀", " ", "."])


def as_regex(pattern: str) -> re.Pattern[str]:
    """LIKE with ESCAPE '#', spelled as a regular expression."""
    pieces = re.findall(r"#[#%_]|.", pattern, re.DOTALL)
    meanings = {"%": ".*", "_": "."}
    return re.compile("".join(meanings.get(piece) or re.escape(piece[-1]) for piece in pieces), re.DOTALL)


@settings(max_examples=80, deadline=None)
@given(st.text(LETTERS, max_size=6), st.lists(st.sampled_from(["a", "B", "%", "_", "#%", "#_", "##", "é", "."])))
def test_like_agrees_with_a_regular_expression(shared: Sql, text: str, pieces: list[str]) -> None:
    pattern = "".join(pieces)
    found = shared.evaluate("CASE WHEN ? LIKE ? ESCAPE '#' THEN 1 ELSE 0 END", text, pattern)
    assert bool(found) == bool(as_regex(pattern).fullmatch(text))


# --- three-valued logic -----------------------------------------------------------------------------------------------

T, F, U = "1 = 1", "1 = 0", "1 = NULL"
LOGIC = [
    (f"{T} AND {U}", None),
    (f"{F} AND {U}", False),
    (f"{T} OR {U}", True),
    (f"{F} OR {U}", None),
    (f"NOT {U}", None),
    (f"NOT ({F} AND {U})", True),
    (f"NOT ({T} OR {U})", False),
    ("NULL IN (1, 2)", None),
    ("1 IN (1, NULL)", True),
    ("3 IN (1, NULL)", None),
    ("3 NOT IN (1, NULL)", None),
    ("1 NOT IN (1, NULL)", False),
    ("NULL BETWEEN 1 AND 2", None),
    ("3 BETWEEN NULL AND 2", False),
    ("1 BETWEEN NULL AND 2", None),
    ("NULL IS NULL", True),
    ("NULL IS NOT NULL", False),
    ("'' IS NULL", False),
    ("'' = ''", True),
    ("NULL <> NULL", None),
    ("EXISTS (SELECT NULL FROM DUMMY)", True),
    ("1 IN (SELECT NULL FROM DUMMY)", None),
    ("1 NOT IN (SELECT 2 FROM DUMMY WHERE 1 = 0)", True),
    ("NULL NOT IN (SELECT 2 FROM DUMMY WHERE 1 = 0)", True),
    ("(1, NULL) IN ((1, 2))", None),
    ("(1, 2) IN ((1, 2), (3, NULL))", True),
]


@pytest.mark.parametrize(("condition", "expected"), LOGIC)
def test_logic_with_unknown(shared: Sql, condition: str, expected: bool | None) -> None:
    yes = shared.rows(f"SELECT 1 FROM DUMMY WHERE {condition}")
    no = shared.rows(f"SELECT 1 FROM DUMMY WHERE NOT ({condition})")
    assert (bool(yes), bool(no)) == (expected is True, expected is False)


def test_condition_is_not_a_value_nor_a_value_a_condition(shared: Sql) -> None:
    for text in (
        "WHERE 1",
        "WHERE 'x'",
        "WHERE NULL AND 1",
        "WHERE NOT 5",
        "HAVING 1",
        "WHERE CASE WHEN 1=1 THEN 1 END",
    ):
        assert shared.code(f"SELECT COUNT(*) FROM DUMMY {text}") == 257, text


# --- order ------------------------------------------------------------------------------------------------------------

ROWS = [
    (1, "b", "2.50", "2024-02-29", 1.5),
    (2, None, None, None, None),
    (3, "a", "10.00", "2023-12-31", -1.0),
    (4, "B", "-3.00", "9999-12-31", 1e10),
    (5, None, "2.50", "2024-02-29", 1.5),
    (6, "", "0.00", "0001-01-01", 0.0),
]
ORDERS = [
    ("N", [2, 5, 6, 4, 3, 1]),
    ("N DESC", [1, 3, 4, 6, 2, 5]),
    ("N NULLS LAST", [6, 4, 3, 1, 2, 5]),
    ("N DESC NULLS FIRST", [2, 5, 1, 3, 4, 6]),
    ("N ASC NULLS FIRST", [2, 5, 6, 4, 3, 1]),
    ("N DESC NULLS LAST", [1, 3, 4, 6, 2, 5]),
    ("D", [2, 4, 6, 1, 5, 3]),
    ("D DESC", [3, 1, 5, 6, 4, 2]),
    ("D NULLS LAST", [4, 6, 1, 5, 3, 2]),
    ("DT", [2, 6, 3, 1, 5, 4]),
    ("DT DESC NULLS FIRST", [2, 4, 1, 5, 3, 6]),
    ("F", [2, 3, 6, 1, 5, 4]),
    ("D DESC, DT", [3, 1, 5, 6, 4, 2]),
    ("DT, D DESC, N NULLS LAST", [2, 6, 3, 1, 5, 4]),
    ("D + F", [2, 6, 1, 5, 3, 4]),
    ("CASE WHEN N IS NULL THEN 1 ELSE 0 END, N DESC", [1, 3, 4, 6, 2, 5]),
    ("LENGTH(N) DESC", [1, 3, 4, 6, 2, 5]),
    ("-K", [6, 5, 4, 3, 2, 1]),
]


@pytest.fixture(scope="module")
def table(shared: Sql) -> Sql:
    shared.run("CREATE TABLE T (K INTEGER, N NVARCHAR(3), D DECIMAL(6,2), DT DATE, F DOUBLE)")
    shared.many("INSERT INTO T VALUES (?,?,?,?,?)", ROWS)
    return shared


@pytest.mark.parametrize(("order", "expected"), ORDERS)
def test_order(table: Sql, order: str, expected: list[int]) -> None:
    last = "" if order == "-K" else ", K"
    assert table.column(f"SELECT K FROM T ORDER BY {order}{last}") == expected
    assert table.column(f"SELECT K FROM T ORDER BY {order}{last} LIMIT 2 OFFSET 1") == expected[1:3]
    assert table.column(f"SELECT TOP 3 K FROM (SELECT * FROM T) ORDER BY {order}{last}") == expected[:3]


def test_limit_and_offset_at_their_ends(table: Sql) -> None:
    page = "SELECT K FROM T ORDER BY K LIMIT ? OFFSET ?"
    cases = {(0, 0): [], (0, 3): [], (1, 5): [6], (9, 5): [6], (9, 6): [], (6, 0): [1, 2, 3, 4, 5, 6]}
    assert {given: table.column(page, *given) for given in cases} == cases
    assert table.column("SELECT TOP 0 K FROM T") == []


def test_keyset_pages_cover_every_row_once(sql: Sql) -> None:
    """Composite key with NULLs kept out, as the connector pages."""
    sql.run("CREATE TABLE T (K INTEGER, N NVARCHAR(3))")
    sql.many("INSERT INTO T VALUES (?, ?)", [row[:2] for row in ROWS])
    sql.many("INSERT INTO T (K, N) VALUES (?, ?)", [(number, "abc"[number % 3]) for number in range(10, 60)])
    first = "SELECT N, K FROM T WHERE N IS NOT NULL ORDER BY N, K LIMIT 7"
    after = "SELECT N, K FROM T WHERE N IS NOT NULL AND (N > ? OR (N = ? AND K > ?)) ORDER BY N, K LIMIT 7"
    seen = page = sql.rows(first)
    while page:
        name, key = page[-1]
        page = sql.rows(after, name, name, key)
        seen = seen + page
    assert seen == sql.rows("SELECT N, K FROM T WHERE N IS NOT NULL ORDER BY N, K")
    assert len(seen) == 54


GROUPS = [
    ("SELECT N, COUNT(*) FROM T GROUP BY N ORDER BY N", [(None, 2), ("", 1), ("B", 1), ("a", 1), ("b", 1)]),
    ("SELECT D, COUNT(*) FROM T GROUP BY D HAVING COUNT(*) > 1", [("2.50", 2)]),
    ("SELECT COUNT(*), COUNT(N), COUNT(D), COUNT(DISTINCT N), COUNT(DISTINCT D) FROM T", [(6, 4, 5, 4, 4)]),
    ("SELECT MIN(N), MAX(N), MIN(D), MAX(D), MIN(DT), MAX(DT) FROM T",
     [("", "b", "-3.00", "10.00", "0001-01-01", "9999-12-31")]),
    ("SELECT SUM(F), AVG(D), SUM(D) FROM T WHERE K IN (1, 2, 5)", [(3.0, "2.5", "5.00")]),
    ("SELECT MIN(N), SUM(D), AVG(F), COUNT(*) FROM T WHERE K = 2", [(None, None, None, 1)]),
    ("SELECT SUM(K) FROM T WHERE 1 = 0 GROUP BY N", []),
    ("SELECT DISTINCT D FROM T ORDER BY D DESC", [("10.00",), ("2.50",), ("0.00",), ("-3.00",), (None,)]),
    ("SELECT N FROM T UNION SELECT NULL FROM DUMMY ORDER BY 1", [(None,), ("",), ("B",), ("a",), ("b",)]),
    ("SELECT N FROM T EXCEPT SELECT NULL FROM DUMMY ORDER BY 1", [("",), ("B",), ("a",), ("b",)]),
    ("SELECT N FROM T INTERSECT SELECT NULL FROM DUMMY", [(None,)]),
    ("SELECT A.K, B.K FROM T A JOIN T B ON A.N = B.N WHERE A.K IN (2, 5)", []),
    ("SELECT A.K, B.K FROM T A LEFT JOIN T B ON A.N = B.N AND B.K > 1 WHERE A.K IN (1, 2, 3) ORDER BY 1",
     [(1, None), (2, None), (3, 3)]),
    ("SELECT K, RANK() OVER (ORDER BY D DESC) FROM T ORDER BY K", [(1, 2), (2, 6), (3, 1), (4, 5), (5, 2), (6, 4)]),
    ("SELECT K, DENSE_RANK() OVER (ORDER BY N) FROM T ORDER BY K", [(1, 5), (2, 1), (3, 4), (4, 3), (5, 1), (6, 2)]),
    ("SELECT K, COUNT(N) OVER (PARTITION BY D) FROM T ORDER BY K", [(1, 1), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]),
    ("SELECT K, LEAD(N) OVER (ORDER BY K) FROM T WHERE K < 4 ORDER BY K", [(1, None), (2, "a"), (3, None)]),
    ("SELECT K, FIRST_VALUE(K) OVER (PARTITION BY D ORDER BY K DESC) FROM T WHERE D = 2.5 ORDER BY K",
     [(1, 5), (5, 5)]),
    ("SELECT STRING_AGG(N, '+' ORDER BY K DESC) FROM T", [("+B+a+b",)]),
    ("SELECT COALESCE(N, D, 'none') FROM T WHERE K IN (2, 5) ORDER BY K", [("none",), ("2.50",)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GROUPS)
def test_null_in_groups_sets_joins_and_windows(table: Sql, text: str, expected: list[tuple[object, ...]]) -> None:
    assert table.rows(text) == expected
