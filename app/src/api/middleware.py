"""The middleware that each request passes, from the outermost to the innermost: security headers, request id and
count, audit log, deadlines, failed authentications, (the guard, in `guard`), rates, size of the body. Plain ASGI.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from asyncio import timeouts
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.access.audit import AuditLog
from app.src.access.principal import ANONYMOUS
from app.src.access.rates import Failures, RateExceeded, Rates
from app.src.api.errors import (
    CRASHED,
    HEAD_TOO_LARGE,
    METHODS,
    TOO_LARGE,
    TOO_MANY,
    TOO_SLOW,
    UNAUTHORIZED,
    UNAVAILABLE,
    WHY_CRASHED,
    log_without_text,
    problem,
    refusal,
)
from app.src.api.guard import PRINCIPAL, REFUSED, principal_of
from app.src.observe.metrics import Metrics

# ----------------------------------------------------------------------------------------------------- security headers

_NOTHING = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_MANUAL = _NOTHING.replace(b"default-src 'none';", b"default-src 'none'; style-src 'self';")
_CONSOLE = (  # its own files and its own server, and nothing inline
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers without frame-ancestors
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-embedder-policy", b"require-corp"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
_HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")
MANUAL = "/docs"


def policy_for(path: str) -> bytes:
    """Return the Content-Security-Policy of a path: the console may load its own files, answers with data nothing."""
    if path == "/" or path.startswith("/console"):
        return _CONSOLE
    return _MANUAL if path == MANUAL or path.startswith(MANUAL + "/") else _NOTHING


class SecurityHeaders:
    """Adds the headers that an answer does not have yet. Without CORS, no script of another site may read an answer."""

    def __init__(self, app: ASGIApp, hsts: bool) -> None:
        self._app = app
        self._hsts = hsts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                present = {name.lower() for name, _ in headers}
                added = [*_ALWAYS, (b"content-security-policy", policy_for(scope["path"]))]
                if self._hsts and scope.get("scheme") == "https":
                    added.append(_HTTPS_ONLY)
                message["headers"] = headers + [each for each in added if each[0] not in present]
            await send(message)

        await self._app(scope, receive, sending)


# ---------------------------------------------------------------------- request id and count

REQUEST_ID = b"x-request-id"
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _request_id(scope: Scope) -> str:
    """Return the caller's own id if it is a harmless word, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            given = str(value.decode("latin-1"))
            return given if 0 < len(given) <= 64 and _ALLOWED.issuperset(given) else uuid.uuid4().hex
    return uuid.uuid4().hex


class Observed:
    """Gives each request an id, and counts it by route template so that labels stay few."""

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
            # Here and not in the framework, which would log the error's text: it may hold row data.
            log_without_text(error, request_id)
            if not started:
                await problem(Request(scope), CRASHED, WHY_CRASHED)(scope, receive, sending)
        finally:
            self._count(scope, status, time.perf_counter() - start)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        counters = self._counters.get((method, route, status))
        if counters is None:  # a lookup by labels takes longer than counting
            requests = self._metrics.http_requests.labels(method, route, str(status))
            counters = self._counters[method, route, status] = requests, self._metrics.http_seconds.labels(route)
        counters[0].inc()
        counters[1].observe(seconds)


# ------------------------------------------------------------------------------------------------------------ audit log

# In the ASGI scope while there is an audit log: the fields that a route adds about its request.
AUDITED = "owl_sap.audited"
# In the ASGI scope: this refusal repeats one that the audit log has already.
REPEATED = "owl_sap.repeated_refusal"
_NOT_AUDITED = ("/health/live", "/health/ready")  # open to all, asked every few seconds, without any effect
_REFUSALS = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 421: "misdirected", 429: "limited"}


def audit(scope: Scope, **fields: Any) -> None:
    """Add fields to this request's audit entry; never a query, a value or a text."""
    audited = scope.get(AUDITED)
    if audited is not None:
        audited.update(fields)


class Audited:
    """Writes one audit entry at the end of each request, whatever its outcome. `collections`: the configured names;
    a path may hold any other text, which is not written."""

    def __init__(self, app: ASGIApp, log: AuditLog, collections: Collection[str]) -> None:
        self._app = app
        self._log = log
        self._collections = frozenset(collections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fields = scope[AUDITED] = {}
        start, status = time.perf_counter(), CRASHED

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route not in _NOT_AUDITED and not scope.get(REPEATED):
                seconds = time.perf_counter() - start
                self._log.record(self._entry(scope, route, status) | fields | {"latency_ms": round(seconds * 1000, 2)})

    def _entry(self, scope: Scope, route: str | None, status: int) -> dict[str, Any]:
        why = scope.get(REFUSED) or _REFUSALS.get(status)
        client, principal = scope.get("client"), scope.get(PRINCIPAL, ANONYMOUS)
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": scope.get("owl_sap.request_id"),
            "principal": principal.name,
            "credential": principal.credential,
            "client": client[0] if client else None,
            "method": scope["method"] if scope["method"] in METHODS else "other",
            "route": route,
            "collection": self._collection(scope),
            "decision": "allowed" if why is None else "refused",
            "why": why,
            "status": status,
        }

    def _collection(self, scope: Scope) -> str | None:
        """Return the collection, also of a request that was refused before its path was parsed."""
        found = scope.get("path_params", {}).get("name")
        pattern = getattr(scope.get("route"), "path_regex", None)
        if found is None and pattern is not None:
            match = pattern.match(scope["path"])
            found = None if match is None else match.groupdict().get("name")
        return found if found in self._collections else None


