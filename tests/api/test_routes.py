"""Every route through HTTP, its refusals included."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from httpx import Client, Response
from prometheus_client.parser import text_string_to_metric_families

from app.src.api.errors import OPENAI_PATHS
from app.src.api.health import InfoBody
from app.src.service.service import Service
from connector.errors import LoginRefused, Unavailable
from connector.model import CollectionStatus

VECTOR = '{"vector": [' + ", ".join(["x"] * 64) + "]}"


def problem(response: Response, status: int) -> dict[str, Any]:
    """The answer is a problem document of this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["request_id"] == response.headers["x-request-id"]
    assert document["title"]
    return document


def finished(client: Client, job: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown: dict[str, Any] = client.get(f"/v1/jobs/{job}").json()
        if shown["state"] in ("succeeded", "failed", "cancelled"):
            return shown
        time.sleep(0.01)
    raise AssertionError(f"job {job} did not end")


# -------------------------------------------------------------------------------------------------------------- health


def test_live(shared: Client) -> None:
    assert shared.get("/health/live").json() == {"status": "ok", "checks": {}}


def test_ready(shared: Client) -> None:
    response = shared.get("/health/ready")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "checks": {"engine": True, "store": True}}


@pytest.mark.proves(6)
def test_not_ready_while_the_store_is_away(client: Client, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(collection: str) -> CollectionStatus | None:
        raise Unavailable("HANA is down for maintenance")

    monkeypatch.setattr(service.parts.store, "status", away)
    response = client.get("/health/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["checks"] == {"engine": True, "store": False}
    problem(client.get("/v1/collections"), 503)
    assert client.get("/v1/collections").headers["retry-after"]
    assert client.get("/health/live").status_code == 200


def test_not_ready_without_a_model(client: Client, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(texts: list[str], **_options: Any) -> np.ndarray:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.parts.engine, "submit", broken)
    response = client.get("/health/ready")
    assert response.status_code == 503
    assert response.json()["checks"]["engine"] is False
    assert "secret detail" not in response.text


@pytest.mark.proves(27, 29)
def test_live_answers_while_the_engine_is_busy(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    begin = service.parts.engine._runner.begin  # type: ignore[attr-defined]

    def slow(*batch: Any) -> Any:
        assert go.wait(20)
        return begin(*batch)

    monkeypatch.setattr(service.parts.engine._runner, "begin", slow)  # type: ignore[attr-defined]
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/embed", json={"inputs": "a"}).status_code))
    thread.start()
    assert client.get("/health/live").status_code == 200
    assert answers == []
    go.set()
    thread.join(20)
    assert answers == [200]


def test_info(shared: Client) -> None:
    info = shared.get("/v1/info").json()
    assert (info["model"], info["dimension"], info["device"]["kind"]) == ("hash:64", 64, "cpu")
    assert info["limits"]["max_inputs"] == 4
    assert info["collections"] == ["materials", "never"]
    chosen = {each["name"]: each for each in info["settings"]}
    assert (chosen["precision"]["value"], chosen["path"]["value"]) == ("fp32", "hashing")
    assert all(each["reason"] for each in info["settings"])
    InfoBody.model_validate_json(json.dumps(info), strict=True)
    shapes = shared.get("/openapi.json").json()["components"]["schemas"]
    assert set(shapes["InfoBody"]["properties"]) == set(info)


def test_openapi_says_what_the_routes_answer(shared: Client) -> None:
    document = shared.get("/openapi.json").json()
    shapes = document["components"]["schemas"]
    assert set(shapes["CollectionDetails"]["properties"]) == set(shared.get("/v1/collections/materials").json())
    job = finished(shared, shared.post("/v1/collections/materials/sync").json()["job"])
    assert set(shapes["JobBody"]["properties"]) == set(job)
    for name, path in document["paths"].items():
        if name.startswith(OPENAI_PATHS):
            continue  # they have OpenAI's shape: test_openai.py
        for operation in path.values():
            assert "application/problem+json" in operation["responses"]["4XX"]["content"]
    assert "HTTPValidationError" not in shapes


def test_a_body_without_its_type_is_told_so(shared: Client) -> None:
    response = shared.post("/v1/collections/materials/search", content='{"query": "a"}')
    assert "Content-Type: application/json" in problem(response, 422)["detail"]
    with_type = shared.post("/v1/collections/materials/search", json={"query": 1})
    assert "Content-Type" not in problem(with_type, 422)["detail"]


def test_openapi_lists_the_routes(shared: Client) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    assert {"/embed", "/v1/collections/{name}/search", "/v1/jobs/{job_id}", "/health/ready"} <= set(paths)


# --------------------------------------------------------------------------------------------------------------- embed


def test_embed_always_gives_a_list(shared: Client, shared_service: Service) -> None:
    expected = shared_service.parts.engine.embed(["steel"])
    one = shared.post("/embed", json={"inputs": "steel"}).json()
    np.testing.assert_allclose(one, expected, atol=1e-7)
    two = shared.post("/embed", json={"inputs": ["oil", "steel"]}).json()
    np.testing.assert_allclose(two[1], expected[0], atol=1e-7)


def test_embed_raw(shared: Client, shared_service: Service) -> None:
    response = shared.post("/embed", json={"inputs": ["a", "b"]}, headers={"Accept": "application/octet-stream"})
    assert response.headers["content-type"] == "application/octet-stream"
    vectors = np.frombuffer(response.content, dtype="<f4").reshape(2, int(response.headers["x-embedding-dimension"]))
    np.testing.assert_array_equal(vectors, shared_service.parts.engine.embed(["a", "b"]))


def test_embed_without_normalising(shared: Client, shared_service: Service) -> None:
    vector = shared.post("/embed", json={"inputs": "steel oil pump", "normalize": False}).json()
    np.testing.assert_allclose(
        vector, shared_service.parts.engine.embed(["steel oil pump"], normalize=False), rtol=1e-6
    )


def test_embed_refuses_what_it_would_cut(shared: Client, shared_service: Service) -> None:
    long = "word " * (shared_service.parts.engine.max_tokens + 1)
    detail = problem(shared.post("/embed", json={"inputs": ["a", long]}), 422)["detail"]
    assert "inputs[1]" in detail
    assert "truncate" in detail
    assert shared.post("/embed", json={"inputs": long, "truncate": True}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"inputs": []}, 422, "inputs is empty"),
        ({"inputs": ["a"] * 5}, 413, "api.max_inputs"),
        ({"inputs": ["a", "b" * 9_001]}, 413, "inputs[1]"),
        ({"inputs": 3}, 422, "body.inputs"),
        ({"inputs": [True]}, 422, "body.inputs"),
        ({"inputs": "a", "normalize": 1}, 422, "body.normalize"),
        ({"inputs": "a", "normalise": True}, 422, "body.normalise"),
        ({}, 422, "body.inputs"),
        ({"inputs": "\ud83d"}, 422, "surrogate"),
    ],
)
def test_embed_refuses(shared: Client, body: dict[str, Any], status: int, words: str) -> None:
    import json

    response = shared.post("/embed", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert words in problem(response, status)["detail"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 10_000])
