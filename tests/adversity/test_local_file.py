"""The file of the local store under damage, locks, missing rights and lost power: refused by name, waited for, or read
as it was at some moment; never silently empty and never wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from connector.errors import (
    ConnectorError,
    DatabaseError,
    ModelMismatch,
    PermissionRefused,
    StoreCorrupt,
    TransactionRolledBack,
)
from connector.stores.local import sqlite_file
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends
from connector.sync.verify import verify
from tests.adversity.scene import EMPTY, NAME, ROWS, Content, Scene
from tests.proof import invariants
from tests.proof.ground import seed_of_the_run
from tests.proof.invariants import Stored, Truth
from tests.slow import slow

pytestmark = pytest.mark.parametrize("scene", ["local"], indirect=True)
FULL = ROWS - EMPTY


def file_of(scene: Scene) -> Path:
    return scene.folder / "vectors" / "vectors.sqlite"


def settled(scene: Scene) -> bytes:
    """The whole file, nothing left in its log."""
    with closing(sqlite3.connect(file_of(scene))) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file_of(scene).read_bytes()


@pytest.mark.parametrize("how", ["cut off", "one bit", *slow("a block of zeros")])
@pytest.mark.proves(18)
def test_damage_at_random_offsets_is_refused_found_or_harmless(scene: Scene, how: str) -> None:
    """A page that nothing uses may be damaged without harm; everything else is noticed by name."""
    scene.sync()
    right, data = scene.content(), settled(scene)
    scene.close()
    seed = seed_of_the_run()
    chance = random.Random(seed)
    outcomes: set[str] = set()
    for turn in range(12):
        damaged = bytearray(data)
        offset = chance.randrange(100, len(data)) if turn else 100  # first where every reader begins
        if how == "cut off":
            del damaged[offset:]
        elif how == "one bit":
            damaged[offset] ^= 1 << chance.randrange(8)
        else:
            damaged[offset : offset + 512] = bytes(len(damaged[offset : offset + 512]))
        file_of(scene).write_bytes(damaged)
        outcomes.add(outcome(scene, right, f"{how} at {offset}, turn {turn}, OWL_SAP_TEST_SEED={seed}"))
        for left in file_of(scene).parent.iterdir():
            left.unlink()
    assert outcomes <= {"refused", "found", "harmless"}
    assert "refused" in outcomes or how == "one bit"


def outcome(scene: Scene, right: Content, saying: str) -> str:
    try:
        with closing(LocalStore(file_of(scene).parent)) as store:
            checked = verify(scene.spec, Ends(scene.ends().source, store, scene.embedder))
            if not checked.ok or checked.foreign:  # no other program writes records here
                return "found"
            content = scene.content(store)
    except ModelMismatch:  # by the name of the collection: a bit of the model's own name, say
        return "refused"
    except ConnectorError as error:
        return "refused" if "vectors.sqlite" in str(error) else f"refused without the name of the file: {error}"
    assert read_from(content) == read_from(right), saying
    return "harmless"


def read_from(content: Content) -> Content:
    """Without the eight bytes of each hash that say how the source showed the row: `verify` knows nothing of them, and
    where they are damaged the next sync reads the row anew."""
    return {
        id_: tuple((number, text, digest[:16] + digest[24:]) for number, text, digest in chunks)
        for id_, chunks in content.items()
    }


@pytest.mark.proves(18)
def test_a_record_of_the_collection_that_cannot_be_read_is_damage(scene: Scene) -> None:
    """It was a bare ValueError (found by damage at a random offset)."""
    scene.sync()
    for column, value in (
        ("last_sync", "2026-11-22T19;50:29"),
        ("checkpoint", '{"rows_read": 1'),
        ("checkpoint", "{}"),
        ("meta_names", "["),
    ):
        with closing(sqlite3.connect(file_of(scene))) as db, db:
            (right,) = db.execute(f"SELECT {column} FROM collections").fetchone()
            db.execute(f"UPDATE collections SET {column} = ?", (value,))
        with closing(LocalStore(file_of(scene).parent)) as store:
            for ask in (store.status, store.generations.all, store.quarantine):
                if ask != store.generations.all or column == "last_sync":
                    with pytest.raises(StoreCorrupt, match=r"vectors\.sqlite cannot be trusted"):
                        ask(NAME)
        with closing(sqlite3.connect(file_of(scene))) as db, db:
            db.execute(f"UPDATE collections SET {column} = ?", (right,))
    assert scene.sync().unchanged == FULL


@pytest.mark.proves(30)
def test_a_log_that_lost_its_end_gives_a_state_that_was(scene: Scene) -> None:
    """As after a power failure that took the last writes of the log: what is left is whole transactions. That the disk
    keeps what it was told to keep cannot be tried here."""
    store = scene.store()
    scene.sync()
    before = scene.content()
    scene.run("""UPDATE "ROWS" SET "TXT" = 'rewritten ' || "K", "GRP" = 'G9' WHERE "TXT" IS NOT NULL""")
    scene.sync()
    after = scene.content()
    seed = seed_of_the_run()
    chance = random.Random(seed)
    log = Path(f"{file_of(scene)}-wal")
    whole, states = log.stat().st_size, set()
    assert whole > 100_000
    for turn in range(8):
        copy = scene.folder / f"copy-{turn}"
        copy.mkdir()
        shutil.copy(file_of(scene), copy)
        shutil.copy(log, copy)
        os.truncate(copy / log.name, chance.randrange(whole))
        with closing(LocalStore(copy)) as lost:
            content = {} if lost.status(NAME) is None else scene.content(lost)
            stored = Stored.read(lost, NAME)
            status = lost.status(NAME)
        invariants.none(invariants.sound(stored, Truth({}), scene.embedder), f"OWL_SAP_TEST_SEED={seed}")
        assert all(chunks in (before.get(id_), after.get(id_)) for id_, chunks in content.items())
        if status is not None and status.last_sync is not None:
            assert content.keys() == after.keys(), "the checkpoint is ahead of the data"
        states.add(len(content))
    store.close()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Another process holds the write lock."""
    code = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); db.execute('BEGIN IMMEDIATE'); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            holder.communicate("")


