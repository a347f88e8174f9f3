"""What only the HANA store promises, tried on the emulator: its tables, rows of others among ours, the HNSW index,
refusals that say what to do. The rest is in the contract of the stores."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from connector import failpoints
from connector.errors import (
    BadFilter,
    ConfigurationError,
    GenerationRefused,
    LeaseLost,
    RowRejected,
    StatementFailed,
    UnknownTable,
)
from connector.hana.connection import ConnectionOptions, HanaFeatures, HanaPool
from connector.model import ChangeSet, Checkpoint, Chunk, CollectionSpec, Lease, ModelSource, Recipe, TableRef
from connector.stores.filters import Compiled
from connector.stores.hana.store import HanaStore
from connector.stores.hana.tables import VectorTable, table_name
from connector.stores.records import from_fvecs, fvecs

DIMENSION = 8
NAME = "materials"
TABLE = "OWL_MATERIALS_G1"


class Model:
    model = "model-a"
    fingerprint = "fingerprint-a"
    dimension = DIMENSION
    max_tokens = 10
    database_model = None


class Wide(Model):
    dimension = 384


def unit(count: int, dimension: int = DIMENSION, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def chunk(id_: str, number: int = 0, **metadata: Any) -> Chunk:
    return Chunk(id_, number, f"text of {id_}", metadata, b"h" * 32)


def write(store: HanaStore, *sets: ChangeSet) -> None:
    with store.lease(NAME, "writer", 5) as lease:
        for change_set in sets:
            store.apply(lease, change_set)


@pytest.fixture
def statements() -> list[str]:
    """Every SQL text the store sends."""
    return []


@pytest.fixture
def pool(emulator, statements: list[str]) -> Iterator[HanaPool]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    options = ConnectionOptions(**login, encrypt=False, communication_timeout=30)
    with HanaPool(options, size=4, on_statement=statements.append) as pool:
        yield pool


@pytest.fixture
def store(pool: HanaPool, hana_schema: str) -> HanaStore:
    store = HanaStore(pool, hana_schema)
    store.open(NAME, Model())  # type: ignore[arg-type]
    return store


Run = Callable[..., list[Any]]


@pytest.fixture
def run(hana) -> Run:
    """A statement by somebody else, in the store's schema."""

    def execute(sql: str, *parameters: Any) -> list[Any]:
        cursor = hana.cursor()
        cursor.execute(sql, parameters)
        rows = cursor.fetchall() if cursor.description else []
        hana.commit()
        return rows

    return execute


# ----------------------------------------------------------------------------------------------------------- tables


def test_the_table_as_promised(store, run, hana_schema):
    columns = run(
        "SELECT COLUMN_NAME, DATA_TYPE_NAME, LENGTH, IS_NULLABLE FROM SYS.TABLE_COLUMNS "
        "WHERE SCHEMA_NAME = ? AND TABLE_NAME = ? ORDER BY POSITION",
        hana_schema,
        TABLE,
    )
    assert [(name, kind) for name, kind, _, _ in columns] == [
        ("ID", "BIGINT"),
        ("VEC_TEXT", "NCLOB"),
        ("VEC_META", "NCLOB"),
        ("VEC_VECTOR", "REAL_VECTOR"),
        ("SRC_KEY", "NVARCHAR"),
        ("CHUNK_NO", "INTEGER"),
        ("CONTENT_HASH", "VARBINARY"),
        ("MODEL_ID", "NVARCHAR"),
        ("SYNCED_AT", "TIMESTAMP"),
    ]
    assert {name: length for name, _, length, _ in columns}["VEC_VECTOR"] == DIMENSION
    assert {name for name, _, _, nullable in columns if nullable == "FALSE"} == {"ID"}
    tables = run("SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = ?", hana_schema)
    assert {name for (name,) in tables} == {TABLE, "OWL_STATE", "OWL_QUARANTINE"}


# -------------------------------------------------------------------------------------------------- parts of a lease


class Held:
    """A write that waits in the middle of its transaction until `go`."""

    def __init__(self, store: HanaStore, lease: Lease, change_set: ChangeSet) -> None:
        self._inside, self._go = threading.Event(), threading.Event()
        failpoints.arm(self._wait)
        self._writer = ThreadPoolExecutor(1)
        self.done = self._writer.submit(store.apply, lease, change_set)
        assert self._inside.wait(20)
        failpoints.arm(None)

    def _wait(self, name: str) -> None:
        if name == "mid_upsert":
            self._inside.set()
            assert self._go.wait(20)

    def go(self) -> None:
        self._go.set()
        self.done.result(20)
        self._writer.shutdown()


