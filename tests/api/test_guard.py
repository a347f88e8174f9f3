"""Who may ask for what: every route with every scope and with none, odd paths; loopback without authentication."""

from __future__ import annotations

import http.client
import itertools
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route

from app.src.access.keys import Grant, create
from app.src.access.principal import ANONYMOUS, LOOPBACK, SCOPES, Principal, Scope
from app.src.api.guard import NEEDS, OPEN, PRINCIPAL, Guard, Rules
from app.src.api.server import create_app
from app.src.service.service import Service
from tests.api.conftest import TableSource, serving, settings_in

ASKING = [name for name, need in NEEDS.items() if need]
OPEN_ROUTES = {"GET /health/live", "GET /health/ready"}
OPEN_FILES = {"GET /", "GET /console/{path:path}"}
"""The console's, which hold no data."""


UNLIMITED = {"rate": "unlimited", "failures": "unlimited"}
"""So many forgeries and requests in so short a time are a test's; the limits have tests of their own (test_rates)."""


def with_access(folder: Path, **access: Any) -> Service:
    """Without the limits of `api.limiting`: one address is refused hundreds of times here."""
    settings = settings_in(folder)
    return Service(
        settings.model_validate(settings.model_dump(by_alias=True) | {"access": access}), source=TableSource()
    )


class Guarded:
    """A running service, and a key for each scope."""

    def __init__(self, folder: Path, **access: Any) -> None:
        self.path = folder / "keys.json"
        self.keys: dict[Scope, str] = {scope: create(self.path, Grant(scope, (scope,)))[1] for scope in SCOPES}
        self.service = with_access(folder, keys=self.path, **UNLIMITED | access)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.service.close()


@pytest.fixture(scope="module")
def client(guarded: Guarded) -> Iterator[httpx.Client]:
    with serving(guarded.service) as client:
        yield client


def asked(route: str) -> tuple[str, str]:
    """Method and a path of this template that leads nowhere, so that nothing is done."""
    method, _, template = route.partition(" ")
    return method, re.sub(r"\{[^}]*\}", "nobody", template)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ------------------------------------------------------------------------------------------------------ all the routes


def test_every_route_is_in_the_table_and_every_line_is_a_route(guarded: Guarded) -> None:
    app = create_app(guarded.service)
    routes = {
        f"{method} {getattr(route, 'path', '')}"
        for route in app.routes
        for method in getattr(route, "methods", ()) or ()
        if method != "HEAD"
    }
    assert routes == set(NEEDS)
    described = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    assert described <= {re.sub(r":path\}", "}", name) for name in NEEDS}


def test_the_description_says_what_each_route_needs(client: httpx.Client, guarded: Guarded) -> None:
    document = client.get("/openapi.json", headers=bearer(guarded.keys["embed"])).json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert {name for name, operation in operations.items() if not operation["security"]} == OPEN_ROUTES
    assert operations["GET /v1/gpu"]["description"].endswith("Needs the scope metrics.")
    assert operations["GET /v1/collections"]["description"].endswith("Needs the scope metrics or search or sync.")
    assert client.get("/openapi.json", headers=bearer(guarded.keys["embed"])).json() == document


def test_only_health_and_the_console_are_open() -> None:
    assert {name for name, need in NEEDS.items() if need == OPEN} == OPEN_ROUTES | OPEN_FILES


def test_the_description_of_the_api_without_a_credential(guarded: Guarded, client: httpx.Client) -> None:
    """A walk over OpenAPI: whatever it names is refused to who says nothing of himself, but health."""
    paths = create_app(guarded.service).openapi()["paths"]
    answered = set()
    for path, methods in paths.items():
        for method in methods:
            answer = client.request(method, re.sub(r"\{[^}]*\}", "x", path))
            if answer.status_code != 401:
                answered.add(f"{method.upper()} {path}")
                assert answer.status_code in (200, 503)
            else:
                assert answer.headers["www-authenticate"] == 'Bearer realm="owl-sap"'
    assert answered == OPEN_ROUTES


@pytest.mark.parametrize(("route", "scope"), list(itertools.product(ASKING, SCOPES)))
def test_each_route_with_each_scope(guarded: Guarded, client: httpx.Client, route: str, scope: Scope) -> None:
    method, path = asked(route)
    if "/events" in path and scope in ("sync", "admin"):
        path = path.replace("nobody", "0" * 32)
    answer = client.request(method, path, headers=bearer(guarded.keys[scope]))
    if scope == "admin" or scope in NEEDS[route]:
        assert answer.status_code not in (401, 403, 405)
    else:
        assert answer.status_code == 403
        assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]
        assert all(needed in answer.text for needed in NEEDS[route])


