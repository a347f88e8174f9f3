"""Middleware around each request, from before its body is read until its answer is sent: authentication, scopes by
route, rate limits, limits of time and size, security headers, request id, metrics and audit entry. Routes that are not
in NEEDS are not served."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from asyncio import timeouts
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.access.audit import AuditLog
from app.src.access.principal import ANONYMOUS, ISSUER_AWAY, LOOPBACK, SCOPES, Principal, Unauthenticated
from app.src.access.principal import Scope as Right
from app.src.access.rates import Rates, Standing
from app.src.access.rows import RowsRefused
from app.src.api.errors import WHY_CRASHED, Refused, answer_to, log_without_text, problem
from app.src.service.service import Service
from app.src.settings import is_loopback

# Keys of the ASGI scope: the caller; the code of a refusal; the fields that a route adds to the audit entry, if an
# audit log is configured.
PRINCIPAL = "owl_sap.principal"
REFUSED = "owl_sap.refused"
AUDITED = "owl_sap.audited"
_STILL = "owl_sap.still"  # a check whether the caller's credential is still valid
_STANDING = "owl_sap.standing"  # the state of the caller's rate limit
_REPEATED = "owl_sap.repeated_refusal"  # a refusal that the audit log already has
REQUEST_ID = "owl_sap.request_id"
MANUAL = "/docs"
MOST_VALUES = 100_000  # JSON values in a body, at any depth
# Any one of these scopes suffices, and admin always does. Empty: open to all.
Need = frozenset[Right]
OPEN: Need = frozenset()
ANYBODY: Need = frozenset(SCOPES)
_EMBED, _SEARCH, _SYNC = (frozenset[Right]((scope,)) for scope in ("embed", "search", "sync"))
_ADMIN, _METRICS = (frozenset[Right]((scope,)) for scope in ("admin", "metrics"))
_METRICS_ROUTE = "GET /metrics"
_ONE = "/v1/collections/{name}"
_TABLE = "/v1/tables/{schema}/{table:path}"
# By method and route template. HEAD needs the scope of GET. The router answers other methods with 405.
NEEDS: Mapping[str, Need] = {
    # The console's files hold no data; it reads data over the other routes.
    **dict.fromkeys(("GET /health/live", "GET /health/ready", "GET /", "GET /console/{path:path}"), OPEN),
    **dict.fromkeys(("GET /v1/info", "GET /docs", "GET /docs/style.css", "GET /openapi.json"), ANYBODY),
    **dict.fromkeys((_METRICS_ROUTE, "GET /v1/gpu"), _METRICS),
    **dict.fromkeys(("POST /embed", "POST /v1/embeddings", "POST /rerank", "POST /v1/rerank"), _EMBED),
    **dict.fromkeys(("GET /v1/models", "GET /v1/models/{model:path}"), _EMBED | _SEARCH),
    **dict.fromkeys(
        (f"POST {_ONE}/search", f"POST {_ONE}/rows", f"GET {_ONE}/rows", f"GET {_ONE}/fields", f"GET {_ONE}/map"),
        _SEARCH,
    ),
    "POST /mcp": _SEARCH,  # tools that need further scopes check them
    **dict.fromkeys(("GET /v1/collections", f"GET {_ONE}"), _SEARCH | _SYNC | _METRICS),
    **dict.fromkeys((f"POST {_ONE}/sync", f"POST {_ONE}/verify", f"GET {_ONE}/generations"), _SYNC),
    **dict.fromkeys(("GET /v1/jobs", "GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events"), _SYNC),
    "POST /v1/jobs/{job_id}/cancel": _SYNC,
    f"GET {_ONE}/quarantine": _SYNC,
    **dict.fromkeys((f"POST {_ONE}/quarantine/retry", f"POST {_ONE}/quarantine/drop"), _SYNC),
    **dict.fromkeys((f"POST {_ONE}/documents", f"POST {_ONE}/documents/delete"), _SYNC),
    "POST /v1/collections": _ADMIN,  # its `where` is SQL
    f"POST {_ONE}/generations": _ADMIN,  # switches or deletes data that all callers use
    # HANA's catalogue, as visible to the technical user.
    **dict.fromkeys(("GET /v1/tables", f"GET {_TABLE}", f"POST {_TABLE}/preview"), _ADMIN),
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A route and the scopes that its methods need."""

    route: Route
    methods: frozenset[str]
    need: Need

    def allows(self, principal: Principal) -> bool:
        return not self.need or not (self.need | _ADMIN).isdisjoint(principal.scopes)


