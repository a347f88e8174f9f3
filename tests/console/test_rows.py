"""The page of rows: sorted, filtered, leafed through, exported; fields and codes called as in HANA, on the
emulator.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from app.src.service.service import Service
from app.src.settings import Settings
from hana_emulator.testing import Emulator
from tests.api.conftest import serving
from tests.api.test_labels import TABLES, TYPES
from tests.console.conftest import Open, Serve
from tests.console.scene import SCRIPT, Watch
from tests.console.test_looks import violations
from tests.console.test_signing_in import key, sign_in

SCHEMA = "CONSOLE_ROWS"
ROWS = 110
HEAVY = quote('{"MTART":{"in":["ERSA"]},"BRGEW":{"from":100,"to":null}}')


@pytest.fixture(scope="module")
def address(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    connection = emulator.connect(autocommit=True)
    cursor = connection.cursor()
    cursor.execute(f'CREATE SCHEMA "{SCHEMA}"')
    cursor.execute(f'SET SCHEMA "{SCHEMA}"')
    for statement in TABLES:
        cursor.execute(statement.replace('"MAKTX" NVARCHAR(40)', '"MAKTX" NVARCHAR(400)'))
    cursor.executemany('INSERT INTO "T134T" VALUES (?, ?, ?, ?)', TYPES)
    made = [
        ("100", f"{n:03}", ("ERSA", "ROH", "FERT")[n % 3], "X", n * 1.5, f"2024{1 + n % 12:02}15", f"part {n} {SCRIPT}")
        for n in range(ROWS)
    ]
    cursor.executemany('INSERT INTO "MARA" VALUES (?, ?, ?, ?, ?, ?, ?)', made)
    login = {each: getattr(emulator, each) for each in ("host", "port", "user", "password")} | {"encrypt": False}
    block = {
        "name": "materials",
        "source": f"{SCHEMA}.V_MARA",
        "key": ["MANDT", "MATNR"],
        "where": "MANDT = '100'",
        "template": "{MAKTX}",
        "metadata": ["MTART", "MATKL", "BRGEW", "ERSDA"],
    }
    store = {"kind": "local", "path": tmp_path_factory.mktemp("rows") / "vectors"}
    settings = {"hana": login, "store": store, "embedding": {"model": "hash:64"}, "collections": [block]}
    with contextlib.closing(Service(Settings.model_validate(settings))) as service:
        service.sync.run("materials")
        with serving(service) as client:
            yield str(client.base_url).rstrip("/")
    cursor.execute(f'DROP SCHEMA "{SCHEMA}" CASCADE')
    connection.close()


def numbers(page: Page) -> list[int]:
    """Of the rows shown, once they are those asked for."""
    expect(page.locator("tbody tr").first).to_be_visible()
    expect(page.locator(".results")).not_to_have_attribute("aria-busy", "true")
    return [int(key.split()[-1]) for key in page.locator("tbody th button").all_inner_texts()]


def test_rows_are_sorted_and_leafed_through(address: str, open_page: Open) -> None:
    page = open_page(address, "#/collections/materials")
    page.get_by_role("link", name="Rows", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Rows of materials")
    expect(page).to_have_title("Rows of materials – owl-sap")
    expect(page.get_by_role("link", name="Collections", exact=True)).to_have_attribute("aria-current", "page")
    expect(page.locator(".about")).to_have_text("110 rows")
    expect(page.get_by_role("columnheader", name="Key")).to_have_attribute("aria-sort", "ascending")
    assert numbers(page) == list(range(50))
    weight = page.get_by_role("columnheader", name="Gross weight")
    expect(weight.get_by_title("BRGEW")).to_be_visible()
    weight.get_by_role("button").click()
    expect(weight).to_have_attribute("aria-sort", "ascending")
    weight.get_by_role("button").click()
    expect(weight).to_have_attribute("aria-sort", "descending")
    expect(weight.get_by_role("button")).to_be_focused()
    assert numbers(page) == list(range(109, 59, -1)), "by number, not by text"
    page.get_by_role("button", name="Next page").click()
    expect(page.locator("main").get_by_text("Page 2", exact=True)).to_be_visible()
    assert numbers(page) == list(range(59, 9, -1))
    page.get_by_role("button", name="Next page").click()
    expect(page.locator("main").get_by_text("Page 3", exact=True)).to_be_visible()
    assert numbers(page) == list(range(9, -1, -1))
    expect(page.get_by_role("button", name="Next page")).to_have_count(0)
    page.get_by_role("button", name="Previous page").click()
    expect(page.locator("main").get_by_text("Page 2", exact=True)).to_be_visible()
    page.go_back()
    expect(page.locator("main").get_by_text("Page 3", exact=True)).to_be_visible()
    shared = open_page(page.url.partition("#")[0].rstrip("/"), "#" + page.url.partition("#")[2])
    assert numbers(shared) == list(range(9, -1, -1))
    shared.get_by_role("button", name="First page").click()
    expect(shared.get_by_text("Page 1", exact=True)).to_be_visible()


def test_filters_hold_for_pages_and_the_export(address: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(address, "#/rows/materials?sort=-BRGEW")
    page.get_by_text("Filters", exact=True).click()
    page.get_by_label("Spare parts (ERSA)").check()
    page.get_by_label("Gross weight from").fill("100")
    page.get_by_label("Gross weight from").press("Tab")
    expect(page.get_by_role("button", name="Remove filter Gross weight: from 100")).to_be_visible()
    expect(page.locator(".about")).to_have_text("filtered")
    wanted = [number for number in range(109, -1, -1) if number % 3 == 0 and number * 1.5 >= 100]
    assert numbers(page) == wanted
    lines = exported(page)
    assert lines[0] == ["id", "MANDT", "MATNR", "text", "MTART", "MATKL", "BRGEW", "ERSDA"]
    assert [int(line[2]) for line in lines[1:]] == wanted
    assert lines[1][3] == f"part {wanted[0]} {SCRIPT}"
    page.get_by_role("button", name="Remove filter Material type: Spare parts (ERSA)").click()
    expect(page.locator(".chip")).to_have_count(1)
    expect(page.get_by_label("Spare parts (ERSA)")).not_to_be_checked()
    page.get_by_label("Gross weight to").fill("99")
    page.get_by_label("Gross weight to").press("Tab")
    expect(page.locator("main").get_by_text("From must not be greater than to.")).to_be_visible()
    expect(page.locator(".chip")).to_have_text(re.compile("from 100"))
    page.locator(".chip").click()
    expect(page.locator(".about")).to_have_text("110 rows")


def exported(page: Page) -> list[list[str]]:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export CSV").click()
    assert download.value.suggested_filename == "materials.csv"
    content = Path(download.value.path()).read_bytes()
    assert content.startswith("\ufeffid".encode()), "else spreadsheets take it for another encoding"
    return list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")))


def test_the_export_sends_the_key(serve: Serve, tmp_path: Path, open_page: Open, watch: Watch) -> None:
    keys = tmp_path / "keys.json"
    good = key(keys, "search")
    address = serve(access={"keys": keys})
    watch.allow(401)
    page = open_page(address, "#/rows/materials")
    sign_in(page, good)
    expect(page.locator("tbody tr")).to_have_count(44)
    assert len(exported(page)) == 45


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(scheme: Any, address: str, open_page: Open) -> None:
    page = open_page(address, f"#/rows/materials?sort=-ERSDA&filters={HEAVY}", color_scheme=scheme)
    page.get_by_text("Filters (2)", exact=True).click()
    expect(page.get_by_label("Gross weight from")).to_be_visible()
    expect(page.locator("tbody tr").first).to_be_visible()
    assert violations(page) == []


@pytest.mark.parametrize("width", [320, pytest.param(700, marks=pytest.mark.slow)])
def test_a_phone_sorts_too(width: int, address: str, open_page: Open) -> None:
    page = open_page(address, f"#/rows/materials?filters={HEAVY}", viewport={"width": width, "height": 700})
    page.get_by_text("Filters (2)", exact=True).click()
    expect(page.get_by_label("Gross weight from")).to_be_visible()
    page.get_by_label("Sort by").select_option("Gross weight, descending")
    expect(page).to_have_url(re.compile("sort=-BRGEW"))
    assert numbers(page)[0] == 108
    expect(page.locator("tbody tr").first).to_contain_text("Spare parts (ERSA)")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_column_sorted_by_is_in_sight(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search", viewport={"width": 1040, "height": 700})
    page.evaluate("document.styleSheets[0].insertRule('table.data .wide { min-width: 70rem !important; }')")
    page.evaluate("location.hash = '#/rows/materials?sort=-ERSDA'")
    head = page.get_by_role("columnheader", name="Created on date")
    expect(head).to_be_in_viewport()
    assert page.locator("main .scroll").evaluate("place => place.scrollLeft") > 0
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(head).to_be_in_viewport()


def test_hits_facets_and_rows_are_called_as_in_hana(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=part+7")
    hit = page.locator(".hit").first
    expect(hit.locator(".fields")).to_contain_text("Material type")
    expect(hit.get_by_title("MTART")).to_have_text("Material type")
    expect(page.locator("fieldset", has_text="Material type").get_by_label("Rohstoff (ROH)")).to_be_visible()
    page.get_by_label("Rohstoff (ROH)").check()
    expect(page.get_by_role("button", name="Remove filter Material type: Rohstoff (ROH)")).to_be_visible()
    hit.locator("h2 button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("rowheader", name="Gross weight")).to_be_visible()
    expect(dialog.get_by_role("row", name="Material type")).to_contain_text("Rohstoff (ROH)")


@pytest.mark.parametrize("hash", ["#/rows/materials?after=nonsense", "#/rows/nobody"])
def test_what_is_not_there_is_said(hash: str, address: str, open_page: Open, watch: Watch) -> None:
    watch.allow(404, 422)
    page = open_page(address, hash)
    expect(page.locator(".results").get_by_role("alert")).to_contain_text(re.compile("not a cursor|no collection"))
    if "after" in hash:
        page.get_by_role("button", name="Try again").click()
        assert len(numbers(page)) == 50
