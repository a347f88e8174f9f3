"""Rows to documents and chunks: identity, digests, metadata names, chunking, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from connector.document.document import (
    Chunker,
    Renderer,
    content_hash,
    document_id,
    metadata_json,
    metadata_names,
    parse_id,
    quarantine_id,
    vector_digest,
)
from connector.errors import ConfigurationError, NoKey, RowRejected, UnknownColumn
from connector.model import ChunkSpec, CollectionSpec, Column, Document, Row, Table, TableRef

# ------------------------------------------------------------------------------------------------------ identity

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEY_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    TEXT,
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**37), max_value=10**37),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.binary(max_size=20),
)
KEYS = st.lists(KEY_VALUES, min_size=1, max_size=4).map(tuple)


def typed(key):
    """Equal only where type and value are equal, as a column's type would tell them apart."""
    return [(type(value), value) for value in key]


@given(KEYS)
@example((Decimal("1E-30"),))
@example((Decimal("-0.00"),))
@example(("\u2028", "\x7f", "\\ud800"))
def test_ids_round_trip(key):
    parsed = parse_id(document_id(key))
    assert typed(parsed) == typed(key)


@given(KEYS, KEYS)
@example(("1",), (1,))
@example((1,), (True,))
@example((1,), (1.0,))
@example((1,), (Decimal(1),))
@example((None,), ("null",))
@example(("a", "b"), ('a","b',))
@example((date(2024, 1, 1),), (datetime(2024, 1, 1),))
@example((b"\x01",), ("01",))
@example((Decimal("123456789012345678901234567890"),), (Decimal("123456789012345678901234567891"),))
def test_no_two_keys_share_an_id(one, other):
    assert (document_id(one) == document_id(other)) == (typed(one) == typed(other))


