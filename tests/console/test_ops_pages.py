"""What holds for every page of operations: usable with a screen reader as far as axe-core can tell, in light and dark,
and on a screen of 320 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from app.src.core import nvml
from tests.api.test_gpu import STATE
from tests.api.test_quarantine_routes import TOO_MUCH
from tests.console.conftest import Open, Serve
from tests.console.scene import Shelf
from tests.emulator.process import Emulator

RULES: Mapping[Literal["light", "dark"], Any] = {
    "light": {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "dark": {"runOnly": {"type": "rule", "values": ["color-contrast"]}},
}
"""By colours; dark has the same elements, and only its colours are others."""
PAGES = {
    "#/collections": "table >> nth=1",
    "#/collections/materials": "text=MATNR=003",
    "#/tables?schema={schema}": "text=NOTES",
    "#/tables/{schema}/NOTES": ".samples li",
    "#/gpu": "text=Now: 61 °C",
    "#/map/materials?color=MTART": ".legend button",
}
"""By address what is there once the page is complete."""
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
    cursor.execute("INSERT INTO \"NOTES\" VALUES (1, 'The gearbox of press 4 was oiled.')")
    connection.close()
    source.rows_by_key["003"]["MTART"] = TOO_MUCH
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return serve(hana=login | {"encrypt": False}), hana_schema


def complete(page: Page, address: str, hash: str, schema: str) -> None:
    page.goto(f"{address}/{hash.replace('{schema}', schema)}")
    if "NOTES" in hash:
        page.get_by_role("button", name="Preview").click()
    page.locator(PAGES[hash]).first.wait_for()


@pytest.mark.covers("GET /v1/jobs", "GET /v1/collections/{name}/generations", "GET /v1/collections/{name}/quarantine")
def test_every_page(busy: tuple[str, str], open_page: Open) -> None:
    address, schema = busy
    page = open_page(address, "#/collections/never")
    page.get_by_role("button", name="Sync", exact=True).click()
    page.locator(".said").first.wait_for()
    axe = Axe()
    for hash in PAGES:
        complete(page, address, hash, schema)
        for colours, rules in RULES.items():
            page.emulate_media(color_scheme=colours)
            found = axe.run(page, options=rules).response["violations"]
            told = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
            assert told == [], f"{hash}, {colours}"
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate(WIDTH) <= 0, f"{hash} is wider than a screen of 320 pixels"
        page.set_viewport_size({"width": 1280, "height": 800})
