"""Authentication and authorisation of each request, before its body is read: the scopes that each route needs,
credentials from headers, 401 and 403. A route that is not listed here is not served.
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
from app.src.access.principal import ANONYMOUS, LOOPBACK, SCOPES, IssuerAway, Principal, Unauthenticated
from app.src.access.principal import Scope as Right
from app.src.access.rows import RowsRefused
from app.src.api.errors import FORBIDDEN, MISDIRECTED, NOT_FOUND, UNAUTHORIZED, UNAVAILABLE, problem
from app.src.observe.metrics import Metrics
from app.src.service.service import Service
from app.src.settings import is_loopback

# In the ASGI scope: the caller; a check whether the caller may still ask; why the guard refused, as a word.
PRINCIPAL = "owl_sap.principal"
_STILL = "owl_sap.still"
REFUSED = "owl_sap.refused"
# Any one of these scopes is enough, and admin always is. Empty: open to all.
Need = frozenset[Right]
OPEN: Need = frozenset()
ANYBODY: Need = frozenset(SCOPES)
_EMBED, _SEARCH, _SYNC = (frozenset[Right]((scope,)) for scope in ("embed", "search", "sync"))
_ADMIN, _METRICS = (frozenset[Right]((scope,)) for scope in ("admin", "metrics"))
_METRICS_ROUTE = "GET /metrics"
# By method and route template. HEAD needs what GET does. Other methods get 405 from the router.
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
    # Tools that need more scopes check them.
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
    # Switches or deletes what every caller is served.
    "POST /v1/collections/{name}/generations": _ADMIN,
    "GET /docs": ANYBODY,
    "GET /docs/style.css": ANYBODY,
    "GET /openapi.json": ANYBODY,
    # The console's files hold no data; it reads data over the routes above.
    "GET /": OPEN,
    "GET /console/{path:path}": OPEN,
}
_HEADERS = frozenset((b"authorization", b"x-api-key", b"host", b"origin"))
Sent = Mapping[bytes, Sequence[str]]  # the headers that matter here, each as often as it was sent
_REALM = 'Bearer realm="owl-sap"'
# An IPv6 address in brackets, or a name or IPv4 address with or without the root's dot; optionally a port.
_HOST = re.compile(r"(?:\[([0-9a-f.]*:[0-9a-f:.]*)\]|([0-9a-z_-][0-9a-z._-]*?)\.?)(?::([0-9]{1,5}))?", re.IGNORECASE)
FOREIGN = "requests of other web pages are refused"
_WHY_MISSING = "send an API key or a token: Authorization: Bearer ..., or X-API-Key"


@dataclass(frozen=True, slots=True)
class _Rule:
    """A route and the scopes that its methods need."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    route: BaseRoute
    need: Need
    enough: Need


class Unlisted(RuntimeError):
    """A route without an entry in NEEDS: a fault of the program, found when the application is made."""


class Rules:
    """The same patterns in the same order as the router's, so that both mean the same route."""

    def __init__(self, routes: Sequence[BaseRoute], needs: Mapping[str, Need]) -> None:
        self._rules = tuple(rule for route in routes for rule in _rules(route, needs))
        self._plain: dict[tuple[str, str], _Rule] = {}
        for rule in self._rules:
            path = getattr(rule.route, "path", "")
            if "{" not in path and not isinstance(rule.route, Mount):
                for method in rule.methods:
                    if self._search(method, path) is rule:
                        self._plain[method, path] = rule

    def find(self, method: str, path: str) -> _Rule | None:
        """Return the rule of a path, possibly one of other methods, as the router finds it for its 405."""
        return self._plain.get((method, path)) or self._search(method, path)

    def _search(self, method: str, path: str) -> _Rule | None:
        other = None
        for rule in self._rules:
            if rule.pattern.fullmatch(path):  # `$` alone would let a line feed follow
                if method in rule.methods:
                    return rule
                other = other or rule
        return other


def _rules(route: BaseRoute, needs: Mapping[str, Need]) -> Sequence[_Rule]:
    if isinstance(route, Mount):
        need = needs.get(f"GET {route.path}")
        methods = frozenset(("GET", "HEAD"))
    elif isinstance(route, Route):
        methods = frozenset(route.methods or ())
        found = {method: needs.get(f"{method} {route.path}") for method in methods - {"HEAD"}}
        need = next(iter(found.values())) if len(set(found.values())) == 1 else None
    else:
        raise Unlisted(f"{type(route).__name__} is a kind of route unknown to the guard")
    if need is None:
        raise Unlisted(f"{sorted(methods)} {route.path} is not in the guard's table (app/src/api/guard.py)")
    return [_Rule(route.path_regex, methods, route, need, need | _ADMIN)]


