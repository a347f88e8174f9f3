"""Statements that go-hdb, node-hdb and hdbcli's callproc send and that our own code does not."""

from __future__ import annotations

import pytest

from emulator_sql import Sql, transacting
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database

READ_ONLY = "set transaction read only"


def test_access_mode_of_transactions(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER)")
    sql.run("set transaction read write")
    sql.run("INSERT INTO T VALUES (1)")
    sql.run(READ_ONLY)
    assert sql.rows("SELECT I FROM T") == [(1,)]
    for statement in (
        "INSERT INTO T VALUES (2)",
        "DELETE FROM T",
        "DROP TABLE T",
        "SELECT I FROM T FOR UPDATE",
    ):
        assert sql.code(statement) == 7
    sql.run("SET TRANSACTION READ WRITE")
    sql.run("INSERT INTO T VALUES (2)")
    assert sql.rows("SELECT COUNT(*) FROM T") == [(2,)]


def test_access_mode_belongs_to_one_session(sql: Sql, other: Sql) -> None:
    sql.run(READ_ONLY)
    other.run("CREATE TABLE T (I INTEGER)")
    assert other.run("INSERT INTO T VALUES (1)") == 1


def test_access_mode_changes_nothing_that_is_written_already(database: Database, sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER)")
    writer = transacting(database)
    writer.run("INSERT INTO T VALUES (1)")
    writer.run(READ_ONLY)
    assert writer.code("INSERT INTO T VALUES (2)") == 7
    writer.session.commit()
    assert sql.rows("SELECT I FROM T") == [(1,)]


@pytest.mark.parametrize("mode", ["read", "read maybe", "read only twice", "write"])
def test_unknown_access_modes_are_refused(sql: Sql, mode: str) -> None:
    assert sql.code(f"set transaction {mode}") == 257


@pytest.mark.parametrize("threshold", ["NULL", "0", "1000"])
def test_memory_threshold_of_lobs(sql: Sql, threshold: str) -> None:
    sql.run(f"CREATE TABLE T (B BLOB MEMORY THRESHOLD {threshold} NOT NULL, N NCLOB MEMORY THRESHOLD {threshold})")
    assert sql.rows("SELECT COLUMN_NAME, IS_NULLABLE FROM TABLE_COLUMNS WHERE TABLE_NAME = 'T' ORDER BY POSITION") == [
        ("B", "FALSE"),
        ("N", "TRUE"),
    ]
    assert sql.run("INSERT INTO T VALUES (?, ?)", b"x", "x") == 1


@pytest.mark.parametrize(
    ("column", "code"),
    [
        ("N NVARCHAR(5) MEMORY THRESHOLD NULL", 257),
        ("B BLOB MEMORY THRESHOLD", 257),
    ],
)
def test_memory_threshold_is_checked(sql: Sql, column: str, code: int) -> None:
    assert sql.code(f"CREATE TABLE T ({column})") == code


def test_daydate_and_secondtime_are_date_and_time(sql: Sql) -> None:
    sql.run("CREATE TABLE T (D DAYDATE, S SECONDTIME)")
    assert sql.result_types("SELECT * FROM T") == ["DATE", "TIME"]
    assert sql.result_types("SELECT CAST('2000-01-01' AS DAYDATE) FROM DUMMY") == ["DATE"]


def test_session_context_view(sql: Sql, other: Sql) -> None:
    query = "SELECT KEY, VALUE FROM M_SESSION_CONTEXT WHERE CONNECTION_ID = CURRENT_CONNECTION ORDER BY KEY"
    sql.session.set_variable("B", "äß")
    sql.run("SET 'A' = 'one'")
    assert sql.rows(query) == [("A", "one"), ("B", "äß")]
    assert other.rows(query) == []
    sql.run("UNSET 'A'")
    assert sql.rows(query) == [("B", "äß")]
    columns = "HOST, PORT, CONNECTION_ID, KEY, VALUE, SECTION"
    assert len(sql.rows(f"SELECT {columns} FROM SYS.M_SESSION_CONTEXT")) == 1


