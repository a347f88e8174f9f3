"""What only the local store promises: one durable file, several processes, an in-memory copy that is never stale, and
damage that is named instead of being taken for an empty store. The rest is in the contract of the stores."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.cancellation import Cancellation, cancelled_by
from connector.errors import (
    BadFilter,
    Cancelled,
    DatabaseError,
    GenerationRefused,
    RowRejected,
    StatementFailed,
    StoreCorrupt,
)
from connector.model import (
    ChangeSet,
    Checkpoint,
    Chunk,
    CollectionSpec,
    Lease,
    ModelSource,
    Recipe,
    TableRef,
)
from connector.stores import filters, scan
from connector.stores.local import search as local_search
from connector.stores.local import store as local
from connector.stores.local.search import FILTERS
from connector.stores.local.store import LocalStore
from connector.stores.local.tables import find
from connector.stores.records import unit_query
from connector.stores.scan import Int8Scan, exact_scores
from connector.stores.state import LeaseTimes

DIMENSION = 8
NAME = "materials"
QUERY = np.eye(DIMENSION, dtype=np.float32)[0]


class Model:
    model = "model-a"
    fingerprint = "fingerprint-a"
    dimension = DIMENSION
    max_tokens = 10
    database_model = None


class Other(Model):
    fingerprint = "fingerprint-b"


RECIPE = Recipe(CollectionSpec(NAME, TableRef("S", "T"), "{T}"), ModelSource("b"))


def unit(count: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def chunks(ids: range, **metadata: Any) -> list[Chunk]:
    return [Chunk(f"k{number}", 0, f"text {number}", {"N": number, **metadata}, b"h" * 32) for number in ids]


def write(store: LocalStore, *sets: ChangeSet) -> None:
    with store.lease(NAME, "writer", 5) as lease:
        for change_set in sets:
            store.apply(lease, change_set)


def add(store: LocalStore, ids: range, seed: int = 0, **metadata: Any) -> np.ndarray:
    vectors = unit(len(ids), seed)
    write(store, ChangeSet(chunks(ids, **metadata), vectors))
    return vectors


def found(store: LocalStore, where: dict[str, Any] | None = None, k: int = 10_000) -> set[str]:
    return {hit.id for hit in store.view(NAME).search(QUERY, k, where)}


def keys(ids: range) -> set[str]:
    return {f"k{number}" for number in ids}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder" / "störe"


@pytest.fixture
def file(folder: Path) -> Path:
    return folder / local.FILE


@pytest.fixture
def store(folder: Path) -> Iterator[LocalStore]:
    store = LocalStore(folder)
    store.open(NAME, Model())  # type: ignore[arg-type]
    yield store
    store.close()


# --------------------------------------------------------------------------------------------------------- the file


@pytest.mark.proves(30)
def test_durable_settings_and_no_leftovers(store, folder):
    add(store, range(3))
    with store._file.read() as db:
        settings = [
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert settings == ["wal", 2, 1]
    store.close()
    assert [path.name for path in folder.iterdir()] == [local.FILE]


def damaged(file: Path, how: str) -> None:
    match how:
        case "empty":
            file.write_bytes(b"")
        case "other content":
            file.write_bytes(b"%PDF-1.7 " + b"x" * 5000)
        case "cut off":
            file.write_bytes(file.read_bytes()[:1000])
        case "another program's":
            file.unlink()
            other = sqlite3.connect(file)
            other.execute("CREATE TABLE notes (x)")
            other.commit()
            other.close()


@pytest.mark.parametrize("how", ["empty", "other content", "cut off", "another program's"])
def test_a_file_that_is_not_ours_is_named_and_left_alone(store, folder, file, how):
    add(store, range(100))
    store.close()
    damaged(file, how)
    before = file.read_bytes()
    with pytest.raises(StoreCorrupt) as raised:
        LocalStore(folder)
    assert str(file) in str(raised.value)
    assert "run a full sync" in str(raised.value)
    assert file.read_bytes() == before


def test_a_log_without_its_file_is_damage(store, folder, file):
    store.close()
    file.rename(f"{file}-wal")
    with pytest.raises(StoreCorrupt, match="-wal"):
        LocalStore(folder)


def test_damage_inside_is_found_when_it_is_read(store, folder, file):
    add(store, range(2000))
    store.close()
    pages = bytearray(file.read_bytes())
    pages[8192:-8192] = b"\xff" * (len(pages) - 16384)
    file.write_bytes(pages)

    def read() -> None:
        with closing(LocalStore(folder)) as again:
            list(again.records(NAME))

    with pytest.raises(StoreCorrupt, match="cannot be trusted"):
        read()


def test_a_text_that_is_none_is_damage_and_is_not_told(store, file):
    """Python's message for it quotes the text of the row."""
    add(store, range(2))
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE records SET text = CAST(? AS TEXT) WHERE document = 'k1'", (b"secret \xff",))
    with pytest.raises(StoreCorrupt, match="a text in it is not UTF-8") as raised:
        found(store)
    assert str(file) in str(raised.value)
    assert "secret" not in str(raised.value)


