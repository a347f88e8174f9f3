"""The word index of the local store: in step with the records whatever happens, made for stores that have none, and
done without where SQLite has no FTS5."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.errors import RowRejected, StoreCorrupt
from connector.model import ChangeSet, Chunk
from connector.stores.local import keywords as local_keywords
from connector.stores.local import search as filter_cache
from connector.stores.local import store as local
from connector.stores.local.store import LocalStore
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, weight

NAME = "materials"
QUERY = np.eye(4, dtype=np.float32)[0]


class Model:
    model, fingerprint, dimension, max_tokens = "model", "fingerprint", 4, 10
    database_model = None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(tmp_path)) as store:
        store.open(NAME, Model())
        yield store


def write(store: LocalStore, texts: dict[str, str], deleted: tuple[str, ...] = (), name: str = NAME) -> None:
    chunks = [Chunk(id_, 0, text, {"T": text}, bytes(32)) for id_, text in texts.items()]
    vectors = np.tile(QUERY, (len(chunks), 1))
    with store.lease(name, "test", 5) as lease:
        store.apply(lease, ChangeSet(chunks, vectors, deleted=list(deleted)))


def found(store: LocalStore, text: str, k: int = 1000) -> set[str]:
    return {hit.id for hit in store.view(NAME).keyword(text, k)}


def test_versions_without_keyword_search_keep_the_index_in_step(store: LocalStore, tmp_path: Path):
    """They know nothing of it: the triggers do it."""
    write(store, {"a": "pump", "b": "hose"})
    with closing(sqlite3.connect(tmp_path / local.FILE)) as db:
        db.execute("DELETE FROM records WHERE document = 'a'")
        db.execute("UPDATE records SET text = 'valve' WHERE document = 'b'")
        db.commit()
    assert (found(store, "pump"), found(store, "hose"), found(store, "valve")) == (set(), set(), {"b"})


def test_random_writes_leave_the_index_as_if_made_anew(store: LocalStore, tmp_path: Path):
    chosen, vocabulary = random.Random(5), ["pump", "hose", "Öl", "4711", "valve"]
    kept: dict[str, str] = {}
    for _ in range(40):
        texts = {f"k{chosen.randrange(12)}": " ".join(chosen.choices(vocabulary, k=3)) for _ in range(4)}
        gone = tuple(chosen.sample([f"k{number}" for number in range(12)], 2))
        write(store, texts, gone)
        kept = {id_: text for id_, text in (kept | texts).items() if id_ in texts or id_ not in gone}
    for word in vocabulary:
        assert found(store, word) == {id_ for id_, text in kept.items() if word in text.split()}
    asked = [*vocabulary, "pump hose", "Öl 4711 valve"]
    before = {text: store.view(NAME).keyword(text, 99) for text in asked}
    store.close()
    with closing(LocalStore(tmp_path)) as again:
        for text in asked:
            after = again.view(NAME).keyword(text, 99)
            assert after == [replace(hit, score=pytest.approx(hit.score)) for hit in before[text]]


def test_a_refused_change_set_leaves_the_index_alone(store: LocalStore):
    write(store, {"a": "pump"})
    with pytest.raises(RowRejected):
        write(store, {"b": "pump", "c": "half \ud800"}, deleted=("a",))
    assert found(store, "pump") == {"a"}


def test_metadata_alone_leaves_the_words(store: LocalStore):
    write(store, {"a": "pump"})
    with store.lease(NAME, "test", 5) as lease:
        store.apply(lease, ChangeSet(metadata_only=[Chunk("a", 0, "", {"T": "new"}, bytes(32))]))
    (hit,) = store.view(NAME).keyword("pump", 5, {"T": "new"})
    assert (hit.text, hit.metadata) == ("pump", {"T": "new"})


def test_collections_of_one_file_are_apart(store: LocalStore):
    store.open("other", Model())
    write(store, {"a": "pump c1"})
    write(store, {"b": "pump c2", "c": "c1"}, name="other")
    assert found(store, "pump") == {"a"}
    assert found(store, "c2") == set(), "the name of a scope is no text"
    assert {hit.id for hit in store.view("other").keyword("c1 pump", 9)} == {"b", "c"}


def test_accents_do_not_count(store: LocalStore):
    write(store, {"a": "Öl für Motoren", "b": "O\u0308l-Filter"})
    assert found(store, "öl") == found(store, "OL") == found(store, "o\u0308l") == {"a", "b"}


def test_common_words_of_a_large_collection_are_left_out(store: LocalStore):
    write(store, {f"k{number:04}": "the machine" if number else "the gearbox" for number in range(1200)})
    assert found(store, "the gearbox", 2000) == {"k0000"}
    assert len(found(store, "the machine", 2000)) == 1200, "nothing else to look for"
    assert len(found(store, "the", 2000)) == 1200


def words_looked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets each word that the full-text index is asked for from now on."""
    asked: list[str] = []
    holding = local_keywords.holding

    def asking(db: sqlite3.Connection, collection: int, word: Word, texts: Any) -> Any:
        asked.append(word.alternatives[0])
        return holding(db, collection, word, texts)

    monkeypatch.setattr(local_keywords, "holding", asking)
    return asked


