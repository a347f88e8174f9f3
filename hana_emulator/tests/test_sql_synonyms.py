"""Synonyms of tables and views, public and in a schema; procedures stay refused."""

from __future__ import annotations

import pytest

from emulator_sql import Sql, vector


@pytest.fixture
def named(sql: Sql) -> Sql:
    sql.run("CREATE SCHEMA FAR")
    sql.run("CREATE TABLE FAR.T (ID INTEGER PRIMARY KEY, V REAL_VECTOR(2))")
    sql.run("CREATE SYNONYM NEAR FOR FAR.T")
    sql.run("CREATE PUBLIC SYNONYM EVERYWHERE FOR FAR.T")
    return sql


def test_reading_and_writing_through_a_synonym(named: Sql) -> None:
    named.run("INSERT INTO NEAR VALUES (1, ?)", vector(1, 0))
    named.run("INSERT INTO EVERYWHERE (ID) VALUES (2)")
    named.run("UPDATE S.NEAR SET ID = 3 WHERE ID = 2")
    named.run("UPSERT NEAR (ID) VALUES (3) WITH PRIMARY KEY")
    assert named.rows("SELECT NEAR.ID, E.ID FROM NEAR JOIN EVERYWHERE AS E ON NEAR.ID = E.ID ORDER BY 1") == [
        (1, 1),
        (3, 3),
    ]
    assert named.column("SELECT TOP 1 ID FROM NEAR ORDER BY COSINE_SIMILARITY(V, TO_REAL_VECTOR('[1,0]')) DESC") == [1]
    named.run("CREATE TABLE EVERYWHERE (OWN INTEGER)")
    assert named.rows("SELECT * FROM EVERYWHERE") == [], "the schema's own comes first"
    assert named.run("DELETE FROM NEAR") == 2


def test_the_view(named: Sql) -> None:
    named.run("CREATE SYNONYM LATER FOR FAR.NOSUCH")
    found = named.rows(
        "SELECT SCHEMA_NAME, SYNONYM_NAME, OBJECT_SCHEMA, OBJECT_NAME, IS_VALID FROM SYNONYMS ORDER BY 2"
    )
    assert found == [
        ("PUBLIC", "EVERYWHERE", "FAR", "T", "TRUE"),
        ("S", "LATER", "FAR", "NOSUCH", "FALSE"),
        ("S", "NEAR", "FAR", "T", "TRUE"),
    ]


REFUSED = [
    ("CREATE SYNONYM NEAR FOR FAR.T", 330),
    ("CREATE PUBLIC SYNONYM EVERYWHERE FOR FAR.T", 330),
    ("CREATE SYNONYM OWN FOR FAR.T", 288),
    ("CREATE TABLE NEAR (A INTEGER)", 288),
    ("CREATE SYNONYM NOSUCH.X FOR FAR.T", 362),
    ("DROP SYNONYM NOSUCH", 315),
    ("DROP PUBLIC SYNONYM NEAR", 315),
    ("DROP TABLE NEAR", 259),
    ("SELECT * FROM S.EVERYWHERE", 259),
    ("CALL ANY_PROCEDURE(1)", 7),
    ("DO BEGIN SELECT 1 FROM DUMMY; END", 7),
    ("CREATE PROCEDURE P AS BEGIN SELECT 1 FROM DUMMY; END", 7),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_refused(named: Sql, text: str, code: int) -> None:
    named.run("CREATE TABLE OWN (A INTEGER)")
    assert named.code(text) == code


def test_dropped(named: Sql) -> None:
    named.run("DROP SYNONYM NEAR")
    assert named.code("SELECT * FROM NEAR") == 259
    named.run("DROP PUBLIC SYNONYM EVERYWHERE CASCADE")
    assert named.code("SELECT * FROM EVERYWHERE") == 259
    assert named.rows("SELECT * FROM SYNONYMS") == []
