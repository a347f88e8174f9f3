"""What every vector store promises, tried on each of them: `local`, `hana` on the emulator (`hana-half` with vectors
of half precision), and a live HANA when
HANA_TEST_DSN names one (hdb://user:password@host:port/SCHEMA; the schema must exist and may be written to).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.errors import (
    BadFilter,
    ConfigurationError,
    LeaseLost,
    ModelMismatch,
    RowRejected,
    RowsRejected,
    UnknownCollection,
)
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Checkpoint, Chunk, Lease, QuarantinedRow
from connector.stores import filters
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.state import LeaseTimes
from connector.stores.store import VectorStore
from tests.filter_oracle import matches

DIMENSION = 8
PATIENT = LeaseTimes(ttl=60, renew=5, poll=0.05)
"""Nobody loses a lease because the machine did something else for a while."""
QUICK = LeaseTimes(ttl=2, renew=0.3, poll=0.05)
_numbers = itertools.count(1)


@dataclass
class Model:
    """Stands for an embedder; stores ask it for nothing else."""

    model: str = "model-a"
    fingerprint: str = "fingerprint-a"
    dimension: int = DIMENSION
    max_tokens: int = 10
    database_model: None = None
    texts: list[str] = field(default_factory=list)


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal(shape)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def chunk(id_: str, number: int = 0, **metadata: Any) -> Chunk:
    return Chunk(id_, number, f"text of {id_} {number}", metadata, bytes([number]) * 32)


def changes(*chunks: Chunk, vectors: np.ndarray | None = None, **more: Any) -> ChangeSet:
    return ChangeSet(list(chunks), unit(len(chunks), DIMENSION) if vectors is None else vectors, **more)


def kept(store: VectorStore, vectors: np.ndarray) -> np.ndarray:
    """Return the vectors as the store keeps them."""
    return vectors.astype(np.float16).astype(np.float32) if getattr(store, "_half", False) else vectors


Opener = Callable[..., VectorStore]


LIVE = os.environ.get("HANA_TEST_DSN", "")
HALF = pytest.param("hana-half", marks=pytest.mark.slow)
PLACES = ["local", "hana", HALF, *([pytest.param("hana-live", marks=pytest.mark.hana_live)] if LIVE else [])]


def first_on(often: str) -> pytest.MarkDecorator:
    """On this store each time; on the others only with the slow tests."""
    places = [place if place == often else pytest.param(place, marks=pytest.mark.slow) for place in ("local", "hana")]
    return pytest.mark.parametrize("another", [*places, *PLACES[2:]], indirect=True)


@pytest.fixture(params=PLACES)
def another(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same place once more, as another worker would."""
    with ExitStack() as stack:
        if request.param == "local":

            def make(**options: Any) -> VectorStore:
                store = LocalStore(tmp_path / "store", lease_times=PATIENT, **options)
                stack.callback(store.close)
                return store
        else:
            connection, schema = _hana(request)

            def make(**options: Any) -> VectorStore:
                pool = HanaPool(connection, size=4)
                stack.callback(pool.close)
                usual = {"vector_type": "half" if request.param == "hana-half" else "real"}
                return HanaStore(pool, schema, lease_times=PATIENT, **(usual | options))

        yield make


def _hana(request: pytest.FixtureRequest) -> tuple[ConnectionOptions, str]:
    if request.node.callspec.params["another"] != "hana-live":
        emulator = request.getfixturevalue("emulator")
        schema = request.getfixturevalue("shared_schema")
        login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
        return ConnectionOptions(**login, encrypt=False, communication_timeout=30), schema
    at = urlsplit(LIVE)
    login = {"host": at.hostname, "port": at.port or 443, "user": at.username, "password": unquote(at.password or "")}
    return ConnectionOptions(**login), at.path.strip("/")


@pytest.fixture
def store(another: Opener) -> VectorStore:
    return another()


@pytest.fixture
def name(store: VectorStore) -> str:
    """A collection of its own for every test."""
    return opened(store)


def opened(store: VectorStore, model: Model | None = None) -> str:
    name = f"contract-{os.getpid()}-{next(_numbers)}"
    store.open(name, model or Model())
    return name


def write(store: VectorStore, name: str, *sets: ChangeSet) -> None:
    with store.lease(name, "writer", 5) as lease:
        for change_set in sets:
            store.apply(lease, change_set)


def stored(store: VectorStore, name: str) -> dict[tuple[str, int], bytes]:
    return {(one.id, one.number): one.content_hash for page in store.stored(name) for one in page}


def records(store: VectorStore, name: str) -> dict[tuple[str | None, int | None], Any]:
    return {(one.id, one.number): one for page in store.records(name) for one in page}


