"""The console's files over HTTP: what is served, as what, to whom, and that nothing else is."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from app.src.access.keys import Grant, create
from app.src.api.server import create_app
from app.src.service.service import Service
from app.src.settings import Settings

ROOT = Path(__file__).parents[2]
STATIC = files("app.src.api") / "static"
PATHS = sorted(path.relative_to(str(STATIC)).as_posix() for path in Path(str(STATIC)).rglob("*") if path.is_file())
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
IMPORTED = re.compile(r'^import .* from "([^"]+)";$|\bimport\("([^"]+)"\)', re.MULTILINE)


def test_the_page_and_each_of_its_files(shared: httpx.Client) -> None:
    page = shared.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
    for path in PATHS:
        answer = shared.get(f"/console/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == f"{MEDIA_TYPES[Path(path).suffix]}; charset=utf-8"
        assert answer.content == (STATIC / path).read_bytes()


def test_head_tells_what_get_would(shared: httpx.Client) -> None:
    for path in ("/", "/console/main.js"):
        got, head = shared.get(path), shared.head(path)
        assert head.content == b""
        assert {name: head.headers[name] for name in ("etag", "content-length", "content-type")} == {
            name: got.headers[name] for name in ("etag", "content-length", "content-type")
        }


def test_a_browser_asks_again_and_is_told_that_nothing_changed(shared: httpx.Client) -> None:
    first = shared.get("/console/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = shared.get("/console/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert shared.get("/console/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert shared.get("/console/style.css").headers["etag"] != tag


@pytest.mark.parametrize(
    "path",
    [
        *("../console.py", "..%2fconsole.py", "%2e%2e/console.py", "....//console.py", "/etc/passwd", "", "%00"),
        *("views", "views/", "main.js%00.css", "MAIN.JS", "main.js/", "views/../main.js", "views%2f..%2fmain.js"),
        "nothing.js",
    ],
)
def test_no_path_leads_out_of_the_table(shared: httpx.Client, path: str) -> None:
    # As it stands: httpx would tidy the dots away.
    connection = http.client.HTTPConnection(shared.base_url.host, shared.base_url.port or 80, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", f"/console/{path}")
        answer = connection.getresponse()
        assert answer.status == 404
        assert answer.headers["content-type"] == "application/problem+json"


def test_nothing_but_reading(shared: httpx.Client) -> None:
    for path in ("/", "/console/main.js"):
        assert shared.post(path).status_code == 405


def test_every_module_that_is_imported_is_there() -> None:
    assert "main.js" in PATHS
    for path in PATHS:
        if path.endswith(".js"):
            for name in map("".join, IMPORTED.findall((STATIC / path).read_text(encoding="utf-8"))):
                assert name.startswith("."), f"{path} imports {name}, which is not ours"
                found = (Path("/") / Path(path).parent / name).as_posix()
                parts: list[str] = []
                for part in found.split("/")[1:]:
                    if part == "..":
                        parts.pop()
                    elif part != ".":
                        parts.append(part)
                assert "/".join(parts) in PATHS, f"{path} imports {name}"


@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith((".js", ".html"))])
def test_nothing_makes_markup_of_strings_or_looks_elsewhere(path: str) -> None:
    text = (STATIC / path).read_text(encoding="utf-8")
    code = "\n".join(
        line for line in text.splitlines() if not line.lstrip().startswith(("//", "*", "/*", "const MARKUP"))
    )
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        " style=",
        " onclick=",
    ):
        assert word not in code, word
    assert not re.findall(r"https?://(?!www\.w3\.org/)", code)


def test_the_files_are_there_for_who_has_no_key(settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create(keys, Grant("somebody", ("search",)))
    service = Service(settings.model_copy(update={"access": settings.access.model_copy(update={"keys": keys})}))
    try:
        with TestClient(create_app(service), base_url="http://localhost") as client:
            assert client.get("/").status_code == 200
            assert client.get("/console/main.js", headers={"Authorization": "Bearer wrong"}).status_code == 200
            assert client.get("/v1/collections").status_code == 401
    finally:
        service.close()


def test_it_can_be_switched_off(make_service: Callable[[], Service], settings: Settings) -> None:
    without = settings.model_copy(update={"api": settings.api.model_copy(update={"console": False})})
    service = Service(without)
    try:
        with TestClient(create_app(service), base_url="http://localhost") as client:
            assert client.get("/").status_code == 404
            assert client.get("/console/main.js").status_code == 404
    finally:
        service.close()


def test_the_wheel_has_every_file() -> None:
    """hatchling takes a package with all but what git ignores and what a rule leaves out; there is none."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert list(wheel) == ["packages"]
    assert "app" in wheel["packages"]
    paths = [f"app/src/api/static/{path}" for path in PATHS]
    command = ["git", "check-ignore", "--no-index", *paths]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == ""
    assert "<noscript>" in (STATIC / "index.html").read_text(encoding="utf-8")


def test_the_console_calls_quarantine_by_one_word() -> None:
    for path in PATHS:
        assert not re.search("set aside|in whatever language", (STATIC / path).read_text(), re.IGNORECASE), path
