"""The page of the cards: charts of what a faked driver says, to read by keyboard and as a table; and without a card."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from app.src.access.keys import Grant, create
from app.src.core import nvml
from tests.api.test_gpu import STATE
from tests.console.conftest import Open, Serve
from tests.console.scene import Watch

GIB = 2**30
SECONDS = 2_100
"""In milliseconds: a little longer than the page waits."""


@pytest.fixture(scope="module")
def address(shared_address: str) -> str:
    """Nothing here changes a row."""
    return shared_address


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, one of which tells nothing of its power; the load of the first grows with each question."""
    asked = itertools.count(1)

    def snapshot() -> nvml.GpuSnapshot:
        first = replace(STATE, utilization_percent=next(asked), memory_total_bytes=16 * GIB, memory_used_bytes=4 * GIB)
        other = replace(first, index=1, uuid="GPU-2", name="Other card", power_watts=None, power_limit_watts=None)
        return nvml.GpuSnapshot((first, other), "580.95", "13.0")

    monkeypatch.setattr(nvml, "snapshot", snapshot)


def at_the_cards(open_page: Open, address: str) -> Page:
    """The page, whose time goes on when the test says so."""
    page = open_page(address, "docs")  # which asks for no cards
    page.clock.install(time=0)
    page.clock.pause_at(1)
    page.goto(f"{address}/#/gpu")
    return page


@pytest.mark.slow
def test_charts_of_two_cards(address: str, open_page: Open, cards: None) -> None:
    page = at_the_cards(open_page, address)
    card = page.get_by_role("region", name="0: Tesla T4")
    expect(card).to_contain_text("4 GiB of 16 GiB")
    expect(card).to_contain_text("held by the power limit")
    expect(page.get_by_role("region", name="1: Other card")).to_contain_text("Power–")
    expect(card.get_by_role("group", name="Temperature")).to_be_visible()
    page.clock.run_for(SECONDS)
    use = card.get_by_role("figure").filter(has_text="Utilisation")
    expect(use.locator(".chart-readout")).to_contain_text("Kernels running 2 %")
    plot = card.get_by_role("group", name="Utilisation")
    plot.focus()
    page.keyboard.press("Home")
    expect(use.locator(".chart-readout")).to_contain_text("Kernels running 1 %, Memory in use 12 %")
    expect(use.locator(".chart-readout")).to_have_attribute("aria-live", "polite")
    page.keyboard.press("Escape")
    expect(use.locator(".chart-readout")).to_contain_text("Now: ")
    use.get_by_text("As a table").click()
    expect(use.get_by_role("row").nth(0)).to_contain_text("Kernels running (%)")
    expect(use.get_by_role("row").last).to_contain_text("1 %")
    paths = use.locator("path.chart-line.series-1").last.get_attribute("d") or ""
    assert paths.count("L") >= 1


@pytest.mark.slow
def test_nobody_is_asked_while_the_page_is_out_of_sight(address: str, open_page: Open, cards: None) -> None:
    page = at_the_cards(open_page, address)
    expect(page.get_by_role("region", name="0: Tesla T4")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/v1/gpu") else None)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); %s"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % ("true", event))
    for _ in range(5):
        page.clock.run_for(SECONDS)
    assert asked == []
    with page.expect_request("**/v1/gpu"):
        page.evaluate(hide % ("false", event))


@pytest.mark.slow
def test_what_is_chosen_on_the_device(address: str, open_page: Open, cards: None) -> None:
    page = open_page(address, "#/gpu")
    expect(page.get_by_role("region", name="This device")).to_contain_text("hash:64")
    expect(page.get_by_role("table", name="Chosen settings").get_by_role("row").nth(1)).to_contain_text("precision")


def gpu_in_menu(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Pages").get_by_role("link", name="GPU")


@pytest.mark.slow
def test_without_a_card_the_menu_has_no_gpu(address: str, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot(reason="there is no NVIDIA driver here"))
    page = open_page(address)
    with page.expect_response("**/v1/gpu"):
        page.reload()
    page.goto(f"{address}/#/gpu")
    expect(page.locator(".reason")).to_have_text("This machine has no NVIDIA GPU. The service computes on the CPU.")
    expect(page.get_by_role("figure")).to_have_count(0)
    expect(page.get_by_role("region", name="This device")).to_be_hidden()
    expect(gpu_in_menu(page)).to_have_count(0)


def test_with_a_card_the_menu_has_it(address: str, open_page: Open, cards: None) -> None:
    page = open_page(address)
    gpu_in_menu(page).click()
    expect(page.get_by_role("region", name="0: Tesla T4")).to_be_visible()
    expect(gpu_in_menu(page)).to_have_attribute("aria-current", "page")
    expect(gpu_in_menu(open_page(address, "#/gpu"))).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_key_is_not_asked_for_more_than_it_may(
    kind: str, serve: Serve, open_page: Open, watch: Watch, tmp_path: Path
) -> None:
    """Figures of cards need a scope that people who search do not have; what computes is for every key."""
    _, key = create(tmp_path / "keys.json", Grant("reader", ("search",)))
    watch.allow(401)
    page = open_page(serve(access={"keys": tmp_path / "keys.json"}), "#/nowhere")

    def on(route: Route) -> None:
        answer = route.fetch()
        known = answer.json()
        route.fulfill(response=answer, json=known | {"device": known["device"] | {"kind": kind}})

    page.route("**/v1/info", on)
    page.get_by_role("link", name="Go to the search").click()
    page.get_by_label("Key or token").fill(key)
    with page.expect_response("**/v1/info"):
        page.keyboard.press("Enter")
    page.get_by_role("link", name="Map").click()
    expect(page.get_by_role("application")).to_be_visible()
    expect(gpu_in_menu(page)).to_have_count(1 if kind == "cuda" else 0)
