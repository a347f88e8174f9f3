"""One suite for every kind of reranker, and what the kinds that ask another system may meet there."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace as ns
from typing import Any

import pytest

from app.src.access.keys import Grant, create
from app.src.observe.metrics import Metrics
from app.src.service.rerank import Reranker, RerankFailed
from app.src.service.service import Service
from app.src.service.wiring import Parts
from app.src.settings import Settings
from connector import cancellation
from connector.errors import Cancelled, ConnectorError, PermissionRefused, StatementFailed, Unavailable
from connector.hana.connection import HanaPool
from hana_emulator.testing import Emulator
from tests import reranker as own
from tests.api.conftest import serving
from tests.api.test_jobs import until

CANARY = "k3y-cAnArY-7QX"
QUERY = "oil pump"
TEXTS = ["office chair", "hydraulic oil pump", "oil can", "", 'Öl "pump" \\ \U0001f989\n', "oil pump"]
Answer = Callable[[dict[str, Any]], Any]


def scored(body: dict[str, Any]) -> Any:
    """As Jina's service answers: best first, the texts beside."""
    scores = own.scores(body["query"], body["documents"])
    results = [
        {"index": place, "relevance_score": score, "document": {"text": body["documents"][place]}}
        for place, score in sorted(enumerate(scores), key=lambda each: -each[1])
    ]
    return {"model": "jina-reranker", "usage": {"total_tokens": 5}, "results": results[: body["top_n"]]}


class Remote:
    """A reranking service. `answer` makes the answer of a body: JSON, or bytes as they are."""

    def __init__(self) -> None:
        self.answer: Answer = scored
        self.status, self.headers = 200, dict[str, str]()
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.gate, self.left = threading.Event(), threading.Event()
        self.gate.set()
        remote = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                remote.asked.append((self.path, dict(self.headers), body))
                answer = remote.answer(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(remote.status)
                for name, value in ({"Content-Length": str(len(content))} | remote.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if not remote.gate.is_set() and self.rfile.read(1) == b"":  # hangs until the client is gone
                    remote.left.set()
                    return
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v2/rerank?by=us"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    with closing(Remote()) as remote:
        yield remote


def reranker(rerank: str, hana: dict[str, Any] | None = None, **search: Any) -> Reranker:
    search = {"rerank": rerank, "rerank_seconds": 20} | search
    settings = {"embedding": {"model": "hash:16", "device": "cpu"}, "search": search, "hana": hana or {}}
    return Reranker(Parts(Settings.model_validate(settings)), Metrics())


def hasty(found: Reranker, seconds: float) -> Reranker:
    """Shorten its time limit, but not that of its connections."""
    found.settings = found.settings.model_copy(update={"rerank_seconds": seconds})
    return found


def login(emulator: Emulator) -> dict[str, Any]:
    return {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}


KINDS = ["function", "cross-encoder", "hana", "http", "our own service"]


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reranker]:
    with ExitStack() as stack:
        if request.param == "function":
            yield reranker("tests.reranker:scores")
        elif request.param == "cross-encoder":
            for name in ("config.json", "model.safetensors"):
                (tmp_path / name).touch()
            monkeypatch.setattr(
                "app.src.core.cross_encoder.CrossEncoding",
                lambda *_: ns(scores=lambda query, texts, _check: own.scores(query, texts)),
            )
            yield reranker(str(tmp_path))
        elif request.param == "hana":
            yield reranker("hana:SAP_CER.20250701", login(request.getfixturevalue("emulator")))
        elif request.param == "http":
            yield reranker(request.getfixturevalue("remote").url)
        else:
            key = create(tmp_path / "keys.json", Grant("reranker", ("embed",)))[1]
            settings = {"embedding": {"model": "hash:16"}, "search": {"rerank": "tests.reranker:scores"}}
            settings["access"] = {"keys": str(tmp_path / "keys.json"), "tokens": "1000000/minute"}
            service = stack.enter_context(closing(Service(Settings.model_validate(settings))))
            url = stack.enter_context(serving(service)).base_url
            yield reranker(f"{url}/v1/rerank", rerank_key=key, rerank_model="tests.reranker:scores")


def test_one_score_for_each_text_in_their_order(any_kind: Reranker) -> None:
    scores = any_kind.scores(QUERY, TEXTS)
    assert len(scores) == len(TEXTS)
    assert scores[5] > scores[2] > scores[0]
    assert scores[1] > scores[2]
    assert any_kind.scores(QUERY, TEXTS[::-1]) == pytest.approx(scores[::-1])
    assert any_kind.scores(QUERY, TEXTS[5:]) == pytest.approx(scores[5:])
    assert len(set(any_kind.scores(QUERY, [TEXTS[1]] * 50))) == 1, "as many as a search sends"
    assert any_kind.probe() < 20


def test_from_several_threads(any_kind: Reranker) -> None:
    alone = any_kind.scores(QUERY, TEXTS)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(any_kind.scores, [QUERY] * 12, [TEXTS] * 12)) == [pytest.approx(alone)] * 12


