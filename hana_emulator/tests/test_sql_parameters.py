"""Which type a `?` is declared with, by where it stands: hdbcli refuses locally what does not fit the declared type."""

from __future__ import annotations

import pytest

from emulator_sql import Sql, vector
from hana_emulator.seam import FunctionCode

TABLE = """
CREATE COLUMN TABLE T (I INTEGER PRIMARY KEY, S SMALLINT, L BIGINT, D DECIMAL(10,2), F DOUBLE, B BOOLEAN,
  N NVARCHAR(7), C NCLOB, X VARBINARY(9), V REAL_VECTOR(3), DT DATE, TS TIMESTAMP, A NVARCHAR(3))
"""


def with_tables(sql: Sql) -> Sql:
    sql.run(TABLE)
    sql.run("CREATE TABLE T2 (A BIGINT, Z NVARCHAR(4))")
    return sql


@pytest.fixture
def table(sql: Sql) -> Sql:
    return with_tables(sql)


@pytest.fixture(scope="module")
def preparing(shared: Sql) -> Sql:
    """The same, for what is only prepared."""
    return with_tables(shared)


POSITIONS = [
    # INSERT, UPSERT, UPDATE: the target column
    ("INSERT INTO T VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
     "INTEGER SMALLINT BIGINT DECIMAL DOUBLE BOOLEAN NVARCHAR NCLOB VARBINARY REAL_VECTOR DATE TIMESTAMP NVARCHAR"),
    ("INSERT INTO T (V, I, TS) VALUES (?, ?, CURRENT_UTCTIMESTAMP)", "REAL_VECTOR INTEGER"),
    ("UPSERT T (I, D) VALUES (?, ?) WITH PRIMARY KEY", "INTEGER DECIMAL"),
    ("UPSERT T (I, D) VALUES (?, ?) WHERE I = ?", "INTEGER DECIMAL INTEGER"),
    ("UPDATE T SET C = ?, X = ?, TS = CURRENT_UTCTIMESTAMP WHERE N = ? AND S = ?", "NCLOB VARBINARY NVARCHAR SMALLINT"),
    ("UPDATE T SET L = L + ? WHERE I = ?", "BIGINT INTEGER"),
    ("DELETE FROM T WHERE N = ?", "NVARCHAR"),
    ("INSERT INTO T (I, N) SELECT I + ?, N FROM T WHERE L > ?", "INTEGER BIGINT"),
    # comparisons: the other side
    ("SELECT I FROM T WHERE I = ? AND ? = D AND F <> ? AND L < ?", "INTEGER DECIMAL DOUBLE BIGINT"),
    ("SELECT I FROM T WHERE DT >= ? AND TS < ? AND B = ? AND X = ?", "DATE TIMESTAMP BOOLEAN VARBINARY"),
    ("SELECT I FROM T WHERE I IN (?, ?, 3)", "INTEGER INTEGER"),
    ("SELECT I FROM T WHERE ? IN (L, 3)", "BIGINT"),
    ("SELECT I FROM T WHERE I NOT IN (?)", "INTEGER"),
    ("SELECT I FROM T WHERE D BETWEEN ? AND ?", "DECIMAL DECIMAL"),
    ("SELECT I FROM T WHERE ? BETWEEN DT AND DT", "DATE"),
    ("SELECT I FROM T WHERE N LIKE ?", "NVARCHAR"),
    ("SELECT I FROM T WHERE C LIKE ?", "NCLOB"),
    ('SELECT I FROM T WHERE ("N" > ? OR ("N" = ? AND "I" > ?)) ORDER BY "N", "I" LIMIT ?',
     "NVARCHAR NVARCHAR INTEGER INTEGER"),
    ("SELECT I FROM T WHERE I IN (SELECT I FROM T WHERE S = ?) AND L = ?", "SMALLINT BIGINT"),
    ("SELECT I FROM T WHERE (I, N) IN ((?, ?))", "INTEGER NVARCHAR"),
    ("SELECT MAX(I) FROM T HAVING COUNT(*) > ?", "BIGINT"),
    ("SELECT COUNT(*) FROM T GROUP BY N HAVING MAX(D) > ?", "DECIMAL"),
    ("SELECT CASE WHEN I = ? THEN ? ELSE D END FROM T", "INTEGER DECIMAL"),
    ("SELECT COALESCE(?, D), IFNULL(N, ?), NULLIF(I, ?) FROM T", "DECIMAL NVARCHAR INTEGER"),
    ("SELECT A.I FROM T A JOIN T B ON A.N = ? AND B.I = A.I", "NVARCHAR"),
    # TOP, LIMIT, OFFSET
    ("SELECT TOP ? I FROM T WHERE N = ?", "INTEGER NVARCHAR"),
    ("SELECT I FROM T WHERE N = ? LIMIT ? OFFSET ?", "NVARCHAR INTEGER INTEGER"),
    # functions
    ("SELECT TOP ? I, COSINE_SIMILARITY(V, TO_REAL_VECTOR(?)) AS S FROM T WHERE A = ? ORDER BY S DESC",
     "INTEGER NCLOB NVARCHAR"),
    ("SELECT COSINE_SIMILARITY(V, ?) FROM T", "REAL_VECTOR"),
    ("SELECT I FROM T WHERE JSON_VALUE(C, '$.k') = TO_NVARCHAR(?)", "NVARCHAR"),
    ("SELECT I FROM T WHERE JSON_VALUE(C, '$.k') BETWEEN TO_DOUBLE(?) AND TO_DOUBLE(?)", "DOUBLE DOUBLE"),
    ("SELECT I FROM T WHERE JSON_VALUE(C, '$.k') = TO_BOOLEAN(?)", "NVARCHAR"),
    ("SELECT I FROM T WHERE JSON_VALUE(C, '$.k') = TO_DATE(?)", "NVARCHAR"),
    ("SELECT I FROM T WHERE SCORE(TO_NVARCHAR(?) IN (N EXACT SEARCH MODE 'text')) > 0", "NVARCHAR"),
    ("SELECT I FROM T WHERE TS < ADD_SECONDS(CURRENT_UTCTIMESTAMP, ?)", "DOUBLE"),
    ("MERGE INTO T USING (SELECT ? AS I, ? AS N FROM DUMMY) S ON T.I = S.I WHEN MATCHED THEN UPDATE SET N = S.N "
     "WHEN NOT MATCHED THEN INSERT (I, N) VALUES (S.I, S.N)", "NVARCHAR NVARCHAR"),
    ("MERGE INTO T USING DUMMY ON T.I = ? WHEN MATCHED THEN UPDATE SET N = ? "
     "WHEN NOT MATCHED THEN INSERT (I, N) VALUES (?, ?)",
     "INTEGER NVARCHAR INTEGER NVARCHAR"),
    # conversions and arithmetic
    ("SELECT CAST(? AS INTEGER), CAST(? AS NVARCHAR(3)), CAST(? AS DATE) FROM DUMMY", "NVARCHAR NVARCHAR NVARCHAR"),
    ("SELECT CAST(? AS NCLOB), CAST(? AS VARBINARY(9)), CAST(? AS REAL_VECTOR(3)) FROM DUMMY",
     "NCLOB VARBINARY REAL_VECTOR"),
    ("SELECT I + ?, ? - D, F * ?, ? / L FROM T", "INTEGER DECIMAL DOUBLE BIGINT"),
    ("SELECT MOD(I, ?), ABS(?), ROUND(D, ?) FROM T", "INTEGER DOUBLE INTEGER"),
    ("SELECT GREATEST(D, ?), LEAST(?, DT) FROM T", "DECIMAL DATE"),
    ("SELECT MAP(I, ?, ?, N) FROM T", "INTEGER NVARCHAR"),
    ("SELECT CASE N WHEN ? THEN 1 ELSE ? END FROM T", "NVARCHAR INTEGER"),
    ("SELECT SUBSTRING(N, ?, ?), LEFT(N, ?), LPAD(N, ?, ?) FROM T", "INTEGER INTEGER INTEGER INTEGER NVARCHAR"),
    ("SELECT ADD_DAYS(DT, ?), ADD_SECONDS(TS, ?) FROM T", "INTEGER DOUBLE"),
    ("SELECT DAYS_BETWEEN(DT, ?), SECONDS_BETWEEN(?, TS) FROM T", "TIMESTAMP TIMESTAMP"),
    ("SELECT L2DISTANCE(TO_REAL_VECTOR(?), V), CARDINALITY(?) FROM T", "NCLOB REAL_VECTOR"),
    ("SELECT BITAND(L, ?), POWER(F, ?) FROM T", "BIGINT DOUBLE"),
    # subqueries, set operations, views of the catalogue, WITH
    ("SELECT I FROM T WHERE (SELECT MAX(TS) FROM T) > ?", "TIMESTAMP"),
    ("SELECT I FROM T WHERE ? = (SELECT MAX(D) FROM T)", "DECIMAL"),
    ("SELECT I FROM T WHERE ? IN (SELECT L FROM T)", "BIGINT"),
    ("SELECT I FROM T WHERE EXISTS (SELECT 1 FROM T B WHERE B.N = T.N AND B.X = ?)", "VARBINARY"),
    ("SELECT I FROM T WHERE S = ? UNION ALL SELECT L FROM T WHERE B = ? ORDER BY 1 LIMIT ?",
     "SMALLINT BOOLEAN INTEGER"),
    ("WITH A AS (SELECT * FROM T WHERE DT = ?) SELECT I FROM A WHERE F > ?", "DATE DOUBLE"),
    ("SELECT I FROM (SELECT I, D AS E FROM T WHERE N = ?) WHERE E < ?", "NVARCHAR DECIMAL"),
    ("SELECT 1 FROM SYS.TABLE_COLUMNS WHERE TABLE_NAME = ? AND POSITION = ?", "NVARCHAR INTEGER"),
    ("INSERT INTO T (I, D) VALUES (? + 1, ROUND(?, 2))", "INTEGER DOUBLE"),
    ("UPDATE T SET N = UPPER(?), D = D * ? WHERE I IN (?, ?)", "NVARCHAR DECIMAL INTEGER INTEGER"),
    ("DELETE FROM T WHERE TS BETWEEN ? AND ? OR V IS NULL AND C LIKE ?", "TIMESTAMP TIMESTAMP NCLOB"),
    ("MERGE INTO T USING T2 ON T.I = T2.A AND T2.Z = ? WHEN MATCHED AND T.D > ? THEN UPDATE SET DT = ?",
     "NVARCHAR DECIMAL DATE"),
    # nowhere better
    ("SELECT ? FROM DUMMY", "NVARCHAR"),
    ("SELECT ? || 'x' FROM DUMMY", "NVARCHAR"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), POSITIONS)
