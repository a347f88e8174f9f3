"""The key: asked for when the service wants one, kept for the tab only, forgotten on wish, sent nowhere but here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from app.src.access.keys import Grant, create
from app.src.access.principal import Scope
from tests.console.conftest import ELSEWHERE, Open, Serve
from tests.console.scene import Watch


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def key(keys: Path, *scopes: Scope) -> str:
    return create(keys, Grant("-".join(scopes), scopes))[1]


def sign_in(page: Page, key: str) -> None:
    dialog = page.get_by_role("dialog", name="Sign in")
    field = dialog.get_by_label("Key or token")
    expect(field).to_be_focused()
    assert field.get_attribute("type") == "password"
    field.fill(key)
    page.keyboard.press("Enter")


def stored(page: Page) -> Any:
    return page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")


def test_a_key_is_asked_for_once_and_forgotten_on_wish(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    good = key(keys, "search")
    address = serve(access={"keys": keys, "failures": "unlimited"})
    watch.allow(401)
    page = open_page(address, "#/search/materials?q=gearbox")
    sign_in(page, "owl_wrong")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()
    sign_in(page, good)
    expect(page.locator(".hit").nth(4)).to_be_visible()
    assert stored(page) == [[good], [], ""]
    assert good not in page.url
    page.reload()
    expect(page.locator(".hit").nth(4)).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    expect(page.locator(".hit")).to_have_count(0)
    assert stored(page) == [[], [], ""]
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_contain_text("send an API key")
    page.get_by_role("button", name="Try again").click()
    sign_in(page, good)
    expect(page.locator(".hit").nth(4)).to_be_visible()


@pytest.mark.slow
def test_a_scope_that_is_missing_is_named(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    metrics = key(keys, "metrics")
    address = serve(access={"keys": keys})
    watch.allow(401, 403)
    page = open_page(address, "#/search/materials?q=gearbox")
    sign_in(page, metrics)
    expect(page.locator(".results").get_by_role("alert")).to_contain_text("Your key lacks the scope search")


@pytest.mark.slow
def test_over_plain_http_from_another_machine(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    """A page there lacks what browsers keep for secure contexts: crypto.randomUUID, the clipboard."""
    good = key(keys, "search")
    address = serve(access={"keys": keys, "hosts": [ELSEWHERE]}).replace("127.0.0.1", ELSEWHERE)
    watch.allow(401)
    page = open_page(address, "#/search/materials?q=gearbox")
    sign_in(page, good)
    expect(page.locator(".hit").nth(4)).to_be_visible()
    assert page.evaluate("isSecureContext") is False
    page.get_by_role("button", name="Whole row").first.click()
    page.get_by_role("button", name="Copy id").click()
    expect(page.get_by_role("button", name="Copying is not allowed here")).to_be_visible()
    watch.troubles = [
        each for each in watch.troubles if "Cross-Origin-Opener-Policy header has been ignored" not in each
    ]


@pytest.mark.slow
def test_who_gives_no_key_is_left_in_peace(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    good = key(keys, "metrics")
    address = serve(access={"keys": keys, "failures": "unlimited"})
    watch.allow(401)
    page = open_page(address, "#/nowhere")
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("location.hash = '#/gpu'")
    expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_have_count(2)
    asked.clear()
    page.clock.run_for(10_000)
    page.evaluate("fetch('/health/live').then((answer) => answer.text())")
    assert asked == [f"{address}/health/live"]
    page.get_by_role("button", name="Try again").first.click()
    sign_in(page, good)
    expect(page.get_by_role("alert")).to_have_count(1)
    with page.expect_response("**/v1/gpu"):
        page.clock.run_for(5_000)


@pytest.mark.slow
def test_what_no_header_can_hold_is_no_key(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    good = key(keys, "search")
    address = serve(access={"keys": keys, "failures": "unlimited"})
    watch.allow(401)
    page = open_page(address, "#/search/materials?q=gearbox")
    sign_in(page, f"\u201c{good}\u201d")
    expect(page.locator("#key:invalid")).to_be_focused()
    assert stored(page) == [[], [], ""]
    sign_in(page, good)
    expect(page.locator(".hit").nth(4)).to_be_visible()


@pytest.mark.slow
def test_the_key_is_asked_for_over_another_dialog(serve: Serve, keys: Path, open_page: Open, watch: Watch) -> None:
    good = key(keys, "search")
    address = serve(access={"keys": keys, "failures": "unlimited"})
    watch.allow(401)
    page = open_page(address, "#/search/materials?q=gearbox")
    sign_in(page, good)
    expect(page.locator(".hit").nth(4)).to_be_visible()
    page.evaluate("sessionStorage.clear()")
    page.get_by_role("button", name="Whole row").first.click()
    sign_in(page, good)
    expect(page.get_by_role("dialog", name="Row").locator(".chunk")).to_be_visible()
