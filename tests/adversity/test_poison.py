"""Rows that no one expects, engines that fall ill, disks that fill up: the others go on, and nothing bad is stored."""

from __future__ import annotations

import json
import math
import resource
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import OutOfMemory, TokenBatch
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.errors import ConfigurationError, DatabaseError, StoreCorrupt
from connector.model import CollectionSpec, TableRef, Vectors
from connector.retry import RetryPolicy
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import verify
from tests.adversity.proxy import COMMIT, Fault, Proxy, Strike
from tests.adversity.scene import EMPTY, NAME, PATIENT, ROWS, Scene
from tests.slow import slow, slow_but

FULL = ROWS - EMPTY

# ------------------------------------------------------------------------------------------------------------- texts

POISON: list[tuple[str, str, str]] = [
    # (what it is, text, how the stored text begins: control characters became blanks; nothing when the row is empty)
    ("a NUL inside", "pump\0station", "pump station"),
    ("only NUL", "\0\0\0", ""),
    ("a megabyte", "valve " * 175_000, "valve valve"),
    ("one word of 100,000 letters", "x" * 100_000, "xxxxx"),
    ("combining characters", "e" + "\u0301" * 5_000, "e\u0301\u0301"),
    ("emoji only", "😀👨‍👩‍👧‍👦🏳️‍🌈" * 20, "😀👨‍👩‍👧‍👦🏳️‍🌈"),
    ("right to left and back", "\u202eabc\u202c \u0645\u0636\u062e\u0629", "\u202eabc\u202c"),
    ("private use and unassigned", "\ue000\U000f0000\U0003ffff", "\ue000\U000f0000\U0003ffff"),
    ("non-characters", "\uffff\ufffe\U0010ffff", "\uffff\ufffe\U0010ffff"),
    ("control characters", "".join(map(chr, range(1, 32))) + "pump", "pump"),
    ("a quote, a brace, a percent", "'; DROP TABLE X; -- {TXT} %s ? :1 \\", "'; DROP TABLE X; -- {TXT} %s ? :1 \\"),
    ("JSON", '{"a": [1, null]}', '{"a": [1, null]}'),
    ("a byte-order mark inside", "pump\ufeffstation", "pump station"),
    ("a byte-order mark at the start", "\ufeffpump", "pump"),
    ("only byte-order marks", "\ufeff\ufeff", ""),
    ("blanks", "     ", ""),
    ("tabs and line ends", "\t\r\n\v\f", ""),
    ("no-break and ideographic blanks", "\u00a0\u3000\u2003\u2028\u2029\u0085", ""),
    ("nothing", "", ""),
]


@pytest.mark.parametrize(
    ("scene", "type_"),
    [("local", "NCLOB"), ("hana", "NVARCHAR(5000)"), *slow(("local", "NVARCHAR(5000)"), ("hana", "NCLOB"))],
    indirect=["scene"],
)
@pytest.mark.proves(22)
def test_strange_texts_stop_nobody(scene: Scene, type_: str) -> None:
    chosen = [row for row in POISON for text in row[1:2] if type_ == "NCLOB" or len(text) <= 5000]
    scene.run(f'CREATE COLUMN TABLE "P" ("K" INTEGER PRIMARY KEY, "TXT" {type_})')
    scene.run('INSERT INTO "P" VALUES (?, ?)', *[(number, text) for number, (_, text, _) in enumerate(chosen)])
    scene.run("""INSERT INTO "P" VALUES (900, 'a plain pump')""")
    spec = CollectionSpec("poison", TableRef(scene.schema, "P"), "{TXT}")
    ends = scene.ends()
    report = sync(spec, ends, SyncOptions(page_rows=3, window=4))
    empty = sum(not begin for _, _, begin in chosen)
    assert report.read == len(chosen) + 1
    assert report.read == report.upserted + report.empty + report.quarantined
    assert report.empty == empty
    assert ends.store.quarantine("poison") == []
    (best,) = ends.store.view("poison").search(ends.embedder.embed_query("a plain pump"), 1)
    assert best.id == "[900]"
    kept = {record.id: record.text for page in ends.store.records("poison") for record in page if record.number == 0}
    for number, (name, _, begin) in enumerate(chosen):
        stored = kept.get(f"[{number}]")
        assert (stored or "").startswith(begin), (name, (stored or "")[:40])
        assert (stored is None) == (not begin), name
    assert verify(spec, ends).ok
    assert sync(spec, ends, SyncOptions(page_rows=3, window=4)).upserted == 0


