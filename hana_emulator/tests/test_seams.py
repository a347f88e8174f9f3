"""Where parts of the emulator meet: locks and foreign keys, batches and waits, privileges and the newer definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator_background import Background
from emulator_sql import USER, Sql, open_database
from hana_emulator.errors import HanaError
from hana_emulator.sql.database import Database


def transaction(database: Database) -> Sql:
    return Sql(database.connect(USER), autocommit=False)


@pytest.fixture
def patient(database: Database) -> Database:
    """Waits are bounded by the tests."""
    database.lock_timeout = 20.0
    return database


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_batch_that_had_to_wait_writes_each_good_row_once(sql: Sql, patient: Database) -> None:
    a, b = transaction(patient), transaction(patient)
    sql.run("CREATE TABLE K (A INTEGER PRIMARY KEY, B NVARCHAR(3))")
    sql.run("CREATE TABLE N (A INTEGER)")
    a.run("INSERT INTO K VALUES (1, 'a')")
    b.run("INSERT INTO N VALUES (0)")
    statement = b.prepare("INSERT INTO K VALUES (?, ?)")
    batch = [(7, "ok"), (8, "too long"), (1, "b")]
    waiting = Background(lambda: b.session.execute(statement, batch, autocommit=False, batch=True))
    waiting.assert_waits()
    a.session.rollback()
    outcome = waiting.result()
    assert outcome.rows_affected == [1, -3, 1]
    assert [error.code for error in outcome.errors] == [274]
    b.session.commit()
    assert sql.rows("SELECT A FROM K ORDER BY A") == [(1,), (7,)]
    assert sql.value("SELECT COUNT(*) FROM N") == 1


def test_a_key_is_waited_for_though_foreign_keys_lead_to_it(sql: Sql, patient: Database) -> None:
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY, N NVARCHAR(1))")
    sql.run("CREATE TABLE C (A INTEGER REFERENCES P)")
    sql.run("INSERT INTO P VALUES (1, 'p')")
    sql.run("INSERT INTO C VALUES (1)")
    a, b = transaction(patient), transaction(patient)
    a.run("DELETE FROM C")
    a.run("DELETE FROM P")
    waiting = Background(lambda: b.run("INSERT INTO P VALUES (1, 'b')"))
    waiting.assert_waits()
    a.session.commit()
    assert waiting.result() == 1
    b.session.commit()
    assert sql.rows("SELECT * FROM P") == [(1, "b")]


def test_a_new_foreign_key_waits_for_deletions_of_its_parents(sql: Sql, database: Database) -> None:
    sql.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE C (A INTEGER)")
    sql.run("INSERT INTO P VALUES (1)")
    sql.run("INSERT INTO C VALUES (1)")
    a = transaction(database)
    a.run("DELETE FROM P")
    assert sql.code("ALTER TABLE C ADD CONSTRAINT F FOREIGN KEY (A) REFERENCES P (A)") == 131
    a.session.commit()
    assert sql.code("ALTER TABLE C ADD CONSTRAINT F FOREIGN KEY (A) REFERENCES P (A)") == 461


def test_a_privilege_taken_away_while_waiting_is_missed(sql: Sql, patient: Database) -> None:
    sql.run("CREATE TABLE T (A INTEGER)")
    sql.run('CREATE USER GUEST PASSWORD "Secret-1"')
    sql.run("GRANT INSERT ON T TO GUEST")
    a, guest = transaction(patient), Sql(patient.connect("GUEST"), autocommit=False)
    a.run("LOCK TABLE T IN EXCLUSIVE MODE")
    a.run("INSERT INTO T VALUES (5)")
    waiting = Background(lambda: guest.run("INSERT INTO S.T VALUES (6)"))
    waiting.assert_waits()
    sql.run("REVOKE INSERT ON T FROM GUEST")
    a.session.commit()
    assert waiting.code() == 258
    assert sql.rows("SELECT A FROM T") == [(5,)]


def test_searches_know_what_cascades_and_parked_commits_have_changed(sql: Sql, database: Database) -> None:
    sql.run("CREATE TABLE P (K INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE C (K INTEGER PRIMARY KEY, P INTEGER REFERENCES P ON DELETE CASCADE, V REAL_VECTOR(2))")
    add = "INSERT INTO C VALUES (?, ?, TO_REAL_VECTOR('[1,0]'))"
    for key in (1, 2, 3):
        sql.run("INSERT INTO P VALUES (?)", key)
        sql.run(add, key, key)

    def found(session: Sql) -> set[int]:
        text = "SELECT TOP 9 K, COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1,0]')) AS S FROM C ORDER BY S DESC"
        return {row[0] for row in session.rows(text)}

    assert found(sql) == {1, 2, 3}
    sql.run("DELETE FROM P WHERE K = 1")
    assert found(sql) == {2, 3}
    a, b = transaction(database), transaction(database)
    a.run("DELETE FROM P WHERE K = 2")
    b.run("INSERT INTO P VALUES (9)")
    b.run(add, 9, 9)
    assert (found(a), found(b), found(sql)) == ({3}, {2, 3, 9}, {2, 3})
    a.session.commit()
    assert (found(a), found(b), found(sql)) == ({3}, {3, 9}, {3})
    b.session.commit()
    assert (found(a), found(b), found(sql)) == ({3, 9}, {3, 9}, {3, 9})
    a.run("SAVEPOINT X")
    a.run("DELETE FROM P WHERE K = 9")
    b.run("INSERT INTO P VALUES (10)")
    assert (found(a), found(b)) == ({3}, {3, 9})
    a.run("ROLLBACK TO SAVEPOINT X")
    assert found(a) == {3, 9}
    a.session.rollback()
    b.session.rollback()
    sql.run("TRUNCATE TABLE C")
    assert (found(a), found(sql)) == (set(), set())


def test_a_session_keeps_its_rows_of_a_global_temporary_table_when_parked(sql: Sql, database: Database) -> None:
    sql.run("CREATE GLOBAL TEMPORARY TABLE G (A INTEGER PRIMARY KEY, N INTEGER)")
    a, b = transaction(database), transaction(database)
    for session, number in ((a, 1), (b, 2), (a, 3), (b, 4)):
        session.run("UPSERT G VALUES (1, ?) WITH PRIMARY KEY", number)
    assert (a.rows("SELECT * FROM G"), b.rows("SELECT * FROM G")) == ([(1, 3)], [(1, 4)])
    a.session.close()
    b.session.commit()
    assert (b.rows("SELECT * FROM G"), sql.rows("SELECT * FROM G")) == ([(1, 4)], [])


# --- a table that refers to itself ------------------------------------------------------------------------------------


@pytest.fixture
def tree(sql: Sql) -> Sql:
    sql.run("CREATE TABLE R (A INTEGER PRIMARY KEY, P INTEGER REFERENCES R ON UPDATE RESTRICT)")
    sql.run("INSERT INTO R VALUES (1, NULL)")
    sql.run("INSERT INTO R VALUES (2, 1)")
    sql.run("INSERT INTO R VALUES (3, 2)")
    return sql


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("DELETE FROM R", []),
        ("DELETE FROM R WHERE A IN (2, 3)", [(1, None)]),
        ("INSERT INTO R SELECT A + 10, A + 11 FROM R WHERE A < 3 UNION ALL SELECT 13, 11 FROM DUMMY", None),
        ("UPDATE R SET A = A + 10, P = P + 10", [(11, None), (12, 11), (13, 12)]),
        ("UPDATE R SET P = A", [(1, 1), (2, 2), (3, 3)]),
    ],
)
def test_references_to_itself_are_asked_for_after_the_statement(
    tree: Sql, text: str, left: list[tuple[int, int | None]] | None
) -> None:
    before = tree.value("SELECT COUNT(*) FROM R")
    assert tree.run(text) == 3 or left == [(1, None)]
    if left is None:
        assert tree.value("SELECT COUNT(*) FROM R") == before + 3
    else:
        assert tree.rows("SELECT * FROM R ORDER BY A") == left


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("DELETE FROM R WHERE A = 1", 462),
        ("DELETE FROM R WHERE A < 3", 462),
        ("UPDATE R SET A = 9 WHERE A = 1", 462),
        ("UPDATE R SET P = 9 WHERE A = 3", 461),
        ("INSERT INTO R VALUES (4, 5)", 461),
        ("INSERT INTO R SELECT A + 10, A + 12 FROM R", 461),
    ],
)
def test_references_to_itself_are_kept(tree: Sql, text: str, code: int) -> None:
    before = tree.rows("SELECT * FROM R ORDER BY A")
    assert tree.code(text) == code
    assert tree.rows("SELECT * FROM R ORDER BY A") == before


def test_each_row_of_a_batch_is_a_statement_to_a_reference_to_itself(tree: Sql) -> None:
    statement = tree.prepare("INSERT INTO R VALUES (?, ?)")
    outcome = tree.session.execute(statement, [(4, 5), (5, 5), (6, 5)], autocommit=True, batch=True)
    assert outcome.rows_affected == [-3, 1, 1]
    assert [error.code for error in outcome.errors] == [461]


def test_references_to_itself_after_a_renaming_and_when_parked(tree: Sql, database: Database) -> None:
    tree.run("RENAME TABLE R TO Q")
    tree.run("RENAME COLUMN Q.P TO ABOVE")
    assert tree.code("DELETE FROM Q WHERE A = 1") == 462
    a, b = transaction(database), transaction(database)
    a.run("DELETE FROM Q")
    b.run("INSERT INTO Q VALUES (7, NULL)")
    assert a.rows("SELECT A FROM Q") == []
    b.session.commit()
    a.session.commit()
    assert tree.rows("SELECT A FROM Q") == [(7,)]


# --- privileges -------------------------------------------------------------------------------------------------------


@pytest.fixture
def guest(sql: Sql, database: Database) -> Sql:
    """A user with a schema GUEST, beside a schema S with one of everything."""
    for text in (
        "CREATE TABLE T (A INTEGER PRIMARY KEY, B NVARCHAR(10))",
        "INSERT INTO T VALUES (1, 'one')",
        "CREATE SEQUENCE Q",
        "CREATE SYNONYM N FOR T",
        "CREATE PUBLIC SYNONYM EVERYBODYS FOR S.T",
        'CREATE USER GUEST PASSWORD "Secret-1" NO FORCE_FIRST_PASSWORD_CHANGE',
    ):
        sql.run(text)
    return Sql(database.connect("GUEST"))


@pytest.mark.parametrize(
    ("grant", "text"),
    [
        ("SELECT ON S.T", "CREATE TABLE M LIKE S.T WITH DATA"),
        ("SELECT ON S.T", "CREATE LOCAL TEMPORARY TABLE #M LIKE S.T"),
        ("SELECT ON S.T", "SELECT * FROM S.T FOR UPDATE"),
        ("SELECT ON S.T", "SELECT * FROM EVERYBODYS"),
        ("SELECT ON S.T", "EXPLAIN PLAN FOR SELECT * FROM S.N"),
        ("DELETE ON S.T", "EXPLAIN PLAN FOR DELETE FROM S.N"),
        ("INSERT ON S.T", "INSERT INTO EVERYBODYS VALUES (9, 'x')"),
        ("DELETE ON S.T", "LOCK TABLE S.T IN EXCLUSIVE MODE"),
        ("REFERENCES ON S.T", "CREATE TABLE C (A INTEGER REFERENCES S.T)"),
        ("CREATE ANY ON SCHEMA S", "CREATE SEQUENCE S.NEW"),
        ("CREATE ANY ON SCHEMA S", "CREATE SYNONYM S.NEW FOR S.T"),
        ("CREATE ANY ON SCHEMA S", "CREATE GLOBAL TEMPORARY TABLE S.NEW (A INTEGER)"),
        ("ALTER ON SCHEMA S", "ALTER SEQUENCE S.Q RESTART WITH 5"),
        ("DROP ON SCHEMA S", "DROP SEQUENCE S.Q"),
        ("DROP ON SCHEMA S", "DROP SYNONYM S.N"),
        ("SESSION ADMIN", "ALTER SYSTEM CANCEL SESSION '200001'"),
    ],
)
def test_what_else_needs_a_privilege(sql: Sql, guest: Sql, grant: str, text: str) -> None:
    assert guest.code(text) == 258
    sql.run(f"GRANT {grant} TO GUEST")
    guest.session.execute(guest.prepare(text), [()], autocommit=True)


def test_whoever_made_a_sequence_or_synonym_may_drop_it(sql: Sql, guest: Sql) -> None:
    sql.run("GRANT CREATE ANY ON SCHEMA S TO GUEST")
    for kind, name, more in (
        ("SEQUENCE", "S.MINE", ""),
        ("SYNONYM", "S.MINE", "FOR S.T"),
        ("PUBLIC SYNONYM", "MINE", "FOR S.T"),
    ):
        guest.run(f"CREATE {kind} {name} {more}")
        guest.run(f"DROP {kind} {name}")
    assert guest.code("DROP PUBLIC SYNONYM EVERYBODYS") == 258
    sql.run("DROP PUBLIC SYNONYM EVERYBODYS")


def test_a_prepared_definition_stays_in_the_schema_it_was_prepared_in(sql: Sql, guest: Sql) -> None:
    guest.run("CREATE TABLE T (A INTEGER)")
    guest.run("INSERT INTO T VALUES (1)")
    statement = guest.prepare("TRUNCATE TABLE T")
    guest.run("SET SCHEMA S")
    guest.session.execute(statement, [()], autocommit=True)
    assert sql.value("SELECT COUNT(*) FROM S.T") == 1
    assert sql.value("SELECT COUNT(*) FROM GUEST.T") == 0


def test_a_dropped_user_leaves_nothing_that_breaks_others(sql: Sql, guest: Sql) -> None:
    guest.run("CREATE TABLE P (A INTEGER PRIMARY KEY)")
    sql.run("CREATE TABLE C (A INTEGER REFERENCES GUEST.P)")
    assert sql.code("INSERT INTO C VALUES (5)") == 461
    sql.run("DROP USER GUEST CASCADE")
    assert sql.run("INSERT INTO C VALUES (5)") == 1
    sql.run('CREATE USER OTHER PASSWORD "Secret-1"')
    sql.run("CREATE SEQUENCE OTHER.Z")
    assert sql.code("DROP USER OTHER") == 417
    sql.run("DROP USER OTHER CASCADE")
    assert sql.value("SELECT COUNT(*) FROM SYS.SEQUENCES WHERE SCHEMA_NAME = 'OTHER'") == 0


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_what_a_restart_keeps(tmp_path: Path) -> None:
    """Constraints, sequences, owners and grants; no open transaction, no temporary rows. The user it is started with
    may log in, whatever became of him."""
    first = open_database(tmp_path)
    sql = Sql(first.connect(USER))
    for text in (
        "CREATE SEQUENCE Q",
        "CREATE TABLE R (A INTEGER PRIMARY KEY, P INTEGER REFERENCES R, CHECK (A > 0))",
        "CREATE VIEW V AS SELECT A FROM R",
        'CREATE USER GUEST PASSWORD "Secret-1"',
        "CREATE SEQUENCE GUEST.Z",
        "GRANT SELECT ON V TO GUEST",
        "CREATE LOCAL TEMPORARY TABLE #L (A INTEGER)",
        "CREATE GLOBAL TEMPORARY TABLE G (A INTEGER)",
        "INSERT INTO G VALUES (1)",
        f"ALTER USER {USER} DEACTIVATE USER NOW",
    ):
        sql.run(text)
    assert sql.evaluate("Q.NEXTVAL") == 1
    for key in (1, 2):
        transaction(first).run("INSERT INTO R VALUES (?, NULL)", key)
    first.close()
    second = open_database(tmp_path)
    try:
        second.admit(USER, proven=True)
        sql, guest = Sql(second.connect(USER)), Sql(second.connect("GUEST"))
        assert sql.evaluate("Q.NEXTVAL") == 2
        assert (sql.rows("SELECT * FROM R"), sql.rows("SELECT * FROM G")) == ([], [])
        assert (sql.code("INSERT INTO R VALUES (1, 2)"), sql.code("INSERT INTO R VALUES (0, 0)")) == (461, 677)
        assert sql.run("INSERT INTO R VALUES (1, 1)") == 1
        assert sql.code("SELECT * FROM #L") == 259
        assert guest.rows("SELECT * FROM S.V") == [(1,)]
        assert guest.code("DROP SEQUENCE S.Q") == 258
        guest.run("DROP SEQUENCE Z")
    finally:
        second.close()


def test_a_statement_prepared_before_a_change_of_structure_says_its_new_columns(sql: Sql, other: Sql) -> None:
    sql.run("CREATE TABLE T (A INTEGER)")
    sql.run("INSERT INTO T VALUES (1)")
    statement = other.prepare("SELECT * FROM T")
    assert other.session.execute(statement, [()], autocommit=True).columns is None
    sql.run("ALTER TABLE T ADD (B NVARCHAR(3) DEFAULT 'b')")
    outcome = other.session.execute(statement, [()], autocommit=True)
    assert outcome.columns is not None
    assert [column.name for column in outcome.columns] == ["A", "B"]
    assert list(outcome.rows or ()) == [(1, "b")]
    sql.run("DROP TABLE T")
    with pytest.raises(HanaError) as caught:
        other.session.execute(statement, [()], autocommit=True)
    assert caught.value.code == 259
