"""The browser of tables before the emulator: searching, leafing, a table's proposal and the texts that a template
makes, and the collection that comes of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from app.src.service.service import Service
from app.src.settings import load
from hana_emulator.testing import Emulator
from tests.api.conftest import serving
from tests.console.conftest import Open, Serve
from tests.console.scene import SCRIPT, Watch
from tests.console.test_looks import violations

PAGE = 50


@pytest.fixture
def schema(hana_schema: str, hana: Any) -> str:
    cursor = hana.cursor()
    script = SCRIPT.replace("'", "''")
    for sql in (
        'CREATE COLUMN TABLE "/BIC/AZD" ("MANDT" NVARCHAR(3), "K" NVARCHAR(10), "MAKTX" NVARCHAR(200) '
        'COMMENT \'Description\', "LTEXT" NCLOB, PRIMARY KEY ("MANDT", "K")) COMMENT \'Orders of the plant\'',
        f'CREATE TABLE "NUMBERS" ("K" INTEGER PRIMARY KEY) COMMENT \'{script}\'',
    ):
        cursor.execute(sql)
    rows = [("100", str(number), f"Pump number {number}", "Oil it " * number) for number in range(1, 21)]
    cursor.executemany('INSERT INTO "/BIC/AZD" VALUES (?, ?, ?, ?)', rows)
    hana.commit()
    return hana_schema


@pytest.fixture
def tables(serve: Serve, emulator: Emulator, schema: str) -> str:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return serve(hana=login | {"encrypt": False})


def test_from_the_search_to_a_proposal(tables: str, schema: str, open_page: Open) -> None:
    page = open_page(tables, f"#/tables?schema={schema}")
    expect(page.get_by_role("row")).to_have_count(3)
    expect(page.get_by_role("row").filter(has_text="NUMBERS")).to_contain_text(SCRIPT)
    page.get_by_label("Name or comment contains").fill("orders")
    page.keyboard.press("Enter")
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page).to_have_url(re.compile("search=orders"))
    page.get_by_role("link", name="/BIC/AZD").click()

    expect(page.get_by_role("heading", level=1)).to_have_text(f"{schema}./BIC/AZD")
    page.get_by_text("As a block of owl-sap.toml").click()
    toml = page.get_by_role("group", name="owl-sap.toml")
    expect(toml).to_contain_text(f'source = "{schema}./BIC/AZD"')
    expect(toml).to_contain_text('key = ["MANDT", "K"]')
    columns = page.get_by_role("table", name="Columns")
    expect(columns.get_by_role("row").filter(has_text="MAKTX")).to_contain_text("NVARCHAR(200)")
    page.go_back()
    expect(page.get_by_role("row")).to_have_count(2)


@pytest.fixture
def editable(tables: str, emulator: Emulator, schema: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a service that reads tables and may write its settings file; and the file."""
    file = tmp_path / "owl-sap.toml"
    login = {name: getattr(emulator, name) for name in ("host", "user", "password")}
    lines = "".join(f'{name} = "{value}"\n' for name, value in login.items())
    file.write_text(
        f'[hana]\n{lines}port = {emulator.port}\nencrypt = false\n[embedding]\nmodel = "hash:64"\n'
        f'[store]\nkind = "local"\npath = "{tmp_path / "created"}"\n',
        encoding="utf-8",
    )
    with closing(Service(load(file).settings, file=file)) as service, serving(service) as client:
        yield str(client.base_url).rstrip("/"), file


