"""POST /rerank and /v1/rerank. tests/contracts/test_rerankers.py asks another service by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.api.errors import OPENAI_PATHS
from app.src.service.rerank import RerankFailed
from app.src.service.service import Service
from app.src.settings.model import SearchSettings
from owl_sap_client import Client, Unprocessable
from owl_sap_client.results import Reranked, TextDocument
from tests.api.conftest import serving, settings_in
from tests.api.test_rates import limited

ROUTES = ["/rerank", "/v1/rerank"]
TEXTS = ["office chair", "hydraulic oil pump", "oil can"]
ORDER: list[dict[str, Any]] = [
    {"index": 1, "relevance_score": 1.0},
    {"index": 2, "relevance_score": 0.5},
    {"index": 0, "relevance_score": 0},
]


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    search = SearchSettings(rerank="tests.reranker:scores")
    settings = settings_in(tmp_path_factory.mktemp("rerank")).model_copy(update={"search": search})
    with closing(Service(settings)) as service:
        yield service


def ask(client: httpx.Client, route: str = "/rerank", **body: Any) -> httpx.Response:
    return client.post(route, json={"query": "oil pump", "documents": TEXTS} | body)


def refusal(answer: httpx.Response, status: int) -> str:
    """What it says, in the shape of its path."""
    assert answer.status_code == status, answer.text
    openai = str(answer.url.path).startswith(OPENAI_PATHS)
    assert ("error" in answer.json()) == openai
    return str(answer.json()["error"]["message"] if openai else answer.json()["detail"])


@pytest.mark.parametrize("route", ROUTES)
def test_the_best_come_first(shared: httpx.Client, route: str) -> None:
    assert ask(shared, route).json() == {"results": ORDER}
    assert ask(shared, route, top_n=2, documents=[{"text": text} for text in TEXTS]).json() == {"results": ORDER[:2]}
    assert ask(shared, route, top_n=99, model="tests.reranker:scores").json() == {"results": ORDER}
    repeated = ask(shared, route, top_n=1, return_documents=True).json()["results"]
    assert repeated == [ORDER[0] | {"document": {"text": TEXTS[1]}}]


def test_members_of_coheres_clients_are_ignored_for_them(shared: httpx.Client) -> None:
    more = {"max_tokens_per_doc": 1, "max_chunks_per_doc": None, "rank_fields": ["text"]}
    assert ask(shared, "/v1/rerank", **more).json() == {"results": ORDER}
    assert "unknown member" in refusal(ask(shared, "/rerank", **more), 422)


def test_equal_ones_keep_their_order(shared: httpx.Client) -> None:
    answer = ask(shared, documents=["oil a", "pump b", "oil c"]).json()
    assert [each["index"] for each in answer["results"]] == [0, 1, 2]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"query": " "}, 422, "query is empty"),
        ({"documents": []}, 422, "documents is empty"),
        ({"documents": ["a"] * 5}, 413, "api.max_inputs"),
        ({"documents": ["a", "b" * 9_001]}, 413, "documents[1] has 9001 characters"),
        ({"query": "b" * 9_001}, 413, "query has 9001 characters"),
        ({"documents": ["a", 5]}, 422, "documents[1]: must be a text, or an object with"),
        ({"documents": ["a", None]}, 422, 'documents[1]: must be a text, or an object with "text" alone'),
        ({"documents": [{"title": "a"}]}, 422, "documents[0]"),
        ({"top_n": 0}, 422, "top_n"),
        ({"model": "rerank-v3"}, 404, 'the reranker "rerank-v3" is not served here'),
        ({"top_k": 1}, 422, "unknown member"),
    ],
)
def test_what_is_refused(shared: httpx.Client, route: str, body: dict[str, Any], status: int, says: str) -> None:
    assert says in refusal(ask(shared, route, **body), status)


@pytest.mark.parametrize("route", ROUTES)
def test_a_reranker_that_fails(
    shared: httpx.Client, shared_service: Service, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RerankFailed("it took longer than 2 s ([search] rerank_seconds)", outcome="timeout")

    monkeypatch.setattr(shared_service.reranker, "scores", fail)
    answer = ask(shared, route)
    assert "rerank_seconds" in refusal(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_reranker(tmp_path: Path, route: str) -> None:
    with closing(Service(settings_in(tmp_path))) as service, serving(service) as client:
        assert "set [search] rerank" in refusal(ask(client, route), 422)


def test_tokens_are_charged_before_anything_is_computed(
    shared_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_service, "settings", shared_service.settings)  # `limited` replaces them
    with limited(shared_service, tokens="30/hour") as client:
        assert ask(client).status_code == 200
        monkeypatch.setattr(shared_service.reranker, "scores", None)
        assert "access.tokens" in refusal(ask(client, documents=["a b c d e f g"] * 3), 429)


@pytest.mark.parametrize(
    ("query", "documents", "tokens"),
    [("oil pump", TEXTS, 3 * 3 + 12), ("a " * 400, ["b", "c d"], 2 * 400 + 3), ("a", ["b " * 600], 601)],
    ids=["short", "the query with each text", "whole texts"],
)
def test_what_is_charged(
    shared_service: Service, monkeypatch: pytest.MonkeyPatch, query: str, documents: list[str], tokens: int
) -> None:
    monkeypatch.setattr(shared_service, "settings", shared_service.settings)  # `limited` replaces them
    with limited(shared_service, tokens=f"{tokens + 2}/hour") as client:
        assert ask(client, query=query, documents=documents).status_code == 200
        assert ask(client, query="a", documents=["b"]).status_code == 200, "2 tokens are left"
        assert ask(client, query="a", documents=["b"]).status_code == 429
    assert not shared_service.parts.engines_loaded, "nothing is loaded to count"


def test_the_client(shared: httpx.Client, tmp_path: Path) -> None:
    with Client(str(shared.base_url), "any") as client:
        assert client.rerank("oil pump", TEXTS, top_n=1) == [Reranked(1, 1.0)]
        (best,) = client.rerank("oil pump", [{"text": text} for text in TEXTS], top_n=1, return_documents=True)
        assert best == Reranked(1, 1.0, TextDocument(TEXTS[1]))
        with pytest.raises(ValueError, match="documents is one string"):
            client.rerank("oil pump", "oil")
        with pytest.raises(Unprocessable):
            client.rerank("oil pump", [])
