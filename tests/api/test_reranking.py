"""The step after the ranking, over HTTP: a reranker of the operator's own, what it may see, and what becomes of a
search when it fails, hangs or talks nonsense."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.src.access.principal import OPERATOR, Principal
from app.src.core.backends import OutOfMemory
from app.src.core.memory import MemoryLimits
from app.src.observe.metrics import Metrics
from app.src.service.rerank import Reranker, RerankFailed
from app.src.service.search import SearchOptions
from app.src.service.service import Service
from app.src.service.wiring import Parts
from app.src.settings import Settings, SettingsError, load, show
from app.src.settings.model import SearchSettings
from connector.errors import Cancelled
from connector.model import Hit
from tests.api.conftest import TEXTS, TableSource, settings_in
from tests.api.test_jobs import until

SEARCH = "/v1/collections/materials/search"
MODULE = "rerankers_of_a_test"
TEXT = "hydraulic oil pump"


class Recording:
    """Prefers chairs, whatever is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.answer: Callable[[Sequence[str]], Any] = lambda texts: [float("chair" in text) for text in texts]

    def __call__(self, query: str, texts: Sequence[str]) -> Any:
        self.calls.append((query, list(texts)))
        return self.answer(texts)


@pytest.fixture(scope="module")
def installed() -> Iterator[Recording]:
    found, module = Recording(), ModuleType(MODULE)
    module.scores = found  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, module)
        patch.setattr(SearchSettings, "rerank_depth", 3)
        yield found


@pytest.fixture
def reranker(installed: Recording) -> Recording:
    """As if it were new."""
    installed.calls.clear()
    installed.answer = Recording().answer
    return installed


def reranking(folder: Path) -> Settings:
    search = SearchSettings(rerank=f"{MODULE}:scores", rerank_seconds=5)
    return settings_in(folder).model_copy(update={"search": search})


@pytest.fixture
def settings(tmp_path: Path, reranker: Recording) -> Settings:
    return reranking(tmp_path)


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory, installed: Recording) -> Iterator[Service]:
    with closing(Service(reranking(tmp_path_factory.mktemp("reranked")), source=TableSource())) as service:
        service.sync.run("materials")
        yield service


