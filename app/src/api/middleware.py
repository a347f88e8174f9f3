"""What every request passes: an id, the size limit of its body, and the count of it. Plain ASGI, no route knowledge."""

from __future__ import annotations

import time
import uuid

from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.api.errors import CRASHED, METHODS, TOO_LARGE, UNAVAILABLE, WHY_CRASHED, log_without_text, problem
from app.src.observe.metrics import Metrics

REQUEST_ID = b"x-request-id"
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _request_id(scope: Scope) -> str:
    """The caller's own id if it is a harmless word, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            given = str(value.decode("latin-1"))
            return given if 0 < len(given) <= 64 and _ALLOWED.issuperset(given) else uuid.uuid4().hex
    return uuid.uuid4().hex


class Observed:
    """Gives each request an id and counts it by route template, so that labels stay few."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._counters: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["owl_sap.request_id"] = _request_id(scope)
        start, status, started = time.perf_counter(), CRASHED, False

        async def sending(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            # Here and not in the framework, which would log the error's text: that may hold row data.
            log_without_text(error, request_id)
            if not started:
                await problem(Request(scope), CRASHED, WHY_CRASHED)(scope, receive, sending)
        finally:
            self._count(scope, status, time.perf_counter() - start)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"  # a caller may invent any number of them
        counters = self._counters.get((method, route, status))
        if counters is None:  # looking them up by their labels takes longer than counting
            requests = self._metrics.http_requests.labels(method, route, str(status))
            counters = self._counters[method, route, status] = requests, self._metrics.http_seconds.labels(route)
        counters[0].inc()
        counters[1].observe(seconds)


class BodyLimit:
    """Refuses a body above `limit` bytes: at once by its Content-Length, or as soon as a chunked one passes it; and any
    while the bodies of all requests under way are more than `together` bytes."""

    def __init__(self, app: ASGIApp, limit: int, together: int) -> None:
        self._app = app
        self._limit = limit
        self._together = together
        self._held = 0
        self._why = f"the body is larger than {limit} bytes (setting api.max_body_bytes)"
        self._full = f"the requests under way hold {together} bytes (setting api.max_bodies_bytes): try again later"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._declared(scope):
            await problem(Request(scope), TOO_LARGE, self._why)(scope, receive, send)
            return
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._held += size
            if received > self._limit:
                raise HTTPException(TOO_LARGE, self._why)
            if self._held > self._together:
                raise HTTPException(UNAVAILABLE, self._full)
            return message

        try:
            await self._app(scope, counting, send)
        finally:
            self._held -= received

    def _declared(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
                return True
        return False
