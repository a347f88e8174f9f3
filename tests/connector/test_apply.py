"""What becomes of rows that a store refuses, of a store that is overloaded, of engines that fall ill: the others go on,
nothing is blamed on a row that is no fault of its data, and no more is written than needed to find the bad ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from connector import errors
from connector.document.document import Renderer
from connector.errors import (
    ConnectorError,
    DatabaseError,
    LeaseLost,
    Overloaded,
    RowRejected,
    RowsRejected,
    StoreCorrupt,
    TextsNotEmbeddable,
)
from connector.model import ChangeSet, Chunk, Lease
from connector.stores.local.store import LocalStore
from connector.sync.apply import GROW_AFTER, DocumentWriter
from connector.sync.options import StageClock
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import verify
from tests.connector.test_sync import MANY_DELETES, OPTIONS, SPEC, add_up, fill, stored

WIDE = SyncOptions(page_rows=1000, window=1000, max_deletes=1.0)


def id_of(number: int) -> str:
    return f'["100","M{number:03}"]'


class Refusing:
    """A store that takes no rows of `bad`, and says so as `says` does, given the positions of the bad ones."""

    def __init__(self, store: LocalStore, bad: set[str], says: Callable[[list[int]], RowRejected]) -> None:
        self._store, self.bad, self._says = store, bad, says
        self.applied: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        rows = [*changes.chunks, *changes.metadata_only]
        self.applied.append(len(rows))
        bad = [position for position, chunk in enumerate(rows) if chunk.id in self.bad]
        if bad:
            raise self._says(bad)
        self._store.apply(lease, changes)


def unnamed(bad: list[int]) -> RowRejected:
    return RowRejected("a value is too long for its column", code=274)


def naming(positions: list[int]) -> RowsRejected:
    rows = {position: RowRejected(f"row {position} is too long", code=274) for position in positions}
    return RowsRejected("some are too long", rows=rows)


def first_named(bad: list[int]) -> RowsRejected:
    return naming(bad[:1])


def neighbours_named(bad: list[int]) -> RowsRejected:
    return naming([position + 1 for position in bad])


def nonsense_named(bad: list[int]) -> RowsRejected:
    return naming([-5, 10_000])


BAD = {id_of(number) for number in (3, 50, 51, 199)}


# ------------------------------------------------------------------------------------------------ rows that are refused


@pytest.mark.parametrize("says", [unnamed, naming, first_named, neighbours_named, nonsense_named])
def test_bad_rows_are_set_aside_and_all_others_stored_whatever_the_store_says(ends, source, store, says):
    fill(source, 200)
    picky = Refusing(store, BAD, says)
    report = sync(SPEC, Ends(source, picky, ends.embedder), WIDE)
    assert (report.upserted, report.quarantined) == (196, 4)
    assert add_up(report)
    assert {row.id for row in store.quarantine(SPEC.name)} == BAD
    assert {(row.stage, row.attempts) for row in store.quarantine(SPEC.name)} == {("apply", 1)}
    assert len(stored(store)) == 196
    assert verify(SPEC, ends).ok


def test_what_is_named_costs_no_halving(ends, source, store):
    fill(source, 200)
    picky = Refusing(store, BAD, naming)
    sync(SPEC, Ends(source, picky, ends.embedder), WIDE)
    assert picky.applied == [200, 196, *[1, 0] * 4, 0], "all; the good; each bad one alone and set aside; checkpoint"
    assert {row.reason for row in store.quarantine(SPEC.name)} == {"row 0 is too long"}, "its own reason"


def test_many_bad_rows_named_one_at_a_time_are_found_by_halving(ends, source, store):
    """Believing each name would write the rest hundreds of times."""
    fill(source, 200)
    bad = {id_of(number) for number in range(0, 200, 8)}
    picky = Refusing(store, bad, first_named)
    report = sync(SPEC, Ends(source, picky, ends.embedder), WIDE)
    assert (report.upserted, report.quarantined) == (175, 25)
    assert sum(picky.applied) < 2500


def test_a_row_that_was_in_anothers_way_is_stored_at_the_second_try(ends, source, store):
    """As when an identity value was taken by somebody else's row: 301, and the next value is free."""

    class Once(Refusing):
        def apply(self, lease: Lease, changes: ChangeSet) -> None:
            try:
                super().apply(lease, changes)
            finally:
                self.bad = set()

    fill(source, 20)
    report = sync(SPEC, Ends(source, Once(store, {id_of(7)}, naming), ends.embedder), WIDE)
    assert (report.upserted, report.quarantined) == (20, 0)