def status(store: VectorStore, name: str) -> Any:
    found = store.status(name)
    assert found is not None
    return found


def ids(store: VectorStore, name: str, where: dict[str, Any] | None = None, k: int = 1000) -> set[str]:
    return {hit.id for hit in store.view(name).search(unit(DIMENSION), k, where)}


# ------------------------------------------------------------------------------------------------------ round trips


@first_on("local")
def test_the_checkpoint_carries_the_key_columns_unless_they_are_too_long(store, name):
    write(store, name, ChangeSet(checkpoint=Checkpoint(rows_read=3, empty=1, key=("MANDT", "/BIC/X"))))
    assert (status(store, name).key, status(store, name).empty) == (("MANDT", "/BIC/X"), 1)
    write(store, name, ChangeSet(checkpoint=Checkpoint(rows_read=3, empty=2, key=("X" * 127,) * 40)))
    assert (status(store, name).key, status(store, name).empty) == ((), 2)


def test_what_is_written_is_read(store, name):
    chunks = [chunk("a", 0, MTART="FERT", N=1, X=1.5, B=True, NIL=None), chunk("a", 1), chunk("b ö 😀", 0)]
    vectors = unit(3, DIMENSION)
    write(store, name, changes(*chunks, vectors=vectors))

    assert stored(store, name) == {(one.id, one.number): one.content_hash for one in chunks}
    found = records(store, name)
    for one, vector in zip(chunks, kept(store, vectors), strict=True):
        record = found[one.id, one.number]
        assert (record.text, record.metadata, record.content_hash) == (one.text, dict(one.metadata), one.content_hash)
        assert record.model == status(store, name).model
        assert record.model.startswith("model-a@")
        assert record.vector.tobytes() == vector.tobytes(), "bit-identical"
    now = status(store, name)
    assert (now.rows, now.chunks, now.foreign, now.dimension, now.generation) == (2, 3, 0, DIMENSION, 1)


def test_long_and_strange_texts_survive(store, name):
    texts = ["", "x" * 300_000, "tab\tnew\nline", "'; DROP TABLE x; --", '{"json": "?"}', "ﷺ 漢字 😀"]
    chunks = [Chunk(f"k{place}", 0, text, {"t": text[:100]}, b"h" * 32) for place, text in enumerate(texts)]
    write(store, name, changes(*chunks))
    found = records(store, name)
    assert [found[f"k{place}", 0].text or "" for place in range(len(texts))] == texts
    assert [found[f"k{place}", 0].metadata["t"] for place in range(len(texts))] == [text[:100] for text in texts]


def test_a_document_is_replaced_whole(store, name):
    write(store, name, changes(chunk("a", 0), chunk("a", 1), chunk("a", 2), chunk("b")), changes(chunk("a", 0, V=2)))
    assert set(stored(store, name)) == {("a", 0), ("b", 0)}
    assert records(store, name)["a", 0].metadata == {"V": 2}


def test_deletion_takes_all_chunks_and_nothing_else(store, name):
    write(
        store, name, changes(chunk("a", 0), chunk("a", 1), chunk("a2"), chunk("b")), ChangeSet(deleted=["a", "never"])
    )
    assert set(stored(store, name)) == {("a2", 0), ("b", 0)}
    assert ids(store, name) == {"a2", "b"}


def test_metadata_alone_keeps_text_and_vector(store, name):
    write(store, name, changes(chunk("a", 0, V=1), chunk("a", 1, V=1)))
    before = records(store, name)
    new = [Chunk("a", number, "", {"V": 2}, b"n" * 32) for number in (0, 1)]
    write(store, name, ChangeSet(metadata_only=new))
    for place, record in records(store, name).items():
        assert (record.metadata, record.content_hash, record.text) == ({"V": 2}, b"n" * 32, before[place].text)
        assert record.vector.tobytes() == before[place].vector.tobytes()
        assert record.record == before[place].record, "the record stays where it is"
    assert ids(store, name, {"V": 2}) == {"a"}
    assert ids(store, name, {"V": 1}) == set()


def test_one_change_set_does_everything_at_once(store, name):
    write(store, name, changes(chunk("gone"), chunk("meta", 0, V=1), chunk("new", 7)))
    everything = changes(
        chunk("new", 0),
        deleted=["gone"],
        metadata_only=[Chunk("meta", 0, "", {"V": 2}, b"m" * 32)],
        quarantined=[QuarantinedRow("bad", "render", "COLUMN X")],
        checkpoint=Checkpoint(rows_read=3, empty=1),
    )
    write(store, name, everything)
    assert set(stored(store, name)) == {("new", 0), ("meta", 0)}
    assert (status(store, name).quarantined, status(store, name).empty) == (1, 1)


