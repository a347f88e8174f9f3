"""Filters at random: any JSON, and filters with parts replaced by others. The parser refuses with words or gives a tree
that Python, SQLite and the REST route read alike.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.src.service.service import Service
from connector.errors import BadFilter
from connector.stores import filters
from tests.api.conftest import TableSource, serving, settings_in
from tests.filter_oracle import matches
from tests.fuzz import outcomes

QUICKLY = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
OPERATORS = ("$eq", "$ne", "$lt", "$lte", "$gt", "$gte", "$in", "$nin", "$between", "$like", "$contains", "$and", "$or")
ROWS = {"1": "FERT", "2": "", "3": "5", "4": "2024-01-31", "5": "true", "6": None, "7": "ball bearing, %"}
"""MATNR -> MTART, the metadata that filters speak of."""

texts = st.one_of(
    st.sampled_from([*filter(None, ROWS.values()), outcomes.CANARY, "%", "_", "20240131", "1e999", "\0", "\ud800"]),
    st.text(max_size=12),
)
numbers = st.one_of(st.integers(), st.integers(-6, 6), st.floats(), st.sampled_from([2**53 + 1, 10**400, 1e308, -0.0]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
dates = st.one_of(
    st.dates().map(lambda day: {"type": "date", "date": day.isoformat()}),
    st.fixed_dictionaries({"type": st.just("date"), "date": scalars}),
)
names = st.one_of(st.sampled_from(["MTART", "A", "$eq", "", "a b", 'x"', "$", "$And", "M" * 200]), st.text(max_size=5))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.sampled_from(OPERATORS), inner, max_size=4),
)
operands = st.one_of(scalars, dates, st.lists(scalars | dates, max_size=4), anything)
fields = st.sampled_from(["MTART", "MTART", "MTART", "A", "no such", "$or"])
terms = st.one_of(
    st.dictionaries(fields, operands, max_size=2),
    st.dictionaries(fields, st.dictionaries(st.sampled_from(OPERATORS), operands, max_size=2), max_size=2),
)
wheres = st.recursive(
    terms,
    lambda inner: st.dictionaries(
        st.sampled_from(["$and", "$or", "MTART"]), st.lists(inner, max_size=3) | inner, max_size=2
    ),
)
metadatas = st.dictionaries(
    st.sampled_from(["MTART", "A"]), st.one_of(scalars.filter(lambda v: v != "\ud800"), anything), max_size=2
)


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = outcomes.database()
    yield connection
    connection.close()


class Rows(TableSource):
    """ROWS; their texts say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_by_key = {key: {"MATNR": key, "MAKTX": "pump", "MTART": kind} for key, kind in ROWS.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    service = Service(settings_in(tmp_path_factory.mktemp("filters")), source=Rows())
    try:
        service.sync.run("materials")
        with serving(service) as client:
            yield client
    finally:
        service.close()


@settings(QUICKLY, max_examples=80)
@given(where=st.one_of(wheres, anything), metadata=metadatas)
def test_parsed_or_refused_and_read_alike(database: sqlite3.Connection, where: Any, metadata: Any) -> None:
    outcomes.check_filter(where, metadata, database)


@settings(QUICKLY, max_examples=25)
@given(where=st.one_of(wheres, wheres, anything))
def test_the_route_answers_as_brute_force_does(client: httpx.Client, where: Any) -> None:
    ask_and_compare(client, where)


@pytest.mark.slow
@settings(QUICKLY, max_examples=20_000)
@given(where=st.one_of(wheres, anything), metadata=metadatas)
def test_filters_for_minutes(database: sqlite3.Connection, where: Any, metadata: Any) -> None:
    outcomes.check_filter(where, metadata, database)


@pytest.mark.slow
@settings(QUICKLY, max_examples=5_000)
@given(where=wheres)
def test_the_route_for_minutes(client: httpx.Client, where: Any) -> None:
    ask_and_compare(client, where)


def ask_and_compare(client: httpx.Client, where: Any) -> None:
    """422 with words, or exactly the rows that fit. JSON as any client may write it: NaN, half characters and all."""
    content = json.dumps({"query": "pump", "k": 50, "filter": where})
    answer = client.post(
        "/v1/collections/materials/search", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 422:
        problem = answer.json()
        assert problem["detail"]
        assert outcomes.CANARY not in answer.text or where_names(where)
        return
    condition = filters.parse(where)
    found = {hit["key"]["MATNR"] for hit in answer.json()["hits"]}
    assert found == fitting(condition)


def fitting(condition: filters.Condition | None) -> set[str]:
    """By brute force over all rows; those that cannot be read are for the store to refuse."""
    found = set()
    for key, kind in ROWS.items():
        try:
            if condition is None or matches(condition, {"MTART": kind}):
                found.add(key)
        except BadFilter as error:
            raise AssertionError(f"the route answered where row {key} cannot be read") from error
    return found


def where_names(where: Any) -> bool:
    """Is the canary a name in the filter? Names are told, values are not."""
    if isinstance(where, dict):
        return outcomes.CANARY in where or any(map(where_names, where.values()))
    return isinstance(where, list) and any(map(where_names, where))
