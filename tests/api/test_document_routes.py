"""Documents that clients write, over HTTP: put, replaced, deleted, found; and who may not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.principal import LOOPBACK, OPERATOR, Principal
from app.src.access.rows import RowsRefused
from app.src.service.service import Service
from app.src.settings import Settings
from connector.errors import ModelMismatch
from connector.model import ModelSource, Recipe
from connector.sync.documents import NewDocument
from tests.api.conftest import TableSource, serving, settings_in
from tests.api.test_rates import limited

PLACE = "/v1/collections/notes/documents"
SEARCH = "/v1/collections/notes/search"


def with_notes(folder: Path, **block: Any) -> Settings:
    """The settings of the other tests, with a collection that clients write and an audit log."""
    base = settings_in(folder).model_dump(by_alias=True)
    base["collections"] = [*base["collections"], {"name": "notes", "documents": True, **block}]
    return Settings.model_validate(base | {"access": {"audit": str(folder / "audit.log")}})


@pytest.fixture
def service(tmp_path: Path, source: TableSource) -> Iterator[Service]:
    service = Service(with_notes(tmp_path), source=source)
    yield service
    service.close()


def put(client: httpx.Client, *documents: dict[str, Any]) -> list[str]:
    answer = client.post(PLACE, json={"documents": documents})
    assert answer.status_code == 200, answer.text
    ids: list[str] = answer.json()["ids"]
    return ids


def found(client: httpx.Client, query: str, **more: Any) -> list[dict[str, Any]]:
    answer = client.post(SEARCH, json={"query": query, **more})
    assert answer.status_code == 200, answer.text
    hits: list[dict[str, Any]] = answer.json()["hits"]
    return hits


def test_what_is_put_is_found_under_its_id_with_its_metadata(client: httpx.Client) -> None:
    metadata = {
        "plant": "1000",
        "year": 2026,
        "open": True,
        "none": None,
        "tags": ["a", {"deep": 1.5}],
        "odd.name": "x",
    }
    ids = put(
        client, {"id": 'odd "id" ["1"]', "text": "gearbox bearing", "metadata": metadata}, {"text": "garden hose"}
    )
    assert ids[0] == 'odd "id" ["1"]'
    assert len(ids[1]) == 36
    first = found(client, "gearbox bearing")[0]
    assert (first["id"], first["key"], first["metadata"]) == (ids[0], {"id": ids[0]}, metadata)
    assert [hit["id"] for hit in found(client, "garden", filter={"year": {"$gt": 2025}})] == [ids[0]]
    assert [hit["id"] for hit in found(client, "hose", mode="keyword")] == [ids[1]]


def test_the_same_id_replaces_and_the_last_of_two_in_one_request_wins(client: httpx.Client) -> None:
    put(client, {"id": "n", "text": "old text", "metadata": {"v": 1}})
    assert (
        put(client, {"id": "n", "text": "between"}, {"id": "n", "text": "new words", "metadata": {"v": 2}}) == ["n"] * 2
    )
    (hit,) = found(client, "anything")
    assert (hit["text"], hit["metadata"]) == ("new words", {"v": 2})


def test_deleting_tells_how_many_there_were(client: httpx.Client) -> None:
    put(client, {"id": "a", "text": "one"}, {"id": "b", "text": "two"})
    answer = client.post(f"{PLACE}/delete", json={"ids": ["a", "a", "never"]})
    assert answer.json() == {"deleted": 1}
    assert [hit["id"] for hit in found(client, "one")] == ["b"]


def test_a_collection_that_nobody_has_written_to_answers_as_an_empty_one(client: httpx.Client) -> None:
    assert found(client, "anything") == []
    assert client.post(f"{PLACE}/delete", json={"ids": ["a"]}).json() == {"deleted": 0}
    status = client.get("/v1/collections/notes").json()
    assert (status["rows"], status["model"]) == (0, None)
    put(client, {"text": "x"})
    status = client.get("/v1/collections/notes").json()
    assert (status["rows"], status["key"], status["method"]) == (1, ["id"], "documents")


def test_one_bad_document_and_none_is_stored(client: httpx.Client) -> None:
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"text": "fine"}, {"text": " \n"}], "documents[1]: the text is empty"),
        ([{"id": "", "text": "fine"}], "documents[0]: the id is empty"),
        ([{"id": "x" * 1999, "text": "fine"}], "documents[0]: the key is 2003 characters long"),
        ([], "documents"),
    ]
    for documents, words in cases:
        answer = client.post(PLACE, json={"documents": documents})
        assert (answer.status_code, words in answer.text) == (422, True), answer.text
    assert found(client, "fine") == []


def test_texts_have_the_limits_of_other_texts(client: httpx.Client) -> None:
    many = client.post(PLACE, json={"documents": [{"text": "x"}] * 5})
    long = client.post(PLACE, json={"documents": [{"text": "x" * 9001}]})
    assert (many.status_code, long.status_code) == (413, 413)
    assert "api.max_inputs" in many.json()["detail"]
    assert "api.max_text_chars" in long.json()["detail"]


def test_a_collection_of_a_table_is_not_written_and_one_of_clients_not_synced(client: httpx.Client) -> None:
    for path, body in (("documents", {"documents": [{"text": "x"}]}), ("documents/delete", {"ids": ["x"]})):
        answer = client.post(f"/v1/collections/materials/{path}", json=body)
        assert (answer.status_code, "synced from S.MARA" in answer.text) == (409, True)
    put(client, {"text": "x"})
    for path in ("sync", "quarantine/retry"):
        answer = client.post(f"/v1/collections/notes/{path}")
        assert (answer.status_code, "written by clients" in answer.text) == (409, True), path
    assert client.post("/v1/collections/unknown/documents", json={"documents": [{"text": "x"}]}).status_code == 404


@pytest.mark.parametrize(("levels", "status"), [(99, 200), (100, 422), pytest.param(900, 422, marks=pytest.mark.slow)])
def test_metadata_may_be_so_deep_and_no_deeper(client: httpx.Client, levels: int, status: int) -> None:
    """900 levels, which the parser still takes, were an unexpected error."""
    deep: dict[str, Any] = {"bottom": 1}
    for _ in range(levels):
        deep = {"a": deep}
    answer = client.post(PLACE, json={"documents": [{"id": "deep", "text": "a pump", "metadata": deep}]})
    assert answer.status_code == status
    assert status == 200 or "deeper than 100 levels" in answer.json()["detail"]
    assert len(found(client, "pump")) == (status == 200)


def test_who_may_not_see_every_row_may_not_write(tmp_path: Path, source: TableSource) -> None:
    service = Service(with_notes(tmp_path, metadata=["owner"], row_rights={"owner": "owner"}), source=source)
    somebody = Principal("somebody", LOOPBACK.scopes, {"owner": ["a"]})
    try:
        for text, owner in (("a pump", "a"), ("a pump of b", "b")):
            service.documents.put("notes", [NewDocument(owner, text, {"owner": owner})], principal=OPERATOR)
        assert [hit.id for hit in service.search.run("notes", "pump", principal=somebody).hits] == ["a"]
        with pytest.raises(RowsRefused):
            service.documents.put("notes", [NewDocument("b", "mine now")], principal=somebody)
        with pytest.raises(RowsRefused):
            service.documents.delete("notes", ["b"], principal=somebody)
        with serving(service) as client:
            assert client.post(PLACE, json={"documents": [{"text": "x"}]}).status_code == 403
            assert client.post(f"{PLACE}/delete", json={"ids": ["a"]}).status_code == 403
        assert service.status.collections(["notes"])[0]["rows"] == 2
    finally:
        service.close()


def test_those_who_wait_to_write_leave_threads_for_others(tmp_path: Path, source: TableSource) -> None:
    """Eight that waited for another writer held every thread up, for as long as they waited."""
    base = with_notes(tmp_path)
    api = base.api.model_copy(update={"threads": 2, "max_wait": 0.2})
    service = Service(base.model_copy(update={"api": api}), source=source)
    body = {"documents": [{"text": "a pump"}]}
    try:
        with serving(service) as client, ThreadPoolExecutor(4) as clients:
            put(client, {"id": "first", "text": "a first pump"})
            with service.documents._turns["notes"].lock:
                asked = [clients.submit(client.post, PLACE, json=body) for _ in range(4)]
                refused = list(islice(as_completed(asked, timeout=30), 3))
                assert {each.result().status_code for each in refused} == {429}
                assert "api.max_wait" in refused[0].result().json()["detail"]
                assert [hit["id"] for hit in found(client, "pump")] == ["first"], "another thread is free"
            (written,) = set(asked) - set(refused)
            assert written.result().status_code == 200
            put(client, {"id": "last", "text": "a last pump"})
    finally:
        service.close()


def test_what_waits_to_be_written_for_a_client_that_has_left_is_never_written(
    tmp_path: Path, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gave up and asked again had the documents twice, by two ids."""
    base = with_notes(tmp_path)
    api = base.api.model_copy(update={"threads": 2, "max_wait": 60.0, "timeout": 60.0})
    service = Service(base.model_copy(update={"api": api}), source=source)
    begun, go_on, texts = threading.Event(), threading.Event(), list[str]()
    real = service.documents.put

    def hanging(name: str, documents: list[NewDocument], **more: Any) -> Any:
        texts.extend(each.text for each in documents)
        begun.set()
        assert go_on.wait(60)
        return real(name, documents, **more)

    def post(client: httpx.Client, text: str, **more: Any) -> httpx.Response:
        return client.post(PLACE, json={"documents": [{"text": text}]}, **more)

    monkeypatch.setattr(service.documents, "put", hanging)
    try:
        with serving(service) as client, ThreadPoolExecutor(1) as others:
            try:
                held = others.submit(post, client, "held")
                assert begun.wait(60)
                with pytest.raises(httpx.ReadTimeout):
                    post(client, "left", timeout=httpx.Timeout(60, read=0.3))
                deadline = time.monotonic() + 50
                while 'status="499"' not in client.get("/metrics").text:
                    assert time.monotonic() < deadline, "nobody has noticed"
                    time.sleep(0.02)
            finally:
                go_on.set()
            assert held.result().status_code == 200
            assert post(client, "more").status_code == 200, "its place is free"
        assert texts == ["held", "more"]
    finally:
        service.close()