def test_what_others_wrote_is_seen_after_reopening(store, name, another):
    write(store, name, changes(chunk("a"), checkpoint=Checkpoint(rows_read=9, empty=2)))
    store.close()
    again = another()
    checkpoint = again.open(name, Model())
    assert (checkpoint.rows_read, checkpoint.empty) == (9, 2)
    assert checkpoint.last_sync is not None
    assert abs(checkpoint.last_sync - datetime.now(UTC)) < timedelta(minutes=1)
    assert status(again, name).last_sync == checkpoint.last_sync
    assert ids(again, name) == {"a"}


@first_on("local")
def test_opening_is_idempotent_and_starts_without_a_checkpoint(store, another):
    name = opened(store)
    assert another().open(name, Model()) == store.open(name, Model()) == Checkpoint()


@first_on("hana")
def test_many_chunks_come_in_pages(store, name):
    count = 2500
    chunks = [chunk(f"k{number:05}") for number in range(count)]
    write(store, name, *(changes(*chunks[at : at + 1000]) for at in range(0, count, 1000)))
    assert len(stored(store, name)) == count
    assert len(records(store, name)) == count
    assert status(store, name).rows == count


def test_collections_are_apart(store):
    one, other = opened(store), opened(store)
    write(store, one, changes(chunk("a")))
    write(store, other, changes(chunk("a"), chunk("b"), quarantined=[QuarantinedRow("q", "render", "r")]))
    write(store, one, ChangeSet(deleted=["a"]))
    assert (stored(store, one), set(stored(store, other))) == ({}, {("a", 0), ("b", 0)})
    assert (status(store, one).quarantined, status(store, other).quarantined) == (0, 1)


def test_a_collection_nobody_opened(store):
    assert store.status("never-opened") is None
    for call in (
        lambda: store.view("never-opened").search(unit(DIMENSION), 1),
        lambda: store.view("never-opened").keyword("text", 1),
        lambda: store.view("never-opened").vectors([]),
        lambda: list(store.stored("never-opened")),
        lambda: list(store.records("never-opened")),
        lambda: store.quarantine("never-opened"),
        lambda: store.optimise("never-opened"),
        lambda: store.lease("never-opened", "me", 0).__enter__(),
    ):
        with pytest.raises(UnknownCollection, match="never-opened"):
            call()


# ---------------------------------------------------------------------------------------------------- all or nothing

BAD_VECTORS = {
    "nan": np.full((1, DIMENSION), np.nan, np.float32),
    "infinite": np.full((1, DIMENSION), np.inf, np.float32),
    "zero": np.zeros((1, DIMENSION), np.float32),
    "too long": unit(1, DIMENSION) * 2,
    "other dimension": unit(1, DIMENSION + 1),
    "too many": unit(2, DIMENSION),
}


@first_on("local")
@pytest.mark.parametrize("vectors", BAD_VECTORS.values(), ids=BAD_VECTORS.keys())
@pytest.mark.proves(21)
def test_vectors_that_are_no_unit_vectors_are_refused(store, name, vectors):
    write(store, name, changes(chunk("a", 0, V=1)))
    with pytest.raises(RowRejected) as raised:
        write(store, name, changes(chunk("a", 0, V=2), vectors=vectors, deleted=["a"]))
    assert not any(character in str(raised.value) for character in "[]"), "no vector in the message"
    assert records(store, name)["a", 0].metadata == {"V": 1}


@pytest.mark.parametrize(
    "bad",
    [
        Chunk("bad", 0, "secret \ud800 word", {}, b"h" * 32),
        Chunk("bad", 0, "text", {"N": float("nan")}, b"h" * 32),
        Chunk("bad", 0, "text", {"S": "\udfff"}, b"h" * 32),
    ],
    ids=["text", "not a number", "metadata"],
)
def test_a_refused_row_leaves_nothing_of_its_change_set(store, name, bad):
    write(store, name, changes(chunk("kept")))
    everything = changes(
        chunk("good"),
        bad,
        deleted=["kept"],
        checkpoint=Checkpoint(rows_read=5),
        quarantined=[QuarantinedRow("q", "s", "r")],
    )
    with pytest.raises(RowRejected) as raised:
        write(store, name, everything)
    assert "secret" not in str(raised.value)
    assert set(stored(store, name)) == {("kept", 0)}
    assert store.quarantine(name) == []
    assert store.open(name, Model()) == Checkpoint()
    write(store, name, changes(chunk("good")))
    assert set(stored(store, name)) == {("kept", 0), ("good", 0)}


