"""Generated columns, and identities with steps, bounds and cycles."""

from __future__ import annotations

from typing import Any

import pytest

from emulator_sql import USER, Sql, open_database, transacting, vector
from hana_emulator.nlp import Nlp
from hana_emulator.sql.database import Database

# --- generated columns ------------------------------------------------------------------------------------------------


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run(
        "CREATE TABLE T (A INTEGER PRIMARY KEY, B NVARCHAR(10), S NVARCHAR(20) GENERATED ALWAYS AS (UPPER(B) || '!'),"
        ' "v v" DECIMAL(10,2) AS A * 1.5)'
    )
    sql.many("INSERT INTO T VALUES (?, ?)", [(1, "x"), (2, None)])
    return sql


def test_values_follow_the_row(table: Sql) -> None:
    assert table.rows("SELECT * FROM T ORDER BY A") == [(1, "x", "X!", "1.50"), (2, None, None, "3.00")]
    assert table.result_types("SELECT * FROM T") == ["INTEGER", "NVARCHAR", "NVARCHAR", "DECIMAL"]
    table.run("UPDATE T SET B = 'y' WHERE S IS NULL")
    table.run("UPSERT T (A, B) VALUES (1, 'z') WITH PRIMARY KEY")
    table.run(
        "MERGE INTO T USING (SELECT 3 AS A FROM DUMMY) N ON T.A = N.A WHEN NOT MATCHED THEN INSERT VALUES (3, 'q')"
    )
    assert table.column("SELECT S FROM T ORDER BY A") == ["Z!", "Y!", "Q!"]


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO T (A, S) VALUES (3, 'x')",
        'INSERT INTO T (A, "v v") SELECT 3, 1 FROM DUMMY',
        "UPDATE T SET S = 'x'",
        "UPSERT T (A, S) VALUES (1, 'x') WITH PRIMARY KEY",
        "MERGE INTO T USING DUMMY D ON T.A = 9 WHEN NOT MATCHED THEN INSERT (A, S) VALUES (3, 'x')",
    ],
)
def test_a_statement_gives_them_no_value(table: Sql, text: str) -> None:
    assert table.code(text) == 396
    assert table.code("INSERT INTO T VALUES (3, 'x', 'y', 1)") == 269


def test_the_catalogue_shows_the_expressions(table: Sql) -> None:
    query = "SELECT GENERATION_TYPE, GENERATED_ALWAYS_AS, DEFAULT_VALUE FROM SYS.TABLE_COLUMNS WHERE TABLE_NAME = 'T'"
    assert table.rows(f"{query} AND POSITION > 1 ORDER BY POSITION") == [
        (None, None, None),
        ("ALWAYS AS", "(UPPER(B) || '!')", None),
        ("ALWAYS CALCULATED AS", "A * 1.5", None),
    ]


def test_the_type_of_the_column_is_kept(sql: Sql) -> None:
    sql.run(
        "CREATE TABLE N (A INTEGER, B NVARCHAR(2) GENERATED ALWAYS AS TO_NVARCHAR(A), C INTEGER NOT NULL AS (A + 1))"
    )
    sql.run("INSERT INTO N VALUES (12)")
    assert sql.code("INSERT INTO N VALUES (123)") == 274
    assert sql.code("INSERT INTO N VALUES (NULL)") == 287
    assert sql.rows("SELECT * FROM N") == [(12, "12", 13)]


@pytest.mark.parametrize(
    ("code", "expression"),
    [(260, "NOSUCH"), (260, "G"), (257, "SUM(A)"), (7, "(SELECT 1 FROM DUMMY)"), (7, "CURRENT_TIMESTAMP"),
     (7, "RAND()"), (7, "?"), (266, "A + DATE '2020-01-01'"), (257, "A +"), (328, "NOSUCH(A)")],
)  # fmt: skip
def test_other_expressions_are_refused(sql: Sql, code: int, expression: str) -> None:
    assert sql.code(f"CREATE TABLE N (A INTEGER, G NVARCHAR(40) GENERATED ALWAYS AS ({expression}))") == code
    assert sql.code("SELECT * FROM N") == 259


