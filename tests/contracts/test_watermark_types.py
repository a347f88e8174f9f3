"""Every type that can be a watermark, over the real driver: a window reads what changed and nothing else, whatever the
column's precision; the others are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import ConfigurationError, UnknownColumn
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.hana.watermarks import reach, watermark
from connector.model import ChangeSpec, CollectionSpec, Column, TableRef
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync

NOW = datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC)
TABLE = TableRef("S", "T")
KINDS = {
    "TIMESTAMP": "%Y-%m-%d %H:%M:%S.%f",
    "SECONDDATE": "%Y-%m-%d %H:%M:%S",
    "DATE": "%Y-%m-%d",
    "NVARCHAR(14)": "%Y%m%d%H%M%S",
    "NVARCHAR(8)": "%Y%m%d",
    "DECIMAL(15)": "%Y%m%d%H%M%S",
    "DECIMAL(21,7)": "%Y%m%d%H%M%S.%f",
}


class Clocked(HanaSource):
    time = NOW

    def now(self) -> datetime:
        return self.time


@pytest.fixture
def pool(emulator: Any, hana_schema: str) -> Iterator[HanaPool]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, schema=hana_schema, encrypt=False), 2) as pool:
        yield pool


class Collection:
    def __init__(self, pool: HanaPool, schema: str, kind: str, folder: Path) -> None:
        self.pool = pool
        pool.execute(f'CREATE COLUMN TABLE "T" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(50), "AT" {kind})')
        engine = load_engine(EngineOptions(model="hash:8"))
        self.ends = Ends(Clocked(pool), LocalStore(folder / "s"), EngineEmbedder(engine))
        changes = ChangeSpec("watermark", "AT", delay=10)
        self.spec = CollectionSpec("c", TableRef(schema, "T"), "{TXT}", changes=changes)

    def put(self, key: int, at: Any) -> None:
        self.pool.execute('UPSERT "T" VALUES (?, ?, ?) WITH PRIMARY KEY', (key, f"text {key} {at}", at))

    def sync(self, seconds: float, **more: Any) -> SyncReport:
        self.ends.source.time = NOW + timedelta(seconds=seconds)  # type: ignore[attr-defined]
        spec = replace(self.spec, changes=replace(self.spec.changes, **more))
        return sync(spec, self.ends, SyncOptions(page_rows=2, max_deletes=1.0))


@pytest.fixture
def collection(
    request: pytest.FixtureRequest, pool: HanaPool, hana_schema: str, tmp_path: Path
) -> Iterator[Collection]:
    made = Collection(pool, hana_schema, request.param, tmp_path)
    yield made
    made.ends.store.close()


@pytest.mark.parametrize(
    ("collection", "form"),
    [
        pytest.param(*kind, marks=[pytest.mark.slow] * (kind[0] in ("SECONDDATE", "NVARCHAR(14)", "DECIMAL(21,7)")))
        for kind in KINDS.items()
    ],
    indirect=["collection"],
)
def test_a_window_by_any_clock(collection, form):
    """A row whose unit of time was not over when a run came by is read by a later one, however coarse that is."""
    for key in range(5):
        collection.put(key, (NOW - timedelta(days=4, seconds=key)).strftime(form))
    assert collection.sync(0).method == "full"
    collection.put(10, NOW.strftime(form))
    assert collection.sync(2).method == "watermark"
    collection.put(11, NOW.strftime(form))  # the same unit, after the reader came by
    collection.sync(30)
    assert len(_ids(collection)) == 7
    quiet = collection.sync(4 * 86400, reconcile=1e9)
    assert quiet.upserted == 0
    again = collection.sync(4 * 86400 + 60, reconcile=1e9)
    assert (again.read, again.method) == (0, "watermark")


def _ids(collection: Collection) -> set[str]:
    return {chunk.id for page in collection.ends.store.stored("c") for chunk in page}


@pytest.mark.parametrize(
    "collection",
    ["BIGINT", pytest.param("INTEGER", marks=pytest.mark.slow), pytest.param("DECIMAL(10)", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_rising_number_is_settled_once_it_is_old_enough(collection):
    for key in range(5):
        collection.put(key, key + 1)
    assert collection.sync(0).method == "full"
    assert collection.sync(5).method == "full"  # nobody knows yet which numbers are still to come
    assert collection.sync(20).method == "full"
    assert collection.sync(21).read == 0
    collection.put(10, 12)
    assert collection.sync(31).upserted == 1
    collection.put(11, 11)  # given out before 12, committed after it was read
    assert collection.sync(33).upserted == 1
    assert len(_ids(collection)) == 7
    collection.sync(60)
    assert collection.sync(90).read == 0


@pytest.mark.parametrize("collection", ["BIGINT"], indirect=True)
def test_a_rising_number_without_delay_is_believed_at_once(collection):
    collection.put(1, 1)
    assert collection.sync(0, delay=0.0).method == "full"
    collection.put(2, 2)
    report = collection.sync(1, delay=0.0)
    assert (report.method, report.read, report.upserted) == ("watermark", 1, 1)


@pytest.mark.parametrize("kind", ["NVARCHAR", "BOOLEAN", "NCLOB", "DOUBLE", "TIME"])
def test_other_types_are_refused(kind):
    with pytest.raises(ConfigurationError, match="cannot be a watermark"):
        watermark(Column("AT", kind, 40), TABLE)


@pytest.mark.parametrize("collection", ["TIMESTAMP"], indirect=True)
def test_a_column_that_is_not_there_has_a_nearest_name(collection):
    with pytest.raises(UnknownColumn, match=r"changes\.column.*'AT'"):
        collection.sync(0, column="at")


@pytest.mark.parametrize(
    ("column", "upto", "settled"),
    [
        (Column("A", "TIMESTAMP", 27, 7), "2026-03-01 11:59:50.4999990", None),
        (Column("A", "SECONDDATE", 19), "2026-03-01 11:59:49", None),
        (Column("A", "NVARCHAR", 14), "20260301115949", None),
        (Column("A", "DATE", 10), "2026-03-02", "2026-02-27"),
        (Column("A", "NVARCHAR", 8), "20260302", "20260227"),
    ],
)
def test_a_unit_that_is_not_over_is_left(column, upto, settled):
    assert reach(watermark(column, TABLE), NOW, 10) == (upto, settled or upto)
