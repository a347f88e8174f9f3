"""One key's long searches leave threads to others, and end when nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.keys import Grant, create
from app.src.api.requests import Executors
from app.src.service.service import Service
from app.src.settings import Settings
from connector.cancellation import Cancellation
from connector.errors import Cancelled
from connector.stores import filters
from tests.api.conftest import TableSource, serving, settings_in

SEARCH = "/v1/collections/materials/search"
SLOW = {"query": "steel", "mode": "keyword", "filter": {"MTART": {"$contains": "slow"}}}
PATIENCE = 60


class Filter:
    """Stands for a filter that takes long: each look at a row waits until `go`."""

    def __init__(self) -> None:
        self.looks = 0
        self.go = threading.Event()
        self._changed = threading.Condition()

    def __call__(self, phrase: str, text: str) -> bool:
        with self._changed:
            self.looks += 1
            self._changed.notify_all()
        assert self.go.wait(PATIENCE)
        return True

    def wait_for(self, looks: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.looks >= looks, PATIENCE)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Filter]:
    made = Filter()
    monkeypatch.setitem(filters._SQLITE_FUNCTIONS, "owl_contains", (2, made))
    yield made
    made.go.set()


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a call has been cancelled."""
    event, cancel = threading.Event(), Cancellation.cancel

    def told(call: Cancellation) -> None:
        cancel(call)
        event.set()

    monkeypatch.setattr(Cancellation, "cancel", told)
    return event


Keys = Callable[[str], dict[str, str]]


def of_keys(folder: Path, **api: Any) -> tuple[Settings, Keys]:
    base = settings_in(folder)
    keys = {name: create(folder / "keys.json", Grant(name, ("search",)))[1] for name in ("one", "other")}
    access = base.access.model_copy(update={"keys": folder / "keys.json"})
    settings = base.model_copy(update={"access": access, "api": base.api.model_copy(update=api)})
    return settings, lambda name: {"X-API-Key": keys[name]}


def test_a_key_that_holds_threads_leaves_one_for_others(tmp_path: Path, slow: Filter) -> None:
    """Eight searches of one key held all threads: another key's search was answered after 557 s."""
    settings, key = of_keys(tmp_path, threads=3, max_wait=30.0)
    with closing(Service(settings, source=TableSource())) as service:
        service.sync.run("materials")
        with serving(service) as client, ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(client.post, SEARCH, json=SLOW, headers=key("one")) for _ in range(8)]
            slow.wait_for(2)
            for _ in range(5):
                answer = client.post(SEARCH, json={"query": "steel", "mode": "keyword"}, headers=key("other"))
                assert (answer.status_code, slow.go.is_set()) == (200, False)
            assert slow.looks == 2, "two of three threads"
            slow.go.set()
            assert {each.result().status_code for each in asked} == {200}


@pytest.mark.parametrize("ends", ["the client leaves", "the request's time is over"])
def test_a_search_that_nobody_waits_for_gives_its_thread_back(
    tmp_path: Path, slow: Filter, cancelled: threading.Event, ends: str
) -> None:
    """It held the thread until it had looked at every row, for minutes."""
    settings, key = of_keys(tmp_path, threads=1, timeout=PATIENCE if ends == "the client leaves" else 0.5)
    with closing(Service(settings, source=TableSource())) as service:
        service.sync.run("materials")
        with serving(service) as client:
            if ends == "the client leaves":
                with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
                    connection.sendall(_raw(client, key("one")))
                    slow.wait_for(1)
            else:
                answer = client.post(SEARCH, json=SLOW, headers=key("one"))
                assert answer.status_code == 503
            assert cancelled.wait(PATIENCE)
            slow.go.set()
            answer = client.post(SEARCH, json={"query": "steel", "mode": "keyword"}, headers=key("other"))
            assert answer.status_code == 200
            assert slow.looks == 1, "the other rows were not looked at"


def test_an_abandoned_read_that_fails_is_not_reported_as_an_unretrieved_error(service: Service) -> None:
    """Each search that a browser left wrote a traceback to the log."""
    started, go, told = threading.Event(), threading.Event(), list[Any]()
    api = service.settings.api.model_copy(update={"threads": 1})
    service.settings = service.settings.model_copy(update={"api": api})

    def read() -> None:
        started.set()
        assert go.wait(PATIENCE)
        raise Cancelled("its caller has left")

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        with closing(Executors(service)) as threads:
            waiting = asyncio.create_task(threads.run(read))
            assert await asyncio.to_thread(started.wait, PATIENCE)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            del waiting
            go.set()
            await threads.run(lambda: None)  # on the only thread, so the read has ended
            gc.collect()

    asyncio.run(leave())
    assert told == []