def test_a_table_with_them_is_altered(table: Sql) -> None:
    table.run("ALTER TABLE T ADD (L INTEGER GENERATED ALWAYS AS LENGTH(B), D INTEGER DEFAULT 5)")
    assert table.rows("SELECT A, S, L, D FROM T ORDER BY A") == [(1, "X!", 1, 5), (2, None, None, 5)]
    table.run("RENAME COLUMN T.B TO NAME")
    table.run("ALTER TABLE T ALTER (NAME NVARCHAR(15))")
    table.run("INSERT INTO T (A, NAME) VALUES (3, 'abc')")
    assert table.rows("SELECT S, L, D FROM T WHERE A = 3") == [("ABC!", 3, 5)]
    assert table.code("ALTER TABLE T DROP (NAME)") == 260
    assert table.code("ALTER TABLE T ALTER (S NVARCHAR(30))") == 7
    table.run("ALTER TABLE T DROP (S, L)")
    table.run("ALTER TABLE T DROP (NAME)")
    table.run("CREATE TABLE U LIKE T WITH DATA")
    table.run("INSERT INTO U (A) VALUES (10)")
    assert table.column('SELECT "v v" FROM U ORDER BY A') == ["1.50", "3.00", "4.50", "15.00"]


def test_a_unique_generated_column_and_two_writers(database: Database) -> None:
    one, other = transacting(database), transacting(database)
    one.run(
        "CREATE TABLE T (A INTEGER PRIMARY KEY, G INTEGER GENERATED ALWAYS AS (A * 2) UNIQUE, H INTEGER AS (A + 1))"
    )
    one.run("INSERT INTO T VALUES (1)")
    other.run("INSERT INTO T VALUES (2)")  # parks the first transaction, whose row is restored later
    one.run("INSERT INTO T VALUES (3)")
    other.session.commit()
    one.session.commit()
    assert one.rows("SELECT * FROM T ORDER BY A") == [(1, 2, 2), (2, 4, 3), (3, 6, 4)]
    assert one.code("INSERT INTO T VALUES (1)") == 301


def test_triggers_read_them(table: Sql) -> None:
    table.run("CREATE TABLE L (S NVARCHAR(20))")
    table.run(
        "CREATE TRIGGER R AFTER INSERT ON T REFERENCING NEW ROW N FOR EACH ROW BEGIN INSERT INTO L VALUES (:n.S); END"
    )
    table.run("INSERT INTO T VALUES (5, 'five')")
    assert table.column("SELECT S FROM L") == ["FIVE!"]


def test_a_vector_column_follows_its_text(sql: Sql) -> None:
    expression = "VECTOR_EMBEDDING('Title: ' || TITLE, 'DOCUMENT', 'SAP_GXY.20250407')"
    columns = f"TITLE NVARCHAR(50), V REAL_VECTOR(768) GENERATED ALWAYS AS ({expression})"
    sql.run(f"CREATE TABLE N (ID INTEGER PRIMARY KEY, {columns})")
    sql.many("INSERT INTO N VALUES (?, ?)", [(1, "steel pump"), (2, "copper pipe"), (3, None)])
    sql.run("CREATE HNSW VECTOR INDEX I ON N (V) SIMILARITY FUNCTION COSINE_SIMILARITY")
    search = (
        "SELECT TOP 1 ID, COSINE_SIMILARITY(V, VECTOR_EMBEDDING(?, 'QUERY', 'SAP_GXY.20250407')) AS S FROM N"
        " ORDER BY S DESC"
    )
    assert sql.rows(search, "title: copper")[0][0] == 2
    sql.run("UPDATE N SET TITLE = 'brass valve' WHERE ID = 2")
    assert sql.rows(search, "title: copper")[0][1] < 0.7
    sql.run("UPDATE N SET TITLE = 'copper' WHERE ID = 1")
    assert sql.rows(search, "title: copper")[0][0] == 1
    assert sql.value("SELECT V FROM N WHERE ID = 3") is None


