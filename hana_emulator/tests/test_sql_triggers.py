"""Triggers of the emulator: what fires them, what their bodies may do, and who may make them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from emulator_background import Background
from emulator_sql import Sql, open_database, transacting
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database

LOG = "(ID BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, K INTEGER, OP NVARCHAR(1), AT TIMESTAMP, V NVARCHAR(20))"
INSERTED = """CREATE TRIGGER TI AFTER INSERT ON T REFERENCING NEW ROW AS N FOR EACH ROW
BEGIN INSERT INTO L (K, OP, AT, V) VALUES (:n.K, 'I', CURRENT_UTCTIMESTAMP, :n.V); END"""
UPDATED = """CREATE TRIGGER TU AFTER UPDATE ON T REFERENCING NEW ROW N, OLD ROW O FOR EACH ROW
BEGIN
  IF :o.K <> :n.K THEN
    INSERT INTO L (K, OP) VALUES (:o.K, 'D');
    INSERT INTO L (K, OP, V) SELECT :n.K, 'I', :n.V FROM DUMMY;
  ELSE
    INSERT INTO L (K, OP, V) VALUES (:n.K, 'U', :n.V);
  END IF;
END;"""
DELETED = """CREATE TRIGGER S.TD AFTER DELETE ON S.T REFERENCING OLD ROW AS O FOR EACH ROW
BEGIN INSERT INTO L (K, OP) VALUES (:o.K, 'D'); END"""


@pytest.fixture
def logged(sql: Sql) -> Sql:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(20))")
    sql.run(f"CREATE TABLE L {LOG}")
    for text in (INSERTED, UPDATED, DELETED):
        sql.run(text)
    return sql


def log(sql: Sql) -> list[tuple[Any, ...]]:
    return sql.rows("SELECT K, OP FROM L ORDER BY ID")


def body(statements: str, event: str = "INSERT", rows: str = "NEW ROW N", name: str = "X") -> str:
    referencing = f"REFERENCING {rows} " if rows else ""
    return f"CREATE TRIGGER {name} AFTER {event} ON T {referencing}FOR EACH ROW BEGIN {statements} END"


# --- what fires -------------------------------------------------------------------------------------------------------


def test_each_row_of_each_statement_is_logged(logged: Sql) -> None:
    assert logged.many("INSERT INTO T VALUES (?, ?)", [(1, "a"), (2, "b")]) == [1, 1]
    logged.run("INSERT INTO T SELECT K + 10, V FROM T")
    assert logged.run("UPDATE T SET V = 'c' WHERE K < 10") == 2
    assert logged.run("DELETE FROM T WHERE K > 10") == 2
    inserted = [(1, "I"), (2, "I"), (11, "I"), (12, "I")]
    assert log(logged) == [*inserted, (1, "U"), (2, "U"), (11, "D"), (12, "D")]
    assert logged.column("SELECT DISTINCT AT FROM L WHERE OP = 'I' AND K = 1")[0].startswith("20")
    assert logged.column("SELECT V FROM L WHERE OP = 'U'") == ["c", "c"]


def test_a_changed_key_gives_the_old_and_the_new_one(logged: Sql) -> None:
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run("UPDATE T SET K = 2")
    assert log(logged) == [(1, "I"), (1, "D"), (2, "I")]


@pytest.mark.parametrize("text", ["UPSERT T VALUES (?, 'x') WITH PRIMARY KEY", "UPSERT T VALUES (?, 'x') WHERE K = ?"])
def test_upsert_fires_what_it_does(logged: Sql, text: str) -> None:
    for key in (1, 1):
        logged.run(text, *[key] * text.count("?"))
    assert log(logged) == [(1, "I"), (1, "U")]


def test_merge_fires_what_it_does(logged: Sql) -> None:
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run(
        "MERGE INTO T USING (SELECT 1 AS A FROM DUMMY UNION SELECT 2 FROM DUMMY) S ON T.K = S.A"
        " WHEN MATCHED THEN UPDATE SET V = 'm' WHEN NOT MATCHED THEN INSERT (K, V) VALUES (S.A, 'm')"
    )
    assert log(logged) == [(1, "I"), (1, "U"), (2, "I")]


def test_actions_of_foreign_keys_fire(logged: Sql) -> None:
    logged.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    logged.run("INSERT INTO P VALUES (1)")
    logged.run("ALTER TABLE T ADD CONSTRAINT F FOREIGN KEY (K) REFERENCES P ON DELETE CASCADE")
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run("DELETE FROM P")
    assert log(logged) == [(1, "I"), (1, "D")]


def test_truncate_and_definitions_fire_nothing(logged: Sql) -> None:
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run("ALTER TABLE T ADD (W INTEGER)")
    logged.run("ALTER TABLE T ALTER (V NVARCHAR(30))")
    logged.run("CREATE TABLE C LIKE T WITH DATA")
    logged.run("TRUNCATE TABLE T")
    assert log(logged) == [(1, "I")]


def test_a_statement_and_a_transaction_take_their_log_back(logged: Sql, database: Database) -> None:
    logged.run("INSERT INTO T VALUES (1, 'a')")
    assert (
        logged.code("INSERT INTO T SELECT 3 - K, 'b' FROM (SELECT 1 AS K FROM DUMMY UNION SELECT 2 FROM DUMMY)") == 301
    )
    assert log(logged) == [(1, "I")]
    writer = transacting(database)
    writer.run("INSERT INTO T VALUES (2, 'b')")
    writer.run("SAVEPOINT P")
    writer.run("INSERT INTO T VALUES (3, 'c')")
    writer.run("ROLLBACK TO SAVEPOINT P")
    assert log(writer) == [(1, "I"), (2, "I")]
    writer.session.rollback()
    assert log(logged) == [(1, "I")]


def test_a_batch_logs_its_good_rows(logged: Sql) -> None:
    rows = [(1, "a"), (2, "b"), (1, "twice"), (3, "c")]
    statement = logged.prepare("INSERT INTO T VALUES (?, ?)")
    outcome = logged.session.execute(statement, rows, autocommit=True, batch=True)
    assert [error.code for error in outcome.errors] == [301]
    assert log(logged) == [(1, "I"), (2, "I"), (3, "I")]


def test_update_of_columns_and_several_events(sql: Sql) -> None:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, V NVARCHAR(20), W INTEGER)")
    sql.run(f"CREATE TABLE L {LOG}")
    sql.run(body("INSERT INTO L (K, OP) VALUES (:n.K, 'W');", "INSERT OR UPDATE OF W, K"))
    sql.run("INSERT INTO T VALUES (1, 'a', 1)")
    sql.run("UPDATE T SET V = 'b'")
    sql.run("UPDATE T SET W = 2")
    assert log(sql) == [(1, "W"), (1, "W")]
    assert sql.value("SELECT TRIGGER_EVENT FROM TRIGGERS") == "INSERT OR UPDATE"


def test_a_trigger_may_fire_another_one(logged: Sql) -> None:
    logged.run("CREATE TABLE COUNTS (OP NVARCHAR(1) PRIMARY KEY, N INTEGER)")
    logged.run("INSERT INTO COUNTS VALUES ('I', 0)")
    logged.run(
        "CREATE TRIGGER COUNTING AFTER INSERT ON L REFERENCING NEW ROW N FOR EACH ROW"
        " BEGIN UPDATE COUNTS SET N = N + 1 WHERE OP = :n.OP; END"
    )
    logged.many("INSERT INTO T VALUES (?, 'x')", [(1,), (2,), (3,)])
    assert logged.value("SELECT N FROM COUNTS") == 3


def test_triggers_that_fire_each_other_without_end_are_stopped(sql: Sql) -> None:
    sql.run("CREATE TABLE T (K INTEGER)")
    sql.run("CREATE TABLE U (K INTEGER)")
    sql.run(body("INSERT INTO U VALUES (:n.K);"))
    sql.run("CREATE TRIGGER Y AFTER INSERT ON U REFERENCING NEW ROW N BEGIN INSERT INTO T VALUES (:n.K); END")
    assert sql.code("INSERT INTO T VALUES (1)") == 465
    assert sql.value("SELECT COUNT(*) FROM T") == 0


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_statements_of_a_body_run_in_their_order(logged: Sql) -> None:
    logged.run(
        body(
            "DELETE FROM L WHERE K = :n.K; INSERT INTO L (K, OP) VALUES (:n.K, '1');"
            " UPDATE L SET V = :n.V || '!' WHERE OP = '1'; INSERT INTO L (K, OP, V) SELECT K, '2', V FROM L;"
        )
    )
    logged.run("DROP TRIGGER TI")
    logged.run("INSERT INTO T VALUES (1, 'a')")
    assert logged.rows("SELECT OP, V FROM L ORDER BY ID") == [("1", "a!"), ("2", "a!")]


BRANCHES = """
IF :n.K IS NULL OR :n.K < 10 THEN
  IF :n.V = 'deep' THEN INSERT INTO L (K, OP) VALUES (:n.K, 'a'); ELSE INSERT INTO L (K, OP) VALUES (:n.K, 'b'); END IF;