@pytest.mark.proves(22)
def test_values_of_the_row_never_reach_the_log_or_the_messages(scene: Scene) -> None:
    """A key longer than the store takes is set aside, named by its digest or key, without its text."""
    scene.run('CREATE COLUMN TABLE "P" ("K" NVARCHAR(3000) PRIMARY KEY, "TXT" NVARCHAR(50))')
    scene.run('INSERT INTO "P" VALUES (?, ?)', ("x" * 2999, "canary-31"), ("1", "plain"), ("2", "canary-32"))
    config = f'\n[[collections]]\nname = "p"\nsource = "{scene.schema}.P"\ntemplate = "{{TXT}}"\n'
    with (scene.folder / "owl-sap.toml").open("a") as file:
        file.write(config)
    code, out, errors = scene.cli("sync", "p", "--json")
    (report,) = json.loads(out)
    assert (code, report["read"], report["upserted"] + report["quarantined"]) == (0, 3, 3)
    assert report["upserted"] >= 2
    assert "canary" not in out + errors


# ------------------------------------------------------------------------------------------------------ sick engines


class SickBackend:
    """The hashing backend with a fault: `ill(tokens)` says what happens to a batch's row, or that memory runs out."""

    def __init__(self, backend: Any, fault: str, every: int = 7) -> None:
        self._backend = backend
        self._fault = fault
        self._every = every
        self.batches: list[int] = []
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Any = None) -> Vectors:
        size = batch.tokens
        if self._fault == "memory" and len(batch) > 1 and size > 100:
            self.failures += 1
            raise OutOfMemory("planted")
        self.batches.append(size)
        vectors: Vectors = np.array(self._backend.forward(batch, exact=exact))
        for row, tokens in enumerate(batch):
            if int(tokens.sum()) % self._every == 0 and self._fault in ("nan", "inf"):
                vectors[row, 0] = float(self._fault)
        return vectors


def sick(fault: str) -> tuple[EngineEmbedder, SickBackend]:
    engine = load_engine(EngineOptions(model="hash:64"))
    backend = SickBackend(engine._backend, fault)  # type: ignore[attr-defined]
    return EngineEmbedder(EmbeddingEngine(backend)), backend


@pytest.mark.parametrize("fault", ["nan", *slow("inf")])
@pytest.mark.proves(21)
def test_a_vector_that_is_not_finite_is_never_stored(scene: Scene, fault: str) -> None:
    embedder, _ = sick(fault)
    plain = scene.ends()
    report = scene.sync(Ends(plain.source, plain.store, embedder))
    assert report.quarantined > 5
    assert report.read == report.upserted + report.empty + report.quarantined
    for page in plain.store.records(NAME):
        for record in page:
            assert record.vector is not None
            assert np.isfinite(record.vector).all()
            assert abs(np.linalg.norm(record.vector) - 1) < 1e-3
    rows = plain.store.quarantine(NAME)
    assert (len(rows), {row.stage for row in rows}) == (report.quarantined, {"embed"})
    healed = scene.sync(plain)
    assert (healed.upserted, healed.quarantined) == (report.quarantined, 0)
    assert plain.store.quarantine(NAME) == []
    scene.converges()


class Liar:
    """An embedder that breaks its promise: vectors of some texts are not unit vectors, and it does not say so."""

    def __init__(self, embedder: EngineEmbedder, bad: float) -> None:
        self._embedder = embedder
        self._bad = bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        vectors = np.array(self._embedder.embed_documents(texts))
        for row, text in enumerate(texts):
            if text.startswith("pump 5"):
                vectors[row] *= self._bad
        return vectors

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        return self.embed_documents(texts), self._embedder.count_tokens(texts)


@pytest.mark.parametrize("bad", [float("nan"), *slow(0.0, 1.1)])
@pytest.mark.proves(21)
def test_the_store_is_the_last_guard_and_isolates_the_rows(scene: Scene, bad: float) -> None:
    """Rows 5, 50 to 59 begin so. Their window is halved until each stands alone; all others are stored."""
    plain = scene.ends()
    with np.errstate(invalid="ignore"):
        report = scene.sync(Ends(plain.source, plain.store, Liar(scene.embedder, bad)))
    assert (report.quarantined, report.upserted) == (11, FULL - 11)
    wrong = {f"[{number}]" for number in (5, *range(50, 60))}
    assert {row.id for row in plain.store.quarantine(NAME)} == wrong
    assert set(scene.content()) == scene.truth() - wrong
    assert scene.converges().upserted == 11


