"""Threads of a run: order, bounds, errors of every stage, stop and close. No test here waits longer than it must."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.errors import LeaseLost
from connector.model import ChangeSet, Checkpoint, Chunk, CollectionSpec, Document, KeyRange, Query, Row
from connector.stores.local.store import LocalStore
from connector.sync.apply import Piece, Prepared, Written
from connector.sync.feeds import full
from connector.sync.pipeline import Channel, Closed, Pipeline, Work, read_ahead
from connector.sync.run import Ends, SyncOptions, sync
from tests.connector.conftest import MATERIALS, MemorySource

OURS = ("sync-", "read-")
SPEC = CollectionSpec("materials", MATERIALS, "{MAKTX}")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []


class Planted(Exception):
    """What a test plants."""


def nothing(_: str) -> None:
    """A stage that does what it should."""


@dataclass
class FakeWriter:
    """Keeps what is written in a list. `stage` is called before a document is embedded or stored, with its name."""

    embed: Callable[[str], None] = nothing
    store: Callable[[str], None] = nothing
    stored: list[str] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Of each checkpoint: what it says, and how much was stored when it was written."""

    def prepare(self, documents: Sequence[Document]) -> Prepared:
        for document in documents:
            self.embed(document.id)
        vector = np.ones((1, 4), np.float32)
        ready = [Piece(each.id, [Chunk(each.id, 0, each.text, {}, b"")], vector, each.row_digest) for each in documents]
        return ready, []

    def apply(self, prepared: Prepared, extra: ChangeSet | None = None, closing: ChangeSet | None = None) -> Written:
        written = Written()
        for ready in prepared[0]:
            self.store(ready.id)
            self.stored.append(ready.id)
            written.upserted.append(ready.id)
        if closing is not None and closing.checkpoint is not None:
            assert closing.checkpoint.mark is not None
            self.marks.append((closing.checkpoint.mark["at"], len(self.stored)))
        return written


def document(number: int, text: str = "text") -> Document:
    return Document(str(number), text, {}, bytes(16), bytes(16))


def work(number: int, done: Callable[[], None] | None = None, text: str = "text") -> Work:
    """One document, and a mark that says so."""
    closing = ChangeSet(checkpoint=Checkpoint(mark={"at": number + 1}), partial=True)
    return Work([document(number, text)], ChangeSet(), closing, [done] if done else [])


def pipeline(writer: FakeWriter, counted: list[Written] | None = None, **more: int) -> Pipeline:
    written = [] if counted is None else counted
    return Pipeline(writer, written.append, **more)


# --------------------------------------------------------------------------------------------------------- in order

several = pytest.mark.parametrize("windows", [1, 3])


@several
def test_everything_in_order_counted_in_the_thread_that_puts(windows: int) -> None:
    done: list[int] = []
    counting: set[str] = set()
    writing: set[str] = set()
    shuffled = random.Random(3)
    writer = FakeWriter(
        embed=lambda _: time.sleep(shuffled.random() / 500),
        store=lambda _: writing.add(threading.current_thread().name),
    )
    line = Pipeline(writer, lambda _: counting.add(threading.current_thread().name), windows)
    for number in range(60):
        line.put(work(number, lambda number=number: done.append(number)))
    line.finish()
    line.close()
    assert writer.stored == [str(number) for number in range(60)]
    assert done == list(range(60))
    assert writer.marks == [(number + 1, number + 1) for number in range(60)]
    assert counting == {threading.current_thread().name}
    assert writing == {"sync-apply"}


def test_done_comes_after_its_own_work_and_before_the_next() -> None:
    seen: list[tuple[int, int]] = []
    writer = FakeWriter()
    line = pipeline(writer)
    for number in range(10):
        line.put(work(number, lambda number=number: seen.append((number, len(writer.stored)))))
    line.finish()
    assert seen == [(number, number + 1) for number in range(10)]


