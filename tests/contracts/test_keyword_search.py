"""What keyword search promises in every store: `local`, `hana` on the emulator by its text search, and by LIKE as where
HANA refuses that; and a live HANA when HANA_TEST_DSN names one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from connector.errors import BadFilter
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Chunk
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.store import VectorStore

DIMENSION = 4
_names = itertools.count(1)


class Model:
    """Stores ask an embedder for its stamp only."""

    model, fingerprint, dimension, max_tokens = "model", "fingerprint", DIMENSION, 10
    database_model = None


LIVE = os.environ.get("HANA_TEST_DSN", "")
PLACES = ["local", "hana", *([pytest.param("live", marks=pytest.mark.hana_live)] if LIVE else [])]
also_by_like = pytest.mark.parametrize("store", [*PLACES, "hana by LIKE"], indirect=True)


@pytest.fixture(params=[*PLACES, pytest.param("hana by LIKE", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path, monkeypatch) -> Iterator[VectorStore]:
    with ExitStack() as stack:
        if request.param == "local":
            local = LocalStore(tmp_path / "store")
            stack.callback(local.close)
            yield local
            return
        if request.param == "hana by LIKE":
            monkeypatch.setattr(HanaStore, "_searches_texts", lambda self, table: False)
        options, schema = _live() if request.param == "live" else _emulator(request)
        pool = stack.enter_context(HanaPool(options, size=2))
        yield HanaStore(pool, schema)


def _emulator(request: pytest.FixtureRequest) -> tuple[ConnectionOptions, str]:
    emulator, schema = request.getfixturevalue("emulator"), request.getfixturevalue("shared_schema")
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return ConnectionOptions(**login, encrypt=False), schema


def _live() -> tuple[ConnectionOptions, str]:
    at = urlsplit(LIVE)
    login = {"host": at.hostname, "port": at.port or 443, "user": at.username, "password": unquote(at.password or "")}
    return ConnectionOptions(**login), at.path.strip("/")


def fill(store: VectorStore, *texts: str | tuple[str, int, str], **metadata: Any) -> str:
    """A collection of these texts, ids a, b, c ...; or (id, chunk number, text)."""
    name = f"words-{os.getpid()}-{next(_names)}"
    parts = [text if isinstance(text, tuple) else (chr(97 + at), 0, text) for at, text in enumerate(texts)]
    chunks = [Chunk(id_, number, text, metadata | {"ID": id_}, bytes(32)) for id_, number, text in parts]
    vectors = np.eye(DIMENSION, dtype=np.float32)[[at % DIMENSION for at in range(len(chunks))]]
    store.open(name, Model())
    with store.lease(name, "test", 5) as lease:
        store.apply(lease, ChangeSet(chunks, vectors))
    return name


def ids(store: VectorStore, name: str, text: str, k: int = 100, where: Any = None) -> list[str]:
    return [hit.id for hit in store.view(name).keyword(text, k, where)]


@also_by_like
def test_texts_with_all_words_come_first(store):
    name = fill(
        store,
        "seal seal seal",
        "a pump with a seal, and a rather long description of what else there is to it",
        "pump",
        "hose",
    )
    assert ids(store, name, "pump seal")[0] == "b"
    assert set(ids(store, name, "pump seal")) == {"a", "b", "c"}
    assert ids(store, name, "pump seal", k=1) == ["b"]


def test_rare_words_and_short_texts_count_more(store):
    name = fill(store, "pump one", "pump two", "pump three", "rare four", "hose five", "hose six", "valve", "screw")
    assert ids(store, name, "pump rare")[0] == "d"
    longer = fill(store, "bolt in a long text about many other things that nobody asked for", "bolt", "x", "y", "z")
    assert ids(store, longer, "bolt") == ["b", "a"]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("PUMP", "a pump"),
        ("m-4711/2", "type M-4711/2, new"),
        pytest.param("M 4711", "type M-4711/2, new", marks=pytest.mark.slow),
        ("100195", "material 000000000000100195"),
        pytest.param("000000000000100195", "material 000000000000100195", marks=pytest.mark.slow),
        ("0100195", "material 100195"),
        pytest.param("h2o", "H2O filter", marks=pytest.mark.slow),
        pytest.param("Öl", "Öl für Motoren", marks=pytest.mark.slow),
        ("ÖL", "Öl für Motoren"),
        ("code a_b", "code A_B"),
        ('"pump" NOT (x', "a pump"),
        pytest.param("2,5", "2,5 kW", marks=pytest.mark.slow),
    ],
)
def test_what_means_something_in_sap_data_is_found(store, query, text):
    assert ids(store, fill(store, "qqq", text), query) == ["b"]


def test_words_are_found_side_by_side_in_their_order_only(store):
    name = fill(store, "M-4711/2", "M 2 4711", "4711 M 2")
    assert ids(store, name, "M-4711/2") == ["a"]


def test_nothing_found(store):
    name = fill(store, "pump", "100%")
    for text in ("", " ", "!!", "nothing", "★", "%", "_", "*"):
        assert ids(store, name, text) == [], text


def test_one_hit_per_document_and_it_is_the_best_chunk(store):
    of_a = [("a", 0, "hose"), ("a", 1, "a long text in which pump is one word of many"), ("a", 2, "pump pump")]
    name = fill(store, *of_a, ("b", 0, "pump pump pump seal"), ("c", 0, "valve"))
    hits = store.view(name).keyword("pump", 10)
    assert sorted(hit.id for hit in hits) == ["a", "b"]
    assert {hit.id: (hit.number, hit.text) for hit in hits}["a"] == (2, "pump pump")


def test_k_documents_although_one_has_many_chunks(store):
    chunks = [("a", number, "pump") for number in range(300)] + [
        ("b", 0, "pump and more"),
        ("c", 0, "pump and much more"),
    ]
    name = fill(store, *chunks)
    assert ids(store, name, "pump", k=3) == ["a", "b", "c"]


def test_ties_go_by_id_and_k_is_kept(store):
    name = fill(store, *("pump" for _ in range(20)))
    assert ids(store, name, "pump", k=5) == ["a", "b", "c", "d", "e"]
    assert ids(store, name, "pump", k=0) == []


@also_by_like
def test_filters(store):
    name = fill(store, "pump one", "pump two", "hose three", N=1)
    assert ids(store, name, "pump", where={"ID": "b"}) == ["b"]
    assert ids(store, name, "pump", where={"ID": {"$contains": "b"}}) == ["b"]
    assert ids(store, name, "pump hose", where={"$or": [{"ID": "c"}, {"ID": "a"}]}) == ids(
        store, name, "hose pump", where={"ID": {"$in": ["a", "c"]}}
    )
    assert ids(store, name, "pump", where={"ID": "c"}) == []
    for bad in ({"N": {"$foo": 1}}, {"ID": {"$gt": 5}}):
        with pytest.raises(BadFilter):
            store.view(name).keyword("pump", 5, bad)


def test_what_is_replaced_or_deleted_is_found_no_more(store):
    name = fill(store, "pump", "pump")
    with store.lease(name, "test", 5) as lease:
        new = Chunk("a", 0, "hose", {}, bytes(32))
        store.apply(lease, ChangeSet([new], np.eye(DIMENSION, dtype=np.float32)[:1], deleted=["b"]))
    assert ids(store, name, "pump") == []
    assert ids(store, name, "hose") == ["a"]


def test_common_words_of_a_large_collection_are_left_out(store):
    name = fill(store, *((f"k{at:04}", 0, "the gearbox" if at == 7 else "the machine") for at in range(1100)))
    assert ids(store, name, "the gearbox", k=20) == ["k0007"]
    assert len(ids(store, name, "the machine", k=2000)) == 1100


def test_vectors_of_hits(store):
    name = fill(store, *(f"pump {at}" for at in range(7)))
    hits = store.view(name).keyword("pump", 7)
    expected = np.eye(DIMENSION, dtype=np.float32)[[(ord(hit.id) - 97) % DIMENSION for hit in hits]]
    np.testing.assert_array_equal(store.view(name).vectors(hits), expected)
    near = store.view(name).search(expected[0], 7)
    assert store.view(name).vectors(near)[0].tolist() == expected[0].tolist()
    with store.lease(name, "test", 5) as lease:
        store.apply(lease, ChangeSet(deleted=[hits[1].id]))
    assert not store.view(name).vectors(hits)[1].any(), "zeros for one that is gone"
    assert store.view(name).vectors(hits)[2].tolist() == expected[2].tolist()
    assert store.view(name).vectors([]).shape == (0, DIMENSION)
    assert store.view(name).vectors(hits * 200).shape == (1400, DIMENSION)
