from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import (
    ConnectionLost,
    LeaseLost,
    ModelMismatch,
    RowRejected,
    TextsNotEmbeddable,
    UnknownColumn,
)
from connector.model import ChangeSet, Chunk, ChunkSpec, CollectionSpec, Lease, TableRef
from connector.stores.local.store import LocalStore
from connector.sync import run
from connector.sync.run import Ends, SyncOptions, SyncReport, sync
from connector.sync.verify import verify

SPEC = CollectionSpec(
    "materials", TableRef("S", "MARA"), "{MAKTX}", metadata=("MTART",), chunk=ChunkSpec(max_tokens=4, overlap=1)
)
OPTIONS = SyncOptions(page_rows=3, window=4)
MANY_DELETES = replace(OPTIONS, max_deletes=1.0)


def add_up(report: SyncReport) -> bool:
    return report.read == (report.upserted + report.unchanged + report.empty + report.quarantined + report.superseded)


def fill(source, count: int = 10) -> None:
    for number in range(count):
        source.put("100", f"M{number:03}", MAKTX=f"pump number {number}", MTART="FERT")


def stored(store, spec: CollectionSpec = SPEC) -> dict[str, str]:
    """Text of each stored document, chunks joined."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for page in store.records(spec.name):
        for record in page:
            texts.setdefault(record.id, []).append((record.number, record.text))
    return {id_: " | ".join(text for _, text in sorted(chunks)) for id_, chunks in texts.items()}


def test_first_sync_stores_every_row_once(ends, source, store):
    fill(source)
    report = sync(SPEC, ends, OPTIONS)
    assert (report.read, report.upserted, report.deleted) == (10, 10, 0)
    assert add_up(report)
    assert stored(store)['["100","M007"]'] == "pump number 7"
    assert report.tokens == 30
    assert report.stages["read"] >= 0


@pytest.mark.proves(24)
def test_second_sync_changes_and_embeds_nothing(ends, source, store, embedder):
    fill(source)
    sync(SPEC, ends, OPTIONS)
    before = list(store.records(SPEC.name))
    embedder.texts.clear()
    report = sync(SPEC, ends, OPTIONS)
    assert (report.unchanged, report.upserted, report.embedded_texts) == (10, 0, 0)
    assert embedder.texts == []
    assert [r.record for page in store.records(SPEC.name) for r in page] == [r.record for page in before for r in page]


def test_only_what_changed_is_touched(ends, source, store, embedder):
    fill(source)
    sync(SPEC, ends, OPTIONS)
    embedder.texts.clear()
    source.put("100", "M003", MAKTX="valve", MTART="FERT")
    source.put("100", "NEW", MAKTX="gasket", MTART="ROH")
    del source.data["100", "M005"]
    report = sync(SPEC, ends, OPTIONS)
    assert (report.upserted, report.unchanged, report.deleted) == (2, 8, 1)
    assert sorted(embedder.texts) == ["gasket", "valve"]
    assert '["100","M005"]' not in stored(store)


def test_metadata_change_embeds_nothing_and_keeps_the_vector(ends, source, store, embedder):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    before = {r.id: r.vector.tobytes() for page in store.records(SPEC.name) for r in page}
    embedder.texts.clear()
    source.put("100", "M001", MAKTX="pump number 1", MTART="ROH")
    report = sync(SPEC, ends, OPTIONS)
    assert (report.upserted, report.embedded_texts, embedder.texts) == (1, 0, [])
    records = {r.id: r for page in store.records(SPEC.name) for r in page}
    assert records['["100","M001"]'].metadata["MTART"] == "ROH"
    assert {id_: r.vector.tobytes() for id_, r in records.items()} == before
    assert verify(SPEC, ends).ok


def test_same_texts_are_embedded_once_but_rows_stay_apart(ends, source, store, embedder):
    for number in range(9):
        source.put("100", f"M{number}", MAKTX="the same text", MTART="FERT")
    report = sync(SPEC, ends, OPTIONS)
    assert report.embedded_texts == 1
    assert report.reused_texts == 8
    assert embedder.texts == ["the same text"]
    assert len(stored(store)) == 9


def test_a_row_that_takes_anothers_old_text_gets_it(ends, source, store):
    """Deduping by text hash alone leaves A stale here."""
    source.put("100", "A", MAKTX="alpha", MTART="X")
    source.put("100", "B", MAKTX="beta", MTART="X")
    sync(SPEC, ends, OPTIONS)
    source.put("100", "A", MAKTX="new", MTART="X")
    source.put("100", "C", MAKTX="alpha", MTART="X")
    sync(SPEC, ends, OPTIONS)
    assert stored(store) == {'["100","A"]': "new", '["100","B"]': "beta", '["100","C"]': "alpha"}


def test_blank_rows_are_empty_and_lose_their_old_vectors(ends, source, store):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    source.put("100", "M001", MAKTX="   ", MTART="FERT")
    source.put("100", "M002", MAKTX=None, MTART="FERT")
    report = sync(SPEC, ends, OPTIONS)
    assert (report.empty, report.deleted, report.unchanged) == (2, 0, 1)
    assert list(stored(store)) == ['["100","M000"]']
    assert verify(SPEC, ends).ok
    assert store.status(SPEC.name).empty == 2


def test_long_texts_become_chunks_and_shrink_again(ends, source, store):
    source.put("100", "M", MAKTX="one two three four five six seven", MTART="FERT")
    sync(SPEC, ends, OPTIONS)
    assert stored(store) == {'["100","M"]': "one two three four | four five six seven"}
    source.put("100", "M", MAKTX="one two", MTART="FERT")
    sync(SPEC, ends, OPTIONS)
    assert stored(store) == {'["100","M"]': "one two"}


def test_a_lost_chunk_is_healed(ends, source, store):
    source.put("100", "M", MAKTX="one two three four five six seven", MTART="FERT")
    sync(SPEC, ends, OPTIONS)
    with store.lease(SPEC.name, "vandal", 1) as lease:
        chunk = next(r for page in store.records(SPEC.name) for r in page if r.number == 0)
        drop_all_but_first(store, lease, chunk)
    report = sync(SPEC, ends, OPTIONS)
    assert report.upserted == 1
    assert stored(store) == {'["100","M"]': "one two three four | four five six seven"}


def drop_all_but_first(store, lease: Lease, record) -> None:
    kept = Chunk(record.id, 0, record.text, record.metadata, record.content_hash)
    store.apply(lease, ChangeSet(chunks=[kept], vectors=record.vector[None, :]))


def test_deletes_above_the_brake_are_not_carried_out(ends, source, store):
    fill(source, 10)
    sync(SPEC, ends, OPTIONS)
    for number in range(3):
        del source.data["100", f"M{number:03}"]
    source.put("100", "NEW", MAKTX="gasket", MTART="ROH")
    report = sync(SPEC, ends, OPTIONS)
    assert (report.paused, report.deleted, report.to_delete, report.upserted) == ("max_deletes", 0, 3, 1)
    assert len(stored(store)) == 11
    report = sync(SPEC, ends, replace(OPTIONS, max_deletes=0.5))
    assert (report.paused, report.deleted) == (None, 3)


def test_exactly_the_allowed_share_may_go(ends, source):
    fill(source, 10)
    sync(SPEC, ends, OPTIONS)
    for number in range(2):
        del source.data["100", f"M{number:03}"]
    assert sync(SPEC, ends, OPTIONS).deleted == 2


def test_a_scan_that_breaks_off_deletes_nothing(ends, source, store):
    fill(source, 10)
    sync(SPEC, ends, OPTIONS)
    source.put("100", "M000", MAKTX="changed", MTART="FERT")
    source.pages_read, source.fail_after_pages = 0, 2
    with pytest.raises(ConnectionResetError):
        sync(SPEC, ends, MANY_DELETES)
    assert len(stored(store)) == 10
    source.fail_after_pages = None
    report = sync(SPEC, ends, MANY_DELETES)
    assert add_up(report)
    assert stored(store)['["100","M000"]'] == "changed"


def test_stop_finishes_the_page_and_deletes_nothing(ends, source, store):
    fill(source, 10)
    report = sync(SPEC, ends, OPTIONS, stop=lambda: True)
    assert (report.stopped, report.read, report.upserted) == (True, 3, 3)
    assert store.status(SPEC.name).last_sync is None
    assert sync(SPEC, ends, OPTIONS).upserted == 7


def test_a_text_the_model_cannot_embed_is_quarantined_and_the_others_go_on(ends, source, store, embedder):
    fill(source, 5)
    embedder.refuse = {"pump number 2"}
    report = sync(SPEC, ends, OPTIONS)
    assert (report.upserted, report.quarantined) == (4, 1)
    assert add_up(report)
    (row,) = store.quarantine(SPEC.name)
    assert (row.id, row.stage) == ('["100","M002"]', "embed")
    assert "pump" not in row.reason
    assert verify(SPEC, ends).ok, "a quarantined row is not missing"
    embedder.refuse = set()
    assert sync(SPEC, ends, OPTIONS).upserted == 1
    assert store.quarantine(SPEC.name) == []


def test_attempts_of_a_quarantined_row_count_on(ends, source, store, embedder):
    fill(source, 3)
    embedder.refuse = {"pump number 2"}
    for attempt in (1, 2, 3):
        assert sync(SPEC, ends, OPTIONS).quarantined == 1
        assert [row.attempts for row in store.quarantine(SPEC.name)] == [attempt]


def test_bad_texts_named_one_at_a_time_are_all_set_aside(ends, source, store, embedder, monkeypatch):
    whole = embedder.embed_documents

    def one_at_a_time(texts):
        try:
            return whole(texts)
        except TextsNotEmbeddable as error:
            raise TextsNotEmbeddable("not finite", indices=error.indices[:1]) from None

    monkeypatch.setattr(embedder, "embed_documents", one_at_a_time)
    fill(source, 6)
    embedder.refuse = {f"pump number {number}" for number in (0, 2, 5)}
    report = sync(SPEC, ends, SyncOptions())
    assert (report.upserted, report.quarantined) == (3, 3)
    assert add_up(report)


def test_a_quarantined_row_that_left_the_source_leaves_quarantine(ends, source, store, embedder):
    fill(source, 5)
    embedder.refuse = {"pump number 2"}
    sync(SPEC, ends, OPTIONS)
    del source.data["100", "M002"]
    sync(SPEC, ends, OPTIONS)
    assert store.quarantine(SPEC.name) == []


class PickyStore:
    """Refuses change sets that hold one certain document, as a database refuses a row."""

    def __init__(self, store: LocalStore, refused: str) -> None:
        self._store, self._refused, self.applied = store, refused, 0

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        self.applied += 1
        if any(chunk.id == self._refused for chunk in changes.chunks):
            raise RowRejected("inserted value too large for column SRC_KEY", code=274)
        self._store.apply(lease, changes)


def test_a_row_the_store_refuses_is_isolated(ends, source, store):
    fill(source, 12)
    picky = PickyStore(store, '["100","M004"]')
    report = sync(SPEC, Ends(source, picky, ends.embedder), SyncOptions(page_rows=12, window=12))
    assert (report.upserted, report.quarantined) == (11, 1)
    assert add_up(report)
    (row,) = store.quarantine(SPEC.name)
    assert (row.id, row.stage) == ('["100","M004"]', "apply")
    assert picky.applied < 14, "halving, not one by one"


class WatchedStore:
    """Tells how much each change set holds."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.sizes: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        self.sizes.append(len(changes.metadata_only) + len(changes.deleted) + len(changes.quarantined))
        self._store.apply(lease, changes)