def test_as_many_pieces_are_embedded_at_a_time_as_asked_for() -> None:
    together = threading.Barrier(3)  # breaks after a minute if fewer come at a time
    inside, most = 0, 0
    lock = threading.Lock()

    def embed(_: str) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(60)
        with lock:
            inside -= 1

    writer = FakeWriter(embed)
    line = pipeline(writer, windows=3)
    for number in range(12):
        line.put(work(number))
    line.finish()
    assert most == 3
    assert writer.stored == [str(number) for number in range(12)]


def test_a_pipeline_that_was_given_nothing_starts_no_thread() -> None:
    line = pipeline(FakeWriter())
    line.check()
    assert threads() == []
    line.finish()
    line.close()


# ----------------------------------------------------------------------------------------------------------- bounds


@several
def test_a_slow_store_keeps_little_waiting(windows: int) -> None:
    """Two pieces of work wait for the store, one for the engine; one more is in the hands of the store, and one in the
    hands of each thread that embeds."""
    go = threading.Event()
    line = pipeline(FakeWriter(store=lambda _: go.wait(60)), windows=windows)
    put: list[int] = []

    def all_of_it() -> None:
        for number in range(20):
            line.put(work(number))
            put.append(number)

    caller = threading.Thread(target=all_of_it)
    caller.start()
    assert _settles(lambda: len(put), 1 + 2 + windows + 1) == 1 + 2 + windows + 1
    go.set()
    caller.join(60)
    line.finish()
    assert len(put) == 20


def test_large_work_waits_alone() -> None:
    """Each of these is larger than all that may wait: none waits beside another, and each passes."""
    go = threading.Event()
    writer = FakeWriter(store=lambda _: go.wait(60))
    line = pipeline(writer, max_bytes=50_000)
    put: list[int] = []

    def all_of_it() -> None:
        for number in range(8):
            line.put(work(number, text="x" * 100_000))
            put.append(number)

    caller = threading.Thread(target=all_of_it)
    caller.start()
    assert _settles(lambda: len(put), 1 + 1 + 1 + 1) == 1 + 1 + 1 + 1, (
        "in the hands of the store and of the engine, and one before each"
    )
    go.set()
    caller.join(60)
    line.finish()
    assert len(writer.stored) == 8


