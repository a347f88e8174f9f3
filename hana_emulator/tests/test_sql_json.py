"""JSON_VALUE, JSON_QUERY, JSON_TABLE and SERIES_GENERATE_... on the emulator, by what SAP's SQL reference says."""

from __future__ import annotations

import pytest

from emulator_sql import Sql

ITEM = """'{"n": 10, "d": "2024-02-29", "t": true, "s": "text", "o": {"a": [1, 2]}, "nul": null, "big": 3000000000}'"""

VALUES = [
    ("'$.n' RETURNING INTEGER", 10, "INTEGER"),
    ("'$.n' RETURNING DECIMAL(5,2)", "10.00", "DECIMAL"),
    ("'$.n' RETURNING NVARCHAR(5)", "10", "NVARCHAR"),
    ("'$.t' RETURNING BOOLEAN", 1, "BOOLEAN"),
    ("'$.d' RETURNING DATE", "2024-02-29", "DATE"),
    ("'$.big' RETURNING BIGINT", 3_000_000_000, "BIGINT"),
    ("'$.nul' RETURNING INTEGER", None, "INTEGER"),
    ("'$.big' RETURNING INTEGER", None, "INTEGER"),
    ("'$.s' RETURNING INTEGER", None, "INTEGER"),
    ("'$.s' RETURNING INTEGER DEFAULT -1 ON ERROR", -1, "INTEGER"),
    ("'$.s' RETURNING NVARCHAR(2) DEFAULT 'xx' ON ERROR", "xx", "NVARCHAR"),
    ("'$.o' DEFAULT 'object' ON ERROR", "object", "NVARCHAR"),
    ("'$.none' DEFAULT 'nothing' ON EMPTY", "nothing", "NVARCHAR"),
    ("'$.none' NULL ON EMPTY ERROR ON ERROR", None, "NVARCHAR"),
    ("'strict $.none' DEFAULT 'strict' ON ERROR", "strict", "NVARCHAR"),
    ("'strict $.none' DEFAULT 'empty' ON EMPTY", None, "NVARCHAR"),
    ("'$.none' RETURNING INTEGER DEFAULT 'x' ON EMPTY DEFAULT 7 ON ERROR", 7, "INTEGER"),
]


@pytest.mark.parametrize(("clauses", "expected", "kind"), VALUES)
def test_json_value(sql: Sql, clauses: str, expected: object, kind: str) -> None:
    text = f"SELECT JSON_VALUE({ITEM}, {clauses}) FROM DUMMY"
    assert sql.value(text) == expected
    assert sql.result_types(text) == [kind]


QUERIES = [
    ("'$.o'", '{"a":[1,2]}'),
    ("'$.o' WITH WRAPPER", '[{"a":[1,2]}]'),
    ("'$.o' WITH CONDITIONAL ARRAY WRAPPER", '{"a":[1,2]}'),
    ("'$.n' WITH CONDITIONAL WRAPPER", "[10]"),
    ("'$.o.a[*]' WITH UNCONDITIONAL ARRAY WRAPPER", "[1,2]"),
    ("'$.n' WITHOUT ARRAY WRAPPER", None),
    ("'$.n' EMPTY OBJECT ON ERROR", "{}"),
    ("'$.none' EMPTY ARRAY ON EMPTY", "[]"),
    ("'$.none' WITH WRAPPER", None),
]


@pytest.mark.parametrize(("clauses", "expected"), QUERIES)
def test_json_query(sql: Sql, clauses: str, expected: str | None) -> None:
    assert sql.evaluate(f"JSON_QUERY({ITEM}, {clauses})") == expected