# --- numbered parameters


def test_numbered_parameters(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER, N NVARCHAR(5))")
    assert sql.run("INSERT INTO T VALUES (:2, :1)", "one", 1) == 1
    assert sql.run("INSERT INTO T VALUES (:1, 'two')", 2) == 1
    assert sql.rows("SELECT N FROM T WHERE I = :1 OR I = :2 ORDER BY I", 1, 2) == [("one",), ("two",)]
    assert [one.type.name for one in sql.prepare("SELECT I FROM T WHERE N = :2 AND I = :1").parameters] == [
        "INTEGER",
        "NVARCHAR",
    ]


def test_a_number_twice_is_one_parameter(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER PRIMARY KEY, J INTEGER, N NVARCHAR(5))")
    sql.run("UPSERT T (I, J) VALUES (:1, :1) WITH PRIMARY KEY", 7)
    assert sql.rows("SELECT COUNT(*) FROM T WHERE I = :1 AND J = :1", 7) == [(1,)]
    sql.run("UPSERT T (I, J) VALUES (:1, :1) WHERE I = :2", 8, 7)
    assert sql.rows("SELECT I, J FROM T") == [(8, 8)]


def test_a_number_in_columns_of_two_types_is_converted_for_each(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER, N NVARCHAR(5), D DECIMAL(5,2))")
    sql.run("INSERT INTO T VALUES (:1, :1, :1)", 7)
    assert sql.rows("SELECT I, N, D FROM T") == [(7, "7", "7.00")]
    assert sql.code("INSERT INTO T VALUES (:1, :1, :1)", 123456) == 274


def test_both_kinds_of_parameters_go_together_and_numbers_may_be_left_out(sql: Sql) -> None:
    sql.run("CREATE TABLE T (I INTEGER, J INTEGER)")
    sql.run("INSERT INTO T VALUES (1, 2)")
    query = "SELECT COUNT(*) FROM T WHERE I = ? AND J = :3"
    assert [one.type.name for one in sql.prepare(query).parameters] == ["INTEGER", "NVARCHAR", "INTEGER"]
    assert sql.rows(query, 1, "not used", 2) == [(1,)]
    assert sql.rows("SELECT COUNT(*) FROM T WHERE I = :1 AND J = ?", 2) == [(0,)]
    assert sql.run("UPSERT T (I, J) VALUES (:2, ?) WHERE I = ?", 7, 1) == 1
    assert sql.rows("SELECT I, J FROM T") == [(1, 7)]


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("SELECT DUMMY FROM DUMMY WHERE DUMMY = :0", 257),
        ("SELECT DUMMY FROM DUMMY WHERE DUMMY = : 1", 257),
        ("SELECT DUMMY FROM DUMMY WHERE DUMMY = :999999", 2048),
    ],
)
def test_numbered_parameters_are_checked(sql: Sql, statement: str, code: int) -> None:
    with pytest.raises(HanaError) as error:
        sql.prepare(statement)
    assert error.value.code == code


def test_numbers_in_strings_are_no_parameters(sql: Sql) -> None:
    assert sql.rows("SELECT ':1', '12:30:00' FROM DUMMY") == [(":1", "12:30:00")]


# --- procedures


@pytest.mark.parametrize(
    "statement", ["CALL P(1)", "{ CALL P(?) }", "{call S.P()}", "{ ? = call P(?) }", 'call "P"', "? = call P()"]
)
def test_calls_are_not_supported(sql: Sql, statement: str) -> None:
    with pytest.raises(HanaError, match="CALL is not supported") as error:
        sql.prepare(statement)
    assert error.value.code == 7


@pytest.mark.parametrize("statement", ["{ SELECT 1 FROM DUMMY }", "{", "? = 1"])
def test_other_escapes_are_syntax_errors(sql: Sql, statement: str) -> None:
    assert sql.code(statement) == 257