@pytest.mark.parametrize("change", [{"MTART": "ROH"}, {"MAKTX": None}, {"MTART": "x" * 200_000}])
def test_changes_that_embed_nothing_are_written_piecemeal_too(ends, source, store, change):
    """One transaction over a whole table would hold its locks for minutes."""
    fill(source, 30)
    sync(SPEC, ends, OPTIONS)
    for values in source.data.values():
        values |= change
    watched = WatchedStore(store)
    report = sync(SPEC, Ends(source, watched, ends.embedder), MANY_DELETES)
    assert report.unchanged == 0
    assert add_up(report)
    assert max(watched.sizes) <= 2 * (OPTIONS.window + OPTIONS.page_rows)
    assert verify(SPEC, ends).ok


@pytest.mark.proves(9)
def test_a_key_read_again_on_a_later_page_supersedes_the_first(ends, source, store, monkeypatch):
    fill(source, 4)
    once = source.pages

    def again(query, size, within=None):
        yield from once(query, size)
        source.put("100", "M003", MAKTX="newer", MTART="FERT")
        yield source.rows(query, [("100", "M003")])

    monkeypatch.setattr(source, "pages", again)
    report = sync(SPEC, ends, SyncOptions(page_rows=3))
    assert (report.read, report.upserted, report.superseded, report.quarantined) == (5, 4, 1, 0)
    assert stored(store)['["100","M003"]'] == "newer"