def test_the_audit_log_tells_of_writes_without_their_content(service: Service, tmp_path: Path) -> None:
    with serving(service) as client:
        put(client, {"id": "secret-id", "text": "secret text", "metadata": {"secret": "x"}}, {"text": "another"})
        client.post(f"{PLACE}/delete", json={"ids": ["secret-id"]})
    service.close()
    text = (tmp_path / "audit.log").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert [(each["route"].rsplit("}")[-1], each["documents"]) for each in entries] == [
        ("/documents", 2),
        ("/documents/delete", 1),
    ]
    assert "secret" not in text


def test_metrics_count_documents_by_what_became_of_them(service: Service) -> None:
    documents = [NewDocument("a", "one"), NewDocument("b", "two")]
    service.documents.put("notes", documents, principal=OPERATOR)
    service.documents.put("notes", [*documents, NewDocument("c", "three")], principal=OPERATOR)
    service.documents.delete("notes", ["a"], principal=OPERATOR)
    text = service.metrics.render().decode()
    for outcome, count in (("upserted", 3), ("unchanged", 2), ("deleted", 1)):
        assert f'owl_sap_documents_total{{collection="notes",outcome="{outcome}"}} {count}.0' in text


@pytest.fixture
def wide(service: Service, tmp_path: Path, source: TableSource) -> Iterator[Service]:
    """The same collections by settings that name another model."""
    settings = with_notes(tmp_path)
    other = settings.embedding.model_copy(update={"model": "hash:128"})
    wide = Service(settings.model_copy(update={"embedding": other}), source=source)
    yield wide
    wide.close()