def test_writers_with_parts_of_a_lease_do_not_wait_for_each_other(store, pool, hana_schema):
    with store.lease(NAME, "driver", 5) as lease:
        first, second = (store.begin_part(lease, part) for part in range(2))
        held = Held(store, first, ChangeSet(chunks=[chunk("a")], vectors=unit(1)))
        store.apply(second, ChangeSet(chunks=[chunk("b")], vectors=unit(1)))
        assert store.renew_lease(lease, 30), "and the driver keeps its lease meanwhile"
        assert not held.done.done()
        held.go()
    assert {each.id for page in store.stored(NAME) for each in page} == {"a", "b"}


@pytest.mark.parametrize("way", ["taken", "switched", "ended"])
@pytest.mark.proves(26)
def test_a_lease_changes_hands_only_after_the_writes_with_its_parts(store, run, way):
    epoch = store.take_lease(NAME, "driver", 30)
    beside = store.generations.begin(NAME, Wide(), RECIPE)  # type: ignore[arg-type]
    lease = Lease(NAME, "driver", epoch)
    part = store.begin_part(lease, 0)
    held = Held(store, part, ChangeSet(chunks=[chunk("a")], vectors=unit(1)))
    run('UPDATE "OWL_STATE" SET "LEASE_UNTIL" = NULL')
    order: list[str] = []
    with ThreadPoolExecutor(1) as others:
        if way == "switched":
            waiting = others.submit(store.generations.switch, NAME, int(beside.partition("@")[2]))
        elif way == "ended":
            waiting = others.submit(store.end_parts, part)
        else:
            waiting = others.submit(store.take_lease, NAME, "other", 30)
        waiting.add_done_callback(lambda _: order.append("changed hands"))
        time.sleep(0.3)  # long enough to change hands, if nothing held it up
        order.append("written")
        held.go()
        waiting.result(20)
    assert order == ["written", "changed hands"]
    with pytest.raises(LeaseLost):
        store.apply(part, ChangeSet(deleted=["a"]))
    if way == "ended":
        store.apply(store.begin_part(lease, 1), ChangeSet(deleted=["b"]))
    else:
        with pytest.raises(LeaseLost):
            store.begin_part(lease, 1)
    stored = store.stored(f"{NAME}@1" if way == "switched" else NAME)
    assert [each.id for page in stored for each in page] == ["a"]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("materials", "OWL_MATERIALS_G1"),
        ("a-b_C9", "OWL_A_B_C9_G1"),
        ('x"; DROP', "OWL_X___DROP_G1"),
        ("ä", "OWL___G1"),
    ],
)
def test_table_names(name, table):
    assert table_name(name, 1) == table
    assert table_name(name, 12, half=True) == table.removesuffix("G1") + "H12"


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_names_that_cannot_be_tables(name):
    with pytest.raises(ConfigurationError, match="1 to 100"):
        table_name(name, 1)


def test_two_names_for_one_table_are_refused(store):
    store.open("a-b", Model())
    with pytest.raises(ConfigurationError, match=r"'a_b' and 'a-b'.*OWL_A_B_G1"):
        store.open("a_b", Model())
    assert store.status("a_b") is None


def test_rows_carry_model_time_and_never_a_null_in_metadata(store, run):
    write(store, ChangeSet([chunk("a")], unit(1)))
    ((meta, model, number, recent),) = run(
        f'SELECT "VEC_META", "MODEL_ID", "CHUNK_NO", SECONDS_BETWEEN("SYNCED_AT", CURRENT_UTCTIMESTAMP) FROM "{TABLE}"'
    )
    assert (meta, model, number) == ("{}", store.status(NAME).model, 0)
    assert 0 <= recent < 60


def test_no_value_ever_stands_in_a_statement(store, statements):
    secret = chunk("secret-key", 0, SECRETMETA="secret-value")
    write(store, ChangeSet([secret], unit(1)), ChangeSet(metadata_only=[secret]), ChangeSet(deleted=["secret-key"]))
    store.view(NAME).search(unit(1)[0], 3, {"A": "secret-value", "B": {"$contains": "secret"}})
    list(store.stored(NAME)), list(store.records(NAME))
    store.status(NAME), store.quarantine(NAME), store.optimise(NAME)
    assert len(statements) > 20
    assert not [sql for sql in statements if "secret" in sql.lower() or NAME in sql or "0." in sql]