def test_a_failing_embedder_fails_the_write() -> None:
    answers: list[list[list[Any]]] = [[[1.0, 2.0]], [["x"]]]
    database = open_database(nlp=Nlp(lambda texts, text_type: answers.pop(0)))
    sql = Sql(database.connect(USER))
    expression = "VECTOR_EMBEDDING(T, 'QUERY', 'SAP_NEB.20240715')"
    sql.run(f"CREATE TABLE N (T NCLOB, V REAL_VECTOR(2) GENERATED ALWAYS AS {expression})")
    sql.run("INSERT INTO N VALUES ('one')")
    assert sql.code("INSERT INTO N VALUES ('two')") == 2
    assert sql.rows("SELECT * FROM N") == [("one", vector(1, 2))]
    database.close()


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("START WITH 42", [42, 43, 44]),
        ("START WITH 10 INCREMENT BY 5", [10, 15, 20]),
        ("INCREMENT BY -5 START WITH 0 MINVALUE -1000 MAXVALUE 0", [0, -5, -10]),
        ("START WITH 2 INCREMENT BY 3 MINVALUE 1 MAXVALUE 6 CYCLE", [2, 5, 1]),
        ("START WITH 0 MINVALUE 0 NO MAXVALUE NO CACHE NO CYCLE", [0, 1, 2]),
    ],
)
def test_an_identity_counts_as_its_options_say(sql: Sql, options: str, expected: list[int]) -> None:
    sql.run(f"CREATE TABLE I (ID INTEGER GENERATED ALWAYS AS IDENTITY ({options}), N INTEGER)")
    seen = []
    for number in range(3):
        sql.run("INSERT INTO I (N) VALUES (?)", number)
        seen.append(sql.evaluate("CURRENT_IDENTITY_VALUE()"))
    assert sql.column("SELECT ID FROM I ORDER BY N") == seen == expected
    assert sql.code("INSERT INTO I (ID, N) VALUES (1, 1)") == 396


def test_an_exhausted_identity_is_an_error(sql: Sql) -> None:
    sql.run("CREATE TABLE I (ID INTEGER GENERATED BY DEFAULT AS IDENTITY (MAXVALUE 1), N INTEGER)")
    sql.run("INSERT INTO I (N) VALUES (1)")
    assert sql.code("INSERT INTO I (N) VALUES (1)") == 312
    sql.run("INSERT INTO I (ID, N) VALUES (7, 1)")
    assert sql.column("SELECT ID FROM I ORDER BY ID") == [1, 7]


def test_bad_options_are_refused(sql: Sql) -> None:
    for options in ("INCREMENT BY 0", "START WITH 5 MAXVALUE 4", "MINVALUE 3 MAXVALUE 2"):
        assert sql.code(f"CREATE TABLE I (ID INTEGER GENERATED ALWAYS AS IDENTITY ({options}))") == 313
    assert sql.code("CREATE TABLE I (ID NVARCHAR(5) GENERATED ALWAYS AS IDENTITY)") == 264
    assert sql.code("CREATE TABLE I (ID INTEGER GENERATED BY DEFAULT AS (1))") == 257


def test_identities_belong_to_their_tables(sql: Sql) -> None:
    names = "SELECT SEQUENCE_NAME FROM SYS.SEQUENCES WHERE SCHEMA_NAME = 'S'"
    sql.run("CREATE TABLE I (ID INTEGER GENERATED BY DEFAULT AS IDENTITY (INCREMENT BY 10 START WITH 10), N INTEGER)")
    sql.run("INSERT INTO I (N) VALUES (1)")
    sql.run("CREATE TABLE J LIKE I WITH DATA")
    sql.run("INSERT INTO J (N) VALUES (2)")
    assert (sql.column("SELECT ID FROM I"), sql.column("SELECT ID FROM J")) == ([10], [10, 10])
    assert sql.rows(
        "SELECT GENERATION_TYPE, DEFAULT_VALUE FROM SYS.TABLE_COLUMNS WHERE TABLE_NAME = 'J' AND POSITION = 1"
    ) == [("BY DEFAULT AS IDENTITY", None)]
    assert len(sql.column(names)) == 2
    sql.run("DROP TABLE I")
    sql.run("ALTER TABLE J DROP (ID)")
    assert sql.column(names) == []
    sql.run("ALTER TABLE J ADD (ID INTEGER GENERATED ALWAYS AS IDENTITY (START WITH 5 INCREMENT BY 2))")
    assert sql.column("SELECT ID FROM J ORDER BY N") == [5, 7]


def test_a_user_with_insert_alone_gets_numbers(sql: Sql, database: Database) -> None:
    sql.run("CREATE TABLE I (ID INTEGER GENERATED ALWAYS AS IDENTITY (INCREMENT BY 2), N INTEGER)")
    sql.run('CREATE USER GUEST PASSWORD "Guest-1234" NO FORCE_FIRST_PASSWORD_CHANGE')
    sql.run("GRANT INSERT, SELECT, DROP ON I TO GUEST")
    guest = Sql(database.connect("GUEST"))
    guest.run("INSERT INTO S.I (N) VALUES (1)")
    assert guest.column("SELECT ID FROM S.I") == [1]
    guest.run("DROP TABLE S.I")
