"""A plan says what the next sync does, on both stores and after any edits, and writes nothing."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import ModelMismatch, PermissionRefused, TextsNotEmbeddable, UnknownColumn
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChunkSpec, CollectionSpec
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import FILE, LocalStore
from connector.stores.store import VectorStore
from connector.sync.plan import Plan, PlanOptions, plan
from connector.sync.reconcile import FREE_DELETES
from connector.sync.run import Ends, SyncOptions, SyncReport, sync
from hana_emulator.testing import Emulator
from tests.connector.conftest import MATERIALS, MemorySource, WordEmbedder

SPEC = CollectionSpec("plans", MATERIALS, "{MAKTX}", metadata=("MTART",), chunk=ChunkSpec(max_tokens=4, overlap=1))
QUICK = PlanOptions(page_rows=3, measure_seconds=None)
_names = itertools.count(1)


def named(name: str) -> CollectionSpec:
    return CollectionSpec(name, SPEC.source, SPEC.template, metadata=SPEC.metadata, chunk=SPEC.chunk)


def planned(ends: Ends, spec: CollectionSpec = SPEC, options: PlanOptions = QUICK) -> Plan:
    return plan(spec, ends.source, ends.store, ends.embedder, options)


@pytest.fixture
def source() -> MemorySource:
    source = MemorySource()
    for number in range(10):
        source.put("100", f"{number:02}", MAKTX=f"text number {number}", MTART="ROH")
    return source


# ------------------------------------------------------------------------------------------------- agreement with sync


@pytest.fixture(scope="module")
def hana_store(emulator: Emulator) -> Iterator[HanaStore]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    with HanaPool(ConnectionOptions(**login, encrypt=False), size=2) as pool:
        pool.execute('CREATE SCHEMA "PLANS"')
        yield HanaStore(pool, "PLANS")
        pool.execute('DROP SCHEMA "PLANS" CASCADE')


@pytest.fixture(scope="module")
def stores(hana_store: HanaStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VectorStore]]:
    local = LocalStore(tmp_path_factory.mktemp("plans") / "store")
    yield {"local": local, "hana": hana_store}
    local.close()


words = st.lists(st.sampled_from(["oil", "pump", "Öl", "steel"]), max_size=9).map(" ".join)
texts = st.one_of(words, words, st.none(), st.just("  "), st.just(float("nan")))
change = st.one_of(st.just("delete"), st.tuples(texts, st.sampled_from(["ROH", "FERT"])))
edits = st.dictionaries(st.integers(0, 9), change, min_size=2, max_size=10)
first = st.lists(words, min_size=6, max_size=10)


def edit(source: MemorySource, changes: dict) -> None:
    for number, change in changes.items():
        key = ("100", f"{number:02}")
        if change == "delete":
            source.data.pop(key, None)
        else:
            source.put(*key, MAKTX=change[0], MTART=change[1])


def ids(store: VectorStore, name: str) -> set[str]:
    return {chunk.id for page in store.stored(name) for chunk in page} if store.status(name) else set()


def assert_foretold(foretold: Plan, done: SyncReport, stored: set[str], after: set[str]) -> None:
    assert (foretold.rows, foretold.unchanged, foretold.empty) == (done.read, done.unchanged, done.empty)
    assert foretold.new == len(after - stored)
    assert foretold.new + foretold.changed == done.upserted
    assert foretold.unreadable == done.quarantined
    assert (foretold.deleted, foretold.emptied) == (done.to_delete, done.emptied)
    assert foretold.paused == done.paused
    assert foretold.tokens == done.tokens
    embedded = foretold.new + foretold.changed - foretold.metadata_only
    if not foretold.chunked:
        assert done.embedded_texts == embedded - foretold.duplicates
    counts = (foretold.new, foretold.changed, foretold.unchanged, foretold.empty, foretold.unreadable)
    assert sum(counts) + foretold.superseded == foretold.rows


@pytest.mark.parametrize("kind", ["local", pytest.param("hana", marks=pytest.mark.slow)])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=first, rounds=st.lists(edits, min_size=1, max_size=3), full=st.booleans())
def test_the_next_sync_does_what_was_planned(stores, kind: str, start: list, rounds: list, full: bool):
    ends = Ends(MemorySource(), stores[kind], WordEmbedder())
    spec = named(f"{kind}-{next(_names)}")
    options = SyncOptions(page_rows=3, max_deletes=1.0 if full else 0.2, window=5)
    for changes in [{number: (text, "ROH") for number, text in enumerate(start)}, *rounds]:
        edit(ends.source, changes)
        before = ids(ends.store, spec.name)
        foretold = planned(ends, spec, PlanOptions(3, options.max_deletes, measure_seconds=None))
        assert ids(ends.store, spec.name) == before
        done = sync(spec, ends, options)
        assert_foretold(foretold, done, before, ids(ends.store, spec.name))


def test_afterwards_there_is_nothing_left_to_do(ends):
    sync(SPEC, ends)
    again = planned(ends)
    assert (again.unchanged, again.new, again.changed, again.deleted, again.tokens) == (10, 0, 0, 0, 0)


def test_a_row_that_cannot_be_rendered_any_more_is_no_deletion(ends, source):
    sync(SPEC, ends)
    source.put("100", "03", MAKTX=float("nan"), MTART="ROH")
    found = planned(ends)
    assert (found.unreadable, found.deleted, found.unchanged) == (1, 0, 9)


def test_many_deletions_are_told_with_the_brake(ends, source):
    sync(SPEC, ends)
    for number in range(3):
        del source.data["100", f"{number:02}"]
    assert ((found := planned(ends)).deleted, found.paused) == (3, "max_deletes")
    allowed = planned(ends, options=PlanOptions(max_deletes=0.3, measure_seconds=None))
    assert (allowed.deleted, allowed.paused) == (3, None)


def test_many_blanks_are_told_with_the_brake(ends, source):
    for number in range(20):
        source.put("100", f"B{number:02}", MAKTX=f"bolt {number}", MTART="ROH")
    sync(SPEC, ends)
    for number in range(FREE_DELETES + 1):
        source.put("100", f"B{number:02}", MAKTX="  ", MTART="ROH")
    assert ((found := planned(ends)).deleted, found.paused) == (0, "max_deletes")
    assert sync(SPEC, ends, SyncOptions(max_deletes=0.2)).paused == "max_deletes"


def test_another_template_changes_every_row(ends):
    sync(SPEC, ends)
    other = CollectionSpec("plans", MATERIALS, "{MAKTX} ({MTART})", metadata=SPEC.metadata, chunk=SPEC.chunk)
    assert (found := planned(ends, other)).changed == 10
    assert found.metadata_only == 0


def test_changed_metadata_are_changed_rows_with_nothing_to_embed(ends, source):
    sync(SPEC, ends)
    source.put("100", "03", MAKTX="text number 3", MTART="FERT")
    assert (found := planned(ends)).changed == found.metadata_only == 1
    assert found.tokens == 0


# ------------------------------------------------------------------------------------------------ nothing is written


def test_no_collection_is_made(stores, source):
    for store in stores.values():
        name = f"never-{next(_names)}"
        found = planned(Ends(source, store, WordEmbedder()), named(name))
        assert (found.new, found.rows) == (10, 10)
        assert store.status(name) is None


def test_without_a_store_everything_is_new(source):
    assert plan(SPEC, source, None, WordEmbedder(), QUICK).new == 10


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def synced_folder(source, tmp_path) -> Path:
    folder = tmp_path / "vectors"
    store = LocalStore(folder)
    sync(SPEC, Ends(source, store, WordEmbedder()))
    store.close()
    return folder


def test_a_store_opened_to_read_is_left_as_it_was(source, synced_folder):
    before = digest(synced_folder)
    store = LocalStore(synced_folder, read_only=True)
    assert planned(Ends(source, store, WordEmbedder())).unchanged == 10
    with pytest.raises(PermissionRefused):
        store.open("other", WordEmbedder())
    store.close()
    assert digest(synced_folder) == before


@pytest.mark.xdist_group("nobody")  # two at once would take the right to pass through a folder from each other
def test_a_store_that_may_only_be_read(source, synced_folder, tmp_path):
    """As another user would: root is stopped by no mode bits, so it becomes nobody for the while."""
    before = digest(synced_folder)
    nobody, root = 65534, os.geteuid() == 0
    folders = [folder for folder in (tmp_path, *tmp_path.parents) if folder.stat().st_uid == os.geteuid()]
    modes = {folder: folder.stat().st_mode & 0o7777 for folder in folders if folder != Path("/")}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o011)
    (synced_folder / FILE).chmod(0o444)
    synced_folder.chmod(0o555)
    try:
        if root:
            os.seteuid(nobody)
        store = LocalStore(synced_folder, read_only=True)
        assert planned(Ends(source, store, WordEmbedder())).unchanged == 10
        store.close()
    finally:
        if root:
            os.seteuid(0)
        synced_folder.chmod(0o755)
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert digest(synced_folder) == before


def test_a_store_to_read_is_not_made(tmp_path):
    with pytest.raises(Exception, match="cannot be used"):
        LocalStore(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_readers_see_what_a_writer_has_not_tidied_yet(source, tmp_path):
    writer = LocalStore(tmp_path / "store")
    sync(SPEC, Ends(source, writer, WordEmbedder()))
    reader = LocalStore(tmp_path / "store", read_only=True)
    assert planned(Ends(source, reader, WordEmbedder())).unchanged == 10
    source.put("100", "99", MAKTX="one more", MTART="ROH")
    sync(SPEC, Ends(source, writer, WordEmbedder()))
    assert planned(Ends(source, reader, WordEmbedder())).unchanged == 11
    reader.close()
    writer.close()


# -------------------------------------------------------------------------------------------------- what sync refuses


def test_another_model_is_refused_as_sync_refuses_it(stores, source):
    for store in stores.values():
        spec = named(f"models-{next(_names)}")
        sync(spec, Ends(source, store, WordEmbedder()))
        with pytest.raises(ModelMismatch, match="words"):
            planned(Ends(source, store, WordEmbedder("words-2")), spec)


def test_another_model_for_an_empty_collection_is_no_obstacle(stores, source):
    for store in stores.values():
        spec = named(f"empty-{next(_names)}")
        store.open(spec.name, WordEmbedder())
        assert planned(Ends(source, store, WordEmbedder("words-2")), spec).new == 10


def test_a_column_that_is_not_there(ends):
    with pytest.raises(UnknownColumn, match="template"):
        planned(ends, CollectionSpec("plans", MATERIALS, "{MAKTY}"))


# ------------------------------------------------------------------------------------------------ tokens and samples


def test_equal_texts_count_once(source, store, embedder):
    for number in range(10, 14):
        source.put("100", f"{number:02}", MAKTX="text number 3", MTART="ROH")
    found = planned(Ends(source, store, embedder))
    assert (found.new, found.duplicates, found.tokens) == (14, 4, 30)


def test_long_texts_are_cut_and_not_truncated(source, store, embedder):
    source.put("100", "20", MAKTX=" ".join("abcdefghij"), MTART="ROH")
    source.put("100", "21", MAKTX=" ".join("abcdefghij"), MTART="ROH")
    found = planned(Ends(source, store, embedder))
    assert (found.chunked, found.truncated, found.duplicates) == (2, 0, 1)
    assert found.tokens == 30 + sum(len(embedder.split(" ".join("abcdefghij"), 4, 1)[n].split()) for n in range(3))


class Careless(WordEmbedder):
    """A splitter that gives pieces longer than the model takes: their ends would be lost."""

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        return [text, text]


def test_what_would_be_lost_is_told(source, store):
    source.put("100", "20", MAKTX=" ".join("abcdefghij"), MTART="ROH")
    assert planned(Ends(source, store, Careless())).truncated == 1


def test_samples_come_from_all_over_the_table(ends, source):
    for number in range(10, 100):
        source.put("100", f"{number:02}", MAKTX=f"text number {number}" if number % 2 else None, MTART="ROH")
    found = planned(ends, options=PlanOptions(7, samples=5, measure_seconds=None))
    assert found.samples == [f"text number {number}" for number in (0, 21, 41, 61, 81)]
    assert planned(ends, options=PlanOptions(7, samples=0, measure_seconds=None)).samples == []


def test_samples_of_a_table_of_one_text(store, embedder):
    source = MemorySource()
    for number in range(30):
        source.put("100", f"{number:02}", MAKTX="the same", MTART="ROH")
    assert planned(Ends(source, store, embedder)).samples == ["the same"]
    assert planned(Ends(MemorySource(), store, embedder)).samples == []


# ------------------------------------------------------------------------------------------------------- the estimate


class Slow(WordEmbedder):
    """Takes a known time for each word."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        super().__init__()
        self._wait = wait

    def embed_documents(self, texts):
        self._wait(0.001 * sum(len(text.split()) for text in texts))
        return super().embed_documents(texts)


