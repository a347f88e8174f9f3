"""`owl-sap benchmark` as a person meets it, with the hashing embedder, small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from app.src.benchmark import embed, search
from app.src.benchmark.harness import PeerUnavailable
from app.src.benchmark.serve import client

Cli = Callable[..., Any]
HASHING = {"OWL_SAP_EMBEDDING__MODEL": "hash:16"}
FAKE = str(Path(__file__).parents[1] / "benchmark" / "fake_embedder.py")
FIGURE = {"name", "median", "unit", "rounds", "disturbed", "target", "verdict"}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed here."""
    for benchmark in (embed, search):
        monkeypatch.setattr(benchmark, "PAUSE", 0.0)


def check(document: dict[str, Any], rounds: int) -> None:
    assert set(document["machine"]) >= {"cpu", "cores", "python", "numpy", "commit", "load_average"}
    assert document["figures"]
    for figure in document["figures"]:
        assert set(figure) >= FIGURE
        assert figure["median"] > 0
        assert len(figure["rounds"]) in (1, rounds)


def test_embedding_against_a_worker_of_ones_own(here: Cli) -> None:
    run = here("benchmark", "embed", "--against", FAKE, "--rounds", "2", "--scale", "0.02", "--json", **HASHING)
    assert run.code == 0, run.err
    check(run.json, 2)
    assert [figure["name"] for figure in run.json["figures"]] == [
        "short: fake_embedder / ours",
        "skewed: fake_embedder / ours",
        "long: fake_embedder / ours",
    ]
    assert run.json["options"]["model"] == "hash:16"
    assert run.json["peers"]["fake_embedder"]["precision"] == "fp64"
    assert -1 <= run.json["figures"][0]["least_cosine"] < 0.99
    assert "rounds of ours, fake_embedder" in run.err


def test_searching_against_numpy(here: Cli) -> None:
    run = here("--output", "table", "benchmark", "search", "--rounds", "2", "--rows", "500")
    assert run.code == 0, run.err
    assert "ours / numpy" in run.out
    assert "recall=1" in run.err


def test_a_sync_against_the_engine(here: Cli) -> None:
    run = here("benchmark", "sync", "--rounds", "1", "--rows", "50", "--json", **HASHING)
    assert run.code == 0, run.err
    check(run.json, 1)
    assert run.json["figures"][0]["name"] == "sync / engine alone"
    assert run.json["options"]["source"] == "the emulator"
    assert set(run.json["figures"][0]["stages"]) >= {"read", "embed", "apply"}


class _OtherServer(BaseHTTPRequestHandler):
    """Says that there are vectors, at /v1/embeddings only."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        found = self.path == "/v1/embeddings"
        answer = b'{"data": [{"embedding": "AAAA"}]}' if found else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def other() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_serving_beside_another_server(cli: Cli, other: str, tmp_path: Path) -> None:
    run = cli("benchmark", "serve", "--against", other, "--rounds", "1", "--seconds", "0.1", "--json", **HASHING)
    assert run.code == 0, run.err
    check(run.json, 1)
    names = [figure["name"] for figure in run.json["figures"]]
    assert names[:3] == ["ours, 1 clients", "theirs, 1 clients", "1 clients: requests/s, ours / theirs"]
    assert 0 < run.json["figures"][0]["p50_ms"] <= run.json["figures"][0]["p95_ms"]
    assert list(tmp_path.iterdir()) == [], "nothing is left where it was started"


def test_what_cannot_be_put_under_load(here: Cli, other: str) -> None:
    elsewhere = here("benchmark", "serve", "--url", f"{other}/elsewhere", "--rounds", "1", "--seconds", "0.05")
    assert (elsewhere.code, "status 404" in elsewhere.err) == (2, True)
    for url, words in (("127.0.0.1:9", "does not answer"), ("https://127.0.0.1", "not the address")):
        with pytest.raises(PeerUnavailable, match=words):
            client(url, [b"{}"], 0, time.perf_counter() + 1)
    wrong = here("benchmark", "serve", OWL_SAP_EMBEDDING__MODEL="/no/such/model")
    assert (wrong.code, "no such folder" in wrong.err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("embed", "--against", "onx"), "use sentence-transformers, infinity, onnx"),
        (
            ("search", "--against", "faiss", "--peers", "nowhere"),
            "owl-sap benchmark peers faiss --peers nowhere",
        ),
        (("sync", "--against", "numpy"), "is not one of"),
        (("embed",), "the test embedder, which sentence-transformers cannot load"),
    ],
)
def test_a_peer_that_is_not_there(here: Cli, arguments: tuple[str, ...], words: str) -> None:
    run = here("benchmark", *arguments, **HASHING)
    assert (run.code, run.out) == (2, "")
    assert words in run.err


class _Dying(_OtherServer):
    """Answers for a while."""

    left = 3

    def do_POST(self) -> None:
        type(self).left -= 1
        if self.left < 0:
            self.path = "/gone"
        super().do_POST()


@pytest.mark.slow
def test_another_server_that_fails_under_load_is_named(cli: Cli) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Dying) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        against = f"http://127.0.0.1:{server.server_address[1]}"
        run = cli("benchmark", "serve", "--against", against, "--rounds", "1", "--seconds", "0.1", "--json", **HASHING)
        server.shutdown()
        thread.join()
    assert (run.code, f"{against}/v1/embeddings answers with status 404" in run.err) == (2, True)


def test_a_peer_nobody_knows(here: Cli) -> None:
    run = here("benchmark", "peers", "tensorflow")
    assert (run.code, "use sentence-transformers" in run.err) == (2, True)


@pytest.mark.slow
def test_the_real_model_against_sentence_transformers(cli: Cli) -> None:
    """In our own environment, which has it: the same vectors."""
    run = cli("benchmark", "embed", "--rounds", "1", "--scale", "0.05", "--json", OWL_SAP_EMBEDDING__PRECISION="fp32")
    assert run.code == 0, run.err
    for figure in run.json["figures"]:
        assert figure["least_cosine"] > 0.99999
        assert figure["top_10_overlap"] > 0.99
