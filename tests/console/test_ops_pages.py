"""What holds for every page of operations: usable with a screen reader as far as axe-core can tell, in light and dark,
and on a screen of 320 pixels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from app.src.core import nvml
from hana_emulator.testing import Emulator
from tests.api.test_gpu import STATE
from tests.api.test_quarantine_routes import TOO_MUCH
from tests.console.conftest import Open, Serve
from tests.console.scene import Shelf

RULES: Mapping[Literal["light", "dark"], Any] = {
    "light": {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "dark": {"runOnly": {"type": "rule", "values": ["color-contrast"]}},
}
"""By colours; dark has the same elements, and only its colours are others."""
PAGES = {
    "#/search": "text=Describe what you need",
    "#/search?q=gearbox&group=0": ".hit",
    "#/search/materials?q=gearbox&explain=1&passages=1&group=0": ".scores",
    '#/search/materials?like=["004"]': ".chip:has-text('gearbox')",
    "#/search/never": ".card.empty",
    "#/nowhere": "text=does not exist",
    "#/collections": "table >> nth=1",
    "#/collections/materials": "text=MATNR=003",
    "#/tables?schema={schema}": "text=NOTES",
    "#/tables/{schema}/OWL_LONG_MATERIALS_TEXTS_G1": "text=NOTE",
    "#/tables/{schema}/NOTES": ".samples li",
    "#/collections/never": "h2:has-text('Generations')",
    "#/map": ".legend button",
    "#/gpu": "text=Now: 61 °C",
    "#/map/materials?color=MTART": ".legend button",
}
"""By address what is there once the page is complete."""
MOST_TELLING = (
    "#/search/materials?q=gearbox&explain=1&passages=1&group=0",
    *("#/collections/materials", "#/tables/{schema}/NOTES", "#/gpu", "#/map/materials?color=MTART"),
)
BAD = re.compile(r"undefined|\bnull\b|NaN|\[object Object\]")
BROKEN_WORDS = """() => {
    const broken = [], range = document.createRange();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode;
        if (!node.parentElement.checkVisibility() || node.parentElement.closest(".visually-hidden, pre")) continue;
        for (const word of node.data.matchAll(/[A-Za-z0-9]{2,24}/g)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map((each) => Math.round(each.top))).size > 1) broken.push(word[0]);
        }
    }
    return broken;
}"""
"""Words of up to 24 letters and digits that stand on two lines."""
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def busy(
    serve: Serve, source: Shelf, emulator: Emulator, hana_schema: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """The address of a service where every page has something to show, and a schema with a table."""
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot((STATE,), "580.95", "13.0"))
    connection = emulator.connect(currentSchema=hana_schema, autocommit=True)
    cursor = connection.cursor()
    cursor.execute('CREATE TABLE "NOTES" ("K" INTEGER PRIMARY KEY, "NOTE" NCLOB)')
    cursor.execute('CREATE TABLE "OWL_LONG_MATERIALS_TEXTS_G1" ("K" INTEGER PRIMARY KEY, "NOTE" NCLOB)')
    cursor.execute("INSERT INTO \"NOTES\" VALUES (1, 'The gearbox of press 4 was oiled.')")
    connection.close()
    source.rows_by_key["003"]["MTART"] = TOO_MUCH
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return serve(hana=login | {"encrypt": False}), hana_schema


def complete(page: Page, address: str, hash: str, schema: str) -> None:
    page.goto(f"{address}/{hash.replace('{schema}', schema)}")
    page.locator(PAGES[hash]).first.wait_for()
    expect(page.locator(".loading")).to_have_count(0)  # it fades in, so its contrast is low for a moment


def violations(page: Page, colours: Literal["light", "dark"]) -> list[Any]:
    """axe's."""
    page.emulate_media(color_scheme=colours)
    found = Axe().run(page, options=RULES[colours]).response["violations"]
    return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]


@pytest.mark.slow
def test_the_page_about_the_api_unfolded(shared_address: str, open_page: Open) -> None:
    """axe finds nothing, and it is no wider than a phone."""
    page = open_page(shared_address, "docs")
    for summary in page.locator("main > details > summary").all():
        summary.click()
    for colours in RULES:
        assert violations(page, colours) == [], colours
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [320, 320]


def test_the_page_about_the_api(shared_address: str, open_page: Open) -> None:
    """To the console and back."""
    page = open_page(shared_address)
    page.get_by_role("link", name="REST API").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("REST API")
    shape = page.locator("#FoundHit")
    expect(shape).to_be_hidden()
    page.get_by_role("link", name="Shapes", exact=True).click()
    page.evaluate("location.hash = '#FoundHit'")
    expect(shape).to_be_visible()
    page.get_by_role("link", name="Console").click()
    expect(page.get_by_role("search")).to_be_visible()


@pytest.mark.parametrize(
    ("hashes", "schemes"),
    [
        pytest.param(MOST_TELLING, ["light"], id="most-telling"),
        pytest.param(PAGES, RULES, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_page(
    hashes: Iterable[str], schemes: Iterable[Literal["light", "dark"]], busy: tuple[str, str], open_page: Open
) -> None:
    address, schema = busy
    page = open_page(address, "#/collections/never")
    page.get_by_role("button", name="Sync", exact=True).click()
    page.locator(".said").first.wait_for()
    for hash in hashes:
        complete(page, address, hash, schema)
        for colours in schemes:
            assert violations(page, colours) == [], f"{hash}, {colours}"
        for text in (page.title(), page.locator("body").inner_text()):
            assert BAD.search(text) is None, f"{hash}: {text}"
        assert page.evaluate(BROKEN_WORDS) == [], hash
        page.set_viewport_size({"width": 390, "height": 640})
        assert page.evaluate(BROKEN_WORDS) == [], f"{hash} on a phone"
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate(WIDTH) <= 0, f"{hash} is wider than a screen of 320 pixels"
        page.set_viewport_size({"width": 1280, "height": 800})