@pytest.mark.parametrize("says", [unnamed, naming])
def test_metadata_that_the_store_refuses_stops_no_others(ends, source, store, says):
    fill(source, 30)
    sync(SPEC, ends, WIDE)
    for values in source.data.values():
        values["MTART"] = "ROH"
    del source.data["100", "M029"]
    picky = Refusing(store, {id_of(4), id_of(17)}, says)
    report = sync(SPEC, Ends(source, picky, ends.embedder), WIDE)
    assert (report.upserted, report.quarantined, report.deleted) == (27, 2, 1)
    assert add_up(report)
    assert {row.id for row in store.quarantine(SPEC.name)} == {id_of(4), id_of(17)}
    assert len(stored(store)) == 27
    assert verify(SPEC, ends).ok


def test_a_refusal_that_is_no_rows_is_raised(ends, source, store):
    class Broken(Refusing):
        def apply(self, lease: Lease, changes: ChangeSet) -> None:
            if changes.quarantined:
                raise RowRejected("the quarantine cannot be written")
            super().apply(lease, changes)

    fill(source, 5)
    source.put("100", "M002", MAKTX="x", MTART="x" * 200_000)
    with pytest.raises(RowRejected, match="quarantine cannot"):
        sync(SPEC, Ends(source, Broken(store, set(), naming), ends.embedder), WIDE)
    assert store.status(SPEC.name).last_sync is None


# --------------------------------------------------------------------------------------------------- too much at a time


class Small:
    """A store that has memory for so many rows at a time."""

    def __init__(self, store: LocalStore, most: int) -> None:
        self._store, self.most = store, most
        self.sizes: list[int] = []
        self.refused = 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        size = len(changes.chunks) + len(changes.metadata_only) + len(changes.deleted)
        if size > self.most:
            self.refused += 1
            raise Overloaded("out of memory", code=2048)
        self.sizes.append(size)
        self._store.apply(lease, changes)


@pytest.mark.parametrize(("rows", "most"), [(30, 1), (100, 7), (300, 100)])
def test_an_overloaded_store_gets_less_at_a_time(ends, source, store, rows, most):
    fill(source, rows)
    small = Small(store, most)
    report = sync(SPEC, Ends(source, small, ends.embedder), WIDE)
    assert (report.upserted, report.quarantined) == (rows, 0)
    assert store.quarantine(SPEC.name) == []
    assert small.refused <= 9 + rows / most / GROW_AFTER, "it is not asked for too much all the time"
    for values in source.data.values():
        values["MTART"] = "ROH"
    report = sync(SPEC, Ends(source, Small(store, most), ends.embedder), WIDE)
    assert (report.upserted, report.embedded_texts) == (rows, 0), "metadata, too"
    for number in range(5, rows):
        del source.data["100", f"M{number:03}"]
    assert sync(SPEC, Ends(source, Small(store, most), ends.embedder), WIDE).deleted == rows - 5
    assert verify(SPEC, ends).ok


def test_when_the_overload_is_over_the_size_comes_back(ends, source, store, monkeypatch):
    monkeypatch.setattr("connector.sync.apply.CHUNKS_PER_APPLY", 160)
    small = Small(store, 20)
    with store_of(ends, source, small) as write:
        write(range(200))
        assert (max(small.sizes), small.sizes[0]) == (20, 20)
        small.most = 10_000
        small.sizes.clear()
        write(range(200, 2200))
        steps = list(dict.fromkeys(small.sizes))
        assert steps[:4] == [20, 40, 80, 160], "step by step, and never above what it was"
        assert small.sizes.count(40) == small.sizes.count(80) == GROW_AFTER


class store_of:
    """Writes documents of plain texts by one DocumentWriter."""

    def __init__(self, ends: Ends, source, store) -> None:
        self._renderer = Renderer(SPEC, source.table, ends.embedder)
        self._source, self._store, self._ends = source, store, replace(ends, store=store)
        store.open(SPEC.name, ends.embedder)

    def __enter__(self) -> Callable[[Sequence[int]], object]:
        self._held = self._store.lease(SPEC.name, "test", 1)
        writer = DocumentWriter(self._ends, self._held.__enter__(), self._renderer, StageClock())

        def write(numbers: Sequence[int]) -> object:
            keys = [("100", f"N{number}") for number in numbers]
            for key in keys:
                self._source.put(*key, MAKTX="one text", MTART="X")
            rows = self._source.rows(self._renderer.query, keys)
            return writer.write([self._renderer.document(row) for row in rows])

        return write

    def __exit__(self, *_: object) -> None:
        self._held.__exit__(None, None, None)