def test_common_words_are_looked_for_once_and_anew_after_a_write(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    write(store, {f"k{number:04}": "the machine" if number else "the gearbox" for number in range(1200)})
    asked = words_looked_for(monkeypatch)
    for _ in range(3):
        assert found(store, "machine gearbox") == {"k0000"}
    assert asked == ["machine", *["gearbox"] * 3]
    write(store, {}, deleted=tuple(f"k{number:04}" for number in range(100, 1190)))
    assert len(found(store, "machine gearbox")) == 110, "few texts: no word is too common"


def test_places_of_frequent_words_are_remembered_within_bounds(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    write(store, {f"k{number}": f"pump {'hose' if number % 2 else 'valve'} n{number}" for number in range(200)})
    asked = words_looked_for(monkeypatch)
    first = [store.view(NAME).keyword(text, 200) for text in ("pump hose n7", "hose pump n7")]
    assert asked == ["pump", "hose", "n7", "n7"], "rare words are looked for again"
    assert [hit.id for hit in first[0]] == [hit.id for hit in first[1]]
    monkeypatch.setattr(local_keywords, "FREQUENT_REMEMBERED", 2)
    asked.clear()
    for text in ("valve", "hose", "valve", "hose", "pump", "hose", "valve"):
        assert len(found(store, text, 200)) == (200 if text == "pump" else 100)
    assert asked == ["valve", "hose", "pump", "valve"], "the least recently used go first"
    write(store, {}, deleted=("k1", "k3"))
    assert len(found(store, "hose", 200)) == 98


def test_the_best_are_found_below_many_that_a_filter_refuses(store: LocalStore):
    texts = {f"k{number:04}": "pump" for number in range(900)} | {"long": "pump with a very long description"}
    write(store, texts)
    assert [hit.id for hit in store.view(NAME).keyword("pump", 3, {"T": {"$ne": "pump"}})] == ["long"]
    assert [hit.id for hit in store.view(NAME).keyword("pump", 3)] == ["k0000", "k0001", "k0002"], "ties by id"


@pytest.mark.parametrize("others", [0, 1, 9])
def test_rankings_are_those_of_scoring_and_sorting_every_text(store: LocalStore, others: int):
    """Among `others` rows of another collection for each row."""
    chosen, vocabulary = random.Random(others), [*"abcdefgh", *(f"w{number}" for number in range(60))]
    texts = {f"k{chosen.random()}": " ".join(chosen.choices(vocabulary, k=chosen.randint(1, 6))) for _ in range(300)}
    store.open("other", Model())
    for number, (id_, text) in enumerate(texts.items()):
        if number % 20 == 0:
            write(store, {f"o{number}-{more}": "a b c w1" for more in range(20 * others)}, name="other")
        write(store, {id_: text})
    mean = sum(len(text.split()) for text in texts.values()) / len(texts)

    def expected(asked: list[str], ids: list[str]) -> list[tuple[str, float]]:
        holders = [{id_ for id_, text in texts.items() if word in text.split()} for word in asked]
        worth = [weight(len(each), len(texts)) for each in holders]
        scores = dict[str, float]()
        for id_ in ids:
            had = [each for each, holder in zip(worth, holders, strict=True) if id_ in holder]
            length = len(texts[id_].split()) / mean
            score = sum(had) / (1 + SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * length))
            if had:
                scores[id_] = score + (sum(worth) if 1 < len(asked) == len(had) else 0)
        return sorted(scores.items(), key=lambda each: (-round(each[1], 9), each[0]))

    for turn in range(40):
        asked = chosen.sample(vocabulary, chosen.randint(1, 5))
        k, some = chosen.choice([1, 5, 40, 400]), chosen.sample(sorted(texts), 150)
        within = {"T": {"$in": [texts[id_] for id_ in some]}} if turn % 2 else None
        ids = [id_ for id_ in texts if within is None or texts[id_] in within["T"]["$in"]]
        hits = store.view(NAME).keyword(" ".join(asked), k, within)
        best = expected(asked, ids)[:k]
        assert [hit.id for hit in hits] == [id_ for id_, _ in best], (turn, asked)
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in best])


