"""One key's long searches leave threads to others, and end when nobody waits for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.keys import Grant, create
from app.src.service import Service
from app.src.settings import Settings
from connector.cancellation import Cancellation
from connector.stores import filter_sql
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
    monkeypatch.setitem(filter_sql._SQLITE_FUNCTIONS, "owl_contains", (2, made))
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
        service.sync("materials")
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
        service.sync("materials")
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


def _raw(client: httpx.Client, headers: dict[str, str]) -> bytes:
    request = client.build_request("POST", SEARCH, json=SLOW, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {SEARCH} HTTP/1.1\r\n{head}\r\n".encode() + request.read()
