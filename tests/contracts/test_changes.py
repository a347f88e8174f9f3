"""What every way to find changes promises, over a table in memory and over one in the emulator: the store agrees with
the source after a run for what the way can see, and after a full comparison for everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import LogMissing
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import Query, log_of
from connector.protocols import Embedder
from connector.stores.local.store import LocalStore
from tests.contracts.changing import WAYS, Changing, HanaTable, MemoryTable, Synced, second

PARTIAL = ("watermark", "log", "delta")
SEE_DELETIONS = ("full", "hash", "rowid", "log", "delta")


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    engine = load_engine(EngineOptions(model="hash:16"))
    yield EngineEmbedder(engine)
    engine.close()


@pytest.fixture(params=["memory", "emulator"])
def table(request: pytest.FixtureRequest) -> Iterator[Changing]:
    if request.param == "memory":
        yield MemoryTable()
        return
    emulator, schema = request.getfixturevalue("emulator"), request.getfixturevalue("hana_schema")
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    options = ConnectionOptions(**login, schema=schema, encrypt=False, communication_timeout=30)
    with HanaPool(options, 2) as pool:
        made = HanaTable(pool, schema, lambda: emulator.connect(currentSchema=schema))
        yield made
        made.close()


@pytest.fixture
def synced(table: Changing, embedder: Embedder, tmp_path: Path) -> Iterator[Synced]:
    """Ten rows, synced once by whatever way the test names."""
    store = LocalStore(tmp_path / "s")
    for number in range(10):
        table.put(number, f"pump {number}", second(-1000 + number))
    yield Synced(table, store, embedder, "full")
    store.close()


def begun(synced: Synced, way: str) -> Synced:
    synced.way = way
    report = synced.sync()
    assert (report.method, report.upserted, report.complete) == ("full", 10, True)
    if way == "log":  # the entries of the rows that were there before
        assert (synced.sync().unchanged, synced.table.waiting()) == (10, 0)
    synced.table.clock += timedelta(seconds=100)
    if way == "delta":  # the last records before the comparison, once more
        assert (synced.sync().unchanged, synced.sync().read) == (10, 0)
    return synced


def each_way(*on_the_emulator: str, ways: Iterable[str] = tuple(WAYS)) -> pytest.MarkDecorator:
    """Each of the ways over the table in memory, and these over the one in the emulator; there the others are slow."""
    return pytest.mark.parametrize(
        ("table", "way"),
        [
            pytest.param(where, way, marks=[pytest.mark.slow] * (where == "emulator" and way not in on_the_emulator))
            for where in ("memory", "emulator")
            for way in ways
        ],
        indirect=["table"],
    )


memory_first = pytest.mark.parametrize(
    "table", ["memory", pytest.param("emulator", marks=pytest.mark.slow)], indirect=True
)
"""What the way to find changes does, whatever answers it."""


@each_way()
@pytest.mark.proves(24)
def test_nothing_changed_costs_nothing(synced, way):
    begun(synced, way)
    report = synced.sync()
    assert (report.upserted, report.embedded_texts, report.deleted) == (0, 0, 0)
    assert report.method == way
    assert report.loaded == (10 if way == "full" else 0)
    assert report.read == (0 if way in PARTIAL else 10)


@each_way(*WAYS)
def test_insert_update_and_metadata(synced, way):
    begun(synced, way)
    synced.table.put(3, "valve", second(60))
    synced.table.put(10, "gasket", second(61))
    synced.table.put(4, "pump 4", second(62), "H")
    report = synced.sync()
    assert (report.upserted, report.embedded_texts) == (3, 2)
    assert report.loaded == {"full": 11}.get(way, 3)
    synced.agrees()
    assert synced.sync().upserted == 0


@each_way("log", "rowid", "delta")
@pytest.mark.proves(11, 12)
def test_deletions_and_changed_keys(synced, way):
    begun(synced, way)
    synced.table.delete(1, 2, at=second(60))
    synced.table.rekey(5, 50, second(60))
    report = synced.sync()
    assert report.upserted == 1
    if way in SEE_DELETIONS:
        assert report.deleted == 3
        synced.agrees()
    else:
        assert report.deleted == 0
        assert synced.sync(full=True).deleted == 3
        synced.agrees()


@each_way()
def test_rows_that_turn_blank_and_come_back(synced, way):
    begun(synced, way)
    synced.table.put(3, None, second(60))
    assert synced.sync().empty == 1
    synced.agrees()
    synced.table.put(3, "again", second(90))
    synced.table.clock += timedelta(seconds=100)
    assert synced.sync().upserted == 1
    synced.agrees()


@each_way()
def test_a_full_comparison_keeps_what_the_way_stored(synced, way):
    """No flapping: it rewrites nothing, and the run after it finds its tokens and marks in order."""
    begun(synced, way)
    synced.sync()
    before = _records(synced)
    report = synced.sync(full=True)
    assert (report.method, report.upserted, report.unchanged) == ("full", 0, 10)
    assert any("requested" in note for note in report.notes) == (way != "full")
    assert _records(synced) == before
    assert synced.sync().upserted == 0


def _records(synced: Synced) -> list[Any]:
    return sorted((r.id, r.content_hash) for page in synced.store.records("c") for r in page)


@pytest.mark.parametrize(
    ("table", "before", "after"),
    [
        pytest.param(
            where, before, after, marks=[pytest.mark.slow] * (where == "emulator" or "full" not in (before, after))
        )
        for where in ("memory", "emulator")
        for before in WAYS
        for after in WAYS
        if before != after and (where == "memory" or before == "full")
    ],
    indirect=["table"],
)
def test_another_way_embeds_nothing(synced, before, after):
    begun(synced, before)
    synced.table.delete(7)
    synced.table.put(3, "valve", None)
    report = synced.sync(after)
    assert (report.method, report.upserted, report.embedded_texts, report.deleted) == ("full", 1, 1, 1)
    synced.agrees()
    report = synced.sync(after)
    assert (report.upserted, report.embedded_texts) == (0, 0)
    assert report.method == after


@each_way(ways=["watermark", "log", "rowid", "hash", "delta"])
def test_the_full_comparison_comes_round(synced, way):
    begun(synced, way)
    assert synced.sync(change={"reconcile": 3600.0}).method == way
    synced.table.clock += timedelta(seconds=3600)
    report = synced.sync(change={"reconcile": 3600.0})
    assert (report.method, report.complete) == ("full", True)
    assert any("too long ago" in note for note in report.notes)
    assert synced.sync(change={"reconcile": 3600.0}).method == way


# ----------------------------------------------------------------------------------------------------------- watermark


@pytest.mark.proves(13)
@memory_first
def test_a_late_commit_is_lost_without_delay_and_found_by_the_comparison(synced):
    synced.way, no_delay = "watermark", {"delay": 0.0}
    synced.sync(change=no_delay)
    commit = synced.table.later(20, "late", second(50))
    synced.table.put(21, "early", second(60))
    synced.table.clock = second(61)
    assert synced.sync(change=no_delay).upserted == 1
    commit()
    synced.table.clock = second(70)
    assert synced.sync(change=no_delay).upserted == 0
    assert 20 not in synced.stored()
    report = synced.sync(change=no_delay, full=True)
    assert report.upserted == 1
    synced.agrees()


@pytest.mark.proves(13)
def test_a_late_commit_within_the_delay_is_found_by_the_next_window(synced):
    begun(synced, "watermark")
    commit = synced.table.later(20, "late", second(90))
    synced.table.put(21, "early", second(91))
    assert synced.sync().upserted == 0  # both younger than the delay
    commit()
    synced.table.clock = second(130)
    report = synced.sync()
    assert report.upserted == 2
    synced.agrees()


@pytest.mark.proves(14)
@memory_first
def test_rows_without_a_watermark_wait_for_the_comparison(synced):
    begun(synced, "watermark")
    synced.table.put(30, "no time", None)
    synced.table.put(3, "valve", None)
    assert synced.sync().read == 0
    report = synced.sync(full=True)
    assert report.upserted == 2
    synced.agrees()


@memory_first
def test_what_a_paused_run_held_back_is_deleted_by_the_next_comparison(synced):
    begun(synced, "watermark")
    for key in range(20, 40):
        synced.table.put(key, f"row {key}", second(90))
    synced.table.clock = second(200)
    assert synced.sync().upserted == 20
    for key in range(20, 40):
        synced.table.put(key, " ", second(210))
    synced.table.clock = second(300)
    assert synced.sync(max_deletes=0.2).paused == "max_deletes"
    report = synced.sync(full=True, max_deletes=1.0)
    assert (report.paused, report.empty) == (None, 20)
    assert not synced.stored().keys() & set(range(20, 40))


@pytest.mark.parametrize(
    ("table", "way", "stopped_after"),
    [
        *(("memory", way, stopped_after) for way in ("watermark", "delta") for stopped_after in (1, 2, 3)),
        *(("emulator", way, 2) for way in ("watermark", "delta")),
        *(pytest.param("emulator", "watermark", stopped_after, marks=pytest.mark.slow) for stopped_after in (1, 3)),
    ],
    indirect=["table"],
)
@pytest.mark.proves(14)
def test_equal_watermarks_over_the_border_of_pages_and_of_runs(synced, way, stopped_after):
    """Nine rows of one watermark, three a page; the run is ended in the middle and the next one goes on there."""
    begun(synced, way)
    for number in range(9):
        synced.table.put(20 + number, f"valve {number}", second(60))
    synced.table.put(3, "pump 3", second(95))  # too young to be read, but old enough to settle the mark of `delta`
    report = _stopped(synced, stopped_after)
    assert report.stopped
    assert (report.read, report.upserted) == (3 * stopped_after, 3 * stopped_after)
    after = synced.sync()
    assert (after.read, after.upserted) == (9 - 3 * stopped_after, 9 - 3 * stopped_after)
    synced.agrees()


def _stopped(synced: Synced, pages: int) -> Any:
    from connector.sync.run import Ends, sync
    from tests.contracts.changing import OPTIONS

    asked = iter([False] * (pages - 1) + [True])
    ends = Ends(synced.table.source, synced.store, synced.embedder)
    return sync(synced.table.spec(synced.way), ends, OPTIONS, stop=lambda: next(asked, True))


@pytest.mark.parametrize("table", ["emulator"], indirect=True)  # in memory there are microseconds only
@pytest.mark.proves(14)
def test_a_time_between_two_microseconds_is_no_reason_to_read_for_ever_or_to_lose(synced):
    begun(synced, "watermark")
    for number in range(7):
        moment = f"2026-03-01 12:01:00.00000{number % 2}{number % 3}"
        synced.table.run('INSERT INTO "ROWS" VALUES (?, ?, ?, ?)', 20 + number, f"valve {number}", "G", moment)
    report = synced.sync(page_rows=2)
    assert (report.read, report.upserted) == (7, 7)
    synced.agrees()


@pytest.mark.proves(15)
@memory_first
def test_a_clock_that_is_set_back_reads_nothing_and_forgets_nothing(synced):
    begun(synced, "watermark")
    synced.table.put(20, "first", second(60))
    assert synced.sync().upserted == 1
    mark = synced.store.status("c").checkpoint.mark["at"]
    synced.table.clock = second(-500)
    assert synced.sync().read == 0
    assert synced.store.status("c").checkpoint.mark["at"] == mark
    synced.table.put(21, "second", second(110))
    synced.table.clock = second(200)
    assert synced.sync().read == 1
    synced.agrees()


# ----------------------------------------------------------------------------------------------------------------- log


@pytest.mark.proves(13)
def test_the_log_is_a_queue_and_not_a_tape(synced):
    """An entry that becomes visible behind one that was taken already is taken by the next run."""
    begun(synced, "log")
    synced.sync()
    commit = synced.table.later(20, "late", second(50))
    synced.table.put(21, "early", second(60))
    assert synced.sync().upserted == 1
    commit()
    assert synced.table.waiting() == 1
    assert synced.sync().upserted == 1
    assert synced.table.waiting() == 0
    synced.agrees()


@memory_first
def test_what_changes_while_old_entries_wait_is_embedded_once(synced):
    """Three rows a page: the first ones are met again on later pages."""
    synced.way = "log"
    synced.sync()
    synced.table.put(3, "valve", second(60))
    synced.table.delete(4)
    report = synced.sync()
    assert (report.upserted, report.embedded_texts, report.deleted) == (1, 1, 1)
    assert synced.table.waiting() == 0
    synced.agrees()


@memory_first
def test_many_entries_of_one_key_are_one_row(synced):
    begun(synced, "log")
    synced.sync()
    for number in range(8):
        synced.table.put(3, f"valve {number}", second(60))
    report = synced.sync(page_rows=100)
    assert (report.read, report.upserted) == (1, 1)
    synced.agrees()


@pytest.mark.proves(1)
def test_what_is_not_stored_stays_in_the_log(synced, monkeypatch):
    begun(synced, "log")
    synced.sync()
    synced.table.put(3, "valve", second(60))

    def fails(*_: object) -> None:
        raise ConnectionResetError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(synced.store, "apply", fails)
        with pytest.raises(ConnectionResetError):
            synced.sync()
    assert synced.table.waiting() == 1
    assert synced.sync().upserted == 1
    assert synced.table.waiting() == 0


@pytest.mark.proves(23)
def test_a_log_that_is_gone_pauses_and_what_it_missed_is_found(synced):
    begun(synced, "log")
    synced.sync()
    _unplug(synced.table)
    synced.table.put(3, "unseen", second(60))
    synced.table.delete(4)
    report = synced.sync()
    assert (report.paused, report.read, report.deleted) == ("log_missing", 0, 0)
    assert "owl-sap changes install c" in report.notes[0]
    _plug_in(synced.table)
    report = synced.sync()
    assert (report.method, report.upserted, report.deleted) == ("full", 1, 1)
    synced.agrees()
    assert synced.sync().method == "log"


@pytest.mark.parametrize("table", ["emulator"], indirect=True)
def test_a_log_that_goes_away_in_the_middle_of_a_run_is_a_log_that_is_missing(table):
    capture, log = table.source.capture, log_of(table.spec("log"))
    query = Query(table.ref, ("K",), ("TXT",))
    table.run('DROP TABLE "OWL_LOG_C"')
    for use in (
        lambda: capture.log_length(log),
        lambda: capture.log_entries(query, log, 0, 10),
        lambda: capture.forget(log, [1]),
    ):
        with pytest.raises(LogMissing, match="disappeared"):
            use()


def _unplug(table: Changing) -> None:
    if isinstance(table, MemoryTable):
        table.logging = False
    else:
        table.run('ALTER TABLE "ROWS" DISABLE TRIGGER "OWL_LOG_C_I"')
        table.run('DROP TRIGGER "OWL_LOG_C_D"')
        table.run('DROP TRIGGER "OWL_LOG_C_U"')


def _plug_in(table: Changing) -> None:
    if isinstance(table, MemoryTable):
        table.logging = True
    else:
        from connector.hana.change_log import install

        done = [piece["name"] for piece in install(table.pool, table.spec("log"), "X")["pieces"] if piece["done"]]
        assert done == ["OWL_LOG_C_U", "OWL_LOG_C_D"]
        table.run('ALTER TABLE "ROWS" ENABLE TRIGGER "OWL_LOG_C_I"')


@pytest.mark.parametrize("way", ["log", "delta"])
@memory_first
def test_a_partial_run_brakes_too_and_the_next_one_looks_at_everything(synced, way):
    begun(synced, way)
    synced.sync()
    synced.table.delete(1, 2, 3, at=second(120))
    synced.table.put(5, "valve", second(110))
    synced.table.clock = second(200)
    report = synced.sync(max_deletes=0.2)
    assert (report.paused, report.deleted, report.to_delete, report.upserted) == ("max_deletes", 2, 3, 1)
    assert way != "log" or synced.table.waiting() == 0
    report = synced.sync(max_deletes=0.2)  # 8 rows are stored, 0.2 of them is 1.6
    assert (report.method, report.deleted, report.paused) == ("full", 1, None)
    synced.agrees()


# --------------------------------------------------------------------------------------------------------------- rowid


@memory_first
def test_row_ids_that_begin_anew_are_not_believed(synced):
    begun(synced, "rowid")
    synced.table.truncate()
    for number in range(10):
        synced.table.put(number, f"other pump {number}", second(60))
    synced.table.put(0, "other pump 0", second(60))  # now the highest id is that of before
    report = synced.sync()
    if isinstance(synced.table, MemoryTable):
        assert report.method == "rowid"  # as many rows, the highest id one more: nothing to be seen but the ids
    synced.sync(full=True)
    synced.agrees()


@pytest.mark.parametrize(
    ("table", "rows"),
    [("memory", 4), ("memory", 9), ("emulator", 9), pytest.param("emulator", 4, marks=pytest.mark.slow)],
    indirect=["table"],
)
def test_a_highest_row_id_that_fell_makes_it_compare_everything(synced, rows):
    begun(synced, "rowid")
    synced.table.truncate()
    for number in range(rows):
        synced.table.put(number, f"other pump {number}", second(60))
    report = synced.sync()
    assert (report.method, report.upserted, report.deleted) == ("full", rows, 10 - rows)
    assert any("row id" in note for note in report.notes)
    synced.agrees()
    assert synced.sync().method == "rowid"