def test_a_table_dropped_by_hand_comes_back(store, run):
    write(store, ChangeSet([chunk("a")], unit(1)))
    run(f'DROP TABLE "{TABLE}"')
    assert store.status(NAME).rows == 0
    store.open(NAME, Model())
    write(store, ChangeSet([chunk("b")], unit(1)))
    assert [hit.id for hit in store.view(NAME).search(unit(1)[0], 5)] == ["b"]


def test_a_table_that_is_missing_while_it_is_written_comes_back_when_opened(store, run):
    run(f'DROP TABLE "{TABLE}"')
    with pytest.raises(UnknownTable):
        write(store, ChangeSet([chunk("a")], unit(1)))
    store.open(NAME, Model())
    write(store, ChangeSet([chunk("a")], unit(1)))
    assert store.status(NAME).rows == 1


def test_opening_again_asks_little(store, pool, statements, hana_schema):
    """A sync opens its collection twice."""
    store = HanaStore(pool, hana_schema)
    statements.clear()
    store.open(NAME, Model())
    assert len(statements) == 3, "its row, columns and indexes"
    store.open(NAME, Model())
    assert len(statements) == 4


def test_a_switch_while_a_collection_is_opened_does_no_harm(store, pool, hana_schema):
    """The row that was found now has another name."""
    recipe = Recipe(CollectionSpec(NAME, TableRef("S", "T"), "{T}"), ModelSource("a"))
    other = HanaStore(pool, hana_schema)
    other.open(NAME, Model())
    other.generations.begin(NAME, Wide(), recipe)  # type: ignore[arg-type]

    def switch(sql: str) -> None:
        if "SYS." in sql and len(other.generations.all(NAME, counted=False)) == 2:
            other.generations.switch(NAME, 2)

    with HanaPool(pool.options, on_statement=switch) as interrupted:
        HanaStore(interrupted, hana_schema).open(NAME, Model())  # type: ignore[arg-type]
    assert other.status(NAME).generation == 2


def test_a_table_of_somebody_else_is_not_touched(store, run):
    run('CREATE TABLE "OWL_THEIRS_G1" ("X" INTEGER)')
    run('INSERT INTO "OWL_THEIRS_G1" VALUES (1)')
    with pytest.raises(ConfigurationError, match="OWL_THEIRS_G1"):
        store.open("theirs", Model())
    assert run('SELECT * FROM "OWL_THEIRS_G1"')[0][0] == 1


def test_what_a_crash_left_half_made_is_completed(store, run):
    """The vector table is made before the collection is registered, so it may exist alone, even for another model."""
    run(f'CREATE COLUMN TABLE "OWL_LATER_G1" ("SRC_KEY" NVARCHAR(10), "VEC_VECTOR" REAL_VECTOR({DIMENSION + 1}))')
    store.open("later", Model())
    assert store.status("later").rows == 0
    assert list(store.records("later")) == []


def test_an_index_that_a_crash_left_unmade_is_made(store, pool, run, statements, hana_schema):
    """Without it every row replaced is looked for in the whole table."""
    find = "SELECT INDEX_NAME FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND INDEX_NAME = ?"
    place = (hana_schema, f"{TABLE}_KEY")
    run(f'DROP INDEX "{TABLE}_KEY"')
    assert run(find, *place) == []
    store = HanaStore(pool, hana_schema)
    store.open(NAME, Model())
    assert len(run(find, *place)) == 1
    statements.clear()
    store.open(NAME, Model())
    assert not any(sql.startswith("CREATE") for sql in statements)


def test_another_worker_may_register_the_same_collection_meanwhile(pool, emulator, hana_schema):
    """Seen from in between, the table is taken: by the collection itself."""
    other = HanaStore(pool, hana_schema)

    def register(sql: str) -> None:
        if sql.startswith('SELECT "COLLECTION"'):
            other.open(NAME, Model())  # type: ignore[arg-type]

    with HanaPool(pool.options, on_statement=register) as interrupted:
        HanaStore(interrupted, hana_schema).open(NAME, Model())  # type: ignore[arg-type]
    assert other.status(NAME) is not None


@pytest.mark.slow
def test_many_workers_open_at_once(pool, hana_schema):
    def work(_: int) -> None:
        HanaStore(pool, hana_schema).open(NAME, Model())  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))
    assert HanaStore(pool, hana_schema).status(NAME) is not None


