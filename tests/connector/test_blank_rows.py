"""Rows that turn blank lose their vectors, but many at once look like an accident: they are under the brake, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector.sync.reconcile import FREE_DELETES
from connector.sync.run import SyncOptions, sync
from connector.sync.verify import verify
from tests.connector.test_sync import OPTIONS, SPEC, add_up, fill, stored

AS_USUAL = replace(OPTIONS, max_deletes=0.2)


def blank(source, *numbers: int) -> None:
    for number in numbers:
        source.put("100", f"M{number:03}", MAKTX="  ", MTART="FERT")


def remove(source, *numbers: int) -> None:
    for number in numbers:
        del source.data["100", f"M{number:03}"]


@pytest.mark.parametrize(
    ("rows", "blanks", "gone", "paused"),
    [
        (40, 12, 0, True),
        (40, FREE_DELETES + 1, 0, True),
        (40, FREE_DELETES, 0, False),
        (20, 9, 0, False),
        (100, 20, 0, False),
        (100, 21, 0, True),
        (40, 9, 8, False),  # each below its own brake
        (40, 9, 9, True),
        (40, 12, 3, True),
        (5, 5, 0, False),
    ],
)
def test_so_many_may_turn_blank(ends, source, store, rows, blanks, gone, paused):
    fill(source, rows)
    sync(SPEC, ends, AS_USUAL)
    before = stored(store)
    blank(source, *range(blanks))
    remove(source, *range(blanks, blanks + gone))
    report = sync(SPEC, ends, AS_USUAL)
    assert add_up(report)
    assert (report.read, report.empty, report.unchanged) == (rows - gone, blanks, rows - gone - blanks)
    assert report.paused == ("max_deletes" if paused else None)
    assert report.deleted == (0 if paused else gone)
    assert (report.to_delete, report.emptied) == (gone, blanks)
    assert len(stored(store)) == (rows if paused else rows - blanks - gone)
    if not paused:
        assert verify(SPEC, ends).ok
        return
    assert stored(store) == before
    assert not verify(SPEC, ends).ok
    wanted = replace(AS_USUAL, max_deletes=1.0)
    done = sync(SPEC, ends, wanted)
    assert (done.deleted, done.emptied) == (gone, blanks)
    assert verify(SPEC, ends).ok


def test_when_the_texts_come_back_nothing_was_lost(ends, source, store, embedder):
    fill(source, 40)
    sync(SPEC, ends, AS_USUAL)
    blank(source, *range(30))
    assert sync(SPEC, ends, AS_USUAL).paused == "max_deletes"
    fill(source, 40)
    embedder.texts.clear()
    report = sync(SPEC, ends, AS_USUAL)
    assert (report.paused, report.unchanged, embedder.texts) == (None, 40, [])


def test_changes_of_other_rows_are_applied_while_paused(ends, source, store):
    fill(source, 40)
    sync(SPEC, ends, AS_USUAL)
    blank(source, *range(12))
    source.put("100", "M020", MAKTX="changed", MTART="FERT")
    source.put("100", "NEW", MAKTX="new", MTART="FERT")
    report = sync(SPEC, ends, AS_USUAL)
    assert (report.paused, report.upserted, report.empty) == ("max_deletes", 2, 12)
    assert stored(store)['["100","M020"]'] == "changed"


def test_a_blank_row_read_twice_counts_once(ends, source, store, monkeypatch):
    """Counted twice, it would hide a row that is gone from the brake."""
    fill(source, 40)
    sync(SPEC, ends, AS_USUAL)
    blank(source, *range(9))
    remove(source, *range(20, 29))
    once = source.pages

    def twice(query, size, within=None):
        yield from once(query, size)
        yield source.rows(query, [("100", f"M{number:03}") for number in range(9)])

    monkeypatch.setattr(source, "pages", twice)
    report = sync(SPEC, ends, SyncOptions(page_rows=5, window=5, max_deletes=0.2))
    assert add_up(report)
    assert (report.paused, report.to_delete, report.deleted) == ("max_deletes", 9, 0)
    assert report.emptied == 9
    assert len(stored(store)) == 40


def test_a_row_blank_at_first_and_filled_when_read_again_stays(ends, source, store, monkeypatch):
    fill(source, 12)
    sync(SPEC, ends, AS_USUAL)
    once = source.pages

    def filled_meanwhile(query, size, within=None):
        blank(source, 3)
        yield from once(query, size)
        source.put("100", "M003", MAKTX="pump number 3", MTART="FERT")
        yield source.rows(query, [("100", "M003")])

    monkeypatch.setattr(source, "pages", filled_meanwhile)
    report = sync(SPEC, ends, AS_USUAL)
    assert add_up(report)
    assert stored(store)['["100","M003"]'] == "pump number 3"
    assert verify(SPEC, ends).ok
