"""What is stored, read over HTTP: rows by their ids, and the metadata that filters can be made of."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.src.service import Service
from tests.api.conftest import TEXTS, TableSource

ROWS = "/v1/collections/materials/rows"
FIELDS = "/v1/collections/materials/fields"
HOSTILE = [
    "",
    "\0",
    '["1\0"]',
    "x" * 10_000,
    "😀" * 1500,
    '["1"] ',
    "record:1",
    "record:-1",
    "record:" + "9" * 40,
    "record:１",  # a digit, but none of ours
    "' OR 1=1 --",
    "%",
    "null",
    "[]",
    '["1","2"]',
]


def id_of(key: str) -> str:
    return f'["{key}"]'


@pytest.mark.covers("POST /v1/collections/{name}/rows")
def test_rows_come_whole_and_in_the_order_of_their_ids(client: httpx.Client, synced: Service) -> None:
    hit = client.post("/v1/collections/materials/search", json={"query": "oil pump", "k": 1}).json()["hits"][0]
    asked = [id_of("4"), "nobody", hit["id"], id_of("1"), id_of("4")]
    rows = client.post(ROWS, json={"ids": asked}).json()["rows"]
    assert [row["id"] for row in rows] == [id_of("4"), id_of("3"), id_of("1")]
    assert rows[1] == {name: hit[name] for name in ("id", "key", "text", "metadata")} | {"chunks": [TEXTS["3"]]}


@pytest.mark.covers("POST /v1/collections/{name}/rows")
def test_a_long_text_is_put_together(client: httpx.Client, service: Service, source: TableSource) -> None:
    words = " ".join(f"word{number}" for number in range(900))
    source.rows_by_key["1"]["MAKTX"] = words
    service.sync("materials")
    (row,) = client.post(ROWS, json={"ids": [id_of("1")]}).json()["rows"]
    assert len(row["chunks"]) > 1
    assert sum(map(len, row["chunks"])) > len(words), "they overlap"
    assert row["text"] == words


@pytest.mark.covers("POST /v1/collections/{name}/rows", errors=True)
def test_ids_that_are_none_are_left_out_or_refused(client: httpx.Client, synced: Service) -> None:
    answer = client.post(ROWS, json={"ids": [*HOSTILE, id_of("2")]})
    assert answer.status_code == 200, answer.text
    assert [row["id"] for row in answer.json()["rows"]] == [id_of("2")]
    half = client.post(ROWS, content=b'{"ids": ["\\ud800"]}', headers={"Content-Type": "application/json"})
    assert half.status_code in (200, 422)
    for body in ({"ids": []}, {"ids": ["x"] * 101}, {"ids": [1]}, {"ids": "x"}, {}):
        assert client.post(ROWS, json=body).status_code == 422
    for name in ("never", "nobody"):
        assert client.post(f"/v1/collections/{name}/rows", json={"ids": ["x"]}).status_code == 404


@pytest.mark.covers("GET /v1/collections/{name}/fields")
def test_fields_tell_what_can_be_filtered_by(client: httpx.Client, synced: Service) -> None:
    answer = client.get(FIELDS).json()
    values = [{"value": "FERT", "count": 2}, {"value": "ROH", "count": 2}]
    field: dict[str, Any] = {"name": "MTART", "type": "text", "values": values, "more": False, "min": None, "max": None}
    assert answer == {"fields": [field], "sampled": 4, "rows": 4}


@pytest.mark.covers("GET /v1/collections/{name}/fields", errors=True)
def test_fields_of_nothing(client: httpx.Client, synced: Service) -> None:
    for name in ("never", "nobody"):
        assert client.get(f"/v1/collections/{name}/fields").status_code == 404
