"""What the catalogue says of tables and views, and names that do not fit; over the wire against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connector.errors import NoKey, UnknownColumn, UnknownTable
from connector.hana.catalog import check_columns, describe, did_you_mean, resolve_key
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import CollectionSpec, Column, Table, TableRef
from hana_emulator.testing import Emulator


@pytest.fixture(scope="module")
def pool(emulator: Emulator) -> Iterator[HanaPool]:
    options = ConnectionOptions(
        host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
    )
    with HanaPool(options, 2) as pool:
        yield pool


@pytest.fixture
def schema(pool: HanaPool, hana_schema: str) -> str:
    for sql in (
        f'CREATE COLUMN TABLE "{hana_schema}"."MARA" ("MATNR" NVARCHAR(18), "MANDT" NVARCHAR(3), '
        '"BRGEW" DECIMAL(13,3) NOT NULL, "/BIC/TXT" NCLOB, "MAKTX" NVARCHAR(40) COMMENT \'Short text\', '
        '"V" REAL_VECTOR(3), PRIMARY KEY ("MANDT", "MATNR")) COMMENT \'Materials\'',
        f'CREATE TABLE "{hana_schema}"."Mixed.Case ""x""" ("a b" INTEGER)',
        f'CREATE VIEW "{hana_schema}"."V_MARA" AS SELECT "MATNR", "MAKTX" FROM "{hana_schema}"."MARA"',
    ):
        pool.execute(sql)
    return hana_schema


def test_a_table_with_columns_key_and_comments(pool, schema):
    table = describe(pool, TableRef(schema, "MARA"))
    assert table.comment == "Materials"
    assert not table.is_view
    assert table.primary_key == ("MANDT", "MATNR")
    assert [(column.name, column.type_name) for column in table.columns] == [
        ("MATNR", "NVARCHAR"),
        ("MANDT", "NVARCHAR"),
        ("BRGEW", "DECIMAL"),
        ("/BIC/TXT", "NCLOB"),
        ("MAKTX", "NVARCHAR"),
        ("V", "REAL_VECTOR"),
    ]
    brgew, maktx = table.column("BRGEW"), table.column("MAKTX")
    assert (brgew.length, brgew.scale, brgew.nullable) == (13, 3, False)
    assert (maktx.length, maktx.nullable, maktx.comment) == (40, True, "Short text")


def test_a_view_has_columns_and_no_key(pool, schema):
    view = describe(pool, TableRef(schema, "V_MARA"))
    assert view.is_view
    assert view.primary_key == ()
    assert [(column.name, column.type_name, column.length) for column in view.columns] == [
        ("MATNR", "NVARCHAR", 18),
        ("MAKTX", "NVARCHAR", 40),
    ]


def test_odd_names_are_found_as_they_are(pool, schema):
    table = describe(pool, TableRef(schema, 'Mixed.Case "x"'))
    assert [column.name for column in table.columns] == ["a b"]
    assert table.primary_key == ()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MARAA", r"Did you mean 'MARA'"),
        ("mara", r"Did you mean 'MARA'\? Names are case-sensitive"),
        ("V_MAR", r"'V_MARA'"),
        ("ZZZZZZZZ", r"SELECT on it"),
        ("MARA'; DROP TABLE X --", r"no table or view"),
    ],
)
def test_an_unknown_table_comes_with_the_nearest_names(pool, schema, name, hint):
    with pytest.raises(UnknownTable, match=hint):
        describe(pool, TableRef(schema, name))


def test_an_unknown_schema_is_told_as_such(pool, schema):
    with pytest.raises(UnknownTable, match=rf"no schema '{schema.lower()}'.*Did you mean '{schema}'"):
        describe(pool, TableRef(schema.lower(), "MARA"))


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("MAKTX", ["MAKT", "EQUNR"], " Did you mean 'MAKT'?"),
        ("maktx", ["MAKTX"], " Did you mean 'MAKTX'? Names are case-sensitive."),
        ("X", ["ABCDEF"], ""),
        ("X", [], ""),
        ("MATN", ["MATNR", "MATN1", "MATN2", "MATN3"], None),
    ],
)
def test_did_you_mean(name, known, hint):
    said = did_you_mean(name, known)
    assert said == hint if hint is not None else said.count(" or ") == 2


TABLE = Table(
    TableRef("S", "T"), (Column("A", "NVARCHAR", 3), Column("L", "NCLOB"), Column("V", "REAL_VECTOR")), ("A",)
)


def test_names_are_checked_in_the_setting_where_they_stand():
    check_columns(TABLE, ["A", "L"], "template")
    with pytest.raises(UnknownColumn, match=r"`metadata`: S\.T has no column 'a'\. Did you mean 'A'"):
        check_columns(TABLE, ["A", "a"], "metadata")


def spec(*key: str) -> CollectionSpec:
    return CollectionSpec("c", TABLE.ref, "{A}", key=key)


def test_the_key_is_the_configured_one_else_the_primary_key():
    assert resolve_key(spec(), TABLE) == ("A",)
    wide = Table(TABLE.ref, (*TABLE.columns, Column("B", "INTEGER")), ("A",))
    assert resolve_key(spec("B", "A"), wide) == ("B", "A")


@pytest.mark.parametrize(
    ("table", "key", "error", "named"),
    [
        (Table(TABLE.ref, TABLE.columns, is_view=True), (), NoKey, r"S\.T is a view.*key = \["),
        (Table(TABLE.ref, TABLE.columns), (), NoKey, "without a primary key"),
        (TABLE, ("B",), UnknownColumn, "`key`"),
        (TABLE, ("L",), NoKey, "`key`.*NCLOB"),
        (TABLE, ("V",), NoKey, "`key`.*REAL_VECTOR"),
        (TABLE, ("A", "A"), NoKey, "twice"),
    ],
)
def test_a_key_that_cannot_serve_is_refused(table, key, error, named):
    with pytest.raises(error, match=named):
        resolve_key(spec(*key), table)