class Rules:
    """Find routes with the router's patterns in the router's order, so that both find the same route. Raises
    RuntimeError for a route without an entry in NEEDS: a programming error, found before the first request."""

    def __init__(self, routes: Sequence[BaseRoute], needs: Mapping[str, Need]) -> None:
        self._rules: list[_Rule] = []
        for route in routes:
            if not isinstance(route, Route):
                raise RuntimeError(f"{type(route).__name__} is a kind of route unknown to the guard")
            methods = frozenset(route.methods or ())
            found = {needs.get(f"{method} {route.path}") for method in methods - {"HEAD"}}
            need = found.pop() if len(found) == 1 else None
            if need is None:
                raise RuntimeError(f"{sorted(methods)} {route.path} is not in the guard's table (app/src/api/guard.py)")
            self._rules.append(_Rule(route, methods, need))

    def find(self, method: str, path: str) -> _Rule | None:
        """Return the rule of a path, possibly for other methods, as the router does for its 405."""
        other = None
        for rule in self._rules:
            if rule.route.path_regex.fullmatch(path):  # `$` alone would allow a trailing line feed
                if method in rule.methods:
                    return rule
                other = other or rule
        return other


# ------------------------------------------------------------------------------------------------------------- requests

_REALM = 'Bearer realm="owl-sap"'
# An IPv6 address in brackets, or a name or IPv4 address, optionally with a trailing dot; optionally a port.
_HOST = re.compile(r"(?:\[([0-9a-f.]*:[0-9a-f:.]*)\]|([0-9a-z_-][0-9a-z._-]*?)\.?)(?::([0-9]{1,5}))?", re.IGNORECASE)
FOREIGN = "requests of other web pages are refused"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def foreign(headers: Headers) -> bool:
    """Return whether a page of another site sent the request. MCP requires rejecting it even with a credential."""
    hosts = [host.lower() for host in headers.getlist("host")]
    try:
        return any(urlsplit(origin).netloc.lower() not in hosts for origin in headers.getlist("origin"))
    except ValueError:
        return True


# Also matches an unterminated string, so that the search stays linear.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_values(body: bytes) -> None:
    """Reject a body of more than MOST_VALUES values, without parsing it: 2 MB take 2 to 20 ms."""

    def beginnings(part: bytes) -> int:  # at least the number of values
        return part.count(b",") + part.count(b"[") + part.count(b"{")

    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):  # the parser reads other encodings too
        body = body.decode(encoding, "replace").encode()
    if beginnings(body) <= MOST_VALUES:
        return
    bare, texts = _TEXT.subn(b"", body, count=2 * MOST_VALUES)  # a value has at most one name
    if texts == 2 * MOST_VALUES or beginnings(bare) > MOST_VALUES:
        raise Refused(
            "TooMuch",
            f"the body holds more than {MOST_VALUES} JSON values: send several requests with fewer texts, numbers or "
            "members each",
        )


# -------------------------------------------------------------------------------------------------------------- answers

_NOTHING = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_CONSOLE = (  # only its own files and its own server; nothing inline
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_ALWAYS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",  # for browsers without frame-ancestors
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-embedder-policy": b"require-corp",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
    b"cache-control": b"no-store",
}
_CLOSE = {"Connection": "close"}  # no more is read from a client that has not sent its whole request
# Other methods share one label, because callers may invent any number of them.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_REFUSALS = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 421: "misdirected", 429: "limited"}


