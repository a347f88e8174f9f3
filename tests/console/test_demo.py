"""The demo's collections in the console, with the real models: searches that found the wrong rows before."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from app.src.demo import Demo
from app.src.settings import Settings
from tests.api.conftest import serving
from tests.console.conftest import Open

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Demo(Settings()) as demo:
        for name in demo.names:
            demo.service.sync.run(name)
        with serving(demo.service) as client:
            yield str(client.base_url).rstrip("/")


@pytest.mark.parametrize(
    ("collection", "query", "first"),
    [
        ("materials", "bequemer Stuhl bei Rückenschmerzen", "Ergonom"),  # German question: the swivel chair
        ("meldungen", "Kollege ausgerutscht und verletzt", "Arbeitsunfall auf nassem Boden"),
        ("meldungen", "worker slipped on a wet floor and was injured", "Arbeitsunfall auf nassem Boden"),
    ],
)
def test_the_right_row_comes_first(address: str, open_page: Open, collection: str, query: str, first: str) -> None:
    page = open_page(address, f"#/search/{collection}?q={quote(query)}")
    expect(page.locator(".hit .text").first).to_contain_text(first)
    expect(page.locator(".summary")).not_to_contain_text("Nothing relevant found")


def test_nonsense_finds_nothing_relevant(address: str, open_page: Open) -> None:
    page = open_page(address, f"#/search/materials?q={quote('xqzw blorf vantu')}")
    expect(page.locator(".summary")).to_contain_text("Nothing relevant found")
