"""How the console looks to everybody: small screens, dark, axe's rules, themes that are kept, and the frame around."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.console.conftest import Open

RULES: dict[str, Any] = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
FILTERED = '#/search/materials?q=gearbox&explain=0&variety=20&filters={"MTART":{"in":["ROH"]}}'
GROUND = "getComputedStyle(document.documentElement).backgroundColor"
LIGHT, DARK = "rgb(244, 246, 247)", "rgb(15, 21, 24)"


@pytest.fixture(scope="module")
def address(shared_address: str) -> str:
    return shared_address


def violations(page: Page) -> list[str]:
    """axe's, with what they are about; its script comes over DevTools, which the page's policy does not bind."""
    found = Axe().run(page, options=RULES).response["violations"]
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(scheme: Literal["light", "dark"], address: str, open_page: Open) -> None:
    page = open_page(address, FILTERED, color_scheme=scheme)
    expect(page.locator(".hit").first).to_be_visible()
    expect(page.get_by_label("ROH")).to_be_checked()
    assert violations(page) == []
    page.locator(".hit h2 button").first.click()
    expect(page.get_by_role("dialog").get_by_role("rowheader", name="MATNR")).to_be_visible()
    assert violations(page) == []


@pytest.mark.slow
def test_axe_would_find_something(address: str, open_page: Open) -> None:
    page = open_page(address)
    expect(page.get_by_role("search")).to_be_visible()
    page.evaluate("document.querySelector('#collection').labels[0].remove()")
    assert any("select-name" in each for each in violations(page))


@pytest.mark.parametrize("width", [320, *(pytest.param(width, marks=pytest.mark.slow) for width in (600, 1280))])
def test_nothing_is_wider_than_the_screen(width: int, address: str, open_page: Open) -> None:
    page = open_page(address, FILTERED, viewport={"width": width, "height": 700})
    expect(page.locator(".hit").first).to_be_visible()
    for summary in page.locator("summary").all():
        if summary.locator("xpath=..").get_attribute("open") is None:
            summary.click()
    expect(page.get_by_label("BRGEW from")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [320, pytest.param(390, marks=pytest.mark.slow)])
def test_the_header_is_one_row_on_a_phone(width: int, address: str, open_page: Open) -> None:
    page = open_page(address, viewport={"width": width, "height": 700})
    expect(page.get_by_role("search")).to_be_visible()
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    assert len(set(links.evaluate_all("links => links.map((each) => each.getBoundingClientRect().top)"))) == 1
    header = page.locator(".top").bounding_box()
    assert header is not None
    assert header["height"] <= 64  # it was 160 in three rows
    expect(page.get_by_role("button", name="Theme: auto")).to_be_visible()


@pytest.mark.slow
def test_dark_and_light_by_system_and_by_choice(address: str, open_page: Open) -> None:
    assert open_page(address).evaluate(GROUND) == LIGHT
    page = open_page(address, color_scheme="dark")
    assert page.evaluate(GROUND) == DARK
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(GROUND) == LIGHT
    page.reload()
    assert page.evaluate(GROUND) == LIGHT
    page.get_by_role("button", name="Theme: light").click()
    page.get_by_role("button", name="Theme: dark").click()
    expect(page.get_by_role("button", name="Theme: auto")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0


@pytest.mark.slow
def test_shortcuts_are_told_and_can_be_switched_off(address: str, open_page: Open) -> None:
    page = open_page(address)
    expect(page.get_by_role("search")).to_be_visible()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog.get_by_role("row", name="/ go to the search box")).to_be_visible()
    dialog.get_by_label("Single-key shortcuts on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_label("What are you looking for?")).not_to_be_focused()


@pytest.mark.slow
def test_an_address_that_leads_nowhere(address: str, open_page: Open) -> None:
    page = open_page(address, "#/nowhere")
    page.get_by_role("link", name="Go to the search").click()
    expect(page.get_by_role("heading", name="Search")).to_be_visible()
    expect(page.get_by_role("navigation").get_by_role("link", name="Search")).to_have_attribute("aria-current", "page")
