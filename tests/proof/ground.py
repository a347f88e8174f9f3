"""A table in the emulator that changes at random, one collection over it in a store of either kind, and what must hold
of the two. Chance comes from one seed, so that whatever happened can happen again.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.hana.connection import ConnectionOptions, HanaPool, quote
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, Checkpoint, ChunkSpec, CollectionSpec, TableRef, log_of
from connector.protocols import Embedder
from connector.retry import RetryPolicy
from connector.stores.hana.store import HanaStore
from connector.stores.local.store import LocalStore
from connector.stores.state import LeaseTimes
from connector.stores.store import VectorStore
from connector.sync.run import Ends
from connector.sync.verify import verify
from hana_emulator.testing import Emulator
from tests.proof import invariants
from tests.proof.invariants import Stored, Truth, Wanted
from tests.proof.methods import METHODS, Method

NAME = "rows"
ROWS, PAGE = 40, 4
"""Ten pages, so that every point on the way is passed three times."""
HASTY = RetryPolicy(attempts=5, first_wait=0.005, longest_wait=0.05)
POISON = "poison"
"""A text with this word in it is one that the engine refuses."""
WORDS = ("pump", "valve", "seal", "motor", "shaft", "bearing", "rotor", "vessel", "flange", "gasket")


def seed_of_the_run() -> int:
    """`OWL_SAP_TEST_SEED` replays a run; otherwise a new one."""
    return int(os.environ.get("OWL_SAP_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@dataclass(frozen=True)
class Plan:
    """Where a ground lies, in words that go through to another process."""

    login: dict[str, Any]
    schema: str
    kind: str
    method: str
    folder: str
    lease_seconds: float = 20

    @property
    def spec(self) -> CollectionSpec:
        return CollectionSpec(
            NAME,
            TableRef(self.schema, "ROWS"),
            "{TXT}",
            metadata=("GRP",),
            chunk=ChunkSpec(max_tokens=12, overlap=2),
            changes=self.changes,
        )

    @property
    def in_hana(self) -> bool:
        """Of the kinds local, hana and native; native: HANA computes the vectors too."""
        return self.kind != "local"

    @property
    def changes(self) -> ChangeSpec:
        return METHODS[self.method].spec

    def pool(self, port: int = 0) -> HanaPool:
        login = self.login | ({"port": port} if port else {})
        return HanaPool(ConnectionOptions(**login, encrypt=False), retry=HASTY)

    def store(self, pool: HanaPool) -> VectorStore:
        times = LeaseTimes(ttl=self.lease_seconds, renew=self.lease_seconds / 4, poll=0.02)
        if self.in_hana:
            return HanaStore(pool, self.schema, lease_times=times)
        return LocalStore(Path(self.folder) / "vectors", lease_times=times)


@dataclass
class Ground:
    """`chance` decides everything that is random."""

    emulator: Emulator
    plan: Plan
    embedder: Embedder
    chance: random.Random
    versions: dict[str, set[Wanted]] = field(default_factory=dict)
    before: Checkpoint = field(default_factory=Checkpoint)
    """The checkpoint before the run that is looked at."""
    _next: int = ROWS
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._connection = self._stack.enter_context(
            closing(self.emulator.connect(autocommit=True, currentSchema=self.plan.schema))
        )
        self.pool = self._stack.enter_context(self.plan.pool())
        self.run(
            'CREATE COLUMN TABLE "ROWS" ("K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(2000), "GRP" NVARCHAR(3), '
            '"CHANGED_AT" TIMESTAMP)'
        )
        for key in range(ROWS):
            self._put(key)
        self.method.install(self.plan.spec, self.pool, self.emulator.user)
        self.remember()

    def close(self) -> None:
        self._stack.close()

    @property
    def method(self) -> Method:
        return METHODS[self.plan.method]

    def run(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(sql, parameters)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    # ------------------------------------------------------------------------------------------------- the source

    def _put(self, key: int) -> None:
        self.run(
            'INSERT INTO "ROWS" VALUES (?, ?, ?, CURRENT_UTCTIMESTAMP)',
            key,
            self._text(),
            f"G{self.chance.randrange(3)}",
        )

    def _text(self) -> str | None:
        """Mostly short; long ones become several chunks; now and then nothing, or what the engine refuses."""
        kind = self.chance.random()
        if kind < 0.06:
            return self.chance.choice((None, "", "  "))
        words = self.chance.choices(WORDS, k=40 if kind > 0.85 else 3)
        return " ".join([*words, str(self.chance.randrange(1000)), *([POISON] if kind < 0.1 else [])])

    def change(self, most: int = 6) -> None:
        """Some rows come, go, change or change their key; and what they are now is remembered."""
        keys = [row[0] for row in self.run('SELECT "K" FROM "ROWS" ORDER BY "K"')]
        for _ in range(self.chance.randint(0, most)):
            if not keys:
                break
            key = self.chance.choice(keys)
            match self.chance.randrange(6):
                case 0:
                    self._put(self._new())
                case 1:
                    self.run('DELETE FROM "ROWS" WHERE "K" = ?', key)
                    keys.remove(key)
                case 2:
                    self._set(key, '"K" = ?', self._new())
                    keys.remove(key)
                case 3:
                    self._set(key, '"GRP" = ?', f"G{self.chance.randrange(3)}")
                case _:
                    self._set(key, '"TXT" = ?', self._text())
        while len(self.run('SELECT 1 FROM "ROWS"')) < ROWS - 5:
            self._put(self._new())
        self.remember()

    def purge(self, count: int) -> None:
        """So many rows go at once: the oldest, which earlier runs have stored."""
        for (key,) in self.run('SELECT "K" FROM "ROWS" ORDER BY "CHANGED_AT", "K" LIMIT ?', count):
            self.run('DELETE FROM "ROWS" WHERE "K" = ?', key)
        self.remember()

    def rewrite(self, count: int) -> None:
        """So many rows get another text that can be embedded."""
        for (key,) in self.run('SELECT "K" FROM "ROWS" ORDER BY "K" DESC LIMIT ?', count):
            self._set(key, '"TXT" = ?', f"rewritten {self.chance.randrange(10**9)}")
        self.remember()

    def refill(self) -> None:
        while len(self.run('SELECT 1 FROM "ROWS"')) < ROWS:
            self._put(self._new())
        self.remember()

    def _set(self, key: int, what: str, value: Any) -> None:
        self.run(f'UPDATE "ROWS" SET {what}, "CHANGED_AT" = CURRENT_UTCTIMESTAMP WHERE "K" = ?', value, key)

    def _new(self) -> int:
        """Keys behind all others and between them; never one that was used."""
        self._next += 1
        return self._next if self.chance.random() < 0.5 else -self._next

    def remember(self) -> None:
        for id_, wanted in self.truth().wanted.items():
            self.versions.setdefault(id_, set()).add(wanted)

    def truth(self) -> Truth:
        wanted: dict[str, Wanted] = {}
        poison: set[str] = set()
        for key, text, group in self.run('SELECT "K", "TXT", "GRP" FROM "ROWS"'):
            if text is None or not text.strip():
                continue
            id_ = json.dumps([key])
            wanted[id_] = Wanted(tuple(self.embedder.split(text, 12, 2)), (("GRP", group),))
            if POISON in text:
                poison.add(id_)
        return Truth(wanted, poison, self.versions)

    # --------------------------------------------------------------------------------------------------- the store

    def expire_lease(self) -> None:
        """As if the time had passed for which a dead worker keeps its lease. Waits for what it had still under way:
        its transaction holds the row that is changed here."""
        if self.plan.in_hana:
            with suppress(self._error()):  # no worker has come so far that there is a table
                self.run('UPDATE "OWL_STATE" SET "LEASE_UNTIL" = NULL')
            return
        if self._file.exists():
            with closing(sqlite3.connect(self._file)) as db, db, suppress(sqlite3.OperationalError):
                db.execute("UPDATE collections SET lease_until = NULL")

    def holder(self) -> str | None:
        """Who has the lease."""
        if self.plan.in_hana:
            rows = self.run('SELECT "LEASE_OWNER" FROM "OWL_STATE" WHERE "COLLECTION" = ?', NAME)
        else:
            with closing(sqlite3.connect(self._file)) as db:
                rows = db.execute("SELECT lease_owner FROM collections WHERE collection = ?", (NAME,)).fetchall()
        return rows[0][0] if rows else None

    def in_transaction(self) -> bool:
        """Whether a worker has a write transaction open: while it has, nobody can take its lease or its log."""
        if self.plan.method == "log" and self._locked(f"SELECT * FROM {quote(log_of(self.plan.spec).name)}"):
            return True
        if self.plan.in_hana:
            return self._locked('SELECT "COLLECTION" FROM "OWL_STATE"')
        with closing(sqlite3.connect(self._file, timeout=0, isolation_level=None)) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    return True
                raise
            db.execute("ROLLBACK")
        return False

    def _locked(self, select: str) -> bool:
        try:
            self.run(f"{select} FOR UPDATE NOWAIT")
        except self._error():
            return True
        return False

    @property
    def _file(self) -> Path:
        return Path(self.plan.folder) / "vectors" / "vectors.sqlite"

    def _error(self) -> type[Exception]:
        from hdbcli import dbapi

        error: type[Exception] = dbapi.Error
        return error

    def checkpoint(self, store: VectorStore) -> Checkpoint:
        status = store.status(NAME)
        return Checkpoint() if status is None else status.checkpoint

    def content(self) -> dict[str, Any]:
        """Everything stored, to be compared."""
        with closing(self.plan.store(self.pool)) as store:
            stored, checkpoint = Stored.read(store, NAME), self.checkpoint(store)
        documents = {
            id_: [(record.record, record.number, record.text, record.content_hash) for record in records]
            for id_, records in stored.documents.items()
        }
        return {"documents": documents, "quarantined": stored.quarantined, "checkpoint": checkpoint}

    def begin(self) -> None:
        """A run is about to start: what it changes of the checkpoint will be judged."""
        with closing(self.plan.store(self.pool)) as store:
            self.before = self.checkpoint(store)

    def sound(self, saying: str) -> None:
        """What must hold the moment after a kill."""
        self.expire_lease()
        with closing(self.plan.store(self.pool)) as store:
            stored, now = Stored.read(store, NAME), self.checkpoint(store)
        truth = self.truth()
        invariants.none(invariants.sound(stored, truth, self.embedder), saying)
        everything = truth.wanted.keys() | stored.documents.keys()
        if now.last_full is not None and now.last_full != self.before.last_full:
            promised = everything
        elif now.mark is not None:
            promised = everything - self.method.open_ids(self, now)
        else:
            return
        invariants.none(invariants.settled(stored, truth, promised), f"{saying}; checkpoint {now}")

    def converged(self, report: dict[str, Any], saying: str) -> None:
        """What must hold after a full run that came to its end; `verify` has to agree."""
        invariants.none(invariants.accounted(report), saying)
        with closing(self.plan.store(self.pool)) as store:
            stored, truth = Stored.read(store, NAME), self.truth()
            invariants.none(invariants.sound(stored, truth, self.embedder), saying)
            invariants.none(invariants.converged(stored, truth), saying)
            checked = verify(self.plan.spec, Ends(HanaSource(self.pool), store, self.embedder))
        assert (checked.ok, checked.drift) == (True, 0), f"verify finds {checked}; {saying}"