class Ending:
    """Requests without an answer yet, and their deadline once the process is shutting down."""

    def __init__(self) -> None:
        self.waiting: set[timeouts.Timeout] = set()
        self.by: float | None = None

    def within(self, seconds: float) -> None:
        """Begin the shutdown; call it on the event loop."""
        self.by = asyncio.get_running_loop().time() + seconds
        for until in self.waiting:
            self.shorten(until)

    def shorten(self, until: timeouts.Timeout) -> None:
        if self.by is not None and (until.when() or 0) > self.by:
            until.reschedule(self.by)


class Guard:
    """ASGI middleware. Puts the Principal and the route into the scope."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        service: Service,
        rates: Rates | None = None,
        log: AuditLog | None = None,
        ending: Ending | None = None,
    ) -> None:
        self._app, self._log, self._api = app, log, service.settings.api
        self._authentication, self._metrics = service.access, service.metrics
        self._rates, self._ending = rates or Rates(), ending or Ending()
        access = service.access.settings
        self._hosts = frozenset(name.lower() for name in access.hosts)
        self._rules = Rules(routes, {**NEEDS, _METRICS_ROUTE: OPEN} if access.open_metrics else NEEDS)
        self._collections = service.collections.names
        self._held = 0  # bytes of all bodies in memory
        # The system's generator would take a tenth of a request's time.
        self._ids = random.Random()  # nosec B311 # ids protect nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        start, status = time.perf_counter(), 0
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else f"{self._ids.getrandbits(128):032x}"
        scope[PRINCIPAL] = ANONYMOUS
        rule = self._rules.find(scope["method"], scope["path"])
        if rule is not None:
            scope["route"] = rule.route  # for metrics and logs of refused requests
        if self._log is not None:
            scope[AUDITED] = {}
        until = asyncio.timeout(self._api.timeout)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = self._headers(scope, message.get("headers", ()))
                if until in self._ending.waiting and not until.expired():
                    until.reschedule(None)  # a stream that has begun has no deadline
            await send(message)

        try:
            async with until:
                self._ending.waiting.add(until)
                try:
                    self._ending.shorten(until)
                    await self._serve(scope, rule, receive, sending)
                finally:
                    self._ending.waiting.discard(until)
        except Exception as error:
            refusal = self._answer_to(error, scope, timed_out=until.expired())
            if not status:
                await refusal(scope, receive, sending)
        finally:
            self._count(scope, status or HTTPStatus.INTERNAL_SERVER_ERROR, time.perf_counter() - start)

    async def _serve(self, scope: Scope, rule: _Rule | None, receive: Receive, send: Send) -> None:
        await self._authorize(scope, rule)
        principal: Principal = scope[PRINCIPAL]
        # Monitors call health without a key. Without authentication, callers cannot be distinguished.
        counted = self._authentication.configured and not scope["path"].startswith("/health/")
        if counted:
            scope[_STANDING] = self._rates.enter(principal)
        content = b""
        try:
            if rule is not None and scope["method"] == "POST" and "POST" in rule.methods:
                content = await self._content(scope, receive)
                check_values(content)
                receive = once_more(content, receive)
            await self._app(scope, receive, send)
        finally:
            self._held -= len(content)
            if counted:
                self._rates.leave(principal)

    async def _content(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body and count its bytes as held. Raises ClientLeft if the client leaves first, and
        HTTPException for a body that is too large or too slow, or while all bodies together hold too much."""
        limit, together = self._api.max_body_bytes, self._api.max_bodies_bytes
        why = f"the body is larger than {limit} bytes (setting api.max_body_bytes)"
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        parts: list[bytes] = []
        size, whole = 0, False
        try:
            async with asyncio.timeout(self._api.read_timeout):
                while not whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused("ClientLeft", "the connection was closed before the whole body had come")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    if size > limit:
                        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
                    if self._held > together:
                        why = f"the current requests hold {together} bytes (setting api.max_bodies_bytes): try again "
                        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{why}later")
                    whole = not message.get("more_body", False)
        except TimeoutError:
            why = f"the body did not arrive within {self._api.read_timeout:g} s (setting api.read_timeout)"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, why, _CLOSE) from None
        finally:
            if not whole:
                self._held -= size
        return b"".join(parts)

    def _headers(self, scope: Scope, own: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer. There is no CORS header, so scripts of other sites cannot read it."""
        path, policy = scope["path"], _NOTHING
        if path == "/" or path.startswith("/console"):
            policy = _CONSOLE
        elif path == MANUAL or path.startswith(MANUAL + "/"):
            policy = _NOTHING.replace(b"default-src 'none';", b"default-src 'none'; style-src 'self';")
        added = {**_ALWAYS, b"content-security-policy": policy, b"x-request-id": scope[REQUEST_ID].encode()}
        if self._api.hsts and scope.get("scheme") == "https":
            added[b"strict-transport-security"] = b"max-age=31536000"
        standing: Standing | None = scope.get(_STANDING)
        if standing is not None:  # as in draft-ietf-httpapi-ratelimit-headers-10
            added[b"ratelimit-policy"] = f'"requests";q={standing.quota};w={standing.window}'.encode()
            left = f'"requests";r={standing.remaining};t={math.ceil(standing.seconds)}'
            added[b"ratelimit"] = left.encode()
        for name, _ in own:
            added.pop(name.lower(), None)
        return [*own, *added.items()]

    def _answer_to(self, error: Exception, scope: Scope, *, timed_out: bool) -> Response:
        request = Request(scope)
        if timed_out and isinstance(error, TimeoutError):
            why = f"the request timed out after {self._api.timeout:g} s (setting api.timeout): try again later"
            if self._ending.by is not None:
                why = "the service is shutting down and gave up this request: try again later, or elsewhere"
            return problem(request, HTTPStatus.SERVICE_UNAVAILABLE, why, headers=_CLOSE)
        self._metrics.count_error(error)
        if isinstance(error, RowsRefused):
            scope[REFUSED] = "row_rights"
        known = answer_to(request, error)
        if known is not None:
            return known
        # The framework would log the error's message, which may hold row data.
        log_without_text(error, scope[REQUEST_ID])
        return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, WHY_CRASHED)

    # ---------------------------------------------------------------------------------------------------- refusals

    async def _authorize(self, scope: Scope, rule: _Rule | None) -> None:
        """Put the principal into the scope. Raises HTTPException."""
        headers = Headers(scope=scope)
        if not self._authentication.configured:
            scope[PRINCIPAL] = LOOPBACK
            self._check_local(scope, headers)
            return
        try:
            principal = await self._principal(headers)
        except Unauthenticated as error:
            if rule is None or rule.need:
                if error.code == ISSUER_AWAY:
                    raise self._refused(scope, HTTPStatus.SERVICE_UNAVAILABLE, str(error), error.code) from None
                raise self._unauthenticated(scope, str(error), error.code) from None
            principal = ANONYMOUS
        scope[PRINCIPAL] = principal
        if rule is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)

        async def still_may() -> bool:
            try:
                return rule.allows(await self._principal(headers))
            except Unauthenticated:
                return not rule.need

        scope[_STILL] = still_may
        if scope["method"] in rule.methods and not rule.allows(principal):
            listed = sorted(rule.need)
            header = f'{_REALM}, error="insufficient_scope", scope="{" ".join(listed)}"'
            why = f"this needs the scope {' or '.join(listed)}"
            raise self._refused(scope, HTTPStatus.FORBIDDEN, why, "scope", {"WWW-Authenticate": header})

    async def _principal(self, headers: Headers) -> Principal:
        """Return the caller from Authorization (Bearer) or X-API-Key, not from the URL, which is logged. Raises
        Unauthenticated."""
        found = [value.strip() for value in headers.getlist("x-api-key")]
        for value in headers.getlist("authorization"):
            scheme, _, credential = value.strip().partition(" ")
            if scheme.lower() != "bearer":
                raise Unauthenticated("the scheme of Authorization must be Bearer", "missing")
            found.append(credential.strip())
        if not any(found):
            raise Unauthenticated("send an API key or a token: Authorization: Bearer ..., or X-API-Key", "missing")
        if len(set(found)) > 1:
            raise Unauthenticated("two credentials were sent; send one", "ambiguous")
        return await self._authentication.principal(found[0])

    def _refused(
        self, scope: Scope, status: int, why: str, code: str, headers: Mapping[str, str] | None = None
    ) -> HTTPException:
        scope[REFUSED] = code
        self._metrics.access_refused.labels(code).inc()
        return HTTPException(status, why, headers)

    def _unauthenticated(self, scope: Scope, why: str, code: str) -> HTTPException:
        """Return 401 as in RFC 6750, with an error code only if a credential was sent; 429 after too many failures."""
        client = scope.get("client")
        too_many = self._rates.fail(client[0] if client else "")
        if too_many is not None:
            seconds, news = too_many
            scope[_REPEATED] = not news
            why = "too many failed authentications from this address (setting access.failures); a valid key is still "
            headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
            return self._refused(scope, HTTPStatus.TOO_MANY_REQUESTS, f"{why}accepted", code, headers)
        told = "".join(char for char in why if " " <= char <= "~" and char not in '"\\')  # RFC 6750, section 3
        header = _REALM if code == "missing" else f'{_REALM}, error="invalid_token", error_description="{told}"'
        return self._refused(scope, HTTPStatus.UNAUTHORIZED, why, code, {"WWW-Authenticate": header})

    def _check_local(self, scope: Scope, headers: Headers) -> None:
        """Refuse requests from web pages while no authentication is configured; local programs may call. The Host
        header reveals DNS rebinding, Origin a page of another site."""
        hosts = headers.getlist("host")
        own = not hosts and scope["http_version"] == "1.0"  # needs no Host header; browsers do not use it
        if len(hosts) == 1 and (found := _HOST.fullmatch(hosts[0])):
            address, name, port = found.groups()
            name = (address or name).lower()
            own = (name in self._hosts or is_loopback(name)) and (port is None or 0 < int(port) < 1 << 16)
        if not own:
            why = "this service has no authentication and answers on loopback only: send one Host header with its "
            why += "address or a name from the setting access.hosts"
            raise self._refused(scope, HTTPStatus.MISDIRECTED_REQUEST, why, "host")
        if foreign(headers):
            raise self._refused(scope, HTTPStatus.FORBIDDEN, FOREIGN, "origin")

    # ----------------------------------------------------------------------------------------------- count and audit

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count the request by route template, to bound the number of labels, and write its audit entry."""
        route = scope.get("route")
        path: str | None = getattr(route, "path", None)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_requests.labels(method, path or "none", str(status)).inc()
        self._metrics.http_seconds.labels(path or "none").observe(seconds)
        # Health checks are not audited: they are frequent, open to all, and without side effects.
        if self._log is None or path in ("/health/live", "/health/ready") or scope.get(_REPEATED):
            return
        why = scope.get(REFUSED) or _REFUSALS.get(status)
        client, principal = scope.get("client"), scope[PRINCIPAL]
        match = None if route is None else route.path_regex.match(scope["path"])
        collection = None if match is None else match.groupdict().get("name")
        self._log.record(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": scope[REQUEST_ID],
                "principal": principal.name,
                "credential": principal.credential,
                "client": client[0] if client else None,
                "method": method,
                "route": path,
                # The path may hold any text, so only configured names are written.
                "collection": collection if collection in self._collections else None,
                "decision": "allowed" if why is None else "refused",
                "why": why,
                "status": status,
                **scope[AUDITED],
                "latency_ms": round(seconds * 1000, 2),
            }
        )


def once_more(content: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields `content`, then the following messages."""
    unread = [content]

    async def again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return again


def caller(request: Request) -> Principal:
    """Return the authenticated caller of a request."""
    return cast("Principal", request.scope.get(PRINCIPAL, ANONYMOUS))


async def still_may(scope: Scope) -> bool:
    """Return whether the caller is still authorised; for streams, because keys are revoked and tokens expire."""
    again: Callable[[], Awaitable[bool]] | None = scope.get(_STILL)
    return again is None or await again()


def audit(request: Request, **fields: Any) -> None:
    """Add fields to this request's audit entry; never a query, a value or a text."""
    if AUDITED in request.scope:
        request.scope[AUDITED].update(fields)
