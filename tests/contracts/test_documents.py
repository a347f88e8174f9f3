"""What documents that clients write are promised, on both stores (`hana` is the emulator): all of a call or nothing,
nothing embedded in vain, writers at the same time, and no mixing with collections of tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import BadDocument, LeaseLost, ModelMismatch, TextsNotEmbeddable, WrongOrigin
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import (
    NO_TABLE,
    ChangeSet,
    Checkpoint,
    ChunkSpec,
    CollectionSpec,
    Lease,
    StoredText,
    TableRef,
    Vectors,
)
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.records import given_id, stored_id
from connector.stores.state import LeaseTimes
from connector.stores.store import VectorStore
from connector.sync.documents import Documents, NewDocument, Turn, delete
from connector.sync.schema import check_origin
from hana_emulator.testing import Emulator

SPEC = CollectionSpec("notes", NO_TABLE, "", ("id",), chunk=ChunkSpec(8, 2))
QUICK = LeaseTimes(ttl=5, renew=1, poll=0.02)
Opener = Callable[[], VectorStore]
local_first = pytest.mark.parametrize("another", ["local", pytest.param("hana", marks=pytest.mark.slow)], indirect=True)


class Counting:
    """The hashing embedder; counts the texts it embeds, and has no vector for those that hold the word poison."""

    def __init__(self, embedder: EngineEmbedder) -> None:
        self._embedder = embedder
        self.model, self.fingerprint = embedder.model, embedder.fingerprint
        self.dimension, self.max_tokens = embedder.dimension, embedder.max_tokens
        self.count_tokens, self.split = embedder.count_tokens, embedder.split
        self.embed_query, self.database_model = embedder.embed_query, embedder.database_model
        self.embedded: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        bad = [index for index, text in enumerate(texts) if "poison" in text]
        if bad:
            raise TextsNotEmbeddable("no finite vector", indices=bad)
        self.embedded += texts
        return self._embedder.embed_documents(texts)

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        return self.embed_documents(texts), self.count_tokens(texts)


@pytest.fixture
def embedder() -> Iterator[Counting]:
    embedder = EngineEmbedder(load_engine(EngineOptions(model="hash:16")))
    yield Counting(embedder)
    embedder.close()


@pytest.fixture(params=["local", "hana"])
def another(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same place once more, as another process would."""
    with ExitStack() as stack:

        def make() -> VectorStore:
            store: VectorStore
            if request.param == "local":
                store = LocalStore(tmp_path, lease_times=QUICK)
                stack.callback(store.close)
                return store
            emulator: Emulator = request.getfixturevalue("emulator")
            login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
            pool = HanaPool(ConnectionOptions(**login, encrypt=False), size=4)
            stack.callback(pool.close)
            return HanaStore(pool, request.getfixturevalue("hana_schema"), lease_times=QUICK)

        yield make


@pytest.fixture
def store(another: Opener) -> VectorStore:
    return another()


@pytest.fixture
def notes(store: VectorStore, embedder: Counting) -> Documents:
    return Documents(SPEC, store, embedder, Turn())


def texts(store: VectorStore, *ids: str) -> list[StoredText]:
    return store.view("notes").texts([stored_id(id_) for id_ in ids])


