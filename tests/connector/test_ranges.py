"""A sync whose key ranges are spread over workers stores, counts and remembers what a sync in one process does. What
becomes of rows that change between their range and its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from connector.errors import ConnectionLost, ConnectorError, RowRejected, StatementFailed
from connector.model import ChangeSet, Chunk, ChunkSpec, CollectionSpec, Key, KeyRange, Lease, Query, Row, StoredChunk
from connector.stores.local.store import LocalStore
from connector.sync import ranges
from connector.sync.options import Ends, SyncOptions, SyncReport
from connector.sync.ranges import IdSums, RangeReport, RangeTask, WorkerLost, Workers
from connector.sync.run import sync
from connector.sync.verify import verify
from tests.connector.conftest import MATERIALS, MemorySource, WordEmbedder
from tests.proof.range_workers import Here

SPEC = CollectionSpec("materials", MATERIALS, "{MAKTX}", metadata=("MTART",), chunk=ChunkSpec(max_tokens=4, overlap=1))
OPTIONS = SyncOptions(page_rows=3, window=4, max_deletes=1.0)
TIMES = ("seconds", "rows_per_second", "stages", "embedded_texts", "reused_texts", "tokens")  # these may differ
POISON = "poison"
TOO_LONG = "x" * 3000


class Source(MemorySource):
    """Also read in key ranges."""

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        keys = sorted(self.data)
        borders = keys[rows // parts - 1 :: rows // parts][: parts - 1]
        return [KeyRange(after, upto) for after, upto in pairwise([None, *borders, None])]

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        after, upto = (None, None) if within is None else (within.after, within.upto)
        while keys := sorted(k for k in self.data if (not after or k > after) and (not upto or k <= upto))[:size]:
            yield self.rows(query, keys)
            after = keys[-1]


@dataclass
class Twins:
    """One source, and a store for each way to sync it."""

    source: Source
    alone: Ends
    spread: Ends

    def put(self, number: int, text: str | None, kind: str = "FERT") -> None:
        self.source.put("100", f"M{number:03}", MAKTX=text, MTART=kind)

    def drop(self, number: int) -> None:
        del self.source.data["100", f"M{number:03}"]

    def run(self, workers: Workers | None = None, options: SyncOptions = OPTIONS) -> SyncReport:
        report = sync(SPEC, self.spread, options, workers=workers or Here(self.spread))
        parts = (report.upserted, report.unchanged, report.empty, report.quarantined, report.superseded)
        assert report.read == sum(parts), report
        return report

    def agree(self, options: SyncOptions) -> SyncReport:
        """Sync both; compare everything that is reported and stored."""
        spread, alone = self.run(options=options), sync(SPEC, self.alone, options)
        counts = [{k: v for k, v in each.as_dict().items() if k not in TIMES} for each in (spread, alone)]
        assert counts[0] == counts[1]
        assert content(self.spread) == content(self.alone)
        return spread

    def texts(self) -> dict[str, str]:
        found = (record for page in self.spread.store.records(SPEC.name) for record in page)
        return {record.id[8:12]: record.text for record in found if record.number == 0}


def content(ends: Ends) -> dict[str, object]:
    records = (record for page in ends.store.records(SPEC.name) for record in page)
    status = ends.store.status(SPEC.name)
    assert status is not None
    checkpoint = replace(status.checkpoint, last_full=None, last_sync=None)
    return {
        "records": sorted((r.id, r.number, r.text, str(r.metadata), r.content_hash) for r in records),
        "quarantine": [replace(entry, last_seen=None) for entry in ends.store.quarantine(SPEC.name)],
        "checkpoint": (checkpoint, status.checkpoint.last_full is None),
    }


@pytest.fixture
def twins(tmp_path: Path, embedder: WordEmbedder) -> Iterator[Twins]:
    source, stores = Source(), [LocalStore(tmp_path / name) for name in ("alone", "spread")]
    embedder.refuse = {POISON}
    yield Twins(source, *(Ends(source, store, embedder) for store in stores))
    for store in stores:
        store.close()


@pytest.mark.proves(1, 11)
@pytest.mark.parametrize("buckets", [1, 8, ranges.BUCKETS])
def test_a_spread_sync_does_what_one_process_does(twins: Twins, buckets: int) -> None:
    chance = random.Random(buckets)
    source = twins.source
    paused = 0
    for number in range(40):
        twins.put(number, f"pump number {number} of many parts")
    with patch.object(ranges, "BUCKETS", buckets):
        for _ in range(15):
            for _ in range(chance.choice((0, 1, 5, 20))):
                number = chance.randrange(50)
                kind = chance.random()
                if kind < 0.4 and ("100", f"M{number:03}") in source.data:
                    twins.drop(number)
                elif kind < 0.5:
                    twins.put(number, chance.choice((None, "", " ")))
                elif kind < 0.6:
                    twins.put(number, POISON)
                elif kind < 0.65:
                    source.put("200", f"{TOO_LONG}{number}", MAKTX="a key too long", MTART="FERT")
                else:
                    twins.put(number, f"text {chance.randrange(5)}", f"T{chance.randrange(3)}")
            options = replace(OPTIONS, max_deletes=chance.choice((0.1, 1.0)), max_attempts=2)
            paused += twins.agree(options).paused is not None
    assert paused


@pytest.mark.proves(11)
def test_the_limit_of_deletions_is_exact_and_blank_rows_have_their_own(twins: Twins) -> None:
    for number in range(40):
        twins.put(number, "text")
    twins.agree(OPTIONS)
    for number in range(8):
        twins.drop(number)
    assert twins.agree(replace(OPTIONS, max_deletes=7.9 / 40)).paused == "max_deletes"
    assert twins.agree(replace(OPTIONS, max_deletes=0.2)).deleted == 8
    for number in range(8, 19):
        twins.put(number, None)
    report = twins.agree(replace(OPTIONS, max_deletes=0.2))
    assert (report.paused, report.to_delete, report.emptied) == ("max_deletes", 0, 11)
    twins.put(18, "text again")
    report = twins.agree(replace(OPTIONS, max_deletes=0.2))
    assert (report.paused, report.empty, report.emptied, len(twins.texts())) == (None, 10, 10, 22)


def test_few_rows_are_read_again_where_few_are_gone(twins: Twins) -> None:
    for number in range(100):
        twins.put(number, "text")
    twins.run()
    asked: list[int] = []
    rows = twins.source.rows
    for number in (5, 50):
        twins.drop(number)
    workers = Here(twins.spread)
    with patch.object(twins.source, "rows", lambda query, keys: [asked.append(len(keys)), rows(query, keys)][1]):
        assert twins.run(workers).deleted == 2
    assert sum(asked) <= 98 + 3  # each row in its range, then the two, and by chance one beside them


def test_above_the_limit_no_row_is_looked_up(twins: Twins) -> None:
    for number in range(100):
        twins.put(number, "text")
    twins.run()
    for number in range(50):
        twins.drop(number)
    for number in range(50, 65):
        twins.put(number, None)
    asked: list[int] = []
    rows = twins.source.rows
    with patch.object(twins.source, "rows", lambda query, keys: [asked.append(len(keys)), rows(query, keys)][1]):
        report = twins.run(options=replace(OPTIONS, max_deletes=0.2))
    assert (report.paused, report.to_delete, report.deleted, sum(asked)) == ("max_deletes", 50, 0, 50)
    assert len(twins.texts()) == 100
    assert twins.run().deleted == 50
    assert len(twins.texts()) == 35


def test_the_driver_stops_while_it_reads_ids(twins: Twins) -> None:
    for number in range(20):
        twins.put(number, "text")
    twins.run()
    reading: list[bool] = []
    stored = twins.spread.store.stored

    def read(name: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        reading.extend([True] * (ids is None))
        return stored(name, ids)

    with patch.object(twins.spread.store, "stored", read):
        report = sync(SPEC, twins.spread, OPTIONS, workers=Here(twins.spread), stop=lambda: bool(reading))
    assert (report.stopped, report.complete, report.unchanged) == (True, False, 20)


class Refusing:
    """A source's `rows` that refuses some keys, as the driver and HANA do."""

    def __init__(self, source: Source, refused: Collection[str], error: ConnectorError) -> None:
        self._rows, self._refused, self._error = source.rows, refused, error

    def __call__(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        if any(key[1] in self._refused for key in keys):
            raise self._error
        return self._rows(query, keys)


def test_keys_that_no_longer_fit_their_column_are_gone(twins: Twins) -> None:
    for number in range(20):
        twins.put(number, "text")
    twins.run()
    for number in (3, 4):
        twins.drop(number)
    paused = twins.run(options=replace(OPTIONS, max_deletes=0.09))
    assert (paused.paused, paused.to_delete) == ("max_deletes", 2)
    rejected = RowRejected("a value does not fit the type of its column (code -10427)", code=-10427)
    with patch.object(twins.source, "rows", Refusing(twins.source, ("M003", "M004"), rejected)):
        assert twins.run(options=replace(OPTIONS, max_deletes=0.1)).deleted == 2
    assert len(twins.texts()) == 18
    twins.drop(5)
    with (
        patch.object(twins.source, "rows", Refusing(twins.source, ("M005",), RowRejected("of a view", code=339))),
        pytest.raises(RowRejected, match="of a view"),
    ):
        twins.run()


class Losing(Here):
    """Does the first range, and loses its worker before the answer."""

    def __init__(self, ends: Ends, meanwhile: Callable[[], None], attempts: int = 1) -> None:
        super().__init__(ends)
        self._meanwhile, self._attempts = meanwhile, attempts

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        future = super().submit(task)
        if self._attempts and task.within.after is None:
            self._attempts -= 1
            self._meanwhile()
            future = Future()
            future.set_exception(WorkerLost("killed"))
        return future


@pytest.mark.parametrize("error", [ConnectionLost("no answer"), StatementFailed("a defect")])
def test_a_range_whose_lost_worker_keeps_its_lock_is_left_to_the_end(twins: Twins, error: ConnectorError) -> None:
    for number in range(20):
        twins.put(number, "text")
    losing = Losing(twins.spread, lambda: None)
    done: list[int] = []

    def begin(lease: Lease, part: int) -> Lease:
        return replace(lease, part=part)

    def end(lease: Lease) -> None:
        done.append(len(losing.tasks))
        if lease.part is not None:
            raise error

    store = twins.spread.store
    with patch.object(store, "begin_part", begin), patch.object(store, "end_parts", end):
        if error.retryable:
            report = twins.run(losing)
            assert (report.read, len(report.notes), done) == (20, 1, [len(losing.tasks)] * 2)
            assert verify(SPEC, twins.spread).ok
        else:
            with pytest.raises(StatementFailed):
                twins.run(losing)


@pytest.mark.parametrize("attempts", [1, ranges.ATTEMPTS])
def test_a_row_that_a_lost_worker_stored_and_that_left_is_deleted(twins: Twins, attempts: int) -> None:
    for number in range(20):
        twins.put(number, POISON if number == 1 else "text")
    losing = Losing(twins.spread, lambda: twins.source.data.pop(("100", "M000"), None), attempts)
    report = twins.run(losing, replace(OPTIONS, max_deletes=0.01))
    assert (report.read, report.deleted, report.to_delete, report.paused) == (19, 1, 1, None)
    assert "M000" not in twins.texts()
    assert [entry.attempts for entry in twins.spread.store.quarantine(SPEC.name)] == [1]
    assert len(report.notes) == (attempts == ranges.ATTEMPTS)
    assert verify(SPEC, twins.spread).ok


def test_rows_that_change_after_their_range(twins: Twins) -> None:
    """A row that a range met stays as it was then, until the next run; one that it did not meet is compared again."""
    for number in range(20):
        twins.put(number, None if number == 3 else f"old {number}")
    twins.run()
    twins.put(4, None)
    twins.drop(5)
    twins.put(6, POISON)

    def meanwhile(task: RangeTask) -> None:
        if task.within.upto is None:  # the last range, and all of these are in the first one
            twins.put(-1, "inserted")
            twins.drop(1)
            twins.put(2, "new 2")
            twins.put(4, "new 4")
            twins.put(5, "new 5")
            twins.put(6, "new 6")

    with patch.object(ranges, "RANGES_PER_WORKER", 1):
        report = twins.run(Here(twins.spread, meanwhile))
    texts = twins.texts()
    assert (report.deleted, report.paused) == (0, None)
    assert (texts["M001"], texts["M002"]) == ("old 1", "old 2")
    assert (texts["M004"], texts["M005"]) == ("new 4", "new 5")
    assert "M-01" not in texts
    assert [entry.id[8:12] for entry in twins.spread.store.quarantine(SPEC.name)] == ["M006"]
    again = twins.run()
    assert (again.upserted, again.deleted) == (3, 1)
    assert verify(SPEC, twins.spread).ok


def test_documents_whose_ids_are_no_keys_are_deleted(twins: Twins) -> None:
    for number in range(12):
        twins.put(number, "text")
    for ends in (twins.alone, twins.spread):
        ends.store.open(SPEC.name, ends.embedder)
        vector = ends.embedder.embed_documents(["text"])
        with ends.store.lease(SPEC.name, "test", 0) as lease:
            for id_, place in (("no key", 0), ('["100"]', 0), ('[{"digest":"ab"}]', 0), ('["100","M900"]', 1)):
                chunk = Chunk(id_, place, "text", {}, bytes(32))
                ends.store.apply(lease, ChangeSet(chunks=[chunk], vectors=np.asarray(vector)))
    assert twins.agree(OPTIONS).deleted == 4


@pytest.mark.parametrize("keys", [("MANDT", "MATNR"), ("MATNR",)], ids=["same", "another"])
def test_after_a_change_of_the_key_the_driver_works_alone(twins: Twins, keys: Sequence[str]) -> None:
    for number in range(12):
        twins.put(number, "text")
    twins.run()
    twins.source.table = replace(twins.source.table, primary_key=keys)
    twins.source.data = {key[-len(keys) :]: row for key, row in twins.source.data.items()}
    workers = Here(twins.spread)
    report = sync(SPEC, twins.spread, OPTIONS, workers=workers)
    assert bool(workers.tasks) == (len(keys) == 2)
    assert report.deleted == (0 if len(keys) == 2 else 12)


def test_sums_of_ids() -> None:
    first, second, ids = IdSums(b"salt"), IdSums(b"salt"), [f'["{number}"]' for number in range(3000)]
    first.add(ids[:1000])
    second.add(ids[1000:])
    first.add_sums(second)
    first.subtract(ids[::-1])
    assert not first.remain()
    assert first.count == 0
    assert first.remaining(ids) == first.remaining([]) == []
    first.subtract(ids[7:9])
    assert first.remain()
    assert first.count == -2
    assert set(ids[7:9]) <= set(first.remaining(ids)) <= set(ids)
    assert len(first.remaining(ids)) < 10
    other = IdSums(b"pepper")
    other.add(ids[:10])
    first.add_sums(other)
    assert first.remain(), "another salt gives other hashes"