@first_on("local")
def test_the_rows_that_are_refused_are_named(store, name):
    """By their places among the chunks and, behind them, the metadata."""
    write(store, name, changes(chunk("described", 0, V=1)))
    good, half = chunk("good"), Chunk("half", 0, "half \ud800", {}, b"h" * 32)
    described = Chunk("described", 0, "", {"V": float("nan")}, b"h" * 32)
    with pytest.raises(RowsRejected) as raised:
        write(store, name, changes(good, half, good, metadata_only=[described]))
    assert set(raised.value.rows) == {1, 3}
    vectors = unit(3, DIMENSION)
    vectors[2] *= np.nan
    with pytest.raises(RowsRejected) as raised:
        write(store, name, changes(good, chunk("b"), chunk("c"), vectors=vectors))
    assert set(raised.value.rows) == {2}
    assert set(stored(store, name)) == {("described", 0)}


# -------------------------------------------------------------------------------------------------------- quarantine


def set_aside(store: VectorStore, name: str, digest: bytes | None, **more: Any) -> QuarantinedRow:
    """The entry after one more attempt."""
    write(store, name, ChangeSet(quarantined=[QuarantinedRow("bad", "embed", "why", digest=digest)], **more))
    (row,) = store.quarantine(name)
    return row


@first_on("local")
def test_attempts_count_on_while_the_content_is_the_same(store, name):
    one, other = b"\0content", b"another!"
    assert [set_aside(store, name, one).attempts for _ in range(3)] == [1, 2, 3]
    assert (set_aside(store, name, other).attempts, set_aside(store, name, other).attempts) == (1, 2)
    assert store.quarantine(name)[0].digest == other
    assert (set_aside(store, name, None).attempts, store.quarantine(name)[0].digest) == (3, None)
    assert (set_aside(store, name, one).attempts, store.quarantine(name)[0].digest) == (4, one)


def test_an_attempt_reads_only_the_entries_it_is_about(store, name, monkeypatch):
    def entries(*numbers: int) -> ChangeSet:
        return ChangeSet(quarantined=[QuarantinedRow(f"q{n}", "embed", "why") for n in numbers])

    write(store, name, entries(*range(600)))
    read, seen = store._database.read, []

    def counting(sql: str, *arguments: Any, **more: Any) -> list[Any]:
        rows = read(sql, *arguments, **more)
        seen.extend(rows if "ATTEMPTS" in sql else [])
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(store._database, "read", counting)
        write(store, name, entries(7))
        assert len(seen) == 1
        write(store, name, entries(*range(599)))
    assert {row.id: row.attempts for row in store.quarantine(name)} == {
        f"q{n}": 3 if n == 7 else 1 if n == 599 else 2 for n in range(600)
    }


@first_on("local")
def test_an_entry_whose_id_cannot_be_stored_is_refused(store, name):
    with store.lease(name, "writer", 0) as lease, pytest.raises(RowRejected):
        store.apply(lease, ChangeSet(quarantined=[QuarantinedRow("\ud800", "embed", "why")]))


@first_on("local")
def test_an_entry_that_is_released_in_the_same_change_set_starts_anew(store, name):
    for _ in range(3):
        set_aside(store, name, b"\0content")
    assert set_aside(store, name, b"\0content", released=["bad"]).attempts == 1
    assert set_aside(store, name, b"\0content").attempts == 2


# ------------------------------------------------------------------------------------------------------------ leases


def test_only_one_owner_at_a_time(store, name, another):
    other = another()
    with store.lease(name, "first", 0) as lease:
        store.apply(lease, changes(chunk("a")))
        with pytest.raises(LeaseLost, match="first"), other.lease(name, "second", 0.1):
            pass
    with other.lease(name, "second", 0) as later:
        assert later.epoch > lease.epoch


@first_on("hana")
def test_waiting_for_a_lease_until_it_is_given_back(store, name, another):
    other, order = another(), []

    def second() -> None:
        with other.lease(name, "second", 60):
            order.append("second in")

    with ThreadPoolExecutor(1) as pool:
        with store.lease(name, "first", 0):
            waiting = pool.submit(second)
            time.sleep(0.3)
            order.append("first out")
        waiting.result(90)
    assert order == ["first out", "second in"]


@first_on("hana")
def test_a_lease_is_renewed_while_it_is_held(store, name, another, monkeypatch):
    monkeypatch.setattr(store, "_times", QUICK)
    with store.lease(name, "first", 0) as lease:
        time.sleep(QUICK.ttl + 0.6)
        with pytest.raises(LeaseLost), another().lease(name, "second", 0):
            pass
        store.apply(lease, changes(chunk("a")))


