"""`"$rowid$"`, the pseudo-column of the emulator's column tables, and TABLE_OID beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator_sql import USER, Sql, open_database, transacting
from hana_emulator.sql.database import Database

ROWS = [(1, "one"), (2, "two"), (3, "three")]


@pytest.fixture
def table(sql: Sql) -> Sql:
    sql.run("CREATE COLUMN TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(9))")
    sql.many("INSERT INTO T VALUES (?, ?)", ROWS)
    return sql


def ids(sql: Sql) -> dict[int, int]:
    return dict(sql.rows('SELECT K, "$rowid$" FROM T ORDER BY K'))


def test_every_inserted_row_gets_the_next_id_and_star_does_not_show_it(table: Sql) -> None:
    found = ids(table)
    assert [found[1], found[2], found[3]] == sorted(set(found.values()))
    table.run("INSERT INTO T SELECT K + 10, V FROM T")
    assert min(value for key, value in ids(table).items() if key > 10) > found[3]
    assert len(set(ids(table).values())) == 6
    assert table.rows("SELECT * FROM T WHERE K = 1") == [(1, "one")]
    assert table.rows("SELECT T.* FROM T WHERE K = 1") == [(1, "one")]
    assert table.result_types('SELECT "$rowid$" FROM T') == ["BIGINT"]
    assert "$rowid$" not in table.column("SELECT COLUMN_NAME FROM TABLE_COLUMNS WHERE TABLE_NAME = 'T'")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE T SET V = 'x' WHERE K = 2",
        "UPDATE T SET V = V WHERE K = 2",
        "UPSERT T VALUES (2, 'x') WITH PRIMARY KEY",
        "UPSERT T (V) VALUES ('x') WHERE K = 2",
        "MERGE INTO T USING (SELECT 2 AS A FROM DUMMY) S ON T.K = S.A WHEN MATCHED THEN UPDATE SET V = 'x'",
    ],
)
def test_a_changed_row_gets_a_new_and_higher_id(table: Sql, change: str) -> None:
    before = ids(table)
    table.run(change)
    after = ids(table)
    assert after[2] > max(before.values())
    assert (after[1], after[3]) == (before[1], before[3])


def test_actions_of_foreign_keys_give_new_ids_too(sql: Sql) -> None:
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE T (K INTEGER REFERENCES P ON UPDATE CASCADE ON DELETE SET NULL)")
    sql.many("INSERT INTO P VALUES (?)", [(1,), (2,)])
    sql.many("INSERT INTO T VALUES (?)", [(1,), (2,)])
    sql.run("UPDATE P SET A = 3 WHERE A = 1")
    sql.run("DELETE FROM P WHERE A = 2")
    assert sql.rows('SELECT K, "$rowid$" FROM T ORDER BY 2') == [(3, 3), (None, 4)]


def test_an_id_is_never_given_twice_not_even_after_deletes_and_rollbacks(table: Sql, database: Database) -> None:
    seen = set(ids(table).values())
    table.run("DELETE FROM T WHERE K = 3")
    table.run("INSERT INTO T VALUES (3, 'again')")
    assert ids(table)[3] not in seen
    writer = transacting(database)
    writer.run("INSERT INTO T VALUES (4, 'four')")
    given = ids(writer)[4]
    writer.session.rollback()
    table.run("INSERT INTO T VALUES (4, 'four')")
    assert ids(table)[4] > given


def test_it_stands_in_conditions_sort_keys_and_aggregates(table: Sql) -> None:
    table.run("UPDATE T SET V = 'x' WHERE K = 1")
    first, second, third = (ids(table)[key] for key in (1, 2, 3))
    assert table.value('SELECT MAX("$rowid$") FROM T') == first
    assert table.rows('SELECT MIN("$rowid$"), COUNT(*) FROM T AS A WHERE A."$rowid$" >= ?', third) == [(third, 2)]
    assert table.column('SELECT K FROM T ORDER BY "$rowid$" DESC') == [1, 3, 2]
    assert table.value('SELECT V FROM T WHERE T."$rowid$" = ?', second) == "two"
    assert table.column('SELECT R FROM (SELECT "$rowid$" AS R FROM T) X ORDER BY R') == sorted([first, second, third])
    assert table.run('DELETE FROM T WHERE "$rowid$" = ?', second) == 1
    assert table.code('SELECT V, "$rowid$" FROM T GROUP BY V') == 276


@pytest.mark.parametrize(
    "text",
    [
        'SELECT "$rowid$" FROM VIEWED',
        'SELECT "$rowid$" FROM ROWS_STORED',
        'SELECT "$rowid$" FROM #L',
        'SELECT "$rowid$" FROM DUMMY',
        "SELECT $rowid$ FROM T",
        'INSERT INTO T (K, "$rowid$") VALUES (9, 9)',
        'UPDATE T SET "$rowid$" = 9',
        'CREATE INDEX I ON T ("$rowid$")',
        'ALTER TABLE T DROP ("$rowid$")',
    ],
)
def test_only_column_tables_have_it_and_nobody_writes_it(table: Sql, text: str) -> None:
    table.run("CREATE VIEW VIEWED AS SELECT * FROM T")
    table.run("CREATE ROW TABLE ROWS_STORED (K INTEGER)")
    table.run("CREATE LOCAL TEMPORARY TABLE #L (K INTEGER)")
    assert table.code(text) == 260


def test_two_tables_with_it_need_a_qualifier(table: Sql) -> None:
    table.run("CREATE SYNONYM U FOR T")
    assert table.code('SELECT "$rowid$" FROM T JOIN U ON T.K = U.K') == 268
    assert len(table.rows('SELECT T."$rowid$" FROM T JOIN U ON T."$rowid$" = U."$rowid$"')) == 3


def test_truncate_begins_anew_and_other_definitions_keep_the_ids(table: Sql) -> None:
    table.run("UPDATE T SET V = 'x'")
    before = ids(table)
    table.run("ALTER TABLE T ADD (W INTEGER DEFAULT 1)")
    table.run("ALTER TABLE T DROP (W)")
    table.run("ALTER TABLE T ALTER (V NVARCHAR(20))")
    table.run("RENAME COLUMN T.V TO U")
    assert ids(table) == before
    highest = table.value('SELECT MAX("$rowid$") FROM T')
    table.run("TRUNCATE TABLE T")
    assert table.value('SELECT MAX("$rowid$") FROM T') is None
    table.many("INSERT INTO T VALUES (?, ?)", ROWS)
    assert table.value('SELECT MAX("$rowid$") FROM T') < highest


def test_a_table_of_the_same_name_is_another_one(table: Sql) -> None:
    number = "SELECT TABLE_OID FROM TABLES WHERE TABLE_NAME = 'T'"
    before = table.value(number)
    table.run("TRUNCATE TABLE T")
    assert table.value(number) == before
    table.run("DROP TABLE T")
    table.run("CREATE TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(9))")
    assert table.value(number) != before


def test_rows_of_a_parked_transaction_keep_their_ids(table: Sql, database: Database) -> None:
    first, second = transacting(database), transacting(database)
    first.run("INSERT INTO T VALUES (10, 'a')")
    first.run("UPDATE T SET V = 'a' WHERE K = 1")
    given = ids(first)
    second.run("INSERT INTO T VALUES (11, 'b')")  # parks the first
    second.session.commit()
    assert ids(first)[10] == given[10]
    assert ids(first)[1] == given[1]
    first.session.commit()
    assert len(set(ids(table).values())) == 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    opened = open_database(tmp_path)
    sql = Sql(opened.connect(USER))
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(9))")
    sql.many("INSERT INTO T VALUES (?, ?)", ROWS)
    opened.close()
    return tmp_path


def test_ids_outlive_the_emulator(folder: Path) -> None:
    opened = open_database(folder)
    sql = Sql(opened.connect(USER))
    before = ids(sql)
    sql.run("DELETE FROM T WHERE K = 3")
    opened.close()
    opened = open_database(folder)
    sql = Sql(opened.connect(USER))
    sql.run("INSERT INTO T VALUES (4, 'four')")
    after = ids(sql)
    opened.close()
    assert (after[1], after[2]) == (before[1], before[2])
    assert after[4] > before[3]


def test_a_killed_emulator_gives_no_id_again(folder: Path) -> None:
    """What a process that is killed leaves: nothing is given back when the counters are closed."""
    opened = open_database(folder)
    sql = Sql(opened.connect(USER))
    sql.run("INSERT INTO T VALUES (4, 'four')")
    highest = ids(sql)[4]
    sql.run("DELETE FROM T WHERE K = 4")
    opened.row_ids._last.clear()
    opened.close()
    opened = open_database(folder)
    sql = Sql(opened.connect(USER))
    sql.run("INSERT INTO T VALUES (5, 'five')")
    assert ids(sql)[5] > highest
    opened.close()
