"""One seed: a table that changes, workers that sync it into one collection, and faults. The real planner, reconciler,
lease, state tables, connection pool and retries run; `Judge` checks each commit and the end.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from connector import failpoints
from connector.errors import ConnectionLost, DatabaseError, LeaseLost, TextsNotEmbeddable
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.model import (
    ChangeSet,
    ChunkSpec,
    CollectionSpec,
    Key,
    KeyRange,
    Lease,
    Query,
    Row,
    Span,
    TableRef,
    Token,
    Value,
    Vectors,
)
from connector.stores.hana.store import HanaStore
from connector.sync import ranges
from connector.sync.feeds import full
from connector.sync.run import Ends, Stop, SyncOptions, SyncReport, never, sync
from connector.sync.verify import verify
from tests.contracts.changing import WAYS, MemorySource, MemoryTable
from tests.proof.invariants import Wanted, accounted
from tests.simulation.database import SCHEMA, Faults, Server, Statement
from tests.simulation.scheduler import Process, Scheduler, Stuck
from tests.simulation.workers import Spread, waiting

T = TypeVar("T")
NAME = "c"
POISON = "poison"  # the engine refuses texts with this word
DIMENSION = 4
WORDS = 2  # per chunk
BY_CLOCK = ("watermark", "delta")  # ways that leave what is younger than their delay to the next run
_READ = (
    'SELECT "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", "VEC_VECTOR" FROM "OWL_C_G1" ORDER BY "SRC_KEY", "CHUNK_NO"'
)


class Violation(AssertionError):
    """The code under test broke a rule."""


@lru_cache(maxsize=5000)
def embedded(text: str) -> NDArray[np.float32]:
    numbers = np.frombuffer(blake2b(text.encode(), digest_size=4 * DIMENSION).digest(), "<u4").astype(np.float64) + 1.0
    return (numbers / np.linalg.norm(numbers)).astype(np.float32)


@lru_cache(maxsize=5000)
def split(text: str) -> list[str]:
    words = text.split(" ")
    return [" ".join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]


class Embedder:
    """Takes virtual time. Refuses texts with POISON."""

    dimension, model, fingerprint, max_tokens, least_cosine = DIMENSION, "simulated", "simulated", 1000, 0.999
    database_model = None

    def __init__(self, sim: Scheduler) -> None:
        self._sim = sim

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        self._sim.sleep(self._sim.chance.uniform(0, 2.0))
        bad = [place for place, text in enumerate(texts) if POISON in text]
        if bad:
            raise TextsNotEmbeddable("refused", indices=bad)
        return np.array([embedded(text) for text in texts], np.float32).reshape(len(texts), DIMENSION)

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        return self.embed_documents(texts), self.count_tokens(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return embedded(text)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [text.count(" ") + 1 for text in texts]

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        return split(text)


class Source(MemorySource):
    """Reads take virtual time and may lose the connection. Each page is read at one moment; key ranges as in HANA."""

    def __init__(self, table: MemoryTable, world: World) -> None:
        super().__init__(table)
        self._world = world
        self._data = MemorySource(table)

    def _travel(self) -> None:
        world = self._world
        world.sim.sleep(world.sim.chance.uniform(0.001, 0.1))
        if world.sim.chance.random() < world.server.faults.lost:
            raise ConnectionLost("the source is gone")

    def _late(self, pages: Iterator[T]) -> Iterator[T]:
        for page in pages:
            self._travel()
            yield page

    def now(self) -> datetime:
        self._travel()
        return self._world.source_time()

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        after, upto = (within.after, within.upto) if within else (None, None)
        while True:
            keys: list[Key] = [(key,) for key in sorted(self.data.rows)]
            keys = [key for key in keys if (after is None or key > after) and (upto is None or key <= upto)][:size]
            if not keys:
                return
            after = keys[-1]
            rows = self._data.rows(query, keys)
            self._travel()
            yield rows

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        keys: list[Key] = [(key,) for key in sorted(self.data.rows)]
        step = max(1, len(keys) // parts)
        borders = [None, *keys[step - 1 :: step][: parts - 1], None]
        return [KeyRange(after, upto) for after, upto in pairwise(borders)]

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        found = self._data.rows(query, keys)
        self._travel()
        return found

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        return self._late(self._data.tokens(query, token, size, values=values))

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        found = self._data.rows_with_tokens(query, token, keys)
        self._travel()
        return found

    def window(self, query: Query, span: Span, size: int, *, repeated: bool = False) -> Iterator[tuple[list[Row], str]]:
        return self._late(self._data.window(query, span, size, repeated=repeated))

    def record_types(self, query: Query, span: Span) -> tuple[dict[Value, int], int]:
        found = self._data.record_types(query, span)
        self._travel()
        return found

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        self._travel()
        super().forget(log, ids)
        self._travel()


class Store(HanaStore):
    """Tells the judge which lease a write belongs to."""

    def __init__(self, world: World, pool: HanaPool) -> None:
        super().__init__(pool, SCHEMA)
        self._world = world

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        began = self._world.sim.now
        taken = super().take_lease(collection, owner, ttl)
        if isinstance(taken, int):
            self._world.sim.say(f"takes the lease, epoch {taken}")
            self._world.judge.taken(taken, began)
        return taken

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        task = self._world.sim.current
        task.claim = lease
        self._world.judge.tried.update(row.id for row in changes.quarantined)
        try:
            super().apply(lease, changes)
        finally:
            task.claim = None


Version = Wanted | str | None  # POISON, or None: not to be stored


class Judge:
    """Knows every version of every row, with its time, and every lease."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.history: dict[str, list[tuple[float, Version]]] = {}
        self.began: dict[int, float] = {}
        self.tried: Counter[str] = Counter()
        self.holder = ""  # the last worker that took the lease

    def remember(self) -> None:
        """Record what the rows are now."""
        rows = self._world.table.rows
        present = {json.dumps([key]): self._version(text, group) for key, (text, group, _) in rows.items()}
        for id_ in self.history.keys() | present.keys():
            history = self.history.setdefault(id_, [(-1.0, None)])
            if history[-1][1] != present.get(id_):
                history.append((self._world.sim.now, present.get(id_)))

    @staticmethod
    def _version(text: str | None, group: str) -> Version:
        if not text or not text.strip():
            return None
        return POISON if POISON in text else Wanted(tuple(split(text)), (("GRP", group),))

    def taken(self, epoch: int, began: float) -> None:
        self.holder = self._world.sim.current.process.name
        if epoch in self.began:
            raise Violation(f"epoch {epoch} was given twice")
        self.began[epoch] = began

    def committed(self, statements: list[Statement], process: Process) -> None:
        """Check a commit of the server."""
        claims = {statement.claim for statement in statements if statement.claim is not None}
        if not claims:
            return
        (claim,) = claims
        db = self._world.server.db
        ((epoch, owner),) = db.execute('SELECT "LEASE_EPOCH", "LEASE_OWNER" FROM "OWL_STATE"').fetchall()
        ended = claim.part is not None and (epoch, owner) == (
            claim.epoch + 1,
            None,
        )  # the next owner waits for the part
        if epoch != claim.epoch and not ended:
            self._world.sim.say("; ".join(f"{statement.sql} {statement.rows}"[:150] for statement in statements))
            raise Violation(
                f"{process.name} wrote under epoch {claim.epoch}, and epoch {epoch} ({owner}) holds the lease"
            )
        stored = self.stored()
        closing = any('"LAST_SYNC"' in statement.sql for statement in statements)
        for id_, wanted in stored.items():
            if all(version != wanted for _, version in self.history.get(id_, ())):
                raise Violation(f"{id_} is stored as something it never was: {wanted}")
        if closing:
            self._world.sim.say(f"checkpoint under epoch {claim.epoch}")
            if self._world.plan.max_deletes == 1.0 and self._world.plan.way not in BY_CLOCK:
                self.reached(stored, self.began[claim.epoch])

    def stored(self) -> dict[str, Wanted]:
        """Return what is stored. Raises Violation for a torn document or a wrong vector."""
        documents: dict[str, list[tuple[str, str]]] = {}
        for id_, number, text, meta, vector in self._world.server.db.execute(_READ):
            chunks = documents.setdefault(id_, [])
            if number != len(chunks):
                raise Violation(f"{id_} has chunk {number} where {len(chunks)} belongs")
            if vector[4:] != embedded(text).tobytes():
                raise Violation(f"the vector of {id_}#{number} is that of another text")
            chunks.append((text, meta))
        found = {}
        for id_, chunks in documents.items():
            metas = {meta for _, meta in chunks}
            if len(metas) > 1:
                raise Violation(f"chunks of {id_} have different metadata")
            found[id_] = Wanted(tuple(text for text, _ in chunks), tuple(json.loads(metas.pop()).items()))
        return found

    def quarantined(self) -> dict[str, int]:
        return dict(self._world.server.db.execute('SELECT "SRC_KEY", "ATTEMPTS" FROM "OWL_QUARANTINE"').fetchall())

    def reached(self, stored: dict[str, Wanted], began: float) -> None:
        """Check that each row is stored as it was at some time since `began`."""
        quarantined, now = self.quarantined(), self._world.sim.now
        for id_, history in self.history.items():
            ends = [*(since for since, _ in history[1:]), now + 1]
            for (_, version), end in zip(history, ends, strict=True):
                if end < began:
                    continue
                there = stored.get(id_)
                if there == version or (there is None and version == POISON and id_ in quarantined):
                    break
            else:
                raise Violation(f"the checkpoint is ahead of {id_}: stored is {stored.get(id_)}, it was {history}")

    def attempts(self) -> None:
        for id_, attempts in self.quarantined().items():
            if attempts > self.tried[id_]:
                raise Violation(f"{id_} failed {self.tried[id_]} times, and its entry counts {attempts} attempts")

    def agrees(self, *, deletions: bool = True) -> None:
        """Check that the store holds the rows of now."""
        stored, quarantined = self.stored(), self.quarantined()
        for id_, history in self.history.items():
            version = history[-1][1]
            if version == POISON:
                right = id_ in quarantined and id_ not in stored
            elif version is None:
                right = not deletions or (id_ not in stored and id_ not in quarantined)
            else:
                right = stored.get(id_) == version and id_ not in quarantined
            if not right:
                waits = " and in quarantine" if id_ in quarantined else ""
                raise Violation(f"{id_} should be {version}, and is {stored.get(id_)}{waits}")


