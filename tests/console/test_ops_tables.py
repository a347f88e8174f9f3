"""The browser of tables before the emulator: searching, leafing, a table's proposal and the texts that a template
makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from hana_emulator.testing import Emulator
from tests.console.conftest import Open, Serve
from tests.console.scene import SCRIPT, Watch

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
    toml = page.get_by_role("group", name="owl-sap.toml")
    expect(toml).to_contain_text(f'source = "{schema}./BIC/AZD"')
    expect(toml).to_contain_text('key = ["MANDT", "K"]')
    columns = page.get_by_role("table", name="Columns")
    expect(columns.get_by_role("row").filter(has_text="MAKTX")).to_contain_text("NVARCHAR(200)")
    page.go_back()
    expect(page.get_by_role("row")).to_have_count(2)


@pytest.mark.slow
def test_a_template_is_tried(tables: str, schema: str, open_page: Open, watch: Watch) -> None:
    watch.allow(422)
    page = open_page(tables, f"#/tables/{schema}/%2FBIC%2FAZD")
    template = page.get_by_label("Template")
    template.fill("{MAKTX}: {LTEX}")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("alert")).to_contain_text("LTEXT")
    expect(template).to_have_attribute("aria-invalid", "true")

    template.fill('Order "{K}": {MAKTX}')
    page.get_by_label("Texts to show").fill("3")
    page.get_by_role("button", name="Preview").click()
    texts = page.locator(".samples li")
    expect(texts).to_have_count(3)
    expect(texts.first).to_have_text(re.compile(r'Order "\d+": Pump number \d+\d+ tokens'))
    expect(template).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("table", name="Text lengths").get_by_role("row").nth(1)).to_contain_text("20")
    expect(page.get_by_role("group", name="owl-sap.toml")).to_contain_text('template = "Order \\"{K}\\": {MAKTX}"')
    page.get_by_role("button", name="Back to the proposal").click()
    expect(template).to_be_focused()
    expect(template).to_have_value(re.compile("{MAKTX}"))


@pytest.mark.slow
def test_a_table_without_a_proposal_says_why(tables: str, schema: str, open_page: Open) -> None:
    page = open_page(tables, f"#/tables/{schema}/NUMBERS")
    expect(page.get_by_text("no column that looks like text")).to_be_visible()
    page.get_by_label("Template").fill("{K}")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("All sampled rows are empty.")).to_be_visible()
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
