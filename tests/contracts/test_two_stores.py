"""The two stores side by side, given the same: the same hits in the same order with the same scores."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import BadFilter, ConnectorError
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Chunk, Filter, Hit
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore

DIMENSION = 12
_names = itertools.count(1)


class Model:
    """Stores ask an embedder for its stamp only."""

    model, fingerprint, dimension, max_tokens = "model", "fingerprint", DIMENSION, 10
    database_model = None


@pytest.fixture(scope="module")
def stores(emulator, tmp_path_factory) -> Iterator[tuple[VectorStore, VectorStore]]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with ExitStack() as stack:
        pool = stack.enter_context(HanaPool(ConnectionOptions(**login, encrypt=False), size=2))
        pool.execute('CREATE SCHEMA "BOTH"')
        stack.callback(pool.execute, 'DROP SCHEMA "BOTH" CASCADE')
        local = LocalStore(tmp_path_factory.mktemp("both") / "store")
        stack.callback(local.close)
        yield local, HanaStore(pool, "BOTH")


def unit(seed: int, count: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def fill(stores: tuple[VectorStore, ...], chunks: list[Chunk], vectors: np.ndarray) -> str:
    name = f"both-{next(_names)}"
    for store in stores:
        store.open(name, Model())
        with store.lease(name, "test", 5) as lease:
            store.apply(lease, ChangeSet(chunks, vectors))
    return name


def found(store: VectorStore, name: str, query: np.ndarray, k: int, where: Filter | None) -> list[Hit] | str:
    """The hits, or the name of the error: both must be the same in both stores."""
    try:
        return store.view(name).search(query, k, where)
    except ConnectorError as error:
        return type(error).__name__


def assert_same(stores: tuple[VectorStore, VectorStore], name: str, query: np.ndarray, k: int, where: Filter | None):
    ours, theirs = (found(store, name, query, k, where) for store in stores)
    if isinstance(ours, str) or isinstance(theirs, str):
        assert ours == theirs
        return
    assert [(hit.id, hit.number, hit.text, hit.metadata) for hit in ours] == [
        (hit.id, hit.number, hit.text, hit.metadata) for hit in theirs
    ]
    np.testing.assert_allclose([hit.score for hit in ours], [hit.score for hit in theirs], atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ ranking


@pytest.fixture(scope="module")
def many(stores) -> str:
    """300 documents of one to four chunks."""
    chosen = random.Random(7)
    chunks = [
        Chunk(f'["{document:03}"]', number, f"text {document} {number}", {"D": document, "E": document % 5}, bytes(32))
        for document in range(300)
        for number in range(chosen.randint(1, 4))
    ]
    return fill(stores, chunks, unit(1, len(chunks)))


@pytest.mark.parametrize("k", [1, 10, 300, 2000, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 57, 299, 301))])
@pytest.mark.parametrize("where", [None, {"E": 3}, {"D": {"$between": [100, 120]}}, {"D": -1}], ids=str)
def test_the_same_top_k(stores, many, k: int, where: Filter | None):
    for query in unit(k, 3):
        assert_same(stores, many, query, k, where)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_the_length_of_a_query_does_not_matter(stores, many, factor: float):
    (query,) = unit(99, 1)
    for store in stores:
        short = store.view(many).search((query * factor).astype(np.float32), 5)
        assert [hit.id for hit in short] == [hit.id for hit in store.view(many).search(query, 5)]
        assert all(-1.00001 <= hit.score <= 1.00001 for hit in short)


@pytest.mark.parametrize("k", [0, -1])
def test_nothing_asked_for_nothing_given(stores, many, k: int):
    assert [store.view(many).search(unit(1, 1)[0], k) for store in stores] == [[], []]


# ------------------------------------------------------------------------------------------------------------ filters

texts = st.text(st.sampled_from("aAbB %_*?[]^-'\"\\.\n\t漢😀é5"), max_size=6)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.integers(-5, 5), st.floats(-1e9, 1e9), texts
)
metadatas = st.fixed_dictionaries(
    {}, optional={"T": st.one_of(st.none(), texts), "N": st.integers(-5, 5), "X": scalars}
)
tables = st.lists(metadatas, min_size=1, max_size=12)
operators = st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"])


def terms(field: str, operands: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(operands, min_size=1, max_size=3)
    return st.one_of(
        operands.map(lambda value: {field: value}),
        st.tuples(operators, operands).map(lambda p: {field: {p[0]: p[1]}}),
        st.tuples(st.sampled_from(["$in", "$nin"]), several).map(lambda p: {field: {p[0]: p[1]}}),
        st.tuples(operands, operands).map(lambda p: {field: {"$between": list(p)}}),
    )


leaves = st.one_of(
    terms("T", texts),
    terms("N", st.integers(-6, 6)),
    terms("X", scalars.filter(lambda value: value is not None)),
    texts.map(lambda pattern: {"T": {"$like": pattern}}),
    texts.map(lambda phrase: {"T": {"$contains": phrase}}),
    st.sampled_from("TNX").map(lambda field: {field: None}),
    st.sampled_from("TNX").map(lambda field: {field: {"$ne": None}}),
)
wheres = st.one_of(
    leaves,
    st.tuples(st.sampled_from(["$and", "$or"]), st.lists(leaves, min_size=1, max_size=3)).map(lambda p: {p[0]: p[1]}),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables, chosen=st.lists(wheres, min_size=1, max_size=6))
def test_generated_filters_over_generated_rows(stores, rows: list[dict[str, Any]], chosen: list[dict[str, Any]]):
    chunks = [Chunk(f"[{place}]", 0, f"text {place}", row, bytes(32)) for place, row in enumerate(rows)]
    name = fill(stores, chunks, unit(3, len(chunks)))
    for where in chosen:
        assert_same(stores, name, unit(5, 1)[0], 100, where)


@pytest.mark.parametrize(
    "where",
    [
        {"N": {"$foo": 1}},
        {"$xor": []},
        {"$and": []},
        {"N": {"$in": []}},
        {"N": {"$between": [1]}},
        {"N": {"$between": [1, "a"]}},
        {"T": {"$like": 5}},
        {"T": {"$contains": None}},
        {"": 1},
        {"a b": 1},
        {"a'b": 1},
        {"N": {"$eq": float("nan")}},
        {"N": {"$eq": float("inf")}},
        {"N": [1, 2]},
        {"N": {"$eq": 1, "$gt": 0}},
    ],
    ids=str,
)
def test_the_same_filters_are_refused(stores, many, where: Any):
    for store in stores:
        with pytest.raises(BadFilter):
            store.view(many).search(unit(1, 1)[0], 3, where)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables, chosen=st.lists(wheres, min_size=1, max_size=6))
def test_both_ways_to_search_agree_on_filters(stores, rows: list[dict[str, Any]], chosen: list[dict[str, Any]]):
    """Every text holds the word, so each admits exactly what the filter admits; hybrid is made of the two."""
    chunks = [Chunk(f"[{place}]", 0, f"text {place}", row, bytes(32)) for place, row in enumerate(rows)]
    name = fill(stores, chunks, unit(3, len(chunks)))
    for where in chosen:
        for store in stores:
            near = found(store, name, unit(5, 1)[0], 100, where)
            worded = by_words(store, name, "text", 100, where)
            assert admitted(worded) == admitted(near), (type(store).__name__, where)


def admitted(hits: list[Hit] | str) -> set[str] | str:
    return hits if isinstance(hits, str) else {hit.id for hit in hits}


def by_words(store: VectorStore, name: str, text: str, k: int, where: Filter | None) -> list[Hit] | str:
    try:
        return store.view(name).keyword(text, k, where)
    except ConnectorError as error:
        return type(error).__name__


# -------------------------------------------------------------------------------------------------------------- words

vocabulary = st.sampled_from(
    ["pump", "Pump", "seal", "Öl", "H2O", "4711", "004711", "M-4711/2", "A_B", "漢字", "and", "NOT"]
)
sentences = st.lists(vocabulary, max_size=6).map(" ".join)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(sentences, min_size=1, max_size=12), queries=st.lists(sentences, min_size=1, max_size=6))
def test_the_same_texts_hold_the_words(stores, rows: list[str], queries: list[str]):
    chunks = [Chunk(f"[{place}]", 0, text, {}, bytes(32)) for place, text in enumerate(rows)]
    name = fill(stores, chunks, unit(3, len(chunks)))
    for query in queries:
        ours, theirs = (store.view(name).keyword(query, 100) for store in stores)
        assert {hit.id: hit.text for hit in ours} == {hit.id: hit.text for hit in theirs}
        for hits in (ours, theirs):
            assert [(-hit.score, hit.id) for hit in hits] == sorted((-hit.score, hit.id) for hit in hits)
            assert all(hit.score > 0 for hit in hits)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                [
                    '"',
                    "'",
                    "*",
                    "text",
                    "AND",
                    "OR",
                    "NOT",
                    "NEAR(",
                    ")",
                    "-",
                    "%",
                    "_",
                    "\\",
                    "scope:",
                    "c1",
                    "{",
                    "\0",
                ]
            ),
            max_size=12,
        ).map(" ".join),
    )
)
def test_no_search_text_is_syntax(stores, many, text: str):
    """Nothing fails, and rows are found only if the text says "text" or a number of theirs as a word."""
    ours, theirs = ({hit.id for hit in store.view(many).keyword(text, 2000)} for store in stores)
    assert ours == theirs
    if "text" not in text.lower() and not any(char.isdigit() for char in text):
        assert ours == set()


# ----------------------------------------------------------------------------------------------------- what is stored

ODD = [
    ("quotes", 'it\'s "quoted" \\ back', {"K": 'it\'s "quoted" \\ back'}),
    ("emoji", "😀👨‍👩‍👧‍👦", {"K": "😀"}),
    ("line ends", "a\r\nb\tc", {"K": "a\r\nb\tc"}),
    ("long", "ä" * 20_000, {"K": "ä" * 2_000}),
    ("numbers", "1", {"I": 2**53, "F": 0.1, "Z": -0.0, "E": 1e-300, "B": True}),
    ("nothing", "x", {}),
    ("many", "y", {f"F{number}": number for number in range(100)}),
]


@pytest.mark.parametrize(("text", "metadata"), [row[1:] for row in ODD], ids=[row[0] for row in ODD])
def test_text_metadata_and_vector_are_read_as_the_same(stores, text: str, metadata: dict[str, Any]):
    vectors = unit(11, 1)
    name = fill(stores, [Chunk('["id"]', 0, text, metadata, bytes(range(32)))], vectors)
    for store in stores:
        ((record,),) = store.records(name)
        assert (record.id, record.number, record.text, record.metadata) == ('["id"]', 0, text, metadata)
        assert record.content_hash == bytes(range(32))
        assert record.vector is not None
        assert record.vector.tobytes() == vectors[0].tobytes()