def test_a_body_that_is_no_json(shared: Client, content: bytes) -> None:
    response = shared.post("/embed", content=content, headers={"Content-Type": "application/json"})
    problem(response, response.status_code)
    assert response.status_code in (400, 422)


def test_a_large_body_is_refused_by_its_length_and_while_it_comes(shared: Client) -> None:
    problem(shared.post("/embed", content=b" " * 20_001), 413)

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    detail = problem(shared.post("/embed", content=chunks()), 413)["detail"]
    assert "api.max_body_bytes" in detail


# --------------------------------------------------------------------------------------------------------- collections


def test_collections(shared: Client) -> None:
    materials, never = shared.get("/v1/collections").json()
    assert (materials["collection"], materials["rows"], materials["dimension"]) == ("materials", 4, 64)
    assert materials["lag_seconds"] >= 0
    assert (never["rows"], never["table"], never["last_sync"]) == (0, None, None)
    assert shared.get("/v1/collections/materials").json()["rows"] == 4
    assert 'did you mean "materials"' in problem(shared.get("/v1/collections/material"), 404)["detail"]


def test_search_by_text(shared: Client) -> None:
    answer = shared.post("/v1/collections/materials/search", json={"query": "gearbox bearing", "k": 2}).json()
    assert answer["hits"][0]["key"] == {"MATNR": "1"}
    assert len(answer["hits"]) == 2
    scores = [hit["score"] for hit in answer["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["hits"][0]["metadata"] == {"MTART": "FERT"}
    assert answer["hits"][0]["text"] == "gearbox bearing steel"
    assert set(answer["took_ms"]) == {"embed", "store"}


def test_search_by_vector_of_any_length(shared: Client, shared_service: Service) -> None:
    vector = (shared_service.parts.engine.embed(["hydraulic oil pump"])[0] * 7).tolist()
    hits = shared.post("/v1/collections/materials/search", json={"vector": vector, "k": 1}).json()["hits"]
    assert hits[0]["key"] == {"MATNR": "3"}
    assert hits[0]["score"] == pytest.approx(1.0, abs=1e-5)


def test_search_with_a_filter(shared: Client) -> None:
    body = {"query": "gearbox", "filter": {"MTART": "ROH"}}
    hits = shared.post("/v1/collections/materials/search", json=body).json()["hits"]
    assert {hit["key"]["MATNR"] for hit in hits} == {"3", "4"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"query": "a", "filter": {"$nope": 1}}', "$nope"),
        ('{"query": "a", "k": 51}', "api.max_k"),
        ('{"query": "a", "k": 0}', "body.k"),
        ('{"query": "a", "k": true}', "body.k"),
        ('{"query": "a", "mode": "fuzzy"}', "body.mode"),
        (VECTOR.replace("x", "1")[:-1] + ', "mode": "keyword"}', "give a text"),
        (VECTOR.replace("x", "1")[:-1] + ', "mode": "hybrid"}', "give a text"),
        ('{"query": "a", "min_score": "1"}', "body.min_score"),
        ('{"query": "a", "min_score": NaN}', "body.min_score"),
        ('{"query": "a", "mmr_lambda": 1.5}', "body.mmr_lambda"),
        ('{"query": "a", "mmr_lambda": -0.1}', "body.mmr_lambda"),
        ('{"query": " ", "mode": "keyword"}', "empty"),
        ('{"query": "a", "mode": "keyword", "filter": {"$nope": 1}}', "$nope"),
        ('{"query": "a", "mode": "hybrid", "filter": {"MTART": {"$gt": 5}}}', "have another type"),
        ('{"query": "a", "vector": [1]}', "give one of"),
        ("{}", "body: give one of"),
        ('{"query":', "Expecting value"),
        ('{"query": 1}', "body.query"),
        ('{"query": ""}', "empty"),
        ('{"query": " "}', "empty"),
        ('{"vector": [1, 2]}', "2 numbers"),
        ('{"vector": [true]}', "body.vector"),
        (VECTOR.replace("x", "0"), "zeros"),
        (VECTOR.replace("x", "NaN"), "finite"),
        (VECTOR.replace("x", "1e999"), "finite"),
        ('{"vector": ["1"]}', "body.vector"),
    ],
)
def test_search_refuses(shared: Client, body: str, words: str) -> None:
    response = shared.post(
        "/v1/collections/materials/search", content=body, headers={"Content-Type": "application/json"}
    )
    assert words in problem(response, 422)["detail"]