@dataclass(frozen=True)
class Plan:
    """What a seed does."""

    way: str
    synced: bool  # before the faults begin
    rows: int
    workers: int
    runs: int
    events: int
    calm: int  # steps between two events, at most
    actions: tuple[str, ...]
    faults: Faults
    page_rows: int
    window: int
    readers: int
    max_deletes: float
    full: float
    spread: int  # workers of key ranges; 0: none

    @classmethod
    def draw(cls, chance: random.Random) -> Plan:
        def rate(most: float) -> float:
            return chance.uniform(0, most) if chance.random() < 0.5 else 0.0

        way = chance.choice((*sorted(WAYS), "log"))
        spread = chance.choice((0, 2, 3)) if way == "full" else 0
        harm = ["presume", "presume"] if spread else []
        harm += [name for name in ("kill", "pause", "cut_off", "jump") if chance.random() < 0.6]
        faults = Faults(
            slow=rate(0.03),
            lost=rate(0.01),
            reply_lost=rate(0.1),
            rolled_back=rate(0.05),
            no_memory=rate(0.02),
            refused=rate(0.1),
        )
        return cls(
            way=way,
            synced=chance.random() < (0.2 if way == "full" else 0.8),
            rows=chance.randint(3, 9),
            workers=chance.choice((1, 2, 2, 2, 3)),
            runs=chance.randint(1, 2),
            events=chance.randint(6, 24),
            calm=chance.choice((20, 40, 80)),
            actions=("change", "change", *harm),
            faults=faults,
            page_rows=chance.randint(1, 4),
            window=chance.randint(1, 5),
            readers=chance.randint(1, 3),
            max_deletes=chance.choice((1.0, 1.0, 1.0, 0.3)),
            full=chance.choice((0.0, 0.3)),
            spread=spread,
        )


