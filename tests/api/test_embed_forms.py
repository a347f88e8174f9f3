"""/embed: the forms of its answer agree, what `normalize` and `truncate` mean; which counters move by how much."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from httpx import Client
from prometheus_client.parser import text_string_to_metric_families

from app.src.access.principal import OPERATOR
from app.src.core.backends import NonFinite, OutOfMemory
from app.src.service.service import Service
from connector.errors import ConnectionLost
from tests.api.conftest import TEXTS, TableSource, serving, settings_in

RAW = "application/octet-stream"
SEARCH = "/v1/collections/materials/search"
Counters = dict[tuple[str, ...], float]
SENT: list[str] = []


@pytest.fixture(scope="module")
def source() -> TableSource:
    return TableSource()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: TableSource) -> Iterator[Service]:
    service = Service(settings_in(tmp_path_factory.mktemp("forms")), source=source)
    service.sync.run("materials")
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with serving(service) as client:
        SENT.clear()
        client.event_hooks["request"].append(lambda request: SENT.append(request.method))
        yield client


def raw(client: Client, inputs: Any, **more: Any) -> Any:
    response = client.post("/embed", json={"inputs": inputs} | more, headers={"Accept": RAW})
    assert response.status_code == 200, response.text
    count, dimension = (int(response.headers[f"x-embedding-{name}"]) for name in ("count", "dimension"))
    return np.frombuffer(response.content, dtype="<f4").reshape(count, dimension)


INPUTS = [
    "steel",
    ["steel"],
    ["steel", "oil", "steel", ""],
    "Öl 🦉 漢字\n\t\u2028",
    ["word " * 200, "a"],
]


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("normalize", [True, False])
def test_json_and_bytes_are_the_same_numbers(client: Client, service: Service, inputs: Any, normalize: bool) -> None:
    answer = client.post("/embed", json={"inputs": inputs, "normalize": normalize}).json()
    in_json = np.array(answer, dtype=np.float32)
    in_bytes = raw(client, inputs, normalize=normalize)
    np.testing.assert_array_equal(in_json, in_bytes)  # every float32 survives JSON
    texts = [inputs] if isinstance(inputs, str) else inputs
    np.testing.assert_array_equal(in_bytes, service.parts.engine.embed(texts, normalize=normalize))


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (RAW, RAW),
        (f"{RAW}, application/json;q=0.5", RAW),
        ("Application/Octet-Stream", RAW),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("text/html", "application/json"),
        ("", "application/json"),
    ],
)
def test_which_form_is_given(client: Client, accept: str, kind: str) -> None:
    response = client.post("/embed", json={"inputs": ["a", "b"]}, headers={"Accept": accept})
    assert response.headers["content-type"] == kind
    assert (response.headers["x-embedding-count"], response.headers["x-embedding-dimension"]) == ("2", "64")
    assert kind != RAW or len(response.content) == 2 * 64 * 4


def test_an_error_is_a_problem_whatever_form_was_wanted(client: Client) -> None:
    response = client.post("/embed", json={"inputs": []}, headers={"Accept": RAW})
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")


@pytest.mark.parametrize(("normalize", "unit"), [(None, True), (True, True), (False, False)])
def test_what_normalize_means(client: Client, normalize: bool | None, unit: bool) -> None:
    more = {} if normalize is None else {"normalize": normalize}
    vectors = raw(client, ["steel oil pump", "gearbox"], **more)
    lengths = np.linalg.norm(vectors, axis=1)
    assert bool(np.allclose(lengths, 1, atol=1e-6)) is unit
    np.testing.assert_allclose(vectors / lengths[:, None], raw(client, ["steel oil pump", "gearbox"]), atol=1e-6)


def test_what_truncate_means(client: Client) -> None:
    """What is cut counts no more; a text that fits is the same with and without it."""
    whole, longer = "w " * 254, "w " * 254 + "very different ending"
    np.testing.assert_array_equal(raw(client, longer, truncate=True), raw(client, whole))
    np.testing.assert_array_equal(raw(client, "steel", truncate=True), raw(client, "steel"))
    assert client.post("/embed", json={"inputs": longer}).status_code == 422


# ------------------------------------------------------------------------------------------------------------- counters


def counters(service: Service) -> Counters:
    """(name, labels ...) -> value, without what only time decides."""
    families = text_string_to_metric_families(service.metrics.render().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_sum", "_bucket", "_created", "_seconds", "_seconds_total"))
        and "process" not in sample.name
        and not sample.name.startswith("owl_sap_engine_")  # the engine's own; tests/monitoring looks at them
        and sample.name != "owl_sap_event_loop_lag_seconds_count"  # a look every second
    }


def moved(client: Client, service: Service, work: Callable[[], Any]) -> Counters:
    before = settled(client, service)
    work()
    after = settled(client, service)
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}


def settled(client: Client, service: Service) -> Counters:
    """A request is counted once its answer is out, which may be after the client has it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = counters(service)
        if sum(value for key, value in found.items() if key[0] == "owl_sap_http_requests_total") == len(SENT):
            return found
        time.sleep(0.002)
    raise AssertionError("some request was never counted")


