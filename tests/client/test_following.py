"""The events of a job behind gateways: refusals in a restart, quiet streams, packed ones, pages in their place."""

from __future__ import annotations

import gzip

import httpx
import pytest

import owl_sap_client
from tests.client.test_sending import FIRST, LAST, SECOND, Script, slept, stream

__all__ = ["slept"]


def test_a_gateway_before_a_service_that_restarts() -> None:
    script = Script(stream(FIRST), httpx.Response(502, text="<html>"), httpx.Response(504), stream(SECOND, LAST))
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 2, 3]
    script = Script(*(httpx.Response(502) for _ in range(11)))
    with script.client() as client, pytest.raises(owl_sap_client.NotReached, match="502 Bad Gateway"):
        list(client.events("j1"))


def test_a_stream_in_which_nothing_happens_is_not_given_up() -> None:
    script = Script(*(stream(b": ping\n\n") for _ in range(30)), stream(FIRST, LAST))
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 3]


def test_a_packed_stream_and_a_page_in_its_place() -> None:
    packed = httpx.Response(
        200,
        content=gzip.compress(FIRST + LAST),
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Content-Encoding": "gzip"},
    )
    script = Script(packed)
    with script.client() as client:
        assert [each.id for each in client.events("j1")] == [1, 3]
    assert script.requests[0].headers["accept-encoding"] == "identity"
    script = Script(httpx.Response(200, html="<p>Who are you?</p>"))
    with script.client() as client, pytest.raises(owl_sap_client.UnexpectedAnswer, match="no events"):
        list(client.events("j1"))
