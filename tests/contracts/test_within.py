"""What every store promises of a search that is narrowed to the rows somebody may see: the others take no part, and
nothing that is asked shows anything of them. On `local` and on `hana` (the emulator).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import BadFilter
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Chunk
from connector.stores import filters
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore
from hana_emulator.testing import Emulator
from tests.filter_oracle import matches

DIMENSION = 8
NAME = "within"
MARKS = ["100", "200", "0100", 100, "*", "%", "", None, True, "A", "a", "100 ", 1.0]
"""What stands in the column that rights go by; None: nothing does."""
VALUES = [7, "7", "seven", True, None, "2024-01-31", "2024", 2.5]
"""What stands beside it: of every kind, so that every typed filter meets what it cannot read."""
ROWS = [
    {"M": mark, "V": value, "N": number}
    for number, (mark, value) in enumerate(itertools.product(MARKS, VALUES))
    for _ in range(2)
]
ROWS = [{name: value for name, value in row.items() if value is not None} for row in ROWS]
VECTORS = np.random.default_rng(11).standard_normal((len(ROWS), DIMENSION))
VECTORS = (VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)).astype(np.float32)
QUERY = VECTORS[3]


class Model:
    model = "model-a"
    fingerprint = "fingerprint-a"
    dimension = DIMENSION
    max_tokens = 10
    database_model = None


@pytest.fixture(params=["local", "hana"], scope="module")
def store(request: pytest.FixtureRequest, emulator: Emulator, tmp_path_factory: Any) -> Iterator[VectorStore]:
    """Filled once: nothing here writes."""
    names = {NAME: {"/BIC/M": "M"}}
    if request.param == "local":
        folder: Path = tmp_path_factory.mktemp("within")
        store = LocalStore(folder / "store", names=names)
        yield fill(store)
        store.close()
        return
    connection = emulator.connect(autocommit=True)
    connection.cursor().execute('CREATE SCHEMA "WITHIN"')
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=4) as pool:
        yield fill(HanaStore(pool, "WITHIN", names=names))
    connection.cursor().execute('DROP SCHEMA "WITHIN" CASCADE')
    connection.close()


def fill(store: VectorStore) -> VectorStore:
    store.open(NAME, Model())  # type: ignore[arg-type]
    chunks = [Chunk(f"r{at:03}", 0, f"pump of row {at}", row, bytes(32)) for at, row in enumerate(ROWS)]
    with store.lease(NAME, "writer", 5) as lease:
        store.apply(lease, ChangeSet(chunks, VECTORS))
    return store


def seen(within: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that may be seen, by a comparison of this test's own."""
    (column, wanted), *others = within.items()
    allowed = set(wanted["$in"] if isinstance(wanted, dict) else [wanted])
    rows = {f"r{at:03}": row for at, row in enumerate(ROWS) if as_text(row.get(column)) in allowed}
    return {id_: row for id_, row in rows.items() if not others or id_ in seen(dict(others))}


def as_text(value: Any) -> str | None:
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def found(store: VectorStore, where: Any, within: Any, k: int = 1000) -> dict[str, list[str]]:
    """The ids in both ways to search."""
    near = store.view(NAME, row_filter=within).search(QUERY, k, where)
    worded = store.view(NAME, row_filter=within).keyword("pump row", k, where)
    return {"search": [hit.id for hit in near], "keyword": [hit.id for hit in worded]}


def unreadable(condition: filters.Condition, row: dict[str, Any]) -> bool:
    """Whether any part of the filter fails at this row; a store may look at all of them, in any order."""
    for term in filters.terms(condition):
        try:
            matches(term, row)
        except BadFilter:
            return True
    return False


