"""The map of a collection: its points lead to their rows by pointer, by keyboard and by the list; colours, zoom."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.console.conftest import Open
from tests.console.scene import SCRIPT

PIXELS = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
  let sum = 0, hash = 0;
  for (let i = 3; i < data.length; i += 4) if (data[i]) { sum += 1; hash = (hash * 31 + i + data[i - 3]) | 0; }
  return [sum, hash];
}"""
FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def address(shared_address: str) -> str:
    """Nothing here changes a row."""
    return shared_address


def drawn(page: Page) -> list[int]:
    """How many pixels the map's drawing has, and a sum over where they are and of which colour."""
    page.evaluate(FRAME)
    pixels: list[int] = page.locator(".scatter canvas").evaluate(PIXELS)
    return pixels


def plot(page: Page) -> Locator:
    return page.get_by_role("application", name=re.compile("Map of materials: 44 points"))


def test_by_keyboard_to_a_row(address: str, open_page: Open) -> None:
    page = open_page(address, "#/map/materials?color=MTART")
    expect(
        page.locator("main").get_by_text(re.compile(r"All 44 rows\. .* keeps \d+ % of the variance"))
    ).to_be_visible()
    plot(page).focus()
    page.keyboard.press("ArrowRight")
    said = page.locator("#announcements")
    expect(said).to_contain_text("MTART: ")
    first = said.inner_text()
    for way in ("ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown"):
        page.keyboard.press(way)
        page.evaluate(FRAME)
        if said.inner_text() != first:  # a further key might lead back
            break
    expect(said).not_to_have_text(first)
    words = page.locator(".scatter-tip").inner_text().partition(" · ")[0]
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Row")
    expect(dialog).to_contain_text(words.rstrip("….")[:20])
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(plot(page)).to_be_focused()


@pytest.mark.slow
def test_by_pointer_to_a_row(address: str, open_page: Open) -> None:
    page = open_page(address)
    at = {"007": (0.0, 0.0), "001": (-1.0, -1.0), "002": (1.0, 1.0)}
    points = [
        {"id": json.dumps([key]), "x": x, "y": y, "color": SCRIPT, "title": f"{key} \u202e{SCRIPT}"}
        for key, (x, y) in at.items()
    ]
    answer: dict[str, Any] = {"points": points, "explained": [0.25, 0.125], "sampled": 3, "rows": 3}
    page.context.route("**/map?*", lambda route: route.fulfill(json=answer))
    page.goto(f"{address}/#/map/materials?color=MTART")
    place = page.get_by_role("application", name="Map of materials: 3 points")
    box = place.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2 + 3, box["y"] + box["height"] / 2 - 3)
    expect(page.locator(".scatter-tip")).to_have_text(f"007 \ufffd{SCRIPT} · MTART: {SCRIPT}")
    whole = drawn(page)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 60, steps=3)
    page.mouse.up()
    expect(page.get_by_role("dialog")).to_have_count(0)  # it was moved and not meant
    place.click()
    expect(page.get_by_role("dialog", name="Row")).to_contain_text("office chair with wheels number 7")
    assert whole[0] > 0


@pytest.mark.slow
def test_zoom_and_groups(address: str, open_page: Open) -> None:
    page = open_page(address, "#/map/materials?color=MTART")
    expect(plot(page)).to_be_visible()
    whole = drawn(page)
    page.get_by_role("button", name="Zoom in").click()
    assert drawn(page) != whole
    page.get_by_role("button", name="Whole map").click()
    page.mouse.move(0, 0)
    assert drawn(page) == whole
    group = page.get_by_role("button", name="FERT")
    group.click()
    expect(group).to_have_attribute("aria-pressed", "false")
    assert drawn(page)[0] < whole[0]
    group.click()
    assert drawn(page) == whole
    page.emulate_media(color_scheme="dark")
    assert drawn(page) != whole


@pytest.mark.slow
def test_coloured_by_a_number_and_listed(address: str, open_page: Open) -> None:
    page = open_page(address, "#/map/materials")
    page.get_by_label("Coloured by").select_option("BRGEW")
    page.get_by_label("Maximum points").select_option("500")
    page.get_by_role("button", name="Draw").click()
    expect(page).to_have_url(re.compile(r"#/map/materials\?color=BRGEW&limit=500"))
    legend = page.get_by_role("list", name="BRGEW").get_by_role("button")
    expect(legend).to_have_count(5)
    expect(legend.first).to_have_accessible_name(re.compile(r"^1\.5 – \d"))
    counts = [int(text.split()[-1]) for text in legend.all_inner_texts()]
    assert sum(counts) == 44
    page.get_by_text("List of points").click()
    entries = page.locator(".points").get_by_role("button")
    expect(entries).to_have_count(44)
    entries.nth(1).click()
    expect(page.get_by_role("dialog", name="Row")).to_be_visible()


@pytest.mark.slow
def test_a_collection_that_is_not_there(address: str, open_page: Open, watch: Any) -> None:
    watch.allow(404)
    page = open_page(address, "#/map/nowhere")
    expect(page.get_by_role("alert")).to_contain_text("nowhere")