def test_type_by_position(preparing: Sql, text: str, expected: str) -> None:
    assert [parameter.type.name for parameter in preparing.prepare(text).parameters] == expected.split()


def test_sizes_follow_the_column(preparing: Sql) -> None:
    statement = preparing.prepare("INSERT INTO T (N, D, V, X) VALUES (?, ?, ?, ?)")
    sizes = [(parameter.type.length, parameter.type.scale) for parameter in statement.parameters]
    assert sizes == [(7, 0), (10, 2), (3, 0), (9, 0)]
    assert [parameter.name for parameter in statement.parameters] == ["N", "D", "V", "X"]


def test_default_is_nvarchar_5000(preparing: Sql) -> None:
    (parameter,) = preparing.prepare("SELECT ? FROM DUMMY").parameters
    assert (parameter.type.name, parameter.type.length) == ("NVARCHAR", 5000)


def test_question_marks_in_literals_names_and_comments_are_no_parameters(sql: Sql) -> None:
    sql.run('CREATE TABLE "Q?" ("a?" INTEGER)')
    statement = sql.prepare("""SELECT '?', "a?" /* ? */ FROM "Q?" -- ?
        WHERE "a?" = ?""")
    assert len(statement.parameters) == 1


def test_a_parameter_ends_where_its_sign_ends(table: Sql) -> None:
    assert [column.name for column in table.prepare('SELECT ?C, ?"d" FROM DUMMY').columns] == ["C", "d"]
    assert table.rows("SELECT ?C, 1+?AS D FROM DUMMY WHERE?=?", "x", 1, "a", "a") == [("x", 2)]
    assert table.run("UPSERT T2 VALUES(?,?)WHERE A=?", 5, "z", 5) == 1
    for text in (
        "SELECT :P__1 FROM DUMMY",
        "SELECT :P__x FROM DUMMY",
        "SELECT :name FROM DUMMY",
        "SELECT ?, :P__2 FROM DUMMY",
    ):
        assert table.code(text) in (7, 257), text