marks = st.sampled_from(["100", "200", "0100", "*", "%", "A", "nobody", "true", "1.0"])
withins = st.one_of(
    st.builds(lambda mark: {"M": mark}, marks),
    st.builds(lambda some: {"M": {"$in": some}}, st.lists(marks, min_size=1, max_size=4, unique=True)),
    st.builds(lambda mark, value: {"M": {"$in": [mark]}, "V": {"$in": [value]}}, marks, st.sampled_from(["7", "true"])),
)
terms = st.one_of(
    st.builds(lambda mark: {"M": mark}, marks),
    st.builds(lambda mark: {"M": {"$ne": mark}}, marks),
    st.sampled_from(
        [
            {"M": {"$like": "%"}},
            {"M": None},
            {"M": {"$ne": None}},
            {"M": {"$nin": ["nobody"]}},
            {"V": 7},
            {"V": {"$ne": 7}},
            {"V": {"$between": [1, 9]}},
            {"V": True},
            {"V": {"$gt": {"type": "date", "date": "2000-01-01"}}},
            {"V": {"$contains": "seven"}},
            {"V": "7"},
            {"N": {"$gte": 0}},
            {"M": {"$gt": 0}},
        ]
    ),
)
wheres = st.none() | st.recursive(
    terms,
    lambda inner: st.builds(
        lambda word, parts: {word: parts}, st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=wheres, within=withins)
def test_no_row_but_those_that_may_be_seen_takes_part(store: VectorStore, where: Any, within: Any) -> None:
    """What is found is what would be found in a collection that holds no other rows, errors included."""
    rows = seen(within)
    condition = filters.parse(where)
    fails = condition is not None and any(unreadable(condition, row) for row in rows.values())
    try:
        answers = found(store, where, within)
    except BadFilter:
        assert fails, "a value that may not be seen made the filter fail, which tells of it"
        return
    for way, ids in answers.items():
        assert set(ids) <= set(rows), f"{way} found what may not be seen"
        if not fails:
            wanted = [id_ for id_, row in rows.items() if condition is None or matches(condition, row)]
            assert sorted(ids) == sorted(wanted), way


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(within=withins, k=st.integers(1, 12))
def test_the_best_k_are_the_best_of_what_may_be_seen(store: VectorStore, within: Any, k: int) -> None:
    """Narrowed before the best are chosen, not after."""
    scores = VECTORS.astype(np.float64) @ QUERY.astype(np.float64)
    best = sorted(seen(within), key=lambda id_: (-scores[int(id_[1:])], id_))[:k]
    assert found(store, None, within, k)["search"] == best
    assert len(found(store, None, within, k)["keyword"]) == len(best)


# Each of these tells, one bit a question, what stands in a row of somebody else, if only an error shows through.
ORACLES = [
    ({"V": {"$gt": 1}}, "7"),
    ({"V": True}, "true"),
    ({"V": {"$lt": {"type": "date", "date": "2024-01-01"}}}, "2024-01-31"),
    ({"$and": [{"M": "200"}, {"V": {"$like": "sev%"}}, {"V": {"$gt": 1}}]}, "7"),
    ({"$or": [{"M": {"$ne": "200"}}, {"V": {"$between": [1, 2]}}]}, "7"),
    ({"$and": [{"N": {"$gte": 0}}, {"$or": [{"V": 7}, {"V": {"$in": [1, 2]}}]}]}, "7"),
]
"""Each with what stands in all rows that may be seen, and can be read as it wants."""


@pytest.mark.parametrize(("where", "readable"), ORACLES, ids=str)
def test_a_filter_does_not_fail_at_what_may_not_be_seen(store: VectorStore, where: Any, readable: str) -> None:
    with pytest.raises(BadFilter):
        found(store, where, None)
    within = {"M": "100", "V": {"$in": [readable]}}
    assert set(found(store, where, within)["search"]) <= set(seen(within))


@pytest.mark.parametrize("store", ["hana"], indirect=True)
@pytest.mark.parametrize(("where", "readable"), ORACLES, ids=str)
def test_in_hana_that_holds_in_whatever_order_it_evaluates(
    store: VectorStore, emulator: Emulator, where: Any, readable: str
) -> None:
    """HANA promises none for the parts of an AND: so they are sent the other way round."""
    seen_alone = filters.narrowed(None, within := {"M": {"$in": ["100"]}, "V": {"$in": [readable]}})
    whole = filters.narrowed(where, within)
    assert seen_alone is not None
    assert whole is not None
    first, both = filters.to_hana(seen_alone), filters.to_hana(whole)
    count = len(first.parameters)
    assert both.sql.startswith(f"({first.sql}) AND (")
    other = both.sql.removeprefix(f"({first.sql}) AND ")
    sql = f'SELECT COUNT(*) FROM "OWL_WITHIN_G1" WHERE {other} AND ({first.sql})'
    connection = emulator.connect(currentSchema="WITHIN")
    cursor = connection.cursor()
    try:
        cursor.execute(sql, (*both.parameters[count:], *both.parameters[:count]))
        assert cursor.fetchone()[0] == len(found(store, where, within)["search"])
    finally:
        connection.close()


def test_names_that_are_mapped_hold_for_what_may_be_seen_too(store: VectorStore) -> None:
    assert found(store, None, {"/BIC/M": "200"}) == found(store, None, {"M": "200"})
    assert found(store, None, {"M": "200"})["search"]


MANY = [5, pytest.param(filters.MAX_TERMS, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", MANY)
def test_each_filter_has_its_limits_for_itself(store: VectorStore, count: int) -> None:
    """The largest filter beside the most values that claims may have: neither eats what is the other's."""
    within = {"M": {"$in": ["100", *(f"m{number}" for number in range(199))]}}
    largest = {"$or": [{"N": {"$in": [float(n) for n in range(100)]}} for _ in range(count)]}
    wanted = {id_ for id_, row in seen(within).items() if row["N"] < 100}
    answers = found(store, largest, within)
    assert set(answers["search"]) == set(answers["keyword"]) == wanted != set()


def test_a_filter_cannot_be_so_large_or_so_deep_that_it_is_all_that_counts(store: VectorStore) -> None:
    within = {"M": "100"}
    deep: Any = {"N": {"$gte": 0}}
    for _ in range(filters.MAX_DEPTH):
        deep = {"$and": [deep, {"N": {"$gte": 0}}]}
    assert set(found(store, deep, within)["search"]) == set(seen(within))
    for refused in ({"$or": [{"N": 1}] * 101}, {"$or": [deep]}):
        with pytest.raises(BadFilter):
            found(store, refused, within)


@pytest.mark.parametrize("within", [{}, {"N": 1}, {"M": True}, {"M": {"$gt": {"type": "date", "date": "2024-01-01"}}}])
def test_only_comparisons_that_cannot_fail_say_what_may_be_seen(store: VectorStore, within: Any) -> None:
    """An empty one would be everything."""
    with pytest.raises(ValueError, match="a row filter must compare texts"):
        found(store, None, within)


@pytest.mark.parametrize("store", ["hana"], indirect=True)
def test_rows_that_others_wrote_are_seen_by_their_metadata_alone(store: VectorStore, emulator: Emulator) -> None:
    connection = emulator.connect(currentSchema="WITHIN", autocommit=True)
    cursor = connection.cursor()
    vector = "[" + ",".join(map(str, QUERY.tolist())) + "]"
    for meta in (None, "{}", "no JSON", '["100"]', '{"M": ["100"]}', '{"M": {"x": "100"}}', '{"m": "100"}'):
        sql = (
            'INSERT INTO "OWL_WITHIN_G1" ("VEC_TEXT", "VEC_META", "VEC_VECTOR") VALUES (\'pump\', ?, TO_REAL_VECTOR(?))'
        )
        cursor.execute(sql, (meta, vector))
    try:
        everything = found(store, None, None)["search"]
        assert sum(id_.startswith("record:") for id_ in everything) == 7
        for ids in found(store, None, {"M": "100"}).values():
            assert not [id_ for id_ in ids if id_.startswith("record:")]
    finally:
        cursor.execute('DELETE FROM "OWL_WITHIN_G1" WHERE "SRC_KEY" IS NULL')
        connection.close()
