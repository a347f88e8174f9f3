"""What every store promises to a caller who may see only some rows: the answer of a store that holds no other rows, to
the last digit of a score. On `local`, and on `hana` (the emulator) by text search and by LIKE.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app.src.service.collections import VisibleView
from app.src.service.relevance import Calibrations
from app.src.service.search import explanation, hybrid
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import ChangeSet, Chunk, CollectionStatus, Filter, Hit
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.ranking import FEWEST_ROWS
from connector.stores.store import VectorStore
from tests.statements import statements

DIMENSION = 8
NAME = "people"
WITHIN: Filter = {"OWNER": {"$in": ["100", "200"]}}
SEEN, HIDDEN = ("100", "200"), ("300", "0100", "", None)
VOCABULARY = ["pump", "seal", "hose", "valve", "steel", "Öl", "M-4711/2", "100195", "000000000000100195", "of", "and"]
SECRETS = ["Mueller 88000", "Mueller-salary-88000"]
QUERIES = [*SECRETS, "pump", "pump seal", "M-4711/2", "100195 hose", "of and valve", "steel Öl pump hose seal"]


class Model:
    model, fingerprint, dimension, max_tokens = "model", "fingerprint", DIMENSION, 10
    database_model = None


@dataclass(frozen=True)
class Row:
    id: str
    owner: str | None
    texts: tuple[str, ...]
    vectors: np.ndarray

    @property
    def seen(self) -> bool:
        return self.owner in SEEN

    @property
    def chunks(self) -> list[Chunk]:
        metadata = {"OWNER": self.owner, "N": len(self.texts[0]) % 7}
        return [Chunk(self.id, at, text, metadata, bytes(32)) for at, text in enumerate(self.texts)]


def rows(seed: int, seen: int, hidden: int) -> list[Row]:
    """In their order of writing, which is the same for the visible ones in both stores."""
    chosen, numbers = random.Random(seed), np.random.default_rng(seed)
    owners = [chosen.choice(SEEN) for _ in range(seen)] + [chosen.choice(HIDDEN) for _ in range(hidden)]
    chosen.shuffle(owners)
    made = []
    for at, owner in enumerate(owners):
        count = chosen.choice([1, 1, 1, 2, 3])
        words = VOCABULARY if owner in SEEN else [*VOCABULARY, *SECRETS, "pump", "pump"]
        texts = tuple(" ".join(chosen.choices(words, k=chosen.randint(1, 12))) for _ in range(count))
        vectors = numbers.standard_normal((count, DIMENSION))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        made.append(Row(f'["{seed:03}{at:05}"]', owner, texts, vectors.astype(np.float32)))
    # A caller who wants to read the others needs a row with the words that may be visible.
    own = Row('["mine"]', "100", tuple(SECRETS), made[0].vectors[:1].repeat(2, axis=0))
    return [*made, own]


def write(store: VectorStore, made: list[Row], name: str = NAME, deleted: tuple[str, ...] = ()) -> None:
    store.open(name, Model())  # type: ignore[arg-type]
    chunks = [chunk for row in made for chunk in row.chunks]
    vectors = np.concatenate([row.vectors for row in made]) if made else np.empty((0, DIMENSION), np.float32)
    with store.lease(name, "writer", 5) as lease:
        store.apply(lease, ChangeSet(chunks, vectors, deleted=list(deleted)))


PLACES: dict[str, list[pytest.MarkDecorator]] = {
    "local": [],
    "hana": [pytest.mark.slow],
    "hana by LIKE": [pytest.mark.slow],
}
"""The local store each time."""


@pytest.fixture(params=[pytest.param(place, marks=marks) for place, marks in PLACES.items()])
def stores(
    request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[VectorStore, VectorStore]]:
    """One for all rows, one for those that may be seen."""
    with ExitStack() as stack:
        if request.param == "local":
            local = LocalStore(tmp_path / "all"), LocalStore(tmp_path / "seen")
            for each in local:
                stack.callback(each.close)
            yield local
            return
        if request.param == "hana by LIKE":
            monkeypatch.setattr(HanaStore, "_searches_texts", lambda self, table: False)
        emulator, schema = request.getfixturevalue("emulator"), request.getfixturevalue("hana_schema")
        login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
        pool = stack.enter_context(HanaPool(ConnectionOptions(**login, encrypt=False), size=2))
        pool.execute(f'CREATE SCHEMA "{schema}_SEEN"')
        stack.callback(pool.execute, f'DROP SCHEMA "{schema}_SEEN" CASCADE')
        yield HanaStore(pool, schema), HanaStore(pool, f"{schema}_SEEN")


def told(hits: list[Hit]) -> list[tuple[Any, ...]]:
    """All of a hit but the number of its record, which the store gives away in order of writing."""
    return [(hit.id, hit.score, hit.text, hit.metadata, hit.number) for hit in hits]


def assert_same_answers(stores: tuple[VectorStore, VectorStore], seed: int, within: Filter | None = WITHIN) -> None:
    chosen = random.Random(seed)
    vector = np.random.default_rng(seed + 1).standard_normal(DIMENSION).astype(np.float32)
    vector /= np.linalg.norm(vector)
    for query in QUERIES:
        k, where = chosen.choice([1, 3, 10, 1000]), chosen.choice([None, None, {"N": {"$gte": 3}}])
        asked = [store.view(NAME, row_filter=within).keyword(query, k, where) for store in stores]
        assert told(asked[0]) == told(asked[1]), (query, k, where)
        blended = [explained(VisibleView(store, status_of(store), within), query, vector, k, where) for store in stores]
        assert blended[0] == blended[1], (query, k, where)
    for k in (1, 7, 1000):
        near = [store.view(NAME, row_filter=within).search(vector, k) for store in stores]
        assert told(near[0]) == told(near[1])
    keyed = [store.view(NAME, row_filter=within).keyed("0000", 50) for store in stores]
    assert told(keyed[0]) == told(keyed[1])
    assert len({store.view(NAME, row_filter=within).sample(10).rows for store in stores}) == 1


def status_of(store: VectorStore) -> CollectionStatus:
    stored = store.status(NAME)
    assert stored is not None
    return stored


def explained(view: VisibleView, query: str, vector: np.ndarray, k: int, where: Filter | None) -> dict[str, Any]:
    """Hybrid search and how it came about. Where rows have much in common that is a mean over them in the order of
    their records' numbers, so scores agree up to rounding."""
    ranked = hybrid(view, query, vector, max(k, 50), where, Calibrations().of(view, None))
    hits = ranked.hits[:k]
    found = explanation(ranked, hits, [hit.id for hit in hits], view.index_use(k, where))
    for hit in found["hits"]:
        hit["score"], hit["cosine"] = round(hit["score"], 9), round(hit["cosine"], 9)
    return found