def contents(store: VectorStore) -> dict[str, list[tuple[str, Any]]]:
    """Chunks with their metadata, by id. Each of its own vector, whole, with a hash that fits."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for page in store.records("notes"):
        for record in sorted(page, key=lambda record: (record.id, record.number)):
            assert record.id is not None
            assert record.vector is not None
            assert np.linalg.norm(record.vector) == pytest.approx(1, abs=1e-3)
            found.setdefault(given_id(record.id), []).append((record.text or "", record.metadata))
    return found


# ---------------------------------------------------------------------------------------------------------- one writer


def test_nothing_is_embedded_in_vain(store: VectorStore, notes: Documents, embedder: Counting) -> None:
    both = [NewDocument("a", "one text", {"v": 1}), NewDocument("b", "another text")]
    first = notes.put(both)
    assert (first.ids, first.upserted, first.unchanged, first.embedded_texts) == (["a", "b"], 2, 0, 2)
    embedder.embedded.clear()
    again = notes.put(both)
    assert (again.upserted, again.unchanged, again.embedded_texts) == (0, 2, 0)
    changed = notes.put([NewDocument("a", "one text", {"v": 2}), NewDocument("b", "another text, longer")])
    assert (changed.upserted, changed.embedded_texts) == (2, 1)
    assert embedder.embedded == ["another text, longer"]
    assert contents(store) == {"a": [("one text", {"v": 2})], "b": [("another text, longer", {})]}


@local_first
def test_a_shorter_text_leaves_no_chunk_of_the_longer_one(store: VectorStore, notes: Documents) -> None:
    notes.put([NewDocument("a", " ".join(f"word{n}" for n in range(40)), {"v": 1})])
    assert len(texts(store, "a")) > 3
    notes.put([NewDocument("a", " ".join(f"word{n}" for n in range(40)), {"v": 2})])
    assert {each.metadata["v"] for each in texts(store, "a")} == {2}
    notes.put([NewDocument("a", "short")])
    assert contents(store) == {"a": [("short", {})]}


def test_one_bad_document_and_nothing_of_the_call_is_stored(store: VectorStore, notes: Documents) -> None:
    notes.put([NewDocument("a", "as it was")])
    for bad, words in (
        (NewDocument("b", "poison"), "no finite vector"),
        (NewDocument("b", "half \ud800"), "unpaired surrogate"),
        (NewDocument("\udc00", "fine"), "the id contains an unpaired surrogate"),
        (NewDocument("b", "fine", {"x": "y" * 100_001}), "bytes as JSON"),
    ):
        with pytest.raises(BadDocument, match=words) as caught:
            notes.put([NewDocument("a", "replaced"), NewDocument("new", "new"), bad])
        assert (caught.value.index, str(caught.value).startswith("documents[2]:")) == (2, True)
    assert contents(store) == {"a": [("as it was", {})]}


ODD_IDS = ['["x"]', "record:1", "ä😀", " ", "a\0b", "\n", "x" * 1990, "null", "1"]


@local_first
def test_any_text_is_an_id(store: VectorStore, notes: Documents) -> None:
    documents = [NewDocument(id_, f"text {number}") for number, id_ in enumerate(ODD_IDS)]
    assert notes.put([*documents, NewDocument("other", "other text")]).ids == [*ODD_IDS, "other"]
    for number, id_ in enumerate(ODD_IDS):
        assert [each.text for each in texts(store, id_)] == [f"text {number}"]
    assert delete(SPEC, store, [*ODD_IDS, ODD_IDS[0], "never", "x" * 3000], Turn()) == len(ODD_IDS)
    assert list(contents(store)) == ["other"]


@local_first
def test_the_model_of_what_is_stored_is_kept(store: VectorStore, notes: Documents, embedder: Counting) -> None:
    notes.put([NewDocument("a", "text")])
    embedder.fingerprint = "another model"
    with pytest.raises(ModelMismatch):
        Documents(SPEC, store, embedder, Turn()).put([NewDocument("b", "text")])
    assert list(contents(store)) == ["a"]


# ------------------------------------------------------------------------------------------------------- two writers


class _Meanwhile:
    """A store with which somebody else writes just before the lease is taken."""

    def __init__(self, store: VectorStore, act: Callable[[], object]) -> None:
        self._store = store
        self._act = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def lease(self, collection: str, owner: str, wait: float) -> Iterator[Lease]:
        self._act()
        with self._store.lease(collection, owner, wait) as lease:
            yield lease


@pytest.mark.parametrize("theirs", ["another text", None])
def test_what_another_writer_changes_after_the_comparison_is_seen_under_the_lease(
    store: VectorStore, notes: Documents, embedder: Counting, another: Opener, theirs: str | None
) -> None:
    """Ours differs in its metadata alone when it is compared; then another replaces the text, or deletes it."""
    notes.put([NewDocument("a", "a text", {"v": 1})])
    other = another()

    def act() -> None:
        if theirs is None:
            delete(SPEC, other, ["a"], Turn())
        else:
            Documents(SPEC, other, embedder, Turn()).put([NewDocument("a", theirs, {"v": "theirs"})])

    ours: Any = _Meanwhile(store, act)
    Documents(SPEC, ours, embedder, Turn()).put([NewDocument("a", "a text", {"v": 2})])
    assert contents(store) == {"a": [("a text", {"v": 2})]}


def test_two_processes_that_write_the_same_ids_leave_each_document_of_one_of_them(
    another: Opener, embedder: Counting
) -> None:
    start, stores = threading.Barrier(4), [another() for _ in range(4)]

    def write(writer: int) -> None:
        documents = Documents(SPEC, stores[writer], embedder, Turn(wait=30))
        start.wait(20)
        for number in range(4):
            documents.put([NewDocument(id_, f"text {number} of {writer}", {"w": writer}) for id_ in "abcdef"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    found = contents(another())
    assert sorted(found) == list("abcdef")
    written = {chunks[0][0] for chunks in found.values()}
    assert len(written) == 1, "a call is one transaction, so the last one has all of them"
    for ((text, metadata),) in found.values():
        assert text == f"text 3 of {metadata['w']}"


@local_first
def test_a_writer_that_keeps_the_collection_is_waited_for_and_then_told(
    store: VectorStore, notes: Documents, embedder: Counting, another: Opener
) -> None:
    notes.put([NewDocument("a", "text")])
    hasty = Documents(SPEC, another(), embedder, Turn(wait=0.05))
    with store.lease("notes", "somebody", 1), pytest.raises(LeaseLost, match="being written by 'somebody'"):
        hasty.put([NewDocument("a", "another text")])
    turn = Turn(wait=0.05)
    with turn.lock, pytest.raises(LeaseLost, match="other requests"):
        Documents(SPEC, store, embedder, turn).put([NewDocument("a", "another text")])
    assert contents(store) == {"a": [("text", {})]}


# ---------------------------------------------------------------------------------------------------- of one kind only


def test_rows_of_a_table_and_documents_of_clients_are_not_mixed(
    store: VectorStore, notes: Documents, embedder: Counting
) -> None:
    notes.put([NewDocument("a", "text")])
    with pytest.raises(WrongOrigin, match="documents that clients wrote"):
        check_origin("notes", store.open("notes", embedder))
    of_table = CollectionSpec("materials", TableRef("S", "MARA"), "{MAKTX}")
    checkpoint = Checkpoint(source=str(of_table.source), key=("MATNR",))
    store.open("materials", embedder)
    held: AbstractContextManager[Lease] = store.lease("materials", "sync", 1)
    with held as lease:
        store.apply(lease, ChangeSet(checkpoint=checkpoint))
    as_documents = CollectionSpec("materials", NO_TABLE, "", ("id",))
    with pytest.raises(WrongOrigin, match=r"holds rows of S\.MARA"):
        Documents(as_documents, store, embedder, Turn()).put([NewDocument("a", "text")])
    with pytest.raises(WrongOrigin, match=r"holds rows of S\.MARA"):
        delete(as_documents, store, ["a"], Turn())
