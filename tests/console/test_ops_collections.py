"""The pages of collections in a browser: what goes on is seen to move, rows set aside come back, what deletes asks
first, and what a key may not is said."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Request, Route, expect

from app.src.access.keys import Grant, create
from app.src.jobs import runner
from connector.model import KeyRange, Query, Row
from tests.api.test_quarantine_routes import TOO_MUCH
from tests.console.conftest import Open, Serve
from tests.console.scene import Shelf, Watch, settings_in

ALL = 44
"""Rows of the shelf."""


ALL_READ = """async () => {
    const { jobLine } = await import("/console/jobs.js");
    const job = { kind: "sync", state: "running", progress: { done: 44, total: 44 }, error: null, note: null };
    return [...jobLine(job).querySelectorAll("span.job-state, span.job-words")].map((each) => each.textContent);
}"""
"""What is said of a job that has read all rows it knows of. The embedder of tests is too fast to be seen at it."""


class Stepwise(Shelf):
    """Gives a page, which is a row, for each step, once `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.steps = threading.Semaphore(0)

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        for page in super().pages(query, size, within):
            assert not self.held or self.steps.acquire(timeout=30)
            yield page

    def release(self, rows: int) -> None:
        for _ in range(rows):
            self.steps.release()


@pytest.fixture
def source() -> Iterator[Stepwise]:
    source = Stepwise()
    yield source
    source.held = False
    source.release(1000)


@pytest.fixture(autouse=True)
def every_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROGRESS_SECONDS", 0.0)


def expect_done(page: Page, done: int) -> None:
    expect(page.locator("main").get_by_text(f"{done} of {ALL} rows")).to_be_visible()
    expect(page.get_by_role("progressbar")).to_have_js_property("value", done)


def test_a_sync_is_seen_to_move(serve: Serve, source: Stepwise, open_page: Open) -> None:
    page = open_page(serve(), "#/collections")
    source.held = True
    page.get_by_role("button", name="Sync materials").click()
    expect(page.get_by_role("button", name="Cancel materials")).to_be_focused()
    source.release(11)
    expect_done(page, 11)
    source.release(11)
    expect_done(page, 22)
    expect(page.locator(".job-words")).to_contain_text("rows/s")
    assert page.evaluate(ALL_READ) == [
        "Sync running",
        "44 rows read · embedding and writing the last rows",
    ]
    source.release(ALL)
    expect(page.locator("main").get_by_text("44 rows read: 44 unchanged.")).to_be_visible()
    expect(page.get_by_role("progressbar")).to_have_count(0)
    expect(page.locator("#announcements")).to_have_text("Sync of materials: 44 rows read: 44 unchanged.")


@pytest.mark.slow
def test_progress_goes_on_after_a_break_where_it_was(serve: Serve, source: Stepwise, open_page: Open) -> None:
    page = open_page(serve(), "#/collections/materials")
    resumed: list[str | None] = []
    streams = 0

    def broken(route: Any) -> None:
        nonlocal streams
        streams += 1
        resumed.append(route.request.headers.get("last-event-id"))
        if streams == 1:  # as a proxy that is restarted in the middle of a stream
            first = 'id: 1\nevent: state\ndata: {"state":"running"}\n\n'
            body = f'{first}id: 2\nevent: progress\ndata: {{"done":1,"total":44}}\n\n'
            route.fulfill(status=200, content_type="text/event-stream", body=body)
        else:
            route.fallback()

    page.context.route("**/events", broken)
    source.held = True
    page.get_by_role("button", name="Sync", exact=True).click()
    expect(page.locator("main").get_by_text("1 of 44 rows")).to_be_visible()
    source.release(30)
    expect_done(page, 30)
    assert resumed[:2] == [None, "2"]
    source.release(ALL)
    expect(page.locator("main").get_by_text("44 rows read: 44 unchanged.").first).to_be_visible()


@pytest.mark.slow
def test_a_sync_is_cancelled(serve: Serve, source: Stepwise, open_page: Open) -> None:
    page = open_page(serve(), "#/collections/materials")
    source.held = True
    page.get_by_role("button", name="Full sync").click()
    source.release(5)
    expect_done(page, 5)
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#announcements")).to_have_text("Cancelling after the current batch")
    source.release(ALL)
    expect(page.get_by_role("row").filter(has_text="cancelled")).to_contain_text("Stopped early.")
    expect(page.get_by_role("button", name="Sync", exact=True)).to_be_visible()


@pytest.mark.slow
def test_a_job_is_shown_while_the_store_does_not_answer(
    serve: Serve, source: Stepwise, open_page: Open, watch: Watch
) -> None:
    watch.allow(503)
    page = open_page(serve(), "#/collections/materials")
    gone = {"status": 503, "title": "Service Unavailable", "detail": "no server listens there"}
    begun: list[Request] = []

    def status(route: Route) -> None:
        if begun:
            route.fulfill(status=503, json=gone)
        else:
            route.continue_()

    page.on("request", lambda request: begun.append(request) if request.method == "POST" else None)
    page.route(re.compile("/collections/materials$"), status)
    source.held = True
    page.get_by_role("button", name="Sync", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("no server listens there")
    expect(page.get_by_role("button", name="Cancel the job")).to_be_visible()
    page.unroute_all()
    source.release(ALL)
    expect(page.locator("main").get_by_text("44 rows read: 44 unchanged.").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_rows_set_aside_are_tried_again_and_forgotten(serve: Serve, source: Stepwise, open_page: Open) -> None:
    for key in ("002", "003", "004"):
        source.rows_by_key[key]["MTART"] = TOO_MUCH
    page = open_page(serve(), "#/collections/materials")
    aside = page.get_by_role("region", name="Quarantine")
    row = aside.get_by_role("row").filter(has_text="MATNR=002")
    expect(row).to_contain_text("bytes as JSON")
    expect(aside.get_by_role("button", name="Retry selected")).to_be_disabled()

    source.rows_by_key["002"]["MTART"] = "ROH"
    row.get_by_role("checkbox").check()
    expect(aside.get_by_text("1 selected")).to_be_visible()
    aside.get_by_role("button", name="Retry selected").click()
    expect(page.locator("main").get_by_text("1 row retried: 1 repaired.")).to_be_visible()
    expect(aside.get_by_text("MATNR=002")).to_have_count(0)
    expect(aside.get_by_text("MATNR=003")).to_be_visible()

    aside.get_by_role("checkbox", name="MATNR=003").check()
    aside.get_by_role("button", name="Drop selected").click()
    page.get_by_role("dialog", name="Drop 1 entry?").get_by_role("button", name="Cancel").click()
    expect(aside.get_by_text("MATNR=003")).to_be_visible()
    aside.get_by_role("button", name="Drop selected").click()
    page.get_by_role("dialog").get_by_role("button", name="Drop").click()
    expect(aside.get_by_text("MATNR=003")).to_have_count(0)

    source.rows_by_key["004"]["MTART"] = "ROH"
    aside.get_by_role("button", name="Retry all").click()
    expect(aside.get_by_text("No rows in quarantine.")).to_be_visible()


@pytest.mark.slow
def test_verify_and_repair(serve: Serve, source: Stepwise, open_page: Open) -> None:
    page = open_page(serve(), "#/collections/materials")
    source.rows_by_key["001"]["MAKTX"] = "something else altogether"
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.locator("main").get_by_text("Differs from the source: 44 rows stored, 1 stale.")).to_be_visible()
    page.get_by_role("button", name="Verify and repair").click()
    page.get_by_role("dialog", name="Verify and repair?").get_by_role("button", name="Repair").click()
    expect(page.locator("main").get_by_text("No differences: 44 rows stored, 1 stale. 1 row repaired.")).to_be_visible()


@pytest.mark.slow
def test_many_deletions_wait_for_a_person(serve: Serve, source: Stepwise, open_page: Open) -> None:
    page = open_page(serve(), "#/collections/materials")
    for number in range(1, 21):
        del source.rows_by_key[f"{number:03}"]
    page.get_by_role("button", name="Sync", exact=True).click()
    expect(page.locator("main").get_by_text("The last sync did not delete what left the source")).to_be_visible()
    page.get_by_role("button", name="Verify and repair").click()
    page.get_by_role("dialog", name="Verify and repair?").get_by_role("button", name="Repair").click()
    expect(page.locator("main").get_by_text("The last repair did not delete what left the source")).to_be_visible()
    page.get_by_role("button", name="Delete 20 rows …").click()
    dialog = page.get_by_role("dialog", name="Delete these rows?")
    expect(dialog).to_contain_text("The source is not changed")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.locator("main").get_by_text("24 rows read: 24 unchanged, 20 deleted.")).to_be_visible()
    expect(page.get_by_role("button", name="Delete 20 rows …")).to_have_count(0)


@pytest.mark.slow
def test_generations_are_switched_and_dropped(serve: Serve, open_page: Open) -> None:
    address = serve()
    place = f"{address}/v1/collections/materials/generations"
    assert httpx.post(place, json={"action": "build"}, timeout=60).status_code == 202
    page = open_page(address, "#/collections/materials")
    part = page.get_by_role("region", name="Generations")

    def do(button: str, sure: str) -> None:
        part.get_by_role("button", name=button).click()
        page.get_by_role("dialog").get_by_role("button", name=sure).click()

    # A switch during the build is refused.
    built = page.get_by_role("region", name="Last jobs").get_by_role("row").filter(has_text="Build")
    expect(built.filter(has_text="succeeded")).to_be_visible()
    do("Switch to generation 2", "Switch")
    expect(part.get_by_text("Generation 2 is active now.")).to_be_visible()
    do("Roll back to generation 1", "Roll back")
    expect(part.get_by_text("Generation 1 is active again.")).to_be_visible()
    do("Drop generation 2", "Drop")
    expect(part.get_by_text("Generation 2 dropped.")).to_be_visible()
    expect(part.get_by_role("row")).to_have_count(2)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["#/collections", "#/collections/materials"])
def test_a_sync_that_is_no_job_is_not_denied(serve: Serve, open_page: Open, place: str) -> None:
    """The fixture syncs as `owl-sap sync` does, beside the service's jobs."""
    page = open_page(serve(), place)
    jobs = page.get_by_role("region", name="Last jobs")
    expect(jobs).to_contain_text(re.compile("Last synced outside this list: materials .* owl-sap sync"))
    page.get_by_role("button", name=re.compile("^Sync( materials)?$")).click()
    expect(jobs.get_by_role("row").filter(has_text="succeeded")).to_be_visible()
    expect(jobs.get_by_text("outside this list")).to_have_count(0)


@pytest.mark.slow
def test_what_a_key_may_not_is_said_and_the_rest_is_shown(
    serve: Serve, open_page: Open, watch: Watch, tmp_path: Path
) -> None:
    watch.allow(401, 403)
    _, key = create(tmp_path / "keys.json", Grant("reader", ("search",)))
    page = open_page(serve(access={"keys": tmp_path / "keys.json"}), "#/collections")
    page.get_by_label("Key or token").fill(key)
    page.keyboard.press("Enter")
    main = page.locator("main")
    expect(main.get_by_role("row").filter(has_text="materials")).to_contain_text("44")
    expect(main.get_by_text("Your key lacks the scope sync")).to_be_visible()
    expect(main.get_by_role("button")).to_have_count(0)
    main.get_by_role("link", name="materials").click()
    expect(main.get_by_text("so you cannot see or start jobs")).to_be_visible()
    expect(main.get_by_role("button")).to_have_count(0)
    expect(page.get_by_role("link", name="GPU")).to_have_count(0)
    page.evaluate("location.hash = '#/gpu'")
    expect(main.get_by_role("alert")).to_contain_text("lacks the scope metrics")
    expect(main.get_by_role("region", name="This device")).to_contain_text("hash:64")
    page.get_by_role("link", name="Tables").click()
    expect(main.get_by_role("alert")).to_contain_text("lacks the scope admin")
    page.get_by_role("link", name="Map", exact=True).click()
    expect(main.get_by_role("application")).to_be_visible()


@pytest.mark.slow
def test_a_collection_that_clients_write_has_nothing_to_sync(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    blocks = settings_in(tmp_path).model_dump(mode="json", include={"collections"}, exclude_unset=True)["collections"]
    address = serve(collections=[*blocks, {"name": "notes", "documents": True}])
    page = open_page(address, "#/collections")
    row = page.get_by_role("row").filter(has_text="notes")
    expect(row).to_contain_text("written by clients")  # before anything was written, too
    expect(row.get_by_role("button")).to_have_count(0)
    page.goto(f"{address}/#/search/notes")
    expect(page.locator(".results")).to_contain_text("This collection is empty")
    document = {"text": "oil the gear", "metadata": {"plant": "1000"}}
    written = httpx.post(f"{address}/v1/collections/notes/documents", json={"documents": [document]}, timeout=60)
    assert written.status_code == 200
    page.reload()
    expect(page.locator(".about")).to_have_text("1 row, written by clients")
    expect(page.get_by_label("1000")).to_be_visible()  # its field can be filtered by
    page.goto(f"{address}/#/collections/notes")
    expect(page.get_by_role("heading", level=1)).to_have_text("notes")
    expect(page.get_by_role("region", name="Last jobs")).to_be_visible()
    expect(page.get_by_role("button", name="Sync", exact=True)).to_have_count(0)


@pytest.mark.slow
def test_how_fresh_it_is_is_told_anew_although_nothing_changed(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(), "#/nowhere")
    page.clock.install()
    late = {"lag_seconds": 300.0}

    def later(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=[each | late for each in answer.json()])

    page.route("**/v1/collections", later)
    page.evaluate("location.hash = '#/collections'")
    row = page.get_by_role("row", name="materials")
    expect(row).to_contain_text("up to 5 min behind")
    late |= {"lag_seconds": 900.0}
    with page.expect_response("**/v1/collections"):
        page.clock.run_for(6_000)
    expect(row).to_contain_text("up to 15 min behind")