# ------------------------------------------------------------------------------------------------------------ deadlines

MOST_HEAD_BYTES = 64 * 1024  # of path and headers together: room for a token with many claims
CLOSE = {"Connection": "close"}  # a client that has not sent its whole request is not read from again


class Ending:
    """The requests whose answer has not begun, and by when they must end once the process is shutting down."""

    def __init__(self) -> None:
        self._open: set[timeouts.Timeout] = set()
        self._by: float | None = None

    @property
    def begun(self) -> bool:
        return self._by is not None

    def within(self, seconds: float) -> None:
        """Begin the shutdown, on the event loop."""
        self._by = asyncio.get_running_loop().time() + seconds
        for until in self._open:
            self._shorten(until)

    def add(self, until: timeouts.Timeout) -> None:
        self._open.add(until)
        self._shorten(until)

    def remove(self, until: timeouts.Timeout) -> None:
        self._open.discard(until)

    def _shorten(self, until: timeouts.Timeout) -> None:
        when = until.when()
        if self._by is not None and when is not None and when > self._by:
            until.reschedule(self._by)


class Deadlines:
    """408 for a body that arrives too slowly, 503 for an answer that does not begin in time, 431 for too large a head.
    A stream that has begun may last. Times are in seconds; `connections` bounds what precedes a whole request."""

    def __init__(self, app: ASGIApp, timeout: float, read_timeout: float, ending: Ending) -> None:
        self._app = app
        self._timeout = timeout
        self._read_timeout = read_timeout
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _head_bytes(scope) > MOST_HEAD_BYTES:
            why = f"path and headers are larger than {MOST_HEAD_BYTES} bytes"
            await problem(Request(scope), HEAD_TOO_LARGE, why, headers=CLOSE)(scope, receive, send)
            return
        until = asyncio.timeout(self._timeout)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and not until.expired():
                until.reschedule(None)
            await send(message)

        try:
            async with until:
                self._ending.add(until)
                try:
                    await self._app(scope, self._receiving(receive), sending)
                finally:
                    self._ending.remove(until)
        except TimeoutError:
            if not until.expired():
                raise
            why = f"the request timed out after {self._timeout:g} s (setting api.timeout): try again later"
            if self._ending.begun:
                why = "the service is shutting down and gave up this request: try again later, or elsewhere"
            await problem(Request(scope), UNAVAILABLE, why, headers=CLOSE)(scope, receive, send)

    def _receiving(self, receive: Receive) -> Receive:
        """Bound the time until the whole body has come; afterwards waiting for the client to leave is unbounded."""
        due = asyncio.get_running_loop().time() + self._read_timeout
        whole = False

        async def receiving() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                why = f"the body did not arrive within {self._read_timeout:g} s (setting api.read_timeout)"
                raise HTTPException(TOO_SLOW, why, CLOSE) from None
            whole = not message.get("more_body", False)
            return message

        return receiving


def _head_bytes(scope: Scope) -> int:
    head = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return head + sum(len(name) + len(value) for name, value in scope["headers"])


# ------------------------------------------------------------ failed authentications, rates and sizes


class Throttled:
    """Answers 429 instead of 401 to an address with too many failed authentications."""

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
                    scope[REPEATED] = not self._failures.news(address)
                    why = "too many failed authentications from this address (setting access.failures); "
                    why += "a valid key is still accepted"
                    headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
                    await problem(Request(scope), TOO_MANY, why, headers=headers)(scope, receive, send)
            if not replaced:
                await send(message)

        await self._app(scope, receive, sending)


class Limited:
    """Enforces each principal's rates before the body is read, for every route but health, which monitors ask without
    a key. Adds the headers of draft-ietf-httpapi-ratelimit-headers-10."""

    def __init__(self, app: ASGIApp, rates: Rates) -> None:
        self._app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/health/"):
            await self._app(scope, receive, send)
            return
        principal = principal_of(scope)
        try:
            standing = self._rates.enter(principal)
        except RateExceeded as error:
            await refusal(Request(scope), error)(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if standing is not None and message["type"] == "http.response.start":
                policy = f'"requests";q={standing.quota};w={standing.window}'
                left = f'"requests";r={standing.remaining};t={math.ceil(standing.seconds)}'
                added = (b"ratelimit-policy", policy.encode()), (b"ratelimit", left.encode())
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._rates.leave(principal)


class BodyLimit:
    """Refuses a body above `limit` bytes, by its Content-Length or as it arrives; and any body while all requests
    together hold more than `together` bytes."""

    def __init__(self, app: ASGIApp, limit: int, together: int) -> None:
        self._app = app
        self._limit = limit
        self._together = together
        self._held = 0
        self._why = f"the body is larger than {limit} bytes (setting api.max_body_bytes)"
        self._full = f"the current requests hold {together} bytes (setting api.max_bodies_bytes): try again later"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
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