@given(st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=5))
def test_halves_of_characters_have_ids_too(text):
    assume(text == text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass"))
    id = document_id((text,))
    id.encode()  # can be stored
    assert parse_id(id) == [text]


def test_the_canonical_form_is_compact_json():
    key = ("100", 'A/"1', 1, None, Decimal("12.50"), date(2024, 1, 31), b"\x01\xff", "ü😀")
    id = document_id(key)
    assert id == ('["100","A/\\"1",1,null,{"decimal":"12.5"},{"date":"2024-01-31"},{"bytes":"01ff"},"ü😀"]')
    json.loads(id)
    assert document_id((Decimal("1E+2"), Decimal("1E-50"))) == '[{"decimal":"100"},{"decimal":"1E-50"}]'


def test_trailing_blanks_tell_keys_apart():
    assert document_id(("A ",)) != document_id(("A",))


@pytest.mark.parametrize(
    ("one", "other"), [(Decimal("1.50"), Decimal("1.5")), (0.0, -0.0), (Decimal("1E+2"), Decimal(100))]
)
def test_keys_that_are_equal_for_sql_have_one_id(one, other):
    assert document_id((one,)) == document_id((other,))


@pytest.mark.parametrize("value", [float("nan"), math.inf, Decimal("NaN"), object()])
def test_what_cannot_identify_a_row_is_rejected(value):
    with pytest.raises(RowRejected, match="key column"):
        document_id(("100", value))
    assert quarantine_id(("100", value))


@pytest.mark.parametrize(
    ("text", "fits"), [("x" * 1996, True), ("x" * 1997, False), ("😀" * 998, True), ("😀" * 999, False)]
)
def test_an_id_longer_than_its_column_is_rejected_without_its_text(text, fits):
    if fits:
        assert parse_id(document_id((text,))) == [text]
        return
    with pytest.raises(RowRejected, match="at most 2000") as caught:
        document_id((text,))
    assert "xx" not in str(caught.value)
    assert len(quarantine_id((text,))) < 100
    assert quarantine_id((text,)) != quarantine_id((text + "x",))


@pytest.mark.parametrize("id", ["{}", "1", '[{"a":"b"}]', '[{"date":"x"}]', "[", '[{"date":"2024-01-01","x":"y"}]'])
def test_what_is_no_id_is_refused(id):
    with pytest.raises(ValueError):  # noqa: PT011  (json's own words vary)
        parse_id(id)


# ------------------------------------------------------------------------------------------------ metadata names


def test_odd_names_become_words():
    assert metadata_names(["MTART", "/BIC/AZD", "a b", "1ST", "//", "Größe", "_x"]) == {
        "MTART": "MTART",
        "/BIC/AZD": "BIC_AZD",
        "a b": "a_b",
        "1ST": "_1ST",
        "//": "COLUMN",
        "Größe": "Gr__e",
        "_x": "_x",
    }


def test_names_that_meet_are_told_apart_and_words_keep_theirs():
    assert metadata_names(["a/b", "a b", "a_b"]) == {"a/b": "a_b_2", "a b": "a_b_3", "a_b": "a_b"}


@given(st.lists(st.text(min_size=1, max_size=8), max_size=8))
def test_mapped_names_are_words_and_distinct(columns):
    names = metadata_names(columns)
    assert list(names) == list(dict.fromkeys(columns))
    assert len(set(names.values())) == len(names)
    assert all(name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit() for name in names.values())


# ------------------------------------------------------------------------------------------------------- digests

DOCUMENT = Document("[1]", "text", {"A": 1}, b"t" * 16, b"m" * 16)


def test_a_content_hash_has_a_third_for_text_for_metadata_and_for_the_row():
    base = content_hash(DOCUMENT, 0, 2)
    assert len(base) == 24
    assert len(base + vector_digest(np.ones(3, np.float32))) == 32
    changed = {"text_digest": b"x" * 16, "meta_digest": b"x" * 16, "row_digest": b"x" * 8}
    for third, (name, value) in enumerate(changed.items()):
        other = content_hash(replace(DOCUMENT, **{name: value}), 0, 2)
        same = [base[at : at + 8] == other[at : at + 8] for at in (0, 8, 16)]
        assert same == [at != third for at in range(3)]


def test_a_missing_last_chunk_shows_and_chunks_differ():
    of_two, of_one, second = (content_hash(DOCUMENT, *which) for which in ((0, 2), (0, 1), (1, 2)))
    assert of_two[:8] != of_one[:8]
    assert of_two[:8] != second[:8]
    assert of_two[8:16] != second[8:16]
    assert of_two[16:] != of_one[16:], "the row's part shows a lost chunk without rendering"
    assert of_two[16:] == second[16:]


def test_a_vector_digest_is_of_the_bytes():
    vector = np.array([1.0, 2.0, 3.0], np.float32)
    assert len(vector_digest(vector)) == 8
    assert vector_digest(vector) == vector_digest(np.array([1, 9, 2, 9, 3], np.float32)[::2])
    assert vector_digest(vector) == vector_digest(vector.astype(">f4"))
    assert vector_digest(vector) != vector_digest(np.nextafter(vector, np.float32(9)))


def test_metadata_json_is_canonical_and_total():
    assert metadata_json({"b": 1, "a": "ü"}) == metadata_json({"a": "ü", "b": 1}) == '{"a":"ü","b":1}'
    for odd in ({"a": 2**80}, {"a": object}, {1: "x"}, {"a": float("nan")}, {"a": "\ud800"}):
        assert metadata_json(odd)


# ------------------------------------------------------------------------------------------------------- renderer


class CountingEmbedder:
    """One token per word; splits at words; remembers what it was asked to count."""

    dimension = 3
    model = "words"
    fingerprint = "words-1"
    max_tokens = 10
    database_model = None

    def __init__(self) -> None:
        self.counted: list[list[str]] = []

    def embed_documents(self, texts):
        raise AssertionError("the renderer does not embed")

    embed_query = embed_documents

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        self.counted.append(list(texts))
        return [len(text.split()) for text in texts]

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        words = text.split()
        return [" ".join(words[i : i + max_tokens]) for i in range(0, len(words), max_tokens - overlap)]


TABLE = Table(
    TableRef("S", "MARA"),
    (
        Column("MANDT", "NVARCHAR", 3),
        Column("MATNR", "NVARCHAR", 18),
        Column("MAKTX", "NVARCHAR", 40),
        Column("LTEXT", "NCLOB"),
        Column("ERSDA", "NVARCHAR", 8),
        Column("BRGEW", "DECIMAL", 13, 3),
        Column("NETWR", "DECIMAL", 15, 2),
        Column("WAERS", "NVARCHAR", 5),
        Column("/BIC/N", "INTEGER"),
        Column("RATE", "DOUBLE"),
        Column("VEC", "REAL_VECTOR", 3),
        Column("IMAGE", "BLOB"),
    ),
    primary_key=("MANDT", "MATNR"),
)
SPEC = CollectionSpec(
    "materials",
    TABLE.ref,
    template="{MAKTX}. {LTEXT}",
    metadata=("MATNR", "ERSDA", "/BIC/N", "BRGEW"),
    chunk=ChunkSpec(overlap=2),
)
VALUES = {
    "MANDT": "100",
    "MATNR": "000000000000004711",
    "MAKTX": "Pumpe",
    "LTEXT": "Kreiselpumpe für Wasser",
    "ERSDA": "20240131",
    "BRGEW": Decimal("12.500"),
    "NETWR": Decimal("12.50"),
    "WAERS": "JPY",
    "/BIC/N": 7,
    "RATE": 1.5,
}


def renderer(embedder=None, **changes):
    return Renderer(replace(SPEC, **changes), TABLE, embedder or CountingEmbedder())


def row(**changes):
    values = VALUES | changes
    return Row((values["MANDT"], values["MATNR"]), values)


def test_a_row_becomes_a_document():
    document = renderer().document(row())
    assert document.id == '["100","000000000000004711"]'
    assert document.text == "Pumpe. Kreiselpumpe für Wasser"
    assert document.metadata == {
        "MATNR": "000000000000004711",
        "ERSDA": "2024-01-31",
        "BIC_N": 7,
        "BRGEW": "12.500",
    }
    assert not document.empty


def test_columns_may_be_in_any_order():
    other = row(MAKTX="Ventil")
    rows = [row(), Row(other.key, dict(reversed(other.values.items())))]
    found = renderer().documents(rows)
    assert found == [renderer().document(each) for each in rows]
    assert found[1].text == "Ventil. Kreiselpumpe für Wasser"


def test_the_query_asks_for_what_is_needed_and_no_more():
    query = renderer(where="MANDT = '100'").query
    assert query.table == TABLE.ref
    assert query.key == ("MANDT", "MATNR")
    assert query.columns == ("MAKTX", "LTEXT", "MATNR", "ERSDA", "/BIC/N", "BRGEW")
    assert query.where == "MANDT = '100'"


@pytest.mark.parametrize("blank", [None, "", "   ", "\0", "\n"])
def test_a_row_without_text_is_empty(blank):
    document = renderer(template="Material: {MAKTX}. {LTEXT}").document(row(MAKTX=blank, LTEXT=blank))
    assert document.empty
    assert renderer().chunks_of([document])[0] == []


def test_an_amount_follows_the_decimals_of_its_currency():
    assert renderer(template="{MAKTX}: {NETWR} {WAERS}").document(row()).text == "Pumpe: 1250 JPY"
    assert renderer(template="{MAKTX}: {NETWR} {WAERS}").document(row(WAERS="EUR")).text == "Pumpe: 12.50 EUR"
    assert renderer(template="{MAKTX}: {NETWR} {WAERS}").document(row(NETWR=None)).text == "Pumpe"
    assert renderer(template="{NETWR}, {WAERS}").document(row()).text == "12.5, JPY"


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"template": "{MAKTXX}"}, UnknownColumn, r"`template`.*'MAKTXX'.*'MAKTX'"),
        ({"metadata": ("mtart",)}, UnknownColumn, r"`metadata`.*'mtart'"),
        ({"metadata": ("matnr",)}, UnknownColumn, r"'MATNR'.*case-sensitive"),
        ({"key": ("MATN",)}, UnknownColumn, r"`key`.*'MATNR'"),
        ({"key": ("LTEXT",)}, NoKey, r"`key`.*NCLOB"),
        ({"key": ("MATNR", "MATNR")}, NoKey, "twice"),
        ({"template": "{VEC}"}, ConfigurationError, r"`template`.*REAL_VECTOR"),
        ({"template": "{IMAGE}"}, ConfigurationError, r"`template`.*BLOB"),
        ({"metadata": ("VEC",)}, ConfigurationError, r"`metadata`.*REAL_VECTOR"),
        ({"template": "{MAKTX"}, ConfigurationError, "position 1"),
        ({"chunk": ChunkSpec(11, 2)}, ConfigurationError, r"`chunk.max_tokens` is 11.*10"),
        ({"chunk": ChunkSpec(8, -1)}, ConfigurationError, r"`chunk.overlap`"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(changes, error, named):
    with pytest.raises(error, match=named):
        renderer(**changes)


def test_a_view_needs_a_key():
    view = replace(TABLE, primary_key=(), is_view=True)
    with pytest.raises(NoKey, match=r"a view.*key = \["):
        Renderer(SPEC, view, CountingEmbedder())
    assert Renderer(replace(SPEC, key=("MATNR",)), view, CountingEmbedder()).key == ("MATNR",)


@pytest.mark.parametrize(
    ("template", "metadata", "changes", "column"),
    [
        ("{RATE}", (), {"RATE": float("nan")}, "RATE"),
        ("{MAKTX}", ("RATE",), {"RATE": float("inf")}, "RATE"),
        ("{NETWR} {WAERS}", (), {"NETWR": Decimal("NaN")}, "NETWR"),
        ("{MAKTX} {BRGEW}", (), {"BRGEW": Decimal("Infinity")}, "BRGEW"),
    ],
)
def test_a_value_that_cannot_be_shown_rejects_its_row_by_column(template, metadata, changes, column):
    with pytest.raises(RowRejected, match=f"'{column}'") as caught:
        renderer(template=template, metadata=metadata).document(row(**changes, MAKTX="Geheim"))
    assert "Geheim" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_metadata_that_would_be_a_document_is_rejected():
    with pytest.raises(RowRejected, match="metadata"):
        renderer(metadata=("LTEXT",)).document(row(LTEXT="x" * 200_000))


def test_halves_of_characters_and_nul_are_cleaned():
    document = renderer(metadata=("MAKTX",)).document(row(MAKTX="a\0b\ud800c", LTEXT=None))
    assert document.text == "a b\ufffdc"
    assert document.metadata["MAKTX"] == "a b\ufffdc"


@given(st.text(st.characters()), st.one_of(st.none(), st.text(st.characters())))
def test_no_text_breaks_the_renderer(short, long):
    document = renderer(metadata=("MAKTX", "LTEXT")).document(row(MAKTX=short, LTEXT=long))
    document.text.encode()
    json.loads(metadata_json(document.metadata))
    renderer().chunks_of([document])[0]


def test_digests_follow_text_chunking_model_and_metadata():
    def digests(embedder=None, values=None, **changes):
        document = renderer(embedder, **changes).document(row(**(values or {})))
        return document.text_digest, document.meta_digest

    base = digests()
    assert base == digests()
    assert [len(digest) for digest in base] == [16, 16]
    other = CountingEmbedder()
    other.fingerprint = "words-2"
    for changed in (
        digests(values={"MAKTX": "Motor"}),
        digests(chunk=ChunkSpec(9, 2)),
        digests(chunk=ChunkSpec(None, 3)),
        digests(other),
    ):
        assert changed[0] != base[0]
        assert changed[1] == base[1]
    assert digests(values={"/BIC/N": 8})[0] == base[0]
    assert digests(values={"/BIC/N": 8})[1] != base[1]
    assert digests(chunk=ChunkSpec(10, 2)) == base, "the default is what the model takes"


# ------------------------------------------------------------------------------------------------------- chunks


def test_a_short_text_is_one_chunk_and_is_not_counted():
    embedder = CountingEmbedder()
    embedder.max_tokens = 100
    made = renderer(embedder, template="{MAKTX}")
    document = made.document(row())
    (chunk,) = made.chunks_of([document])[0]
    assert (chunk.id, chunk.number, chunk.text) == (document.id, 0, "Pumpe")
    assert chunk.content_hash == content_hash(document, 0, 1)
    assert chunk.metadata == document.metadata
    assert embedder.counted == []


def test_long_texts_are_counted_in_one_call_and_split():
    embedder = CountingEmbedder()
    made = renderer(embedder)
    words = [f"w{n}" for n in range(25)]
    documents = [
        made.document(row(MAKTX=text, LTEXT=None)) for text in ("kurz", " ".join(words), "", "zwei " * 5, "x" * 500)
    ]
    chunked = made.chunks_of(documents)
    assert [len(chunks) for chunks in chunked] == [1, 4, 0, 1, 1]
    assert len(embedder.counted) == 1
    assert "kurz" not in embedder.counted[0]
    long = chunked[1]
    assert [chunk.number for chunk in long] == list(range(len(long)))
    assert long[0].text.split() == words[:10]
    assert long[1].text.split()[:2] == words[8:10]
    assert [chunk.content_hash for chunk in long] == [
        content_hash(documents[1], n, len(long)) for n in range(len(long))
    ]


@pytest.mark.parametrize(("limit", "overlap", "kept"), [(10, 2, 2), (10, 5, 5), (10, 32, 5), (1, 32, 0)])
def test_an_overlap_is_at_most_half_a_chunk(limit, overlap, kept):
    made = Chunker(ChunkSpec(limit, overlap), CountingEmbedder())
    assert (made.max_tokens, made.overlap) == (limit, kept)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(9, 60))
def test_a_text_that_is_not_counted_can_have_no_more_tokens_than_its_bytes_and_marks(text, limit):
    embedder = CountingEmbedder()
    embedder.max_tokens = limit
    made = renderer(embedder, template="{MAKTX}")
    document = made.document(row(MAKTX=text))
    made.chunks_of([document])[0]
    if not embedder.counted and document.text:
        assert len(document.text.encode()) + 1 <= limit