def request(method: str, route: str, status: int, times: int = 1) -> Counters:
    return {
        ("owl_sap_http_requests_total", method, route, str(status)): times,
        ("owl_sap_http_request_seconds_count", route): times,
    }


def computed(lane: str = "interactive") -> Counters:
    """One batch, of one request."""
    names = ("embed_batch_texts", "embed_batch_tokens", "embed_wait_seconds")
    return {(f"owl_sap_{name}_count", lane): 1 for name in names}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/health/live", None, request("GET", "/health/live", 200)),
        ("GET", "/v1/jobs/none", None, request("GET", "/v1/jobs/{job_id}", 404)),
        ("GET", "/v1/collections/none", None, request("GET", "/v1/collections/{name}", 404)),
        ("GET", "/such/a/path", None, request("GET", "none", 404)),
        ("PUT", "/embed", None, request("PUT", "/embed", 405)),
        ("PROPFIND", "/such/a/path", None, request("other", "none", 404)),
        ("POST", "/embed", {"inputs": []}, request("POST", "/embed", 422)),
        (
            "POST",
            "/embed",
            {"inputs": ["a", "b", "a"]},
            request("POST", "/embed", 200) | computed() | {("owl_sap_embed_texts_total",): 3},
        ),
        (
            "POST",
            SEARCH,
            {"query": "steel"},
            request("POST", "/v1/collections/{name}/search", 200)
            | computed()
            | {("owl_sap_query_cache_total", "miss"): 1}
            | {("owl_sap_search_seconds_count", "materials", stage): 1 for stage in ("embed", "store")},
        ),
        ("POST", SEARCH, {"query": "a", "k": 0}, request("POST", "/v1/collections/{name}/search", 422)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_request_moves_its_counters_and_no_others(
    client: Client, service: Service, method: str, path: str, body: Any, expected: Counters
) -> None:
    service.search.run("materials", "pump", principal=OPERATOR)  # embeds the unrelated queries of relevance once
    assert moved(client, service, lambda: client.request(method, path, json=body)) == expected


def test_a_sync_counts_every_row_once(client: Client, service: Service, source: TableSource) -> None:
    def rows(**fates: int) -> Counters:
        return {("owl_sap_rows_synced_total", "materials", fate): count for fate, count in fates.items()}

    done: Counters = {("owl_sap_syncs_total", "materials", "succeeded"): 1}
    assert moved(client, service, lambda: service.sync.run("materials")) == done | rows(unchanged=4)
    source.rows_by_key["9"] = {"MATNR": "9", "MAKTX": "conveyor belt", "MTART": "ROH"}
    embedded = computed("bulk") | {("owl_sap_embed_texts_total",): 1}
    one: Counters = {("owl_sap_rows", "materials"): 1, ("owl_sap_chunks", "materials"): 1}
    more = done | rows(unchanged=4, upserted=1) | embedded | one
    assert moved(client, service, lambda: service.sync.run("materials")) == more
    del source.rows_by_key["9"]
    less: Counters = {name: -value for name, value in one.items()}
    assert moved(client, service, lambda: service.sync.run("materials")) == done | rows(unchanged=4, deleted=1) | less


def test_a_failed_sync_counts_as_failed_with_hanas_code(client: Client, service: Service, source: TableSource) -> None:
    def failing() -> None:
        with pytest.raises(ConnectionLost):
            service.sync.run("materials")

    source.failure = ConnectionLost("gone", code=-10807)
    try:
        assert moved(client, service, failing) == {
            ("owl_sap_syncs_total", "materials", "failed"): 1,
            ("owl_sap_hana_errors_total", "-10807"): 1,
        }
    finally:
        source.failure = None


# ----------------------------------------------------------------------------------------------------- jobs and company


def job_of(client: Client, **body: Any) -> dict[str, Any]:
    started = client.post("/v1/collections/materials/sync", json=body)
    assert started.status_code == 202, started.text
    location = started.headers["location"]
    assert location == f"/v1/jobs/{started.json()['job']}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(location).json()
        if job["finished"] is not None and job["state"] not in ("queued", "running"):
            return job
        time.sleep(0.005)
    raise AssertionError("the job does not end")


def test_the_life_of_a_job(client: Client, source: TableSource) -> None:
    source.gate.clear()
    try:
        job = client.post("/v1/collections/materials/sync").json()["job"]
        assert client.post("/v1/collections/materials/sync").status_code == 409
        running = client.get(f"/v1/jobs/{job}").json()
        assert running["state"] in ("queued", "running")
        assert (running["result"], running["error"], running["finished"]) == (None, None, None)
        assert client.get("/v1/collections/materials").json()["job"] == job
        assert client.get("/v1/collections/never").json()["job"] is None
    finally:
        source.gate.set()
    while client.get(f"/v1/jobs/{job}").json()["state"] in ("queued", "running"):
        time.sleep(0.005)
    ended = client.get(f"/v1/jobs/{job}").json()
    assert (ended["state"], ended["result"]["read"], ended["error"]) == ("succeeded", 4, None)
    assert ended["created"] <= ended["finished"] <= time.time()
    assert client.get("/v1/collections/materials").json()["job"] is None
    assert client.get("/v1/jobs").json()[0]["id"] == job


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfMemory("memory does not hold this batch"), "memory does not hold this batch"),
        (RuntimeError("canary-3238"), "unexpected error (RuntimeError); see the log of the service"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_failed_job_tells(
    client: Client,
    service: Service,
    source: TableSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
) -> None:
    def failing(_texts: list[str], **_options: Any) -> Any:
        raise error

    monkeypatch.setattr(service.parts.embedder.engine, "embed_counted", failing)
    source.rows_by_key["7"] = {"MATNR": "7", "MAKTX": "a new row", "MTART": "ROH"}
    try:
        job = job_of(client)
    finally:
        del source.rows_by_key["7"]
    assert (job["state"], job["error"], job["result"]) == ("failed", told, None)
    assert "canary-3238" not in caplog.text


def test_a_row_without_a_vector_is_set_aside_by_the_job(
    client: Client, service: Service, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = service.parts.embedder.engine.embed_counted

    def picky(texts: list[str], **options: Any) -> Any:
        bad = [index for index, text in enumerate(texts) if "poison" in text]
        if bad:
            raise NonFinite(bad)
        return embed(texts, **options)

    monkeypatch.setattr(service.parts.embedder.engine, "embed_counted", picky)
    rows = {"7": "poison", "8": "a healthy row"}
    source.rows_by_key |= {key: {"MATNR": key, "MAKTX": text, "MTART": "ROH"} for key, text in rows.items()}
    try:
        job = job_of(client)
    finally:
        for key in rows:
            del source.rows_by_key[key]
        monkeypatch.undo()
        job_of(client, max_deletes=1)
    assert job["state"] == "succeeded"
    assert (job["result"]["upserted"], job["result"]["quarantined"]) == (1, 1)


def test_searches_during_a_sync_are_answered(client: Client, service: Service, source: TableSource) -> None:
    """Rows change under the searches; each answer is whole, sorted, and of rows that exist."""
    stop = threading.Event()

    def syncing() -> int:
        rounds = 0
        while not stop.is_set():
            source.rows_by_key["2"]["MAKTX"] = f"garden hose rubber, batch {rounds}"
            service.sync.run("materials")
            rounds += 1
        return rounds

    def searching(number: int) -> None:
        text = list(TEXTS.values())[number % 4]
        response = client.post(SEARCH, json={"query": text, "k": 4})
        assert response.status_code == 200, response.text
        hits = response.json()["hits"]
        assert sorted(hit["key"]["MATNR"] for hit in hits) == ["1", "2", "3", "4"]
        scores = [hit["score"] for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert hits[0]["text"].startswith(text)

    with ThreadPoolExecutor(5) as pool:
        sync = pool.submit(syncing)
        try:
            list(pool.map(searching, range(60)))
        finally:
            stop.set()
            rounds = sync.result(60)
            source.rows_by_key["2"]["MAKTX"] = TEXTS["2"]
    service.sync.run("materials")
    assert rounds > 0
    assert service.sync.verify("materials").ok