def test_what_is_remembered_of_texts_is_what_a_new_look_finds(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Down to the scores, whatever came, went or changed its metadata meanwhile."""
    monkeypatch.setattr(local, "TOMBSTONES_KEPT", 3)
    chosen, queries = random.Random(6), ["pump", "pump hose", "valve steel pump"]
    for turn in range(30):
        texts = {f"k{chosen.randrange(20)}": " ".join(chosen.choices(queries, k=3)) for _ in range(5)}
        write(store, texts, tuple(chosen.sample([f"k{number}" for number in range(20)], 4)))
        if turn % 3 == 0:
            with store.lease(NAME, "test", 5) as lease:
                described = [Chunk(f"k{chosen.randrange(20)}", 0, "", {"T": "new"}, bytes(32))]
                store.apply(lease, ChangeSet(metadata_only=described))
        if turn % 7 == 0:
            store.optimise(NAME)
        with closing(LocalStore(tmp_path)) as fresh:
            for text in queries:
                for within in (None, {"T": "new"}, {"T": {"$in": list(texts.values())}}):
                    asked = [each.view(NAME, row_filter=within).keyword(text, 99) for each in (store, fresh)]
                    assert asked[0] == asked[1], (turn, text, within)


def test_keys_remembered_are_those_that_a_new_look_finds(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = random.Random(7)
    for turn in range(30):
        keys = [
            f'["{chosen.choice([100, 0])}","{chosen.randrange(150):0{chosen.choice([1, 4, 7])}}"]' for _ in range(9)
        ]
        write(store, dict.fromkeys(keys[:6], "pump"), tuple(keys[6:]))
        with closing(LocalStore(tmp_path)) as fresh:
            for number in ("1", "12", "7", "149", "012", "0007", "00", "100"):
                asked = [each.view(NAME).keyed(number, 99) for each in (store, fresh)]
                with monkeypatch.context() as scanning:
                    scanning.setattr(local_keywords, "HOLDERS", -1)
                    asked.append(store.view(NAME).keyed(number, 99))
                assert asked[0] == asked[1] == asked[2], (turn, number)


def test_rewritten_rows_count_once(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    answers = list[Any]()

    def asked(*given: Any) -> Any:
        answers.append(holders(*given))
        return answers[-1]

    holders = local_keywords.key_holders
    monkeypatch.setattr(local_keywords, "key_holders", asked)
    monkeypatch.setattr(local_keywords, "HOLDERS", 4)
    write(
        store,
        {f'["12{number}"]': "pump" for number in range(4)} | {f'["{number}"]': "hose" for number in range(40, 60)},
    )
    for text in ("valve", "hose", "steel"):
        assert len(store.view(NAME).keyed("12", 9)) == 4
        write(store, {'["121"]': text, '["123"]': text})
    assert [len(each) for each in answers] == [4, 4, 4]
    assert [hit.text for hit in store.view(NAME).keyed("12", 9)] == ["pump", "steel", "pump", "steel"]


def test_a_number_with_leading_zeros_is_not_sought_within_others(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_keywords, "HOLDERS", 4)
    write(store, {f'["{number}12"]': "pump" for number in range(1, 9)} | {'["M-000012"]': "seal", '["1000012"]': "nut"})
    with store.view(NAME)._read(None) as (db, found, _):
        holders = local_keywords.key_holders(db, store._keys, found.id, "000012")
    assert holders is not None
    assert len(holders) == 2
    assert {hit.text for hit in store.view(NAME).keyed("000012", 9)} == {"seal", "nut"}


def test_keys_are_remembered_within_bounds(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_keywords, "TEXTS_REMEMBERED", 300)  # 3,600 bytes
    for name in (NAME, "others"):
        store.open(name, Model())
        write(store, {f'["{"x" * 300}{number}"]': "pump" for number in range(10)}, name=name)
        assert len(store.view(name).keyed("7", 9)) == 1
        assert len(store._keys) == 1


def test_texts_are_remembered_within_bounds(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_keywords, "TEXTS_REMEMBERED", 25)
    write(store, {f"k{number}": "pump" for number in range(10)})
    cache = store._texts
    for number in range(6):
        within = {"T": {"$in": ["pump", str(number)]}}
        assert len(store.view(NAME, row_filter=within).keyword("pump", 99)) == 10
        assert len(cache) == min(number + 1, 2), "two sets of ten fit"
    monkeypatch.setattr(filter_cache, "FILTERS", 1)
    assert found(store, "pump") == {f"k{number}" for number in range(10)}
    assert len(cache) == 1


@pytest.mark.parametrize("size", ["NULL", "x'01ffffffffffff7f'", "'text'"])
def test_damaged_lengths_are_told(store: LocalStore, tmp_path: Path, size: str):
    write(store, {"a": "pump"})
    with closing(sqlite3.connect(tmp_path / local.FILE)) as db:
        db.execute(f"UPDATE keywords_docsize SET sz = {size}")
        db.commit()
    with pytest.raises(StoreCorrupt, match="the index of words"):
        store.view(NAME).keyword("pump", 5)