@first_on("hana")
@pytest.mark.proves(26)
def test_an_expired_lease_is_taken_over_and_its_holder_can_no_longer_write(store, name, another, monkeypatch):
    monkeypatch.setattr(store, "_times", QUICK)
    epoch = store.take_lease(name, "crashed", 1)
    assert isinstance(epoch, int)
    stale = Lease(name, "crashed", epoch)
    parts = [store.begin_part(stale, part) for part in range(2)]
    store.apply(stale, changes(chunk("a")))  # a write renews, so the wait below is a whole ttl
    other = another()
    with other.lease(name, "second", 60) as lease:
        for late in (stale, *parts):
            with pytest.raises(LeaseLost):
                store.apply(late, changes(chunk("b"), deleted=["a"]))
        other.apply(lease, changes(chunk("c")))
        other.begin_part(lease, 1)
        with pytest.raises(LeaseLost):
            store.apply(parts[1], changes(chunk("b")))
    assert set(stored(store, name)) == {("a", 0), ("c", 0)}


def test_a_lease_given_back_is_worth_nothing(store, name):
    with store.lease(name, "first", 0) as lease:
        parts = [store.begin_part(lease, part) for part in range(2)]
    for late in (lease, *parts):
        with pytest.raises(LeaseLost):
            store.apply(late, changes(chunk("a")))
    assert stored(store, name) == {}


def test_the_parts_of_a_lease_write_what_the_lease_would(store, name, another):
    other, bad = another(), QuarantinedRow("bad", "embed", "why")
    with store.lease(name, "first", 0) as lease:
        first, second = (store.begin_part(lease, part) for part in range(2))
        store.apply(first, changes(chunk("a")))
        other.apply(second, replace(changes(chunk("b")), quarantined=[bad]))
        store.apply(lease, changes(chunk("c")))
        other.apply(second, ChangeSet(deleted=["a"], released=["bad"]))
    assert set(stored(store, name)) == {("b", 0), ("c", 0)}
    assert store.quarantine(name) == []


@first_on("local")
def test_a_lease_survives_an_error_inside_it(store, name):
    with pytest.raises(ZeroDivisionError), store.lease(name, "first", 0):
        raise ZeroDivisionError
    with store.lease(name, "second", 0) as lease:
        store.apply(lease, changes(chunk("a")))


# --------------------------------------------------------------------------------------------------------- the model


@first_on("local")
@pytest.mark.parametrize(
    "other", [Model(fingerprint="fingerprint-b"), Model(model="model-b", fingerprint="b", dimension=DIMENSION + 1)]
)
@pytest.mark.proves(25)
def test_vectors_of_another_model_are_refused(store, name, other):
    write(store, name, changes(chunk("a")))
    with pytest.raises(ModelMismatch) as raised:
        store.open(name, other)
    assert "model-a@" in str(raised.value)
    assert f"{other.model}@" in str(raised.value)
    assert "sync" in str(raised.value)
    assert store.open(name, Model()) is not None
    assert set(stored(store, name)) == {("a", 0)}


def test_an_empty_collection_takes_another_model(store, name):
    write(store, name, changes(chunk("a"), checkpoint=Checkpoint(rows_read=1)), ChangeSet(deleted=["a"]))
    assert ids(store, name) == set()
    wide = Model(model="model-b", fingerprint="b", dimension=DIMENSION + 1)
    assert store.open(name, wide) == Checkpoint()
    write(store, name, changes(chunk("w"), vectors=unit(1, DIMENSION + 1)))
    assert [hit.id for hit in store.view(name).search(unit(DIMENSION + 1), 5)] == ["w"]
    assert status(store, name).dimension == DIMENSION + 1


def test_an_empty_collection_somebody_is_about_to_fill_keeps_its_model(store, name, another):
    with store.lease(name, "writer", 0) as lease:
        with pytest.raises(ModelMismatch):
            another().open(name, Model(model="model-b", fingerprint="b"))
        store.apply(lease, changes(chunk("a")))


# -------------------------------------------------------------------------------------------------------- quarantine