@pytest.mark.parametrize("route", ["GET /v1/models", "POST /v1/embeddings"])
def test_openais_clients_get_openais_shape(client: httpx.Client, guarded: Guarded, route: str) -> None:
    method, path = asked(route)
    assert client.request(method, path).json()["error"]["type"] == "authentication_error"
    refused = client.request(method, path, headers=bearer(guarded.keys["sync"]))
    assert refused.json()["error"]["type"] == "permission_error"


def test_a_refusal_is_a_problem_document(client: httpx.Client) -> None:
    answer = client.get("/v1/info")
    document = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["request_id"] == answer.headers["x-request-id"]
    assert "X-API-Key" in document["detail"]


def test_openais_own_client(client: httpx.Client, guarded: Guarded) -> None:
    base = str(client.base_url.join("/v1"))
    with openai.OpenAI(api_key=guarded.keys["embed"], base_url=base, max_retries=0) as known:
        assert len(known.embeddings.create(model="hash:64", input="steel").data[0].embedding) == 64
    for key, error in (
        ("sk-unknown", openai.AuthenticationError),
        (guarded.keys["sync"], openai.PermissionDeniedError),
    ):
        with openai.OpenAI(api_key=key, base_url=base, max_retries=0) as other, pytest.raises(error) as refused:
            other.embeddings.create(model="hash:64", input="steel")
        assert key not in str(refused.value)


@pytest.mark.parametrize("why", ['a "quoted" word', "line\nbreak", "ümlaut", "back\\slash", "\x00"])
def test_no_reason_breaks_the_header(guarded: Guarded, why: str) -> None:
    guard = Guard(_nothing, [], guarded.service)
    answer = guard._unauthenticated({"type": "http", "path": "/", "headers": [], "server": ("x", 1)}, why, "signature")
    assert re.fullmatch(
        r'Bearer realm="owl-sap", error="[a-z_]+", error_description="[ !#-\[\]-~]*"',
        (answer.headers or {})["WWW-Authenticate"],
    )


# ------------------------------------------------------------------------------------------------------- credentials


def test_both_headers_are_taken(client: httpx.Client, guarded: Guarded) -> None:
    key = guarded.keys["search"]
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"authorization": f"bearer   {key} "},
        {"X-API-Key": key},
        {"X-API-Key": key, "Authorization": f"Bearer {key}"},
    ):
        assert raw(client, "GET", "/v1/collections", headers)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Basic dXNlcjpwYXNz")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", "{key}")],
        [("Authorization", "Token {key}")],
        [("Authorization", "Bearer {key} {key}")],
        [("Authorization", "Bearer {key},Bearer {key}")],
        [("Authorization", "Bearer {key}"), ("X-API-Key", "another")],
        [("Authorization", "Bearer another"), ("Authorization", "Bearer {key}")],
        [("X-API-Key", "")],
        [("X-API-Key", "{key}x")],
        [("Cookie", "api_key={key}")],
        [("Proxy-Authorization", "Bearer {key}")],
    ],
)
def test_what_is_no_credential(client: httpx.Client, guarded: Guarded, headers: list[tuple[str, str]]) -> None:
    key = guarded.keys["admin"]
    given = [(name, value.replace("{key}", key)) for name, value in headers]
    status, text = raw(client, "GET", "/v1/collections", given)
    assert status == 401
    assert key not in text


@pytest.mark.parametrize("name", ["api_key", "access_token", "token", "key", "X-API-Key", "authorization"])
def test_never_in_the_address(client: httpx.Client, guarded: Guarded, name: str) -> None:
    assert client.get("/v1/collections", params={name: guarded.keys["admin"]}).status_code == 401


def test_it_is_refused_before_the_body_is_read(client: httpx.Client) -> None:
    """Of a body that never comes nothing is waited for."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=5)
    connection.putrequest("POST", "/embed")
    connection.putheader("Content-Length", "1000000000")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


# ---------------------------------------------------------------------------------------------------------- odd paths

ODD = [
    *("//v1/info", "/v1//info", "/v1/info/", "/v1/info//", "/v1/./info", "/health/../v1/info", "/v1/%69nfo"),
    *(
        "/v1%2Finfo",
        "/%2Fv1/info",
        "/v1/info%00",
        "/v1/info%0A",
        "/v1/info;a=b",
        "/v1/info?",
        "/V1/INFO",
        "/v1/info%20",
    ),
    *(
        "/health/live/../../v1/info",
        "/health/live%2F..%2F..%2Fv1/info",
        "/health/live;/v1/info",
        "/health/live/v1/info",
    ),
    *("/health/live%0A", "/health/", "/health", "//health/live", "/static/x", "/mcp", "/.well-known/x", "/admin"),
    *("/docs", "/docs/", "/redoc", "/openapi.json", "/openapi.json/", "/docs/style.css", "*", "http://x/v1/info"),
    *("/v1/models/a/../../info", "/v1/models/%2e%2e/info", "/metrics/", "/metrics%0A", "/v1/collections/a%2Fb/search"),
]
WAYS_TO_WHAT_ANYBODY_MAY = {
    *("/v1/info?", "/v1/%69nfo", "/v1%2Finfo", "http://x/v1/info", "/docs", "/docs/style.css", "/openapi.json")
}


def raw(
    client: httpx.Client, method: str, path: str, headers: dict[str, str] | list[tuple[str, str]]
) -> tuple[int, str]:
    """As it stands, where httpx would tidy up. Status, then headers and body."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items() if isinstance(headers, dict) else headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, str(answer.headers) + answer.read().decode(errors="replace")
    finally:
        connection.close()