def test_search_before_the_first_sync(shared: Client) -> None:
    detail = problem(shared.post("/v1/collections/never/search", json={"query": "a"}), 404)["detail"]
    assert "owl-sap sync never" in detail


# ---------------------------------------------------------------------------------------------------------------- jobs


def test_a_sync_runs_as_a_job(client: Client) -> None:
    started = client.post("/v1/collections/materials/sync")
    assert started.status_code == 202
    job = finished(client, started.json()["job"])
    assert job["state"] == "succeeded"
    assert job["result"]["upserted"] == 4
    assert job["progress"] == {"done": 4, "total": 4}
    assert [entry["id"] for entry in client.get("/v1/jobs").json()] == [job["id"]]
    assert client.get("/v1/collections/materials").json()["rows"] == 4


def test_one_sync_of_a_collection_at_a_time(client: Client, source: Any) -> None:
    source.gate.clear()
    first = client.post("/v1/collections/materials/sync").json()["job"]
    assert first in problem(client.post("/v1/collections/materials/sync", json={"full": True}), 409)["detail"]
    assert client.get("/v1/collections/materials").json()["job"] == first
    source.gate.set()
    assert finished(client, first)["state"] == "succeeded"
    assert client.post("/v1/collections/materials/sync").status_code == 202


def test_a_column_of_another_type_is_accepted_only_when_asked(client: Client, source: Any) -> None:
    def synced(**body: Any) -> dict[str, Any]:
        job = client.post("/v1/collections/materials/sync", json=body).json()["job"]
        found: dict[str, Any] = finished(client, job)["result"]
        return found

    assert synced()["upserted"] == 4
    columns = [
        column if column.name == "MATNR" else replace(column, type_name="NCLOB") for column in source.table.columns
    ]
    source.table = replace(source.table, columns=tuple(columns))
    assert synced()["paused"] == "schema_changed"
    assert synced(accept_schema=True)["paused"] is None
    assert synced()["unchanged"] == 4
    shown = client.get("/v1/collections/materials").json()
    assert (shown["method"], shown["last_full"] is not None) == ("full", True)