class SlowToLend:
    """While we wait for the lease, another worker gives the empty collection another model."""

    def __init__(self, store: LocalStore, other) -> None:
        self._store, self._other = store, other

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def lease(self, collection: str, owner: str, wait: float):
        self._store.open(collection, self._other)
        return self._store.lease(collection, owner, wait)


@pytest.mark.parametrize("work", [sync, lambda spec, ends, options: verify(spec, ends, repair=True, options=options)])
def test_a_model_changed_while_waiting_for_the_lease_is_noticed(ends, source, store, make_embedder, work):
    fill(source, 3)
    late = Ends(source, SlowToLend(store, make_embedder("words-2")), ends.embedder)
    with pytest.raises(ModelMismatch):
        work(SPEC, late, OPTIONS)
    assert stored(store) == {}


def test_another_model_is_refused_before_anything_is_written(ends, source, store, make_embedder):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    before = stored(store)
    with pytest.raises(ModelMismatch, match="words"):
        sync(SPEC, Ends(source, store, make_embedder("words-2")), OPTIONS)
    assert stored(store) == before


def test_template_and_chunking_changes_are_differences(ends, source, store):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    assert sync(replace(SPEC, template="Material: {MAKTX}"), ends, OPTIONS).upserted == 3
    assert sync(replace(SPEC, template="Material: {MAKTX}", chunk=ChunkSpec(3, 1)), ends, OPTIONS).upserted == 3


