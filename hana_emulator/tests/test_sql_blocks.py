"""Anonymous blocks and table functions, as langchain-hana's `use_map_merge` sends them."""

from __future__ import annotations

import pytest

from emulator_sql import USER, Sql
from hana_emulator.sql.database import Database

FUNCTION = """CREATE FUNCTION "F"(IN i_id INT, IN i_text NCLOB, IN "more" NVARCHAR(10))
RETURNS TABLE("ID" INT, "OUT" NVARCHAR(20)) LANGUAGE SQLSCRIPT READS SQL DATA AS
BEGIN RETURN SELECT :i_id AS "ID", UPPER(:i_text) || :"more" AS "OUT" FROM DUMMY; END;"""
BLOCK = """DO(IN suffix NVARCHAR(10) => ?)
BEGIN
  dat = SELECT "ID", "A" FROM T WHERE ID < 3;
  found = MAP_MERGE(:dat, "F"(:dat."ID", :dat."A", :suffix));
  MERGE INTO T AS dat USING :found AS upd ON dat."ID" = upd."ID" WHEN MATCHED THEN UPDATE SET dat."B" = upd."OUT";
END;"""


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (ID INTEGER PRIMARY KEY, A NCLOB, B NVARCHAR(20))")
    sql.many("INSERT INTO T VALUES (?, ?, NULL)", [(1, "a;b"), (2, "c"), (3, "d")])
    sql.run(FUNCTION)
    return sql


def test_map_merge_calls_a_table_function_for_each_row(table: Sql) -> None:
    table.run(BLOCK, "!")
    assert table.column("SELECT B FROM T ORDER BY ID") == ["A;B!", "C!", None]


def test_a_block_is_prepared_once_and_planned_again_after_a_definition(table: Sql) -> None:
    statement = table.prepare(BLOCK)
    assert (statement.sql, len(statement.parameters), statement.columns) == (BLOCK, 1, ())
    table.run("CREATE TABLE OTHER (A INTEGER)")
    table.session.execute(statement, [("?",)], autocommit=True)
    assert table.value("SELECT B FROM T WHERE ID = 1") == "A;B?"


def test_a_block_may_use_variables_and_parameters_more_than_once(table: Sql) -> None:
    table.run(
        "DO (IN x INT => ?, IN y INT => 40, IN z INT => ?) BEGIN v = SELECT :x AS X, :y + :z AS Y FROM DUMMY;"
        " INSERT INTO T SELECT X + Y, 'x', :x || ':' || :z FROM :v; END",
        3, 7,
    )  # fmt: skip
    assert table.rows("SELECT ID, B FROM T WHERE ID > 3") == [(50, "3:7")]


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (7, "BEGIN x = SELECT 1 FROM DUMMY; END"),
        (7, "BEGIN DELETE FROM T; DELETE FROM T; END"),
        (7, "BEGIN SELECT * FROM T; END"),
        (7, "BEGIN IF 1 = 1 THEN DELETE FROM T; END IF; END"),
        (467, "BEGIN DELETE FROM T WHERE ID = :unknown; END"),
        (467, "BEGIN x = MAP_MERGE(:y, F(1, 'x', 'y')); DELETE FROM T; END"),
        (316, "BEGIN y = SELECT ID FROM T; x = MAP_MERGE(:y, F(:y.ID)); DELETE FROM T; END"),
        (328, "BEGIN y = SELECT ID FROM T; x = MAP_MERGE(:y, G(:y.ID)); DELETE FROM T; END"),
        (260, "BEGIN y = SELECT A FROM T; x = MAP_MERGE(:y, F(:y.ID, 'x', 'y')); INSERT INTO T SELECT * FROM :x; END"),
        (257, "BEGIN DELETE FROM T"),
        (257, "BEGIN DELETE FROM T; END END"),
        (257, "BEGIN ; END"),
        (257, "DELETE FROM T"),
    ],
)
def test_other_blocks_are_refused(table: Sql, code: int, body: str) -> None:
    assert table.code(f"DO {body}") == code
    assert table.value("SELECT COUNT(*) FROM T") == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (330, FUNCTION),
        (7, "CREATE FUNCTION G(a INT) RETURNS b INT AS BEGIN b = a; END"),
        (7, "CREATE FUNCTION G() RETURNS TABLE(A INT) AS BEGIN x = SELECT 1 FROM DUMMY; RETURN :x; END"),
        (257, "CREATE FUNCTION G() RETURNS TABLE(A INT) AS BEGIN RETURN SELECT 1 FROM DUMMY"),
        (328, "DROP FUNCTION G"),
    ],
)
def test_other_functions_are_refused(table: Sql, code: int, text: str) -> None:
    assert table.code(text) == code


def test_a_block_that_grows_without_end_is_refused(table: Sql) -> None:
    growing = "".join(f"v{number + 1} = SELECT a.* FROM :v{number} a, :v{number} b; " for number in range(40))
    assert (
        table.code(f"DO BEGIN v0 = SELECT 1 AS X FROM DUMMY; {growing} INSERT INTO T (ID) SELECT X FROM :v40; END")
        == 2048
    )
    many = "".join(f"v{number} = SELECT 1 AS X FROM DUMMY; " for number in range(200))
    assert table.code(f"DO BEGIN {many} DELETE FROM T; END") == 2048


def test_a_function_over_tables_is_refused_in_map_merge(table: Sql) -> None:
    table.run("CREATE FUNCTION G(a INT) RETURNS TABLE(ID INT) AS BEGIN RETURN SELECT ID FROM T WHERE ID = :a; END")
    assert table.code("DO BEGIN y = SELECT ID FROM T; x = MAP_MERGE(:y, G(:y.ID)); DELETE FROM T; END") == 7


def test_functions_are_dropped_alone_or_with_their_schema(table: Sql) -> None:
    table.run("DROP FUNCTION F")
    assert table.code(BLOCK, "!") == 328
    table.run('CREATE SCHEMA "X"')
    table.run(FUNCTION.replace('"F"', '"X"."F"'))
    assert table.code('DROP SCHEMA "X"') == 419
    table.run('DROP SCHEMA "X" CASCADE')
    table.run('CREATE SCHEMA "X"')
    table.run(FUNCTION.replace('"F"', '"X"."F"'))


def test_a_user_needs_privileges_for_the_blocks_statement_and_the_functions_schema(database: Database) -> None:
    owner = Sql(database.connect(USER))
    owner.run("CREATE TABLE T (ID INTEGER)")
    owner.run('CREATE USER GUEST PASSWORD "Guest-1234" NO FORCE_FIRST_PASSWORD_CHANGE')
    guest = Sql(database.connect("GUEST"))
    assert guest.code("DO BEGIN DELETE FROM S.T; END") == 258
    assert guest.code(FUNCTION.replace('"F"', "S.F")) == 258