@pytest.mark.proves(21)
def test_a_sick_query_is_refused(scene: Scene) -> None:
    ends = scene.ends()
    scene.sync(ends)
    for query in (np.zeros(64), np.full(64, np.nan), np.ones(63), np.ones((1, 64))):
        with pytest.raises(ConfigurationError, match="query vector"):
            ends.store.view(NAME).search(query.astype(np.float32), 3)


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.proves(19)
def test_out_of_memory_gives_the_same_vectors_in_smaller_batches(scene: Scene) -> None:
    embedder, backend = sick("memory")
    plain = scene.ends()
    report = scene.sync(Ends(plain.source, plain.store, embedder), window=200)
    assert backend.failures > 0
    assert max(backend.batches) <= 100 or backend.failures < len(backend.batches)
    assert (report.upserted, report.quarantined) == (FULL, 0)
    assert scene.converges().upserted == 0  # verify compares every vector with the healthy engine's


# ------------------------------------------------------------------------------------------- the local store's file


@contextmanager
def full_disk(kilobytes: int) -> Iterator[None]:
    """No file of this process grows beyond that; Python ignores the signal."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.proves(16)
def test_a_full_disk_exits_with_3_and_leaves_whole_documents(scene: Scene) -> None:
    LocalStore(scene.folder / "vectors").close()
    with full_disk(120):
        code, _, errors = scene.verb("sync", "rows")
    assert code == 3, errors
    assert "vectors.sqlite" in errors
    scene.converges()


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.proves(16)
def test_a_database_that_may_not_grow_rolls_the_change_set_back_whole(scene: Scene) -> None:
    scene.sync()
    before = scene.content()
    scene.run("""UPDATE "ROWS" SET "TXT" = "TXT" || ' and much more text of which there is a lot, ' || "TXT" """)
    store = LocalStore(scene.folder / "vectors")
    with store._file.write() as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Exception, match=r"no space left.*nothing was written"):
        sync(scene.spec, Ends(scene.ends().source, store, scene.embedder), SyncOptions(window=1000))
    store.close()
    assert scene.content() == before
    scene.converges()


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"\0" * len(data), "not a SQLite file"),
        (lambda data: data[: len(data) // 2], "SQLite says"),
        (lambda data: data[:68] + b"\0\0\0\0" + data[72:], "another program"),
        *slow(
            (lambda data: data[:7], "not a SQLite file"),
            (lambda data: data[:100], "SQLite says"),
            (lambda data: data[:16] + b"\xff" * 4080 + data[4096:], "SQLite says"),
        ),
    ],
    ids=["empty", "zeros", "half", "not ours", "seven bytes", "header only", "broken first page"],
)
@pytest.mark.proves(18)
def test_a_damaged_file_is_refused_by_name(scene: Scene, damage: Any, said: str) -> None:
    scene.sync()
    scene.close()
    file = scene.folder / "vectors" / "vectors.sqlite"
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    with pytest.raises(StoreCorrupt, match="run a full sync") as caught:
        LocalStore(file.parent).status(NAME)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)
    if said == "empty":
        code, _, errors = scene.verb("status", "rows")
        assert (code, "vectors.sqlite" in errors) == (3, True), errors
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("scene", ["local"], indirect=True)
@pytest.mark.parametrize("page", [5, *slow(2, 9)])
@pytest.mark.proves(18)
def test_a_page_of_rubbish_is_damage_or_harmless_and_never_a_wrong_answer(scene: Scene, page: int) -> None:
    """Rubbish in a page of the file: refused by name, or found by verify, or in a page that nothing uses."""
    scene.sync()
    scene.close()
    file = scene.folder / "vectors" / "vectors.sqlite"
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(file.read_bytes())
    data[page * 4096 : page * 4096 + 4096] = bytes(range(256)) * 16
    file.write_bytes(data)
    try:
        ends = scene.ends()
        sound = verify(scene.spec, ends).ok
        hits = ends.store.view(NAME).search(ends.embedder.embed_query("pump 5 of plant 5"), 3)
    except StoreCorrupt as error:
        refusal, sound, hits = str(error), False, []
    else:
        refusal = "vectors.sqlite was read"
    assert "vectors.sqlite" in refusal
    assert not sound or hits[0].id == "[5]"


# --------------------------------------------------------------------------------- rows refused, and what is no row's


def order(scene: Scene, **fault: Any) -> None:
    document = json.dumps(fault).replace("'", "''")
    scene.run(f"ALTER SYSTEM INJECT FAULT '{document}'")


@pytest.fixture
def broken(scene: Scene) -> Iterator[Scene]:
    yield scene
    scene.run("ALTER SYSTEM CLEAR FAULTS")


INSERTS = r"INSERT INTO .*OWL_ROWS_G1"


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_rows_that_a_table_refuses_are_found_by_halves(scene: Scene) -> None:
    """A table with a condition of its own, as somebody may have given it: three rows break it."""
    ends = scene.ends()
    ends.store.open(NAME, scene.embedder)
    condition = """ADD CONSTRAINT "THEIR" CHECK ("SRC_KEY" NOT IN ('[5]', '[50]', '[51]'))"""
    scene.run(f'ALTER TABLE "{scene.schema}"."OWL_ROWS_G1" {condition}')
    sent: list[str] = []
    store = HanaStore(scene.pool(on_statement=sent.append), scene.schema, lease_times=PATIENT)
    report = scene.sync(Ends(ends.source, store, scene.embedder), page_rows=ROWS, window=ROWS)
    assert (report.upserted, report.quarantined) == (FULL - 3, 3)
    entries = store.quarantine(NAME)
    assert {row.id for row in entries} == {"[5]", "[50]", "[51]"}
    assert all(row.stage == "apply" and "code 677" in row.reason for row in entries)
    attempts = len([sql for sql in sent if sql.startswith("INSERT")])
    assert attempts <= 1 + 3 * 2 * math.ceil(math.log2(ROWS)), "two halves for each time that a bad row's part is cut"
    scene.run(f'ALTER TABLE "{scene.schema}"."OWL_ROWS_G1" DROP CONSTRAINT "THEIR"')
    assert scene.converges().upserted == 3


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_somebody_elses_unique_index_sets_aside_rows_of_several_chunks_only(scene: Scene) -> None:
    """301 comes from nothing of ours: SRC_KEY has an index that is not unique, and HANA gives out the ids."""
    ends = scene.ends()
    ends.store.open(NAME, scene.embedder)
    scene.run(f'ALTER TABLE "{scene.schema}"."OWL_ROWS_G1" ADD CONSTRAINT "ONE" UNIQUE ("SRC_KEY")')
    report = scene.sync(ends)
    assert (report.upserted, report.quarantined) == (FULL - 12, 12)
    assert {row.id for row in ends.store.quarantine(NAME)} == {f"[{number}]" for number in range(3, ROWS, 10)}
    scene.run(f'ALTER TABLE "{scene.schema}"."OWL_ROWS_G1" DROP CONSTRAINT "ONE"')
    assert scene.converges().upserted == 12


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_an_id_that_somebody_else_has_used_sets_nothing_aside(scene: Scene) -> None:
    """Their rows stand where HANA's counter will come by: 301 for ours, and the next id is free."""
    ends = scene.ends()
    ends.store.open(NAME, scene.embedder)
    table = f'"{scene.schema}"."OWL_ROWS_G1"'
    scene.run(f'INSERT INTO {table} ("ID", "VEC_TEXT") VALUES (?, ?)', *[(n, "theirs") for n in (9, 10, 11, 60)])
    report = scene.sync(ends)
    assert (report.upserted, report.quarantined) == (FULL, 0)
    assert scene.run(f'SELECT COUNT(*) FROM {table} WHERE "SRC_KEY" IS NULL') == [(4,)]


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("code", [4, *slow(142, 613, 2048)])
def test_a_hana_short_of_memory_gets_less_at_a_time_and_sets_nothing_aside(broken: Scene, code: int) -> None:
    order(broken, match=INSERTS, action="error", code=code, text="Memory allocation failed", count=7)
    report = broken.sync(page_rows=ROWS, window=ROWS)
    assert (report.upserted, report.quarantined) == (FULL, 0)
    assert broken.run("SELECT HITS FROM SYS.M_EMULATOR_FAULTS") == [(7,)]
    broken.run("ALTER SYSTEM CLEAR FAULTS")
    assert broken.converges().unchanged == FULL


