"""What every vector store promises about generations: a second edition of a collection is built beside the one that
serves, takes its place in one transaction, and can be gone back from."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from connector import failpoints
from connector.errors import (
    ConfigurationError,
    GenerationChanged,
    GenerationRefused,
    LeaseLost,
    ModelMismatch,
    UnknownCollection,
    UnknownGeneration,
)
from connector.model import (
    ChangeSet,
    Checkpoint,
    ChunkSpec,
    CollectionSpec,
    Generation,
    ModelSource,
    QuarantinedRow,
    Recipe,
    TableRef,
)
from connector.stores.store import VectorStore
from tests.contracts.test_vector_store import (
    DIMENSION,
    Model,
    another,
    changes,
    chunk,
    first_on,
    ids,
    name,
    opened,
    status,
    store,
    stored,
    unit,
    write,
)

__all__ = ["another", "name", "store"]  # fixtures

WIDE = 2 * DIMENSION
OTHER = Model("model-b", "fingerprint-b", WIDE)
DONE = Checkpoint(rows_read=1)


def recipe(name: str, template: str = "{T}", model: str = "b") -> Recipe:
    spec = CollectionSpec(
        name,
        TableRef("S", "T"),
        template,
        key=("A", "B"),
        where="\"A\" = 'ö'",
        metadata=("M", "/BIC/N"),
        chunk=ChunkSpec(9, 2),
    )
    return Recipe(spec, ModelSource(model, "main", "0" * 64, "fp32"))


def wide(*ids: str) -> ChangeSet:
    return ChangeSet([chunk(id_) for id_ in ids], unit(len(ids), WIDE), checkpoint=DONE)


def generations(store: VectorStore, name: str) -> dict[int, Generation]:
    return {each.number: each for each in store.generations.all(name)}


def states(store: VectorStore, name: str) -> dict[int, str]:
    return {number: each.state for number, each in generations(store, name).items()}


@pytest.fixture
def built(store: VectorStore, name: str) -> str:
    """The name of a complete second generation, beside a first one with the rows a, b and old."""
    write(store, name, changes(chunk("a"), chunk("b"), chunk("old"), checkpoint=DONE))
    store.generations.record(name, 1, recipe(name, model="a"))
    beside = store.generations.begin(name, OTHER, recipe(name))
    store.open(beside, OTHER)
    write(store, beside, wide("a", "b", "new"))
    return beside


@first_on("local")
def test_what_there_is_of_a_collection_that_was_never_opened(store):
    assert store.generations.all("never-opened") == []
    with pytest.raises(UnknownCollection, match="never-opened"):
        store.generations.begin("never-opened", OTHER, recipe("never-opened"))
    for call in (store.generations.switch, store.generations.drop):
        with pytest.raises(UnknownGeneration, match="never-opened"):
            call("never-opened", 1)
    store.generations.record("never-opened", 1, recipe("never-opened"))
    assert store.generations.all("never-opened") == []


@first_on("local")
def test_a_first_generation(store, name):
    (only,) = store.generations.all(name)
    assert (only.name, only.number, only.state, only.rows, only.complete) == (name, 1, "active", 0, False)
    assert only.recipe is None
    assert only.created is not None
    assert abs(only.created - datetime.now(UTC)) < timedelta(minutes=1)


@first_on("local")
def test_both_are_kept_apart_and_say_what_they_are(store, name, built):
    assert built == f"{name}@2"
    both = generations(store, name)
    assert {number: each.name for number, each in both.items()} == {1: name, 2: built}
    assert {number: each.state for number, each in both.items()} == {1: "active", 2: "building"}
    assert {number: each.dimension for number, each in both.items()} == {1: DIMENSION, 2: WIDE}
    assert {number: each.rows for number, each in both.items()} == {1: 3, 2: 3}
    assert [each.rows for each in store.generations.all(name, counted=False)] == [None, None]
    assert all(each.complete and each.model.startswith("model-") for each in both.values())
    assert {number: each.recipe for number, each in both.items()} == {1: recipe(name, model="a"), 2: recipe(name)}
    assert (status(store, name).generation, status(store, built).generation) == (1, 2)
    assert (status(store, name).dimension, status(store, built).dimension) == (DIMENSION, WIDE)
    assert set(stored(store, built)) == {("a", 0), ("b", 0), ("new", 0)}
    assert ids(store, name) == {"a", "b", "old"}


def test_a_name_is_no_beginning_of_another(store):
    first = opened(store)
    wild, like = f"{first}_y", f"{first}xy"
    for each in (wild, like):
        store.open(each, Model())
    store.generations.begin(like, OTHER, recipe(like))
    assert set(states(store, first)) == {1}
    assert set(states(store, wild)) == {1}
    assert set(states(store, like)) == {1, 2}


@first_on("local")
def test_an_unfinished_one_of_the_model_is_built_on(store, name, built, another):
    assert another().generations.begin(name, OTHER, recipe(name)) == built
    assert store.generations.begin(name, OTHER, recipe(name, "{T} {M}")) == built, "the next sync heals it in place"
    assert store.generations.begin(name, Model("c", "c", 4), recipe(name)) == f"{name}@3"
    assert states(store, name) == {1: "active", 2: "building", 3: "building"}


@first_on("local")
def test_only_what_was_begun_can_be_opened_and_only_for_its_model(store, name, built):
    with pytest.raises(UnknownCollection, match="@9"):
        store.open(f"{name}@9", OTHER)
    empty = store.generations.begin(name, Model("c", "c", 4), recipe(name))
    for each in (built, empty):
        with pytest.raises(ModelMismatch):
            store.open(each, Model())


@pytest.mark.proves(25)
def test_a_switch_changes_everything_at_once(store, name, built):
    write(store, name, ChangeSet(quarantined=[QuarantinedRow("q1", "render", "r")]))
    write(store, built, ChangeSet(quarantined=[QuarantinedRow("q2", "render", "r"), QuarantinedRow("q3", "s", "r")]))
    store.generations.switch(name, 2)
    retired = f"{name}@1"
    assert {number: (each.name, each.state) for number, each in generations(store, name).items()} == {
        1: (retired, "retired"),
        2: (name, "active"),
    }
    assert (status(store, name).generation, status(store, name).dimension) == (2, WIDE)
    assert {row.id for row in store.quarantine(name)} == {"q2", "q3"}
    assert {row.id for row in store.quarantine(retired)} == {"q1"}
    assert {hit.id for hit in store.view(name).search(unit(WIDE), 9)} == {"a", "b", "new"}
    assert {hit.id for hit in store.view(retired).search(unit(DIMENSION), 9)} == {"a", "b", "old"}
    assert store.open(name, OTHER).rows_read == 1
    assert generations(store, name)[1].retired is not None
    store.generations.switch(name, 2)
    assert status(store, name).generation == 2, "a second time changes nothing"
    store.generations.switch(name, 1)
    assert states(store, name) == {1: "active", 2: "retired"}
    assert ids(store, name) == {"a", "b", "old"}
    assert {row.id for row in store.quarantine(name)} == {"q1"}


def test_after_a_switch_everything_is_compared_again(store, name, built):
    """A log of changes that is consumed may have told them to the other generation."""
    known = Checkpoint(rows_read=3, key=("A",), last_full=datetime.now(UTC), mark={"log": 7})
    for each in (name, built):
        write(store, each, ChangeSet(checkpoint=known))
    store.generations.switch(name, 2)
    for each in (name, f"{name}@1"):
        now = status(store, each).checkpoint
        assert (now.mark, now.last_full, now.rows_read, now.key) == (None, None, 3, ("A",))
        assert now.last_sync is not None


def test_a_search_of_another_process_never_mixes(store, name, built, another):
    """`other` has just searched, so it remembers the first generation for a while."""
    other = another()
    narrow, broad = unit(DIMENSION), unit(WIDE)
    assert {hit.id for hit in other.view(name, 1).search(narrow, 9)} == {"a", "b", "old"}
    store.generations.switch(name, 2)
    assert {hit.id for hit in other.view(name).search(broad, 9)} == {"a", "b", "new"}, "looks again instead of failing"
    with pytest.raises(ConfigurationError, match="dimensions"):
        other.view(name).search(narrow, 9)
    assert {hit.id for hit in other.view(name, 2).search(broad, 9)} == {"a", "b", "new"}
    hits = other.view(name, 2).search(broad, 2)
    assert other.view(name, 2).vectors(hits).shape == (2, WIDE)
    for call in (
        lambda: other.view(name, 1).search(narrow, 9),
        lambda: other.view(name, 1).keyword("text", 9),
        lambda: other.view(name, 1).vectors(hits),
    ):
        with pytest.raises(GenerationChanged, match="generation 2"):
            call()


@first_on("local")
def test_a_search_right_after_the_old_one_was_dropped(store, name, built, another):
    other = another()
    assert len(other.view(name).search(unit(DIMENSION), 9)) == 3
    store.generations.switch(name, 2)
    store.generations.drop(name, 1)
    with pytest.raises(GenerationChanged):
        other.view(name, 1).search(unit(DIMENSION), 9)
    assert len(other.view(name).keyword("text", 9)) == 3


@pytest.mark.proves(25, 26)
def test_whoever_writes_during_a_switch_writes_no_more(store, name, built, another):
    other = another()
    with store.lease(name, "old", 0) as old, store.lease(built, "new", 0) as new:
        parts = store.begin_part(old, 1), store.begin_part(new, 0)
        other.generations.switch(name, 2)
        for lease in (old, new, *parts):
            with pytest.raises(LeaseLost):
                store.apply(lease, ChangeSet(deleted=["a"]))
        with other.lease(name, "next", 0) as lease:
            assert lease.epoch > max(old.epoch, new.epoch), "no epoch of either name comes again"
            other.apply(lease, ChangeSet(deleted=["new"]))
    assert set(stored(store, name)) == {("a", 0), ("b", 0)}
    assert set(stored(store, f"{name}@1")) == {("a", 0), ("b", 0), ("old", 0)}


@first_on("hana")
def test_searches_while_it_is_switched_to_and_fro_see_one_or_the_other(store, name, built, another):
    found, stop, other = set(), threading.Event(), another()
    failures: list[Exception] = []

    def search() -> None:
        while not stop.is_set():
            for number, dimension in ((1, DIMENSION), (2, WIDE)):
                try:
                    hits = other.view(name, number).search(unit(dimension), 9)
                except GenerationChanged:
                    continue
                except Exception as error:
                    failures.append(error)
                    return
                found.add((number, frozenset(hit.id for hit in hits)))

    searcher = threading.Thread(target=search)
    searcher.start()
    for turn in range(6):
        store.generations.switch(name, 2 - turn % 2)
        time.sleep(0.03)
    stop.set()
    searcher.join(60)
    assert failures == []
    assert found <= {(1, frozenset({"a", "b", "old"})), (2, frozenset({"a", "b", "new"}))}
    assert found


@pytest.mark.proves(25)
def test_what_fails_in_the_middle_of_a_switch_leaves_it_undone(store, name, built, another, monkeypatch):
    reached: list[str] = []

    def fail(name: str) -> None:
        reached.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", fail)
        with pytest.raises(KeyboardInterrupt):
            store.generations.switch(name, 2)
    assert reached == ["mid_alias_swap"]
    assert states(another(), name) == {1: "active", 2: "building"}
    assert ids(store, name) == {"a", "b", "old"}
    store.generations.switch(name, 2)
    assert states(store, name) == {1: "retired", 2: "active"}


def test_dropping(store, name, built, another):
    with pytest.raises(GenerationRefused, match="is active"):
        store.generations.drop(name, 1)
    with pytest.raises(UnknownGeneration, match="there are: 1, 2"):
        store.generations.drop(name, 7)
    with another().lease(built, "writer", 0), pytest.raises(LeaseLost, match="writer"):
        store.generations.drop(name, 2)
    write(store, built, ChangeSet(quarantined=[QuarantinedRow("q", "render", "r")]))
    store.generations.drop(name, 2)
    assert states(store, name) == {1: "active"}
    assert store.status(built) is None
    assert ids(store, name) == {"a", "b", "old"}
    with pytest.raises(UnknownCollection):
        store.open(built, OTHER)
    assert store.generations.begin(name, OTHER, recipe(name)) == f"{name}@3", "a number is given once"
    assert stored(store, f"{name}@3") == {}
    assert store.quarantine(f"{name}@3") == []


@first_on("local")
def test_numbers_are_not_given_again_after_a_switch_and_a_drop(store, name, built):
    store.generations.begin(name, Model("c", "c", 4), recipe(name))
    store.generations.drop(name, 3)
    store.generations.switch(name, 2)
    store.generations.drop(name, 1)
    assert states(store, name) == {2: "active"}
    assert store.generations.begin(name, Model("c", "c", 4), recipe(name)) == f"{name}@4"


def test_a_number_taken_while_another_is_dropped_is_not_given_again(store, name, built, another, monkeypatch):
    other, drop_vectors, model = another(), store._drop_vectors, Model("c", "c", 4)

    def meanwhile(*arguments) -> None:
        drop_vectors(*arguments)
        monkeypatch.undo()
        other.generations.begin(name, model, recipe(name))
        other.generations.drop(name, 3)

    monkeypatch.setattr(store, "_drop_vectors", meanwhile)
    store.generations.drop(name, 2)
    assert states(store, name) == {1: "active"}
    assert store.generations.begin(name, model, recipe(name)) == f"{name}@4"


def test_whoever_lost_the_lease_while_dropping_leaves_the_row(store, name, built, another, monkeypatch):
    other, drop_vectors = another(), store._drop_vectors

    def meanwhile(found, lease) -> None:
        drop_vectors(found, lease)
        other.release_lease(lease)

    monkeypatch.setattr(store, "_drop_vectors", meanwhile)
    with pytest.raises(LeaseLost):
        store.generations.drop(name, 2)
    monkeypatch.undo()
    assert 2 in states(store, name)
    store.generations.drop(name, 2)
    assert states(store, name) == {1: "active"}


@first_on("local")
def test_a_lease_on_what_has_just_gone(store, name, built, monkeypatch):
    found = store._known(built)
    store.generations.drop(name, 2)
    monkeypatch.setattr(store, "_known", lambda name: found)
    with pytest.raises(UnknownCollection, match=built):
        store.take_lease(built, "late", 1)


@first_on("local")
def test_a_retired_one_is_built_on_when_it_is_what_is_wanted(store, name, built):
    store.generations.switch(name, 2)
    other_texts = recipe(name, "{OTHER}", model="a")
    assert store.generations.begin(name, Model(), other_texts) == f"{name}@3", "kept to go back to"
    store.generations.drop(name, 3)
    assert store.generations.begin(name, Model(), recipe(name, model="a")) == f"{name}@1"
    assert states(store, name) == {1: "building", 2: "active"}
    assert set(stored(store, f"{name}@1")) == {("a", 0), ("b", 0), ("old", 0)}


@pytest.mark.parametrize("another", ["hana"], indirect=True)
def test_another_type_of_vectors_is_another_generation(store, name, another):
    """What is there keeps its type, is searched as before, and is not built on for the other type."""
    write(store, name, changes(chunk("a"), chunk("b"), checkpoint=DONE))
    store.generations.record(name, 1, recipe(name, model="a"))
    halved = another(vector_type="half")
    halved.open(name, Model())
    beside = halved.generations.begin(name, Model(), recipe(name, model="a"))
    halved.open(beside, Model())
    write(halved, beside, changes(chunk("a"), chunk("c"), checkpoint=DONE))
    tables = [each.table for each in store.generations.all(name)]
    assert [table[-3:] for table in tables] == ["_G1", "_H2"]
    halved.generations.switch(name, 2)
    for each in (halved, another(), another(vector_type="half")):  # whatever the settings of a process say
        assert ids(each, name) == {"a", "c"}
        assert ids(each, name, k=1) < {"a", "c"}
    again = halved.generations.begin(name, Model(), recipe(name, model="a"))
    assert again == f"{name}@3", "generation 1 has the other type"
    store.generations.drop(name, 3)
    assert store.generations.begin(name, Model(), recipe(name, model="a")) == f"{name}@1"


@first_on("local")
def test_an_empty_collection_takes_another_model_under_a_number_of_its_own(store, name):
    beside = store.generations.begin(name, OTHER, recipe(name))
    store.open(name, Model("c", "c", 4))
    assert states(store, name) == {2: "building", 3: "active"}
    write(store, name, ChangeSet([chunk("x")], unit(1, 4)))
    assert stored(store, beside) == {}


@first_on("local")
def test_the_recipe_is_replaced(store, name, built):
    new = replace(recipe(name), spec=replace(recipe(name).spec, where=None, key=(), metadata=(), chunk=ChunkSpec()))
    store.generations.record(name, 2, new)
    assert generations(store, name)[2].recipe == new
    store.generations.record(name, 3, new)
    store.generations.switch(name, 2)
    store.generations.record(name, 1, recipe(name, "{OTHER}"))
    assert {number: each.recipe for number, each in generations(store, name).items()} == {
        1: recipe(name, "{OTHER}"),
        2: new,
    }


@first_on("local")
def test_a_vector_of_the_one_generation_is_none_of_the_other(store, name, built):
    with pytest.raises(Exception, match="dimension"):
        store.view(name).search(unit(WIDE), 1)
    assert np.isfinite(store.view(built).vectors(store.view(built).search(unit(WIDE), 2))).all()