@pytest.mark.parametrize("path", ODD)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "PATCH", "TRACE"])
def test_odd_paths_and_methods_are_refused_without_a_credential(client: httpx.Client, method: str, path: str) -> None:
    status, _ = raw(client, method, path, {})
    assert status in (400, 401)


@pytest.mark.parametrize("path", ODD)
def test_odd_paths_open_no_other_scope_s_doors(client: httpx.Client, guarded: Guarded, path: str) -> None:
    status, _ = raw(client, "GET", path, bearer(guarded.keys["embed"]))
    assert status in ((200,) if path in WAYS_TO_WHAT_ANYBODY_MAY else (400, 403, 404, 405))


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE"])
def test_other_methods_of_a_route_are_405_for_who_is_known(client: httpx.Client, guarded: Guarded, method: str) -> None:
    answer = client.request(method, "/v1/info", headers=bearer(guarded.keys["embed"]))
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def test_health_says_nothing_of_details_to_strangers(client: httpx.Client, guarded: Guarded) -> None:
    def broken(*_: object) -> Any:
        from app.src.observe.checks import Readiness

        return Readiness(
            {"engine": True, "store": False, "access": True}, "10.1.2.3:30015 is away", "a note on 10.1.2.3"
        )

    probes, before = guarded.service.readiness, guarded.service.readiness.check
    probes.check = broken  # type: ignore[assignment, method-assign]
    try:
        for headers in ({}, bearer("owl_wrong_key"), {"Authorization": "Basic x"}):
            answer = client.get("/health/ready", headers=headers)
            assert answer.status_code == 503
            assert answer.json()["checks"] == {"engine": True, "store": False, "access": True}
            assert "10.1.2.3" not in answer.text
        told = client.get("/health/ready", headers=bearer(guarded.keys["embed"]))
        assert "10.1.2.3:30015" in told.text
        assert "note" in told.json()
    finally:
        probes.check = before  # type: ignore[method-assign]


def test_refusals_are_counted_by_reason_and_route(client: httpx.Client, guarded: Guarded) -> None:
    for headers in ({}, bearer("owl_ab_c"), bearer(guarded.keys["metrics"])):
        client.post("/v1/collections/nobody/search", headers=headers)
    text = client.get("/metrics", headers=bearer(guarded.keys["metrics"])).text
    for reason in ("missing", "unknown_key", "scope"):
        assert re.search(rf'owl_sap_access_refused_total\{{reason="{reason}"\}} [1-9]', text)
    assert 'route="/v1/collections/{name}/search",status="401"' in text
    assert "nobody" not in text


# ------------------------------------------------------------------------------------------------------------- metrics


def test_prometheus_scrapes_with_a_token(client: httpx.Client, guarded: Guarded) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    headers = bearer(guarded.keys["metrics"]) | {"Accept": accept, "X-Prometheus-Scrape-Timeout-Seconds": "10"}
    answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert "owl_sap_http_requests_total" in answer.text


def test_metrics_may_be_open(tmp_path: Path) -> None:
    made = Guarded(tmp_path, open_metrics=True)
    try:
        with serving(made.service) as client:
            assert client.get("/metrics").status_code == 200
            assert client.get("/v1/gpu").status_code == 401
    finally:
        made.service.close()


# ----------------------------------------------------------------------------------------- what is not said is not open


async def _nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    "route",
    [
        Route("/new", _nothing),
        Route("/health/live", _nothing, methods=["POST"]),
        Route("/health/live", PlainTextResponse("x")),  # an ASGI application, which takes every method
        Mount("/static", PlainTextResponse("x")),
        Host("x", PlainTextResponse("x")),
    ],
)
def test_a_route_that_nobody_listed_ends_the_start(route: Any) -> None:
    with pytest.raises(RuntimeError, match="guard"):
        Rules([route], NEEDS)


def test_a_route_that_another_shadows_needs_what_the_other_does() -> None:
    """As the router does: the first that fits."""
    shadow, plain = Route("/{name}", _nothing), Route("/plain", _nothing)
    needs = {"GET /{name}": frozenset[Scope](("admin",)), "GET /plain": OPEN}
    way = Rules([shadow, plain], needs).find("GET", "/plain")
    assert way is not None
    assert way.route is shadow
    assert Rules([plain, shadow], needs).find("GET", "/plain").route is plain  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- who is who inside


