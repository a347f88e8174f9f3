"""Random histories of a table, with clocks of two values, late commits and every way to find changes: after a run and
a full comparison the store agrees with the source, and the mark never falls. hypothesis prints the history that fails,
and `@reproduce_failure` replays it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, sync
from tests.contracts.changing import OPTIONS, WAYS, MemoryTable, Synced

KEYS = st.integers(0, 7)
TEXTS = st.sampled_from(["pump", "valve", "gasket", None])
AGES = st.sampled_from([0, 0, 5, None])
"""Two values of the clock, so that many watermarks are equal; None: no watermark."""
BY_CLOCK = ("watermark", "delta")
"""Ways that miss late commits."""


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = load_engine(EngineOptions(model="hash:8"))
        self.table = MemoryTable()
        self.store = LocalStore(Path(self.folder.name) / "s")
        self.synced = Synced(self.table, self.store, EngineEmbedder(self.engine), "full")
        self.open: list[Callable[[], None]] = []
        self.last = ""

    def teardown(self) -> None:
        self.store.close()
        self.engine.close()
        self.folder.cleanup()

    @initialize(way=st.sampled_from(sorted(WAYS)))
    def begin(self, way: str) -> None:
        self.synced.way = way

    def _at(self, age: int | None) -> Any:
        return None if age is None else self.table.clock - timedelta(seconds=age)

    @rule(key=KEYS, text=TEXTS, age=AGES)
    def put(self, key: int, text: str | None, age: int | None) -> None:
        self.table.put(key, text, self._at(age))

    @rule(key=KEYS, text=TEXTS, age=AGES)
    def begin_transaction(self, key: int, text: str | None, age: int | None) -> None:
        if len(self.open) < 2:
            self.open.append(self.table.later(key, text, self._at(age)))

    @rule(first=st.booleans())
    def commit(self, first: bool) -> None:
        if self.open:
            self.open.pop(0 if first else -1)()

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        self.table.delete(key)

    @rule(old=KEYS, new=KEYS, age=AGES)
    def rekey(self, old: int, new: int, age: int | None) -> None:
        if old in self.table.rows and new not in self.table.rows:
            self.table.rekey(old, new, self._at(age))

    @rule(seconds=st.sampled_from([0, 5, 31, -40]))
    def time_passes(self, seconds: int) -> None:
        self.table.clock += timedelta(seconds=seconds)

    @rule(pages=st.integers(1, 3))
    def run_that_is_stopped(self, pages: int) -> None:
        asked = iter([False] * (pages - 1) + [True])
        ends = Ends(self.table.source, self.store, self.synced.embedder)
        sync(self.table.spec(self.synced.way), ends, OPTIONS, stop=lambda: next(asked, True))

    @rule()
    def run(self) -> None:
        self.synced.sync()
        if self.synced.way not in BY_CLOCK:
            self.synced.agrees()

    @rule()
    def compare_everything(self) -> None:
        self.synced.sync(full=True)
        self.synced.agrees()

    @rule(way=st.sampled_from(sorted(WAYS)))
    def another_way(self, way: str) -> None:
        self.synced.way = way
        self.last = ""

    @invariant()
    def the_mark_never_falls(self) -> None:
        status = self.store.status("c")
        mark = {} if status is None else status.checkpoint.mark or {}
        if self.synced.way in BY_CLOCK and mark.get("method") == self.synced.way:
            assert mark["at"] >= self.last
            self.last = mark["at"]


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongHistory(History):
    pass


TestLongHistory = pytest.mark.slow(LongHistory.TestCase)
TestLongHistory.settings = settings(
    max_examples=400, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
