"""Changes by a delta table: whatever its records are and in whichever order, nothing is lost or stored twice; a record
that does not say which row changed makes a run compare everything; what is no delta table is refused at the start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import ConfigurationError, UnknownColumn, UnknownTable
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, CollectionSpec, Column, Table, TableRef
from connector.protocols import Embedder
from connector.stores.local.store import LocalStore
from connector.sync.feeds import delta
from connector.sync.feeds.choose import check
from connector.sync.plan import PlanOptions, plan
from connector.sync.run import Ends, sync
from tests.contracts.changing import DELTA_COLUMNS, OPTIONS, MemoryTable, Synced, second, stamp

TYPES = "IBUDXALR"
KEYS = st.integers(0, 6)
CHANGES = st.lists(st.tuples(KEYS, st.sampled_from(["pump", "valve", "gasket", None])), max_size=6)
RECORDS = st.lists(st.tuples(KEYS, st.sampled_from(TYPES)), max_size=8)
"""Records of rows that may not have changed."""
WHOLE = st.sampled_from([None, None, None, (None, "T"), (None, "D"), (3, "T"), (3, "Q")])
"""A record after which everything is compared."""


@contextmanager
def collection() -> Iterator[Synced]:
    with tempfile.TemporaryDirectory() as folder, load_engine(EngineOptions(model="hash:8")) as engine:
        store = LocalStore(Path(folder) / "s")
        yield Synced(MemoryTable(), store, EngineEmbedder(engine), "delta")
        store.close()


@pytest.fixture
def synced() -> Iterator[Synced]:
    """Ten rows, synced until no record is read again."""
    with collection() as made:
        for number in range(10):
            made.table.put(number, f"pump {number}", second(-1000 + number))
        assert made.sync().method == "full"
        made.table.clock = second(100)
        assert made.sync().method == "delta"
        yield made


@pytest.mark.proves(11, 12)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_records_of_all_types_in_any_order_and_twice(data: st.DataObject) -> None:
    with collection() as synced:
        synced.sync()
        for number in range(1, 4):
            _step(synced, data, number)


def _step(synced: Synced, data: st.DataObject, number: int) -> None:
    """Rows change; each has a record of any type, and others have too; runs are cut short, and the last one ends."""
    table, changes, whole = synced.table, data.draw(CHANGES), data.draw(WHOLE)
    records = data.draw(RECORDS) + [(key, data.draw(st.sampled_from(TYPES))) for key, _ in changes]
    records += data.draw(st.lists(st.sampled_from(records), max_size=4)) if records else []
    for key, text in changes:
        table.rows.pop(key, None)
        if text is not None:
            table.rows[key] = (text, "G", None)
    table.clock = second(number * 1000)
    times = st.sampled_from([table.clock - timedelta(seconds=age) for age in (31, 40, 900)])
    for key, kind in data.draw(st.permutations([*records, *([whole] if whole else [])])):
        table.delta.append((stamp(data.draw(times)), key, kind))
    size, pages = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    if pages:
        asked = iter([False] * (pages - 1))
        ends = Ends(table.source, synced.store, synced.embedder)
        sync(table.spec("delta"), ends, replace(OPTIONS, page_rows=size), stop=lambda: next(asked, True))
    report = synced.sync(page_rows=size)
    synced.agrees()
    assert sum(len(page) for page in synced.store.records("c")) == len(table.texts()), "a row is stored twice"
    assert report.method == "delta" or whole
    again = synced.sync()
    assert (again.method, again.upserted, again.deleted) == ("delta", 0, 0)


@pytest.mark.parametrize(
    ("key", "kind", "why"),
    [
        (None, "T", "a record of type T in S.ROWS_Delta says that the table was emptied"),
        (4, "T", "a record of type T"),
        (4, "Q", "S.ROWS_Delta has records of the unknown type Q"),
        (4, None, "unknown type NULL"),
        (None, "D", "S.ROWS_Delta has records without a complete key"),
    ],
)
def test_a_record_that_does_not_say_which_row_changed_compares_everything(synced, key, kind, why):
    del synced.table.rows[7]  # without a record
    synced.table.delta.append((stamp(second(60)), key, kind))
    ends = (synced.table.source, synced.store, synced.embedder)
    planned = plan(synced.table.spec("delta"), *ends, PlanOptions(measure_seconds=None))
    assert (planned.method, why in planned.reason) == ("full", True)
    report = synced.sync()
    assert (report.method, report.deleted) == ("full", 1)
    assert why in report.notes[0]
    synced.agrees()
    assert synced.sync().method == "delta"
    planned = plan(synced.table.spec("delta"), *ends, PlanOptions(measure_seconds=None))
    assert (planned.method, planned.reason) == ("delta", "")


@pytest.mark.proves(13)
@pytest.mark.parametrize("kind", ["T", "Q"])
def test_a_record_beside_one_that_compares_everything_may_arrive_later(synced, kind):
    """As of an overlapping transaction, one batch later. The other one, read again, compares nothing again."""
    synced.table.delta.append((stamp(second(60)), None, kind))
    assert synced.sync().method == "full"
    synced.table.delete(5, at=second(55))
    report = synced.sync()
    assert (report.method, report.deleted) == ("delta", 1)
    synced.table.delta.append((stamp(second(61)), None, kind))
    assert synced.sync().method == "full"
    assert synced.sync().method == "delta"


def test_a_run_that_stopped_at_the_time_of_a_compared_record_compares_nothing_again(synced):
    for key, kind in ((3, "I"), (4, "T")):
        synced.table.delta.append((stamp(second(60)), key, kind))
    assert synced.sync().method == "full"
    synced.table.clock = second(200)
    ends = Ends(synced.table.source, synced.store, synced.embedder)
    assert sync(synced.table.spec("delta"), ends, replace(OPTIONS, page_rows=1), stop=lambda: True).stopped
    assert synced.sync().method == "delta"


def test_with_about_as_many_records_as_rows_everything_is_compared(synced, monkeypatch):
    """As in the run after an initial load, whose records all have the same time."""
    monkeypatch.setattr(delta, "MANY", 4)
    for number in range(6):
        synced.table.put(number, f"valve {number}", second(60))
    synced.table.delete(7, at=second(60))
    report = synced.sync()
    assert (report.method, report.read, report.upserted, report.deleted) == ("full", 9, 6, 1)
    assert "10 records of S.ROWS_Delta are to be read" in report.notes[0]
    synced.agrees()
    synced.table.clock = second(200)
    monkeypatch.setattr(delta, "ROWS_PER_RECORD", 0.5)
    synced.table.put(8, "gasket", second(160))
    report = synced.sync()
    assert (report.method, report.upserted) == ("delta", 1)
    synced.agrees()


def test_records_of_many_changes_read_a_row_once(synced):
    for number in range(9):
        synced.table.put(3, f"valve {number}", second(60))
    synced.table.delete(5, at=second(60))
    report = synced.sync(page_rows=100)
    assert (report.read, report.upserted, report.deleted, report.embedded_texts) == (1, 1, 1, 1)
    synced.agrees()


@pytest.mark.proves(13)
def test_records_that_arrive_in_order_but_later_than_the_delay_are_read(synced):
    """As after minutes without the agent: in the meantime, runs see no record, and no mark may pass those to come."""
    synced.table.put(3, "valve", second(60))
    assert synced.sync().upserted == 1
    for clock in (200, 300, 400):
        synced.table.clock = second(clock)
        assert synced.sync().upserted == 0
    synced.table.delete(5, at=second(100))
    synced.table.put(6, "gasket", second(101))
    report = synced.sync()
    assert (report.method, report.upserted, report.deleted) == ("delta", 1, 1)
    synced.table.put(7, "rope", second(101))  # of the same second, and of an overlapping transaction: one batch later
    synced.table.put(8, "seal", second(80))
    assert synced.sync().upserted == 2
    synced.agrees()
    synced.table.clock = second(440)
    assert synced.sync().read > 0, "the last seconds once more"
    synced.table.clock = second(500)
    assert synced.sync().read == 0


@pytest.mark.proves(13)
def test_records_that_follow_an_empty_delta_table_are_read_whatever_their_time():
    with collection() as synced:
        synced.table.put(5, "pump", None)
        synced.table.delta.clear()
        synced.sync()
        synced.table.delete(5, at=second(-9000))
        report = synced.sync()
        assert (report.method, report.deleted) == ("delta", 1)


@pytest.mark.proves(13)
def test_a_late_commit_within_the_delay_is_found_by_the_next_window(synced):
    commit = synced.table.later(20, "late", second(90))
    synced.table.put(21, "early", second(91))
    assert synced.sync().upserted == 0  # both younger than the delay
    commit()
    synced.table.clock = second(130)
    assert synced.sync().upserted == 2
    synced.agrees()


def test_records_that_were_removed_once_read_are_not_missed(synced):
    synced.table.put(3, "valve", second(60))
    synced.sync()
    synced.table.delta.clear()
    synced.table.clock = second(200)
    synced.table.put(4, "gasket", second(150))
    assert (synced.sync().read, synced.sync().upserted) == (1, 0)
    synced.agrees()


def test_another_delta_table_is_another_method(synced):
    """Its records say nothing of what the other one has said."""
    synced.table.delta_table = Table(TableRef("S", "OTHER"), DELTA_COLUMNS)
    change = {"table": TableRef("S", "OTHER")}
    assert synced.sync(change=change).method == "full"
    assert synced.sync(change=change).method == "delta"


K, TYPE, AT = DELTA_COLUMNS


@pytest.mark.parametrize("way", ["watermark", "delta"])
def test_a_mark_of_another_type_of_the_column_is_not_read(synced, way):
    synced.sync(way)
    assert synced.sync(way).method == way
    columns = tuple(replace(column, type_name="SECONDDATE") for column in synced.table.table.columns[3:])
    synced.table.table = replace(synced.table.table, columns=(*synced.table.table.columns[:3], *columns))
    synced.table.delta_table = replace(synced.table.delta_table, columns=(K, TYPE, replace(AT, type_name="SECONDDATE")))
    report = synced.sync(way, accept_schema=True)
    assert (report.method, "the settings or the table changed" in report.notes[0]) == ("full", True)


@pytest.mark.parametrize(
    ("columns", "changes", "error", "told"),
    [
        ((TYPE, AT), {}, ConfigurationError, "must have the key columns of S.ROWS.*it has no column K"),
        ((replace(K, type_name="BIGINT"), TYPE, AT), {}, ConfigurationError, "its K is BIGINT instead of INTEGER"),
        ((K, AT), {}, ConfigurationError, "Change_Type and Change_Date or SDI_CHANGE_TYPE.*type = .*at = "),
        (DELTA_COLUMNS, {"type": "TYPE"}, UnknownColumn, r"changes\.type.*no column 'TYPE'"),
        (DELTA_COLUMNS, {"at": "change_date"}, UnknownColumn, r"changes\.at.*'Change_Date'. Names are case"),
        (DELTA_COLUMNS, {"at": "Change_Type"}, ConfigurationError, r"changes\.at.*cannot be a watermark"),
    ],
)
def test_what_is_no_delta_table_is_refused(columns, changes, error, told):
    table = MemoryTable()
    table.delta_table = replace(table.delta_table, columns=columns)
    with pytest.raises(error, match=told):
        check(table.spec("delta", **changes), table.table, table.source)


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        ((K, Column("SDI_CHANGE_TYPE", "VARCHAR", 2), Column("SDI_CHANGE_TIME", "TIMESTAMP")), {}),
        ((K, Column("OP", "NVARCHAR", 1), Column("MOMENT", "SECONDDATE")), {"type": "OP", "at": "MOMENT"}),
        ((K, TYPE, AT, Column("MOMENT", "SECONDDATE")), {"at": "MOMENT"}),
    ],
)
def test_names_that_are_known_or_given(columns, changes):
    table = MemoryTable()
    table.delta_table = replace(table.delta_table, columns=columns)
    check(table.spec("delta", **changes), table.table, table.source)


# --------------------------------------------------------------------------------------------------------- in HANA


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    with load_engine(EngineOptions(model="hash:8")) as engine:
        yield EngineEmbedder(engine)


@pytest.fixture
def pool(emulator, hana_schema) -> Iterator[HanaPool]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, schema=hana_schema, encrypt=False), 2) as pool:
        yield pool


def texts(store: LocalStore) -> dict[str, str]:
    return {record.id or "": record.text or "" for page in store.records("c") for record in page}


def test_rows_that_smart_data_integration_marks_as_deleted_stay_in_the_same_table(
    pool, hana_schema, embedder, tmp_path
):
    ref = TableRef(hana_schema, "RT")
    pool.execute(
        'CREATE COLUMN TABLE "RT" ("A" NVARCHAR(3), "B" DATE, "TXT" NVARCHAR(99), "SDI_CHANGE_TYPE" VARCHAR(2), '
        '"SDI_CHANGE_TIME" TIMESTAMP, PRIMARY KEY ("A", "B"))'
    )
    for number in range(5):  # the initial load has neither type nor time
        pool.execute("""INSERT INTO "RT" VALUES (?, '2026-01-31', ?, NULL, NULL)""", (f"{number}", f"pump {number}"))
    alive = """("SDI_CHANGE_TYPE" IS NULL OR "SDI_CHANGE_TYPE" NOT IN ('D', 'X'))"""
    spec = CollectionSpec("c", ref, "{TXT}", where=alive, changes=ChangeSpec("delta", table=ref, delay=0))
    store = LocalStore(tmp_path / "s")
    ends, options = Ends(HanaSource(pool), store, embedder), replace(OPTIONS, page_rows=1)
    assert sync(spec, ends, options).upserted == 5
    change = 'UPDATE "RT" SET "TXT" = ?, "SDI_CHANGE_TYPE" = ?, "SDI_CHANGE_TIME" = CURRENT_UTCTIMESTAMP WHERE "A" = ?'
    for text, kind, key in (("valve", "U", "1"), ("pump 2", "D", "2"), ("pump 3", "X", "3")):
        pool.execute(change, (text, kind, key))
    report = sync(spec, ends, options)
    assert (report.method, report.read, report.upserted, report.deleted) == ("delta", 1, 1, 2)
    assert sorted(texts(store).values()) == ["pump 0", "pump 4", "valve"]
    store.close()


@pytest.mark.proves(23)
def test_a_delta_table_that_is_dropped_or_made_anew(pool, hana_schema, embedder, tmp_path):
    """Gone, it is named and nothing is read; made anew, it has forgotten what it knew, so everything is compared, as
    after records that do not say which rows changed."""
    ref, store = TableRef(hana_schema, "ROWS"), LocalStore(tmp_path / "s")
    pool.execute('CREATE COLUMN TABLE "ROWS" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(99))')
    create = 'CREATE COLUMN TABLE "ROWS_Delta" ("K" INTEGER, "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP)'
    spec = CollectionSpec("c", ref, "{TXT}", changes=ChangeSpec("delta", delay=0))
    ends = Ends(HanaSource(pool), store, embedder)
    with pytest.raises(UnknownTable, match=r"changes\.table.*ROWS_Delta.*table = "):
        sync(spec, ends, OPTIONS)
    assert store.status("c") is None, "refused before anything is written"
    pool.execute(create)
    assert (sync(spec, ends, OPTIONS).method, sync(spec, ends, OPTIONS).method) == ("full", "delta")
    pool.execute('DROP TABLE "ROWS_Delta"')
    with pytest.raises(UnknownTable, match=r"changes\.table"):
        sync(spec, ends, OPTIONS)
    pool.execute(create)
    pool.execute("""INSERT INTO "ROWS" VALUES (1, 'pump')""")
    report = sync(spec, ends, OPTIONS)
    assert (report.method, report.upserted) == ("full", 1)
    for kind in "TQ":
        pool.execute("""INSERT INTO "ROWS_Delta" VALUES (NULL, ?, CURRENT_UTCTIMESTAMP)""", (kind,))
    report = sync(spec, ends, OPTIONS)
    assert report.method == "full"
    assert all(why in report.notes[0] for why in ("unknown type Q", "type T", "without a complete key"))
    store.close()


@pytest.mark.parametrize(
    ("where", "refused"), [(None, True), ('"TXT" IS NOT NULL', True), ("sdi_change_type='U'", False)]
)
def test_a_table_is_its_own_delta_table_only_without_the_rows_marked_as_deleted(pool, hana_schema, where, refused):
    ref, source = TableRef(hana_schema, "RT"), HanaSource(pool)
    columns = '"A" INTEGER PRIMARY KEY, "TXT" NVARCHAR(9), "SDI_CHANGE_TYPE" VARCHAR(2), "SDI_CHANGE_TIME" TIMESTAMP'
    pool.execute(f'CREATE COLUMN TABLE "RT" ({columns})')
    spec = CollectionSpec("c", ref, "{TXT}", where=where, changes=ChangeSpec("delta", table=ref))
    told = r"""`where` must leave .* \("SDI_CHANGE_TYPE" IS NULL OR "SDI_CHANGE_TYPE" NOT IN \('D', 'X'\)\)"""
    with pytest.raises(ConfigurationError, match=told) if refused else nullcontext():
        check(spec, source.describe(ref), source)


def test_a_number_as_time_of_change_whose_records_begin_after_the_comparison(pool, hana_schema, embedder, tmp_path):
    """And then becomes a time, as does that of a view made anew: another mark."""
    ref, store = TableRef(hana_schema, "ROWS"), LocalStore(tmp_path / "s")
    pool.execute('CREATE COLUMN TABLE "ROWS" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(99))')
    pool.execute('CREATE COLUMN TABLE "LOG" ("K" INTEGER, "OP" NVARCHAR(1), "NO" BIGINT, "AT" TIMESTAMP)')
    changes = ChangeSpec("delta", table=TableRef(hana_schema, "V"), type="OP", at="NO")
    spec, ends = CollectionSpec("c", ref, "{TXT}", changes=changes), Ends(HanaSource(pool), store, embedder)
    for key, column in enumerate(("NO", "AT")):
        pool.execute(f'CREATE VIEW "V" AS SELECT "K", "OP", "{column}" AS "NO" FROM "LOG"')
        assert (sync(spec, ends, OPTIONS).method, sync(spec, ends, OPTIONS).method) == ("full", "delta")
        pool.execute("""INSERT INTO "ROWS" VALUES (?, 'pump')""", (key,))
        pool.execute('INSERT INTO "LOG" SELECT "K", \'I\', 1, \'2026-01-01\' FROM "ROWS"')
        report = sync(spec, ends, OPTIONS)
        assert (report.method, report.upserted) == ("delta", 1)
        pool.execute('DELETE FROM "LOG"')
        pool.execute('DROP VIEW "V"')
    store.close()
