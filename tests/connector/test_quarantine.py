"""Rows set aside: which are meant by a key, trying exactly those again, forgetting them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from connector.errors import LeaseLost, UnknownKey
from connector.model import QuarantinedRow
from connector.quarantine import RetryReport, chosen, drop, entry, parse_conditions, retry
from connector.sync import Ends, SyncOptions, Watch, sync
from connector.verify import verify
from tests.connector.test_sync import OPTIONS, SPEC, fill, stored

BAD = {f"pump number {number}" for number in (2, 4, 6)}
COLUMNS = ("MANDT", "MATNR")


def ids(store) -> list[str]:
    return [row.id for row in store.quarantine(SPEC.name)]


def add_up(report: RetryReport) -> bool:
    return report.retried == report.upserted + report.empty + report.gone + report.quarantined


@pytest.fixture
def aside(ends: Ends, source, embedder) -> Ends:
    """Ten rows, three of which the model cannot embed."""
    fill(source, 10)
    embedder.refuse = set(BAD)
    assert sync(SPEC, ends, OPTIONS).quarantined == 3
    embedder.texts.clear()
    return ends


# ----------------------------------------------------------------------------------------------------------- the keys


def entries(*ids_: str):
    return [entry(QuarantinedRow(id_, "embed", "no vector", 2), COLUMNS, 6) for id_ in ids_]


def test_an_entry_names_its_key_as_hits_do():
    seen = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
    shown = entry(QuarantinedRow('["100",{"decimal":"12.5"}]', "embed", "no vector", 2, seen), COLUMNS, 6).as_dict()
    assert shown == {
        "key": {"MANDT": "100", "MATNR": "12.5"},
        "stage": "embed",
        "reason": "no vector",
        "attempts": 2,
        "given_up": False,
        "last_seen": "2026-11-21T09:30:00+00:00",
    }
    assert entry(QuarantinedRow("[1]", "embed", ""), COLUMNS, 6).key == {"0": 1}, "the key had other columns then"
    assert entry(QuarantinedRow('[{"digest":"ab"}]', "render", ""), ("K",), 6).key == {"digest": "ab"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, [0, 1, 2]),
        ([], []),
        ([["100", "A"]], [0]),
        ([{"MANDT": "100", "MATNR": "B"}], [1]),
        ([{"MANDT": "100"}], [0, 1]),
        ([{"MANDT": 200}], [2]),
        ([["200", "A"], {"MATNR": "A"}], [0, 2]),
    ],
)
def test_keys_are_named_by_column_or_in_order(wanted, found):
    all_ = entries('["100","A"]', '["100","B"]', '["200","A"]')
    assert [all_.index(entry) for entry in chosen(all_, wanted)] == found


@pytest.mark.parametrize("wanted", [["100"], ["100", "C"], {"MANDT": "300"}, {"NAME": "A"}, {}, [], ["100", None]])
def test_a_key_that_is_not_there_is_said(wanted):
    with pytest.raises(UnknownKey, match="no row in quarantine"):
        chosen(entries('["100","A"]'), [wanted])


def test_null_is_no_text():
    (only,) = chosen(entries('["100",null]', '["100","None"]'), [["100", None]])
    assert only.id == '["100",null]'


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("MATNR=4711", {"MATNR": "4711"}),
        ("MANDT=100,MATNR=A,B", {"MANDT": "100", "MATNR": "A,B"}),
        ("MATNR=a=b", {"MATNR": "a=b"}),
        ("MATNR=", {"MATNR": ""}),
        ("4711", None),
    ],
)
def test_conditions_on_the_command_line(text, parsed):
    assert parse_conditions(text, COLUMNS) == parsed


# ------------------------------------------------------------------------------------------------------- trying again


def test_mended_rows_are_stored_and_released_and_nothing_else_is_touched(aside, store, source, embedder):
    before = {r.record for page in store.records(SPEC.name) for r in page}
    source.put("100", "M001", MAKTX="changed meanwhile", MTART="FERT")
    embedder.refuse = set()
    report = retry(SPEC, aside, None, OPTIONS)
    assert (report.retried, report.upserted, report.quarantined, report.embedded_texts) == (3, 3, 0, 3)
    assert add_up(report)
    assert sorted(embedder.texts) == sorted(BAD)
    assert ids(store) == []
    assert stored(store)['["100","M004"]'] == "pump number 4"
    assert stored(store)['["100","M001"]'] == "pump number 1", "that is the next sync's"
    assert before <= {r.record for page in store.records(SPEC.name) for r in page}
    source.put("100", "M001", MAKTX="pump number 1", MTART="FERT")
    assert verify(SPEC, aside).ok


def test_only_the_rows_named_are_tried(aside, store, embedder):
    embedder.refuse = set()
    assert retry(SPEC, aside, ['["100","M004"]'], OPTIONS).upserted == 1
    assert embedder.texts == ["pump number 4"]
    assert ids(store) == ['["100","M002"]', '["100","M006"]']


def test_the_attempts_of_rows_that_stay_bad_count_from_one_again(aside, store, embedder):
    embedder.refuse = {"pump number 2"}
    assert sync(SPEC, aside, OPTIONS).quarantined == 1
    assert [row.attempts for row in store.quarantine(SPEC.name)] == [2]
    report = retry(SPEC, aside, None, OPTIONS)
    assert (report.upserted, report.quarantined) == (0, 1)
    (row,) = store.quarantine(SPEC.name)
    assert (row.id, row.attempts) == ('["100","M002"]', 1)
    assert row.last_seen is not None
    assert abs((datetime.now(UTC) - row.last_seen).total_seconds()) < 60


def test_a_row_that_cannot_be_rendered_stays(aside, store, source, embedder):
    embedder.refuse = set()
    source.put("100", "M002", MAKTX="short", MTART="x" * 200_000)
    report = retry(SPEC, aside, ['["100","M002"]'], OPTIONS)
    assert (report.upserted, report.quarantined) == (0, 1)
    row = next(row for row in store.quarantine(SPEC.name) if row.id == '["100","M002"]')
    assert (row.stage, row.attempts) == ("render", 1)


def test_rows_that_are_gone_or_empty_now_leave(aside, store, source, embedder):
    embedder.refuse = set()
    del source.data["100", "M002"]
    source.put("100", "M004", MAKTX=" ", MTART="FERT")
    report = retry(SPEC, aside, None, OPTIONS)
    assert (report.upserted, report.gone, report.empty) == (1, 1, 1)
    assert add_up(report)
    assert ids(store) == []
    assert verify(SPEC, aside).ok


def test_entries_of_another_key_and_of_keys_too_long(aside, store, source):
    with store.lease(SPEC.name, "test", 0) as lease:
        from connector.model import ChangeSet

        odd = [QuarantinedRow("[1]", "embed", "old"), QuarantinedRow('[{"digest":"ab"}]', "render", "long")]
        store.apply(lease, ChangeSet(quarantined=odd))
    report = retry(SPEC, aside, ["[1]", '[{"digest":"ab"}]'], OPTIONS)
    assert (report.gone, report.quarantined) == (1, 1)
    assert {row.id: row.attempts for row in store.quarantine(SPEC.name)}['[{"digest":"ab"}]'] == 1
    assert "[1]" not in ids(store)


def test_it_stops_between_pages_and_goes_on_next_time(aside, store, embedder):
    embedder.refuse = set()
    seen: list[tuple[int, int]] = []

    class Observer:
        def progress(self, done: int, total: int) -> None:
            seen.append((done, total))

    report = retry(SPEC, aside, None, replace(OPTIONS, page_rows=1), Watch(Observer(), lambda: len(seen) == 2))
    assert (report.upserted, report.stopped) == (2, True)
    assert seen == [(1, 3), (2, 3)]
    assert retry(SPEC, aside, None, OPTIONS).upserted == 1


def test_it_works_under_the_lease_only(aside, store, embedder):
    embedder.refuse = set()
    with store.lease(SPEC.name, "a sync", 0):
        with pytest.raises(LeaseLost, match="a sync"):
            retry(SPEC, aside, None, replace(OPTIONS, lease_wait=0.1))
        with pytest.raises(LeaseLost, match="a sync"):
            drop(store, SPEC.name, ids(store), SyncOptions(lease_wait=0.1))
    assert len(ids(store)) == 3


# --------------------------------------------------------------------------------------------------------- forgetting


def test_dropped_rows_are_met_again_by_the_next_sync(aside, store, embedder):
    assert drop(store, SPEC.name, ['["100","M002"]', "[9]"], OPTIONS) == 1
    assert ids(store) == ['["100","M004"]', '["100","M006"]']
    assert not verify(SPEC, aside).ok, "it is missing now, and nobody excuses it"
    assert sync(SPEC, aside, OPTIONS).quarantined == 3
    assert {row.id: row.attempts for row in store.quarantine(SPEC.name)}['["100","M002"]'] == 1
