"""What browsers are told with every answer; the page about the API, which needs no other host; no CORS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import Client

from app.src.api.server import create_app
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import serving, settings_in

ALWAYS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
}
JSON_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for all tests here: none of them changes it."""
    with closing(Service(settings_in(tmp_path_factory.mktemp("headers")))) as service, serving(service) as client:
        yield client


def with_api(service: Service, **api: Any) -> Service:
    document = service.settings.model_dump(by_alias=True)
    service.settings = Settings.model_validate(document | {"api": document["api"] | api})
    return service


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health/live", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/info", 200),
        ("POST", "/embed", 422),
        ("GET", "/nope", 404),
        ("DELETE", "/embed", 405),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/jobs/nope", 404),
    ],
)
def test_every_answer_has_them_good_or_bad(client: Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert {name: answer.headers[name] for name in ALWAYS} == ALWAYS
    assert answer.headers["content-security-policy"] == JSON_POLICY
    assert "server" not in answer.headers
    assert "strict-transport-security" not in answer.headers


def test_an_unexpected_error_has_them_too(synced: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("row text")

    monkeypatch.setattr(synced.status, "collections", broken)
    with serving(synced) as client:
        answer = client.get("/v1/collections")
    assert answer.status_code == 500
    assert answer.headers["content-security-policy"] == JSON_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_about_the_api_needs_no_script_and_no_other_host(client: Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script" not in page.headers["content-security-policy"]
    assert "style-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert all(link.startswith(("#", "/")) for link in links)
    # Examples name the service itself, as text.
    assert not re.search(r"<script|style=|\bon\w+=|https?://(?!127\.0\.0\.1:8000/)", page.text)
    for link in {link for link in links if link.startswith("/")}:
        assert client.get(link).status_code == 200, link
    anchors = set(re.findall(r'id="([^"]+)"', page.text))
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        assert path in page.text
        for operation in operations.values():
            assert operation.get("summary") or operation.get("description")
    assert set(document["components"]["schemas"]) <= anchors
    assert "&quot;4XX&quot;" not in page.text, "these are the same everywhere"


def test_descriptions_cannot_break_out_of_the_page(synced: Service) -> None:
    app = create_app(synced)
    app.description = "<script>alert(1)</script>"
    with TestClient(app, base_url="http://localhost") as client:
        page = client.get("/docs").text
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_docs_can_be_switched_off(synced: Service) -> None:
    with serving(with_api(synced, docs=False)) as client:
        for path in ("/docs", "/docs/style.css", "/openapi.json", "/redoc", "/docs/oauth2-redirect"):
            assert client.get(path).status_code == 404, path
        assert client.get("/v1/info").status_code == 200


def test_no_other_site_may_read_answers(client: Client) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = client.options("/embed", headers=asked | {"Access-Control-Request-Headers": "content-type"})
    assert preflight.status_code in (403, 405)
    answer = client.get("/v1/info", headers=asked)
    for headers in (preflight.headers, answer.headers):
        assert not [name for name in headers if name.startswith("access-control")]


def test_hsts_on_wish_and_over_https_only(synced: Service) -> None:
    app = create_app(with_api(synced, hsts=True))
    for scheme, told in (("https", "max-age=31536000"), ("http", None)):
        with TestClient(app, base_url=f"{scheme}://localhost") as client:
            assert client.get("/health/live").headers.get("strict-transport-security") == told


@pytest.mark.parametrize("path", ["/", "/console/app.js"])
def test_the_console_has_its_own_files_and_nothing_inline(client: Client, path: str) -> None:
    policy = client.get(path).headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", ["/docsx", "/v1/console", "//", "/v1/docs"])
def test_paths_that_only_look_like_pages_get_the_strictest_policy(client: Client, path: str) -> None:
    assert client.get(str(client.base_url).rstrip("/") + path).headers["content-security-policy"] == JSON_POLICY
