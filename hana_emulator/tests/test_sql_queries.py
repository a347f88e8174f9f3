"""SELECT over the emulator: names, joins, grouping, set operations, WITH, windows, subqueries, views, SYS views."""

from __future__ import annotations

import itertools
import re

import pytest

from emulator_sql import Sql
from hana_emulator.errors import HanaError


def stocked(sql: Sql) -> Sql:
    sql.run("CREATE TABLE P (ID INTEGER PRIMARY KEY, NAME NVARCHAR(20), KIND NVARCHAR(5), PRICE DECIMAL(8,2))")
    sql.run("CREATE TABLE O (ID INTEGER PRIMARY KEY, PID INTEGER, QTY INTEGER)")
    products = [(1, "pump", "A", "10"), (2, "seal", "A", "2.5"), (3, "belt", "B", "7"), (4, "none", "C", None)]
    sql.many("INSERT INTO P VALUES (?,?,?,?)", products)
    sql.many("INSERT INTO O VALUES (?,?,?)", [(10, 1, 2), (11, 1, 3), (12, 2, 1), (13, 9, 5)])
    return sql


@pytest.fixture
def shop(sql: Sql) -> Sql:
    return stocked(sql)


@pytest.fixture(scope="module")
def window(shared: Sql) -> Sql:
    """The shop for those that only look."""
    return stocked(shared)