INFRASTRUCTURE = [4, 7, 131, 138, 142, 257, 258, 259, 597, 613, 1888, 2048]
PLACES = {
    "read": r'SELECT .* FROM "TEST_\d+"\."ROWS"',
    "look up": r"SELECT .*OWL_ROWS_G1",
    "remove": r"DELETE FROM .*OWL_ROWS_G1",
    "insert": INSERTS,
    "metadata": r"UPDATE .*OWL_ROWS_G1",
    "set aside": r"INSERT INTO .*OWL_QUARANTINE",
    "commit": r"^COMMIT$",
}


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
@pytest.mark.parametrize("place", slow_but(PLACES, "insert"))
def test_no_code_of_the_infrastructure_is_ever_a_rows_fault(broken: Scene, place: str) -> None:
    """Each for good, in turn: the sync fails, or rides over it, and the quarantine stays as it is."""
    ends = broken.ends(retry=RetryPolicy(attempts=2, first_wait=0.001, longest_wait=0.001))
    broken.sync(ends)
    broken.run("""UPDATE "ROWS" SET "GRP" = 'NEW' WHERE "K" < 5""")
    broken.run("""UPDATE "ROWS" SET "TXT" = 'another pump' WHERE "K" IN (5, 6, 8)""")
    liar = Liar(broken.embedder, 0.0) if place == "set aside" else broken.embedder
    if place == "set aside":
        broken.run("""UPDATE "ROWS" SET "TXT" = 'pump 5' WHERE "K" = 11""")
    for code in INFRASTRUCTURE:
        order(broken, match=PLACES[place], action="error", code=code, text="x", count=None)
        with pytest.raises((DatabaseError, ConfigurationError)) as caught:
            broken.sync(Ends(ends.source, ends.store, liar))
        broken.run("ALTER SYSTEM CLEAR FAULTS")
        assert getattr(caught.value, "code", code) == code
        assert ends.store.quarantine(NAME) == [], code
    broken.converges()