def test_the_estimate_follows_the_speed_that_is_measured(source, store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("connector.sync.plan.time.perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    for number in range(1000, 3000):
        source.put("100", f"{number}", MAKTX=f"one two three {number}", MTART="ROH")
    embedder = Slow(wait)
    found = planned(Ends(source, store, embedder), options=PlanOptions(500, measure_seconds=1.0))
    assert found.tokens == 30 + 2000 * 4
    assert found.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert found.estimated_seconds == pytest.approx(found.tokens / 1000, rel=0.01)
    assert now[0] < 1.5, "measuring must not take long"
    assert len(embedder.texts) < 300


def test_nothing_to_embed_takes_the_time_of_reading(ends):
    sync(SPEC, ends)
    before = len(ends.embedder.texts)
    found = planned(ends, options=PlanOptions(measure_seconds=1.0))
    assert found.estimated_seconds == pytest.approx(found.seconds, abs=0.001)
    assert found.tokens_per_second is None
    assert len(ends.embedder.texts) == before


def test_no_estimate_embeds_nothing(ends):
    found = planned(ends)
    assert (found.estimated_seconds, ends.embedder.texts) == (None, [])


class Refusing(WordEmbedder):
    def embed_documents(self, texts) -> np.ndarray:
        raise TextsNotEmbeddable("not finite", indices=range(len(texts)))


def test_a_model_that_gives_nothing_gives_no_estimate(source, store):
    found = planned(Ends(source, store, Refusing()), options=PlanOptions(measure_seconds=0.2))
    assert (found.new, found.estimated_seconds) == (10, None)


class Watching:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))

    def event(self, name: str) -> None: ...


def test_progress_is_told_page_by_page(source, store, embedder):
    watching = Watching()
    plan(SPEC, source, store, embedder, QUICK, watching)
    assert watching.seen == [(3, 10), (6, 10), (9, 10), (10, 10)]


def test_the_languages_of_its_rows_are_told():
    source = MemorySource(key=("MATNR", "SPRAS"), columns=("MAKTX",))
    columns = [replace(column, length=1 if column.name == "SPRAS" else 40) for column in source.table.columns]
    source.table = replace(source.table, columns=tuple(columns))
    texts = {"E": "Seal for the pump shaft", "D": "Dichtung für die Pumpenwelle"}
    for number, language in enumerate("EDED"):
        source.put(f"{number}", language, MAKTX=texts[language])
    source.put("4", "D", MAKTX="DIN 125")
    source.put("5", "D", MAKTX=" ")
    planned = plan(CollectionSpec("plans", MATERIALS, "{MAKTX}"), source, None, WordEmbedder(), QUICK)
    assert (planned.languages, planned.sampled, planned.model) == ({"de": 3, "en": 2}, 5, None)