# ------------------------------------------------------------------------------------------------------------ over HTTP


def test_it_sends_what_the_settings_name(remote: Remote) -> None:
    reranker(remote.url).scores(QUERY, TEXTS[:2])
    (path, headers, body) = remote.asked[0]
    assert path == "/v2/rerank?by=us"
    assert body == {"query": QUERY, "documents": TEXTS[:2], "top_n": 2}
    assert "Authorization" not in headers
    reranker(remote.url, rerank_key=CANARY, rerank_model="rerank-v3").scores(QUERY, TEXTS[:2])
    (_, headers, body) = remote.asked[1]
    assert (headers["Authorization"], headers["Content-Type"]) == (f"Bearer {CANARY}", "application/json")
    assert body["model"] == "rerank-v3"


ONE = {"index": 0, "relevance_score": 1.0}
BAD: dict[str, Any] = {
    "no JSON": b"<html>",
    "no results": {"data": []},
    "null": None,
    "too few": {"results": [ONE]},
    "one twice": {"results": [ONE, ONE]},
    "one too many": {"results": [ONE, ONE | {"index": 1}, ONE | {"index": 2}]},
    "an index beyond the texts": {"results": [ONE, ONE | {"index": 2}]},
    "a negative index": {"results": [ONE, ONE | {"index": -1}]},
    "an index that is a truth value": {"results": [ONE, ONE | {"index": True}]},
    "an index in a text": {"results": [ONE, ONE | {"index": "1"}]},
    "a score in a text": {"results": [ONE, {"index": 1, "relevance_score": "0.5"}]},
    "no score": {"results": [ONE, {"index": 1, "relevance_score": None}]},
    "not finite": b'{"results": [{"index": 0, "relevance_score": NaN}, {"index": 1, "relevance_score": 1}]}',
    "beyond numbers": b'{"results": [{"index": 0, "relevance_score": 1e400}, {"index": 1, "relevance_score": 1}]}',
    "brackets": b"[" * 100_000,
    "endless": b" " * (8 << 20) + b'{"results": []}',
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_is_refused_and_not_quoted(remote: Remote, bad: str) -> None:
    remote.answer = lambda body: BAD[bad]
    with pytest.raises(RerankFailed, match=r'127\.0\.0\.1 did not answer with one {"index"') as failed:
        reranker(remote.url, rerank_key=CANARY).scores(QUERY, ["pump one", "pump two"])
    assert failed.value.outcome == "failed"
    assert not any(part in str(failed.value) for part in (CANARY, "pump", "html"))


@pytest.mark.parametrize("status", [204, 302, 307, 401, 429, 500])
def test_other_statuses_fail_and_redirects_are_not_followed(remote: Remote, status: int) -> None:
    with closing(Remote()) as elsewhere:
        remote.status, remote.headers = status, {"Location": elsewhere.url}
        with pytest.raises(RerankFailed, match=rf"HTTP {status}: check .*rerank_key.*redirects are not followed"):
            reranker(remote.url, rerank_key=CANARY).scores(QUERY, TEXTS)
        assert len(remote.asked) == 1
        assert elsewhere.asked == []


def test_a_proxy_of_the_environment_is_not_used(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Remote()) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NO_PROXY", "")
        reranker(remote.url).scores(QUERY, TEXTS)
        assert proxy.asked == []


def test_one_that_hangs_is_left_in_time(remote: Remote) -> None:
    """It sent the head of its answer, so each wait of the connection is short of its own limit."""
    remote.gate.clear()
    with pytest.raises(RerankFailed, match=r"longer than 0\.2 s \(\[search\] rerank_seconds\)") as failed:
        hasty(reranker(remote.url), 0.2).scores(QUERY, TEXTS)
    assert failed.value.outcome == "timeout"
    assert remote.left.wait(10), "the connection is closed long before its own limit of 20 s"


def test_one_whose_caller_leaves_is_left_at_once(remote: Remote) -> None:
    remote.gate.clear()
    found, caller = reranker(remote.url), cancellation.Cancellation()

    def ask() -> None:
        with cancellation.cancelled_by(caller):
            found.scores(QUERY, TEXTS)

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask)
        until(lambda: bool(remote.asked))
        caller.cancel()
        with pytest.raises(Cancelled):
            asked.result(10)
    assert remote.left.wait(10), "its limit is 20 s"