def test_values_keep_their_order_when_top_moves(table: Sql) -> None:
    table.many("INSERT INTO T (I, N) VALUES (?, ?)", [(1, "a"), (2, "a"), (3, "b")])
    assert table.rows("SELECT TOP ? I, ? FROM T WHERE N = ? ORDER BY I DESC", 1, "x", "a") == [(2, "x")]


def test_vector_constructor_takes_text_and_bytes(shared: Sql) -> None:
    expression = "COSINE_SIMILARITY(TO_REAL_VECTOR(?), TO_REAL_VECTOR('[1, 0]'))"
    assert shared.evaluate(expression, "[1, 0]") == pytest.approx(1.0)
    assert shared.evaluate(expression, vector(0, 1)) == pytest.approx(0.0)


def test_wrong_number_of_values_is_refused(table: Sql) -> None:
    assert table.code("SELECT I FROM T WHERE I = ?") == 2


RESULTS = [
    # text, (type, length, scale, nullable) of each column
    ("SELECT I, N, D, V, C FROM T",
     [("INTEGER", 10, 0, False), ("NVARCHAR", 7, 0, True), ("DECIMAL", 10, 2, True), ("REAL_VECTOR", 3, 0, True),
      ("NCLOB", 0, 0, True)]),
    ("SELECT MAX(I), COUNT(*), SUM(D), MIN(N) FROM T",
     [("INTEGER", 10, 0, True), ("BIGINT", 19, 0, False), ("DECIMAL", 38, 2, True), ("NVARCHAR", 7, 0, True)]),
    ("SELECT D * D, D + 1, I + S, F / 2, I / S FROM T",
     [("DECIMAL", 20, 4, True), ("DECIMAL", 13, 2, True), ("BIGINT", 19, 0, True), ("DOUBLE", 15, 0, True),
      ("DECIMAL", 34, 32767, True)]),
    ("SELECT N || A, UPPER(N), SUBSTRING(N, 1, 2), TO_NVARCHAR(D) FROM T",
     [("NVARCHAR", 10, 0, True), ("NVARCHAR", 7, 0, True), ("NVARCHAR", 7, 0, True), ("NVARCHAR", 5000, 0, True)]),
    ("SELECT CASE WHEN I = 1 THEN N ELSE A END, COALESCE(S, L), COALESCE(N, 'x') FROM T",
     [("NVARCHAR", 7, 0, True), ("BIGINT", 19, 0, True), ("NVARCHAR", 7, 0, False)]),
    ("SELECT I FROM T UNION ALL SELECT D FROM T", [("DECIMAL", 12, 2, True)]),
    ("SELECT N FROM T UNION SELECT A FROM T", [("NVARCHAR", 7, 0, True)]),
    ("SELECT DT, TS, CAST(TS AS DATE), ADD_DAYS(DT, 1), ADD_SECONDS(DT, 1) FROM T",
     [("DATE", 10, 0, True), ("TIMESTAMP", 27, 7, True), ("DATE", 10, 0, True), ("DATE", 10, 0, True),
      ("TIMESTAMP", 27, 7, True)]),
    ("SELECT B, X, CAST(I AS TINYINT), CAST(N AS REAL) FROM T",
     [("BOOLEAN", 1, 0, True), ("VARBINARY", 9, 0, True), ("TINYINT", 3, 0, False), ("REAL", 7, 0, True)]),
    ("SELECT R.I, L.N FROM T L RIGHT JOIN T R ON L.I = R.I", [("INTEGER", 10, 0, False), ("NVARCHAR", 7, 0, True)]),
    ("SELECT L.I, R.I FROM T L FULL JOIN T R ON L.I = R.I", [("INTEGER", 10, 0, True), ("INTEGER", 10, 0, True)]),
    ("SELECT (SELECT MAX(DT) FROM T), I FROM T", [("DATE", 10, 0, True), ("INTEGER", 10, 0, False)]),
    ("WITH A (Q) AS (SELECT D FROM T) SELECT Q FROM A", [("DECIMAL", 10, 2, True)]),
    ("INSERT INTO T (I) VALUES (1)", []),
    ("UPDATE T SET N = 'x'", []),
    ("CREATE TABLE Z (A INTEGER)", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), RESULTS)