def test_quarantine_counts_attempts_and_releases(store, name):
    first = QuarantinedRow("a", "render", "COLUMN X")
    write(store, name, ChangeSet(quarantined=[first, QuarantinedRow("b", "embed", "not finite")]))
    write(store, name, ChangeSet(quarantined=[QuarantinedRow("a", "apply", "code 274")]))
    found = {row.id: row for row in store.quarantine(name)}
    assert found["a"] == QuarantinedRow("a", "apply", "code 274", 2)
    assert found["b"].attempts == 1
    for row in found.values():
        assert abs((datetime.now(UTC) - row.last_seen).total_seconds()) < 60, "by the store's clock, in UTC"
    write(store, name, ChangeSet(released=["a", "never"]))
    assert [row.id for row in store.quarantine(name)] == ["b"]
    write(store, name, ChangeSet(quarantined=[first]))
    assert {row.id: row.attempts for row in store.quarantine(name)} == {"a": 1, "b": 1}


# -------------------------------------------------------------------------------------------------------- searching


@first_on("local")
def test_empty_and_small_collections(store, name):
    assert store.view(name).search(unit(DIMENSION), 10) == []
    assert store.view(name).search(unit(DIMENSION), 10, {"A": 1}) == []
    write(store, name, changes(chunk("a")))
    assert len(store.view(name).search(unit(DIMENSION), 10)) == 1
    assert store.view(name).search(unit(DIMENSION), 0) == []


@first_on("local")
def test_hits_carry_everything(store, name):
    vector = unit(DIMENSION)
    write(store, name, changes(chunk("a", 3, MTART="FERT"), vectors=vector[None, :]))
    (hit,) = store.view(name).search(vector * 5, 1)
    assert (hit.id, hit.text, hit.metadata, hit.number) == ("a", "text of a 3", {"MTART": "FERT"}, 3)
    assert hit.score == pytest.approx(1.0, abs=1e-6)
    assert type(hit.score) is float


@first_on("local")
@pytest.mark.parametrize(
    "bad", [np.full(DIMENSION, np.nan), np.zeros(DIMENSION), unit(DIMENSION + 1), unit(1, DIMENSION)]
)
def test_a_query_without_direction_is_refused(store, name, bad):
    with pytest.raises(ConfigurationError, match="query vector"):
        store.view(name).search(bad, 1)


def test_one_hit_per_document_its_best_chunk(store, name):
    """A document whose hundred chunks outrank all others must not crowd them out."""
    base = np.zeros((1, DIMENSION), np.float32)
    base[0, 0] = 1
    near = base + 0.02 * unit(100, DIMENSION, seed=1)
    far = base + 2 * unit(5, DIMENSION, seed=2)
    vectors = np.concatenate([near, far])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    chunks = [chunk("crowd", number) for number in range(100)] + [chunk(f"single{number}") for number in range(5)]
    write(store, name, changes(*chunks, vectors=vectors.astype(np.float32)))
    hits = store.view(name).search(base[0], 4)
    scores = vectors @ base[0]
    assert hits[0].id == "crowd"
    assert hits[0].number == int(np.argmax(scores[:100]))
    assert [hit.id for hit in hits[1:]] == [f"single{place}" for place in np.argsort(-scores[100:])[:3]]


@first_on("local")
def test_ties_are_broken_by_id(store, name):
    same = np.repeat(unit(1, DIMENSION), 30, axis=0)
    names = [f"k{number:02}" for number in np.random.default_rng(3).permutation(30)]
    write(store, name, changes(*map(chunk, names), vectors=same))
    hits = store.view(name).search(same[0], 7)
    assert [hit.id for hit in hits] == sorted(names)[:7]
    assert len({hit.score for hit in hits}) == 1


@first_on("local")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_search_is_exact_through_churn(store, data):
    """After random insertions, replacements and deletions the best k are those of a plain computation."""
    name = opened(store)
    expected: dict[str, np.ndarray] = {}
    for step in range(data.draw(st.integers(1, 4))):
        touched = data.draw(st.lists(st.integers(0, 40), unique=True, max_size=30))
        removed = data.draw(st.lists(st.integers(0, 40), unique=True, max_size=15))
        names = [f"d{number}" for number in touched if number not in removed]
        vectors = unit(max(1, len(names)), DIMENSION, seed=step * 100 + len(touched))[: len(names)]
        gone = [f"d{number}" for number in removed]
        write(store, name, changes(*map(chunk, names), vectors=vectors, deleted=gone))
        for id_ in gone:
            expected.pop(id_, None)
        expected.update(zip(names, kept(store, vectors).astype(np.float64), strict=True))
        query, k = unit(DIMENSION, seed=step + 7), data.draw(st.integers(1, 50))
        hits = store.view(name).search(query, k)
        asked = kept(store, query).astype(np.float64)
        length = np.linalg.norm(asked)
        scores = {id_: float(each @ asked / np.linalg.norm(each) / length) for id_, each in expected.items()}
        best = sorted(scores, key=lambda id_: (-scores[id_], id_))[:k]
        assert [hit.id for hit in hits] == best
        assert [hit.score for hit in hits] == pytest.approx([scores[id_] for id_ in best], abs=1e-6)