class Guard:
    """ASGI middleware that puts the Principal into the scope, and the route as the router would."""

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
        self._rules = Rules(routes, needs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        rule = self._rules.find(scope["method"], scope["path"])
        if rule is not None:
            scope["route"] = rule.route  # for the counts and logs of refused requests
        refusal = await self._refusal(scope, rule)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    async def _refusal(self, scope: Scope, rule: _Rule | None) -> Response | None:
        """Put the principal into the scope. Returns the refusal, or None."""
        headers = _relevant_headers(scope)
        scope[PRINCIPAL] = ANONYMOUS
        if not self._authentication.configured:
            scope[PRINCIPAL] = LOOPBACK
            return self._misdirected(scope, headers)
        try:
            principal = await self._principal(headers, optional=rule is not None and not rule.need)
        except Unauthenticated as error:
            return self._unauthenticated(scope, str(error), error.code)
        except IssuerAway as error:
            return self._refuse(scope, UNAVAILABLE, str(error), "issuer_away")
        scope[PRINCIPAL] = principal
        if rule is None:
            return problem(Request(scope), NOT_FOUND, "Not Found")
        scope[_STILL] = partial(self._still_may, headers, rule)
        if not rule.need or scope["method"] not in rule.methods or not rule.enough.isdisjoint(principal.scopes):
            return None
        return self._forbidden(scope, rule.need)

    async def _principal(self, headers: Sent, *, optional: bool) -> Principal:
        """With `optional`, an unknown caller is ANONYMOUS."""
        try:
            return await self._authentication.principal(_credential(headers))
        except (Unauthenticated, IssuerAway):
            if optional:
                return ANONYMOUS
            raise

    async def _still_may(self, headers: Sent, rule: _Rule) -> bool:
        try:
            principal = await self._principal(headers, optional=not rule.need)
        except (Unauthenticated, IssuerAway):
            return False
        return not rule.need or not rule.enough.isdisjoint(principal.scopes)

    # ----------------------------------------------------------------------------------------------------- refusals

    def _refuse(self, scope: Scope, status: int, why: str, code: str, header: str | None = None) -> Response:
        scope[REFUSED] = code
        self._refusals.labels(code).inc()
        answer = problem(Request(scope), status, why)
        if header is not None:
            answer.headers["WWW-Authenticate"] = header
        return answer

    def _unauthenticated(self, scope: Scope, why: str, code: str) -> Response:
        """As RFC 6750 has it: the error is named only if a credential was sent."""
        told = "".join(char for char in why if " " <= char <= "~" and char not in '"\\')  # RFC 6750, section 3
        header = _REALM if code == "missing" else f'{_REALM}, error="invalid_token", error_description="{told}"'
        return self._refuse(scope, UNAUTHORIZED, why, code, header)

    def _forbidden(self, scope: Scope, need: Need) -> Response:
        wanted = " or ".join(sorted(need))
        header = f'{_REALM}, error="insufficient_scope", scope="{" ".join(sorted(need))}"'
        return self._refuse(scope, FORBIDDEN, f"this needs the scope {wanted}", "scope", header)

    def _misdirected(self, scope: Scope, headers: Sent) -> Response | None:
        """Refuse web pages while no authentication is configured: programs on this machine may ask, pages in
        its browser may not. The Host header shows DNS rebinding, Origin a page of another site."""
        hosts, origins = headers.get(b"host", ()), headers.get(b"origin", ())
        if not self._is_own_host(hosts, scope["http_version"]):
            why = "this service has no authentication and answers on loopback only: send one Host header with its "
            why += "address or a name from the setting access.hosts"
            return self._refuse(scope, MISDIRECTED, why, "host")
        if _foreign(hosts, origins):
            return self._refuse(scope, FORBIDDEN, FOREIGN, "origin")
        return None

    def _is_own_host(self, hosts: Sequence[str], version: str) -> bool:
        if not hosts:
            return version == "1.0"  # which has no such header; no browser speaks it
        found = _HOST.fullmatch(hosts[0])
        if len(hosts) > 1 or found is None:
            return False
        address, name, port = found.groups()
        name = (address or name).lower()
        return (is_loopback(name) or name in self._hosts) and (port is None or 0 < int(port) < 1 << 16)


def _relevant_headers(scope: Scope) -> Sent:
    found: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        if name in _HEADERS:
            found.setdefault(name, []).append(value.decode("latin-1"))
    return found


def foreign(scope: Scope) -> bool:
    """Return whether a page of another site sent the request. MCP requires its refusal even with a credential, which no
    page can send by itself."""
    headers = _relevant_headers(scope)
    return _foreign(headers.get(b"host", ()), headers.get(b"origin", ()))


def _foreign(hosts: Sequence[str], origins: Sequence[str]) -> bool:
    return any(_authority(origin) not in (host.lower() for host in hosts) for origin in origins)


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _credential(headers: Sent) -> str:
    """Return the credential from Authorization (Bearer) or X-API-Key; never from the URL, which logs hold. Raises
    Unauthenticated."""
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
    """Add the security schemes and each route's scopes to the OpenAPI document."""
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
    """Return whether the caller may see details: it authenticated, or no authentication is configured."""
    return scope.get(PRINCIPAL, ANONYMOUS) is not ANONYMOUS


def principal_of(scope: Scope) -> Principal:
    """Return who sent the request; LOOPBACK before the guard has looked."""
    principal: Principal = scope.get(PRINCIPAL, LOOPBACK)
    return principal


def caller(request: Request) -> Principal:
    """Return who sent the request, as the guard found out."""
    principal: Principal = request.scope.get(PRINCIPAL, ANONYMOUS)
    return principal


def check_every_row(service: Service, request: Request, name: str | None = None) -> None:
    """Check that the caller may see every row of the collection (None: of any table). Raises RowsRefused."""
    try:
        service.rights.check_every_row(caller(request), name)
    except RowsRefused:
        request.scope[REFUSED] = "row_rights"
        raise