QUERIES = [
    ("SELECT NAME FROM P WHERE KIND = 'A' ORDER BY NAME DESC", [("seal",), ("pump",)]),
    ("SELECT P.NAME, O.QTY FROM P JOIN O ON O.PID = P.ID ORDER BY 2", [("seal", 1), ("pump", 2), ("pump", 3)]),
    ("SELECT P.NAME, QTY FROM P INNER JOIN O ON PID = P.ID WHERE QTY > 2", [("pump", 3)]),
    ("SELECT P.ID, O.ID FROM P LEFT OUTER JOIN O ON O.PID = P.ID ORDER BY P.ID, O.ID",
     [(1, 10), (1, 11), (2, 12), (3, None), (4, None)]),
    ("SELECT O.ID, P.ID FROM P RIGHT JOIN O ON O.PID = P.ID WHERE P.ID IS NULL", [(13, None)]),
    ("SELECT COUNT(*) FROM P FULL OUTER JOIN O ON O.PID = P.ID", [(6,)]),
    ("SELECT COUNT(*) FROM P, O", [(16,)]),
    ("SELECT COUNT(*) FROM P CROSS JOIN O", [(16,)]),
    ("SELECT A.NAME, B.NAME FROM P A JOIN P AS B ON A.ID = B.ID + 1 WHERE A.ID = 2", [("seal", "pump")]),
    ("SELECT S.P.NAME FROM S.P WHERE S.P.ID = 3", [("belt",)]),
    ("SELECT P.*, O.QTY FROM P JOIN O ON O.PID = P.ID WHERE O.ID = 12", [(2, "seal", "A", "2.50", 1)]),
    ("SELECT KIND, COUNT(*), SUM(PRICE) FROM P GROUP BY KIND ORDER BY KIND",
     [("A", 2, "12.50"), ("B", 1, "7.00"), ("C", 1, None)]),
    ("SELECT KIND FROM P GROUP BY KIND HAVING COUNT(*) > 1", [("A",)]),
    ("SELECT UPPER(KIND) || 'x', COUNT(*) FROM P GROUP BY UPPER(KIND) || 'x' ORDER BY 2 DESC, 1",
     [("Ax", 2), ("Bx", 1), ("Cx", 1)]),
    ("SELECT COUNT(*), COUNT(DISTINCT KIND), COUNT(PRICE) FROM P", [(4, 3, 3)]),
    ("SELECT DISTINCT KIND FROM P ORDER BY KIND", [("A",), ("B",), ("C",)]),
    ("SELECT TOP 2 ID FROM P ORDER BY ID DESC", [(4,), (3,)]),
    ("SELECT ID FROM P ORDER BY ID LIMIT 2 OFFSET 1", [(2,), (3,)]),
    ("SELECT ID AS K FROM P ORDER BY K DESC LIMIT 1", [(4,)]),
    ("SELECT PRICE AS ID FROM P ORDER BY ID DESC LIMIT 1", [("10.00",)]),
    ("SELECT ID FROM P ORDER BY PRICE * -1, ID LIMIT 2", [(4,), (1,)]),
    ("SELECT ID FROM P WHERE ID IN (SELECT PID FROM O) ORDER BY ID", [(1,), (2,)]),
    ("SELECT ID FROM P WHERE NOT EXISTS (SELECT 1 FROM O WHERE O.PID = P.ID) ORDER BY ID", [(3,), (4,)]),
    ("SELECT NAME, (SELECT SUM(QTY) FROM O WHERE PID = P.ID) FROM P WHERE ID < 3 ORDER BY ID",
     [("pump", 5), ("seal", 1)]),
    ("SELECT X.N FROM (SELECT NAME AS N, ID FROM P) AS X WHERE X.ID = 3", [("belt",)]),
    ("SELECT ID FROM P WHERE (ID, KIND) IN (SELECT ID, 'A' FROM P) ORDER BY ID", [(1,), (2,)]),
    ("SELECT ID FROM P WHERE (ID, KIND) IN ((1, 'A'), (3, 'A'))", [(1,)]),
    ("WITH A AS (SELECT ID, NAME FROM P WHERE KIND = 'A') SELECT NAME FROM A ORDER BY ID", [("pump",), ("seal",)]),
    ("WITH A (X) AS (SELECT ID FROM P), B AS (SELECT X + 1 AS Y FROM A) SELECT MAX(Y) FROM B", [(5,)]),
    ("WITH r AS (SELECT *, NAME || '!' AS \"loud\" FROM P) SELECT \"loud\" FROM r WHERE ID = 1", [("pump!",)]),
    ("SELECT ID FROM P WHERE KIND = 'A' UNION ALL SELECT ID FROM O WHERE QTY = 5 ORDER BY 1", [(1,), (2,), (13,)]),
    ("SELECT KIND FROM P UNION SELECT 'Z' FROM DUMMY ORDER BY KIND", [("A",), ("B",), ("C",), ("Z",)]),
    ("SELECT ID FROM P EXCEPT SELECT PID FROM O ORDER BY 1", [(3,), (4,)]),
    ("SELECT ID FROM P MINUS SELECT PID FROM O ORDER BY 1", [(3,), (4,)]),
    ("SELECT ID FROM P INTERSECT SELECT PID FROM O ORDER BY 1 DESC LIMIT 1", [(2,)]),
    ("SELECT 1 AS A FROM DUMMY UNION ALL SELECT 2.5 FROM DUMMY ORDER BY A", [("1.0",), ("2.5",)]),
    ("(SELECT ID FROM P WHERE ID = 1) UNION ALL (SELECT ID FROM P WHERE ID = 2)", [(1,), (2,)]),
    (" UNION ALL ".join(f"SELECT {n} FROM DUMMY" for n in range(250)), [(n,) for n in range(250)]),
    ("SELECT 1 FROM DUMMY UNION ALL SELECT 1 FROM DUMMY UNION SELECT 1 FROM DUMMY", [(1,)]),
    ("SELECT 1 FROM DUMMY UNION SELECT 1 FROM DUMMY UNION ALL SELECT 1 FROM DUMMY", [(1,), (1,)]),
    ("(SELECT 1 FROM DUMMY UNION ALL SELECT 2 FROM DUMMY LIMIT 1) UNION ALL SELECT 3 FROM DUMMY", [(1,), (3,)]),
    ("SELECT ID, ROW_NUMBER() OVER (PARTITION BY KIND ORDER BY PRICE DESC) FROM P WHERE ID < 3 ORDER BY ID",
     [(1, 1), (2, 2)]),
    ("SELECT ID, SUM(PRICE) OVER (ORDER BY ID ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM P "
     "WHERE ID < 4 ORDER BY ID",
     [(1, "10.00"), (2, "12.50"), (3, "9.50")]),
    ("SELECT ID, LAG(ID) OVER (ORDER BY ID), RANK() OVER (ORDER BY KIND) FROM P WHERE ID < 3 ORDER BY ID",
     [(1, None, 1), (2, 1, 1)]),
    ("SELECT 1 FROM DUMMY WITH HINT (NO_VECTOR_INDEX)", [(1,)]),
    ("SELECT ID FROM P WHERE ID = 1 FOR UPDATE", [(1,)]),
    ("SELECT ID FROM P WHERE ID = 1;", [(1,)]),
    ("select id from p where name like '_ump'", [(1,)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), QUERIES)
def test_query(window: Sql, text: str, expected: list[tuple[object, ...]]) -> None:
    assert window.rows(text) == expected


ERRORS = [
    ("", 257),
    ("SELEC 1 FROM DUMMY", 257),
    ("SELECT 1", 257),
    ("SELECT FROM P", 257),
    ("SELECT 1 FROM DUMMY; SELECT 2 FROM DUMMY", 257),
    ("SELECT 'open FROM DUMMY", 257),
    ("SELECT ID FROM P WHERE ID", 257),
    ("SELECT ID FROM P WHERE (ID, KIND) > (1, 'A')", 257),
    ("SELECT * FROM NOSUCH", 259),
    ("SELECT * FROM \"p\"", 259),
    ("SELECT NOSUCH FROM P", 260),
    ("SELECT \"name\" FROM P", 260),
    ("SELECT NOSUCH.ID FROM P", 260),
    ("SELECT ID FROM P ORDER BY NOSUCH", 260),
    ("SELECT X.* FROM P", 260),
    ("SELECT * FROM NOSUCH.P", 362),
    ("SELECT ID FROM P JOIN O ON O.PID = P.ID", 268),
    ("SELECT ID, COUNT(*) FROM P", 276),
    ("SELECT NAME FROM P GROUP BY KIND", 276),
    ("SELECT KIND FROM P GROUP BY KIND HAVING NAME = 'x'", 276),
    ("SELECT ID FROM P WHERE COUNT(*) > 1", 275),
    ("SELECT ID FROM P ORDER BY 3", 277),
    ("SELECT ID FROM P UNION SELECT ID, QTY FROM O", 268),
    ("SELECT ID FROM P LIMIT ID", 257),
    ("SELECT ID FROM P NATURAL JOIN O", 7),
    ("SELECT P.ID FROM P JOIN O USING (ID)", 7),
    ("SELECT ID FROM P QUALIFY ROW_NUMBER() OVER (ORDER BY ID) = 1", 7),
    ("SELECT ID FROM P WHERE NAME ILIKE 'P%'", 7),
    ("SELECT ID FROM P WHERE ID IS DISTINCT FROM 1", 7),
    ("SELECT ID FROM P EXCEPT ALL SELECT ID FROM O", 7),
    ("SELECT DISTINCT ON (KIND) ID FROM P", 7),
    ("SELECT ID % 2 FROM P", 7),
    ("SELECT ID::BIGINT FROM P", 257),
    ("SELECT SUM(ID) FILTER (WHERE ID > 1) FROM P", 7),
    ("WITH RECURSIVE A AS (SELECT 1 AS X FROM DUMMY) SELECT X FROM A", 7),
    ("(SELECT ID FROM P) LIMIT 1", 7),
    ("DELETE FROM P RETURNING ID", 7),
    ("INSERT OR REPLACE INTO P (ID) VALUES (1)", 7),
    ("SELECT ID = 1 FROM P", 257),
    ("SELECT (ID IS NULL) AS X FROM P", 257),
    ("CALL NOSUCH()", 7),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code"), ERRORS)
def test_error(window: Sql, text: str, code: int) -> None:
    assert window.code(text) == code


def test_syntax_error_tells_the_position(shared: Sql) -> None:
    with pytest.raises(HanaError) as caught:
        shared.prepare("SELECT 1 FROM DUMMY WHERE = 2")
    assert caught.value.code == 257
    assert caught.value.position == len("SELECT 1 FROM DUMMY WHERE = 2")


def test_result_columns_are_named_and_typed(shop: Sql) -> None:
    statement = shop.prepare('SELECT ID, NAME AS "nice name", COUNT(*), 1 FROM P GROUP BY ID, NAME')
    assert [column.name for column in statement.columns] == ["ID", "nice name", "COUNT(*)", "1"]
    assert [(c.type.name, c.type.length, c.nullable, c.table, c.schema) for c in statement.columns[:2]] == [
        ("INTEGER", 10, False, "P", "S"),
        ("NVARCHAR", 20, True, "P", "S"),
    ]


def test_outer_join_makes_columns_nullable(shop: Sql) -> None:
    text = "SELECT P.ID, O.ID FROM P LEFT JOIN O ON O.PID = P.ID"
    assert [column.nullable for column in shop.prepare(text).columns] == [False, True]


def test_view_follows_its_tables_and_keeps_its_schema(shop: Sql) -> None:
    shop.run("CREATE VIEW CHEAP (ARTICLE, COST) AS SELECT NAME, PRICE * 2 FROM P WHERE PRICE < 8")
    shop.run("CREATE SCHEMA ELSEWHERE")
    shop.run("SET SCHEMA ELSEWHERE")
    assert shop.rows("SELECT ARTICLE, COST FROM S.CHEAP ORDER BY COST") == [("seal", "5.00"), ("belt", "14.00")]
    shop.run("INSERT INTO S.P VALUES (5, 'oil', 'D', 1)")
    assert shop.column("SELECT C.ARTICLE FROM S.CHEAP C WHERE COST = 2") == ["oil"]
    assert shop.result_types("SELECT * FROM S.CHEAP") == ["NVARCHAR", "DECIMAL"]


def test_view_on_view_replaced_and_dropped(shop: Sql) -> None:
    shop.run("CREATE VIEW V1 AS SELECT ID, NAME FROM P")
    shop.run("CREATE VIEW V2 AS SELECT NAME FROM V1 WHERE ID = 1")
    assert shop.code("CREATE VIEW V2 AS SELECT 1 AS A FROM DUMMY") == 288
    shop.run("CREATE OR REPLACE VIEW V1 AS SELECT ID, UPPER(NAME) AS NAME FROM P")
    assert shop.column("SELECT * FROM V2") == ["PUMP"]
    shop.run("DROP VIEW V1")
    assert shop.code("SELECT * FROM V2") == 391
    assert shop.code("DROP VIEW P") == 321
    assert shop.code("INSERT INTO V2 VALUES ('x')") == 7


# --- SYS views --------------------------------------------------------------------------------------------------------


@pytest.fixture
def described(sql: Sql) -> Sql:
    sql.run("""CREATE COLUMN TABLE M ("MANDT" NVARCHAR(3) NOT NULL COMMENT 'client', "MATNR" NVARCHAR(40),
        "W" DECIMAL(13,3),
        "F" DECIMAL, "L" NCLOB, "V" REAL_VECTOR(384), "A" REAL_VECTOR, "N" INTEGER DEFAULT 7,
        PRIMARY KEY ("MATNR", "MANDT")) COMMENT 'materials'""")
    sql.run("CREATE VIEW MV AS SELECT MATNR, W FROM M")
    sql.run("COMMENT ON VIEW MV IS 'a view'")
    sql.run("CREATE INDEX M_N ON M (N, W DESC)")
    return sql


def test_sys_tables_and_views(described: Sql) -> None:
    assert described.rows("SELECT TABLE_NAME, COMMENTS FROM SYS.TABLES WHERE SCHEMA_NAME = ?", "S") == [
        ("M", "materials")
    ]
    assert described.rows("SELECT VIEW_NAME, COMMENTS FROM SYS.VIEWS WHERE SCHEMA_NAME = 'S'") == [("MV", "a view")]
    assert described.column("SELECT SCHEMA_NAME FROM SYS.SCHEMAS WHERE SCHEMA_NAME = ?", "S") == ["S"]


def test_sys_table_columns(described: Sql) -> None:
    text = """SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH, SCALE, IS_NULLABLE, COMMENTS, POSITION, DEFAULT_VALUE
        FROM SYS.TABLE_COLUMNS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? ORDER BY POSITION"""
    assert described.rows(text, "S", "M") == [
        ("MANDT", "NVARCHAR", 3, None, "FALSE", "client", 1, None),
        ("MATNR", "NVARCHAR", 40, None, "FALSE", None, 2, None),
        ("W", "DECIMAL", 13, 3, "TRUE", None, 3, None),
        ("F", "DECIMAL", 34, None, "TRUE", None, 4, None),
        ("L", "NCLOB", 2147483647, None, "TRUE", None, 5, None),
        ("V", "REAL_VECTOR", 384, None, "TRUE", None, 6, None),
        ("A", "REAL_VECTOR", 0, None, "TRUE", None, 7, None),
        ("N", "INTEGER", 10, None, "TRUE", None, 8, "7"),
    ]
    columns = "SELECT COLUMN_NAME FROM SYS.VIEW_COLUMNS WHERE VIEW_NAME = ? ORDER BY POSITION"
    assert described.column(columns, "MV") == ["MATNR", "W"]


def test_sys_constraints_give_the_key_in_its_order(described: Sql) -> None:
    text = """SELECT COLUMN_NAME FROM SYS.CONSTRAINTS WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?
        AND IS_PRIMARY_KEY = 'TRUE' ORDER BY POSITION"""
    assert described.column(text, "S", "M") == ["MATNR", "MANDT"]


def test_sys_indexes(described: Sql) -> None:
    described.run("CREATE HNSW VECTOR INDEX M_V ON M (V) SIMILARITY FUNCTION COSINE_SIMILARITY")
    names = (
        "SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? ORDER BY INDEX_NAME"
    )
    assert described.rows(names, "S", "M") == [("M_N", "INVERTED VALUE"), ("M_V", "HNSW VECTOR")]
    columns = "SELECT COLUMN_NAME, ASCENDING_ORDER FROM SYS.INDEX_COLUMNS WHERE INDEX_NAME = ? ORDER BY POSITION"
    assert described.rows(columns, "M_N") == [("N", "TRUE"), ("W", "FALSE")]


def test_sys_data_types_and_database(shared: Sql) -> None:
    types = shared.column("SELECT TYPE_NAME FROM SYS.DATA_TYPES")
    assert {"NVARCHAR", "NCLOB", "REAL_VECTOR", "HALF_VECTOR", "SMALLDECIMAL"} <= set(types)
    version, cloud = shared.rows("SELECT VERSION, CLOUD_VERSION FROM SYS.M_DATABASE")[0]
    assert re.fullmatch(r"4\.\d\d\.\d{3}\.\d\d\.\d{10}", version)
    assert re.fullmatch(r"\d{4}\.\d+\.\d+", cloud)
    assert shared.column("SELECT USER_NAME FROM SYS.USERS") == ["OWL"]
    assert shared.value("SELECT DUMMY FROM SYS.DUMMY") == shared.value("SELECT * FROM DUMMY") == "X"


def test_sys_is_read_only(sql: Sql) -> None:
    assert sql.code("INSERT INTO SYS.TABLES (TABLE_NAME) VALUES ('x')") == 258
    assert sql.code("CREATE TABLE SYS.X (A INTEGER)") == 258
    assert sql.code("SELECT NOSUCH FROM SYS.M_DATABASE") == 260
    assert sql.code("SELECT * FROM SYS.NOSUCH") == 259


KEYSET = {
    2: "(A > ? OR (A = ? AND B > ?))",
    3: "A > ? OR (A = ? AND (B > ? OR (B = ? AND C > ?)))",
}


@pytest.mark.parametrize("width", KEYSET)
def test_a_page_starts_at_its_key_in_the_index(sql: Sql, width: int) -> None:
    sql.run("CREATE TABLE K (A NVARCHAR(3), B INTEGER, C INTEGER, PRIMARY KEY (A, B, C))")
    select = f"SELECT A, B, C FROM K WHERE {KEYSET[width]} ORDER BY A, B, C LIMIT 2"
    plan = sql.prepare(select).plan.step.sql  # type: ignore[attr-defined]
    steps = sql.session._connection.execute(f"EXPLAIN QUERY PLAN {plan}", [None] * (2 * width - 1)).fetchall()
    assert [step[3].split()[0] for step in steps] == ["SEARCH"]


@pytest.mark.parametrize("width", KEYSET)
def test_a_condition_that_looks_like_a_page_keeps_its_meaning(sql: Sql, width: int) -> None:
    """For all parameters, also NULL and two that differ for one column, also negated."""
    sql.run("CREATE TABLE K (A INTEGER, B INTEGER, C INTEGER)")
    values = (None, 1, 2)
    sql.many("INSERT INTO K VALUES (?,?,?)", [(a, b, c) for a in values for b in values for c in values])
    for given in itertools.product(values, repeat=2 * width - 1):
        literal = KEYSET[width]
        for value in given:
            literal = literal.replace("?", f"TO_INTEGER({'NULL' if value is None else value})", 1)
        for form in ("{}", "NOT ({}) AND C = 2"):
            found = sql.rows(f"SELECT A, B, C FROM K WHERE {form.format(KEYSET[width])} ORDER BY A, B, C", *given)
            assert found == sql.rows(f"SELECT A, B, C FROM K WHERE {form.format(literal)} ORDER BY A, B, C"), given