@pytest.mark.proves(23)
@pytest.mark.parametrize("key", [("MATNR",), ("MATNR", "MANDT")])
def test_another_key_pauses_and_writes_nothing_until_all_rows_may_go(ends, source, store, key):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    before = stored(store)
    source.data = {tuple(reversed(old))[: len(key)]: values for old, values in source.data.items()}
    source.table = replace(source.table, primary_key=key)
    other = replace(SPEC, key=key)
    report = sync(other, ends, OPTIONS)
    assert (report.paused, report.read, report.complete) == ("schema_changed", 0, False)
    assert "the key was MANDT, MATNR at the last sync and is MATNR" in report.notes[0]
    assert "--max-deletes 1" in report.notes[0]
    assert stored(store) == before
    report = sync(other, ends, replace(OPTIONS, max_deletes=1.0))
    assert (report.paused, report.upserted, report.deleted) == (None, 3, 3)
    assert sync(other, ends, OPTIONS).unchanged == len(stored(store)) == 3


def test_another_key_of_an_empty_collection_is_taken(ends, source):
    sync(SPEC, ends, OPTIONS)
    fill(source, 3)
    source.data = {(old[1],): values for old, values in source.data.items()}
    source.table = replace(source.table, primary_key=("MATNR",))
    assert sync(SPEC, ends, OPTIONS).upserted == 3


def test_unknown_column_names_the_setting_and_the_nearest(ends, source):
    with pytest.raises(UnknownColumn, match=r"MAKTXX.*MAKTX"):
        sync(replace(SPEC, template="{MAKTXX}"), ends, OPTIONS)