def test_a_failed_sync_says_why(client: Client, source: Any) -> None:
    source.failure = LoginRefused("connecting to S: login refused", code=10)
    job = finished(client, client.post("/v1/collections/materials/sync").json()["job"])
    assert (job["state"], job["error"], job["attempts"]) == ("failed", "connecting to S: login refused", 1)
    assert 'owl_sap_hana_errors_total{code="10"} 1.0' in client.get("/metrics").text


def test_sync_and_jobs_that_do_not_exist(shared: Client) -> None:
    problem(shared.post("/v1/collections/nope/sync"), 404)
    problem(shared.get("/v1/jobs/nope"), 404)
    problem(shared.post("/v1/collections/materials/sync", json={"max_deletes": 2}), 422)


# ------------------------------------------------------------------------------------------------- errors and metrics


def test_routing_errors_are_problems_too(shared: Client) -> None:
    problem(shared.get("/nope"), 404)
    problem(shared.get("/embed"), 405)


def test_an_unexpected_error_shows_nothing_of_itself(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise RuntimeError("row text")

    monkeypatch.setattr(service.status, "info", broken)
    response = client.get("/v1/info")
    assert "row text" not in response.text + caplog.messages[-1].replace('"row text"', "")
    assert "RuntimeError" in caplog.text
    assert 'route="/v1/info",status="500"' in client.get("/metrics").text
    assert problem(response, 500)["request_id"]


def test_the_callers_request_id_is_kept_when_it_is_harmless(shared: Client) -> None:
    assert shared.get("/health/live", headers={"X-Request-Id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    odd = shared.get("/health/live", headers={"X-Request-Id": "a b<script>"}).headers["x-request-id"]
    assert odd != "a b<script>"
    assert len(odd) == 32


def test_metrics(client: Client, synced: Service) -> None:
    client.post("/v1/collections/materials/search", json={"query": "steel"})
    client.get("/nope/at/all")
    text = client.get("/metrics").text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["owl_sap_rows_synced_total", "materials", "upserted"] == 4
    assert samples["owl_sap_syncs_total", "materials", "succeeded"] == 1
    assert samples["owl_sap_http_requests_total", "POST", "/v1/collections/{name}/search", "200"] == 1
    assert samples["owl_sap_http_requests_total", "GET", "none", "404"] == 1
    assert samples["owl_sap_search_seconds_count", "materials", "store"] == 1
    assert 0 <= samples["owl_sap_sync_lag_seconds", "materials"] < 60
    assert all(name[0].startswith("owl_sap_") for name in samples)