@first_on("hana")
def test_reading_while_another_writes(store, name, another):
    """Readers always see whole change sets: every generation of a document has all its chunks alike."""
    chunks, generations = 4, 12
    write(
        store,
        name,
        changes(*(chunk("doc", n, G=0) for n in range(chunks)), *(chunk(f"o{n}", 0, G=0) for n in range(40))),
    )
    reader, done, seen = another(), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            hits = reader.view(name).search(unit(DIMENSION), 50)
            assert len(hits) == 41
            assert len({hit.metadata["G"] for hit in hits}) == 1, "one search sees one state"
            seen.append(hits[0].metadata["G"])

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            with store.lease(name, "writer", 5) as lease:
                for generation in range(1, generations):
                    new = [chunk("doc", n, G=generation) for n in range(chunks)]
                    new += [chunk(f"o{n}", 0, G=generation) for n in range(40)]
                    store.apply(lease, changes(*new))
                    time.sleep(0.02)
        finally:
            done.set()
        for future in readers:
            future.result(30)
    assert len(set(seen)) > 1
    assert {hit.metadata["G"] for hit in reader.view(name).search(unit(DIMENSION), 50)} == {generations - 1}


# ----------------------------------------------------------------------------------------------------------- filters

ROWS: list[dict[str, Any]] = [
    {"T": text, "N": number, "B": flag, "D": day}
    for text, number, flag, day in [
        ("Pump A-100", 1, True, "2024-01-31"),
        ("pump a-100", 2.5, False, "2024-02-01"),
        ("Ball bearing, sealed", -3, True, "2023-12-24"),
        ("bearing of a ball", 0, False, "2024-01-31"),
        ("100%", 1e6, True, "1999-01-01"),
        ("a_b", 7, None, None),
        ("", None, True, "2024-02-29"),
        (None, 10, False, "2025-06-30"),
        ("Überdruckventil 漢字", 10.0, True, "2024-01-30"),
        ('O\'Brien "quoted" ; --', 3, False, "2024-01-31"),
    ]
]


@pytest.fixture
def filled(store: VectorStore, name: str) -> str:
    rows = [
        {key: value for key, value in row.items() if value is not None or place % 2} for place, row in enumerate(ROWS)
    ]
    write(store, name, changes(*(chunk(f"r{place}", 0, **row) for place, row in enumerate(rows))))
    return name


def expected(where: dict[str, Any]) -> set[str]:
    condition = filters.parse(where)
    assert condition is not None
    return {f"r{place}" for place, row in enumerate(ROWS) if matches(condition, row)}


texts = st.sampled_from(["Pump A-100", "pump a-100", "100%", "a_b", "", "10", "true", 'O\'Brien "quoted" ; --', "zzz"])
numbers = st.sampled_from([1, 2.5, -3, 0, 10, 1e6, 99, -0.5])
days = st.sampled_from(["2024-01-31", "2024-02-01", "1999-01-01", "2030-01-01"]).map(
    lambda day: {"type": "date", "date": day}
)
phrases = st.sampled_from(
    ["pump", "A-100", "ball bearing", "bearing", "BALL", "überdruckventil", "100", "brien", "!!", "漢字"]
)
patterns = st.sampled_from(["P%", "%100%", "a_b", "_", "%", "%bearing%", "p_mp%", "", "%'%", "[P]%", "*", "%漢_", "?%"])


def _compare(field_: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(values, min_size=1, max_size=4)
    return st.one_of(
        values.map(lambda value: {field_: value}),
        st.tuples(st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"]), values).map(
            lambda p: {field_: {p[0]: p[1]}}
        ),
        st.tuples(st.sampled_from(["$in", "$nin"]), several).map(lambda p: {field_: {p[0]: p[1]}}),
        st.tuples(values, values).map(lambda p: {field_: {"$between": list(p)}}),
    )


leaves = st.one_of(
    _compare("T", texts),
    _compare("N", numbers),
    _compare("D", days),
    st.tuples(st.sampled_from(["$eq", "$ne"]), st.booleans()).map(lambda p: {"B": {p[0]: p[1]}}),
    st.tuples(st.sampled_from("TNBDX"), st.sampled_from([None, {"$eq": None}, {"$ne": None}])).map(
        lambda p: {p[0]: p[1]}
    ),
    patterns.map(lambda pattern: {"T": {"$like": pattern}}),
    phrases.map(lambda phrase: {"T": {"$contains": phrase}}),
)
wheres = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"$and": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"$or": parts}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=5,
).filter(lambda where: json.dumps(where).count("$and") + json.dumps(where).count("$or") <= filters.MAX_DEPTH)


