"""Rows set aside over HTTP: listed without their text, tried again as a job, forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Client

from app.src.service.service import Service
from tests.api.conftest import TableSource
from tests.api.test_routes import finished, problem

PLACE = "/v1/collections/materials/quarantine"
TOO_MUCH = "canary" * 20_000


def spoil(source: TableSource, *keys: str) -> None:
    """Metadata of more bytes than are kept."""
    for key in keys:
        source.rows_by_key[key]["MTART"] = TOO_MUCH


def mend(source: TableSource, *keys: str) -> None:
    for key in keys:
        source.rows_by_key[key]["MTART"] = "ROH"


@pytest.fixture
def aside(service: Service, source: TableSource) -> TableSource:
    spoil(source, "2", "3")
    service.sync.run("materials")
    return source


def keys(client: Client) -> list[str]:
    return [entry["key"]["MATNR"] for entry in client.get(PLACE).json()]


def test_rows_are_listed_with_their_reason_and_without_their_text(client: Client, aside: TableSource) -> None:
    response = client.get(PLACE)
    first, second = response.json()
    assert first | {"last_seen": 0} == {
        "key": {"MATNR": "2"},
        "stage": "render",
        "reason": first["reason"],
        "attempts": 1,
        "given_up": False,
        "last_seen": 0,
    }
    assert "bytes as JSON" in first["reason"]
    assert second["key"] == {"MATNR": "3"}
    assert "canary" not in response.text
    assert len(client.get(PLACE, params={"limit": 1}).json()) == 1
    assert client.get("/v1/collections/never/quarantine").json() == []


def test_listing_refuses(client: Client) -> None:
    problem(client.get("/v1/collections/nope/quarantine"), 404)
    problem(client.get(PLACE, params={"limit": 0}), 422)


def test_mended_rows_are_taken_in(client: Client, aside: TableSource) -> None:
    mend(aside, "2")
    started = client.post(f"{PLACE}/retry")
    assert started.status_code == 202
    job = finished(client, started.json()["job"])
    assert (job["kind"], job["state"]) == ("retry", "succeeded")
    wanted = {"retried": 2, "upserted": 1, "quarantined": 1, "gone": 0, "stopped": False}
    assert {name: job["result"][name] for name in wanted} == wanted
    (left,) = client.get(PLACE).json()
    assert (left["key"], left["attempts"]) == ({"MATNR": "3"}, 1)
    assert client.get("/v1/collections/materials").json()["rows"] == 3
    assert 'owl_sap_quarantined_rows{collection="materials"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    "key", [{"MATNR": "3"}, pytest.param(["3"], marks=pytest.mark.slow), pytest.param([3], marks=pytest.mark.slow)]
)
def test_only_the_rows_that_are_named(client: Client, aside: TableSource, key: Any) -> None:
    mend(aside, "2", "3")
    job = finished(client, client.post(f"{PLACE}/retry", json={"keys": [key]}).json()["job"])
    assert job["result"]["upserted"] == 1
    assert keys(client) == ["2"]


def test_retry_refuses(client: Client, aside: TableSource) -> None:
    problem(client.post("/v1/collections/nope/quarantine/retry"), 404)
    assert "9" in problem(client.post(f"{PLACE}/retry", json={"keys": [["9"]]}), 404)["detail"]
    problem(client.post(f"{PLACE}/retry", json={"keys": "all"}), 422)
    problem(client.post(f"{PLACE}/retry", json={"key": []}), 422)
    aside.gate.clear()
    client.post("/v1/collections/materials/sync")
    problem(client.post(f"{PLACE}/retry"), 409)
    aside.gate.set()


def test_dropped_rows_come_back_with_the_next_sync(client: Client, aside: TableSource) -> None:
    assert client.post(f"{PLACE}/drop", json={"keys": [{"MATNR": "2"}]}).json() == {"dropped": 1}
    assert keys(client) == ["3"]
    assert client.post(f"{PLACE}/drop", json={"keys": []}).json() == {"dropped": 0}
    assert client.post(f"{PLACE}/drop", json={"all": True}).json() == {"dropped": 1}
    assert client.post(f"{PLACE}/drop", json={"all": True}).json() == {"dropped": 0}
    finished(client, client.post("/v1/collections/materials/sync").json()["job"])
    assert keys(client) == ["2", "3"]


def test_drop_refuses(client: Client, aside: TableSource, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    drop = service.quarantine.drop
    monkeypatch.setattr(service.quarantine, "drop", lambda *given, **more: drop(*given, **more | {"lease_wait": 0.1}))
    problem(client.post("/v1/collections/nope/quarantine/drop", json={"all": True}), 404)
    problem(client.post(f"{PLACE}/drop"), 422)
    for body in ({}, {"keys": None}, {"all": False}, {"all": True, "keys": [{"MATNR": "2"}]}):
        detail = problem(client.post(f"{PLACE}/drop", json=body), 422)["detail"]
        assert detail == 'body: give either keys or "all": true'
    problem(client.post(f"{PLACE}/drop", json={"keys": [{"MATNR": "2", "X": 1}]}), 404)
    with service.parts.store.lease("materials", "a sync", 0):
        assert "a sync" in problem(client.post(f"{PLACE}/drop", json={"all": True}), 409)["detail"]
    assert keys(client) == ["2", "3"]
