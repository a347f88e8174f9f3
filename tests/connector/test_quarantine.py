"""Rows set aside: which are meant by a key, trying exactly those again, forgetting them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from connector.errors import LeaseLost, UnknownKey
from connector.model import ChangeSet, QuarantinedRow
from connector.sync.feeds.choose import choose
from connector.sync.quarantine import RetryReport, chosen, drop, entry, parse_conditions, retry
from connector.sync.run import Ends, SyncOptions, Watch, sync
from connector.sync.verify import verify
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


# --------------------------------------------------------------------------------------------------- bounded attempts

RUNS = 12
BOUNDED = replace(OPTIONS, max_attempts=3)


def entry_of(store, number: int) -> QuarantinedRow:
    return next(row for row in store.quarantine(SPEC.name) if row.id == f'["100","M{number:03}"]')


def test_a_row_that_failed_often_enough_costs_nothing_any_more(aside, store, embedder, monkeypatch):
    tried: list[int] = []
    whole = embedder.embed_documents

    def counting(texts):
        tried.append(sum(text in BAD for text in texts))
        return whole(texts)

    monkeypatch.setattr(embedder, "embed_documents", counting)
    written: list[int] = []
    monkeypatch.setattr(store, "apply", lambda lease, changes, apply=store.apply: (
        written.append(len(changes.quarantined)), apply(lease, changes)))  # fmt: skip
    for run in range(2, RUNS):
        report = sync(SPEC, aside, BOUNDED)
        assert (report.read, report.unchanged, report.quarantined) == (10, 7, 3), run
        assert bool(report.notes) == (run > 3)
    assert sum(tried) == 2 * 3, "once when it was set aside, then twice more"
    assert sum(written) == 2 * 3
    assert {row.attempts for row in store.quarantine(SPEC.name)} == {3}
    assert all(row.given_up(3) and not row.given_up(4) for row in store.quarantine(SPEC.name))
    assert "quarantine retry materials" in report.notes[0]
    assert verify(SPEC, aside).ok, "it is in quarantine, so it is not missing"


def test_a_row_given_up_is_tried_again_once_its_content_changes(aside, source, store, embedder):
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    source.put("100", "M002", MAKTX="pump number 2 mended", MTART="FERT")
    source.put("100", "M004", MAKTX="pump number 4", MTART="ROH")
    report = sync(SPEC, aside, BOUNDED)
    assert (report.upserted, report.quarantined) == (1, 2)
    assert entry_of(store, 4).attempts == 1, "another content starts anew"
    assert entry_of(store, 6).attempts == 3
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    assert entry_of(store, 4).attempts == 3
    embedder.refuse = set()
    assert sync(SPEC, aside, BOUNDED).upserted == 0, "nobody tells it that the model has become better"
    assert sync(replace(SPEC, template="{MAKTX}!"), aside, BOUNDED).upserted == 10, (
        "another template is another content"
    )
    assert ids(store) == []


def test_a_higher_limit_tries_rows_given_up_again(aside, store, embedder):
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    embedder.refuse = set()
    assert sync(SPEC, aside, replace(BOUNDED, max_attempts=4)).upserted == 3


def test_a_retry_by_request_tries_rows_given_up_and_starts_their_attempts_anew(aside, store, embedder):
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    embedder.refuse = {"pump number 2", "pump number 4"}
    report = retry(SPEC, aside, None, BOUNDED)
    assert (report.upserted, report.quarantined) == (1, 2)
    assert {row.attempts for row in store.quarantine(SPEC.name)} == {1}
    embedder.refuse = {"pump number 2"}
    assert sync(SPEC, aside, BOUNDED).upserted == 1, "syncs try it again"
    assert entry_of(store, 2).attempts == 2


def test_a_row_that_cannot_be_rendered_is_given_up_too(ends, source, store):
    fill(source, 3)
    source.put("100", "M001", MAKTX="short", MTART="x" * 200_000)
    source.put("100", "K" * 2100, MAKTX="long key", MTART="FERT")
    for run in range(1, RUNS):
        report = sync(SPEC, ends, BOUNDED)
        assert (report.read, report.quarantined, report.unchanged + report.upserted) == (4, 2, 2)
        assert {row.attempts for row in store.quarantine(SPEC.name)} == {min(run, 3)}
    assert verify(SPEC, ends).ok
    del source.data["100", "K" * 2100]
    source.put("100", "M001", MAKTX="short", MTART="FERT")
    assert sync(SPEC, ends, BOUNDED).upserted == 1
    assert ids(store) == []


def test_a_row_given_up_that_left_the_source_or_turned_blank_leaves_quarantine(aside, source, store):
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    del source.data["100", "M002"]
    source.put("100", "M004", MAKTX=" ", MTART="FERT")
    report = sync(SPEC, aside, BOUNDED)
    assert (report.empty, report.quarantined) == (1, 1)
    assert ids(store) == ['["100","M006"]']


def test_a_full_comparison_that_proves_tokens_leaves_them_alone_too(aside, embedder, monkeypatch):
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    monkeypatch.setattr("connector.sync.run.choose", lambda *given: replace(choose(*given), trusts_tokens=False))
    embedder.texts.clear()
    report = sync(SPEC, aside, BOUNDED)
    assert (report.unchanged, report.quarantined, report.embedded_texts) == (7, 3, 0)


def test_a_row_given_up_that_the_store_holds_all_the_same_is_looked_at(aside, store, embedder):
    """Somebody wrote it back: then it is stored, and no row of the quarantine."""
    for _ in range(4):
        sync(SPEC, aside, BOUNDED)
    entry_before = entry_of(store, 2)
    embedder.refuse = set()
    retry(SPEC, aside, [entry_before.id], BOUNDED)
    with store.lease(SPEC.name, "vandal", 1) as lease:
        store.apply(lease, ChangeSet(quarantined=[entry_before]))
    report = sync(SPEC, aside, BOUNDED)
    assert (report.unchanged, report.quarantined) == (8, 2)
    assert entry_before.id not in ids(store)


def test_an_entry_of_an_earlier_version_is_tried_until_its_content_is_known(aside, store, embedder):
    with store.lease(SPEC.name, "earlier", 1) as lease:
        old = [replace(row, digest=None, attempts=90) for row in store.quarantine(SPEC.name)]
        store.apply(lease, ChangeSet(quarantined=old))
    assert not any(row.given_up(3) for row in store.quarantine(SPEC.name))
    sync(SPEC, aside, BOUNDED)
    assert all(row.given_up(3) and row.attempts > 90 for row in store.quarantine(SPEC.name))


def test_many_syncs_of_bad_rows_log_next_to_nothing(aside, source, embedder, caplog):
    """pgai wrote 472,000 lines about one row (issue 783)."""
    fill(source, 60)
    embedder.refuse = {f"pump number {number}" for number in range(0, 60, 2)}
    with caplog.at_level("DEBUG"):
        for _ in range(20):
            sync(SPEC, aside, OPTIONS)
    assert len(caplog.records) <= 5


# --------------------------------------------------------------------------------------------------------- forgetting


def test_dropped_rows_are_met_again_by_the_next_sync(aside, store, embedder):
    assert drop(store, SPEC.name, ['["100","M002"]', "[9]"], OPTIONS) == 1
    assert ids(store) == ['["100","M004"]', '["100","M006"]']
    assert not verify(SPEC, aside).ok, "it is missing now, and nobody excuses it"
    assert sync(SPEC, aside, OPTIONS).quarantined == 3
    assert {row.id: row.attempts for row in store.quarantine(SPEC.name)}['["100","M002"]'] == 1