@dataclass
class World:
    """The simulation of one seed."""

    seed: int
    tracing: bool = False
    focus: Mapping[str, Any] = field(default_factory=dict)  # values for fields of the plan
    reports: list[SyncReport] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.plan = replace(Plan.draw(self.chance), **self.focus)
        self.sim = Scheduler(self.chance, tracing=self.tracing)
        self.server = Server(self.sim, self.plan.faults)
        self.table = MemoryTable()
        self.judge = Judge(self)
        self.server.committed = self.judge.committed
        self.victims: list[Process] = []
        self.running: list[
            tuple[Future[ranges.RangeReport], Process, Callable[[], None]]
        ] = []  # ranges, and how to lose them
        self._next_key = self.plan.rows
        self._events = self.plan.events
        self._next_event = 0
        self._ended = 0

    def source_time(self) -> datetime:
        return datetime.fromtimestamp(self.server.time(), UTC)

    # --------------------------------------------------------------------------------------------------- the story

    def run(self) -> None:
        """Live the seed. Raises Violation or Stuck."""
        few = (
            patch.object(full, "ROWS_PER_READER", 2),
            patch.multiple(
                ranges,
                STOP_SECONDS=2.0,
                BUCKETS=(1, 8, 1024)[self.seed % 3],
                token_bytes=self.chance.randbytes,
                wait=waiting(self.sim),
            ),
        )
        with self.sim.patched(), few[0], few[1]:
            failpoints.arm(lambda name: self.sim.step_aside())
            try:
                for key in range(self.plan.rows):
                    self._put(key)
                self.judge.remember()
                if self.plan.synced:
                    self._alone(self._first)
                self._chaos()
                self._alone(self._last)
            finally:
                failpoints.arm(None)
                self.sim.nemesis = None
                self.sim.close()
                self.server.close()

    def _chaos(self) -> None:
        for number in range(self.plan.workers):
            self._start(f"w{number + 1}", self.plan.runs)
        self.sim.nemesis = self._nemesis
        self.sim.run(lambda: self._ended == self.plan.workers)

    def _alone(self, work: Callable[[], None]) -> None:
        """Run `work` in a process of its own, without faults."""
        done: list[bool] = []

        def working() -> None:
            work()
            done.append(True)

        self.server.faults, self.sim.nemesis = Faults(), None
        self.sim.spawn(Process("alone"), working)
        self.sim.run(lambda: bool(done))
        self.server.faults = self.plan.faults

    def _first(self) -> None:
        self._sync(self.ends(), SyncOptions())
        for _ in range(2):
            self._change()

    def _last(self) -> None:
        """An ordinary run, a full one, which has nothing left to do, and `verify`."""
        self.sim.sleep(121)  # the longest pause, and the watermark's delay
        ends, options = self.ends(), SyncOptions(max_deletes=1.0, owner="last", lease_wait=600.0)
        self._sync(ends, options)
        # Rows of a clock set back come late.
        whole = self.plan.way not in BY_CLOCK or "jump" not in self.plan.actions
        exact = whole and self.plan.way != "watermark"
        if whole:
            self.judge.agrees(deletions=exact)
        report = self._sync(ends, replace(options, full=True))
        self.judge.agrees()
        if exact and (report.upserted or report.deleted):
            raise Violation(f"a run that has nothing to do did something: {report}")
        if not (audit := verify(self._spec(), ends)).ok:
            raise Violation(f"verify disagrees: {audit}")
        self.judge.attempts()

    def ends(self) -> Ends:
        options = ConnectionOptions(host="sim", encrypt=False)
        pool = HanaPool(options, 4, driver=self.server)
        return Ends(Source(self.table, self), Store(self, pool), Embedder(self.sim))

    def _spec(self) -> CollectionSpec:
        changes = WAYS[self.plan.way]
        return CollectionSpec(
            NAME, self.table.ref, "{TXT}", metadata=("GRP",), chunk=ChunkSpec(WORDS, 0), changes=changes
        )

    def _start(self, name: str, runs: int) -> None:
        chance = self.chance
        process = Process(name, skew=chance.choice((0.0, 0.0, -3600.0, 90.0)), rate=chance.uniform(0.9, 1.1))
        self.victims.append(process)

        def work() -> None:
            nonlocal runs
            ends = self.ends()
            while runs:
                runs -= 1
                self.sim.sleep(chance.uniform(0, 5))
                self._attempt(ends, process)
            self._ended += 1

        def died() -> None:
            self.victims.remove(process)
            self._start(f"{name}'", max(1, runs))

        process.on_death.append(died)
        self.sim.spawn(process, work)

    def _attempt(self, ends: Ends, process: Process) -> None:
        plan, chance = self.plan, self.chance
        options = SyncOptions(
            page_rows=plan.page_rows,
            window=plan.window,
            readers=plan.readers,
            max_deletes=plan.max_deletes,
            owner=process.name,
            lease_wait=chance.choice((0.0, 40.0, 60.0)),
            full=chance.random() < plan.full,
        )
        try:
            if chance.random() < 0.15:
                self.sim.say("verify and repair")
                verify(self._spec(), ends, repair=True, options=options)
            else:
                with Spread(self, process, plan.spread) if plan.spread else nullcontext() as spread:
                    self._sync(ends, options, lambda: chance.random() < 0.03, spread)
        except Exception as error:
            self.expected(error)

    def expected(self, error: Exception) -> None:
        """Count an error that faults explain. Raises any other one."""
        if not (isinstance(error, LeaseLost) or (isinstance(error, DatabaseError) and error.retryable)):
            raise error
        self.outcomes[type(error).__name__] += 1

    def _sync(self, ends: Ends, options: SyncOptions, stop: Stop = never, spread: Spread | None = None) -> SyncReport:
        self.sim.say("sync")
        report = sync(self._spec(), ends, options, stop=stop, workers=spread)
        self.sim.say(f"{report}")
        self.outcomes["ended"] += 1
        if wrong := list(accounted(report.as_dict())):
            raise Violation("; ".join(wrong))
        return report

    # -------------------------------------------------------------------------------------------- changes and faults

    def _nemesis(self) -> None:
        if self.sim.steps < self._next_event or not self._events:
            return
        self._events -= 1
        self._next_event = self.sim.steps + self.chance.randint(1, self.plan.calm)
        action = self.chance.choice(self.plan.actions)
        holders = [process for process in self.victims if process.name.startswith(self.judge.holder)]
        process = self.chance.choice(holders if holders and self.chance.random() < 0.7 else self.victims)
        seconds = self.chance.choice((3.0, 33.0, 45.0, 100.0))
        self.outcomes[action] += 1
        match action:
            case "change":
                self._change()
            case "kill":
                self.sim.kill(process)
            case "pause":
                self.sim.say(f"pause {process.name} for {seconds:g} s")
                process.paused_until = self.sim.now + seconds
            case "cut_off":
                self.sim.say(f"cut off {process.name} for {seconds:g} s")
                process.cut_off_until = self.sim.now + seconds
            case "jump":
                self.server.clock += self.chance.choice((-20.0, 20.0, 40.0))
                self.sim.say(f"the clock of the server is now {self.server.clock:+g} s")
            case "presume":
                self._presume()
            case _:
                raise ValueError(action)

    def _presume(self) -> None:
        """Take a worker for lost, which goes on, now or later."""
        running = [(process, lose) for future, process, lose in self.running if not future.done()]
        if running:
            process, lose = self.chance.choice(running)
            self.sim.say(f"{process.name} is taken for lost")
            process.paused_until = self.sim.now + self.chance.choice((0.0, 0.5, 2.0, 5.0, 10.0))
            lose()

    def _change(self) -> None:
        rows, chance = self.table.rows, self.chance
        for _ in range(chance.randint(1, 3)):
            key = chance.choice(sorted(rows)) if rows else None
            match chance.randrange(5):
                case 0 if key is not None:
                    self.table.delete(key, at=self.source_time())
                case 1 if key is not None:
                    text, _, _ = rows[key]
                    self.table.put(key, text, self.source_time(), f"G{chance.randrange(3)}")
                case 2 if key is not None:
                    self._put(key)
                case _:
                    self._next_key += 1
                    self._put(self._next_key if chance.random() < 0.5 else -self._next_key)
        self.judge.remember()

    def _put(self, key: int) -> None:
        chance = self.chance
        words = [f"w{chance.randrange(1000)}" for _ in range(chance.choice((1, 1, 2, 3, 5)))]
        kind = chance.random()
        text = None if kind < 0.05 else " ".join([*words, *([POISON] if kind < 0.12 else [])])
        self.table.put(key, text, self.source_time(), f"G{chance.randrange(3)}")


def live(seed: int, *, tracing: bool = False, focus: Mapping[str, Any] | None = None) -> World:
    """Live a seed. Raises Violation, or RuntimeError for a defect of another kind, with the command that replays it."""
    world = World(seed, tracing, focus or {})
    try:
        world.run()
    except Exception as error:
        lines = "\n".join(world.sim.trace or ())
        replay = f"replay: .venv/bin/python -m tests.simulation {seed}"
        if isinstance(error, Violation | Stuck):
            raise Violation(f"{lines}\nseed {seed}: {error}\n{replay}") from error
        raise RuntimeError(f"{lines}\nseed {seed}: {type(error).__name__}: {error}\n{replay}") from error
    return world
