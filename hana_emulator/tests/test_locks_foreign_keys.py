"""Row locks and foreign keys together: children and parents of open transactions, and cascades that are parked."""

from __future__ import annotations

import pytest

from emulator_background import Background
from emulator_sql import Sql, transacting
from hana_emulator.sql.database import Database


@pytest.fixture
def a(patient: Database) -> Sql:
    sql = transacting(patient)
    sql.run("CREATE TABLE P (K INTEGER PRIMARY KEY, N NVARCHAR(9))")
    sql.run("CREATE TABLE C (I INTEGER PRIMARY KEY, K INTEGER REFERENCES P ON UPDATE CASCADE ON DELETE CASCADE)")
    sql.run("CREATE TABLE R (I INTEGER PRIMARY KEY, K INTEGER REFERENCES P, CHECK (I < 100))")
    sql.run("CREATE TABLE O (I INTEGER PRIMARY KEY)")
    sql.many("INSERT INTO P VALUES (?, ?)", [(1, "one"), (2, "two"), (3, "three")])
    sql.many("INSERT INTO C VALUES (?, ?)", [(10, 1), (11, 1), (12, 2)])
    sql.session.commit()
    return sql


@pytest.fixture
def b(a: Sql, patient: Database) -> Sql:
    return transacting(patient)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_parent_whose_child_is_not_committed_is_not_deleted_before(a: Sql, b: Sql, end: str) -> None:
    a.run("INSERT INTO R VALUES (1, 3)")
    deleting = Background(lambda: b.run("DELETE FROM P WHERE K = 3"))
    deleting.assert_waits()
    getattr(a.session, end)()
    if end == "commit":
        assert deleting.code() == 462
    else:
        assert deleting.result() == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_child_of_a_parent_that_is_going_waits(a: Sql, b: Sql, end: str) -> None:
    a.run("DELETE FROM P WHERE K = 3")
    inserting = Background(lambda: b.run("INSERT INTO R VALUES (1, 3)"))
    inserting.assert_waits()
    getattr(a.session, end)()
    if end == "commit":
        assert inserting.code() == 461
    else:
        assert inserting.result() == 1


def test_a_cascade_comes_back_from_parking_as_it_was(a: Sql, b: Sql) -> None:
    a.run("UPDATE P SET K = 9 WHERE K = 1")
    a.run("DELETE FROM P WHERE K = 2")
    a.run("INSERT INTO R VALUES (5, 9)")
    for number in range(3):  # each parks the other
        b.run("INSERT INTO O VALUES (?)", number)
        a.run("INSERT INTO R VALUES (?, 3)", 50 + number)
    b.session.commit()
    a.session.commit()
    assert b.rows("SELECT K FROM P ORDER BY K") == [(3,), (9,)]
    assert b.rows("SELECT I, K FROM C ORDER BY I") == [(10, 9), (11, 9)]
    assert b.rows("SELECT I, K FROM R ORDER BY I") == [(5, 9), (50, 3), (51, 3), (52, 3)]
    assert b.column("SELECT COUNT(*) FROM O") == [3]


def test_constraints_hold_again_after_parking(a: Sql, b: Sql) -> None:
    a.run("UPDATE P SET N = 'uno' WHERE K = 1")
    b.run("INSERT INTO O VALUES (1)")
    a.run("UPDATE P SET N = 'eins' WHERE K = 1")
    assert a.code("INSERT INTO R VALUES (100, 1)") == 677
    assert a.code("INSERT INTO R VALUES (1, 77)") == 461
    assert b.code("INSERT INTO R VALUES (2, 77)") == 461
    a.session.commit()
    b.session.commit()
    assert b.rows("SELECT N FROM P WHERE K = 1") == [("eins",)]


def test_a_cascade_waits_for_a_child_that_another_has_changed(a: Sql, b: Sql) -> None:
    a.run("UPDATE C SET K = 3 WHERE I = 12")
    deleting = Background(lambda: b.run("DELETE FROM P WHERE K = 2"))
    deleting.assert_waits()
    a.session.commit()
    assert deleting.result() == 1
    b.session.commit()
    assert a.rows("SELECT I, K FROM C WHERE I = 12") == [(12, 3)]