def test_damage_that_sqlite_cannot_tell_of_is_damage(store, folder, file):
    """Python cannot read a message that quotes half a character: it was a bare UnicodeDecodeError."""
    store.close()
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = file.read_bytes()
    assert b"CREATE TABLE records" in whole
    file.write_bytes(whole.replace(b"CREATE TABLE records", b"CREATE T\xc5BLE records"))
    with pytest.raises(StoreCorrupt) as raised:
        LocalStore(folder)
    assert str(file) in str(raised.value)


@pytest.mark.proves(18)
@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (99, r"of a later version \(99; this one has \d\): install that version, or move the file away"),
        (1, r"of an earlier commit \(1; .*not upgraded: delete it .* run a full sync \(owl-sap sync --all --full\)"),
    ],
)
def test_another_layout_is_refused(store, folder, file, version, advice):
    store.close()
    database = sqlite3.connect(file)
    database.execute(f"PRAGMA user_version = {version}")
    database.close()
    with pytest.raises(StoreCorrupt, match=advice):
        LocalStore(folder)


def test_a_folder_that_it_makes_is_its_users_alone(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    for folder, mode in ((tmp_path / "new", 0o700), (there, 0o755)):
        with closing(LocalStore(folder)) as store:
            store.open(NAME, Model())
        assert folder.stat().st_mode & 0o777 == mode


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatabaseError, match="cannot be used"):
        LocalStore(tmp_path / "file" / "store")


def test_a_full_disk_leaves_nothing_half_written(store):
    add(store, range(50))
    with store._file.read() as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
    with store._file.read() as db:  # the connection that is lent next
        db.execute(f"PRAGMA max_page_count = {pages + 5}")
    with pytest.raises(DatabaseError, match="no space left"), store.lease(NAME, "writer", 1) as lease:
        store.apply(lease, ChangeSet(chunks(range(3000)), unit(3000), deleted=["k1"]))
    assert found(store) == keys(range(50))
    add(store, range(60, 70))
    assert found(store) == keys(range(50)) | keys(range(60, 70))


def test_disk_use_is_bounded_under_churn(folder, file, monkeypatch):
    """Closed stores have no log, so the file is all there is."""
    monkeypatch.setattr(local, "TOMBSTONES_KEPT", 300)

    def churn(rounds: range) -> int:
        store = LocalStore(folder)
        store.open(NAME, Model())  # type: ignore[arg-type]
        for seed in rounds:
            add(store, range(300), seed=seed)
            store.optimise(NAME)
        store.close()
        return file.stat().st_size

    settled = churn(range(3))
    assert churn(range(3, 23)) < 1.5 * settled


def test_many_at_once_create_one_store(folder):
    def create(_: int) -> None:
        store = LocalStore(folder)
        store.open(NAME, Model())  # type: ignore[arg-type]
        store.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(8)))
    assert [path.name for path in folder.iterdir() if not path.name.endswith(("-wal", "-shm"))] == [local.FILE]


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(StatementFailed, match="closed"):
        store.status(NAME)