SIZES = [(40, 200), (FEWEST_ROWS + 50, 60), (30, 1500)]
"""Visible and hidden rows: few, enough for what they have in common, and so many hidden ones that by all rows a word is
common, by the visible ones none."""


@pytest.mark.parametrize(
    ("stores", "seen", "hidden"),
    [
        pytest.param(place, *size, marks=[] if (place, size) == ("hana", SIZES[0]) else marks)
        for place, marks in PLACES.items()
        for size in SIZES
    ],
    indirect=["stores"],
)
def test_answers_are_those_of_a_store_without_hidden_rows(
    stores: tuple[VectorStore, VectorStore], seen: int, hidden: int
) -> None:
    made = rows(seen, seen, hidden)
    write(stores[0], made)
    write(stores[1], [row for row in made if row.seen])
    assert_same_answers(stores, seed=hidden)
    # what is remembered of the rows follows what is written
    gone = tuple(row.id for row in made[::5])
    new = rows(seen + 1, 5, 20)
    for store, kept in ((stores[0], new), (stores[1], [row for row in new if row.seen])):
        write(store, kept, deleted=gone)
    assert_same_answers(stores, seed=hidden)


def test_a_row_that_becomes_visible_counts_from_then_on(stores: tuple[VectorStore, VectorStore]) -> None:
    made = rows(3, 20, 40)
    write(stores[0], made)
    write(stores[1], [row for row in made if row.seen])
    assert_same_answers(stores, seed=1)
    shown = [Row(row.id, "100", row.texts, row.vectors) for row in made if not row.seen][:10]
    with stores[0].lease(NAME, "writer", 5) as lease:
        stores[0].apply(lease, ChangeSet(metadata_only=[chunk for row in shown for chunk in row.chunks]))
    write(stores[1], shown)
    asked = [sorted(told(store.view(NAME, row_filter=WITHIN).keyword("pump seal", 1000))) for store in stores]
    assert [(hit[0], round(hit[1], 12)) for hit in asked[0]] == [(hit[0], round(hit[1], 12)) for hit in asked[1]]


def test_other_collections_of_the_same_store_move_no_score(stores: tuple[VectorStore, VectorStore]) -> None:
    """A collection without row rights may lie beside one that has them."""
    board = [row for row in rows(5, 30, 0)]
    for store in stores:
        write(store, board)
    write(stores[0], rows(6, 10, 300), name="salaries")
    assert_same_answers(stores, seed=2, within=None)


# ------------------------------------------------------------------------------------------------ ids that are hidden


@pytest.mark.parametrize("stores", ["local", "hana"], indirect=True)
def test_a_hidden_id_is_looked_up_as_an_absent_one(stores: tuple[VectorStore, VectorStore]) -> None:
    """By the same statements: the row filter is part of them, so nothing is fetched that has to be compared."""
    made = rows(8, 10, 10)
    write(stores[0], made)
    hidden = next(row.id for row in made if not row.seen)
    sent: dict[str, list[str]] = {}
    for id_ in (hidden, '["absent"]', '["mine"]'):
        stores[0].view(NAME, row_filter=WITHIN).texts([id_])  # what is remembered of the collection
        with statements() as sent[id_]:
            found = stores[0].view(NAME, row_filter=WITHIN).texts([id_])
        assert bool(found) is (id_ == '["mine"]')
    assert sent[hidden] == sent['["absent"]'] == sent['["mine"]']
    assert any("OWNER" in sql for sql in sent[hidden])