def test_a_hana_without_vectors_is_refused(pool, hana_schema, monkeypatch):
    monkeypatch.setattr(HanaFeatures, "probe", lambda pool: HanaFeatures(False, False, "2.00.076.00"))
    with pytest.raises(ConfigurationError, match=r'2\.00\.076.*REAL_VECTOR.*kind = "local"'):
        HanaStore(pool, hana_schema).open(NAME, Model())  # type: ignore[arg-type]
    monkeypatch.setattr(HanaFeatures, "probe", lambda pool: HanaFeatures(True, False, "2024.40.1"))
    with pytest.raises(ConfigurationError, match=r'2024\.40.*no HALF_VECTOR.*vector_type = "real"'):
        HanaStore(pool, hana_schema, vector_type="half").open(NAME, Model())  # type: ignore[arg-type]
    HanaStore(pool, hana_schema).open(NAME, Model())  # type: ignore[arg-type]


def test_a_schema_that_does_not_exist(pool):
    with pytest.raises(UnknownTable, match=r"NOWHERE.*\[store\] schema"):
        HanaStore(pool, "NOWHERE").open(NAME, Model())  # type: ignore[arg-type]
    assert HanaStore(pool, "NOWHERE").status(NAME) is None


# ------------------------------------------------------------------------------------------------ rows of others


@pytest.fixture
def foreign(store, run) -> dict[str, int]:
    """Rows as HanaDB writes them: no key, no hash; one without metadata, one without a vector."""
    write(store, ChangeSet([chunk("ours", 0, A=1)], unit(1)))
    vectors = fvecs(unit(2, seed=9))
    insert = f'INSERT INTO "{TABLE}" ("VEC_TEXT", "VEC_META", "VEC_VECTOR") VALUES (?, ?, ?)'
    run(insert, "theirs", json.dumps({"A": 2, "deep": {"x": [1]}}), vectors[0])
    run(insert, "bare", None, vectors[1])
    run(insert, "no vector", "[1, 2]", None)
    return dict(run(f'SELECT TO_NVARCHAR("VEC_TEXT"), "ID" FROM "{TABLE}" WHERE "SRC_KEY" IS NULL'))


def test_foreign_rows_are_found_but_not_ours(store, foreign):
    assert [one.id for page in store.stored(NAME) for one in page] == ["ours"]
    status = store.status(NAME)
    assert (status.rows, status.chunks, status.foreign) == (1, 1, 3)
    everything = {record.text: record for page in store.records(NAME) for record in page}
    assert {record.id for record in everything.values()} == {"ours", None}
    assert everything["theirs"].metadata == {"A": 2, "deep": {"x": [1]}}
    assert everything["bare"].metadata == {}
    assert everything["no vector"].vector is None
    assert (everything["bare"].number, everything["bare"].content_hash, everything["bare"].model) == (None, None, None)

    hits = {hit.id: hit for hit in store.view(NAME).search(unit(1)[0], 10)}
    assert set(hits) == {"ours", f"record:{foreign['theirs']}", f"record:{foreign['bare']}"}
    assert hits[f"record:{foreign['bare']}"].metadata == {}
    assert [hit.id for hit in store.view(NAME).search(unit(1)[0], 10, {"A": 2})] == [f"record:{foreign['theirs']}"]


def test_foreign_rows_outlive_whatever_we_do(store, foreign):
    write(store, ChangeSet([chunk("ours")], unit(1)), ChangeSet(deleted=["ours", "", f"record:{foreign['theirs']}"]))
    status = store.status(NAME)
    assert (status.rows, status.foreign) == (0, 3)