ELSEIF CASE WHEN :n.K > 20 THEN 1 ELSE 0 END = 1 THEN
  UPDATE L SET OP = 'c' WHERE K = 0 OR K = 1;
ELSE
  DELETE FROM L WHERE K = 0;
END IF;
"""


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1, "deep"), [(0, "0"), (2, "0"), (1, "a")]),
        ((1, "flat"), [(0, "0"), (2, "0"), (1, "b")]),
        ((1, None), [(0, "0"), (2, "0"), (1, "b")]),
        ((None, "deep"), [(0, "0"), (2, "0"), (None, "a")]),
        ((21, "x"), [(0, "c"), (2, "0")]),
        ((15, "x"), [(2, "0")]),
    ],
)
def test_if_takes_one_branch(sql: Sql, row: tuple[Any, ...], expected: list[tuple[Any, ...]]) -> None:
    sql.run("CREATE TABLE T (K INTEGER, V NVARCHAR(20))")
    sql.run(f"CREATE TABLE L {LOG}")
    sql.many("INSERT INTO L (K, OP) VALUES (?, '0')", [(0,), (2,)])
    sql.run(body(BRANCHES))
    sql.run("INSERT INTO T VALUES (?, ?)", *row)
    assert log(sql) == expected


def test_before_triggers_and_strings_with_semicolons(sql: Sql) -> None:
    sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY)")
    sql.run(f"CREATE TABLE L {LOG}")
    sql.run(
        "CREATE TRIGGER X BEFORE INSERT ON T REFERENCING NEW ROW N FOR EACH ROW BEGIN SEQUENTIAL EXECUTION"
        " /* END; */ INSERT INTO L (K, OP, V) SELECT COUNT(*), '0', '; END' FROM T WHERE K = :n.K; END;"
    )
    sql.run("INSERT INTO T VALUES (5)")
    assert sql.rows("SELECT K, V FROM L") == [(0, "; END")]


def test_values_are_typed_as_the_columns_are(sql: Sql) -> None:
    sql.run('CREATE TABLE T (D DECIMAL(9,2), "low case" NVARCHAR(20), B VARBINARY(4), A TIMESTAMP)')
    sql.run("CREATE TABLE L (TEXT NVARCHAR(60), H VARBINARY(32), N INTEGER, AT DATE)")
    sql.run(
        'CREATE TRIGGER X AFTER INSERT ON T REFERENCING NEW ROW "new one" FOR EACH ROW BEGIN INSERT INTO L VALUES'
        ' (:"new one".D || :"new one"."low case", HASH_SHA256(:"new one".B), :"new one".D, :"new one".A); END'
    )
    sql.run("INSERT INTO T VALUES (1.5, 'x', X'61', '2024-02-03 04:05:06')")
    text, digest, number, day = sql.rows("SELECT * FROM L")[0]
    assert (text, digest[:4].hex(), number, day) == ("1.50x", "ca978112", 1, "2024-02-03")


REFUSED = [
    (451, body("DELETE FROM T;")),
    (451, body("INSERT INTO L (K) VALUES (1); UPDATE T SET V = 'x' WHERE K = :n.K;")),
    (259, body("INSERT INTO NOWHERE (K) VALUES (1);")),
    (259, "CREATE TRIGGER X AFTER INSERT ON NOWHERE BEGIN DELETE FROM L; END"),
    (362, "CREATE TRIGGER NOWHERE.X AFTER INSERT ON T BEGIN DELETE FROM L; END"),
    (260, body("INSERT INTO L (NOPE) VALUES (1);")),
    (260, body("INSERT INTO L (K) VALUES (:n.NOPE);")),
    (260, body("INSERT INTO L (K) VALUES (K);")),
    (260, body("UPDATE L SET OP = 'x' WHERE K = N.K;")),
    (260, body("INSERT INTO L (K) VALUES (1);", "UPDATE OF NOPE")),
    (446, body("DELETE FROM L;", name="TI")),
    (467, body("INSERT INTO L (K) VALUES (?);")),
    (396, body("INSERT INTO L (ID) VALUES (1);")),
    (268, body("INSERT INTO L (K, OP) VALUES (:n.K);")),
    (257, body("")),
    (257, body("DELETE FROM L")),
    (257, body("DELETE FROM L; END; DELETE FROM L;")),
    (257, body("INSERT INTO L (K) VALUES (:n);")),
    (257, body("INSERT INTO L (K) VALUES (:n.);")),
    (257, body("INSERT INTO L (K) VALUES (1), (2);")),
    (257, body("IF :n.K = 1 THEN INSERT INTO L (K) VALUES (1), (2); END IF;")),
    (257, body("IF :n.K = 1 THEN DELETE FROM L; END;")),
    (257, body("IF THEN DELETE FROM L; END IF;")),
    (257, body("IF 1 = 1) OR (1 = 1 ORDER BY 1 THEN DELETE FROM L; END IF;")),
    (257, "CREATE TRIGGER X AFTER INSERT ON T BEGIN DELETE FROM L;"),
    (257, "CREATE TRIGGER X AFTER INSERT ON T"),
    (257, "CREATE TRIGGER X AFTER TRUNCATE ON T BEGIN DELETE FROM L; END"),
    (257, "CREATE TRIGGER X AFTER INSERT OR INSERT ON T BEGIN DELETE FROM L; END"),
    (257, "CREATE TRIGGER X INSERT ON T BEGIN DELETE FROM L; END"),
    (257, body("DELETE FROM L;", rows="NEW ROW N, NEW ROW M")),
    (7, body("DELETE FROM L;", rows="OLD ROW O")),
    (7, body("DELETE FROM L;", "DELETE")),
    (7, body("DELETE FROM L;", rows="NEW TABLE N")),
    (7, body("INSERT INTO L (K) VALUES (:m.K);")),
    (7, body("n.V = 'x';")),
    (7, body("DECLARE X INTEGER;")),
    (7, body("SELECT 1 FROM DUMMY;")),
    (7, body("UPSERT L (K) VALUES (1);")),
    (7, body("TRUNCATE TABLE L;")),
    (7, body("IF (SELECT COUNT(*) FROM L) = 0 THEN DELETE FROM L; END IF;")),
    (7, body("INSERT INTO B (ID) VALUES (:n.K);")),
    (7, "CREATE TRIGGER X AFTER INSERT ON T FOR EACH STATEMENT BEGIN DELETE FROM L; END"),
    (7, "CREATE TRIGGER X INSTEAD OF INSERT ON T BEGIN DELETE FROM L; END"),
    (7, "CREATE TRIGGER X AFTER INSERT ON V BEGIN DELETE FROM L; END"),
    (7, "CREATE TRIGGER X AFTER INSERT ON #TEMPORARY BEGIN DELETE FROM L; END"),
    (259, body("INSERT INTO #TEMPORARY VALUES (1);")),
    (7, body("INSERT INTO G VALUES (1);")),
    (7, body("IF 1 = 1 THEN " * 17 + "DELETE FROM L; " + "END IF; " * 17)),
    (2048, body("DELETE FROM L; " * 201)),
    (2048, body("DELETE FROM L WHERE OP = '" + "x" * 50_000 + "';")),
    (445, "DROP TRIGGER NOWHERE"),
    (445, "ALTER TABLE T DISABLE TRIGGER NOWHERE"),
    (258, "CREATE TRIGGER SYS.X AFTER INSERT ON T BEGIN DELETE FROM L; END"),
]


@pytest.mark.parametrize(("code", "text"), REFUSED, ids=[f"{code} {text[:90]}" for code, text in REFUSED])
def test_what_is_wrong_or_not_there_is_refused(logged: Sql, code: int, text: str) -> None:
    logged.run("CREATE VIEW V AS SELECT * FROM T")
    logged.run("CREATE TABLE B (ID BIGINT GENERATED BY DEFAULT AS IDENTITY, K INTEGER)")
    logged.run("CREATE LOCAL TEMPORARY TABLE #TEMPORARY (K INTEGER)")
    logged.run("CREATE GLOBAL TEMPORARY TABLE G (K INTEGER)")
    assert logged.code(text) == code
    assert logged.value("SELECT COUNT(*) FROM TRIGGERS") == 3
    logged.run("INSERT INTO T VALUES (1, 'a')")
    assert log(logged) == [(1, "I")]


# --- definitions ------------------------------------------------------------------------------------------------------


def test_the_catalogue_describes_triggers(logged: Sql) -> None:
    found = logged.rows(
        "SELECT SCHEMA_NAME, TRIGGER_NAME, OWNER_NAME, SUBJECT_TABLE_SCHEMA, SUBJECT_TABLE_NAME, TRIGGER_ACTION_TIME,"
        " TRIGGER_EVENT, TRIGGERED_ACTION_LEVEL, IS_VALID, IS_ENABLED FROM SYS.TRIGGERS ORDER BY TRIGGER_NAME"
    )
    place = ("OWL", "S", "T", "AFTER")
    assert found == [
        ("S", f"T{event[0]}", *place, event, "ROW", "TRUE", "TRUE") for event in ("DELETE", "INSERT", "UPDATE")
    ]
    assert logged.value("SELECT DEFINITION FROM TRIGGERS WHERE TRIGGER_NAME = 'TI'") == INSERTED


def test_dropped_replaced_and_disabled_triggers(logged: Sql) -> None:
    logged.run("DROP TRIGGER S.TD")
    logged.run(INSERTED.replace("CREATE", "CREATE OR REPLACE").replace("'I'", "'R'"))
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run("ALTER TABLE T DISABLE TRIGGER TU")
    logged.run("UPDATE T SET V = 'b'")
    logged.run("ALTER TABLE T ENABLE TRIGGER")
    logged.run("UPDATE T SET V = 'c'")
    logged.run("DELETE FROM T")
    assert log(logged) == [(1, "R"), (1, "U")]
    logged.run("DROP TABLE T")
    assert logged.value("SELECT COUNT(*) FROM TRIGGERS") == 0
    logged.run("CREATE TABLE T (K INTEGER)")
    logged.run("INSERT INTO T VALUES (1)")
    assert log(logged) == [(1, "R"), (1, "U")]


@pytest.mark.parametrize(
    ("breaking", "mending"),
    [
        ("RENAME TABLE L TO GONE", "RENAME TABLE GONE TO L"),
        ("DROP TABLE L", f"CREATE TABLE L {LOG}"),
        ("RENAME COLUMN L.OP TO GONE", "RENAME COLUMN L.GONE TO OP"),
        ("RENAME COLUMN T.K TO GONE", "RENAME COLUMN T.GONE TO K"),
        ("ALTER TABLE L DROP (OP)", "ALTER TABLE L ADD (OP NVARCHAR(1))"),
    ],
)
def test_a_trigger_that_cannot_run_makes_the_statement_fail(logged: Sql, breaking: str, mending: str) -> None:
    logged.run("INSERT INTO T VALUES (1, 'a')")
    logged.run(breaking)
    with pytest.raises(HanaError, match=r"Cannot execute trigger: S\.TI") as caught:
        logged.run("INSERT INTO T VALUES (2, 'b')")
    assert (caught.value.code, caught.value.rolls_back) == (465, False)
    assert logged.code("DELETE FROM T") == 465
    assert logged.value("SELECT COUNT(*) FROM TRIGGERS WHERE IS_VALID = 'FALSE'") == 3
    assert logged.value("SELECT COUNT(*) FROM T") == 1
    logged.run("TRUNCATE TABLE T")
    logged.run(mending)
    logged.run("INSERT INTO T VALUES (2, 'b')")
    assert logged.column("SELECT K FROM L WHERE OP = 'I'")[-1:] == [2]
    assert logged.value("SELECT COUNT(*) FROM TRIGGERS WHERE IS_VALID = 'TRUE'") == 3


def test_a_prepared_statement_fires_what_has_been_made_since(sql: Sql) -> None:
    sql.run("CREATE TABLE T (K INTEGER)")
    sql.run("CREATE TABLE L (K INTEGER)")
    prepared = sql.prepare("INSERT INTO T VALUES (?)")
    for key in (1, 2):
        sql.session.execute(prepared, [(key,)], autocommit=True)
        if key == 1:
            sql.run(body("INSERT INTO L VALUES (:n.K);"))
    assert sql.column("SELECT K FROM L") == [2]


def test_triggers_outlive_the_emulator_and_go_with_their_schema(tmp_path: Any) -> None:
    for start in range(2):
        opened = open_database(tmp_path)
        sql = Sql(opened.connect("OWL"))
        if not start:
            sql.run("CREATE SCHEMA FAR")
            sql.run("CREATE TABLE T (K INTEGER)")
            sql.run("CREATE TABLE L (K INTEGER)")
            sql.run(body("INSERT INTO L VALUES (:n.K);", name="FAR.X"))
        sql.run("INSERT INTO T VALUES (?)", start)
        if start:
            assert sql.code("DROP SCHEMA FAR") == 419
            sql.run("DROP SCHEMA FAR CASCADE")
            sql.run("INSERT INTO T VALUES (9)")
            assert sql.column("SELECT K FROM L ORDER BY K") == [0, 1]
        opened.close()


# --- privileges -------------------------------------------------------------------------------------------------------


def test_a_trigger_needs_a_right_on_its_table_and_those_of_its_body(logged: Sql, database: Database) -> None:
    logged.run('CREATE USER GUEST PASSWORD "Secret-1" NO FORCE_FIRST_PASSWORD_CHANGE')
    guest = Sql(database.connect("GUEST"))
    guest.run("CREATE TABLE MINE (K INTEGER)")
    text = "CREATE TRIGGER X AFTER INSERT ON S.T REFERENCING NEW ROW N BEGIN INSERT INTO {} (K) VALUES (:n.K); END"
    assert guest.code(text.format("MINE")) == 258
    logged.run("GRANT TRIGGER ON S.T TO GUEST")
    assert guest.code(text.format("S.L")) == 258
    assert guest.code(text.replace("TRIGGER X", "TRIGGER S.X").format("MINE")) == 258
    guest.run(text.format("MINE"))
    logged.run("INSERT INTO T VALUES (1, 'a')")  # runs with the rights of the trigger's owner
    assert guest.column("SELECT K FROM MINE") == [1]
    assert guest.column("SELECT TRIGGER_NAME FROM TRIGGERS WHERE OWNER_NAME = 'GUEST'") == ["X"]
    assert guest.code("DROP TRIGGER S.TI") == 258
    assert guest.code("ALTER TABLE S.T DISABLE TRIGGER TI") == 258
    guest.run("DROP TRIGGER X")
    logged.run("INSERT INTO T VALUES (2, 'a')")
    assert guest.column("SELECT K FROM MINE") == [1]


# --- beside other transactions ----------------------------------------------------------------------------------------


@pytest.fixture
def pair(logged: Sql, database: Database) -> tuple[Sql, Sql]:
    return transacting(database), transacting(database)


def test_writers_of_different_rows_log_side_by_side(logged: Sql, pair: tuple[Sql, Sql]) -> None:
    logged.many("INSERT INTO T VALUES (?, 'x')", [(1,), (2,)])
    logged.run("DELETE FROM L")
    first, second = pair
    first.run("UPDATE T SET V = 'a' WHERE K = 1")
    second.run("UPDATE T SET V = 'b' WHERE K = 2")  # parks the first, with its row of the log
    first.run("INSERT INTO T VALUES (3, 'c')")
    assert log(first) == [(1, "U"), (3, "I")]
    assert log(second) == [(2, "U")]
    assert log(logged) == []
    second.session.commit()
    assert log(logged) == [(2, "U")]
    first.session.commit()
    assert log(logged) == [(1, "U"), (2, "U"), (3, "I")]
    assert len(set(logged.column("SELECT ID FROM L"))) == 3


def test_a_late_commit_shows_a_lower_id_and_an_earlier_time(logged: Sql, pair: tuple[Sql, Sql]) -> None:
    """Why a log is consumed as a queue and a watermark lags behind: what is written first may be seen last."""
    first, second = pair
    first.run("INSERT INTO T VALUES (1, 'early')")
    second.run("INSERT INTO T VALUES (2, 'late')")
    second.session.commit()
    ((seen, moment),) = logged.rows("SELECT ID, AT FROM L")
    logged.run("DELETE FROM L WHERE ID <= ?", seen)  # neither waits for the first nor takes its row
    first.session.commit()
    ((id_, earlier, key),) = logged.rows("SELECT ID, AT, K FROM L")
    assert id_ < seen
    assert earlier < moment
    assert key == 1


def test_the_queue_is_emptied_while_others_fill_it(logged: Sql, pair: tuple[Sql, Sql]) -> None:
    writer, reader = pair
    logged.many("INSERT INTO T VALUES (?, 'x')", [(1,), (2,)])
    writer.run("INSERT INTO T VALUES (3, 'x')")
    ids = reader.column("SELECT ID FROM L ORDER BY ID")
    reader.many("DELETE FROM L WHERE ID = ?", [(number,) for number in ids])
    writer.run("INSERT INTO T VALUES (4, 'x')")
    reader.session.commit()
    writer.session.commit()
    assert log(logged) == [(3, "I"), (4, "I")]


def test_a_row_that_a_trigger_changes_is_locked(logged: Sql, pair: tuple[Sql, Sql]) -> None:
    logged.run("CREATE TABLE TOTAL (N INTEGER)")
    logged.run("INSERT INTO TOTAL VALUES (0)")
    logged.run(body("UPDATE TOTAL SET N = N + 1;"))
    first, second = pair
    first.run("INSERT INTO T VALUES (1, 'a')")
    waiting = Background(lambda: second.run("INSERT INTO T VALUES (2, 'b')"))
    first.session.commit()
    assert waiting.result() == 1
    second.session.commit()
    assert logged.value("SELECT N FROM TOTAL") == 2
    first.run("INSERT INTO T VALUES (3, 'c')")
    assert second.code("INSERT INTO T VALUES (4, 'd')") == 131
    first.session.commit()
    assert logged.value("SELECT N FROM TOTAL") == 3


def test_a_unique_key_of_the_log_is_waited_for(sql: Sql, database: Database) -> None:
    sql.run("CREATE TABLE T (K INTEGER, C INTEGER)")
    sql.run("CREATE TABLE L (C INTEGER PRIMARY KEY)")
    sql.run(body("INSERT INTO L VALUES (:n.C);"))
    first, second = transacting(database), transacting(database)
    first.run("INSERT INTO T VALUES (1, 7)")
    assert second.code("INSERT INTO T VALUES (2, 7)") == 131
    second.run("INSERT INTO T VALUES (2, 8)")
    first.session.commit()
    assert second.code("INSERT INTO T VALUES (3, 7)") == 301
    second.session.commit()
    assert sql.column("SELECT C FROM L ORDER BY C") == [7, 8]


def test_a_trigger_is_not_made_under_a_running_transaction(logged: Sql, pair: tuple[Sql, Sql]) -> None:
    pair[0].run("INSERT INTO T VALUES (1, 'a')")
    assert logged.code(body("DELETE FROM L;")) == 131
    pair[0].session.commit()
    logged.run(body("DELETE FROM L;"))


@pytest.mark.parametrize("seed", range(6))
def test_the_log_tells_what_became_of_every_row(logged: Sql, database: Database, seed: int) -> None:
    """Three sessions write at random and side by side, each its own keys; some of it is undone. In the order of the
    log, the last word on each key is what the table says, and nothing undone is in it."""
    random = Random(seed)
    sessions = [transacting(database) for _ in range(3)]
    for _ in range(60):
        number = random.randrange(3)
        writer = sessions[number]
        key = 10 * number + random.randrange(4)
        match random.randrange(10):
            case 0 | 1:
                writer.session.commit()
            case 2:
                writer.session.rollback()
            case 3:
                writer.run("SAVEPOINT P")
                writer.run("DELETE FROM T WHERE K BETWEEN ? AND ?", 10 * number, 10 * number + 9)
                writer.run("UPSERT T VALUES (?, 'undone') WITH PRIMARY KEY", key)
                writer.run("ROLLBACK TO SAVEPOINT P")
            case 4 | 5:
                writer.run("DELETE FROM T WHERE K = ?", key)
            case 6:
                writer.run(
                    "UPDATE T SET K = ? WHERE K = ? AND NOT EXISTS (SELECT 1 FROM T WHERE K = ?)", key, key ^ 1, key
                )
            case _:
                writer.run("UPSERT T VALUES (?, ?) WITH PRIMARY KEY", key, f"v{random.randrange(99)}")
    for writer in sessions:
        writer.session.commit()
    last: dict[int, tuple[str, str | None]] = {}
    for key, operation, value in logged.rows("SELECT K, OP, V FROM L ORDER BY ID"):
        last[key] = (operation, value)
    present = {key: value for key, (operation, value) in last.items() if operation != "D"}
    assert present == dict(logged.rows("SELECT K, V FROM T")), f"seed {seed}"
    assert "undone" not in logged.column("SELECT V FROM L WHERE V IS NOT NULL")
    assert len(logged.rows('SELECT DISTINCT "$rowid$" FROM T')) == len(present)