@pytest.fixture
def synced(shared: httpx.Client, reranker: Recording) -> httpx.Client:
    return shared


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(SEARCH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [hit["text"] for hit in answer["hits"]]


def test_the_best_hits_come_in_the_rerankers_order(synced: httpx.Client, reranker: Recording) -> None:
    before = ask(synced, query=TEXT, rerank=False)
    assert not reranker.calls
    reranker.answer = lambda each: [float(place) for place in range(len(each))]  # the last one first
    answer = ask(synced, query=TEXT, explain=True)
    asked, seen = reranker.calls[0]
    assert (asked, seen) == (TEXT, texts(before)[:3])
    assert texts(answer) == [*texts(before)[2::-1], texts(before)[3]], "three are reranked, the fourth stays behind"
    assert {hit["id"]: hit["score"] for hit in answer["hits"]} == {hit["id"]: hit["score"] for hit in before["hits"]}
    told = answer["explain"]["reranker"]
    assert (told["by"], told["name"]) == ("function", f"{MODULE}:scores")
    assert (told["depth"], told["why_not"]) == (3, None)
    assert [told["scores"][hit["id"]] for hit in answer["hits"]] == [2, 1, 0, None]
    assert "rerank" in answer["took_ms"]
    assert texts(ask(synced, query=TEXT, k=1)) == texts(answer)[:1], "before it is cut to k"


@pytest.mark.parametrize(
    "mode", [pytest.param("vector", marks=pytest.mark.slow), pytest.param("keyword", marks=pytest.mark.slow), "hybrid"]
)
def test_in_every_mode(synced: httpx.Client, reranker: Recording, mode: str) -> None:
    assert "chair" in texts(ask(synced, query="pump chair", mode=mode))[0]


def test_what_is_no_text_is_not_reranked(synced: httpx.Client, reranker: Recording) -> None:
    like = ask(synced, query=TEXT, rerank=False)["hits"][0]["id"]
    for asked in ({"like": like}, {"vector": [1.0] * 64}):
        assert ask(synced, **asked, explain=True)["explain"]["reranker"] is None
    assert not reranker.calls


def test_asking_for_what_cannot_be(synced: httpx.Client) -> None:
    response = synced.post(SEARCH, json={"vector": [1.0] * 64, "rerank": True})
    assert response.status_code == 422
    assert "needs a text as the query" in response.text


def test_hits_below_the_least_score_never_get_there(synced: httpx.Client, reranker: Recording) -> None:
    best = ask(synced, query=TEXT, mode="vector", rerank=False)["hits"][0]
    answer = ask(synced, query=TEXT, mode="vector", min_score=best["score"] - 1e-6)
    assert [seen for _, seen in reranker.calls] == [[best["text"]]]
    assert texts(answer) == [best["text"]]


def test_different_hits_by_the_rerankers_relevance(synced: httpx.Client) -> None:
    assert "chair" in texts(ask(synced, query="pump chair", mmr_lambda=0.9, k=2))[0]
    passages = ask(synced, query="pump chair", passages=2)["hits"][0]
    assert passages["passages"][0]["text"] == passages["text"], "of the hits that come out"


@pytest.mark.parametrize(("first", "step"), [(0.5, 0.0), (0.5, -1e-9)])
def test_equal_and_close_scores_are_better_than_none(
    synced: httpx.Client, reranker: Recording, first: float, step: float
) -> None:
    best = texts(ask(synced, query="pump chair", rerank=False))
    reranker.answer = lambda each: [first + step * place for place in range(len(each))]
    found = texts(ask(synced, query="pump chair", mmr_lambda=0.9))
    assert found[3:] == best[3:]
    assert not step or found == best


BAD: dict[str, Callable[[Sequence[str]], Any]] = {
    "an exception": lambda texts: 1 / 0,
    "too few": lambda texts: [1.0],
    "none": lambda texts: None,
    "none for each": lambda texts: [None] * len(texts),
    "words": lambda texts: ["good"] * len(texts),
    "not finite": lambda texts: [float("nan")] * len(texts),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_fault_leaves_the_order_and_says_so(
    synced: httpx.Client, shared_service: Service, reranker: Recording, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    def failed() -> float:
        labels = {"collection": "materials", "outcome": "failed"}
        return shared_service.metrics.registry.get_sample_value("owl_sap_reranks_total", labels) or 0.0

    known = failed()
    before = ask(synced, query=TEXT, rerank=False)
    reranker.answer = BAD[bad]
    answer = ask(synced, query=TEXT, explain=True)
    assert answer["hits"] == before["hits"]
    (note,) = answer["notes"]
    assert note.startswith("the hits are not reranked: ")
    assert answer["explain"]["reranker"]["why_not"] == note
    assert not any(text in note + caplog.text for text in TEXTS.values())
    assert failed() == known + 1


def test_one_without_memory_says_so(synced: httpx.Client, reranker: Recording) -> None:
    def fail(_texts: Sequence[str]) -> Any:
        raise OutOfMemory("the memory of Tesla T4 does not hold one text")

    reranker.answer = fail
    assert ask(synced, query=TEXT)["notes"] == [
        "the hits are not reranked: the memory of Tesla T4 does not hold one text"
    ]


def test_a_cross_encoder_has_the_device_and_the_limits_of_the_engine(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[Any, ...]] = []

    class Fake:
        def __init__(self, *given: Any) -> None:
            loads.append(given)

        def scores(self, query: str, texts: Sequence[str], check: Callable[[], object]) -> list[float]:
            return [float(len(text)) for text in texts]

    monkeypatch.setattr("app.src.core.cross_encoder.CrossEncoding", Fake)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    embedding = settings.embedding.model_copy(update={"device": "cpu", "memory_fraction": 0.35, "reserve_mb": 100})
    search = SearchSettings(rerank=str(tmp_path))
    reranker = Reranker(Parts(settings.model_copy(update={"embedding": embedding, "search": search})), Metrics())
    hits = [Hit(str(size), 1.0, "x" * size, {}) for size in (3, 9, 5)]
    for _ in range(2):
        assert [hit.id for hit in reranker.rerank("materials", TEXT, hits)[0]] == ["9", "5", "3"]
    ((folder, profile, limits),) = loads
    assert (folder, profile.kind, limits) == (tmp_path, "cpu", MemoryLimits(0.35, 100 << 20))


def test_one_that_hangs_costs_so_many_seconds_and_so_many_threads(
    settings: Settings, source: TableSource, reranker: Recording
) -> None:
    gate = threading.Event()
    reranker.answer = lambda texts: gate.wait(60)
    quick = settings.model_copy(update={"search": settings.search.model_copy(update={"rerank_seconds": 0.05})})
    service = Service(quick, source=source)
    try:
        service.sync.run("materials")
        for _ in range(6):
            found = service.search.run("materials", TEXT, principal=OPERATOR)
            assert found.hits
            assert found.notes[0].startswith("the hits are not reranked: ")
        until(lambda: len(reranker.calls) >= 4)
        assert len(reranker.calls) == 4, "the others found no room"
        assert (
            'owl_sap_reranks_total{collection="materials",outcome="timeout"} 6.0' in service.metrics.render().decode()
        )
    finally:
        gate.set()
        service.close()


def test_requests_that_hang_leave_the_slots_of_searches_free(settings: Settings, reranker: Recording) -> None:
    gate = threading.Event()
    answer, reranker.answer = reranker.answer, lambda texts: gate.wait(60)
    search = settings.search.model_copy(update={"rerank_seconds": 0.05})
    found = Reranker(Parts(settings.model_copy(update={"search": search})), Metrics())
    try:
        for says in ["took longer than 0.05 s ([search] rerank_seconds); send fewer documents"] * 2 + ["it waited"]:
            with pytest.raises(RerankFailed, match=re.escape(says)) as failed:
                found.scores(TEXT, ["pump"])
            assert failed.value.outcome == "timeout"
        found.settings, reranker.answer = settings.search, answer
        assert found.rerank("materials", TEXT, [Hit("1", 1.0, "chair", {})])[1:] == ({"1": 1.0}, None)
    finally:
        gate.set()


def test_hits_without_a_score_come_behind_those_with_one(settings: Settings, reranker: Recording) -> None:
    reranker.answer = lambda texts: [None, -1.0, 2.0]
    found = Reranker(Parts(settings), Metrics())
    hits = [Hit(str(place), 1.0, "pump", {}) for place in range(4)]
    order, scores, failure = found.rerank("materials", TEXT, hits)
    assert ([hit.id for hit in order], scores, failure) == (["2", "1", "0", "3"], {"1": -1.0, "2": 2.0}, None)
    with pytest.raises(RerankFailed, match=r"no score for documents\[0\]; leave it out"):
        found.scores(TEXT, ["a", "b", "c"])


def test_an_abandoned_cross_encoder_stops(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    class Slow:
        def __init__(self, *_given: Any) -> None:
            pass

        def scores(self, query: str, texts: Sequence[str], check: Callable[[], object]) -> list[float]:
            try:
                for _batch in range(1_000):
                    check()
                    time.sleep(0.01)
            except Cancelled:
                stopped.set()
            return []

    monkeypatch.setattr("app.src.core.cross_encoder.CrossEncoding", Slow)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    search = SearchSettings(rerank=str(tmp_path), rerank_seconds=0.05)
    with pytest.raises(RerankFailed, match="longer than"):
        Reranker(Parts(settings.model_copy(update={"search": search})), Metrics()).scores(TEXT, ["pump"])
    assert stopped.wait(10)


def test_it_never_sees_what_the_asker_may_not(settings: Settings, source: TableSource, reranker: Recording) -> None:
    blocks = [each.model_dump() | {"row_rights": {"MTART": "owner"}} for each in settings.collections]
    ruled = Settings.model_validate(settings.model_dump(by_alias=True) | {"collections": blocks})
    service = Service(ruled, source=source)
    try:
        service.sync.run("materials")
        who = Principal("somebody", OPERATOR.scopes, {"owner": ["FERT"]})
        for mode in ("vector", "keyword", "hybrid"):
            service.search.run("materials", "garden pump chair", options=SearchOptions(mode), principal=who)
        assert reranker.calls
        assert {text for _, seen in reranker.calls for text in seen} <= {TEXTS["1"], TEXTS["2"]}
    finally:
        service.close()


@pytest.mark.parametrize(
    ("rerank", "model", "says"),
    [
        (f"{MODULE}:score", "hash:64", f'the module "{MODULE}" has no function "score"'),
        ("no_such_module_here:scores", "hash:64", "cannot be imported"),
        (f"{MODULE}:__name__", "hash:64", f'the module "{MODULE}" has no function "__name__"'),
        ("/no/such/folder", "hash:64", "no folder with a config.json"),
        ("hana:SAP_CER.20250701", "hash:64", "needs a HANA: set [hana] host"),
    ],
)
def test_what_the_settings_name_must_be_there_at_the_start(
    settings: Settings, rerank: str, model: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=r"\[search\] rerank") as refused:
        Service(settings.model_copy(update={"search": SearchSettings(rerank=rerank)}))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("rerank", "kind", "name"),
    [
        ("off", "off", "off"),
        ("./models/bge-reranker", "cross-encoder", "bge-reranker"),
        ("shop.ranking:scores", "function", "shop.ranking:scores"),
        ("hana:SAP_CER.20250701", "hana", "SAP_CER.20250701"),
        ("hana:MODEL", "hana", "MODEL"),
        ("https://api.example/v1/rerank", "http", "api.example"),
        ("http://localhost:8001/v1/rerank", "http", "localhost"),
    ],
)
def test_the_kind_and_the_name_of_a_reranker(rerank: str, kind: str, name: str) -> None:
    search = SearchSettings(rerank=rerank)
    assert (search.kind, search.name) == (kind, name)
    assert SearchSettings(rerank="https://api.example", rerank_model="rerank-v3").name == "rerank-v3"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rerank": "cross"}, "must be off, a folder"),
        ({"rerank": "hana:"}, "must be off, a folder"),
        ({"rerank": "hana:a b"}, "must be off, a folder"),
        ({"rerank": "http://api.example/rerank"}, "must begin with https"),
        ({"rerank": "http://localhost.evil.example/rerank"}, "must begin with https"),
        ({"rerank": "file:///etc/passwd"}, "must begin with https"),
        ({"rerank": "https://user:word@api.example/"}, "without user, password"),
        ({"rerank_key": "a\nb"}, "printable ASCII"),
        ({"rerank_key": "\u00e9"}, "printable ASCII"),
        ({"rerank_key": ""}, "printable ASCII"),
    ],
)
def test_settings_that_cannot_be_used(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as refused:
        SearchSettings(**given)
    assert "word@" not in str(refused.value)


def test_the_key_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k3y-canary\n", encoding="utf-8")
    loaded = load(environ={"OWL_SAP_SEARCH__RERANK_KEY_FILE": str(tmp_path / "key")}, folder=tmp_path)
    key = loaded.settings.search.rerank_key
    assert key is not None
    assert key.get_secret_value() == "k3y-canary"
    assert "k3y-canary" not in repr(loaded.settings) + repr(show(loaded))


def test_without_a_reranker_nobody_can_ask_for_it(tmp_path: Path, source: TableSource) -> None:
    service = Service(settings_in(tmp_path), source=source)
    try:
        service.sync.run("materials")
        with pytest.raises(ValueError, match="no reranker is configured"):
            service.search.run("materials", TEXT, options=SearchOptions(rerank=True), principal=OPERATOR)
        explained = service.search.run(
            "materials", TEXT, options=SearchOptions(explain=True), principal=OPERATOR
        ).explain
        assert explained is not None
        assert explained["reranker"] is None
    finally:
        service.close()