def test_result_columns(preparing: Sql, text: str, expected: list[tuple[str, int, int, bool]]) -> None:
    columns = preparing.prepare(text).columns
    assert [(c.type.name, c.type.length, c.type.scale, c.nullable) for c in columns] == expected


FUNCTIONS = [
    ("SELECT I FROM T", FunctionCode.SELECT),
    ("WITH A AS (SELECT I FROM T) SELECT I FROM A", FunctionCode.SELECT),
    ("(SELECT I FROM T) UNION (SELECT I FROM T)", FunctionCode.SELECT),
    ("SELECT I FROM T FOR UPDATE", FunctionCode.SELECT_FOR_UPDATE),
    ("INSERT INTO T (I) VALUES (1)", FunctionCode.INSERT),
    ("INSERT INTO T (I) SELECT L FROM T", FunctionCode.INSERT),
    ("UPSERT T (I) VALUES (1) WITH PRIMARY KEY", FunctionCode.INSERT),
    ("UPDATE T SET N = 'x'", FunctionCode.UPDATE),
    ("DELETE FROM T", FunctionCode.DELETE),
    ("CREATE TABLE Z (A INTEGER)", FunctionCode.DDL),
    ("DROP TABLE T", FunctionCode.DDL),
    ("COMMIT", FunctionCode.NIL),
    ("SET SCHEMA S", FunctionCode.NIL),
    ("SAVEPOINT A", FunctionCode.NIL),
]


@pytest.mark.parametrize(("text", "expected"), FUNCTIONS)
def test_what_a_statement_does(preparing: Sql, text: str, expected: FunctionCode) -> None:
    """hdbcli tells by this code whether there are rows to fetch."""
    statement = preparing.prepare(text)
    assert statement.function is expected
    assert bool(statement.columns) is (expected in (FunctionCode.SELECT, FunctionCode.SELECT_FOR_UPDATE))
