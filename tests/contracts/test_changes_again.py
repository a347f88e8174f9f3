"""Rows that come more than once in a run, and settings, tables and workers that are others than at the run before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import LeaseLost, TextsNotEmbeddable
from connector.model import ChangeSet, QuarantinedRow, log_of
from connector.protocols import Embedder
from connector.stores.local.store import LocalStore
from connector.sync.plan import PlanOptions, plan
from connector.sync.quarantine import drop, retry
from connector.sync.run import Ends, sync
from connector.sync.verify import verify
from tests.contracts.changing import OPTIONS, MemorySource, MemoryTable, Synced, second

LARGE = "x" * 100_001
"""Metadata that no row may have."""


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    engine = load_engine(EngineOptions(model="hash:16"))
    yield EngineEmbedder(engine)
    engine.close()


@pytest.fixture
def synced(embedder: Embedder, tmp_path: Path) -> Iterator[Synced]:
    """Ten rows, synced once by the log."""
    store, table = LocalStore(tmp_path / "s"), MemoryTable()
    for number in range(10):
        table.put(number, f"pump {number}", second(-1000 + number))
    found = Synced(table, store, embedder, "log")
    found.sync()
    found.sync()
    table.clock += timedelta(seconds=100)
    yield found
    store.close()


def between_pages(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """`change` happens before the second page of the log is read."""
    read, pages = MemorySource.log_entries, []

    def entries(self, *args):
        pages.append(1)
        if len(pages) == 2:
            change()
        return read(self, *args)

    monkeypatch.setattr(MemorySource, "log_entries", entries)


def entries_of_two_pages(table: MemoryTable) -> None:
    """Three rows fill a page, and the first of them comes once more."""
    for number in (0, 1, 2, 0):
        table.put(number, f"valve {number}", second(60))


def test_a_row_that_cannot_be_rendered_any_more_is_not_stored_as_it_was_read_before(synced, monkeypatch):
    entries_of_two_pages(synced.table)
    between_pages(monkeypatch, lambda: synced.table.put(0, "valve 0", second(61), LARGE))
    report = synced.sync(window=1000)
    assert report.quarantined == 1
    assert [row.id for row in synced.store.quarantine("c")] == ["[0]"]
    assert 0 not in synced.stored()


@pytest.mark.parametrize("ending", ["gone", "blank"])
def test_a_row_in_quarantine_that_ends_while_it_is_tried_again_leaves_it(synced, monkeypatch, ending):
    with synced.store.lease("c", "test", 1) as lease:
        row = QuarantinedRow("[0]", "embed", "no vector", digest=b"12345678")
        synced.store.apply(lease, ChangeSet(deleted=["[0]"], quarantined=[row]))
    entries_of_two_pages(synced.table)
    end = {"gone": lambda: synced.table.delete(0), "blank": lambda: synced.table.put(0, None, second(61))}
    between_pages(monkeypatch, end[ending])
    synced.sync(window=1000)
    assert synced.store.quarantine("c") == []
    synced.agrees()


@pytest.mark.parametrize("ending", ["gone", "blank", "the same"])
def test_a_row_that_the_engine_refused_earlier_in_the_run(synced, monkeypatch, ending):
    """Its entry leaves the quarantine with the row, and stays while the row does."""
    embed = synced.embedder.embed_counted

    def refuse(texts):
        if refused := [place for place, text in enumerate(texts) if text == "refused"]:
            raise TextsNotEmbeddable("no vector", indices=refused)
        return embed(texts)

    monkeypatch.setattr(synced.embedder, "embed_counted", refuse)
    entries_of_two_pages(synced.table)
    synced.table.put(0, "refused", second(60))
    end = {
        "gone": lambda: synced.table.delete(0),
        "blank": lambda: synced.table.put(0, None, second(61)),
        "the same": lambda: synced.table.put(0, "refused", second(60)),
    }
    between_pages(monkeypatch, end[ending])
    synced.sync(window=1)
    assert [row.id for row in synced.store.quarantine("c")] == (["[0]"] if ending == "the same" else [])
    assert 0 not in synced.stored()


def test_a_row_whose_entry_is_dropped_is_tried_by_the_next_sync(synced):
    with synced.store.lease("c", "test", 1) as lease:
        row = QuarantinedRow("[0]", "embed", "no vector", digest=b"12345678")
        synced.store.apply(lease, ChangeSet(deleted=["[0]"], quarantined=[row]))
    assert drop(synced.store, "c", ["[1]"], OPTIONS) == 0
    assert (report := synced.sync()).read == 0, report
    assert drop(synced.store, "c", ["[0]"], OPTIONS) == 1
    assert (report := synced.sync()).upserted == 1, report
    assert "a quarantine drop" in report.notes[0]
    synced.agrees()
    assert synced.sync().read == 0


@pytest.mark.parametrize("way", ["log", "watermark"])
def test_a_plan_pauses_for_deletions_as_the_sync_does(synced, way):
    synced.sync(way)
    synced.table.clock += timedelta(seconds=100)
    for number in range(5):
        synced.table.delete(number)
    ends = (synced.table.source, synced.store, synced.embedder)
    planned = plan(synced.table.spec(way), *ends, PlanOptions(measure_seconds=None))
    report = synced.sync(way, max_deletes=0.2)
    paused, deleted, shown = (None, 0, True) if way == "watermark" else ("max_deletes", 2, False)
    assert (planned.method, planned.deleted, planned.paused) == (way, 5, paused)
    assert (report.method, report.deleted, report.paused) == (way, deleted, paused)
    assert any("5 rows are gone, which a watermark" in note for note in planned.notes) == shown


def test_the_limit_of_deletions_is_a_share_of_the_rows_that_are_left(synced):
    for number in range(2):
        synced.table.delete(number)
    assert (report := synced.sync(max_deletes=0.2)).deleted == 2, report
    for number in range(2, 4):
        synced.table.delete(number)
    report = synced.sync(max_deletes=0.2)
    assert (report.deleted, report.to_delete, report.paused) == (1, 2, "max_deletes"), "2 of 8 are more than a fifth"


@pytest.mark.parametrize("ending", ["gone", "blank"])
@pytest.mark.parametrize("by", ["sync", "retry", "repair"])
def test_rows_that_left_quarantine_or_were_repaired_away_raise_no_limit_of_deletions(synced, by, ending):
    ids = [f"[{number}]" for number in range(5)]
    if by != "repair":
        with synced.store.lease("c", "test", 1) as lease:
            rows = [QuarantinedRow(id_, "embed", "no vector", digest=b"12345678") for id_ in ids]
            synced.store.apply(lease, ChangeSet(deleted=ids, quarantined=rows))
    for number in range(5):
        synced.table.delete(number) if ending == "gone" else synced.table.put(number, " ", synced.table.clock)
    spec, ends = synced.table.spec("log"), Ends(synced.table.source, synced.store, synced.embedder)
    if by == "retry":
        assert retry(spec, ends, None, OPTIONS).retried == 5
    if by == "repair":
        assert verify(spec, ends, repair=True, options=OPTIONS).repaired == 5
    assert (report := synced.sync()).paused is None, report
    for number in range(5, 7):
        synced.table.delete(number)
    report = synced.sync(max_deletes=0.2)
    assert (report.deleted, report.to_delete, report.paused) == (1, 2, "max_deletes"), "2 of 5 are more than a fifth"


@pytest.mark.parametrize("ending", ["gone", "blank"])
def test_a_row_that_the_limit_of_deletions_keeps_counts_once(synced, ending):
    for number in range(10, 20):
        synced.table.put(number, f"valve {number}", second(60))
    synced.sync()
    for number in (*range(12), 11, 11):
        synced.table.put(number, None, second(61))
        if ending == "gone":
            synced.table.delete(number)
    report = synced.sync(max_deletes=0.0)
    assert report.paused == "max_deletes"
    assert (report.to_delete, report.emptied) == ((12, 0) if ending == "gone" else (0, 12))


def test_entries_stay_in_the_log_when_another_worker_has_taken_over(synced, monkeypatch):
    """Even if nothing was to be written: the other one may be about to store what it read before."""
    entries_of_two_pages(synced.table)
    synced.sync()
    entries_of_two_pages(synced.table)

    def take_over() -> None:
        with synced.store._file.write() as db:
            db.execute("UPDATE collections SET lease_epoch = lease_epoch + 1")

    between_pages(monkeypatch, take_over)
    with pytest.raises(LeaseLost):
        synced.sync()
    assert synced.table.waiting() == 4


@pytest.mark.parametrize("way", ["log", "watermark", "rowid", "hash", "delta"])
def test_another_template_over_the_same_columns_reaches_every_row(synced, way):
    synced.sync(way=way)
    spec = replace(synced.table.spec(way), template="{TXT}, used")
    ends = Ends(synced.table.source, synced.store, synced.embedder)
    report = sync(spec, ends, OPTIONS)
    assert (report.upserted, report.complete) == (10, True)
    assert set(synced.stored().values()) == {f"pump {number}, used" for number in range(10)}


@pytest.mark.parametrize("because", ["asked for", "paused before"])
def test_a_mark_of_another_table_is_forgotten_whyever_everything_is_compared(synced, monkeypatch, because):
    """Else it may lie ahead of what the table will ever get."""
    synced.way = "watermark"
    synced.sync()
    synced.table.clock += timedelta(seconds=1000)
    synced.sync()
    if because == "paused before":
        _forget_last_full(synced)
    monkeypatch.setattr(MemorySource, "table_id", lambda self, table: 2)
    synced.table.clock = second(0)
    synced.sync(full=because == "asked for")
    synced.table.put(1, "valve", second(10))
    synced.table.clock = second(100)
    assert synced.sync().upserted == 1
    synced.agrees()


def _forget_last_full(synced: Synced) -> None:
    status = synced.store.status("c")
    with synced.store.lease("c", "test", 1) as lease:
        paused = ChangeSet(checkpoint=replace(status.checkpoint, last_full=None))
        synced.store.apply(lease, paused)


def test_a_generation_has_the_log_of_its_collection(synced):
    spec = synced.table.spec("log")
    assert log_of(replace(spec, name="c@2")) == log_of(spec)


def test_a_row_that_is_changed_back_after_its_token_was_read(synced, monkeypatch):
    """Its token was that of A, what was read by then was B; and then it was A again."""
    synced.way = "hash"
    synced.sync()
    table = synced.table
    table.put(0, "A", second(60))
    tokens = MemorySource.tokens

    def first(self, *args, **more):
        for page in tokens(self, *args, **more):
            table.put(0, "B", second(61))
            yield page

    with monkeypatch.context() as patch:
        patch.setattr(MemorySource, "tokens", first)
        synced.sync()
    table.put(0, "A", second(62))
    synced.sync()
    synced.agrees()


@pytest.mark.parametrize("way", ["hash", "rowid"])
def test_a_row_that_is_deleted_after_its_token_was_read(synced, monkeypatch, way):
    synced.sync(way)
    synced.table.put(3, "valve 3", second(60))
    load = MemorySource.rows_with_tokens

    def deleted_before(self, *args):
        self.data.delete(3)
        return load(self, *args)

    monkeypatch.setattr(MemorySource, "rows_with_tokens", deleted_before)
    report = synced.sync(way)
    assert (report.superseded, report.deleted) == (1, 1)
    synced.agrees()