def test_what_sqlite_cannot_take_is_a_refused_row(store):
    huge = Chunk("k1", 0, "text", {}, b"h" * 32)
    twice = [Chunk("k1", 0, "text", {}, b"h" * 32)] * 2
    beyond = Chunk("k1", 2**70, "text", {}, b"h" * 32)
    for bad in (twice, [huge, beyond]):
        with pytest.raises(RowRejected):
            write(store, ChangeSet(bad, unit(2)))
    assert found(store) == set()


# ------------------------------------------------------------------------------------------------- other processes

CHILD = """
    import sys, numpy as np
    from pathlib import Path
    from tests.connector.test_store_local import *
    store = LocalStore(Path(sys.argv[1]), lease_times=LeaseTimes(ttl=1))
    store.open(NAME, Model())
"""


def child(folder: Path, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(script), str(folder)]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


def test_a_second_process_reads_and_writes(store, folder):
    add(store, range(20))
    assert found(store) == keys(range(20)), "so the copy in memory exists"
    with child(
        folder,
        """
        assert found(store) == keys(range(20))
        add(store, range(20, 30))
        write(store, ChangeSet(deleted=["k0", "k1"]))
        write(store, ChangeSet(metadata_only=[Chunk("k5", 0, "", {"NEW": 1}, b"n" * 32)]))
        """,
    ) as process:
        assert process.wait(60) == 0
    assert found(store) == keys(range(2, 30))
    assert found(store, {"NEW": 1}) == {"k5"}


