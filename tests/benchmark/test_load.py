"""The clients of benchmarks/load.py see what they are there to see: wrong answers, refusals, lost connections.
Against a service of this process, some tens of connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import numpy as np
import pytest

from app.src.service.service import Service
from benchmarks import load
from benchmarks.load import Address, Crowd, Question, Tally
from tests.api.conftest import TEXTS, TableSource, serving, settings_in

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(settings_in(tmp_path_factory.mktemp("load")), source=TableSource())
    service.sync.run("materials")
    yield service
    service.close()


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[Address]:
    with serving(service) as client:
        yield of(client)


def of(client: httpx.Client) -> Address:
    return client.base_url.host, client.base_url.port or 0


def run(work: Callable[[], Awaitable[Result]]) -> Result:
    async def whole() -> Result:
        return await work()

    return asyncio.run(whole())


@pytest.fixture
def known(service: Service, monkeypatch: pytest.MonkeyPatch) -> load.Known:
    monkeypatch.setattr(load, "K", 2)
    return load.Known(service.parts.engine.embed(list(TEXTS.values())), list(TEXTS), ())


# ---------------------------------------------------------------------------------------------- right and wrong answers


def test_vectors_are_compared_number_by_number(service: Service, known: load.Known) -> None:
    one, other = service.parts.engine.embed(["steel", "oil"])
    right = known.embed("steel", one).right
    assert right(one.tobytes())
    assert right((one + 1e-5).tobytes())
    assert not right(other.tobytes())
    assert not right((one + np.eye(1, 64)[0].astype("f4") * 0.01).tobytes())
    assert not right(one[:-1].tobytes())
    assert not right(np.full(64, np.nan, "f4").tobytes())
    assert not right(b"")


def test_hits_are_compared_with_the_true_nearest(service: Service, known: load.Known) -> None:
    vector = service.parts.engine.embed(["oil pump"])[0]
    right = known.search("oil pump", vector).right
    scores = dict(zip(TEXTS, (known.rows @ vector).tolist(), strict=True))
    best = sorted(scores, key=lambda key: -scores[key])

    def hits(*keys: str, add: float = 0.0) -> bytes:
        found = [{"key": {"MATNR": key}, "score": scores.get(key, 0.5) + add} for key in keys]
        return json.dumps({"hits": found}).encode()

    assert right(hits(*best[:2]))
    assert not right(hits(best[0], best[3])), "a nearer one was left out"
    assert not right(hits(best[0])), "one too few"
    assert not right(hits(best[0], best[0])), "twice the same"
    assert not right(hits(*best[:3])), "one too many"
    assert not right(hits(best[0], "5")), "none of ours"
    assert not right(hits(*best[:2], add=0.01)), "another's score"


def test_what_comes_is_counted() -> None:
    tally = Tally()
    question = Question("embed", b"", lambda body: body == b"right")
    for head, body in (
        (b"HTTP/1.1 200 x\r\n", b"right"),
        (b"HTTP/1.1 200 x\r\n", b"wrong"),
        (b"HTTP/1.1 429 x\r\nretry-after: 3\r\n", b""),
        (b"HTTP/1.1 429 x\r\n", b""),
        (b"HTTP/1.1 503 x\r\nretry-after: 3\r\n", b""),
    ):
        tally.count(question, head, body, 0.5)
    assert (tally.wrong, tally.seconds, tally.refused) == (1, [0.5, 0.5], [0.5])
    assert tally.failures == ["embed: status 429", "embed: status 503"]


# ------------------------------------------------------------------------------------------------------- the clients


def questions(service: Service, known: load.Known) -> list[Question]:
    texts = [f"pump {number}" for number in range(10)]
    vectors = service.parts.engine.embed(texts)
    return [*map(known.embed, texts, vectors), *map(known.search, texts, vectors)]


def ask(address: Address, asked: list[Question], connections: int, pause: float = 0.0) -> Tally:
    async def come() -> Tally:
        crowd = Crowd(address, asked, pause)
        await crowd.connect(connections)
        try:
            return await crowd.ask(0.4)
        finally:
            crowd.close()

    return run(come)


def test_a_crowd_gets_its_own_answers(service: Service, address: Address, known: load.Known) -> None:
    tally = ask(address, questions(service, known), 40, pause=0.1)
    assert tally.accepted["embed"]
    assert tally.accepted["search"]
    assert (tally.wrong, tally.refused, tally.failures, tally.lost) == (0, [], [], 0)


def test_a_crowd_sees_wrong_answers(service: Service, address: Address, known: load.Known) -> None:
    one, other = service.parts.engine.embed(["steel", "oil"])
    asked = [Question("embed", known.embed("steel", one).content, known.embed("oil", other).right)]
    tally = ask(address, asked, 3)
    assert tally.wrong == len(tally.seconds) > 0


@pytest.mark.proves(27)
def test_a_crowd_is_refused_where_its_requests_would_wait_too_long(
    service: Service, address: Address, known: load.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.src.core.queue import EmbeddingQueue

    asked = questions(service, known)[:10]
    monkeypatch.setattr(EmbeddingQueue, "expected_wait", lambda *_: 41.2)
    tally = ask(address, asked, 5)
    assert tally.refused
    assert (tally.seconds, tally.failures) == ([], [])


class Curt(asyncio.Protocol):
    """Says so much to the first bytes, and closes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)
        self._transport.close()


@asynccontextmanager
async def curt(answer: bytes) -> AsyncIterator[Address]:
    server = await asyncio.get_running_loop().create_server(lambda: Curt(answer), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield host, port


def test_a_crowd_sees_connections_that_are_closed() -> None:
    async def come() -> Tally:
        async with curt(b"") as address:
            crowd = Crowd(address, [Question("embed", b"x", bool)], 0)
            await crowd.connect(2)
            tally = await crowd.ask(0.1)
            crowd.close()
            await asyncio.sleep(0.05)
            return tally

    tally = run(come)
    assert tally.lost == len(tally.failures) >= 2
