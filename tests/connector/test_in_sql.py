"""Rows rendered in SQL are those of `Renderer`, byte for byte, on random rows in the emulator."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from connector.document.document import Renderer, content_hash
from connector.document.in_sql import compile_rows
from connector.hana.connection import HanaPool
from connector.hana.source import HanaSource
from connector.hana.statement import Statement
from connector.model import CollectionSpec, DatabaseModel, TableRef
from tests.native import login, native  # noqa: F401 - the fixture

MODEL = SimpleNamespace(
    model="hana:M", fingerprint="M", max_tokens=254, dimension=4, database_model=DatabaseModel("M"), count_tokens=None
)
COLUMNS = """"K" INTEGER, "L" NVARCHAR(20), "X" NVARCHAR(60), "ERDAT" NVARCHAR(8), "ERZET" VARCHAR(6),
"MATNR" NVARCHAR(18), "N10" NVARCHAR(10), "I" BIGINT, "D" DECIMAL(12,3), "W" DECIMAL(9,0), "T" DATE, "F" DOUBLE,
"C" NCLOB, "TSTMP" DECIMAL(15), "BETRAG" DECIMAL(12,2), "WAERS" NVARCHAR(5), "S" TIMESTAMP, "FREE" DECIMAL,
PRIMARY KEY ("K", "L")"""
TEMPLATES = [
    "{X}",
    "  {X} ({ERDAT}), made: {ERZET}. No. {MATNR}, {D} kg; it's {I}% \n",
    "{N10} {W}|{T} — {X} {X}",
    "{I}{T}. Weight: {D} kg, ({X}) [{MATNR}] 'ü'",
]
METADATA = ("X", "ERDAT", "ERZET", "MATNR", "I", "W", "T", "N10", "L")
# Blanks, quotes, control characters, letters of one to four bytes; no unpaired surrogates.
LETTERS = "aZ0%{'\"\\/ \t\n\r\x00\x01\x0b\x1c\x1f\x7f\x85\xa0\u2003\u2028\u3000\ufeffäß水\U0001f600-.,:;()"
WORDS = st.text(LETTERS, max_size=12)
DIGITS = st.text("0123456789", max_size=10)
DAYS = st.dates(date(1, 1, 1), date(9999, 12, 31))


def ends_of(days: st.SearchStrategy[int]) -> st.SearchStrategy[str]:
    """Days by number, real ones or not: the ends of months in leap years and others."""
    years = st.sampled_from([0, 4, 100, 400, 1900, 1996, 2000, 2023, 2024])
    return st.builds("{:04}{:02}{:02}".format, years, st.integers(0, 13), days)


ROW = st.tuples(
    st.integers(-(2**31), 2**31 - 1),
    st.text(LETTERS, max_size=10),
    st.none() | WORDS | st.text(" \t\n\xa0\x01", max_size=4),
    st.none() | ends_of(st.integers(0, 32)) | st.just("00000000") | WORDS.map(lambda text: text[:4]),
    st.none() | st.text("012345679", min_size=6, max_size=6) | st.just("000000") | st.text(" a0", max_size=3),
    st.none() | DIGITS | WORDS | DIGITS.map(lambda text: text.rjust(18, "0")),
    st.none() | DIGITS | DIGITS.map(lambda text: text.rjust(10, "0")) | st.text("0 ", max_size=10),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.decimals(-999_999_999, 999_999_999, places=3) | st.integers(-9, 9).map(lambda n: Decimal(n * 100)),
    st.none() | st.integers(-999_999_999, 999_999_999).map(Decimal),
    st.none() | DAYS,
)


@pytest.fixture(scope="module")
def place(native):  # noqa: F811
    with HanaPool(login(native)) as pool, closing(native.connect(autocommit=True)) as connection:
        cursor = connection.cursor()
        cursor.execute('CREATE SCHEMA "IN_SQL"')
        cursor.execute(f'CREATE TABLE "IN_SQL"."T" ({COLUMNS})')
        cursor.execute("""COMMENT ON COLUMN "IN_SQL"."T"."TSTMP" IS 'UTC time stamp'""")
        yield pool, cursor
        cursor.execute('DROP SCHEMA "IN_SQL" CASCADE')


def renderer_of(pool: HanaPool, template: str, metadata: tuple[str, ...] = METADATA, key: tuple[str, ...] = ()):
    ref = TableRef("IN_SQL", "T")
    table = HanaSource(pool).describe(ref)
    return Renderer(CollectionSpec("c", ref, template, key, metadata=metadata), table, MODEL), table


# Without shrinking, which took minutes of statements: the assertion shows the differing row.
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(rows=st.lists(ROW, min_size=1, max_size=20, unique_by=lambda row: row[:2]), template=st.sampled_from(TEMPLATES))
def test_sql_renders_what_the_renderer_renders(place, rows, template):
    pool, cursor = place
    cursor.execute('DELETE FROM "IN_SQL"."T"')
    marks = ", ".join("?" * len(rows[0]))
    names = '"K", "L", "X", "ERDAT", "ERZET", "MATNR", "N10", "I", "D", "W", "T"'
    cursor.executemany(f'INSERT INTO "IN_SQL"."T" ({names}) VALUES ({marks})', rows)
    renderer, table = renderer_of(pool, template)
    compiled = compile_rows(renderer, table)
    statement = Statement(renderer.query)
    odd = {row[0] for row in pool.read(statement.of_all(compiled.id, compiled.odd))}
    found = {row[:2]: row[2:] for row in pool.read(compiled.select(statement))}
    documents = {
        row.key: document
        for page in HanaSource(pool).pages(renderer.query, 1000)
        for row, document in zip(page, renderer.documents(page), strict=True)
    }
    given_rows = {row[:2]: row for row in rows}
    assert found.keys() == documents.keys() == given_rows.keys()
    for key, (id_, text, meta, hashed, large) in found.items():
        document = documents[key]
        assert (id_ in odd) == any(char < " " for char in key[1])
        assert id_ in odd or id_ == document.id
        rendered = document.text, renderer_json(document), content_hash(document, 0, 1)[:16].hex().upper()
        assert (text, meta, hashed) == rendered, repr(given_rows[key])
        assert not large


def renderer_json(document) -> str:
    from connector.stores.records import metadata_text

    return metadata_text(document.metadata)


def test_columns_of_a_view_may_be_empty_whatever_the_catalogue_says(place):
    pool, cursor = place
    cursor.execute('DELETE FROM "IN_SQL"."T"')
    cursor.execute("""INSERT INTO "IN_SQL"."T" ("K", "L", "X", "I") VALUES (1, 'a', 'b', NULL)""")
    renderer, table = renderer_of(pool, "{X}, weight: {I} kg", ())
    columns = tuple(replace(column, nullable=False) for column in table.columns)
    rows = compile_rows(renderer, replace(table, columns=columns, is_view=True))
    ((_, _, _, text, *_),) = pool.read(rows.select(Statement(renderer.query)))
    assert text == "b"


@pytest.mark.parametrize(("text", "large"), [("x" * 254, 0), ("x" * 255, 1)])
def test_texts_that_may_need_chunks_are_marked(place, text, large):
    pool, cursor = place
    cursor.execute('DELETE FROM "IN_SQL"."T"')
    cursor.execute("""INSERT INTO "IN_SQL"."T" ("K", "L", "X") VALUES (1, 'a', 'b')""")
    renderer, table = renderer_of(pool, text[:-1] + "{X}")
    ((_, _, _, found, _, _, marked),) = pool.read(compile_rows(renderer, table).select(Statement(renderer.query)))
    assert (len(found), marked) == (len(text), large)


@pytest.mark.parametrize(
    ("template", "metadata", "key", "reason"),
    [
        ("{F}", (), (), "column 'F' is a DOUBLE"),
        ("{X}", ("C",), (), "column 'C' is a NCLOB"),
        ("{S}", (), (), "column 'S' is a TIMESTAMP"),
        ("{TSTMP}", (), (), "column 'TSTMP' is a DECIMAL"),
        ("{FREE}", (), (), "column 'FREE' is a DECIMAL"),
        ("{X}", ("D",), (), "'D' in the metadata is a DECIMAL with a scale"),
        ("{BETRAG} {WAERS}", (), (), "decimals of its currency"),
        ("{X}", (), ("T",), "key column 'T' is a DATE"),
        ("{X}{ERDAT}{ERZET}{MATNR}{N10}{I}{D}", (), (), "7 columns that may be empty"),
    ],
)
def test_what_sql_cannot_render_is_named(place, template, metadata, key, reason):
    with pytest.raises(ValueError, match=reason):
        compile_rows(*renderer_of(place[0], template, metadata, key))