def test_a_single_row_that_is_too_much_is_an_error_and_no_bad_row(ends, source, store):
    fill(source, 5)
    source.put("100", "LONG", MAKTX=" ".join(f"w{n}" for n in range(60)), MTART="X")
    with pytest.raises(Overloaded):
        sync(SPEC, Ends(source, Small(store, 10), ends.embedder), WIDE)
    assert store.quarantine(SPEC.name) == []
    assert sync(SPEC, ends, WIDE).quarantined == 0
    assert verify(SPEC, ends).ok


# ------------------------------------------------------------------------------------ what is never blamed on a row

INFRASTRUCTURE = [
    *{
        rule["error"]: getattr(errors, rule["error"])(f"planted {rule['meaning']}", code=rule.get("codes", [0])[0])
        for rule in errors.rules()
        if rule["error"] != "RowRejected"
    }.values(),
    LeaseLost("planted"),
    StoreCorrupt("planted"),
    DatabaseError("planted: no space left on the disk"),
    MemoryError("planted"),
    RuntimeError("planted: CUDA error"),
]
STAGES = ["read", "look up", "count tokens", "embed", "insert", "metadata", "set aside", "delete", "checkpoint"]


class Failing:
    """Ends whose `stage` fails for good, from its `nth` call on."""

    def __init__(self, ends: Ends, stage: str, error: Exception, nth: int = 1) -> None:
        self._stage, self._error, self._left = stage, error, nth
        self.ends = Ends(
            self._around(ends.source, pages="read", count="count"),
            self._around(ends.store, stored="look up", quarantine="look up", apply=""),
            self._around(ends.embedder, count_tokens="count tokens", embed_counted="embed"),
        )

    def _around(self, end: object, **stages: str):
        failing = self

        class Around:
            def __getattr__(self, name: str):
                found = getattr(end, name)
                if name not in stages:
                    return found
                return lambda *arguments: failing.call(found, stages[name], *arguments)

        return Around()

    def call(self, work: Callable, stage: str, *arguments):
        stages = [stage] if stage else stages_of(arguments[1])
        if self._stage in stages:
            self._left -= 1
            if self._left < 1:
                raise self._error
        return work(*arguments)


def stages_of(changes: ChangeSet) -> list[str]:
    there = {
        "insert": changes.chunks,
        "metadata": changes.metadata_only,
        "set aside": changes.quarantined,
        "delete": changes.deleted and not changes.quarantined,
        "checkpoint": changes.checkpoint,
    }
    return [stage for stage, present in there.items() if present]


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_that_is_no_rows_leaves_the_quarantine_alone(ends, source, store, embedder, stage):
    """Some rows new, some changed, one blank, one gone, one bad, one in quarantine already; every kind of error."""
    fill(source, 12)
    embedder.refuse = {"pump number 9", "pump number 5 bad"}
    sync(SPEC, ends, WIDE)
    before = store.quarantine(SPEC.name)
    fill(source, 16)
    source.put("100", "M001", MAKTX="pump number 1", MTART="ROH")
    source.put("100", "M002", MAKTX="another text with far more words than fit", MTART="FERT")
    source.put("100", "M003", MAKTX=" ", MTART="FERT")
    del source.data["100", "M004"]
    if stage == "set aside":
        source.put("100", "M005", MAKTX="pump number 5 bad", MTART="FERT")
    for tried, error in enumerate(INFRASTRUCTURE, 1):
        with pytest.raises(type(error), match="planted"):
            sync(SPEC, Failing(ends, stage, error).ends, replace(WIDE, max_attempts=100))
        (after,) = store.quarantine(SPEC.name)
        assert replace(after, attempts=1, last_seen=None) == before[0], type(error)
        assert after.attempts <= tried + 1, "the row that is bad may have been tried"
    report = sync(SPEC, ends, WIDE)
    assert add_up(report)
    assert {row.id for row in store.quarantine(SPEC.name)} == {id_of(9), *([id_of(5)] if stage == "set aside" else [])}
    assert verify(SPEC, ends).ok


# ---------------------------------------------------------------------------------------------------- ill engines