@pytest.mark.parametrize(
    "call",
    [
        f"JSON_VALUE({ITEM}, '$.none' ERROR ON EMPTY)",
        f"JSON_VALUE({ITEM}, '$.o' ERROR ON ERROR)",
        f"JSON_VALUE({ITEM}, '$.s' RETURNING INTEGER ERROR ON ERROR)",
        "JSON_VALUE('no json', '$.a' ERROR ON ERROR)",
        f"JSON_QUERY({ITEM}, '$.n' ERROR ON ERROR)",
        f"JSON_QUERY({ITEM}, '$.none' ERROR ON EMPTY)",
    ],
)
def test_error_where_it_is_asked_for(sql: Sql, call: str) -> None:
    assert sql.code(f"SELECT {call} FROM DUMMY") == 8


@pytest.mark.parametrize(
    "call",
    [
        f"JSON_VALUE({ITEM})",
        f"JSON_VALUE({ITEM}, '$.n' DEFAULT 1)",
        f"JSON_VALUE({ITEM}, '$.n' NULL ON EMPTY NULL ON EMPTY)",
        f"JSON_VALUE({ITEM}, '$.n' DEFAULT CURRENT_DATE ON EMPTY)",
        f"JSON_QUERY({ITEM}, '$.n' WITH)",
        f"JSON_QUERY({ITEM}, '$.n' EMPTY ON EMPTY)",
    ],
)
def test_half_a_clause_is_a_syntax_error(sql: Sql, call: str) -> None:
    assert sql.code(f"SELECT {call} FROM DUMMY") == 257


# --- JSON_TABLE -------------------------------------------------------------------------------------------------------

ORDER = """'{"PO": 1, "lines": [
  {"no": 1, "part": {"text": "one", "price": 9.95}, "tags": ["a", "b"], "stock": [{"site": "X"}]},
  {"no": 2, "part": {"text": "two"}, "tags": []},
  {"no": "three"}]}'"""
LINES = """'$.lines[*]' COLUMNS (
  RN FOR ORDINALITY,
  NO INTEGER PATH '$.no',
  "Text" NVARCHAR(10) PATH '$.part.text' DEFAULT 'none' ON EMPTY,
  PRICE DECIMAL(10, 2) PATH '$.part.price',
  PART NVARCHAR(200) FORMAT JSON PATH '$.part')"""


def test_json_table(sql: Sql) -> None:
    text = f"SELECT * FROM JSON_TABLE({ORDER}, {LINES}) AS JT ORDER BY RN"
    assert sql.rows(text) == [
        (1, 1, "one", "9.95", '{"text":"one","price":9.95}'),
        (2, 2, "two", None, '{"text":"two"}'),
        (3, None, "none", None, None),
    ]
    assert sql.result_types(text) == ["BIGINT", "INTEGER", "NVARCHAR", "DECIMAL", "NVARCHAR"]
    assert [column.name for column in sql.prepare(text).columns] == ["RN", "NO", "Text", "PRICE", "PART"]


def test_json_table_of_a_column_before_it(sql: Sql) -> None:
    sql.run("CREATE TABLE T (ID INTEGER, DOC NCLOB)")
    sql.many("INSERT INTO T VALUES (?, ?)", [(1, '{"k":["x","y"]}'), (2, "broken"), (3, None), (4, '{"k":["z"]}')])
    columns = "COLUMNS (K NVARCHAR(5) PATH '$')"
    joined = f"SELECT T.ID, J.K FROM T, JSON_TABLE(T.DOC, '$.k[*]' {columns}) AS J ORDER BY T.ID, J.K"
    assert sql.rows(joined) == [(1, "x"), (1, "y"), (4, "z")]
    kept = f"SELECT T.ID, J.K FROM T LEFT JOIN JSON_TABLE(T.DOC, '$.k[*]' {columns}) AS J ON 1 = 1 ORDER BY 1, 2"
    assert sql.rows(kept) == [(1, "x"), (1, "y"), (2, None), (3, None), (4, "z")]
    counted = f"SELECT J.K, COUNT(*) FROM T, JSON_TABLE(T.DOC, '$.k[*]' {columns}) AS J GROUP BY J.K HAVING J.K > 'x'"
    assert sorted(sql.rows(counted)) == [("y", 1), ("z", 1)]
    assert sql.code(f"SELECT T.ID FROM T, JSON_TABLE(T.DOC, '$.k[*]' {columns} ERROR ON ERROR) AS J") == 8