@first_on("local")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=wheres)
def test_filters_agree_with_the_plain_evaluation(store, filled, where):
    assert ids(store, filled, where) == expected(where)


@first_on("local")
@pytest.mark.parametrize("where", [{"T": 5}, {"T": True}, {"T": {"$gt": {"type": "date", "date": "2024-01-01"}}}])
def test_a_filter_of_another_type_than_the_data_is_refused(store, filled, where):
    with pytest.raises(BadFilter, match="T as "):
        store.view(filled).search(unit(DIMENSION), 5, where)
    assert ids(store, filled) == {f"r{place}" for place in range(len(ROWS))}, "and the store goes on"


def test_text_and_number_meet_where_the_text_is_a_number(store, name):
    write(store, name, changes(chunk("text", 0, N="5"), chunk("number", 0, N=5), chunk("other", 0, N="6.5")))
    assert ids(store, name, {"N": 5}) == {"text", "number"}
    assert ids(store, name, {"N": "5"}) == {"text", "number"}
    assert ids(store, name, {"N": {"$gt": 5}}) == {"other"}


HOSTILE = ["' OR '1'='1", '"; DROP TABLE records; --', "') OR 1=1 --", "\\", "%' OR 1=1", "${jndi}", "\u2028", "?"]


def test_hostile_values_are_only_values(store, filled):
    for text in HOSTILE:
        for condition in (text, {"$in": [text]}, {"$like": text}, {"$contains": text}, {"$ne": text}):
            assert ids(store, filled, {"T": condition}) == expected({"T": condition}), condition
        with pytest.raises(BadFilter):
            store.view(filled).search(unit(DIMENSION), 5, {text: 1})


def test_long_patterns_and_texts(store, name):
    text = "ab" * 4000 + "c"
    write(store, name, changes(chunk("long", 0, T=text), chunk("short", 0, T="ab" * 100)))
    wanted: dict[str, set[str]] = {
        "ab" * 2000 + "%c": {"long"},
        "%" + "ab" * 50 + "%": {"long", "short"},
        "ab%" + "ab" * 45 + "%" + "ab" * 5: {"short"},
        "%" + "ab" * 45 + "%b_": {"long"},
        "ab" * 2000 + "b%": set(),
    }
    assert {pattern: ids(store, name, {"T": {"$like": pattern}}) for pattern in wanted} == wanted


@first_on("local")
def test_bad_filters_are_refused_before_anything_is_asked(store, filled):
    with pytest.raises(BadFilter, match=r"\$eqq.*known are \$eq"):
        store.view(filled).search(unit(DIMENSION), 5, {"T": {"$eqq": 1}})


@first_on("local")
def test_more_documents_asked_for_than_fit(store, filled):
    assert len(store.view(filled).search(unit(DIMENSION), 100, {"N": {"$gt": 5}})) == len(expected({"N": {"$gt": 5}}))


@first_on("local")
def test_filter_and_ranking_agree(store, name):
    """The best among those that fit, in order, for filters that keep few, many and all."""
    count = 3000
    vectors = unit(count, DIMENSION, seed=5)
    chunks = [chunk(f"k{number:04}", 0, S=number % 100, H=number % 2) for number in range(count)]
    write(
        store,
        name,
        *(changes(*chunks[at : at + 1000], vectors=vectors[at : at + 1000]) for at in range(0, count, 1000)),
    )
    query = unit(DIMENSION, seed=6)
    scores = vectors.astype(np.float64) @ query.astype(np.float64)
    for where, keep in (
        ({"S": 7}, range(7, count, 100)),
        ({"H": 1}, range(1, count, 2)),
        ({"H": {"$gte": 0}}, range(count)),
    ):
        best = sorted(keep, key=lambda number: -scores[number])[:10]
        assert [hit.id for hit in store.view(name).search(query, 10, where)] == [f"k{number:04}" for number in best]


def test_names_that_are_mapped_are_found_under_both(another):
    names = {"/BIC/X": "_BIC_X"}
    probe = opened(another())
    store = another(names={probe: names})
    store.open(probe, Model())
    write(store, probe, changes(chunk("a", 0, _BIC_X="1"), chunk("b", 0, _BIC_X="2")))
    assert ids(store, probe, {"/BIC/X": "1"}) == ids(store, probe, {"_BIC_X": "1"}) == {"a"}
    assert ids(another(), probe, {"/BIC/X": "2"}) == {"b"}, "the mapping is recorded in the store"
