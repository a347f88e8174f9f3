"""Lets in who may ask, before anything of the body is read: the table of what each route needs, credentials out of
headers, 401 and 403. What is not in the table is not served. Knows no route's work.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.src.access.authentication import Authentication
from app.src.access.errors import IssuerAway, Unauthenticated
from app.src.access.principal import ANONYMOUS, LOOPBACK, SCOPES, Principal
from app.src.access.principal import Scope as Right
from app.src.api.errors import FORBIDDEN, MISDIRECTED, NOT_FOUND, UNAUTHORIZED, UNAVAILABLE, problem
from app.src.observe.metrics import Metrics
from app.src.settings import is_loopback

PRINCIPAL = "owl_sap.principal"
"""In the ASGI scope: who asks."""
_STILL = "owl_sap.still"
"""In the ASGI scope: looks again whether who asked may still ask for this."""
REFUSED = "owl_sap.refused"
"""In the ASGI scope of a request that the guard refused: why, as a word."""
Need = frozenset[Right]
"""Any one of these scopes will do; admin always does. Empty: open to everybody."""
OPEN: Need = frozenset()
ANYBODY: Need = frozenset(SCOPES)
"""Whoever is known here and may do anything at all."""
_EMBED, _SEARCH, _SYNC = (frozenset[Right]((scope,)) for scope in ("embed", "search", "sync"))
_ADMIN, _METRICS = (frozenset[Right]((scope,)) for scope in ("admin", "metrics"))
_METRICS_ROUTE = "GET /metrics"
NEEDS: Mapping[str, Need] = {
    "GET /health/live": OPEN,
    "GET /health/ready": OPEN,
    _METRICS_ROUTE: _METRICS,
    "POST /embed": _EMBED,
    "POST /v1/embeddings": _EMBED,
    "GET /v1/models": _EMBED | _SEARCH,
    "GET /v1/models/{model:path}": _EMBED | _SEARCH,
    "POST /v1/collections/{name}/search": _SEARCH,
    "POST /v1/collections/{name}/rows": _SEARCH,
    "GET /v1/collections/{name}/fields": _SEARCH,
    # Tools that need more look for it themselves.
    "POST /mcp": _SEARCH,
    "GET /v1/collections/{name}/map": _SEARCH,
    "GET /v1/info": ANYBODY,
    "GET /v1/gpu": _METRICS,
    "GET /v1/collections": _SEARCH | _SYNC | _METRICS,
    "GET /v1/collections/{name}": _SEARCH | _SYNC | _METRICS,
    # The catalogue of HANA, as far as the technical user sees it.
    "GET /v1/tables": _ADMIN,
    "GET /v1/tables/{schema}/{table:path}": _ADMIN,
    "POST /v1/tables/{schema}/{table:path}/preview": _ADMIN,
    "POST /v1/collections/{name}/sync": _SYNC,
    "POST /v1/collections/{name}/verify": _SYNC,
    "GET /v1/jobs": _SYNC,
    "GET /v1/jobs/{job_id}": _SYNC,
    "GET /v1/jobs/{job_id}/events": _SYNC,
    "POST /v1/jobs/{job_id}/cancel": _SYNC,
    "GET /v1/collections/{name}/quarantine": _SYNC,
    "POST /v1/collections/{name}/quarantine/retry": _SYNC,
    "POST /v1/collections/{name}/quarantine/drop": _SYNC,
    "POST /v1/collections/{name}/documents": _SYNC,
    "POST /v1/collections/{name}/documents/delete": _SYNC,
    "GET /v1/collections/{name}/generations": _SYNC,
    # Switches what everybody is served, or throws it away.
    "POST /v1/collections/{name}/generations": _ADMIN,
    "GET /docs": ANYBODY,
    "GET /docs/style.css": ANYBODY,
    "GET /openapi.json": ANYBODY,
    # The console's own files. They hold no data; all that it shows comes over the routes above.
    "GET /": OPEN,
    "GET /console/{path:path}": OPEN,
}
"""By method and route template. HEAD needs what GET does. The router says 405 to any other method, to whoever is known.
"""
_LOOKED_AT = frozenset((b"authorization", b"x-api-key", b"host", b"origin"))
Sent = Mapping[bytes, Sequence[str]]
"""Of the headers those that matter here, each as often as it was sent."""
_REALM = 'Bearer realm="owl-sap"'
_HOST = re.compile(r"(?:\[([0-9a-f.]*:[0-9a-f:.]*)\]|([0-9a-z_-][0-9a-z._-]*?)\.?)(?::([0-9]{1,5}))?", re.IGNORECASE)
"""An address of IPv6 in brackets, or a name or address of IPv4 with or without the root's dot; and perhaps a port."""
FOREIGN = "requests of other web pages are refused"
_WHY_MISSING = "send an API key or a token: Authorization: Bearer ..., or X-API-Key"