@pytest.mark.parametrize("scene", ["hana"], indirect=True)
def test_a_commit_whose_answer_was_lost_counts_one_attempt(scene: Scene) -> None:
    ends = scene.ends()
    scene.sync(ends)
    scene.run("""UPDATE "ROWS" SET "TXT" = 'pump 5' WHERE "K" = 11""")
    with Proxy(scene.emulator.port) as proxy:
        lost = Ends(ends.source, scene.store(proxy.port), Liar(scene.embedder, 0.0))
        armed = lost.store.apply

        def arm(lease: Any, changes: Any) -> None:
            if changes.quarantined:
                proxy.strike(Strike(COMMIT, 1, Fault.LOSE_REPLY))
            armed(lease, changes)

        lost.store.apply = arm  # type: ignore[method-assign]
        report = scene.sync(lost, page_rows=ROWS, window=ROWS)
        assert proxy.fired.is_set()
    assert report.quarantined == 1
    assert [(row.id, row.attempts) for row in ends.store.quarantine(NAME)] == [("[11]", 1)]
    assert scene.converges().upserted == 1


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_bad_rows_of_many_runs_write_a_handful_of_lines(scene: Scene) -> None:
    """pgai wrote 472,000 (issue 783). Twenty bad rows, left alone after one attempt, until asked for."""
    scene.run('CREATE COLUMN TABLE "P" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(50), "META" NCLOB)')
    scene.run(
        'INSERT INTO "P" VALUES (?, ?, ?)', *[(n, f"valve {n}", "x" * 200_000 if n % 2 else "M") for n in range(40)]
    )
    with (scene.folder / "owl-sap.toml").open("a") as file:
        file.write(
            f'\n[[collections]]\nname = "p"\nsource = "{scene.schema}.P"\ntemplate = "{{TXT}}"\nmetadata = ["META"]\n'
        )
    env = {"OWL_SAP_SYNC__MAX_ATTEMPTS": "1"}
    for run in (1, 2):
        code, out, errors = scene.cli("sync", "p", "--json", env=env)
        (report,) = json.loads(out)
        assert (code, report["read"], report["quarantined"], report["upserted"]) == (0, 40, 20, 20 if run == 1 else 0)
        assert len(errors.splitlines()) <= 4, errors
        assert any("were skipped" in note for note in report["notes"]) == (run == 2)
    code, out, _ = scene.verb("quarantine", "retry", "p", "K=1", "--json", env=env)
    assert (code, json.loads(out)["quarantined"]) == (1, 1)
    listed = json.loads(scene.verb("quarantine", "list", "p", "--json")[1])
    assert [(entry["attempts"], entry["given_up"]) for entry in listed] == [(1, False)] * 20, "six are the default"