@given(st.lists(st.integers(0, 15), max_size=40), st.integers(1, 12), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_a_channel_keeps_order_and_its_bounds(sizes: list[int], most: int, items: int) -> None:
    channel: Channel[int] = Channel(most, items)

    def put_all() -> None:
        for number, size in enumerate(sizes):
            channel.put(number, size)
        channel.end()

    sender = threading.Thread(target=put_all)
    sender.start()
    taken: list[int] = []

    def take() -> None:
        waiting = [size for _, size in list(channel._waiting)]
        assert len(waiting) <= items
        assert sum(waiting) <= most or len(waiting) == 1
        taken.append(channel.get())

    with pytest.raises(Closed):
        _again_and_again(take)
    sender.join()
    assert taken == list(range(len(sizes)))


def _again_and_again(step: Callable[[], object]) -> None:
    """Until it raises; a minute at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        step()


def _settles(value: Callable[[], int], least: int = 0) -> int:
    """The value once it is `least` at least, and has not changed for 0.1 s."""
    deadline = time.monotonic() + 60
    while value() < least and time.monotonic() < deadline:
        time.sleep(0.005)
    seen, since = value(), time.monotonic()
    while time.monotonic() - since < 0.1:
        if value() != seen:
            seen, since = value(), time.monotonic()
        time.sleep(0.005)
    return seen


# ----------------------------------------------------------------------------------------------------------- errors


def _fail_at(number: int, error: Exception) -> Callable[[str], None]:
    def stage(name: str) -> None:
        if name == str(number):
            raise error

    return stage


def _put_until_it_fails(line: Pipeline, works: Iterator[Work]) -> None:
    try:
        for each in works:
            line.put(each)
        line.finish()
    finally:
        with pytest.raises(Planted):
            line.finish()
        line.close()
        line.close()


@several
@pytest.mark.parametrize("stage", ["embed", "store", "done"])
@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_the_error_of_a_stage_comes_out_and_nothing_later_is_written(stage: str, at: int, windows: int) -> None:
    error = Planted(stage)
    fail = _fail_at(at, error)
    writer = FakeWriter(**{} if stage == "done" else {stage: fail})
    done: list[int] = []

    def after(number: int) -> None:
        if stage == "done":
            fail(str(number))
        done.append(number)

    counted: list[Written] = []
    works = (work(number, lambda number=number: after(number)) for number in range(20))
    with pytest.raises(Planted) as caught:
        _put_until_it_fails(pipeline(writer, counted, windows=windows), works)
    assert caught.value is error
    assert any(entry.name == "stage" for entry in caught.traceback), "where it happened can be seen"
    stored = at + 1 if stage == "done" else at
    assert writer.stored == [str(number) for number in range(stored)], "all before it, nothing behind it"
    assert done == list(range(at))
    assert [id_ for written in counted for id_ in written.upserted] == writer.stored


@pytest.mark.parametrize("first_fails", [False, True])
def test_the_error_of_a_later_piece_waits_for_the_earlier_one(first_fails: bool) -> None:
    later_failed = threading.Event()
    first, later = Planted("first"), Planted("later")

    def embed(name: str) -> None:
        if name == "1":
            later_failed.set()
            raise later
        assert later_failed.wait(60)
        if first_fails:
            raise first

    writer = FakeWriter(embed)
    line = pipeline(writer, windows=2)
    line.put(work(0))
    line.put(work(1))
    with pytest.raises(Planted) as caught:
        line.finish()
    line.close()
    assert caught.value is (first if first_fails else later)
    assert writer.stored == ([] if first_fails else ["0"])


def test_an_error_of_the_store_ends_threads_that_wait_for_their_turn() -> None:
    """The first piece of the three is still being embedded: those behind it do not wait for it."""
    go, waiting = threading.Event(), threading.Semaphore(0)

    def embed(name: str) -> None:
        if name == "1":
            go.wait(60)
        elif name != "0":
            waiting.release()

    def store(_: str) -> None:
        for _later in range(2):
            assert waiting.acquire(timeout=60)
        raise Planted

    line = pipeline(FakeWriter(embed, store), windows=3)
    with suppress(Planted):  # which may come with the last one
        for number in range(4):
            line.put(work(number))
    with pytest.raises(Planted):
        _again_and_again(line.check)
    _settles(lambda: -len(threads()), -1)
    left = threads()
    go.set()
    line.close()
    assert len(left) == 1


def test_an_error_reaches_whoever_only_looks() -> None:
    line = pipeline(FakeWriter(store=_fail_at(0, Planted())))
    line.put(work(0))
    with pytest.raises(Planted):
        _again_and_again(line.check)
    line.close()


@several
def test_closing_drops_what_waits(windows: int) -> None:
    go = threading.Event()
    writer = FakeWriter(embed=lambda _: go.wait(60))
    line = pipeline(writer, windows=windows)
    line.put(work(0))
    line.put(work(1))
    threading.Timer(0.05, go.set).start()
    line.close()
    line.close()
    assert writer.stored == []
    with pytest.raises(Closed):
        line.put(work(2))


STAGES = st.sampled_from(["embed", "store", "done", "none"])


@given(st.integers(0, 12), STAGES, st.integers(0, 12), st.integers(0, 2**32), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_what_is_stored_is_a_prefix_and_no_mark_is_ahead(
    count: int, stage: str, at: int, seed: int, windows: int
) -> None:
    chance = random.Random(seed)

    def stage_of(name: str) -> Callable[[str], None]:
        fail = _fail_at(at, Planted())

        def run(id_: str) -> None:
            if chance.random() < 0.3:
                time.sleep(chance.random() / 1000)
            if name == stage:
                fail(id_)

        return run

    writer = FakeWriter(stage_of("embed"), stage_of("store"))
    after = stage_of("done")
    line = pipeline(writer, windows=windows)
    failed = False
    try:
        for number in range(count):
            line.put(work(number, lambda number=number: after(str(number))))
        line.finish()
    except Planted:
        failed = True
    finally:
        line.close()
    assert failed == (stage != "none" and at < count)
    assert writer.stored == [str(number) for number in range(len(writer.stored))]
    assert all(mark <= stored for mark, stored in writer.marks)
    assert len(writer.stored) == count or failed


# --------------------------------------------------------------------------------------------------------- read ahead


def test_one_page_is_read_ahead() -> None:
    given: list[int] = []

    def pages() -> Iterator[int]:
        for number in range(10):
            given.append(number)
            yield number

    with read_ahead([pages()], lambda _: 1) as ahead:
        assert given == [], "nothing is read before it is asked for"
        assert next(ahead) == 0
        _settles(lambda: len(given), 3)
        assert given == [0, 1, 2], "one waits, one is in the reader's hands"
        assert list(ahead) == list(range(1, 10))


@pytest.mark.parametrize("size", [1, 100])
def test_several_streams_come_mixed_each_in_its_order(size: int) -> None:
    streams = [iter([(stream, number) for number in range(30)]) for stream in range(3)]
    with read_ahead(streams, lambda _: size, max_bytes=50) as ahead:
        items = list(ahead)
    for stream in range(3):
        assert [number for where, number in items if where == stream] == list(range(30))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_the_error_of_a_reader_comes_after_what_it_read(at: int) -> None:
    error = Planted()

    def failing() -> Iterator[int]:
        yield from range(at)
        raise error

    read: list[int] = []
    with read_ahead([failing()], lambda _: 1) as ahead, pytest.raises(Planted) as caught:
        _again_and_again(lambda: read.append(next(ahead)))
    assert caught.value is error
    assert read == list(range(at))


def test_the_error_of_one_reader_ends_the_others() -> None:
    def failing() -> Iterator[int]:
        raise Planted
        yield 0

    def endless() -> Iterator[int]:
        while True:
            yield 1

    with read_ahead([endless(), failing(), endless()], lambda _: 1) as ahead, pytest.raises(Planted):
        _again_and_again(lambda: next(ahead))


def test_the_seconds_of_all_readers_count() -> None:
    seconds: list[float] = []

    def slow() -> Iterator[int]:
        for number in range(2):
            time.sleep(0.02)
            yield number

    with read_ahead([slow(), slow()], lambda _: 1, seconds.append) as ahead:
        list(ahead)
    assert len(seconds) == 4
    assert min(seconds) >= 0.02


# ------------------------------------------------------------------------------------------------------ a whole sync


def filled(source: MemorySource, rows: int) -> None:
    for number in range(rows):
        source.put("100", f"{number:05d}", MAKTX=f"pump {number}", MTART="F")


OPTIONS = SyncOptions(page_rows=5, window=10, lease_wait=0.0)


def test_a_stop_keeps_everything_that_was_read(ends: Ends, source: MemorySource) -> None:
    filled(source, 500)
    asked: list[int] = []
    report = sync(SPEC, ends, OPTIONS, stop=lambda: bool(asked.append(1)) or len(asked) == 13)
    assert (report.stopped, report.read, report.upserted) == (True, 65, 65)
    status = ends.store.status(SPEC.name)
    assert status is not None
    assert status.rows == 65
    assert source.pages_read <= 13 + 2
    again = sync(SPEC, ends, OPTIONS)
    assert (again.unchanged, again.upserted) == (65, 435)


def test_what_was_read_before_the_line_went_dead_is_stored(ends: Ends, source: MemorySource) -> None:
    filled(source, 500)
    source.fail_after_pages = 30
    with pytest.raises(ConnectionResetError):
        sync(SPEC, ends, OPTIONS)
    status = ends.store.status(SPEC.name)
    assert status is not None
    assert status.rows == 150


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(SystemExit, marks=pytest.mark.slow)])
def test_an_interrupted_caller_leaves_no_thread_and_no_lease(
    ends: Ends, source: MemorySource, error: type[BaseException]
) -> None:
    filled(source, 500)
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(1)
        if len(asked) == 20:
            raise error
        return False

    with pytest.raises(error):
        sync(SPEC, ends, OPTIONS, stop=interrupted)
    assert threads() == []
    report = sync(SPEC, ends, OPTIONS)
    assert report.upserted + report.unchanged == 500


def test_a_lost_lease_ends_the_run_soon(ends: Ends, source: MemorySource) -> None:
    filled(source, 5000)
    calls: list[int] = []
    apply = ends.store.apply

    def lose(*given: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise LeaseLost("another worker has taken over")
        apply(*given)

    ends.store.apply = lose
    with pytest.raises(LeaseLost):
        sync(SPEC, ends, OPTIONS)
    assert len(calls) == 3, "nothing was written after it"
    assert source.pages_read < 100


class RangedSource(MemorySource):
    """Divides its keys as a database would."""

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        keys = sorted(self.data)
        borders = [None, *(keys[len(keys) * part // parts] for part in range(1, parts)), None]
        return [KeyRange(borders[part], borders[part + 1]) for part in range(parts)]

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        if within is None:
            raise AssertionError("a large table is read in ranges")
        keys = [
            key
            for key in sorted(self.data)
            if (within.after is None or key > within.after) and (within.upto is None or key <= within.upto)
        ]
        for start in range(0, len(keys), size):
            yield self.rows(query, keys[start : start + size])


def test_a_large_table_is_read_in_ranges(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "ROWS_PER_READER", 50)
    source = RangedSource()
    filled(source, 201)
    ranged = Ends(source, ends.store, ends.embedder)
    report = sync(SPEC, ranged, SyncOptions(page_rows=7, window=10, readers=3))
    assert (report.read, report.upserted) == (201, 201)
    del source.data["100", "00007"]
    source.put("100", "00150", MAKTX="vacuum", MTART="F")
    report = sync(SPEC, ranged, SyncOptions(page_rows=7, window=10, readers=4))
    assert (report.read, report.upserted, report.unchanged, report.deleted) == (200, 1, 199, 1)


def test_a_small_table_is_not_divided(ends: Ends, source: MemorySource) -> None:
    filled(source, 20)
    assert sync(SPEC, ends, SyncOptions(page_rows=7, readers=8)).read == 20


def test_several_windows_store_and_count_the_same(ends: Ends, source: MemorySource, tmp_path: Path) -> None:
    filled(source, 203)
    ends.embedder.refuse = {"pump 60", "pump 61", "pump 199"}
    reports, stored = [], []
    for windows in (1, 3):
        with closing(LocalStore(tmp_path / f"store-{windows}")) as store:
            report = sync(SPEC, replace(ends, store=store), replace(OPTIONS, windows=windows)).as_dict()
            records = [record for page in store.records(SPEC.name) for record in page]
            stored.append([(record.id, record.text, record.content_hash) for record in records])
            reports.append(report | dict.fromkeys(("seconds", "rows_per_second", "stages")))
    assert reports[0]["quarantined"] == 3
    assert reports[0]["tokens"] == 400
    assert reports[1] == reports[0]
    assert stored[1] == stored[0]


def test_equal_texts_are_embedded_once_across_pieces_of_work(ends: Ends, source: MemorySource) -> None:
    for number in range(100):
        source.put("100", f"{number:05d}", MAKTX=f"pump {number % 4}", MTART="F")
    report = sync(SPEC, ends, OPTIONS)
    assert (report.upserted, report.embedded_texts, report.reused_texts) == (100, 4, 96)
