"""The search page as somebody uses it: what is asked for is found, marked, filtered, opened and shared."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from tests.console.conftest import Open
from tests.console.scene import LONG_WORD, SCRIPT


@pytest.fixture(scope="module")
def address(shared_address: str) -> str:
    """Nothing here changes a row."""
    return shared_address


def search(page: Page, text: str) -> None:
    page.get_by_label("What are you looking for?").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_be_visible()


def keys(page: Page) -> list[str]:
    return page.locator(".hit .key-value").all_inner_texts()


def in_address(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment.partition("?")[2]).items()}


def asked(page: Page) -> list[dict[str, Any]]:
    """Bodies of all searches from now on."""
    bodies: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.url.endswith("/search"):
            bodies.append(json.loads(request.post_data or "{}"))

    page.on("request", keep)
    return bodies


def test_a_query_finds_rows_with_their_scores_fields_and_marked_words(address: str, open_page: Open) -> None:
    page = open_page(address)
    first = page.locator(".hit").first
    page.get_by_label("Words", exact=True).check()
    search(page, "ÖLPUMPE für gerauscharm")
    expect(first.locator(".text")).to_have_text("Ölpumpe für Getriebe, geräuscharm")
    # Folded for case and accents; "für" is too little to tell anything.
    assert first.locator("mark").all_inner_texts() == ["Ölpumpe", "geräuscharm"]
    assert keys(page)[0] == "041"
    assert float(first.locator(".score-figure").inner_text().removesuffix(" %")) > 0
    expect(first.locator(".fields")).to_contain_text("BRGEW")
    expect(first.locator(".fields")).to_contain_text("61.5")
    expect(page).to_have_title("ÖLPUMPE für gerauscharm – materials – owl-sap")
    # This service wants no key.
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Forget key")).to_be_hidden()


@pytest.mark.slow
def test_the_address_holds_what_is_looked_for_and_back_goes_back(address: str, open_page: Open) -> None:
    page = open_page(address)
    search(page, "gearbox")
    found = keys(page)
    page.get_by_label("ROH").check()
    expect(page.get_by_role("button", name="Remove filter MTART: ROH")).to_be_visible()
    expect(page.locator(".summary")).to_contain_text("rows")
    assert json.loads(in_address(page)["filters"]) == {"MTART": {"in": ["ROH"]}}
    copied = page.url
    page.go_back()
    expect(page.get_by_label("ROH")).not_to_be_checked()
    expect(page.locator(".hit .key-value")).to_have_text(found)
    page.go_back()
    expect(page.get_by_label("What are you looking for?")).to_have_value("")
    expect(page.locator(".hits")).to_have_count(0)
    shared = open_page(address, "#" + urlsplit(copied).fragment)
    expect(shared.get_by_label("ROH")).to_be_checked()
    expect(shared.get_by_label("What are you looking for?")).to_have_value("gearbox")
    for row in shared.locator(".hit .fields").all():
        expect(row).to_contain_text("ROH")


def test_filters_of_every_kind(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?group=0")
    bodies = asked(page)
    search(page, "gearbox")
    page.get_by_label("HALB").check()
    page.get_by_label("ROH").check()
    page.get_by_label("BRGEW from").fill("10")
    page.get_by_label("BRGEW to").fill("50")
    page.get_by_label("ERDAT to").fill("2024-06-30")
    page.get_by_label("ERDAT to").press("Tab")
    page.locator("fieldset", has_text="LVORM").get_by_label("no").check()
    expect(page.locator(".chip")).to_have_count(5)
    expect(page.locator(".results")).not_to_have_attribute("aria-busy", "true")
    assert bodies[-1]["filter"] == {
        "$and": [
            {"MTART": {"$in": ["HALB", "ROH"]}},
            {"BRGEW": {"$between": [10, 50]}},
            {"ERDAT": {"$lt": "2024-07-01"}},
            {"LVORM": False},
        ]
    }
    # Rows 1 to 40: the ones of these kinds, weighing 10 to 50, made before July, not marked for deletion.
    meant = {
        f"{number:03}"
        for number in range(1, 41)
        if number % 3 and 10 <= number * 1.5 <= 50 and 1 + number % 12 <= 6 and number % 10
    }
    assert set(keys(page)) <= meant
    assert len(keys(page)) == min(10, len(meant))
    page.get_by_role("button", name="Remove filter MTART: HALB").click()
    expect(page.locator(".chip")).to_have_count(4)
    expect(page.get_by_label("HALB")).not_to_be_checked()


@pytest.mark.slow
def test_how_to_search_is_what_is_asked_for(address: str, open_page: Open) -> None:
    page = open_page(address)
    bodies = asked(page)
    page.get_by_text("Options").click()
    page.get_by_label("Meaning", exact=True).check()
    page.get_by_label("Rows", exact=True).select_option("20")
    page.get_by_label("Variety").fill("30")
    page.get_by_label("Minimum score").fill("0.1")
    search(page, "gearbox")
    assert bodies[-1] == {"query": "gearbox", "mode": "vector", "k": 20, "group": True} | {
        "mmr_lambda": 0.7,
        "min_score": 0.1,
    }
    page.reload()
    expect(page.get_by_label("Rows", exact=True)).to_have_value("20")
    expect(page.get_by_label("Variety")).to_have_value("30")


def test_a_range_that_begins_after_its_end_is_not_sent(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=gearbox")
    bodies = asked(page)
    low, high = page.get_by_label("BRGEW from"), page.get_by_label("BRGEW to")
    low.fill("50")
    low.press("Tab")
    expect(page.locator(".chip")).to_have_text(re.compile("from 50"))
    high.fill("10")
    high.press("Tab")
    told = page.locator("fieldset", has_text="BRGEW").get_by_role("alert")
    expect(told).to_have_text("From must not be greater than to.")
    expect(high).to_have_attribute("aria-invalid", "true")
    high.fill("60")
    high.press("Tab")
    expect(told).to_have_text("")
    expect(high).to_have_attribute("aria-invalid", "false")
    expect(page.locator(".chip")).to_have_text(re.compile("50 to 60"))
    expect(page.locator(".results")).not_to_have_attribute("aria-busy", "true")
    sent = [body.get("filter") for body in bodies if "filter" in body]
    assert sent == [{"BRGEW": {"$gte": 50}}, {"BRGEW": {"$between": [50, 60]}}]


def test_a_minimum_score_is_a_cosine_except_for_words(address: str, open_page: Open) -> None:
    page = open_page(address)
    bodies = asked(page)
    page.get_by_text("Options").click()
    least = page.get_by_label("Minimum score (cosine, 0 to 1)")
    least.fill("50")
    page.get_by_label("What are you looking for?").fill("gearbox")
    page.get_by_text("Options").click()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(least).to_be_focused()
    assert bodies == []
    page.get_by_label("Words", exact=True).check()
    expect(page.get_by_label("Minimum score (BM25, from 0)")).to_have_value("50")
    search(page, "gearbox")
    assert bodies[-1]["min_score"] == 50


@pytest.mark.slow
def test_more_like_this(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=gearbox&mode=keyword")
    page.locator(".hit").first.get_by_role("button", name="Similar rows").click()
    row = page.get_by_role("button", name="Rows like")
    like = in_address(page)["like"]
    key = json.loads(like)[0]
    text = json.loads(httpx.post(f"{address}/v1/collections/materials/rows", json={"ids": [like]}).text)["rows"][0][
        "text"
    ]
    expect(row).to_contain_text(f"Rows like “{text}” (MATNR={key})")
    expect(page).to_have_title("Similar rows – materials – owl-sap")
    expect(page.locator(".hit")).to_have_count(10)
    assert all("gearbox" in text for text in page.locator(".hit .text").all_inner_texts()[:3])
    assert json.loads(like)[0] not in keys(page)
    page.get_by_role("button", name="Rows like").click()
    expect(page.locator(".hit")).to_have_count(0)


@pytest.mark.slow
def test_rows_like_one_that_is_gone(address: str, open_page: Open, watch: Any) -> None:
    watch.allow(404)
    page = open_page(address, "#/search/materials?like=" + quote('["999"]'))
    expect(page.get_by_role("button", name="Rows like")).to_contain_text("Rows like a row that no longer exists")


@pytest.mark.slow
def test_the_bar_is_no_fuller_than_the_score(address: str, open_page: Open) -> None:
    """Of what has nothing to do with any row, the best is still a weak one."""
    page = open_page(address)
    hits = [
        {"id": f'["{n}"]', "key": {"MATNR": str(n)}, "score": score, "text": "x", "metadata": {}}
        for n, score in enumerate((0.12, 0.03, -0.1))
    ]
    answer: dict[str, Any] = {"hits": hits, "took_ms": {"store": 1.0}, "notes": [], "stale_since": None}
    page.route("**/search", lambda route: route.fulfill(json=answer))
    bars = page.locator(".score-bar > span")
    width = "bars => bars.map((each) => each.style.width)"
    for mode in ("Both", "Meaning"):
        page.get_by_label(mode, exact=True).check()
        search(page, f"zebra {mode}")
        expect(page).to_have_title(f"zebra {mode} – materials – owl-sap")
        assert bars.evaluate_all(width) == ["12%", "3%", "0%"]
    page.get_by_label("Words", exact=True).check()
    search(page, "zebra words")  # BM25 has no scale of its own
    expect(bars).to_have_count(0)


def answered(page: Page, *hits: dict[str, Any]) -> None:
    """The searches of this page find these."""
    found = [{"id": f'["{n}"]', "key": {"MATNR": str(n)}, "score": 0.9, "text": "x", "metadata": {}} | each
             for n, each in enumerate(hits)]  # fmt: skip
    answer = {"hits": found, "took_ms": {"store": 1.0}, "notes": [], "stale_since": None}
    page.route("**/search", lambda route: route.fulfill(json=answer))


def test_weak_hits_are_announced_as_such(address: str, open_page: Open) -> None:
    page = open_page(address)
    answered(page, {"relevance": 0.83}, {"relevance": 0.11})
    search(page, "pump")
    bars = page.locator(".score-bar > span")
    expect(page.locator(".score-figure")).to_have_text(["83 %", "11 %"])
    assert bars.evaluate_all("bars => bars.map((each) => each.style.width)") == ["83%", "11%"]
    expect(page.locator(".summary")).to_contain_text("2 rows found")
    expect(page.locator("main").get_by_text("Probably irrelevant:")).to_be_visible()
    page.unroute("**/search")
    answered(page, {"relevance": 0.19}, {"relevance": 0.0})
    search(page, "zebra")
    expect(page.locator(".summary")).to_contain_text("Nothing relevant found. The nearest rows:")
    expect(page.locator(".hit")).to_have_count(2)


def test_examples_are_searches(address: str, open_page: Open) -> None:
    """Without any in the settings, the first words of rows."""
    page = open_page(address)
    examples = page.get_by_role("group", name="Example queries").get_by_role("button")
    expect(examples.first).to_be_visible()
    text = examples.nth(1).inner_text()
    examples.nth(1).click()
    expect(page.get_by_role("searchbox")).to_have_value(text)
    expect(page.locator(".hit .text").first).to_contain_text(text.split()[0])


def test_near_identical_rows_are_one_hit_that_unfolds(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=gearbox bearing steel number 4&mode=vector")
    groups = page.locator("details.group")
    expect(groups.first).to_contain_text("more like this")
    groups.first.locator("summary").click()
    expect(groups.first.locator(".hit").first).to_contain_text("gearbox bearing steel")
    expect(page.locator(".summary")).to_contain_text("The 8 best groups of rows")
    whole = page.locator(".hit", has=page.locator(":scope > .group")).first
    foot, others = whole.locator("> .hit-foot").bounding_box(), whole.locator("> .group").bounding_box()
    assert foot is not None
    assert others is not None
    assert others["y"] >= foot["y"] + foot["height"], "the others follow the whole hit"
    page.get_by_text("Options").click()
    page.get_by_label("Group nearly identical rows").uncheck()
    page.get_by_role("button", name="Search", exact=True).click()
    expect(groups).to_have_count(0)
    expect(page).to_have_url(re.compile("group=0"))


@pytest.mark.slow
def test_explain_is_a_table_and_json_on_demand(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=gearbox 007&explain=1&passages=1&group=0")
    told = page.get_by_role("region", name="How it was found")
    table = told.get_by_role("table", name="Scores of the hits")
    expect(table.get_by_role("columnheader")).to_have_text(
        ["Row", "Combined score", "Cosine (rank)", "BM25 (rank)", "Matched words", "Passage"]
    )
    expect(table.get_by_role("row")).to_have_count(11)
    row = table.get_by_role("row").filter(has=page.get_by_role("cell", name="gearbox")).first
    expect(row).to_contain_text(re.compile(r"MATNR=\d+"))
    expect(told).to_contain_text("exact comparison")
    json_ = told.get_by_role("group", name="Raw JSON")
    expect(json_).to_be_hidden()
    told.get_by_text("Raw JSON").click()
    assert json.loads(json_.inner_text())["mode"] == "hybrid"
    page.set_viewport_size({"width": 390, "height": 800})
    told.get_by_text("Raw JSON").click()
    box = told.bounding_box()
    assert box is not None
    assert box["height"] < 2000  # it was 4,000 on a wide screen
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_row_in_its_dialog(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=geräuscharm&mode=keyword")
    opener = page.locator(".hit h2 button").first
    opener.click()
    dialog = page.get_by_role("dialog", name="Row")
    expect(dialog.get_by_role("rowheader", name="MATNR")).to_be_visible()
    expect(dialog.get_by_role("group", name="Text")).to_have_text("Ölpumpe für Getriebe, geräuscharm")
    expect(dialog.get_by_role("row", name="ERDAT")).to_contain_text("2024-06-14")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dialog.get_by_role("button", name="Copy id").click()
    expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == '["041"]'
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()
    opener.click()
    dialog.get_by_role("link", name="Similar rows").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("button", name="Rows like")).to_be_visible()


@pytest.mark.slow
def test_nothing_found_says_what_to_try(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=zzz&mode=keyword&filters=" + json.dumps({"MTART": {"in": ["ROH"]}}))
    expect(page.locator(".empty")).to_contain_text("Nothing found")
    expect(page.locator(".empty")).to_contain_text("Remove a filter.")


@pytest.mark.slow
def test_a_collection_that_was_never_synced(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.get_by_label("Collection").select_option("never")
    expect(page.locator(".results")).to_contain_text("owl-sap sync never")


def test_an_error_stands_in_its_place_and_can_be_tried_again(address: str, open_page: Open, watch: Any) -> None:
    watch.allow(404, 503)
    page = open_page(address, "#/search/nowhere?q=x")
    expect(page.get_by_role("alert").first).to_contain_text("nowhere")
    away = {"title": "Service Unavailable", "detail": "HANA does not answer", "request_id": "r-1"}
    page.route("**/search", lambda route: route.fulfill(status=503, json=away))
    page.goto(f"{address}/#/search/materials?q=gearbox&group=0")
    problem = page.locator(".results").get_by_role("alert")
    expect(problem).to_contain_text("HANA does not answer")
    expect(problem).to_contain_text("r-1")
    page.unroute("**/search")
    problem.get_by_role("button", name="Try again").click()
    expect(page.locator(".hit")).to_have_count(10)


@pytest.mark.slow
def test_a_service_that_does_not_answer(address: str, open_page: Open, watch: Any) -> None:
    page = open_page(address)
    expect(page.get_by_label("ROH")).to_be_visible()
    page.route("**/search", lambda route: route.abort("connectionrefused"))
    page.get_by_label("What are you looking for?").fill("gearbox")
    page.keyboard.press("Enter")
    expect(page.locator(".results").get_by_role("alert")).to_contain_text("could not be reached")
    assert all("CONNECTION_REFUSED" in trouble for trouble in watch.troubles)
    watch.troubles.clear()


@pytest.mark.slow
def test_only_the_last_of_two_searches_counts(address: str, open_page: Open) -> None:
    page = open_page(address)
    expect(page.get_by_label("ROH")).to_be_visible()
    held: list[Any] = []
    page.route(
        "**/search", lambda route: held.append(route) if "slow" in route.request.post_data else route.continue_()
    )
    query = page.get_by_label("What are you looking for?")
    query.fill("slow hose")
    query.press("Enter")
    expect(page.locator(".loading")).to_be_visible()
    search(page, "gearbox")
    expect(page.locator(".hit mark").first).to_have_text("gearbox")
    assert len(held) == 1  # whose request the page has given up
    assert page.locator(".summary").count() == 1


@pytest.mark.slow
def test_stale_rows_notes_passages_and_times_are_told(address: str, open_page: Open) -> None:
    page = open_page(address)
    hit = {"id": '["1"]', "key": {"MATNR": "1"}, "score": 0.5, "text": "best", "metadata": {}}
    passages = [
        {"text": "best gearbox", "score": 0.5, "chunk": 3},
        {"text": "second gearbox", "score": 0.4, "chunk": 0},
    ]
    answer = {
        "hits": [hit | {"passages": passages}],
        "took_ms": {"embed": 2.5, "store": 1.5},
        "notes": ["No row has the field X"],
        "stale_since": "2026-01-01T00:00:00Z",
        "explain": {"index": "exact"},
    }
    bodies = asked(page)
    page.route("**/search", lambda route: route.fulfill(json=answer))
    page.get_by_text("Options").click()
    page.get_by_label("All matching passages").check()
    page.get_by_label("Explain").check()
    search(page, "gearbox")
    assert bodies[-1]["explain"] is True
    assert bodies[-1]["passages"] > 1
    expect(page.locator(".results")).to_contain_text("SAP HANA is unavailable")
    expect(page.locator(".results")).to_contain_text("No row has the field X")
    expect(page.get_by_role("list", name="Matching passages").get_by_role("listitem")).to_have_count(2)
    expect(page.get_by_role("region", name="How it was found")).to_contain_text("2.5 ms")
    expect(page.get_by_role("region", name="How it was found")).to_contain_text("exact")


def test_hostile_text_is_text(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=hostile&mode=keyword", viewport={"width": 320, "height": 700})
    expect(page.locator(".hit").first).to_be_visible()
    shown = " ".join(page.locator(".hit .text").all_inner_texts())
    assert SCRIPT in shown
    assert "\u202e" not in shown
    assert "\ufffdgnp.exe" in shown
    expect(page.locator(".hit .fields").first).to_contain_text("<b>X")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    assert page.locator(".hit img, .hit script, .hit b").count() == 0
    page.locator(".hit", has_text="Donau").first.get_by_role("button", name="Whole row").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".chunk").first).to_be_visible()
    assert sum(map(len, dialog.locator(".chunk").all_inner_texts())) >= len(LONG_WORD)
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth")
    assert "owned" not in page.title()


@pytest.mark.slow
def test_addresses_that_somebody_made_up(address: str, open_page: Open) -> None:
    page = open_page(address)
    for written in (
        "null",
        "[1]",
        '{"A":1}',
        '{"A":{"in":[]}}',
        '{"A":{"from":"x"}}',
        "{",
        '{"A":{"from":1,"to":"2024-01-01"}}',
        '{"A":{"from":2,"to":1}}',
    ):
        with page.expect_response("**/search"):
            page.goto(
                f"{address}/#/search/materials?q=gearbox&k=-1&mode=x&variety=1e9&min=abc&group=0&filters={written}"
            )
        expect(page.locator(".hit")).to_have_count(10)
        expect(page.locator(".chip")).to_have_count(0)


def test_everything_by_keyboard(address: str, open_page: Open) -> None:
    page = open_page(address)
    expect(page.get_by_label("ROH")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_label("What are you looking for?")).to_be_focused()
    page.keyboard.type("gear/box")
    page.keyboard.press("Enter")
    expect(page.locator(".hit").first).to_be_visible()
    expect(page.locator("#announcements")).to_have_text(re.compile("found$"))
    page.get_by_label("ROH").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Remove filter MTART: ROH")).to_be_visible()
    expect(page.get_by_label("ROH")).to_be_focused()
    expect(page.locator(".results[aria-busy]")).to_have_count(0)  # else these are the hits of before
    page.locator(".hit h2 button").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".hit h2 button").first).to_be_focused()


@pytest.mark.slow
def test_the_focus_is_never_lost(address: str, open_page: Open) -> None:
    page = open_page(address, '#/search/materials?q=gearbox&filters={"MTART":{"in":["ROH","FERT"]}}')
    page.get_by_role("button", name="Remove filter MTART: ROH").press("Enter")
    expect(page.get_by_role("button", name="Remove filter MTART: FERT")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main").get_by_text("Filters", exact=True)).to_be_focused()
    expect(page.locator(".summary")).to_contain_text("rows")
    page.get_by_role("button", name="Similar rows").first.press("Enter")
    expect(page.locator(".results")).to_be_focused()
    page.get_by_role("link", name="Map").click()
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("button", name="Draw").press("Enter")
    expect(page.locator(".scatter")).to_be_visible()
    expect(page.get_by_role("button", name="Draw")).to_be_focused()
    page.get_by_role("link", name="Collections").click()
    page.get_by_role("link", name="materials", exact=True).press("Enter")
    expect(page.get_by_role("heading", name="materials")).to_be_visible()
    expect(page.locator("main")).to_be_focused()


@pytest.mark.slow
def test_a_search_that_is_given_up_is_over(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials")
    page.route("**/search", lambda route: None)
    page.get_by_label("What are you looking for?").fill("gearbox")
    page.keyboard.press("Enter")
    expect(page.locator(".results[aria-busy]")).to_be_visible()
    page.go_back()
    expect(page.locator(".results")).to_contain_text("Describe what you need")
    expect(page.locator(".results[aria-busy]")).to_have_count(0)


@pytest.mark.slow
def test_what_the_least_score_is_compared_with_is_told(address: str, open_page: Open) -> None:
    page = open_page(address, "#/search/materials?q=gearbox&min=0.01")
    expect(page.locator(".results .note")).to_contain_text("applies to the cosine similarity")
    page.get_by_label("Words", exact=True).check()
    search(page, "gearbox bearing")
    expect(page.locator(".results .note")).to_contain_text("applies to the BM25 score")