@dataclass(frozen=True, slots=True)
class _Way:
    """A route, and what it needs by method."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    route: BaseRoute
    need: Need
    enough: Need


class Unlisted(RuntimeError):
    """A route that nobody has said who may use. A fault of the program, found when the application is made."""


class _Ways:
    """The same patterns in the same order as the router's, so that both mean the same route."""

    def __init__(self, routes: Sequence[BaseRoute], needs: Mapping[str, Need]) -> None:
        self._ways = tuple(way for route in routes for way in _ways(route, needs))
        self._plain: dict[tuple[str, str], _Way] = {}
        for way in self._ways:
            path = getattr(way.route, "path", "")
            if "{" not in path and not isinstance(way.route, Mount):
                for method in way.methods:
                    if self._search(method, path) is way:
                        self._plain[method, path] = way

    def find(self, method: str, path: str) -> _Way | None:
        """None: there is no such path. A way of other methods is found too, as the router finds it for its 405."""
        return self._plain.get((method, path)) or self._search(method, path)

    def _search(self, method: str, path: str) -> _Way | None:
        other = None
        for way in self._ways:
            if way.pattern.fullmatch(path):  # `$` alone would let a line feed follow
                if method in way.methods:
                    return way
                other = other or way
        return other


def _ways(route: BaseRoute, needs: Mapping[str, Need]) -> Sequence[_Way]:
    if isinstance(route, Mount):
        need = needs.get(f"GET {route.path}")
        methods = frozenset(("GET", "HEAD"))
    elif isinstance(route, Route):
        methods = frozenset(route.methods or ())
        named = {method: needs.get(f"{method} {route.path}") for method in methods - {"HEAD"}}
        need = next(iter(named.values())) if len(set(named.values())) == 1 else None
    else:
        raise Unlisted(f"{type(route).__name__} is a kind of route that the guard does not know")
    if need is None:
        raise Unlisted(f"{sorted(methods)} {route.path} is not in the guard's table (app/src/api/guard.py)")
    return [_Way(route.path_regex, methods, route, need, need | _ADMIN)]


