"""The reconcile core as a machine with random steps: rows come, go, turn blank and poisonous, change while they are
read; feeds redeliver, reorder and break off; runs crash at any failpoint or lose their lease in the middle. After every
step the invariants hold, and a full run makes store and source the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from connector import failpoints
from connector.document.document import Renderer, document_id
from connector.errors import LeaseLost
from connector.failpoints import InjectedFailure
from connector.model import ChunkSpec, CollectionSpec, Key, Query, Row
from connector.sync.feeds.feed import Batch, Batches, Feed
from connector.sync.reconcile import Ends, SyncOptions, SyncReport, Task, Watch, reconcile
from tests.connector.conftest import MATERIALS, MemorySource, WordEmbedder
from tests.proof import invariants
from tests.proof.invariants import Stored, Truth, Wanted
from tests.proof.memory import MemoryStore

SPEC = CollectionSpec("m", MATERIALS, "{MAKTX}", metadata=("MTART",), chunk=ChunkSpec(max_tokens=4, overlap=1))
POISON = "poison"
KEYS = st.sampled_from([f"K{number}" for number in range(12)])
WORDS = ("pump", "valve", "seal", "motor", "shaft", "rotor")
TEXTS = st.one_of(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join),
    st.lists(st.sampled_from(WORDS), min_size=5, max_size=12).map(" ".join),
    st.sampled_from(["", "  ", None, POISON]),
)
KINDS = st.sampled_from(["FERT", "HALB", None])
PASSED = [name for name in failpoints.NAMES if not name.endswith("log_delete") and name != "mid_alias_swap"]
OUTSIDE = [name for name in PASSED if name not in ("mid_upsert", "mid_checkpoint")]
"""Where no transaction is open, so that another worker can write."""


class Queue:
    """What has changed, in order: a log that is consumed, and a mark that says how far."""

    def __init__(self) -> None:
        self.entries: dict[int, str] = {}
        self.last: dict[str, int] = {}
        self.sequence = 0

    def note(self, key: str) -> None:
        self.sequence += 1
        self.entries[self.sequence] = key
        self.last[key] = self.sequence


class ScriptedFeed:
    """Gives what the queue names, in batches as `script` says: sizes, what is delivered twice, what happens to the
    source before each batch. Rows are read when their batch is made, as every feed does."""

    complete = False

    def __init__(
        self, source: MemorySource, queue: Queue, renderer: Renderer, script: Sequence[Mapping[str, Any]]
    ) -> None:
        self._source, self._queue, self._renderer, self._script = source, queue, renderer, script
        self.trusts_tokens = not any(step["prove"] for step in script)
        self._mark: Mapping[str, Any] | None = None

    def read(self) -> Batches:
        return 0, [self._batches()]

    def _batches(self) -> Iterator[Batch]:
        waiting = dict(self._queue.entries)
        earlier: list[str] = []
        for step in self._script:
            step["meanwhile"]()
            some = list(waiting)[: step["size"]]
            taken = {sequence: waiting.pop(sequence) for sequence in some}
            again = [key for key in earlier if step["again"]]
            keys = sorted({*taken.values(), *again}, reverse=step["backwards"])
            earlier = list(taken.values())
            if taken:
                self._mark = {"sequence": max(taken)}
            yield self._batch(keys, taken, step)

    def _batch(self, keys: Sequence[str], taken: Mapping[int, str], step: Mapping[str, Any]) -> Batch:
        rows = self._source.rows(self._renderer.query, [("100", key) for key in keys])
        there = {row.key for row in rows}
        given = [Row(row.key, row.values) for row in rows for _ in range(2 if step["twice"] else 1)]
        gone = [("100", key) for key in keys if ("100", key) not in there]

        def consume() -> None:
            for sequence in taken:  # one at a time, as atomic as a dictionary is
                self._queue.entries.pop(sequence, None)

        return Batch(given, gone=gone, mark=self._mark, done=consume)

    @property
    def mark(self) -> Mapping[str, Any] | None:
        return self._mark


def keys_only(source: MemorySource, query: Query, page_rows: int) -> Batches:
    """Every row's key and token; the rows behind new tokens are read afterwards."""

    def load(keys: Sequence[Key]) -> list[Row]:
        return [replace(row, token=token_of(row)) for row in source.rows(query, keys)]

    pages = source.pages(query, page_rows)
    return 0, [(Batch([Row(row.key, {}, token_of(row)) for row in page], load=load) for page in pages)]


