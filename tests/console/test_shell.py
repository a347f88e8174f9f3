"""The frame around the views: its files, addresses, theme, shortcuts, and what it does without JavaScript or rights."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.conftest import Open


def test_it_opens_on_the_search(address: str, open_page: Open) -> None:
    page = open_page(address)
    expect(page.get_by_role("heading", name="Search")).to_be_visible()
    expect(page).to_have_title("Search – owl-sap")
    expect(page.get_by_role("navigation").get_by_role("link", name="Search")).to_have_attribute("aria-current", "page")


def test_an_address_that_leads_nowhere(address: str, open_page: Open) -> None:
    page = open_page(address, "#/nowhere")
    page.get_by_role("link", name="To the search").click()
    expect(page.get_by_role("heading", name="Search")).to_be_visible()
