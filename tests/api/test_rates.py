"""Rates, requests at once and failed authentications: counted by a clock of the test's, and refused on every route."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI

from app.src.access.authentication import Authentication
from app.src.access.principal import LOOPBACK, Principal, Unauthenticated
from app.src.access.rates import RateExceeded, Rates
from app.src.api import server
from app.src.api.server import create_app
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import serving
from tests.api.test_limits import problem

ANNA = Principal("anna", frozenset({"admin"}))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# ------------------------------------------------------------------------------------------------------------- counting


def enter(rates: Rates, principal: Principal = ANNA) -> int:
    """One request from its beginning to its end; how many are left."""
    standing = rates.enter(principal)
    rates.leave(principal)
    assert standing is not None
    return standing.remaining


def test_a_window_holds_so_many_and_the_next_begins_when_it_says(clock: Clock) -> None:
    rates = Rates("3/minute", clock=clock)
    assert [enter(rates) for _ in range(3)] == [2, 1, 0]
    clock.now += 20
    with pytest.raises(RateExceeded, match=r"3/minute .*access\.rate") as refused:
        rates.enter(ANNA)
    assert refused.value.seconds == pytest.approx(40)
    clock.now += 39.9
    with pytest.raises(RateExceeded):
        rates.enter(ANNA)
    clock.now += 0.2
    assert [enter(rates) for _ in range(3)] == [2, 1, 0], "who was refused meanwhile has not used anything up"


def test_each_principal_has_its_own_and_a_key_s_own_rate_counts(clock: Clock) -> None:
    rates = Rates("1/minute", 1, clock=clock)
    quick = Principal("quick", frozenset({"embed"}), rate="5/second", concurrency=2)
    assert enter(rates) == 0
    assert [enter(rates, quick) for _ in range(5)] == [4, 3, 2, 1, 0]
    with pytest.raises(RateExceeded, match="the rate of this key") as refused:
        rates.enter(quick)
    assert refused.value.seconds <= 1
    clock.now += 1
    assert rates.enter(quick)
    assert rates.enter(quick)
    with pytest.raises(RateExceeded, match=r"2 requests .*the concurrency of this key"):
        rates.enter(quick)


def test_at_once(clock: Clock) -> None:
    rates = Rates(concurrency=2, clock=clock)
    rates.enter(ANNA)
    rates.enter(ANNA)
    with pytest.raises(RateExceeded, match=r"2 requests .*access\.concurrency"):
        rates.enter(ANNA)
    rates.leave(ANNA)
    rates.enter(ANNA)
    rates.leave(ANNA)
    rates.leave(ANNA)
    assert rates._at_once == {}, "who asks for nothing takes no memory"


def test_what_the_rate_refuses_is_not_counted_as_under_way(clock: Clock) -> None:
    rates = Rates("1/hour", 1, clock=clock)
    assert enter(rates) == 0
    for _ in range(3):
        with pytest.raises(RateExceeded, match="1/hour"):
            rates.enter(ANNA)


def test_loopback_without_authentication_is_not_limited(clock: Clock) -> None:
    rates = Rates("1/day", 1, "1/day", clock=clock)
    for _ in range(5):
        assert rates.enter(LOOPBACK) is None
    rates.spend(LOOPBACK, 1000)


def test_a_key_may_be_without_limits(clock: Clock) -> None:
    rates = Rates("1/day", 1, clock=clock)
    free = Principal("free", frozenset({"embed"}), rate="unlimited", concurrency=0)
    assert [rates.enter(free) for _ in range(5)] == [None] * 5


def test_tokens_are_a_budget(clock: Clock) -> None:
    rates = Rates(tokens="100/minute", clock=clock)
    rates.spend(ANNA, 60)
    with pytest.raises(RateExceeded, match=r"100/minute tokens .*access\.tokens.* 40 are left") as refused:
        rates.spend(ANNA, 41)
    assert refused.value.seconds == pytest.approx(60)
    rates.spend(ANNA, 40)
    clock.now += 60
    rates.spend(ANNA, 5000)
    with pytest.raises(RateExceeded, match="0 are left"):
        rates.spend(ANNA, 1)


def test_memory_is_bounded_whoever_asks(clock: Clock) -> None:
    rates = Rates("1/day", clock=clock, most=100)
    for number in range(1000):
        enter(rates, Principal(f"user {number}", frozenset()))
    assert len(rates._windows._counts) == 100
    with pytest.raises(RateExceeded):
        rates.enter(Principal("user 999", frozenset()))


def test_failures_are_counted_by_customer(clock: Clock) -> None:
    rates = Rates(failures="2/minute", clock=clock)
    for same in (["10.0.0.1"] * 2, ["2001:db8::1", "2001:db8::ffff:2"], ["", "no address"]):
        assert [rates.fail(address) for address in same] == [None, None]
    clock.now += 15
    for again in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::3", "fe80"):
        refused = rates.fail(again)
        assert refused is not None
        assert refused[0] == pytest.approx(45)
    assert rates.fail("10.0.0.2") is None
    assert rates.fail("2001:db8:0:1::1") is None
    clock.now += 45
    assert rates.fail("10.0.0.1") is None


def test_too_many_failures_of_an_address_are_news_once_in_a_window(clock: Clock) -> None:
    rates = Rates(failures="1/minute", clock=clock)

    def news(address: str) -> bool | None:
        refused = rates.fail(address)
        return None if refused is None else refused[1]

    assert [news(address) for address in ("10.0.0.1", "10.0.0.2")] == [None, None]
    assert [news(address) for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2")] == [True, False, True]
    clock.now += 60
    assert [news("10.0.0.1") for _ in range(3)] == [None, True, False]
    assert Rates().fail("10.0.0.1") is None


# ------------------------------------------------------------------------------------------------------------ over HTTP


class Everybody(Authentication):
    """Each credential but "wrong" is Anna's, who may do all."""

    async def principal(self, credential: str) -> Principal:
        if credential == "wrong":
            raise Unauthenticated("unknown key", "unknown_key")
        return ANNA