def test_a_collection_is_created_and_synced(
    editable: tuple[str, Path], schema: str, open_page: Open, watch: Watch
) -> None:
    address, file = editable
    watch.allow(422, 409)
    page = open_page(address, f"#/tables/{schema}/%2FBIC%2FAZD")
    texts = page.locator(".samples li")
    expect(texts.first).to_contain_text("Pump number")

    template = page.get_by_label("Template")
    template.fill("{MAKTX}: {LTEX}")
    expect(page.get_by_role("alert")).to_contain_text("LTEXT")
    expect(template).to_have_attribute("aria-invalid", "true")
    template.fill('Order "{K}": {MAKTX}')
    expect(texts.first).to_have_text(re.compile(r'Order "\d+": Pump number \d+\d+ tokens'))
    expect(template).not_to_have_attribute("aria-invalid", "true")

    page.get_by_label("Name", exact=True).fill("pumps")
    page.get_by_role("checkbox", name="K", exact=True).check()
    page.get_by_label("Key", exact=True).fill("MANDT, NR")
    page.get_by_role("button", name="Create collection").click()
    expect(page.get_by_role("alert")).to_contain_text("`key`")
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.get_by_label("Key", exact=True).fill("MANDT, K")
    page.get_by_label("Automatic sync").select_option("Every hour")
    page.get_by_text("As a block of owl-sap.toml").click()
    shown = page.get_by_role("group", name="owl-sap.toml").inner_text()
    assert violations(page) == []
    page.set_viewport_size({"width": 320, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    page.get_by_role("button", name="Create collection").click()

    expect(page.get_by_role("heading", name="Collection pumps is created")).to_be_focused()
    (block,) = tomllib.loads(file.read_text(encoding="utf-8"))["collections"]
    assert block["template"] == 'Order "{K}": {MAKTX}'
    assert (block["key"], block["metadata"], block["schedule"]) == (["MANDT", "K"], ["K"], {"every": "1h"})
    assert tomllib.loads(shown)["collections"] == [block], "the block to copy says the same"
    page.get_by_role("button", name="Sync now").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("pumps")
    expect(page.locator(".said").first).to_contain_text("20 rows read: 20 written")


def test_a_name_in_use_and_a_file_that_cannot_be_written(
    editable: tuple[str, Path], schema: str, open_page: Open, watch: Watch
) -> None:
    address, file = editable
    watch.allow(409)
    file.write_text(file.read_text(encoding="utf-8") + '[[collections]]\nname = "notes"\ndocuments = true\n')
    page = open_page(address, f"#/tables/{schema}/%2FBIC%2FAZD")
    page.get_by_label("Name", exact=True).fill("Notes")
    page.get_by_role("button", name="Create collection").click()
    expect(page.get_by_role("alert")).to_contain_text('"notes"')
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    file.unlink()
    page.get_by_label("Name", exact=True).fill("orders")
    page.get_by_role("button", name="Create collection").click()
    expect(page.get_by_role("group", name="Block to paste")).to_contain_text(f'source = "{schema}./BIC/AZD"')
    expect(page.locator("main").get_by_text("cannot be written")).to_be_visible()


def test_who_may_not_see_every_row_gets_the_block(
    serve: Serve, emulator: Emulator, schema: str, open_page: Open, watch: Watch, tmp_path: Path
) -> None:
    watch.allow(403)
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}", "metadata": ["MTART"]}
    address = serve(hana=login, collections=[block | {"row_rights": {"MTART": "owner"}}])
    page = open_page(address, f"#/tables/{schema}/%2FBIC%2FAZD")
    expect(page.get_by_role("group", name="owl-sap.toml")).to_contain_text('key = ["MANDT", "K"]')
    expect(page.get_by_role("button", name="Create collection")).to_have_count(0)


@pytest.mark.slow
def test_a_table_without_a_proposal_says_why(tables: str, schema: str, open_page: Open) -> None:
    page = open_page(tables, f"#/tables/{schema}/NUMBERS")
    expect(page.locator("main").get_by_text("no column that looks like text")).to_be_visible()
    page.get_by_label("Template").fill("{K}")
    expect(page.locator("main").get_by_text("All sampled rows are empty.")).to_be_visible()
    expect(page).to_have_title(re.compile("NUMBERS"))


def names(page: Page) -> list[str]:
    return page.locator("main table tbody th").all_inner_texts()


@pytest.mark.slow
def test_pages(tables: str, schema: str, open_page: Open, hana: Any) -> None:
    cursor = hana.cursor()
    for number in range(PAGE):
        cursor.execute(f'CREATE TABLE "T{number:03}" ("K" INTEGER PRIMARY KEY)')
    page = open_page(tables, f"#/tables?schema={schema}")
    expect(page.get_by_role("navigation", name="Pages of tables")).to_contain_text(f"Tables 1 to {PAGE}")
    first = names(page)
    assert len(first) == PAGE
    page.get_by_role("link", name="Next").click()
    expect(page.get_by_role("navigation", name="Pages of tables")).to_contain_text("Tables 51 to 52")
    assert sorted(first + names(page)) == sorted(["/BIC/AZD", "NUMBERS", *(f"T{number:03}" for number in range(PAGE))])
    expect(page.get_by_role("link", name="Next")).to_have_count(0)
    page.get_by_role("link", name="Previous").click()
    expect(page.get_by_role("navigation", name="Pages of tables")).to_contain_text(f"Tables 1 to {PAGE}")


@pytest.mark.slow
def test_without_hana_in_the_settings(address: str, open_page: Open, watch: Watch) -> None:
    watch.allow(500)
    page = open_page(address, "#/tables")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("Not configured")
    expect(problem).to_contain_text("[hana] host")
    expect(page.locator("main")).not_to_contain_text("Internal Server Error")


@pytest.mark.slow
def test_a_schema_that_is_not_there(tables: str, open_page: Open, watch: Watch) -> None:
    watch.allow(404)
    page = open_page(tables, "#/tables?schema=NOWHERE")
    expect(page.get_by_role("alert")).to_contain_text("NOWHERE")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