class Guard:
    """ASGI middleware. Puts the Principal into the scope as PRINCIPAL, and the route as the router would."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], authentication: Authentication, metrics: Metrics
    ) -> None:
        self._app = app
        self._authentication = authentication
        self._refusals = metrics.access_refused
        settings = authentication.settings
        self._hosts = frozenset(name.lower() for name in settings.hosts)
        needs = dict(NEEDS)
        if settings.open_metrics:
            needs[_METRICS_ROUTE] = OPEN
        self._ways = _Ways(routes, needs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks anything else
            await send({"type": "websocket.close", "code": 1008})
            return
        way = self._ways.find(scope["method"], scope["path"])
        if way is not None:
            scope["route"] = way.route  # for counts and logs of requests that come no further
        refusal = await self._refusal(scope, way)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    async def _refusal(self, scope: Scope, way: _Way | None) -> Response | None:
        """Who asks is written into the scope; None: may go on."""
        headers = _looked_at(scope)
        scope[PRINCIPAL] = ANONYMOUS
        if not self._authentication.configured:
            scope[PRINCIPAL] = LOOPBACK
            return self._misdirected(scope, headers)
        try:
            principal = await self._principal(headers, optional=way is not None and not way.need)
        except Unauthenticated as error:
            return self._unauthenticated(scope, str(error), error.code)
        except IssuerAway as error:
            return self._refuse(scope, UNAVAILABLE, str(error), "issuer_away")
        scope[PRINCIPAL] = principal
        if way is None:
            return problem(Request(scope), NOT_FOUND, "Not Found")
        scope[_STILL] = partial(self._still_may, headers, way)
        if not way.need or scope["method"] not in way.methods or not way.enough.isdisjoint(principal.scopes):
            return None
        return self._forbidden(scope, way.need)

    async def _principal(self, headers: Sent, *, optional: bool) -> Principal:
        """`optional`: somebody unknown is ANONYMOUS, whatever they sent."""
        try:
            return await self._authentication.principal(_credential(headers))
        except (Unauthenticated, IssuerAway):
            if optional:
                return ANONYMOUS
            raise

    async def _still_may(self, headers: Sent, way: _Way) -> bool:
        try:
            principal = await self._principal(headers, optional=not way.need)
        except (Unauthenticated, IssuerAway):
            return False
        return not way.need or not way.enough.isdisjoint(principal.scopes)

    # ----------------------------------------------------------------------------------------------------- refusals

    def _refuse(self, scope: Scope, status: int, why: str, code: str, header: str | None = None) -> Response:
        scope[REFUSED] = code
        self._refusals.labels(code).inc()
        answer = problem(Request(scope), status, why)
        if header is not None:
            answer.headers["WWW-Authenticate"] = header
        return answer

    def _unauthenticated(self, scope: Scope, why: str, code: str) -> Response:
        """RFC 6750: who sent nothing is told how to, who sent something is told what is wrong with it."""
        told = "".join(char for char in why if " " <= char <= "~" and char not in '"\\')  # RFC 6750, section 3
        header = _REALM if code == "missing" else f'{_REALM}, error="invalid_token", error_description="{told}"'
        return self._refuse(scope, UNAUTHORIZED, why, code, header)

    def _forbidden(self, scope: Scope, need: Need) -> Response:
        wanted = " or ".join(sorted(need))
        header = f'{_REALM}, error="insufficient_scope", scope="{" ".join(sorted(need))}"'
        return self._refuse(scope, FORBIDDEN, f"this needs the scope {wanted}", "scope", header)

    def _misdirected(self, scope: Scope, headers: Sent) -> Response | None:
        """Without authentication everything on this machine may ask, but no web page in a browser on it: a page whose
        name was made to lead here (DNS rebinding) shows by the Host header, one of elsewhere by its Origin."""
        hosts, origins = headers.get(b"host", ()), headers.get(b"origin", ())
        if not self._one_of_ours(hosts, scope["http_version"]):
            why = "this service has no authentication and answers on loopback only: send one header Host, with its "
            why += "address or a name of the setting access.hosts"
            return self._refuse(scope, MISDIRECTED, why, "host")
        if _foreign(hosts, origins):
            return self._refuse(scope, FORBIDDEN, FOREIGN, "origin")
        return None

    def _one_of_ours(self, hosts: Sequence[str], version: str) -> bool:
        if not hosts:
            return version == "1.0"  # which has no such header; no browser speaks it
        found = _HOST.fullmatch(hosts[0])
        if len(hosts) > 1 or found is None:
            return False
        address, name, port = found.groups()
        name = (address or name).lower()
        return (is_loopback(name) or name in self._hosts) and (port is None or 0 < int(port) < 1 << 16)


def _looked_at(scope: Scope) -> Sent:
    """In one go, for every request pays for it."""
    found: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        if name in _LOOKED_AT:
            found.setdefault(name, []).append(value.decode("latin-1"))
    return found


def foreign(scope: Scope) -> bool:
    """Does a web page of elsewhere ask? MCP wants that refused whoever its reader is; elsewhere a credential, which no
    page can send along by itself, is enough."""
    headers = _looked_at(scope)
    return _foreign(headers.get(b"host", ()), headers.get(b"origin", ()))


def _foreign(hosts: Sequence[str], origins: Sequence[str]) -> bool:
    return any(_authority(origin) not in (host.lower() for host in hosts) for origin in origins)


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _credential(headers: Sent) -> str:
    """The one that is sent: as bearer, as OpenAI's clients do, or as X-API-Key. Never out of the address, which stands
    in logs. Raises Unauthenticated."""
    found = [value.strip() for value in headers.get(b"x-api-key", ())]
    for value in headers.get(b"authorization", ()):
        scheme, _, credential = value.strip().partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the scheme of Authorization must be Bearer", "missing")
        found.append(credential.strip())
    if not any(found):
        raise Unauthenticated(_WHY_MISSING, "missing")
    if len(found) > 1 and any(other != found[0] for other in found):
        raise Unauthenticated("two credentials were sent; send one", "ambiguous")
    return found[0]


async def still_may(scope: Scope) -> bool:
    """Return whether the caller may still make this request; for streams, as keys are revoked and tokens expire."""
    again: Callable[[], Awaitable[bool]] | None = scope.get(_STILL)
    return again is None or await again()


def describe(document: dict[str, Any], *, open_metrics: bool) -> None:
    """Into the description of the API: how to say who one is, and which scopes each route takes. For /docs, whose
    button sends the credential along, and for whoever makes clients of it."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a token (JWT)."},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key or a token (JWT)."},
    }
    document.setdefault("components", {})["securitySchemes"] = schemes
    listed = {name.replace(":path}", "}"): need for name, need in NEEDS.items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            need = OPEN if open_metrics and name == _METRICS_ROUTE else listed[name]
            operation["security"] = [{scheme: []} for scheme in schemes] if need else []
            if need and need != ANYBODY:
                said = operation.get("description", "")
                operation["description"] = f"{said}\n\nNeeds the scope {' or '.join(sorted(need))}.".strip()


def known(scope: Mapping[str, Any]) -> bool:
    """Has who asks said who they are, or need not? Who has not is told no more than that something is wrong."""
    return scope.get(PRINCIPAL, ANONYMOUS) is not ANONYMOUS