def test_nested_paths_repeat_their_parent_and_stand_side_by_side(sql: Sql) -> None:
    found = sql.rows(f"""SELECT NO, TN, TAG, SITE FROM JSON_TABLE({ORDER}, '$.lines[*]' COLUMNS (
        NO NVARCHAR(5) PATH '$.no',
        NESTED PATH '$.tags[*]' COLUMNS (TN FOR ORDINALITY, TAG NVARCHAR(5) PATH '$'),
        NESTED PATH '$.stock[*]' COLUMNS (SITE NVARCHAR(5) PATH '$.site'))) AS JT""")
    assert found == [
        ("1", 1, "a", None),
        ("1", 2, "b", None),
        ("1", None, None, "X"),
        ("2", None, None, None),
        ("three", None, None, None),
    ]


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ("(A INTEGER PATH '$.a', A INTEGER PATH '$.b')", 322),
        ("(A REAL_VECTOR(3) PATH '$.a')", 266),
        ("(A NOTYPE PATH '$.a')", 264),
        ("(A INTEGER)", 257),
        ("()", 257),
        ("(A INTEGER PATH 'a')", 8),
    ],
)
def test_json_table_refuses(sql: Sql, columns: str, code: int) -> None:
    assert sql.code(f"SELECT * FROM JSON_TABLE('[]', '$' COLUMNS {columns}) AS J") == code


# --- SERIES_GENERATE_... ----------------------------------------------------------------------------------------------


def test_series_of_numbers(sql: Sql) -> None:
    assert sql.rows("SELECT * FROM SERIES_GENERATE_INTEGER(2, 0, 6)") == [
        (0, 2, 1, 0.0),
        (2, 4, 2, pytest.approx(1 / 3)),
        (4, 6, 3, pytest.approx(2 / 3)),
    ]
    text = "SELECT GENERATED_PERIOD_START AS S FROM SERIES_GENERATE_DECIMAL(0.1, 0, 0.3) ORDER BY S"
    assert sql.column(text) == ["0", "0.1", "0.2"]
    assert sql.value("SELECT COUNT(*) FROM SERIES_GENERATE_BIGINT(1, 5, 5)") == 0


def test_series_of_times(sql: Sql) -> None:
    days = "SELECT GENERATED_PERIOD_START FROM SERIES_GENERATE_DATE('INTERVAL 1 DAY', '2024-02-28', '2024-03-02')"
    assert sql.column(days) == ["2024-02-28", "2024-02-29", "2024-03-01"]
    months = "SELECT GENERATED_PERIOD_END FROM SERIES_GENERATE_DATE('INTERVAL 1 MONTH', '2024-01-31', '2024-04-01')"
    assert sql.column(months) == ["2024-02-29", "2024-03-31", "2024-04-30"]
    half = "SELECT COUNT(*) FROM SERIES_GENERATE_TIMESTAMP('INTERVAL 30 MINUTE', '2024-01-01', '2024-01-02')"
    assert sql.value(half) == 48


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("SERIES_GENERATE_INTEGER(0, 0, 5)", 306),
        ("SERIES_GENERATE_INTEGER(1, 0)", 316),
        ("SERIES_GENERATE_BIGINT(1, 0, 1000000000)", 306),
        ("SERIES_GENERATE_DATE('1 DAY', '2024-01-01', '2024-01-02')", 306),
        ("SERIES_GENERATE_DATE('INTERVAL 1 HOUR', '2024-01-01', '2024-01-02')", 306),
        ("SERIES_GENERATE_WHAT(1, 0, 5)", 328),
        ("NO_SUCH_FUNCTION(1)", 328),
    ],
)
def test_series_refuses(sql: Sql, call: str, code: int) -> None:
    assert sql.code(f"SELECT * FROM {call}") == code
