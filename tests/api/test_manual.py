"""The page about the API, /docs: what it lists in which order, and that every operation says what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from app.src.api.openapi import TAGS
from app.src.api.server import create_app
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import TableSource


def app_of(folder: Path, **api: Any) -> FastAPI:
    store = {"kind": "local", "path": folder / "vectors"}
    settings = Settings.model_validate({"store": store, "embedding": {"model": "hash:8"}, "api": api})
    return create_app(Service(settings, source=TableSource()))


def unnamed(app: FastAPI) -> list[str]:
    """Operations without one of the TAGS, or without a summary beyond the name of their function."""
    paths = app.openapi()["paths"]
    found = []
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        for method in route.methods or ():
            operation = paths[route.path_format][method.lower()]
            named = operation["summary"] != route.name.replace("_", " ").title()
            if not named or len(operation.get("tags", ())) != 1 or operation["tags"][0] not in TAGS:
                found.append(f"{method} {route.path_format}")
    return found


def test_every_operation_has_a_tag_and_a_summary_in_one_line(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert unnamed(app) == []
    operations = [each for methods in app.openapi()["paths"].values() for each in methods.values()]
    assert len(operations) > 30
    assert all("\n" not in each["summary"] and len(each["summary"]) <= 60 for each in operations)
    assert len({each["summary"] for each in operations}) == len(operations)


def test_new_routes_without_them_are_found(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    right: dict[str, Any] = {"tags": ["Search"], "summary": "Do it"}
    known: tuple[dict[str, Any], ...] = (
        {},
        {"tags": ["Search"]},
        {"summary": "Do it"},
        {"summary": "Do it", "tags": ["New"]},
        right,
    )
    for number, each in enumerate(known):
        app.add_api_route(f"/v1/new{number}", lambda: None, name="new_route", **each)
    assert unnamed(app) == [f"GET /v1/new{number}" for number in range(4)]


def test_the_groups_in_their_order_with_agents_last(tmp_path: Path) -> None:
    page = TestClient(app_of(tmp_path), base_url="http://127.0.0.1").get("/docs").text
    assert re.findall(r"<h2 id=[^>]*>([^<]*)</h2>", page) == [*TAGS, "Shapes"]
    assert page.index('>POST</span> <span class="path">/v1/collections/{name}/search') < page.index("/v1/embeddings<")
    assert page.index("/health/live<") < page.index(">/mcp<") < page.index('id="shapes"')
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "Search a collection" in page
    assert "<details open" not in page


@pytest.mark.parametrize("docs", [True, False])
@pytest.mark.parametrize("console", [True, False])
def test_console_and_page_lead_to_each_other_where_both_are_served(tmp_path: Path, docs: bool, console: bool) -> None:
    client = TestClient(app_of(tmp_path, docs=docs, console=console), base_url="http://127.0.0.1")
    if docs:
        assert ('href="/"' in client.get("/docs").text) is console
    if console:
        page = client.get("/")
        assert ('href="/docs"' in page.text) is docs
        assert client.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