class Embeddings:
    """For langchain: every text is the same direction but for its length."""

    def embed_query(self, text: str) -> list[float]:
        return [1.0, float(len(text)), *[0.0] * (DIMENSION - 2)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def test_hanadb_reads_our_table_and_what_it_adds_is_foreign(store, hana):
    langchain = pytest.importorskip("langchain_hana")
    write(store, ChangeSet([chunk("a", 0, MTART="FERT", N=1), chunk("b", 0, MTART="HALB", N=2)], unit(2)))
    hana.setautocommit(True)
    theirs = langchain.HanaDB(connection=hana, embedding=Embeddings(), table_name=TABLE)
    assert {one.page_content for one in theirs.similarity_search("x", k=5)} == {"text of a", "text of b"}
    (one,) = theirs.similarity_search("x", k=5, filter={"$and": [{"MTART": "HALB"}, {"N": {"$gt": 1}}]})
    assert (one.page_content, one.metadata) == ("text of b", {"MTART": "HALB", "N": 2})
    theirs.add_texts(["added by langchain"], [{"MTART": "ROH"}])
    assert store.status(NAME).foreign == 1
    (hit,) = store.view(NAME).search(unit(1)[0], 5, {"MTART": "ROH"})
    assert (hit.text, hit.id.split(":")[0]) == ("added by langchain", "record")


# ------------------------------------------------------------------------------------------------------------ HNSW


def hnsw(run: Run, schema: str) -> list[str]:
    rows = run("SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?", schema, TABLE)
    return [name for name, kind in rows if "HNSW" in kind]


def test_an_index_is_made_once_and_only_for_large_tables(store, pool, run, hana_schema):
    write(store, ChangeSet([chunk(f"k{n}") for n in range(20)], unit(20)))
    store.optimise(NAME)
    assert hnsw(run, hana_schema) == []
    large = HanaStore(pool, hana_schema, index_from=20)
    large.optimise(NAME)
    large.optimise(NAME)
    assert hnsw(run, hana_schema) == [f"{TABLE}_HNSW"]
    assert len(large.view(NAME).search(unit(1)[0], 5)) == 5


def test_where_there_is_an_index_nothing_is_counted(store, pool, statements, hana_schema):
    """That is a look at every record, after every sync that stored something."""
    store.open(NAME, Model())
    write(store, ChangeSet(chunks=[chunk("[1]")], vectors=unit(1)))
    large = HanaStore(pool, hana_schema, index_from=1)
    large.optimise(NAME)
    statements.clear()
    large.optimise(NAME)
    assert not [sql for sql in statements if "COUNT(" in sql]


def test_an_index_that_somebody_made_is_enough(store, pool, run, hana_schema):
    write(store, ChangeSet([chunk("a")], unit(1)))
    run(f'CREATE HNSW VECTOR INDEX "THEIRS" ON "{TABLE}" ("VEC_VECTOR") SIMILARITY FUNCTION COSINE_SIMILARITY')
    HanaStore(pool, hana_schema, index_from=1).optimise(NAME)
    assert hnsw(run, hana_schema) == ["THEIRS"]


# ---------------------------------------------------------------------------------------------------------- writing


def test_data_hana_refuses_leaves_nothing(store):
    write(store, ChangeSet([chunk("kept")], unit(1)))
    for bad in (chunk("k" * 2001), Chunk("bad", 0, "text", {}, b"h" * 33)):
        with pytest.raises(RowRejected) as raised:
            write(store, ChangeSet([chunk("good"), bad], unit(2), deleted=["kept"]))
        assert "kkkk" not in str(raised.value)
        assert [one.id for page in store.stored(NAME) for one in page] == ["kept"]


def test_a_thousand_chunks_are_one_short_transaction(pool, hana_schema):
    store = HanaStore(pool, hana_schema)
    store.open(NAME, Wide())  # type: ignore[arg-type]
    vectors, seconds = unit(1000, 384), []
    with store.lease(NAME, "writer", 1) as lease:
        for _ in range(4):
            start = time.perf_counter()
            store.apply(lease, ChangeSet([chunk(f"k{n}", 0, MTART="FERT") for n in range(1000)], vectors))
            seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < 2, "replacing, not only the first insert into an empty table"
    assert store.status(NAME).rows == 1000


def test_a_search_is_one_statement(store, statements):
    write(store, ChangeSet([chunk(f"k{n}") for n in range(100)], unit(100)))
    store.view(NAME).search(unit(1)[0], 5)
    statements.clear()
    store.view(NAME).search(unit(1)[0], 5, {"A": None})
    assert len(statements) == 1
    assert statements[0].startswith("SELECT TOP 10 ")


def test_a_filter_error_of_hana_becomes_ours_and_others_do_not(store, run):
    write(store, ChangeSet([chunk("a", 0, A="x")], unit(1)))
    with pytest.raises(BadFilter, match="A as number"):
        store.view(NAME).search(unit(1)[0], 5, {"A": 1})
    run(f'DROP TABLE "{TABLE}"')
    with pytest.raises(UnknownTable):
        store.view(NAME).search(unit(1)[0], 5, {"A": 1})


# ------------------------------------------------------------------------------------------------ bytes and statements


def test_fvecs_bytes_by_hand():
    first = np.array([[1.0, -2.0]], np.float32)
    assert fvecs(first) == [bytes.fromhex("02000000 0000803f 000000c0")]
    assert fvecs(first, half=True) == [bytes.fromhex("02000000 003c 00c0")]
    assert fvecs(np.empty((0, 3), np.float32)) == []
    assert fvecs(unit(5)[::2]) == [fvecs(unit(5)[place : place + 1])[0] for place in (0, 2, 4)]


@pytest.mark.parametrize(
    "data", [None, "text", b"", b"\x02\0\0\0" + b"\0" * 6, b"\x03\0\0\0" + b"\0" * 8, b"\x02\0\0\0" + b"\0" * 12]
)
def test_what_is_no_vector_of_the_dimension(data):
    assert from_fvecs(data, 2) is None


def test_fvecs_round_trip():
    vectors = unit(3)
    back = [from_fvecs(memoryview(data), DIMENSION) for data in fvecs(vectors)]
    assert np.array_equal(np.stack([vector for vector in back if vector is not None]), vectors)
    (half,) = [from_fvecs(data, DIMENSION) for data in fvecs(vectors[:1], half=True)]
    assert half is not None
    assert np.array_equal(half, vectors[0].astype(np.float16).astype(np.float32))


def test_identifiers_are_quoted():
    table = VectorTable('S"x', "T")
    assert table.sql == '"S""x"."T"'
    assert all(table.sql in text for text in (table.drop(), table.search(1, Compiled()), table.create_hnsw()))


# -------------------------------------------------------------------------------------------------------- generations


class Other(Model):
    fingerprint = "fingerprint-b"


RECIPE = Recipe(CollectionSpec(NAME, TableRef("S", "T"), "{T}"), ModelSource("b"))


def test_each_generation_has_a_table_of_its_own(store, run):
    write(store, ChangeSet([chunk("a")], unit(1)))
    beside = store.generations.begin(NAME, Other(), RECIPE)
    assert [each.table for each in store.generations.all(NAME)] == ["OWL_MATERIALS_G1", "OWL_MATERIALS_G2"]
    store.open(beside, Other())
    with store.lease(beside, "writer", 5) as lease:
        store.apply(lease, ChangeSet([chunk("b")], unit(1), checkpoint=Checkpoint(1)))
    store.generations.switch(NAME, 2)
    assert store.status(NAME).table == "OWL_MATERIALS_G2"
    assert [tuple(row) for row in run('SELECT "SRC_KEY" FROM "OWL_MATERIALS_G2"')] == [("b",)]
    store.generations.drop(NAME, 1)
    assert run("SELECT TABLE_NAME FROM SYS.TABLES WHERE TABLE_NAME = 'OWL_MATERIALS_G1' AND SCHEMA_NAME = "
               "CURRENT_SCHEMA") == []  # fmt: skip


def test_a_drop_that_was_cut_short_is_finished_by_another(store, run, monkeypatch):
    store.generations.begin(NAME, Other(), RECIPE)
    with monkeypatch.context() as patched:
        patched.setattr(VectorTable, "drop", lambda self: "DROP NONSENSE")
        with pytest.raises(StatementFailed):
            store.generations.drop(NAME, 2)
    with pytest.raises(GenerationRefused, match="drop it again"):
        store.generations.switch(NAME, 2)
    run('DROP TABLE "OWL_MATERIALS_G2"')
    assert [each.rows for each in store.generations.all(NAME)] == [0, 0]
    assert store.generations.begin(NAME, Other(), RECIPE) == f"{NAME}@3", "it is not built on"
    store.generations.drop(NAME, 2)
    assert [each.number for each in store.generations.all(NAME)] == [1, 3]


def test_the_table_of_a_generation_that_another_collection_has(store):
    store.generations.begin(NAME, Other(), RECIPE)
    store.open("MATERIALS_G2X", Model())
    other = HanaStore(store.pool, store._schema)
    other.pool.execute(f'UPDATE "{store._schema}"."OWL_STATE" SET "TABLE_NAME" = \'OWL_MATERIALS_G3\' '
                        "WHERE COLLECTION = 'MATERIALS_G2X'")  # fmt: skip
    with pytest.raises(ConfigurationError, match="rename one"):
        other.generations.begin(NAME, Wide(), RECIPE)