@pytest.mark.proves(1)
def test_killed_in_the_middle_of_writing(store, folder):
    """Whole batches only, the file opens, and the lease of the dead writer runs out."""
    with child(
        folder,
        """
        with store.lease(NAME, "victim", 5) as lease:
            for batch in range(1000):
                store.apply(lease, ChangeSet(chunks(range(batch * 100, batch * 100 + 100)), unit(100)))
                print(batch, flush=True)
        """,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 5:
                break
        process.kill()
        rest = [int(line) for line in process.stdout.read().split()]
    committed = max([5, *rest]) + 1
    with store.lease(NAME, "heir", 10) as lease:
        count = sum(len(page) for page in store.stored(NAME))
        assert count % 100 == 0
        assert count in (committed * 100, committed * 100 + 100), "what was reported is there"
        assert found(store, k=count) == keys(range(count))
        store.apply(lease, ChangeSet(deleted=list(keys(range(count)))))
    assert found(store) == set()


# -------------------------------------------------------------------------------------------------- the copy in memory


def test_only_what_is_new_is_read_again(folder):
    loaded: list[int] = []

    class Scan(Int8Scan):
        def copy(self, dimension: int) -> Any:
            copy = super().copy(dimension)
            append = copy.append
            copy.append = lambda vectors: [loaded.append(len(vectors)), append(vectors)]  # type: ignore[method-assign]
            return copy

    with closing(LocalStore(folder, scan=Scan())) as store:
        store.open(NAME, Model())
        add(store, range(100))
        for _ in range(3):
            assert found(store) == keys(range(100))
        add(store, range(95, 103))
        assert found(store) == keys(range(103))
        write(store, ChangeSet(deleted=["k7"]))
        assert found(store) == keys(range(103)) - {"k7"}
    assert loaded == [100, 8]


def test_a_snapshot_in_use_never_changes(store):
    vectors = add(store, range(50))
    found(store)
    with store._file.read() as db:
        index = store._index(find(db, store._tables, NAME))
        before = index.snapshot(db)
    assert before is not None
    alive = before.alive.copy()

    def ranked() -> list[int]:
        (ranking,) = before.view.rank(QUERY[None], before.alive)
        return ranking.best(1)[0].tolist()

    expected = ranked()
    for seed in range(6):  # grows, buries and compacts
        add(store, range(seed * 30, seed * 30 + 60), seed=seed + 1)
        found(store)
    assert ranked() == expected == [int(exact_scores(vectors, QUERY).argmax())]
    assert np.array_equal(before.alive, alive)


def test_the_copy_does_not_grow_with_churn(store):
    for seed in range(12):
        add(store, range(100), seed=seed)
        assert len(found(store)) == 100
    with store._file.read() as db:
        now = store._index(find(db, store._tables, NAME)).snapshot(db)
    assert now is not None
    assert now.live == 100
    assert len(now.ids) <= 200


def test_without_room_for_a_second_copy_the_first_one_stays(folder):
    """As on a full card: the rows are compacted when there is room again."""
    room = False

    class Scan(Int8Scan):
        def copy(self, dimension: int) -> Any:
            copy = super().copy(dimension)
            kept = copy.kept

            def kept_if_room(rows: Any) -> Any:
                if not room:
                    raise MemoryError("no room")
                return kept(rows)

            copy.kept = kept_if_room  # type: ignore[method-assign]
            return copy

    with closing(LocalStore(folder, scan=Scan())) as store:
        store.open(NAME, Model())
        sizes = []
        for seed in range(5):
            room = seed == 4
            vectors = add(store, range(100), seed=seed)
            with store._file.read() as db:
                now = store._index(find(db, store._tables, NAME)).snapshot(db)
            assert now is not None
            assert found(store) == keys(range(100))
            (best,) = store.view(NAME).search(QUERY, 1)
            assert best.score == pytest.approx(exact_scores(vectors, QUERY).max())
            sizes.append((now.live, len(now.ids)))
    assert sizes == [(100, 100), (100, 200), (100, 300), (100, 400), (100, 100)]


def test_a_reader_that_fell_behind_the_tombstones_reloads(store, folder, monkeypatch):
    monkeypatch.setattr(local, "TOMBSTONES_KEPT", 5)
    reader = LocalStore(folder)
    add(store, range(100))
    assert found(reader) == keys(range(100))
    write(store, ChangeSet(deleted=list(keys(range(60)))))
    store.optimise(NAME)
    with store._file.read() as db:
        assert db.execute("SELECT count(*) FROM tombstones").fetchone() == (5,)
    assert found(reader) == keys(range(60, 100)) == found(store)
    add(store, range(200, 205))
    assert found(reader) == keys(range(60, 100)) | keys(range(200, 205))
    reader.close()


def test_rows_removed_behind_our_back_are_gone_from_search(store, file):
    add(store, range(10))
    found(store)
    database = sqlite3.connect(file)
    with database:
        database.execute("DELETE FROM records WHERE document = 'k3'")
    database.close()
    assert found(store) == keys(range(10)) - {"k3"}


def test_damaged_vectors_are_reported_and_never_found(store, file):
    add(store, range(6))
    database = sqlite3.connect(file)
    with database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        for record, vector in [(1, b"short"), (2, np.full(DIMENSION, np.nan, "<f4")), (3, np.zeros(DIMENSION, "<f4"))]:
            database.execute("UPDATE vectors SET vector = ? WHERE record = ?", (bytes(vector), record))
        database.execute("DELETE FROM vectors WHERE record = 4")
        database.execute("UPDATE vectors SET vector = ? WHERE record = 5", ((2 * QUERY).tobytes(),))
    database.close()
    vectors = {record.record: record.vector for page in store.records(NAME) for record in page}
    assert vectors[1] is None
    assert vectors[4] is None
    assert np.isnan(vectors[2]).all()
    hits = store.view(NAME).search(QUERY, 10)
    assert {hit.id for hit in hits} == {"k4", "k5"}
    assert (hits[0].id, hits[0].score) == ("k4", 1.0), "the cosine, whatever the length"


def test_after_a_failed_refresh_everything_is_read_anew(store, monkeypatch):
    add(store, range(10))
    found(store)
    add(store, range(10, 20))
    with monkeypatch.context() as broken:
        broken.setattr(local_search, "unit_rows", lambda rows, dimension: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found(store)
    assert found(store) == keys(range(20))


@pytest.mark.parametrize("writing", [False, True])
def test_a_reader_without_write_permission_looks_for_the_log_last(folder, file, monkeypatch, writing):
    with closing(LocalStore(folder)) as store:
        store.open(NAME, Model())
        add(store, range(5))
    log, connect = Path(f"{file}-wal"), sqlite3.connect
    if not writing:
        log.touch()

    def refused(address: str, **options: Any) -> sqlite3.Connection:
        if "mode=rw" not in address:
            return connect(address, **options)
        if writing:
            log.touch()
        else:
            log.unlink(missing_ok=True)
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", refused)
    if writing:
        with pytest.raises(DatabaseError):
            LocalStore(folder, read_only=True).view(NAME)
    else:
        with closing(LocalStore(folder, read_only=True)) as store:
            assert found(store) == keys(range(5))


def test_another_scan_is_used(folder):
    dimensions: list[int] = []

    class Scan(Int8Scan):
        def copy(self, dimension: int) -> Any:
            dimensions.append(dimension)
            return super().copy(dimension)

    store = LocalStore(folder, scan=Scan())
    store.open(NAME, Model())  # type: ignore[arg-type]
    add(store, range(5))
    assert len(found(store)) == 5
    assert dimensions == [DIMENSION]
    store.close()


class Churned:
    """Two stores over one file, and what they must find."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.stores = [LocalStore(folder), LocalStore(folder)]
        self.stores[0].open(NAME, Model())  # type: ignore[arg-type]
        self.rows: dict[str, tuple[list[np.ndarray], int]] = {}

    def change(self) -> None:
        """Some documents of one to three chunks are written, some go; many vectors are alike."""
        ids = [f"k{number}" for number in self.rng.choice(120, self.rng.integers(1, 60), replace=False)]
        gone = [id_ for id_ in ids[::4] if id_ in self.rows]
        parts, vectors = [], []
        centres = unit(6, seed=int(self.rng.integers(0, 3)))
        for id_ in set(ids) - set(gone):
            group = int(self.rng.integers(0, 4))
            own = centres[self.rng.integers(0, 6, self.rng.integers(1, 4))]
            own = own + self.rng.standard_normal(own.shape) * self.rng.choice([0, 1e-7, 1e-3, 1])
            own = (own / np.linalg.norm(own, axis=1, keepdims=True)).astype(np.float32)
            self.rows[id_] = list(own), group
            parts += [Chunk(id_, place, "text", {"G": group}, b"h" * 32) for place in range(len(own))]
            vectors += list(own)
        for id_ in gone:
            del self.rows[id_]
        with self.stores[0].lease(NAME, "writer", 5) as lease:
            self.stores[0].apply(lease, ChangeSet(parts, np.array(vectors).reshape(-1, DIMENSION), deleted=gone))

    def check(self, query: np.ndarray, k: int, group: int | None) -> None:
        asked = unit_query(query, DIMENSION)
        best = [
            (
                -float(exact_scores(local_search.unit_rows([one.tobytes() for one in own], DIMENSION)[0], asked).max()),
                id_,
            )
            for id_, (own, its) in self.rows.items()
            if group is None or its == group
        ]
        wanted = [(id_, -score) for score, id_ in sorted(best)[:k]]
        where = None if group is None else {"G": group}
        for store in self.stores:
            assert [(hit.id, hit.score) for hit in store.view(NAME).search(query, k, where)] == wanted


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_every_scan_finds_the_true_best_under_churn(folder, monkeypatch, seed):
    """To the last bit of the score, ties by id, whatever way the filter goes."""
    monkeypatch.setattr(local_search, "SELECTIVE_ROWS", 30)
    both = Churned(folder, seed)
    for _ in range(12):
        both.change()
        stored = next(iter(both.rows.values()))[0][0]
        for query in (QUERY, unit(1, seed=int(both.rng.integers(0, 99)))[0], stored):
            both.check(query, int(both.rng.integers(1, 40)), [None, 0, 1][int(both.rng.integers(0, 3))])
    for store in both.stores:
        store.close()


def test_searches_are_exact_while_another_thread_writes(folder, monkeypatch):
    """Each answer is that of one moment: the best of exactly the rows that one commit left. Scans use several threads
    each."""
    monkeypatch.setattr(scan, "_PART_ROWS", 7)
    monkeypatch.setattr(scan._cores, "count", 16)
    rounds, rows = 40, 60
    all_vectors = {number: unit(rows, seed=number) for number in range(rounds)}
    done = threading.Event()
    with closing(LocalStore(folder)) as store, ThreadPoolExecutor(4) as pool:
        store.open(NAME, Model())  # type: ignore[arg-type]

        def search() -> int:
            seen = 0
            while not done.is_set() or not seen:
                hits = store.view(NAME).search(QUERY, 5, {"N": {"$gte": 0}} if seen % 2 else None)
                of = {hit.metadata["ROUND"] for hit in hits}
                assert len(of) <= 1, "rows of two moments"
                if of:
                    vectors = all_vectors[of.pop()]
                    best = np.sort(exact_scores(vectors, QUERY))[::-1][:5]
                    assert [hit.score for hit in hits] == pytest.approx(best.tolist(), abs=1e-7)
                seen += 1
            return seen

        readers = [pool.submit(search) for _ in range(4)]
        try:
            with store.lease(NAME, "writer", 5) as lease:
                for number, vectors in all_vectors.items():  # every document anew, in one transaction
                    store.apply(lease, ChangeSet(chunks(range(rows), ROUND=number), vectors))
        finally:
            done.set()
        assert all(reader.result() for reader in readers)


# ---------------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("selective_rows", [1, 20, 100_000])
def test_every_way_to_filter_gives_the_same(store, monkeypatch, selective_rows):
    """From the kept rows, down the ranking, or from the kept rows after all because they lie far down."""
    monkeypatch.setattr(local_search, "SELECTIVE_ROWS", selective_rows)
    monkeypatch.setattr(local_search, "SELECTIVE_SHARE", 50)
    vectors = add(store, range(1000))
    scores = vectors.astype(np.float64) @ QUERY.astype(np.float64)
    order = np.argsort(-scores)
    far = set(order[-400:].tolist())
    write(
        store,
        ChangeSet(metadata_only=[Chunk(f"k{n}", 0, "", {"N": n, "FAR": n in far}, b"h" * 32) for n in range(1000)]),
    )
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"FAR": True}, far),
        ({"FAR": False}, set(range(1000)) - far),
        ({"N": {"$lt": 3}}, {0, 1, 2}),
        ({"N": {"$gte": 0}}, set(range(1000))),
        ({"N": -1}, set()),
    ]
    for where, keep in cases:
        best = [f"k{number}" for number in order if number in keep][:7]
        assert [hit.id for hit in store.view(NAME).search(QUERY, 7, where)] == best


def test_a_filter_that_takes_too_long_is_given_up(store, monkeypatch):
    """A hundred conditions over many rows held a thread, and all others up, for minutes."""
    add(store, range(400), KIND="a pump of steel")
    where = {"$or": [{"KIND": {"$contains": f"word {number}"}} for number in range(100)]}
    with monkeypatch.context() as patch:
        patch.setattr(local_search, "FILTER_SECONDS", 0.0)
        patch.setattr(local_search, "_STEPS", 1000)
        for ask in (lambda: found(store, where), lambda: store.view(NAME).keyword("text", 5, where)):
            with pytest.raises(BadFilter, match="fewer conditions"):
                ask()
        assert len(store.view(NAME, row_filter={"KIND": "a pump of steel"}).search(unit(1)[0], 500)) == 400, (
            "not rights"
        )
        assert len(found(store)) == 400
    assert found(store, where) == set()
    assert len(found(store, {"KIND": {"$contains": "pump of"}})) == 400


def test_a_search_that_nobody_waits_for_is_interrupted(folder, monkeypatch):
    call, looked = Cancellation(), list[str]()

    def contains(phrase: str, text: str) -> bool:
        looked.append(text)
        call.cancel()
        return False

    monkeypatch.setitem(filters._SQLITE_FUNCTIONS, "owl_contains", (2, contains))
    with closing(LocalStore(folder)) as store:
        store.open(NAME, Model())
        add(store, range(400), KIND="a pump of steel")
        where = {"KIND": {"$contains": "brass"}}
        with cancelled_by(call), pytest.raises(Cancelled):
            found(store, where)
        assert len(looked) == 1, "the rows after it were not looked at"
        for ask in (lambda: found(store), lambda: store.view(NAME).keyword("text", 5)):
            with cancelled_by(call), pytest.raises(Cancelled):
                ask()
        call = Cancellation()
        assert len(found(store)) == 400, "the connection serves the next"


def test_a_filter_is_asked_about_new_rows_only(store):
    add(store, range(50), V=1)
    found(store, {"V": 1})
    add(store, range(50, 60), V=1)
    add(store, range(60, 70), V=2)
    with store._file.read() as db:
        statements: list[str] = []
        db.set_trace_callback(statements.append)
    assert found(store, {"V": 1}) == keys(range(60))
    with store._file.read() as db:
        db.set_trace_callback(None)
    (asked,) = [statement for statement in statements if statement.startswith("SELECT id FROM records WHERE")]
    assert "id > 50" in asked


def test_a_remembered_filter_follows_every_change(store):
    add(store, range(10), V=1)
    assert found(store, {"V": 1}) == found(store, {"V": 1}) == keys(range(10))
    write(store, ChangeSet(metadata_only=[Chunk("k1", 0, "", {"V": 2}, b"h" * 32)]))
    assert found(store, {"V": 1}) == keys(range(10)) - {"k1"}
    write(store, ChangeSet(deleted=["k2"]))
    assert found(store, {"V": 1}) == keys(range(10)) - {"k1", "k2"}
    add(store, range(10, 12), V=1)
    assert found(store, {"V": 1}) == keys(range(12)) - {"k1", "k2"}
    for number in range(2 * FILTERS):
        found(store, {"N": number})
    with store._file.read() as db:
        now = store._index(find(db, store._tables, NAME)).snapshot(db)
    assert now is not None
    assert len(now.filtered) <= FILTERS


def test_a_filter_remembered_by_a_newer_reader_hides_nothing_from_an_older_one(store):
    add(store, range(50), V=1)
    condition = filters.parse({"V": 1})
    found(store)
    with store._file.read() as db:
        collection = find(db, store._tables, NAME)
        index = store._index(collection)
        search = local_search.Search(db, collection.id, index.snapshot(db), index.scans)
        write(store, ChangeSet(deleted=["k1", "k2"]))
        for _ in range(2):
            assert found(store, {"V": 1}) == keys(range(50)) - {"k1", "k2"}
            assert {hit.id for hit in search(QUERY, 100, condition)} == keys(range(50))


def test_commits_of_other_collections_copy_nothing(store):
    add(store, range(50))
    found(store)
    with store._file.read() as db:
        index = store._index(find(db, store._tables, NAME))
        before = index.snapshot(db)
    store.open("other", Model())
    with store.lease("other", "writer", 5) as lease:
        store.apply(lease, ChangeSet(chunks=chunks(range(3)), vectors=unit(3)))
    with store._file.read() as db:
        after = index.snapshot(db)
    assert before is not None
    assert after is not None
    assert after.mark > before.mark
    assert after.alive is before.alive
    assert after.view is before.view
    assert found(store) == keys(range(50))


def test_the_filters_of_many_askers_are_remembered_and_the_memory_for_them_is_bounded(store):
    """With row rights everybody asks with a filter: each looks through all rows once, not each time."""
    for owner in range(20):
        add(store, range(owner * 5, owner * 5 + 5), V=owner)
    for scans in (20, 0):
        statements: list[str] = []
        with store._file.read() as db:
            db.set_trace_callback(statements.append)
        for owner in range(20):
            assert found(store, {"V": owner}) == keys(range(owner * 5, owner * 5 + 5))
        with store._file.read() as db:
            db.set_trace_callback(None)
        assert sum(statement.startswith("SELECT id FROM records WHERE") for statement in statements) == scans
    for number in range(10):
        assert len(found(store, {"V": {"$gte": -1 - number}})) == 100
    with store._file.read() as db:
        now = store._index(find(db, store._tables, NAME)).snapshot(db)
    assert now is not None
    assert now.filtered.rows <= local_search.REMEMBERED_ROWS * 100
    assert found(store, {"V": 3}) == keys(range(15, 20)), "forgotten, and looked up again"


def test_a_remembered_filter_costs_as_little_memory_however_many_values_it_has(store):
    add(store, range(3), V="a")
    found(store, {"V": {"$in": ["a"]}})  # what all searches need is there
    tracemalloc.start()
    try:
        for number in range(20):
            assert not found(store, {"V": {"$in": [f"{number} {each} {'x' * 4900}" for each in range(20)]}})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20, "of the two million bytes of these filters"


# ----------------------------------------------------------------------------------------------------------- leases


def test_a_write_keeps_to_one_lease_through_threads(store):
    """Twenty writers in turn: nothing is lost and no two are in at once."""
    inside: list[int] = []

    def work(number: int) -> None:
        with store.lease(NAME, f"w{number}", 30) as lease:
            inside.append(1)
            assert len(inside) == 1
            store.apply(lease, ChangeSet(chunks(range(number, number + 1)), unit(1)))
            inside.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(20)))
    assert found(store) == keys(range(20))


def test_the_renewing_thread_gives_up_a_lost_lease(folder):
    store = LocalStore(folder, lease_times=LeaseTimes(ttl=30, renew=0.05))
    store.open(NAME, Model())  # type: ignore[arg-type]
    with store.lease(NAME, "first", 0) as lease:
        with store._file.write() as db:
            db.execute("UPDATE collections SET lease_epoch = lease_epoch + 1, lease_owner = 'second'")
        time.sleep(0.2)
        assert not store.renew_lease(lease, 30)
    with store._file.read() as db:
        assert db.execute("SELECT lease_owner FROM collections").fetchone() == ("second",), "not released for another"
    assert store.renew_lease(Lease(NAME, "second", lease.epoch + 1), 30)
    store.close()


def test_metadata_is_readable_json_in_the_file(store, file):
    add(store, range(1), ÄÖ="ü")
    database = sqlite3.connect(file)
    (meta,) = database.execute("SELECT meta FROM records").fetchone()
    database.close()
    assert json.loads(meta) == {"N": 0, "ÄÖ": "ü"}


def test_a_drop_that_was_cut_short_is_finished_by_another(store, folder, monkeypatch):
    add(store, range(10))
    beside = store.generations.begin(NAME, Other(), RECIPE)
    with store.lease(beside, "writer", 5) as lease:
        store.apply(lease, ChangeSet(chunks(range(20)), unit(20), checkpoint=Checkpoint(20)))
    monkeypatch.setattr(local, "DELETE_PAGE", 7)
    checks = iter([True, False])
    check = LocalStore._check

    def dying(self: Any, session: Any, lease: Lease) -> None:
        if not next(checks):
            raise KeyboardInterrupt
        check(self, session, lease)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "_check", dying)
        with pytest.raises(KeyboardInterrupt):
            store.generations.drop(NAME, 2)
    (_, left) = store.generations.all(NAME)
    assert (left.rows, left.complete) == (13, False)
    with pytest.raises(GenerationRefused, match="drop it again"):
        store.generations.switch(NAME, 2)
    assert store.generations.begin(NAME, Other(), RECIPE) == f"{NAME}@3", "it is not built on"
    store.generations.drop(NAME, 2)
    assert [each.number for each in store.generations.all(NAME)] == [1, 3]
    assert found(store) == keys(range(10))


WRITER = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.execute("UPDATE collections SET lease_owner = 'somebody'")
database.close()
"""


def test_opening_the_store_once_more_takes_no_locks_away(store, folder, file):
    """POSIX locks of a process on a file go when it closes any descriptor of it. Then another process takes itself for
    the last one, removes the log under our open connections, and what is read from then on is damaged."""
    add(store, range(3))
    LocalStore(folder).close()
    with sqlite3.connect(file) as database:
        names = [name for (name,) in database.execute("SELECT collection FROM collections")]
    database.close()
    assert names == [NAME]
    subprocess.run([sys.executable, "-c", WRITER, str(file)], check=True)
    assert file.with_name(file.name + "-wal").exists(), "it is still in use"
    add(store, range(3, 6))
    assert found(store) == keys(range(6))