def test_a_request_that_gets_a_thread_as_its_time_ends_is_answered(service: Service) -> None:
    """Under load each such request was answered with status 500."""
    api = service.settings.api.model_copy(update={"threads": 1, "max_wait": 0.2})
    service.settings = service.settings.model_copy(update={"api": api})

    async def answer() -> str:
        with closing(Executors(service)) as threads:
            first = threads._queue.enter("", lambda _: None)
            late = asyncio.create_task(threads.run(lambda: "answer"))
            await asyncio.sleep(0)
            assert threads._queue._callers[""].waiting
            asyncio.get_running_loop().call_later(api.max_wait, threads._queue.finish, first)
            time.sleep(2 * api.max_wait)  # the loop finds both due: the end of the wait, then the free thread
            return await late

    assert asyncio.run(answer()) == "answer"


def _raw(client: httpx.Client, headers: dict[str, str]) -> bytes:
    request = client.build_request("POST", SEARCH, json=SLOW, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {SEARCH} HTTP/1.1\r\n{head}\r\n".encode() + request.read()


def attack(pattern: Callable[[int], str]) -> dict[str, Any]:
    conditions = [{"MTART": {"$like": pattern(number)}} for number in range(99)]
    return {"query": "steel", "mode": "keyword", "filter": {"$or": conditions}}


@pytest.fixture
def attacked(tmp_path: Path) -> Callable[..., tuple[Service, Keys]]:
    def made(rows: int, **api: Any) -> tuple[Service, Keys]:
        settings, key = of_keys(tmp_path, max_body_bytes=2 << 20, **api)
        source = TableSource()
        for number in range(rows):
            text = {"MATNR": f"A{number}", "MAKTX": "steel", "MTART": "a" * 20_000}
            source.rows_by_key[f"A{number}"] = text
        service = Service(settings, source=source)
        service.sync.run("materials")
        return service, key

    return made


@pytest.mark.slow
def test_patterns_over_long_values_cost_little(attacked: Callable[..., tuple[Service, Keys]]) -> None:
    """Three documents and 99 conditions took 66.9 s."""
    service, key = attacked(3)
    with closing(service), serving(service) as client:
        start = time.process_time()
        body = attack(lambda number: f"%{'a' * max(98 - number, 1)}b")
        assert client.post(SEARCH, json=body, headers=key("one"), timeout=120).status_code == 200
        assert time.process_time() - start < 15


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [False, True])
def test_long_searches_of_one_key_hold_nobody_else_up(
    attacked: Callable[..., tuple[Service, Keys]], leaves: bool
) -> None:
    """Each of eight takes most of a minute; another key's search was answered after 557 s."""
    service, key = attacked(600, threads=4, timeout=120.0 if leaves else 10.0, max_wait=3.0)
    body = attack(lambda number: f"%{'a_' * 48}b{number}%")

    def asked(_: int) -> int:
        try:
            patience = httpx.Timeout(150, read=5.0 if leaves else 150)
            return client.post(SEARCH, json=body, headers=key("one"), timeout=patience).status_code
        except httpx.ReadTimeout:
            return 0

    def others() -> float:
        start = time.monotonic()
        answer = client.post(SEARCH, json={"query": "steel", "mode": "keyword"}, headers=key("other"), timeout=60)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - start

    with closing(service), serving(service) as client, ThreadPoolExecutor(8) as clients:
        begun = time.monotonic()
        attacks = [clients.submit(asked, number) for number in range(8)]
        waits = []
        while not all(each.done() for each in attacks):
            waits.append(others())
            time.sleep(0.1)  # access.rate
        assert max(waits) < 20
        assert time.monotonic() - begun < 60, "the attack ends with its requests"
        statuses = sorted(each.result() for each in attacks)
        assert statuses == [0, 0, 0, *[429] * 5] if leaves else statuses == [*[429] * 5, 503, 503, 503], statuses
        until(lambda: asked_for_little(client, key("one")) == 200)
        assert {each.result() for each in [clients.submit(asked_for_little, client, key("one")) for _ in range(3)]} == {
            200
        }


def asked_for_little(client: httpx.Client, headers: dict[str, str]) -> int:
    return client.post(SEARCH, json={"query": "steel", "mode": "keyword"}, headers=headers, timeout=60).status_code


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
