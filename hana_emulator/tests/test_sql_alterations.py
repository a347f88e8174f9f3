"""ALTER TABLE and RENAME: what becomes of rows, keys, indexes, views, and of other sessions' statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from emulator_sql import Sql, vector
from hana_emulator.errors import HanaError
from hana_emulator.seam import FAILED
from hana_emulator.sql.database import Database
from hana_emulator.sql.storage.writer import Writer


def with_table(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(5) NOT NULL, D DECIMAL(6,2), X INTEGER)")
    sql.run("CREATE INDEX I ON T (N, D DESC)")
    sql.run("CREATE UNIQUE INDEX J ON T (X)")
    sql.many("INSERT INTO T VALUES (?, ?, ?, ?)", [(1, "one", "1.50", 10), (2, "2", "22.25", None)])
    return sql


@pytest.fixture
def table(sql: Sql) -> Sql:
    return with_table(sql)


@pytest.mark.parametrize("kind", ["NVARCHAR(50)", "NVARCHAR(3) NULL DEFAULT 'q'", "VARCHAR(3)"])
def test_a_column_of_another_type_keeps_rows_and_indexes(table: Sql, kind: str) -> None:
    table.run(f"ALTER TABLE T ALTER (N {kind})")
    assert table.column("SELECT N FROM T ORDER BY K") == ["one", "2"]
    assert table.column("SELECT INDEX_NAME FROM SYS.INDEXES ORDER BY 1") == ["I", "J"]
    assert table.code("INSERT INTO T VALUES (1, 'x', 1, 1)") == 301
    assert table.code("INSERT INTO T VALUES (3, 'x', 1, 10)") == 301, "the unique index is there still"


NUMBERS = [
    ("ALTER TABLE T ALTER (X BIGINT)", "X", [10, None], "BIGINT"),
    ("ALTER TABLE T ALTER (X NVARCHAR(9))", "X", ["10", None], "NVARCHAR"),
    ("ALTER TABLE T ALTER (X DECIMAL(9,1))", "X", ["10.0", None], "DECIMAL"),
    ("ALTER TABLE T ALTER (D DECIMAL(9,1))", "D", ["1.5", "22.3"], "DECIMAL"),
    ("ALTER TABLE T ALTER (D DOUBLE)", "D", [1.5, 22.25], "DOUBLE"),
    ("ALTER TABLE T ALTER (D INTEGER)", "D", [1, 22], "INTEGER"),
]


@pytest.mark.parametrize(("text", "column", "expected", "kind"), NUMBERS)
def test_numbers_of_another_type(table: Sql, text: str, column: str, expected: Sequence[Any], kind: str) -> None:
    table.run(text)
    assert table.column(f"SELECT {column} FROM T ORDER BY K") == list(expected)
    assert table.result_types(f"SELECT {column} FROM T") == [kind]


REFUSED = [
    ("ALTER TABLE T ALTER (N NVARCHAR(2))", 274),
    ("ALTER TABLE T ALTER (N INTEGER)", 339),
    ("ALTER TABLE T ALTER (N DATE)", 303),
    ("ALTER TABLE T ALTER (D DECIMAL(3,2))", 314),
    ("ALTER TABLE T ALTER (X TINYINT NOT NULL)", 287),
    ("ALTER TABLE T ALTER (K NCLOB)", 264),
    ("ALTER TABLE T ALTER (NOSUCH INTEGER)", 260),
    ("ALTER TABLE T ALTER (X INTEGER UNIQUE)", 7),
    ("ALTER TABLE T ALTER (X INTEGER GENERATED ALWAYS AS IDENTITY)", 7),
    ("ALTER TABLE T ALTER (X INTEGER DEFAULT NOSUCH)", 260),
    ("ALTER TABLE T ADD (N INTEGER)", 308),
    ("ALTER TABLE T ADD (Q INTEGER NOT NULL)", 287),
    ("ALTER TABLE T ADD (Q INTEGER DEFAULT 1 UNIQUE)", 301),
    ("ALTER TABLE T ADD PRIMARY KEY (X)", 294),
    ("ALTER TABLE T ADD CONSTRAINT U UNIQUE (V)", 260),
    ("ALTER TABLE T ADD CONSTRAINT U", 257),
    ("ALTER TABLE T DROP (K)", 350),
    ("ALTER TABLE T DROP (N)", 351),
    ("ALTER TABLE T DROP (K, N, D, X)", 350),
    ("ALTER TABLE LONELY DROP (A)", 311),
    ("ALTER TABLE LONELY DROP PRIMARY KEY", 366),
    ("ALTER TABLE NOSUCH ADD (A INTEGER)", 259),
    ("RENAME TABLE T TO LONELY", 288),
    ("RENAME TABLE NOSUCH TO U", 259),
    ("RENAME COLUMN T.NOSUCH TO U", 260),
    ("RENAME COLUMN T.K TO N", 308),
]


@pytest.fixture(scope="module")
def refusing(shared: Sql) -> Sql:
    with_table(shared)
    shared.run("CREATE TABLE LONELY (A INTEGER)")
    return shared


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused_alterations_change_nothing(refusing: Sql, shared_database: Database, text: str, code: int) -> None:
    before, rows = shared_database.catalog, refusing.rows("SELECT * FROM T ORDER BY K")
    assert refusing.code(text) == code
    assert shared_database.catalog is before
    assert refusing.rows("SELECT * FROM T ORDER BY K") == rows
    assert refusing.code("INSERT INTO T VALUES (1, 'x', 1, 1)") == 301
    assert refusing.code("INSERT INTO T VALUES (3, 'x', 1, 10)") == 301


def test_what_is_not_written_of_a_column_stays(table: Sql) -> None:
    table.run("ALTER TABLE T ADD (E NVARCHAR(3) DEFAULT 'e' NOT NULL COMMENT 'c')")
    table.run("ALTER TABLE T ALTER (E NVARCHAR(9))")
    columns = "SELECT IS_NULLABLE, DEFAULT_VALUE, COMMENTS, LENGTH FROM SYS.TABLE_COLUMNS WHERE COLUMN_NAME = 'E'"
    assert table.rows(columns) == [("FALSE", "e", "c", 9)]
    table.run("ALTER TABLE T ALTER (E NVARCHAR(9) NULL DEFAULT 'f')")
    assert table.rows(columns) == [("TRUE", "f", "c", 9)]
    table.run("INSERT INTO T (K, N) VALUES (3, 'x')")
    assert table.column("SELECT E FROM T ORDER BY K") == ["e", "e", "f"]


def test_primary_keys_come_and_go(table: Sql) -> None:
    table.run("ALTER TABLE T DROP PRIMARY KEY")
    table.run("INSERT INTO T VALUES (1, 'again', 0, 0)")
    assert table.code("UPSERT T VALUES (1, 'x', 0, 0) WITH PRIMARY KEY") == 7
    assert table.code("ALTER TABLE T ADD PRIMARY KEY (K)") == 301
    table.run("ALTER TABLE T ADD CONSTRAINT PK PRIMARY KEY (K, N)")
    assert table.rows(
        "SELECT CONSTRAINT_NAME, COLUMN_NAME FROM SYS.CONSTRAINTS WHERE IS_PRIMARY_KEY = 'TRUE' ORDER BY POSITION"
    ) == [
        ("PK", "K"),
        ("PK", "N"),
    ]
    assert table.code("INSERT INTO T VALUES (1, 'again', 0, 5)") == 301
    table.run("UPSERT T VALUES (1, 'again', 7, 0) WITH PRIMARY KEY")
    assert table.value("SELECT D FROM T WHERE N = 'again'") == "7.00"
    table.run("ALTER TABLE T DROP CONSTRAINT PK")
    table.run("ALTER TABLE T ALTER (N NVARCHAR(5) NULL)")
    table.run("INSERT INTO T VALUES (1, NULL, 0, 6)")


def test_an_identity_goes_on_where_it_was(sql: Sql) -> None:
    sql.run("CREATE TABLE T (ID BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, A NVARCHAR(5))")
    sql.many("INSERT INTO T (A) VALUES (?)", [("a",), ("b",), ("c",)])
    sql.run("DELETE FROM T WHERE ID > 1")
    sql.run("ALTER TABLE T ALTER (A NVARCHAR(9))")
    sql.run("ALTER TABLE T ADD (B INTEGER DEFAULT 1)")
    sql.run("INSERT INTO T (A) VALUES ('d')")
    assert sql.rows("SELECT * FROM T ORDER BY ID") == [(1, "a", 1), (4, "d", 1)]
    sql.run("CREATE TABLE U (A NVARCHAR(5))")
    sql.many("INSERT INTO U VALUES (?)", [("a",), ("b",)])
    sql.run("ALTER TABLE U ADD (ID INTEGER GENERATED ALWAYS AS IDENTITY)")
    sql.run("INSERT INTO U (A) VALUES ('c')")
    assert sql.rows("SELECT ID, A FROM U ORDER BY ID") == [(1, "a"), (2, "b"), (3, "c")]
    sql.run("DELETE FROM U")
    sql.run("ALTER TABLE U ADD (B DATE)")
    sql.run("INSERT INTO U (A) VALUES ('d')")
    assert sql.column("SELECT ID FROM U") == [4], "also when no row was there to be carried over"


def test_an_identity_that_starts_elsewhere(sql: Sql) -> None:
    identity = "INTEGER GENERATED BY DEFAULT AS IDENTITY"
    sql.run(f"CREATE TABLE T (ID {identity} (START WITH 42 INCREMENT BY 1 NO CYCLE), A INTEGER)")
    sql.many("INSERT INTO T (A) VALUES (?)", [(1,), (2,)])
    assert sql.column("SELECT ID FROM T ORDER BY ID") == [42, 43]
    assert sql.code(f"CREATE TABLE U (ID {identity} (START WITH 0))") == 313
    assert sql.code(f"CREATE TABLE U (ID {identity} (START 5)") == 257


def test_a_renamed_table_keeps_what_belongs_to_it(table: Sql) -> None:
    table.run("CREATE TABLE C (X INTEGER REFERENCES T ON UPDATE CASCADE)")
    table.run("INSERT INTO C VALUES (1)")
    table.run("CREATE VIEW V AS SELECT K FROM T")
    table.run('RENAME TABLE T TO "New one"')
    table.run('RENAME COLUMN "New one".K TO "Key"')
    assert table.code("SELECT * FROM V") == 391
    assert table.code("SELECT * FROM T") == 259
    assert table.code("INSERT INTO \"New one\" VALUES (1, 'x', 1, 1)") == 301
    assert table.code('DELETE FROM "New one" WHERE "Key" = 1') == 462
    table.run('UPDATE "New one" SET "Key" = 5 WHERE "Key" = 1')
    assert table.rows("SELECT * FROM C") == [(5,)]
    assert table.column("SELECT TABLE_NAME FROM SYS.INDEXES") == ["New one", "New one"]
    assert table.rows("SELECT REFERENCED_TABLE_NAME, REFERENCED_COLUMN_NAME FROM SYS.REFERENTIAL_CONSTRAINTS") == [
        ("New one", "Key")
    ]
    table.run('RENAME TABLE "New one" TO T')
    assert table.code("SELECT * FROM V") == 391
    table.run('RENAME COLUMN T."Key" TO K')
    assert table.column("SELECT K FROM V ORDER BY K") == [2, 5]


def test_vectors_of_a_remade_table_are_searched(sql: Sql) -> None:
    sql.run("CREATE TABLE T (ID INTEGER, V REAL_VECTOR(2))")
    sql.run("CREATE HNSW VECTOR INDEX H ON T (V) SIMILARITY FUNCTION COSINE_SIMILARITY")
    sql.many("INSERT INTO T VALUES (?, ?)", [(1, vector(1, 0)), (2, vector(0, 1)), (3, vector(1, 1))])
    search = "SELECT TOP 1 ID FROM T ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR('[0,1]')) DESC"
    assert sql.column(search) == [2]
    sql.run("DELETE FROM T WHERE ID = 1")
    sql.run("ALTER TABLE T ADD (N INTEGER DEFAULT 4)")
    assert sql.column(search) == [2]
    assert sql.column("SELECT INDEX_NAME FROM SYS.INDEXES") == ["H"]
    assert sql.code("ALTER TABLE T ALTER (V REAL_VECTOR(3))") == 20005
    sql.run("ALTER TABLE T DROP (V)")
    assert sql.column("SELECT INDEX_NAME FROM SYS.INDEXES") == []


STATEMENTS = [
    ("SELECT A, B FROM T", (), "ALTER TABLE T ADD (C INTEGER)", 0),
    ("SELECT A, B FROM T", (), "ALTER TABLE T DROP (B)", 260),
    ("INSERT INTO T VALUES (?, ?)", (2, "x"), "ALTER TABLE T DROP (B)", 269),
    ("INSERT INTO T VALUES (?, ?)", (2, "xyz"), "ALTER TABLE T ALTER (B NVARCHAR(2))", 274),
    ("INSERT INTO T (A) VALUES (?)", (2,), "ALTER TABLE T ADD (C INTEGER DEFAULT 1 NOT NULL)", 0),
    ("INSERT INTO T (A) VALUES (?)", (0,), "ALTER TABLE T ADD CHECK (A > 0)", 677),
    ("INSERT INTO T (A) VALUES (?)", (1,), "ALTER TABLE T ADD PRIMARY KEY (A)", 301),
    ("UPDATE T SET B = ?", ("y",), "RENAME COLUMN T.B TO C", 260),
    ("DELETE FROM T WHERE A = ?", (1,), "RENAME TABLE T TO U", 259),
]


@pytest.mark.parametrize(("text", "row", "change", "code"), STATEMENTS)
def test_prepared_before_and_run_after(
    sql: Sql, other: Sql, text: str, row: tuple[Any, ...], change: str, code: int
) -> None:
    sql.run("CREATE TABLE T (A INTEGER, B NVARCHAR(3))")
    sql.run("INSERT INTO T VALUES (1, 'ab')")
    statement = other.prepare(text)
    sql.run(change)
    if not code:
        other.session.execute(statement, [row], autocommit=True)
        return
    with pytest.raises(HanaError) as caught:
        other.session.execute(statement, [row], autocommit=True)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("before", "after", "value", "code"),
    [
        ("INTEGER", "NVARCHAR(9)", 7, 0),
        ("NVARCHAR(9)", "INTEGER", "7", 0),
        ("NVARCHAR(9)", "INTEGER", "x", 339),
        ("DECIMAL(9,2)", "DOUBLE", "7.25", 0),
        ("DATE", "TIMESTAMP", "2024-02-29", 0),
        ("BOOLEAN", "NVARCHAR(9)", 1, 0),
        ("VARBINARY(9)", "NVARCHAR(9)", b"a", 0),
    ],
)
def test_a_parameter_prepared_for_another_type(
    sql: Sql, other: Sql, before: str, after: str, value: Any, code: int
) -> None:
    """It is converted like the rows, or rejected, where it is compared and where it is written."""
    sql.run(f"CREATE TABLE T (K INTEGER, N {before})")
    insert, query = (
        other.prepare("INSERT INTO T VALUES (?, ?)"),
        other.prepare("SELECT K FROM T WHERE N = ? ORDER BY K"),
    )
    other.session.execute(insert, [(1, None if code else value)], autocommit=True)
    sql.run(f"ALTER TABLE T ALTER (N {after})")
    if code:
        for statement, row in ((insert, (2, value)), (query, (value,))):
            with pytest.raises(HanaError) as caught:
                other.session.execute(statement, [row], autocommit=True)
            assert caught.value.code == code
        return
    other.session.execute(insert, [(2, value), (3, None)], autocommit=True, batch=True)
    found = other.session.execute(query, [(value,)], autocommit=True).rows
    assert [tuple(each) for each in found or ()] == [(1,), (2,)]


def test_a_row_of_a_batch_prepared_for_another_type_fails_alone(sql: Sql, other: Sql) -> None:
    sql.run("CREATE TABLE T (N NVARCHAR(9))")
    insert = other.prepare("INSERT INTO T VALUES (?)")
    sql.run("ALTER TABLE T ALTER (N INTEGER)")
    outcome = other.session.execute(insert, [("1",), ("x",), ("3",)], autocommit=True, batch=True)
    assert (outcome.rows_affected, [error.code for error in outcome.errors]) == ([1, FAILED, 1], [339])
    assert sql.column("SELECT N FROM T ORDER BY N") == [1, 3]


def test_a_type_that_changes_while_a_write_waits(sql: Sql, other: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    sql.run("CREATE TABLE T (N BOOLEAN)")
    run = Writer.run

    def waiting(writer: Writer, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(Writer, "run", run)
        sql.run("ALTER TABLE T ALTER (N NVARCHAR(9))")
        return run(writer, *arguments, **options)

    statement = other.prepare("INSERT INTO T VALUES (?)")
    monkeypatch.setattr(Writer, "run", waiting)
    other.session.execute(statement, [(1,)], autocommit=True)
    assert sql.column("SELECT N FROM T") == ["TRUE"]


# --- CREATE TABLE LIKE and AS, IF EXISTS ------------------------------------------------------------------------------


def test_create_like(table: Sql) -> None:
    table.run("CREATE TABLE L LIKE T")
    assert table.rows("SELECT * FROM L") == []
    table.run("CREATE TABLE M LIKE T WITH DATA")
    assert table.rows("SELECT * FROM M ORDER BY K") == table.rows("SELECT * FROM T ORDER BY K")
    assert table.code("INSERT INTO M VALUES (1, 'x', 1, 1)") == 301


def test_create_as(table: Sql) -> None:
    table.run("CREATE TABLE A AS (SELECT K, N FROM T WHERE K = 2)")
    table.run('CREATE TABLE B ("k", L) AS (SELECT K, N FROM T) WITH DATA')
    table.run("CREATE TABLE C AS (SELECT K FROM T) WITH NO DATA")
    assert table.rows("SELECT * FROM A") == [(2, "2")]
    assert table.rows('SELECT "k", L FROM B ORDER BY 1') == [(1, "one"), (2, "2")]
    assert table.rows("SELECT * FROM C") == []
    assert table.code("CREATE TABLE D (A, B, C) AS (SELECT K FROM T)") == 426
    assert table.code("CREATE TABLE D AS (SELECT K FROM T WHERE K = ?)") == 7


def test_if_exists(table: Sql) -> None:
    table.run("CREATE COLUMN TABLE IF NOT EXISTS T (OTHER DATE)")
    assert table.value("SELECT COUNT(*) FROM T") == 2
    table.run("CREATE TABLE IF NOT EXISTS N (OTHER DATE)")
    table.run("DROP TABLE IF EXISTS N")
    table.run("DROP TABLE IF EXISTS N")
    table.run("DROP VIEW IF EXISTS N")
    assert table.code("DROP TABLE N") == 259