@pytest.mark.proves(17)
def test_a_file_that_another_process_has_locked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing waits a bounded time and says which file it waited for; searching and looking go on."""
    scene.sync()
    before = scene.content()
    scene.run("""UPDATE "ROWS" SET "TXT" = 'changed' WHERE "K" < 5""")
    with monkeypatch.context() as hasty:
        hasty.setattr(sqlite_file, "BUSY_SECONDS", 0.2)
        ends = scene.ends()
        with locked(file_of(scene)):
            with pytest.raises(TransactionRolledBack, match=r"vectors\.sqlite was locked by another writer"):
                scene.sync(ends)
            assert scene.content(ends.store) == before
            hits = ends.store.view(NAME).search(ends.embedder.embed_query("pump 50 of plant 1"), 1)
            assert hits[0].id == "[50]"
    assert scene.converges().upserted == 5


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No right to write in the folder; root is stopped by no mode bits, so it becomes nobody for the while."""
    nobody, root = 65534, os.geteuid() == 0
    above = [parent for parent in folder.parents if parent != Path("/") and parent.stat().st_uid == os.geteuid()]
    modes = {path: path.stat().st_mode & 0o7777 for path in (folder, *folder.iterdir(), *above)}
    for path, mode in modes.items():
        path.chmod(mode | 0o011 if path in above else 0o555 if path == folder else 0o444)
    try:
        if root:
            os.seteuid(nobody)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.proves(16)
@pytest.mark.xdist_group("nobody")  # as the one of tests/connector/test_plan.py, and never beside it
def test_a_folder_in_which_nothing_may_be_written(scene: Scene) -> None:
    scene.sync()
    before = scene.content()
    source = scene.ends().source
    scene.run("""UPDATE "ROWS" SET "TXT" = 'changed' WHERE "K" < 5""")
    settled(scene)
    with read_only(file_of(scene).parent):
        with (
            pytest.raises((PermissionRefused, DatabaseError), match=r"vectors\.sqlite"),
            closing(LocalStore(file_of(scene).parent)) as store,
        ):
            scene.sync(Ends(source, store, scene.embedder))
        with closing(LocalStore(file_of(scene).parent, read_only=True)) as store:
            assert scene.content(store) == before
    assert scene.converges().upserted == 5
