"""The limits of each principal, around the routes: requests in a span of time, requests at once, failed
authentications. Plain ASGI; what is counted, and how, `access.rates` knows.
"""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.access.principal import LOOPBACK, Principal
from app.src.access.rates import Failures, RateExceeded, Rates, Standing
from app.src.api.errors import TOO_MANY, UNAUTHORIZED, problem, refusal
from app.src.api.guard import PRINCIPAL

OLD_NEWS = "owl_sap.old_news"
"""In the ASGI scope: is this refusal one of many of the same kind, which the audit log knows of already?"""
_OPEN = ("/health/",)
"""Asked by whoever watches the process, who has no key."""


def principal_of(scope: Scope) -> Principal:
    principal: Principal = scope.get(PRINCIPAL, LOOPBACK)
    return principal


class Limited:
    """Refuses what a principal asks for beyond its limits. Before bodies are read and routes chosen, so it holds for
    every route. What the guard refuses does not get here."""

    def __init__(self, app: ASGIApp, rates: Rates) -> None:
        self._app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OPEN):
            await self._app(scope, receive, send)
            return
        principal = principal_of(scope)
        try:
            standing = self._rates.enter(principal)
        except RateExceeded as error:
            await refusal(Request(scope), error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send if standing is None else _telling(standing, send))
        finally:
            self._rates.leave(principal)


def _telling(standing: Standing, send: Send) -> Send:
    """With the headers of the IETF's draft (draft-ietf-httpapi-ratelimit-headers-10)."""
    told = [
        (b"ratelimit-policy", f'"requests";q={standing.quota};w={standing.window}'.encode()),
        (b"ratelimit", f'"requests";r={standing.remaining};t={math.ceil(standing.seconds)}'.encode()),
    ]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *told]
        await send(message)

    return sending


class Throttled:
    """Around whoever answers 401: an address that gets too many of them gets 429 instead."""

    def __init__(self, app: ASGIApp, failures: Failures) -> None:
        self._app = app
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        replaced = False

        async def sending(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == UNAUTHORIZED:
                client = scope.get("client")
                address = client[0] if client else ""
                seconds = self._failures.add(address)
                if seconds is not None:
                    replaced = True
                    scope[OLD_NEWS] = not self._failures.news(address)
                    await _too_many_failures(scope, seconds, receive, send)
            if not replaced:
                await send(message)

        await self._app(scope, receive, sending)


async def _too_many_failures(scope: Scope, seconds: float, receive: Receive, send: Send) -> None:
    why = "too many failed authentications from this address (setting access.failures); a right key is still let in"
    headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
    await problem(Request(scope), TOO_MANY, why, headers=headers)(scope, receive, send)