def test_routes_see_who_asks(guarded: Guarded, tmp_path: Path) -> None:
    seen: list[Principal] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope[PRINCIPAL])
        await PlainTextResponse("")(scope, receive, send)

    assert seen_by(guarded.service, inner, "/v1/info", bearer(guarded.keys["search"])) == 200
    assert seen_by(guarded.service, inner, "/health/live", {}) == 200
    assert seen_by(guarded.service, inner, "/health/live", bearer(guarded.keys["search"])) == 200
    assert seen_by(guarded.service, inner, "/v1/info", {}) == 401
    open_service = with_access(tmp_path)
    assert seen_by(open_service, inner, "/v1/info", {}) == 200
    open_service.close()
    assert [principal.scopes for principal in seen] == [{"search"}, set(), {"search"}, set(SCOPES)]
    assert (seen[1], seen[3]) == (ANONYMOUS, LOOPBACK)


def seen_by(service: Service, inner: Any, path: str, headers: dict[str, str]) -> int:
    import asyncio

    service.access.open()
    guard = Guard(inner, create_app(service).routes, service)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(ask())


# -------------------------------------------------------------------------------------- loopback without authentication


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    service = with_access(tmp_path_factory.mktemp("open"), hosts=("owl.example",))
    with serving(service) as client:
        yield client
    service.close()


OURS = (
    *("localhost", "LOCALHOST:1", "localhost.", "localhost.:8000", "127.0.0.1", "127.9.9.9:80", "127.0.0.1:65535"),
    *("[::1]", "[::1]:8000", "owl.example", "Owl.Example:8000"),
)
NOT_OURS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "[fe80::1]", "x"),
    *("owl.example.evil", "0.0.0.0", "", "[", "::1", "[::1", "[::1]x", "[::1%lo]", "[127.0.0.1]", "[localhost]"),
    *("user@localhost@evil", "evil.example@localhost", "user:secret@localhost", "localhost@evil.example"),
    *("127.0.0.1#evil.example", "127.0.0.1/evil.example", "127.0.0.1?evil.example", "127.0.0.1\\evil.example"),
    *("localhost:", "localhost:x", "localhost:0", "localhost:65536", "localhost:8000:8000", "localhost:-1"),
    *(
        "localhost:80 80",
        "localhost, evil.example",
        "localhost evil.example",
        "localhost..",
        ".localhost",
        "//localhost",
    ),
    *("http://localhost", "local%68ost", "127.1", "2130706433", "0x7f000001", "localhost\xa0", "localhost\t.evil"),
)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        *(((host,), 200) for host in OURS),
        *(((host,), 421) for host in NOT_OURS),
        ((), 421),
        (("localhost", "evil.example"), 421),
        (("evil.example", "localhost"), 421),
        (("localhost", "localhost"), 421),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    unguarded: httpx.Client, hosts: tuple[str, ...], status: int
) -> None:
    with closing(
        http.client.HTTPConnection(unguarded.base_url.host, unguarded.base_url.port, timeout=10)
    ) as connection:
        connection.putrequest("GET", "/v1/collections", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host.encode("latin-1"))
        connection.endheaders()
        assert connection.getresponse().status == status


def test_http_1_0_has_no_host(unguarded: httpx.Client) -> None:
    """Programs that watch a port speak it still, and no browser does."""
    with socket.create_connection((unguarded.base_url.host, unguarded.base_url.port or 0), timeout=10) as connection:
        connection.sendall(b"GET /v1/collections HTTP/1.0\r\n\r\n")
        assert connection.recv(100).split()[1] == b"200"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://", ""]
)
def test_other_web_pages_are_refused(unguarded: httpx.Client, origin: str) -> None:
    """A page in a browser here may send such a request, whatever it is not told of the answer."""
    for path in ("/v1/collections/materials/sync", "/v1/collections/materials/search", "/embed"):
        answer = unguarded.post(path, headers={"Origin": origin, "Content-Type": "text/plain"}, content=b"{}")
        assert answer.status_code == 403
    assert unguarded.get("/v1/jobs").json() == []


def test_our_own_page_is_not(unguarded: httpx.Client) -> None:
    origin = str(unguarded.base_url).rstrip("/")
    assert unguarded.post("/embed", json={"inputs": "x"}, headers={"Origin": origin}).status_code == 200


def test_no_page_may_ask_first(unguarded: httpx.Client, client: httpx.Client) -> None:
    """No CORS: a preflight is refused, and nothing in any answer invites other pages."""
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for each in (unguarded, client):
        answer = each.options("/embed", headers=headers)
        assert answer.status_code in (401, 403)
        assert not [name for name in answer.headers if name.startswith("access-control")]
