"""A real browser, Debian's Chromium, before a real service."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from app.src.service.service import Service
from tests.api.conftest import serving
from tests.console.scene import Shelf, Watch, settings_in

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ELSEWHERE = "owl.test"
"""Another name of this machine: to a browser no secure context over http, as a service across a network is none."""
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    # Every other name and address is nowhere. To stop requests in Playwright instead costs each a way through Python.
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PATIENCE = 60_000
"""Milliseconds until something is there; on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All in one worker: a browser is slow to start."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("console"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Its path. Without it the tests are skipped by name; with CI=true it is installed, or they fail."""
    command = "source scripts/lib/chromium.sh && ensure_chromium && chromium_bin"
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    if found.returncode != 0:
        why = f"chromium cannot be had here: {found.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return found.stdout.strip()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """By module, not by session: Playwright's loop stands in this thread, where coroutines of other tests could not
    run beside it."""
    expect.set_options(timeout=PATIENCE)  # not the five seconds of its own
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def source() -> Shelf:
    return Shelf()


Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path, source: Shelf) -> Iterator[Serve]:
    """`serve(access=...)` starts a service over `source`, its collection `materials` synced, and gives its address."""
    with contextlib.ExitStack() as stack:

        def start(**more: Any) -> str:
            service = Service(settings_in(tmp_path, **more), source=source)
            stack.callback(service.close)
            service.sync.run("materials")
            return str(stack.enter_context(serving(service)).base_url).rstrip("/")

        yield start


@pytest.fixture(scope="module")
def shared_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one service for all tests of a module, without authentication."""
    with contextlib.closing(Service(settings_in(tmp_path_factory.mktemp("console")), source=Shelf())) as service:
        service.sync.run("materials")
        with serving(service) as client:
            yield str(client.base_url).rstrip("/")


@pytest.fixture
def address(serve: Serve) -> str:
    """Of a service without authentication."""
    return serve()


Open = Callable[..., Page]


@pytest.fixture
def watch() -> Watch:
    """Over all pages of the test; `watch.allow(401)` for what it means to provoke."""
    return Watch()


@pytest.fixture
def open_page(browser: Browser, watch: Watch) -> Iterator[Open]:
    """`open_page(address, "#/search", viewport=...)`: a page of a browser context of its own. When the test is over,
    nothing may have gone wrong in any."""
    contexts: list[BrowserContext] = []

    def open_page(address: str, hash: str = "", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        watch.attach(page, address)
        page.goto(f"{address}/{hash}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert watch.troubles == []