class Ill:
    """An embedder whose vectors of `bad` texts are `value`; `every`: of all texts."""

    def __init__(self, embedder, bad: set[str], value: float, *, every: bool = False) -> None:
        self._embedder, self._bad, self._value, self._every = embedder, bad, value, every

    def __getattr__(self, name: str):
        return getattr(self._embedder, name)

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.array(self._embedder.embed_documents(texts))
        for place, text in enumerate(texts):
            if self._every or text in self._bad:
                vectors[place] *= self._value
        return vectors

    def embed_counted(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        return self.embed_documents(texts), self._embedder.count_tokens(texts)

    def embed_query(self, text: str) -> np.ndarray:
        return self.embed_documents([text])[0]


class Guard:
    """A store that must never be given a vector that is none."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        if changes.vectors is not None:
            assert np.isfinite(changes.vectors).all()
            assert np.allclose(np.linalg.norm(changes.vectors, axis=1), 1, atol=1e-3)
        self._store.apply(lease, changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.1])
def test_vectors_that_are_none_never_reach_the_store(ends, source, store, embedder, value):
    fill(source, 12)
    with np.errstate(invalid="ignore", over="ignore"):
        ill = Ill(embedder, {"pump number 3", "pump number 8"}, value)
        report = sync(SPEC, Ends(source, Guard(store), ill), OPTIONS)
    assert (report.upserted, report.quarantined) == (10, 2)
    assert {(row.id, row.stage) for row in store.quarantine(SPEC.name)} == {(id_of(3), "embed"), (id_of(8), "embed")}
    assert verify(SPEC, ends).ok
    assert sync(SPEC, ends, OPTIONS).upserted == 2


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_an_engine_that_gives_nothing_but_rubbish_is_an_error_and_no_quarantine(ends, source, store, embedder, value):
    fill(source, 12)
    sync(SPEC, ends, OPTIONS)
    before = stored(store)
    for values in source.data.values():
        values["MAKTX"] += " changed"
    with np.errstate(invalid="ignore"), pytest.raises(TextsNotEmbeddable, match=r"plain word.*owl-sap doctor"):
        sync(SPEC, Ends(source, store, Ill(embedder, set(), value, every=True)), OPTIONS)
    assert (store.quarantine(SPEC.name), stored(store)) == ([], before)
    assert sync(SPEC, ends, OPTIONS).upserted == 12


def test_nothing_but_bad_texts_in_a_batch_is_no_ill_engine(ends, source, store, embedder):
    fill(source, 4)
    embedder.refuse = {f"pump number {number}" for number in range(4)}
    assert sync(SPEC, ends, OPTIONS).quarantined == 4
    assert sync(SPEC, ends, OPTIONS).quarantined == 4


def test_vectors_of_another_shape_are_the_engines_defect(ends, source, store, embedder, monkeypatch):
    fill(source, 4)
    monkeypatch.setattr(embedder, "embed_documents", lambda texts: np.ones((len(texts), 3), np.float32))
    with pytest.raises(ValueError, match=r"shape \(4, 3\) for 4 texts"):
        sync(SPEC, ends, WIDE)
    assert store.quarantine(SPEC.name) == []


@pytest.mark.parametrize("nth", [1, 2])
def test_memory_that_runs_out_at_any_call_is_raised_and_the_next_run_goes_on(ends, source, store, embedder, nth):
    torch = pytest.importorskip("torch")
    fill(source, 12)
    failing = Failing(ends, "embed", torch.OutOfMemoryError("CUDA out of memory"), nth).ends
    with pytest.raises(torch.OutOfMemoryError):
        sync(SPEC, failing, OPTIONS)
    assert store.quarantine(SPEC.name) == []
    assert sync(SPEC, ends, MANY_DELETES).quarantined == 0
    assert verify(SPEC, ends).ok


# ---------------------------------------------------------------------------------------------------- the stores' names


def test_both_stores_name_the_rows_that_need_not_be_sent_to_be_refused(store, embedder):
    from connector.stores import records

    good = Chunk("a", 0, "text", {"N": 1}, b"h" * 32)
    changes = ChangeSet(
        chunks=[good, Chunk("b", 0, "half \ud800", {}, b"h" * 32), good],
        metadata_only=[good, Chunk("c", 0, "", {"N": float("nan")}, b"h" * 32)],
    )
    with pytest.raises(RowsRejected) as caught:
        records.checked_metadata(changes)
    assert set(caught.value.rows) == {1, 4}
    assert "unpaired surrogate" in str(caught.value.rows[1])
    vectors = np.eye(3, 16, dtype=np.float32)
    vectors[1] = np.nan
    with pytest.raises(RowsRejected) as caught:
        records.checked_vectors(ChangeSet(chunks=[good] * 3, vectors=vectors), 16)
    assert set(caught.value.rows) == {1}
    assert isinstance(caught.value, ConnectorError)
