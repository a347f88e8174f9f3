"""What every store promises of rows that are read: by their ids, and as a sample of all; narrowed to what somebody may
see or not. On `local` and on `hana` (the emulator), there with rows that others wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import BadFilter, GenerationChanged, UnknownCollection
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Chunk, Filter, Order, Place, StoredText
from connector.stores import records
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore, View
from hana_emulator.testing import Emulator

DIMENSION = 8
NAME, OTHER, KEYS, ORDERED = "reading", "other", "keys", "ordered"
COUNT = 600
OWNERS = ("A", "B", "C")
WITHIN = {"M": {"$in": ["A"]}}


class Model:
    model, fingerprint, dimension, max_tokens = "model-a", "fingerprint-a", DIMENSION, 10
    database_model = None


def id_of(number: int) -> str:
    return f'["{number:04}","ä😀"]'


def owner_of(number: int) -> str:
    return OWNERS[number % 3]


def chunks_of(number: int) -> list[Chunk]:
    """Every fifth row has three chunks."""
    metadata = {"M": owner_of(number), "N": number}
    count = 3 if number % 5 == 0 else 1
    return [Chunk(id_of(number), at, f"text {at} of {number}", metadata, bytes(32)) for at in range(count)]


ALL = [chunk for number in range(COUNT) for chunk in chunks_of(number)]
VECTORS = np.random.default_rng(5).standard_normal((len(ALL), DIMENSION))
VECTORS = (VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)).astype(np.float32)


SECRET = Chunk('["secret"]', 0, "another collection's", {"M": "A"}, bytes(32))
HOLDING = (
    *('["100","0000001001"]', '["100","1001"]', "[1001]", "[7,1001]"),
    *('["100","10010"]', '["1","x1001"]', "[21001]"),
)
"""Ids that hold 1001: in the first four it is a value."""
KEYED = [
    Chunk(id_, at, f"text {at}", {"M": owner_of(place), "N": place}, bytes(32))
    for place, id_ in enumerate(HOLDING)
    for at in (0, 1)
]

SORTED_VALUES: list[Any] = [
    "9.5",
    10,
    "-3",
    1.5e3,
    "0010",
    None,
    "n/a",
    "",
    True,
    "10",
    2**60,
    "1e2",
    [1],
    "ä",
    "z" * 300,
]
SORTABLE = [
    Chunk(f'["{at:02}"]', number, f"text {number}", {"M": owner_of(at), "V": value, "N": at}, bytes(32))
    for at, value in enumerate(SORTED_VALUES)
    for number in range(1 + at % 2)
]


def fill(store: VectorStore) -> VectorStore:
    for name, chunks in ((OTHER, [SECRET]), (NAME, ALL), (KEYS, KEYED), (ORDERED, SORTABLE)):
        store.open(name, Model())  # type: ignore[arg-type]
        with store.lease(name, "writer", 5) as lease:
            store.apply(lease, ChangeSet(chunks, VECTORS[: len(chunks)]))
    return store


@pytest.fixture(scope="module", params=["local", "hana"])
def store(
    request: pytest.FixtureRequest, emulator: Emulator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VectorStore]:
    """Filled once: nothing here writes."""
    if request.param == "local":
        local = LocalStore(tmp_path_factory.mktemp("reading") / "store")
        yield fill(local)
        local.close()
        return
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "READING"')
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=2) as pool:
        yield fill(HanaStore(pool, "READING"))
    connection.cursor().execute('DROP SCHEMA "READING" CASCADE')
    connection.close()


def expected(number: int) -> list[tuple[str, int, str, dict[str, Any]]]:
    return [(chunk.id, chunk.number, chunk.text, dict(chunk.metadata)) for chunk in chunks_of(number)]


def plain(texts: list[StoredText]) -> list[tuple[str, int, str, dict[str, Any]]]:
    return [(text.id, text.number, text.text, dict(text.metadata)) for text in texts]


# ------------------------------------------------------------------------------------------------------------- by ids

numbers = st.lists(st.integers(0, COUNT + 20), max_size=90)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=numbers, narrowed=st.booleans())
def test_rows_in_the_order_of_their_ids(store: VectorStore, numbers: list[int], narrowed: bool) -> None:
    found = store.view(NAME, row_filter=WITHIN if narrowed else None).texts([id_of(number) for number in numbers])
    there = [n for n in dict.fromkeys(numbers) if n < COUNT and (not narrowed or owner_of(n) == "A")]
    assert plain(found) == [each for number in there for each in expected(number)]


def test_more_ids_than_one_statement_takes(store: VectorStore) -> None:
    ids = [id_of(number) for number in reversed(range(COUNT))]
    assert plain(store.view(NAME).texts(ids)) == [each for n in reversed(range(COUNT)) for each in expected(n)]
    assert store.view(NAME).texts([]) == []


@pytest.mark.parametrize(
    "id_",
    ["", "\0", "\ud800", "x" * 10_000, "😀" * 1001, "'", '["secret"]', "record:", "record:x", "record:" + "9" * 30],
    ids=range(10),
)
def test_whatever_is_no_id_is_not_there(store: VectorStore, id_: str) -> None:
    assert plain(store.view(NAME).texts([id_, id_of(1), id_])) == expected(1)


def test_its_vectors_are_those_of_its_chunks(store: VectorStore) -> None:
    texts = store.view(NAME).texts([id_of(5), id_of(0)])
    wanted = [ALL.index(chunk) for number in (5, 0) for chunk in chunks_of(number)]
    assert np.array_equal(store.view(NAME).vectors(texts), VECTORS[wanted])


def test_what_was_never_there_and_what_is_not_served(store: VectorStore) -> None:
    reads: tuple[Callable[[View], Any], ...] = (lambda view: view.texts([id_of(1)]), lambda view: view.sample(3).chosen)
    for read in reads:
        with pytest.raises(UnknownCollection):
            read(store.view("nobody"))
        with pytest.raises(GenerationChanged):
            read(store.view(NAME, 7))
        assert read(store.view(NAME, 1))


# ----------------------------------------------------------------------------------------------------------- a sample


@pytest.mark.parametrize("within", [None, WITHIN], ids=["all", "some"])
def test_a_sample_of_all_is_all_of_it_by_first_chunks(store: VectorStore, within: Any) -> None:
    sample = store.view(NAME, row_filter=within).sample(COUNT)
    wanted = [n for n in range(COUNT) if within is None or owner_of(n) == "A"]
    assert sorted(plain(sample.chosen), key=lambda one: one[0]) == [expected(number)[0] for number in wanted]
    assert sample.rows == len(wanted)


@pytest.mark.parametrize("within", [None, WITHIN], ids=["all", "some"])
def test_a_smaller_sample_is_the_beginning_of_a_larger_one(store: VectorStore, within: Any) -> None:
    whole, some = (
        store.view(NAME, row_filter=within).sample(150),
        store.view(NAME, row_filter=within).sample(40, texts=False),
    )
    assert [one.record for one in some.chosen] == [one.record for one in whole.chosen[:40]]
    assert some.rows == whole.rows
    assert {one.text for one in some.chosen} == {""}
    assert [one.metadata for one in some.chosen] == [one.metadata for one in whole.chosen[:40]]


def test_a_sample_is_from_all_over(store: VectorStore) -> None:
    """Neither the first rows nor every so-many-th: shares are what they are in the whole, for any period of rows."""
    chosen = store.view(NAME).sample(150).chosen
    assert len({one.id for one in chosen}) == 150
    at = sorted(one.metadata["N"] for one in chosen)
    assert max(np.diff([0, *at, COUNT])) <= 20, "no long stretch is left out"
    for period in (2, 3, 4, 5, 7, 10):
        counts = Counter(number % period for number in at)
        assert min(counts[n] for n in range(period)) > 0.5 * 150 / period, (period, counts)


def test_the_spread_is_even_for_any_numbers() -> None:
    """The formula that both stores have in SQL, over numbers as they come in large and old tables."""
    for first, step in ((1, 1), (1, 3), (10**9, 1), (2**31, 7), (2**40, 44_488)):
        numbers = np.arange(first, first + 20_000 * step, step, dtype=np.int64)
        spread = numbers % records.SPREAD_MODULUS * records.SPREAD_FACTOR % records.SPREAD_MODULUS
        chosen = np.sort(np.argsort(spread)[:1000])
        tenths = np.histogram(chosen, bins=10, range=(0, 20_000))[0]
        assert tenths.min() > 70, (first, step, tenths)


# ------------------------------------------------------------------------------------------------- rows in an order


def as_text(value: Any) -> str | None:
    if value is None or isinstance(value, list):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)[:200]


def as_number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def sorted_rows(order: Order, within: Filter | None) -> list[Place]:
    read = as_number if order.numeric else as_text
    rows: dict[str, Any] = {}
    for chunk in SORTABLE:
        if within is None or chunk.metadata["M"] == "A":
            rows[chunk.id] = None if order.field is None else read(chunk.metadata.get(order.field))
    there = sorted(
        (id_ for id_, value in rows.items() if value is not None or order.field is None), key=lambda id_: id_
    )
    missing = [id_ for id_ in sorted(rows) if id_ not in there]
    if order.field is not None:
        there.sort(key=lambda id_: rows[id_])
    if order.descending:
        there = sorted(reversed(there), key=lambda id_: rows[id_], reverse=True) if order.field else there[::-1]
        missing.reverse()
    return [Place(id_, rows[id_]) for id_ in (*there, *missing)]


ORDERS = [
    Order(field, numeric, down)
    for field, numeric in ((None, False), ("V", True), ("V", False), ("X", True))
    for down in (False, True)
]


@pytest.mark.parametrize("within", [None, WITHIN], ids=["all", "some"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_rows_come_in_an_order_page_by_page(store: VectorStore, order: Order, within: Any) -> None:
    """Each row once, whatever its chunks; rows without a value last, so never skipped."""
    view, wanted = store.view(ORDERED, row_filter=within), sorted_rows(order, within)
    assert view.places(100, order) == wanted
    for size in (1, 4):
        found: list[Place] = []
        while page := view.places(size, order, found[-1] if found else None):
            assert len(page) <= size
            found += page
        assert found == wanted


def test_a_page_is_of_the_rows_that_fit_a_filter(store: VectorStore) -> None:
    view, order = store.view(ORDERED, row_filter=WITHIN), Order("V", numeric=True, descending=True)
    allowed = [place for place in sorted_rows(order, WITHIN) if int(place.id[2:4]) >= 5]
    assert view.places(50, order, None, {"N": {"$gte": 5}}) == allowed
    assert view.places(50, order, allowed[0], {"N": {"$gte": 5}}) == allowed[1:]
    assert view.places(9, Order(), None, {"M": {"$contains": "a"}}) == sorted_rows(Order(), WITHIN)
    with pytest.raises(BadFilter):
        view.places(9, Order(), None, {"V": {"$gt": 1}})
    with pytest.raises(BadFilter):
        view.places(9, Order(), None, {"V": {"$nope": 1}})


def test_a_page_goes_on_where_its_row_was(store: VectorStore) -> None:
    """Also when that row is gone."""
    numbers = [place.id for place in store.view(NAME).places(3, Order("N", numeric=True), Place('["nobody"]', 41.0))]
    assert numbers == [id_of(42), id_of(43), id_of(44)]
    assert [place.id for place in store.view(NAME).places(2, Order(), Place('["0041"]'))] == [id_of(42), id_of(43)]


# ------------------------------------------------------------------------------------------------- rows of others


@pytest.fixture
def beside(emulator: Emulator, hana_schema: str, hana: Any) -> Iterator[tuple[HanaStore, list[str]]]:
    """One row of ours and three of others: of A, of B, and one without metadata."""
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=2) as pool:
        store = HanaStore(pool, hana_schema)
        store.open("mixed", Model())  # type: ignore[arg-type]
        with store.lease("mixed", "writer", 5) as lease:
            store.apply(lease, ChangeSet(chunks_of(3), VECTORS[:1]))
        cursor = hana.cursor()
        for text, meta in (("by A", {"M": "A"}), ("by B", {"M": "B"}), ("by nobody", None)):
            cursor.execute(
                'INSERT INTO "OWL_MIXED_G1" ("VEC_TEXT", "VEC_META") VALUES (?, ?)',
                (text, None if meta is None else json.dumps(meta)),
            )
        hana.commit()
        cursor.execute('SELECT "ID" FROM "OWL_MIXED_G1" WHERE "SRC_KEY" IS NULL ORDER BY "ID"')
        yield store, [f"record:{id_}" for (id_,) in cursor.fetchall()]


def test_rows_of_others_are_read_as_ours(beside: tuple[HanaStore, list[str]]) -> None:
    store, (by_a, by_b, bare) = beside
    read = store.view("mixed").texts([bare, id_of(3), by_b, by_a])
    assert [(one.id, one.text, one.metadata) for one in read] == [
        (bare, "by nobody", {}),
        (id_of(3), "text 0 of 3", {"M": "A", "N": 3}),
        (by_b, "by B", {"M": "B"}),
        (by_a, "by A", {"M": "A"}),
    ]
    assert {one.id for one in store.view("mixed").sample(9).chosen} == {bare, id_of(3), by_a, by_b}
    assert store.view("mixed").sample(9).rows == 4
    assert not store.view("mixed").vectors(store.view("mixed").texts([by_a])).any(), "it has none"
    assert [place.id for place in store.view("mixed").places(9, Order())] == [id_of(3), by_a, by_b, bare]
    assert [place.id for place in store.view("mixed").places(9, Order("M"))] == [id_of(3), by_a, by_b, bare]
    assert store.view("mixed").places(9, Order("M"), Place(by_a, "A"))[0].id == by_b


def test_rows_of_others_are_narrowed_as_ours(beside: tuple[HanaStore, list[str]]) -> None:
    store, (by_a, by_b, bare) = beside
    view = store.view("mixed", row_filter=WITHIN)
    assert [one.id for one in view.texts([by_b, bare, by_a, id_of(3)])] == [by_a, id_of(3)]
    sample = view.sample(9)
    assert {one.id for one in sample.chosen} == {by_a, id_of(3)}
    assert sample.rows == 2
    assert [place.id for place in view.places(9, Order(descending=True))] == [by_a, id_of(3)]


def test_a_record_of_ours_is_not_read_by_its_number(beside: tuple[HanaStore, list[str]]) -> None:
    """Else a row would have two ids, and one of several chunks would be torn apart."""
    store, _ = beside
    (ours,) = store.view("mixed").texts([id_of(3)])
    assert store.view("mixed").texts([f"record:{ours.record}"]) == []


# ---------------------------------------------------------------------------------------- by numbers, and exactly


@pytest.mark.parametrize("within", [None, WITHIN], ids=["all", "some"])
def test_rows_whose_key_holds_a_number(store: VectorStore, within: Any) -> None:
    allowed = [number for number in range(COUNT) if within is None or owner_of(number) == "A"]
    wanted = [number for number in allowed if "059" in f"{number:04}"]
    found = store.view(NAME, row_filter=within).keyed("059", 50)
    assert [(hit.id, hit.number, hit.score) for hit in found] == [(id_of(number), 0, 0.0) for number in wanted]
    assert store.view(NAME, row_filter=within).keyed("059", 2) == found[:2]
    assert store.view(NAME, row_filter=within).keyed("no such", 5) == []
    assert store.view(NAME, row_filter=within).keyed("secret", 5) == [], "another collection's"
    read = store.view(NAME).texts([found[0].id])[0]
    assert (read.text, read.metadata, read.record) == (found[0].text, found[0].metadata, found[0].record)


def test_a_number_that_is_a_value_of_the_key_comes_before_its_digits(store: VectorStore) -> None:
    by_id = [*sorted(HOLDING[:4]), *sorted(HOLDING[4:])]
    assert [hit.id for hit in store.view(KEYS).keyed("1001", 50)] == by_id
    assert [hit.id for hit in store.view(KEYS).keyed("1001", 2)] == by_id[:2]
    assert [hit.id for hit in store.view(KEYS).keyed("x1001", 50)] == ['["1","x1001"]']


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ({"N": {"$gte": 5}}, lambda place: place >= 5),
        ({"M": "B"}, lambda place: owner_of(place) == "B"),
        ({"M": {"$contains": "B"}}, lambda place: owner_of(place) == "B"),
    ],
)
def test_of_rows_whose_key_holds_a_number_a_filter_leaves_those_that_fit(
    store: VectorStore, where: Any, fits: Callable[[int], bool]
) -> None:
    """Before the limit: none of them is missed behind others that do not."""
    wanted = [id_ for place, id_ in enumerate(HOLDING) if fits(place)]
    assert {hit.id for hit in store.view(KEYS).keyed("1001", len(wanted), where)} == set(wanted)
    allowed = {id_ for id_ in wanted if owner_of(HOLDING.index(id_)) == "A"}
    assert {hit.id for hit in store.view(KEYS, row_filter=WITHIN).keyed("1001", 50, where)} == allowed
    with pytest.raises(BadFilter):
        store.view(KEYS).keyed("1001", 50, {"N": {"$nope": 1}})


def test_exact_search_finds_the_truly_best(store: VectorStore) -> None:
    query = VECTORS[3]
    best: dict[str, float] = {}
    for chunk, score in zip(ALL, (VECTORS.astype(float) @ query.astype(float)).tolist(), strict=True):
        best[chunk.id] = max(score, best.get(chunk.id, -2.0))
    ranking = sorted(best, key=lambda id_: (-best[id_], id_))[:7]
    found = store.view(NAME).search(query, 7, exact=True)
    assert [hit.id for hit in found] == ranking
    assert [hit.score for hit in found] == pytest.approx([best[id_] for id_ in ranking], abs=1e-5)
    with pytest.raises(UnknownCollection):
        store.view("nothing").search(query, 1, exact=True)


def test_without_an_index_none_is_used(store: VectorStore) -> None:
    for where in (None, {"N": {"$gt": 5}}, {"M": "A"}):
        use = store.view(NAME, row_filter=WITHIN).index_use(5, where)
        assert use.used is False
        assert use.detail


def test_an_index_that_is_used_is_named(emulator: Emulator) -> None:
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "INDEXED"')
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=2) as pool:
        store = HanaStore(pool, "INDEXED", index_from=1)
        fill(store)
        store.optimise(NAME)
        assert store.view(NAME).index_use(5).used is True
        assert "HNSW" in store.view(NAME).index_use(5).detail
        assert store.view(NAME).search(VECTORS[0], 3, exact=True)[0].id == ALL[0].id
    connection.cursor().execute('DROP SCHEMA "INDEXED" CASCADE')
    connection.close()