def test_one_that_is_not_there(remote: Remote) -> None:
    with closing(Remote()) as gone:
        url = gone.url
    with pytest.raises(RerankFailed, match=r"127\.0\.0\.1 cannot be reached, .*\(Connection refused\)"):
        reranker(url).scores(QUERY, TEXTS)
    with pytest.raises(RerankFailed, match="cannot be reached"):  # no TLS there
        reranker(remote.url.replace("http://", "https://")).scores(QUERY, TEXTS)


@pytest.mark.parametrize("url", ["http://[::1]/rerank", "http://[::1]:80/rerank"])
def test_an_ipv6_address_is_not_cut(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    asked: list[tuple[str, int]] = []

    def connect(self: http.client.HTTPConnection) -> None:
        asked.append((self.host, self.port))
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    with pytest.raises(RerankFailed, match="::1 cannot be reached"):
        reranker(url).scores(QUERY, TEXTS)
    assert asked == [("::1", 80)]


def test_the_key_is_written_nowhere(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    found = reranker(remote.url, rerank_key=CANARY)
    remote.answer = lambda body: {"results": body}
    with pytest.raises(RerankFailed) as failed:
        found.scores(QUERY, TEXTS)
    shown = (failed.value, failed.value.__cause__, found.settings, found.settings.model_dump_json(), caplog.text)
    assert not any(CANARY in repr(each) for each in shown)


# ------------------------------------------------------------------------------------------------------------- in HANA


def test_many_and_long_texts_in_hana(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    real = HanaPool.read

    def read(self: HanaPool, sql: str, parameters: Sequence[Any], *, doing: str) -> Any:
        sent.append(parameters)
        return real(self, sql, parameters, doing=doing)

    monkeypatch.setattr(HanaPool, "read", read)
    found = reranker("hana:SAP_CER.20250701", login(emulator))
    long = "\U0001f989" * 4999 + " oil pump"
    scores = found.scores(f"oil pump {long}", ["chair", "oil pump"] * 150 + [long])
    assert scores[:300] == scores[:2] * 150
    assert scores[1] > scores[0]
    assert [len(each) for each in sent] == [2 + 250, 2 + 51]
    owl = "\U0001f989"
    assert sent[1] == (f"oil pump {owl * 2495}", "SAP_CER.20250701", *["chair", "oil pump"] * 25, owl * 2500)
    found.scores(QUERY, ["a" * 4998 + owl, "a" * 4999 + owl, "a" * 5001])
    assert sent[2][2:] == ("a" * 4998 + owl, "a" * 4999, "a" * 5000), "no half of a surrogate pair"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionRefused("no right", code=258), r"\(code 258\).*Natural Language Processing"),
        (StatementFailed("no function", code=328), r"\(code 328\).*Natural Language Processing"),
        (StatementFailed("syntax", code=257), r"\(code 257\).*Natural Language Processing"),
        (StatementFailed("column store error", code=2048), "^column store error$"),
        (Unavailable("too busy", code=131), "^too busy$"),
    ],
    ids=lambda each: str(getattr(each, "code", "")),
)
def test_only_a_missing_function_is_called_one(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, error: ConnectorError, says: str
) -> None:
    def read(self: HanaPool, sql: str, parameters: Sequence[Any], *, doing: str) -> Any:
        raise error

    monkeypatch.setattr(HanaPool, "read", read)
    with pytest.raises(RerankFailed, match=says):
        reranker("hana:SAP_CER.20250701", login(emulator)).scores(QUERY, TEXTS)


def test_a_model_that_hana_does_not_know(emulator: Emulator) -> None:
    with pytest.raises(RerankFailed, match=r'HANA refuses CROSS_ENCODE with the model "SAP_CER\.2"'):
        reranker("hana:SAP_CER.2", login(emulator)).scores(QUERY, TEXTS)


def test_a_statement_that_takes_too_long_is_cancelled(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def read(self: HanaPool, sql: str, parameters: Sequence[Any], *, doing: str) -> Any:
        with cancellation.current().calling(cancelled.set):
            cancelled.wait(30)
        return []

    monkeypatch.setattr(HanaPool, "read", read)
    with pytest.raises(RerankFailed, match="longer than"):
        hasty(reranker("hana:SAP_CER.20250701", login(emulator)), 0.05).scores(QUERY, TEXTS)
    assert cancelled.wait(10)