@contextmanager
def limited(service: Service, **access: Any) -> Iterator[httpx.Client]:
    """The whole application, asked by a key."""
    service.settings = Settings.model_validate(service.settings.model_dump(by_alias=True) | {"access": access})
    everybody = Everybody(service.settings.access)
    everybody.configured = True
    with mock.patch.object(service, "access", everybody), serving(service) as client:
        client.headers["X-API-Key"] = "right"
        yield client


def operations(app: FastAPI) -> list[tuple[str, str]]:
    found = [(method.upper(), path) for path, each in app.openapi()["paths"].items() for method in each]
    assert len(found) > 20
    return found


def test_every_route_is_limited_but_health(synced: Service) -> None:
    with limited(synced, rate="1/hour") as client:
        assert client.get("/v1/models").status_code == 200
        others = [("GET", "/docs"), ("GET", "/openapi.json"), ("OPTIONS", "/embed")]
        for method, path in [*operations(create_app(synced)), *others]:
            answer = client.request(method, path.format(name="materials", job_id="x", model="x", schema="S", table="T"))
            if path.startswith("/health/"):
                assert answer.status_code == 200
                assert "ratelimit" not in answer.headers
            else:
                assert answer.status_code == 429, (method, path)
                assert 3400 <= int(answer.headers["retry-after"]) <= 3600
        assert "setting access.rate" in problem(client.get("/v1/jobs"), 429)["detail"]
        openai = client.post("/v1/embeddings", json={"input": "a"}).json()["error"]
        assert (openai["type"], "access.rate" in openai["message"]) == ("rate_limit_error", True)


def test_answers_say_what_is_left(synced: Service) -> None:
    with limited(synced, rate="2/minute") as client:
        first, second = client.post("/embed", json={"inputs": "a"}), client.get("/v1/models")
    assert first.headers["ratelimit-policy"] == second.headers["ratelimit-policy"] == '"requests";q=2;w=60'
    assert re.fullmatch(r'"requests";r=1;t=[1-6]?\d', first.headers["ratelimit"])
    assert second.headers["ratelimit"].startswith('"requests";r=0;t=')


def test_tokens_are_refused_before_they_are_computed(synced: Service) -> None:
    with limited(synced, rate="unlimited", tokens="6/hour") as client:
        assert client.post("/embed", json={"inputs": ["one two", "three"]}).status_code == 200
        before = synced.metrics.embedded_texts._value.get()
        for path, body in (("/embed", {"inputs": "a b c d"}), ("/v1/embeddings", {"input": ["a b", "c d"]})):
            answer = client.post(path, json=body)
            assert answer.status_code == 429
            assert "access.tokens" in answer.text
            assert int(answer.headers["retry-after"]) > 3400
        assert synced.metrics.embedded_texts._value.get() == before
        assert client.post("/embed", json={"inputs": "a b c"}).status_code == 200


def test_requests_at_once_over_http(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Semaphore(0), threading.Event()

    def hanging(*_: Any) -> list[Any]:
        began.release()
        assert go.wait(30)
        return []

    monkeypatch.setattr(synced.status, "collections", hanging)
    with limited(synced, concurrency=2) as client:
        threads = [threading.Thread(target=client.get, args=("/v1/collections",)) for _ in range(2)]
        for thread in threads:
            thread.start()
            assert began.acquire(timeout=30)
        assert "access.concurrency" in problem(client.get("/v1/jobs"), 429)["detail"]
        assert client.get("/health/live").status_code == 200
        go.set()
        for thread in threads:
            thread.join()
        assert client.get("/v1/models").status_code == 200


def test_failed_authentication_is_throttled_and_right_keys_are_let_in(
    synced: Service, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Rates", partial(Rates, clock=clock))
    with limited(synced, failures="3/minute") as client:
        wrong = {"X-API-Key": "wrong"}
        assert [client.get("/v1/jobs", headers=wrong).status_code for _ in range(4)] == [401, 401, 401, 429]
        refused = client.get("/v1/jobs", headers=wrong)
        assert refused.headers["retry-after"] == "60"
        assert refused.headers["content-type"] == "application/problem+json"
        assert "www-authenticate" not in refused.headers
        assert client.get("/v1/jobs").status_code == 200, "others' failures lock nobody out"
        clock.now += 60
        assert client.get("/v1/jobs", headers=wrong).status_code == 401


def test_a_slot_comes_back_whatever_becomes_of_the_request(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(synced.status, "collections", failing)
    with limited(synced, concurrency=1) as client:
        assert [client.get("/v1/collections").status_code for _ in range(3)] == [500, 500, 500]


@pytest.mark.parametrize("rate", ["", "600", "0/minute", "600/week", "minute", "1e3/second", "-1/day"])
def test_rates_that_are_none(rate: str) -> None:
    with pytest.raises(ValueError, match="invalid rate"):
        Settings.model_validate({"access": {"rate": rate}})