def test_documents_keep_their_model(service: Service, wide: Service) -> None:
    service.documents.put("notes", [NewDocument("a", "garden hose")], principal=OPERATOR)
    for number in range(2):
        wide.documents.put("notes", [NewDocument(f"b{number}", "gear box")], principal=OPERATOR)
    hits = wide.search.run("notes", "garden hose", 1, principal=OPERATOR).hits
    assert [hit.key for hit in hits] == [{"id": "a"}]
    assert wide.status.collections(["notes"])[0]["dimension"] == 64


def test_documents_that_are_all_deleted_make_room_for_another_model(service: Service, wide: Service) -> None:
    service.documents.put("notes", [NewDocument("a", "garden hose")], principal=OPERATOR)
    service.documents.delete("notes", ["a"], principal=OPERATOR)
    wide.documents.put("notes", [NewDocument("a", "garden hose"), NewDocument("b", "gear box")], principal=OPERATOR)
    (status,) = wide.status.collections(["notes"])
    assert (status["dimension"], status["rows"]) == (128, 2)
    assert wide.generations.shown("notes")[0]["model"].startswith("hash:128")
    assert wide.search.run("notes", "garden hose", 1, principal=OPERATOR).hits[0].key == {"id": "a"}
    service.documents.put("notes", [NewDocument("c", "steel wire")], principal=OPERATOR)
    assert service.status.collections(["notes"])[0]["dimension"] == 128, (
        "whose settings are the older ones goes on with it too"
    )


def test_a_model_of_documents_that_is_gone_says_what_can_be_done(service: Service, wide: Service) -> None:
    service.documents.put("notes", [NewDocument("a", "garden hose")], principal=OPERATOR)
    service.parts.store.generations.record(
        "notes", 1, Recipe(service.collections.spec("notes"), ModelSource("/no/such/model"))
    )
    with pytest.raises(ModelMismatch, match=r"hash:64.*mode keyword.*another collection, or delete all") as refused:
        wide.search.run("notes", "garden hose", principal=OPERATOR)
    assert "owl-sap sync" not in str(refused.value)
    wide.documents.delete("notes", ["a"], principal=OPERATOR)
    wide.documents.put("notes", [NewDocument("a", "garden hose")], principal=OPERATOR)
    assert wide.search.run("notes", "garden hose", 1, principal=OPERATOR).hits


def test_texts_of_documents_are_of_the_budget_of_tokens_whole(service: Service) -> None:
    with limited(service, rate="unlimited", tokens="100/hour") as client:
        put(client, {"text": " ".join(f"word{number}" for number in range(90))})
        answer = client.post(PLACE, json={"documents": [{"text": " ".join(f"word{number}" for number in range(20))}]})
        assert (answer.status_code, "access.tokens" in answer.text) == (429, True)
        assert client.post(f"{PLACE}/delete", json={"ids": ["x"]}).status_code == 200
    assert service.status.collections(["notes"])[0]["rows"] == 1
