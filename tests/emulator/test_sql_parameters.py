"""Which type a `?` is declared with, by where it stands: hdbcli refuses locally what does not fit the declared type."""

from __future__ import annotations

import pytest

from tests.emulator.sql_session import Sql, vector

TABLE = """
CREATE COLUMN TABLE T (I INTEGER PRIMARY KEY, S SMALLINT, L BIGINT, D DECIMAL(10,2), F DOUBLE, B BOOLEAN,
  N NVARCHAR(7), C NCLOB, X VARBINARY(9), V REAL_VECTOR(3), DT DATE, TS TIMESTAMP, A NVARCHAR(3))
"""


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run(TABLE)
    return sql


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
    # nowhere better
    ("SELECT ? FROM DUMMY", "NVARCHAR"),
    ("SELECT ? || 'x' FROM DUMMY", "NVARCHAR"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), POSITIONS)
def test_type_by_position(table: Sql, text: str, expected: str) -> None:
    assert [parameter.type.name for parameter in table.prepare(text).parameters] == expected.split()


def test_sizes_follow_the_column(table: Sql) -> None:
    statement = table.prepare("INSERT INTO T (N, D, V, X) VALUES (?, ?, ?, ?)")
    sizes = [(parameter.type.length, parameter.type.scale) for parameter in statement.parameters]
    assert sizes == [(7, 0), (10, 2), (3, 0), (9, 0)]
    assert [parameter.name for parameter in statement.parameters] == ["N", "D", "V", "X"]


def test_default_is_nvarchar_5000(table: Sql) -> None:
    (parameter,) = table.prepare("SELECT ? FROM DUMMY").parameters
    assert (parameter.type.name, parameter.type.length) == ("NVARCHAR", 5000)


def test_question_marks_in_literals_names_and_comments_are_no_parameters(sql: Sql) -> None:
    sql.run('CREATE TABLE "Q?" ("a?" INTEGER)')
    statement = sql.prepare("""SELECT '?', "a?" /* ? */ FROM "Q?" -- ?
        WHERE "a?" = ?""")
    assert len(statement.parameters) == 1


def test_values_keep_their_order_when_top_moves(table: Sql) -> None:
    table.many("INSERT INTO T (I, N) VALUES (?, ?)", [(1, "a"), (2, "a"), (3, "b")])
    assert table.rows("SELECT TOP ? I, ? FROM T WHERE N = ? ORDER BY I DESC", 1, "x", "a") == [(2, "x")]


def test_vector_constructor_takes_text_and_bytes(sql: Sql) -> None:
    expression = "COSINE_SIMILARITY(TO_REAL_VECTOR(?), TO_REAL_VECTOR('[1, 0]'))"
    assert sql.evaluate(expression, "[1, 0]") == pytest.approx(1.0)
    assert sql.evaluate(expression, vector(0, 1)) == pytest.approx(0.0)


def test_wrong_number_of_values_is_refused(table: Sql) -> None:
    assert table.code("SELECT I FROM T WHERE I = ?") == 2
