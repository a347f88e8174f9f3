"""Both clients against the served application: what they ask is what it answers."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import owl_sap_client
from owl_sap_client import AsyncClient, Client
from owl_sap_client.results import Hit, Job, JobEvent
from tests.client.conftest import NEVER, Served


def test_vectors_to_the_last_bit(client: Client, served: Served) -> None:
    texts = ["steel", "oil pump", "Überdruck 🦉"]
    vectors = client.embed(texts)
    assert {type(vector) for vector in vectors} == {array}
    np.testing.assert_array_equal(np.array(vectors), served.service.parts.engine.embed(texts))
    in_json = client.openai_embeddings(texts, model="hash:64")
    np.testing.assert_array_equal(np.array([each.embedding for each in in_json.data], np.float32), np.array(vectors))
    assert in_json.usage.total_tokens == sum(served.service.parts.engine.count_tokens(texts))
    (model,) = client.models()
    assert client.model(model.id) == model


def test_search_by_text_vector_words_and_filter(client: Client) -> None:
    found = client.search("materials", "hydraulic oil pump", k=2)
    best, second = found.hits
    assert isinstance(best, Hit)
    assert (best.key, best.text, best.metadata) == ({"MATNR": "3"}, "hydraulic oil pump", {"MTART": "ROH"})
    assert best.score > second.score
    assert set(found.took_ms) >= {"embed", "store"}
    assert client.search("materials", "hydraulic oil pump", k=2, mode="hybrid").hits == found.hits
    (vector,) = client.embed(["hydraulic oil pump"])
    near = client.search("materials", "hydraulic oil pump", k=2, mode="vector").hits
    assert near != found.hits
    unjudged = [dataclasses.replace(hit, relevance=None) for hit in near]
    assert client.search("materials", vector=vector, k=2).hits == unjudged, "of a vector there is no relevance"
    (only,) = client.search("materials", "oil", mode="keyword").hits
    assert only.id == best.id
    kept = client.search("materials", "oil", filter={"MTART": {"$ne": "ROH"}}, mmr_lambda=0.5, mode="hybrid").hits
    assert {hit.metadata["MTART"] for hit in kept} <= {"FERT"}
    assert client.search("materials", "oil", k=1, min_score=2.0).hits == []


def test_what_there_is(client: Client, served: Served) -> None:
    materials, never, *_ = client.collections()
    assert (materials.collection, materials.rows, never.rows) == ("materials", 4, 0)
    assert client.collection("materials").key == ["MATNR"]
    info = client.info()
    assert (info.model, info.dimension, info.limits.max_inputs) == ("hash:64", 64, 4)
    assert client.gpu().note
    assert "owl_sap_http_requests_total" in client.metrics()
    assert client.live().ok
    assert client.ready().ok


def test_not_ready_is_an_answer(client: Client, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service.readiness, "beyond_help", lambda: "the engine hangs")
    health = client.live()
    assert (health.ok, health.status, health.checks) == (False, "unavailable", {"engine": False})


def test_a_sync_that_is_waited_for(client: Client) -> None:
    job = client.sync("materials", full=True, max_deletes=0.5)
    done = client.wait(job, timeout=20)
    assert (done.state, done.over, done.kind) == ("succeeded", True, "sync")
    assert done.result is not None
    assert done.result["read"] == 4
    assert client.jobs("materials", "succeeded", 1) == [done]
    checked = client.wait(client.verify("materials"), timeout=20)
    assert checked.result is not None
    assert checked.result["ok"] is True


def test_events_as_they_come_and_from_anywhere(client: Client, served: Served) -> None:
    served.source.gate.clear()
    job = client.sync("materials", full=True)
    seen: list[JobEvent] = []
    for event in client.events(job):
        seen.append(event)
        if event.data.get("state") == "running":
            served.source.gate.set()
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert (seen[0].event, seen[-1].event) == ("state", "result")
    assert seen[-1].data["state"] == "succeeded"
    assert list(client.events(job, after=2)) == seen[2:]
    assert list(client.events(job, after=len(seen))) == []


def test_a_cancelled_job_and_one_that_takes_long(client: Client, served: Served) -> None:
    served.source.gate.clear()
    try:
        job = client.sync("materials", full=True)
        with pytest.raises(owl_sap_client.WaitTimeout, match=job) as waited:
            client.wait(job, timeout=0.2)
        assert isinstance(waited.value, TimeoutError)
        with pytest.raises(owl_sap_client.Conflict):
            client.sync("materials")
        assert isinstance(client.cancel(job), Job)
    finally:
        served.source.gate.set()
    with pytest.raises(owl_sap_client.JobFailed) as failed:
        client.wait(job, timeout=20)
    assert failed.value.job.state == "cancelled"


def test_quarantine(client: Client, served: Served) -> None:
    served.source.rows_by_key["9"] = {"MATNR": "9", "MAKTX": "broken", "MTART": float("nan")}
    try:
        client.wait(client.sync("materials"), timeout=20)
        (entry,) = client.quarantine("materials", limit=5)
        assert entry.key == {"MATNR": "9"}
        assert client.wait(client.retry_quarantine("materials", [entry.key]), timeout=20).over
        assert client.drop_quarantine("materials", [["9"]]) == 1
        assert client.drop_quarantine("materials", all=True) == 0
        with pytest.raises(owl_sap_client.NotFound):
            client.retry_quarantine("materials", [{"MATNR": "nothing"}])
    finally:
        del served.source.rows_by_key["9"]


def test_generations(client: Client) -> None:
    (serving,) = client.generations("materials")
    assert (serving.generation, serving.state) == (1, "active")
    built = client.wait(client.build_generation("materials"), timeout=20)
    assert built.kind == "build"
    compared = client.compare_generations("materials", queries=["oil pump"], sample=2)
    assert (compared.serving, compared.other, compared.overlap_at_10) == (1, 2, 1.0)
    assert client.switch_generation("materials", 2).retired == 1
    assert client.rollback_generation("materials").generation == 1
    assert client.drop_generation("materials", 2) == 2
    with pytest.raises(owl_sap_client.NotFound):
        client.switch_generation("materials", 7)
    with pytest.raises(owl_sap_client.Conflict):
        client.drop_generation("materials", 1)


REFUSED: list[tuple[Callable[[Client], Any], type[owl_sap_client.ProblemError], str]] = [
    (lambda client: client.search("nothing", "x"), owl_sap_client.NotFound, "nothing"),
    (lambda client: client.search("materials", "x", vector=[0.0]), owl_sap_client.Unprocessable, "give"),
    (lambda client: client.search("materials", "x", k=51), owl_sap_client.Unprocessable, r"api\.max_k"),
    (lambda client: client.embed(["a"] * 5), owl_sap_client.TooLarge, r"api\.max_inputs"),
    (lambda client: client.model("gpt-5"), owl_sap_client.NotFound, "hash:64"),
    (lambda client: client.collection("../info"), owl_sap_client.NotFound, "Not Found"),
    (lambda client: client.collection(".."), owl_sap_client.NotFound, r"\.\."),
    (lambda client: client.job("no such job"), owl_sap_client.NotFound, "no such job"),
    (lambda client: list(client.events("no such job")), owl_sap_client.NotFound, "no such job"),
    (lambda client: client.drop_quarantine("materials"), owl_sap_client.Unprocessable, "either"),
]


@pytest.mark.parametrize(("ask", "kind", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_refused(
    client: Client, ask: Callable[[Client], Any], kind: type[owl_sap_client.ProblemError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        ask(client)
    assert refused.value.request_id
    assert str(refused.value.status) in str(refused.value)


def test_what_does_not_fit_says_where(client: Client) -> None:
    with pytest.raises(owl_sap_client.Unprocessable) as refused:
        client.search("materials", "x", mode="nearest")  # type: ignore[arg-type]
    assert refused.value.errors[0]["where"] == "body.mode"


def test_an_unknown_member_is_named(client: Client, served: Served) -> None:
    with pytest.raises(owl_sap_client.Unprocessable, match=r"body.mmr_lamda: unknown member"):
        client.search("materials", "x", mmr_lamda=0.5)  # type: ignore[call-arg]
    refused = served.http.post("/v1/collections/materials/sync", json={"quick": True})
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("body.quick: unknown member")


def test_the_asynchronous_client_does_the_same(served: Served) -> None:
    async def all_of_it() -> None:
        async with AsyncClient(served.url, retries=NEVER) as client:
            found, vectors = await asyncio.gather(
                client.search("materials", "oil pump", mode="vector"), client.embed(["oil pump"])
            )
            unjudged = [dataclasses.replace(hit, relevance=None) for hit in found.hits]
            assert (await client.search("materials", vector=vectors[0])).hits == unjudged
            job = await client.sync("materials")
            seen = [event async for event in client.events(job)]
            assert seen[-1].event == "result"
            assert (await client.wait(job, timeout=20)).state == "succeeded"
            async with aclosing(client.events(job)) as events:
                assert await anext(events) == seen[0]
            with pytest.raises(owl_sap_client.NotFound):
                await client.collection("nothing")
            assert [event async for event in client.events(job, after=len(seen))] == []

    asyncio.run(all_of_it())


def test_results_cannot_be_changed(client: Client) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        client.info().version = "9"  # type: ignore[misc]


def test_connections_are_used_again(served: Served) -> None:
    with Client(served.url) as client:
        for _ in range(5):
            client.info()
        assert len(client._http._transport._pool.connections) == 1  # type: ignore[attr-defined]
