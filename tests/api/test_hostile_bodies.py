"""JSON that is well-formed and meant to hurt: depth, numbers without end, keys twice; and bodies of many at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from httpx import Client

from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import TableSource, serving, settings_in
from tests.api.test_limits import SEARCH, post, problem


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One service for all tests here, synced: none of them changes it."""
    document = settings_in(tmp_path_factory.mktemp("hostile")).model_dump(by_alias=True)
    wanted = document["api"] | {"max_body_bytes": 200_000}
    service = Service(Settings.model_validate(document | {"api": wanted}), source=TableSource())
    with closing(service):
        service.sync.run("materials")
        with serving(service) as client:
            yield client


def nested(depth: int, shape: str) -> str:
    """A filter within a filter, so deep."""
    if shape == "groups":
        return '{"$and": [' * depth + '{"MTART": "FERT"}' + "]}" * depth
    if shape == "lists":
        return '{"MTART": {"$in": ' + "[" * depth + "]" * depth + "}}"
    return '{"MTART": ' * depth + '"FERT"' + "}" * depth


@pytest.mark.parametrize("shape", ["groups", "lists", "objects"])
@pytest.mark.parametrize("depth", [20, 100, 199, 200, 260, 900, 1100, 5000, 14_000])
@pytest.mark.proves(27)
def test_filters_of_any_depth_are_refused_and_nothing_breaks(client: Client, shape: str, depth: int) -> None:
    answer = post(client, SEARCH, f'{{"query": "steel", "filter": {nested(depth, shape)}}}')
    assert answer.status_code in (400, 422), answer.text
    problem(answer, answer.status_code)
    assert client.post(SEARCH, json={"query": "steel"}).status_code == 200


@pytest.mark.parametrize(
    "filter_",
    [
        {f"X{n}": 1 for n in range(5000)},
        {"$or": [{"MTART": "FERT"}] * 5000},
        {"MTART": {"$in": ["x"] * 20_000}},
        {"MTART": "x" * 100_000},
        {"X" * 100_000: 1},
    ],
    ids=["columns", "conditions", "values", "value", "name"],
)
@pytest.mark.proves(27)
def test_wide_filters_are_answered_or_refused(client: Client, filter_: dict[str, Any]) -> None:
    answer = client.post(SEARCH, json={"query": "steel", "filter": filter_})
    assert answer.status_code in (200, 422), answer.text[:300]
    assert len(answer.content) < 10_000, "a refusal does not repeat it all"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (SEARCH, '{"query": "a", "k": NaN}'),
        (SEARCH, '{"query": "a", "k": 1e400}'),
        (SEARCH, '{"query": "a", "k": 99999999999999999999999999999999999999}'),
        (SEARCH, f'{{"query": "a", "k": {"9" * 5000}}}'),
        (SEARCH, '{"query": "a", "k": -0.5}'),
        (SEARCH, f'{{"vector": [{", ".join(["NaN"] * 64)}]}}'),
        (SEARCH, f'{{"vector": [{", ".join(["Infinity"] * 64)}]}}'),
        (SEARCH, f'{{"vector": [{", ".join(["1e999"] * 64)}]}}'),
        (SEARCH, f'{{"vector": [{", ".join(["9" * 4000] * 2)}]}}'),
        (SEARCH, '{"query": "a", "mmr_lambda": NaN}'),
        (SEARCH, '{"query": "a", "filter": {"MTART": NaN}}'),
        (SEARCH, '{"query": "a", "filter": {"MTART": {"$gt": Infinity}}}'),
        (SEARCH, '{"query": "a", "filter": {"MTART": -Infinity}}'),
        ("/v1/collections/materials/sync", '{"max_deletes": NaN}'),
        ("/v1/collections/materials/sync", '{"max_deletes": 1e-400, "x": 1}'),
        ("/v1/embeddings", '{"input": "a", "dimensions": 1e400}'),
        ("/v1/embeddings", '{"input": "a", "dimensions": 9999999999999999999999}'),
        ("/embed", '{"inputs": [NaN]}'),
        ("/embed", '{"inputs": "\\ud800"}'),
    ],
    ids=str,
)
@pytest.mark.proves(27)
def test_numbers_that_are_none(client: Client, route: str, body: str) -> None:
    answer = post(client, route, body)
    assert answer.status_code in (400, 422), answer.text
    json.loads(answer.content, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_vector_of_huge_numbers_is_a_direction_like_any_other(client: Client) -> None:
    huge, plain = (client.post(SEARCH, json={"vector": [number] * 64}).json()["hits"] for number in (1e308, 0.5))
    assert [(hit["id"], round(hit["score"], 6)) for hit in huge] == [
        (hit["id"], round(hit["score"], 6)) for hit in plain
    ]


@pytest.mark.parametrize("number", ["1e308", "-9223372036854775809", "18446744073709551616", "1e-400", "9" * 300])
def test_huge_numbers_in_filters_compare_or_are_refused(client: Client, number: str) -> None:
    answer = post(client, SEARCH, f'{{"query": "steel", "filter": {{"MTART": {{"$lt": {number}}}}}}}')
    assert answer.status_code in (200, 422), answer.text


@pytest.mark.parametrize("route", ["/embed", "/v1/collections/materials/search"])
def test_of_a_key_that_comes_twice_the_last_counts(client: Client, route: str) -> None:
    """As everywhere in Python, and on each way the same: no check sees another value than the work."""
    name, extra = ("inputs", "") if route == "/embed" else ("query", ', "k": 1000, "k": 1')
    answer = post(client, route, f'{{"{name}": "x", "{name}": "steel"{extra}}}')
    assert answer.status_code == 200, answer.text
    assert route == "/embed" or len(answer.json()["hits"]) == 1
    assert post(client, route, f'{{"{name}": "steel", "{name}": 5{extra}}}').status_code == 422
    assert post(client, SEARCH, '{"query": "a", "k": 1, "k": 100000}').status_code == 422


def test_bodies_of_all_together_are_bounded(synced: Service) -> None:
    """Five clients send most of a body each; a sixth finds no room, and does once the others have gone."""
    document = synced.settings.model_dump(by_alias=True)
    wanted = document["api"] | {"max_bodies_bytes": 50_000}
    synced.settings = Settings.model_validate(document | {"api": wanted})
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10000\r\n\r\n"
    with serving(synced) as client, ExitStack() as stack:
        address = (client.base_url.host, client.base_url.port or 0)
        others = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(5)]
        for other in others:
            other.sendall(head + b"x" * 9_900)
        body = json.dumps({"inputs": "y" * 600, "truncate": True})
        while (answer := post(client, "/embed", body)).status_code == 200:
            pass  # the others' bytes are on their way
        assert "api.max_bodies_bytes" in problem(answer, 503)["detail"]
        for other in others:
            other.close()
        while post(client, "/embed", body).status_code != 200:
            pass