def token_of(row: Row) -> bytes:
    return repr(sorted(row.values.items())).encode()


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 5),
            "again": st.booleans(),
            "twice": st.booleans(),
            "backwards": st.booleans(),
            "prove": st.booleans(),
            "change": st.none() | st.tuples(KEYS, st.none() | TEXTS.map(lambda text: (text,))),
        }
    ),
    min_size=1,
    max_size=4,
)


class Machine(RuleBasedStateMachine):
    """One collection, its source, and what has been true of it."""

    @initialize(page=st.integers(1, 5), window=st.integers(1, 6), windows=st.integers(1, 3))
    def begin(self, page: int, window: int, windows: int) -> None:
        self.source, self.queue = MemorySource(), Queue()
        self.embedder, self.store = WordEmbedder(), MemoryStore()
        self.embedder.refuse = {POISON}
        self.ends = Ends(self.source, self.store, self.embedder)
        self.renderer = Renderer(SPEC, self.source.describe(MATERIALS), self.embedder)
        self.options = SyncOptions(page_rows=page, window=window, windows=windows, max_deletes=1.0)
        self.versions: dict[str, set[Wanted]] = {}
        self.turn = threading.RLock()
        """Points are also passed in threads of the product, which must not look while a row is half changed."""
        self.store.open("m", self.embedder)

    # ------------------------------------------------------------------------------------------------- the source

    @rule(key=KEYS, text=TEXTS, kind=KINDS)
    def put(self, key: str, text: str | None, kind: str | None) -> None:
        with self.turn:
            self.source.put("100", key, MAKTX=text, MTART=kind)
            self.queue.note(key)
            self._remember()

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        with self.turn:
            if self.source.data.pop(("100", key), None) is not None:
                self.queue.note(key)

    @rule(key=KEYS, to=KEYS)
    def rename(self, key: str, to: str) -> None:
        values = self.source.data.pop(("100", key), None)
        if values is not None:
            self.source.data["100", to] = values
            self.queue.note(key)
            self.queue.note(to)
            self._remember()

    def _remember(self) -> None:
        for id_, wanted in self.truth().wanted.items():
            self.versions.setdefault(id_, set()).add(wanted)

    def truth(self) -> Truth:
        wanted, poison = {}, set()
        for key, values in self.source.data.items():
            text = values["MAKTX"]
            if text is None or not text.strip():
                continue
            metadata = (("MTART", values["MTART"]),)
            chunks = tuple(self.embedder.split(text, 4, 1)) if len(text.split()) > 4 else (text,)
            wanted[document_id(key)] = Wanted(chunks, metadata)
            if text == POISON:
                poison.add(document_id(key))
        return Truth(wanted, poison, self.versions)

    # ---------------------------------------------------------------------------------------------------- the runs

    def _run(self, feed: Any, watch: Watch | None = None, owner: str = "one") -> SyncReport:
        with self.store.lease("m", owner, 0) as lease:
            checkpoint = self.store.open("m", self.embedder)
            began = datetime.now(UTC)
            return reconcile(
                Task(self.ends, self.renderer, lease, self.options, watch or Watch(), feed, checkpoint, {}, began)
            )

    def _full(self, lazy: bool = False) -> Feed:
        query, page_rows = self.renderer.query, self.options.page_rows

        def all_rows() -> Batches:
            return 0, [map(Batch, self.source.pages(query, page_rows))]

        read = partial(keys_only, self.source, query, page_rows) if lazy else all_rows
        return Feed(read, {"sequence": self.queue.sequence}, "full")

    def _scripted(self, script: list[dict[str, Any]]) -> ScriptedFeed:
        return ScriptedFeed(self.source, self.queue, self.renderer, [self._step(step) for step in script])

    def _step(self, step: dict[str, Any]) -> dict[str, Any]:
        def meanwhile() -> None:
            if step["change"] is not None:
                key, text = step["change"]
                self.delete(key) if text is None else self.put(key, text[0], "FERT")

        return step | {"meanwhile": meanwhile}

    @rule(script=STEPS)
    def changes(self, script: list[dict[str, Any]]) -> None:
        """At every point of the run the checkpoint speaks only of what is stored by then."""
        with armed(lambda name: self.holds()):
            invariants.none(invariants.accounted(self._run(self._scripted(script)).as_dict()))

    @rule(script=STEPS, pages=st.integers(0, 2))
    def stopped(self, script: list[dict[str, Any]], pages: int) -> None:
        asked = iter(range(100))
        report = self._run(self._scripted(script), Watch(stop=lambda: next(asked) >= pages))
        invariants.none(invariants.accounted(report.as_dict()))

    @rule(script=STEPS, name=st.sampled_from(PASSED), hit=st.integers(1, 3), complete=st.booleans())
    def crash(self, script: list[dict[str, Any]], name: str, hit: int, complete: bool) -> None:
        feed = self._full() if complete else self._scripted(script)
        with armed(failpoints.hook(f"{name}:{hit}:raise")), suppress(InjectedFailure):
            self._run(feed)

    @rule(script=STEPS, name=st.sampled_from(OUTSIDE), hit=st.integers(1, 3), complete=st.booleans())
    def taken_over(self, script: list[dict[str, Any]], name: str, hit: int, complete: bool) -> None:
        """Another worker comes in the middle, does everything, and from then on the first can write no more."""
        left: list[int] = [hit]

        def hook(passed: str) -> None:
            left[0] -= passed == name
            if passed == name and left[0] == 0:
                failpoints.arm(None)
                self._run(self._full(), owner="another")
                writes.append(self.store.writes)

        writes: list[int] = []
        with armed(hook):
            try:
                self._run(self._full() if complete else self._scripted(script))
            except LeaseLost:
                assert writes
        # Only past its last write could it end without noticing.
        assert not writes or self.store.writes == writes[0], "I9: a worker without its lease has written"

    @rule(lazy=st.booleans())
    def converge(self, lazy: bool) -> None:
        invariants.none(invariants.accounted(self._run(self._full(lazy)).as_dict()))
        invariants.none(invariants.converged(Stored.read(self.store, "m"), self.truth()))
        again = self._run(self._full(lazy))
        assert (again.upserted, again.embedded_texts, again.deleted) == (0, 0, 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.converge(False)

    # --------------------------------------------------------------------------------------------- what always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        with self.turn:
            self._hold()

    def _hold(self) -> None:
        stored, truth = Stored.read(self.store, "m"), self.truth()
        invariants.none(invariants.sound(stored, truth, self.embedder))
        mark = self.store.data.checkpoint.mark
        reached = mark["sequence"] if mark is not None else 0
        waiting = set(list(self.queue.entries.values()))
        keys = {key for key, last in self.queue.last.items() if last <= reached or key not in waiting}
        invariants.none(invariants.settled(stored, truth, {document_id(("100", key)) for key in keys}), f"mark {mark}")


@contextmanager
def armed(hook: Callable[[str], None]) -> Iterator[None]:
    failpoints.arm(hook)
    try:
        yield
    finally:
        failpoints.arm(None)


def machine(examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=chosen)


@pytest.mark.proves(1, 9, 10, 11, 12, 22, 26)
@pytest.mark.not_fast
def test_whatever_happens_the_invariants_hold() -> None:
    machine(examples=40, steps=20)


@pytest.mark.slow
@pytest.mark.proves(1, 9, 10, 11, 12, 22, 26)
def test_whatever_happens_the_invariants_hold_for_20000_steps() -> None:
    machine(examples=800, steps=30)