@pytest.mark.proves(26)
def test_a_stale_lease_cannot_write(ends, source, store):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    with store.lease(SPEC.name, "a", 1) as lease:
        pass
    with store.lease(SPEC.name, "b", 1), pytest.raises(LeaseLost):
        store.apply(replace(lease), ChangeSet(deleted=['["100","M001"]']))
    assert len(stored(store)) == 3


texts = st.sampled_from(["", "  ", "pump", "valve and seal", "one two three four five six", "ÄÖ 😀", "x" * 50])
tables = st.dictionaries(st.tuples(st.sampled_from(["1", "2"]), st.text("ab/\"'", max_size=3)), texts, max_size=12)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=tables, second=tables)
@pytest.mark.proves(11, 12)
def test_whatever_the_table_becomes_one_sync_makes_the_store_equal(first, second, make_ends):
    ends = make_ends()
    for state in (first, second, second):
        ends.source.data = {key: {"MAKTX": text, "MTART": "X"} for key, text in state.items()}
        report = sync(SPEC, ends, MANY_DELETES)
        assert add_up(report)
        live = {key for key, text in state.items() if text.strip()}
        assert len(stored(ends.store)) == len(live)
        assert verify(SPEC, ends).ok
    assert report.upserted == report.deleted == 0
    ends.store.close()


def test_progress_reaches_the_observer_and_stages_the_report(ends, source, monkeypatch):
    class Watcher:
        def __init__(self) -> None:
            self.done: list[tuple[int, int]] = []

        def progress(self, done: int, total: int) -> None:
            self.done.append((done, total))

        def event(self, name: str) -> None: ...

    fill(source, 7)
    watcher = Watcher()
    monkeypatch.setattr(time, "perf_counter", count().__next__)  # so that no stage takes 0.000 s
    report = sync(SPEC, ends, OPTIONS, watcher)
    assert watcher.done == [(3, 7), (6, 7), (7, 7)]
    assert set(report.stages) == {"read", "render", "tokenize", "embed", "apply"}
    assert all(report.stages.values())


def test_a_wait_for_another_worker_ends_when_asked(ends, source, store, monkeypatch):
    monkeypatch.setattr(run, "_LEASE_SLICE_SECONDS", 0.1)
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    with store.lease(SPEC.name, "other", 1):
        started = time.monotonic()
        report = sync(SPEC, ends, OPTIONS, stop=lambda: True)
        assert time.monotonic() - started < 20
        assert (report.stopped, report.read) == (True, 0)
        with pytest.raises(LeaseLost, match="other"):
            sync(SPEC, ends, replace(OPTIONS, lease_wait=0.2))
    assert sync(SPEC, ends, OPTIONS).unchanged == 3


def test_the_key_columns_are_remembered(ends, source, store):
    fill(source, 1)
    sync(SPEC, ends, OPTIONS)
    assert store.status(SPEC.name).key == ("MANDT", "MATNR")


def test_an_index_that_cannot_be_built_is_a_note_not_a_failure(ends, source, store, monkeypatch):
    def refuse(collection: str) -> None:
        raise ConnectionLost("building the index took longer than the communication timeout", code=-10807)

    monkeypatch.setattr(store, "optimise", refuse)
    fill(source, 3)
    report = sync(SPEC, ends, OPTIONS)
    assert report.upserted == 3
    assert "index" in report.notes[0]


def test_report_has_the_promised_keys(ends, source):
    fill(source, 1)
    promised = (
        "collection read upserted unchanged empty quarantined superseded deleted paused embedded_texts reused_texts "
        "tokens seconds rows_per_second stages blocks repeated_blocks"
    )
    assert set(promised.split()) <= sync(SPEC, ends, OPTIONS).as_dict().keys()


def test_store_survives_reopening(ends, source, store, tmp_path: Path):
    fill(source, 3)
    sync(SPEC, ends, OPTIONS)
    store.close()
    again = LocalStore(tmp_path / "store")
    assert sync(SPEC, Ends(source, again, ends.embedder), OPTIONS).unchanged == 3
    again.close()
