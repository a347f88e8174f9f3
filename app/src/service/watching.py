"""What monitoring is told of a service beside what it counts: its engines, its collections as the store has them, its
jobs. Asked at each scrape, which never waits long: of a store that hangs the last known is told, and how old it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from app.src.jobs import StateUnusable, Tally
from app.src.observe.metrics import Metrics
from app.src.observe.scraped import Reading
from app.src.service.background import Background
from app.src.service.wiring import Parts
from connector.model import CollectionStatus
from connector.stores.store import VectorStore

LOOK_SECONDS = 15.0
"""How old what is told of the collections may be before the store is asked again ..."""
LOOK_SHARE = 0.05
"""... which takes this share of the time at most: counting a large collection takes the store seconds."""
LOOK_WAIT = 1.0
"""Seconds that a scrape waits for the store."""
ANSWER_SECONDS = 10.0
"""A look that takes longer counts as not answered until it ends."""


@dataclass(frozen=True, slots=True)
class Behind:
    """How old what is stored is, in seconds; None: not known."""

    age: float | None
    """Since the last complete sync."""
    lag: float | None
    """The same, and what its watermark was behind the source."""
    full_age: float | None
    """Since the last complete comparison began."""


def behind(status: CollectionStatus, now: datetime | None = None) -> Behind:
    """By this machine's clock, whereas the times are those of store and source."""
    from connector.stores.records import in_utc
    from connector.sync.feeds.watermark import behind as mark_behind

    now, checkpoint = now or datetime.now(UTC), status.checkpoint
    last, full = in_utc(status.last_sync), in_utc(checkpoint.last_full)
    age = None if last is None else max(0.0, (now - last).total_seconds())
    return Behind(
        age,
        None if age is None else age + mark_behind(checkpoint.mark),
        None if full is None else max(0.0, (now - full).total_seconds()),
    )


@dataclass(slots=True)
class _Look:
    """One look at the store, under way or over."""

    begun: float
    done: threading.Event = field(default_factory=threading.Event)
    took: float = 0.0


class StoreLook:
    """The collections of a store as they were when it last answered. Thread-safe. One thread looks at a time, however
    long that takes; nothing is looked at before the first question."""

    def __init__(
        self,
        names: Sequence[str],
        store: Callable[[], AbstractContextManager[VectorStore | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._look: _Look | None = None
        self._known: dict[str, CollectionStatus | None] = {}
        self._known_at: float | None = None
        self._failed = False
        self._due = True
        self._closed = False

    def forget(self) -> None:
        """Something has been written: the next question has the store asked anew."""
        with self._lock:
            self._due = True

    def statuses(self, wait: float = LOOK_WAIT) -> dict[str, CollectionStatus | None]:
        """None: never synced; {} while the store has not answered yet. Not older than LOOK_SECONDS, if it answers
        within `wait`."""
        look = self._current()
        if look is not None:
            look.done.wait(max(0.0, look.begun + wait - self._clock()))
        with self._lock:
            return dict(self._known)

    def health(self) -> dict[str, float | None]:
        """`answers` and `look_age`, of the last look and of the last one that succeeded; None: not known yet."""
        with self._lock:
            look, now = self._look, self._clock()
            hangs = look is not None and not look.done.is_set() and now - look.begun > ANSWER_SECONDS
            answers = None if self._known_at is None and not self._failed else not (self._failed or hangs)
            return {
                "answers": 0.0 if hangs else None if answers is None else float(answers),
                "look_age": None if self._known_at is None else now - self._known_at,
            }

    def close(self) -> None:
        """No look begins any more; one under way has a second to end, for what it asks is about to be closed."""
        with self._lock:
            self._closed = True
            look = self._look
        if look is not None:
            look.done.wait(1.0)

    def _current(self) -> _Look | None:
        """The look under way; or a new one, when it is time."""
        with self._lock:
            last, now = self._look, self._clock()
            if last is not None and not last.done.is_set():
                return last
            rest = LOOK_SECONDS if last is None else max(LOOK_SECONDS, last.took / LOOK_SHARE)
            if self._closed or not self._names or not (self._due or last is None or now - last.begun >= rest):
                return None
            self._due = False
            self._look = look = _Look(now)
        try:
            threading.Thread(target=self._run, args=(look,), name="owl-sap-store-look", daemon=True).start()
        except RuntimeError:  # no thread is to be had now: the next scrape tries again
            look.done.set()
        return look

    def _run(self, look: _Look) -> None:
        found = None
        try:
            with suppress(Exception):  # whatever is wrong with it, readiness and doctor say what
                found = self._ask()
        finally:
            with self._lock:
                now = self._clock()
                self._failed = found is None
                if found is not None:
                    self._known, self._known_at = found, now
                look.took = now - look.begun
                look.done.set()

    def _ask(self) -> dict[str, CollectionStatus | None]:
        with self._store() as store:
            return {name: None if store is None else store.status(name) for name in self._names}


class Watch:
    """What the metrics ask. `forget` after anything was written to the store."""

    def __init__(
        self, parts: Parts, background: Background, names: Sequence[str], metrics: Metrics, synced: Sequence[str]
    ) -> None:
        """`synced`: those of the collections that have a source; clients write the others, and no sync of them ends."""
        self._parts = parts
        self._background = background
        self._names = names
        self.look = StoreLook(names, parts.store_to_read)
        metrics.expect(synced)
        metrics.engines.read = self._engines
        metrics.engine_info.read = self._engine_info
        metrics.collections.read = self._collections
        metrics.store.read = lambda: {(): self.look.health()}
        metrics.jobs.read = self._jobs
        metrics.job_wait.read = self._job_wait
        metrics.job_progress.read = self._job_progress

    def _engines(self) -> Reading:
        """Of several with the same model and precision (another revision) the sums."""
        sums: dict[tuple[str, ...], dict[str, float | None]] = {}
        for engine in self._parts.engines_loaded:
            stats = engine.stats()
            told = asdict(stats) | {"token_budget": engine.token_budget, "planned_tokens": engine.memory.planned_tokens}
            into = sums.setdefault((engine.model, engine.precision), {})
            for name, value in told.items():
                into[name] = (into.get(name) or 0.0) + value
        for figures in sums.values():
            tokens, padded = figures["tokens"] or 0.0, figures["padded_tokens"] or 0.0
            figures["padding_ratio"] = padded / tokens if tokens else 1.0
        return sums

    def _engine_info(self) -> Reading:
        loaded = self._parts.engines_loaded
        return {(each.model, each.precision, each.path, each.profile.name): {"info": 1.0} for each in loaded}

    def _collections(self) -> Reading:
        statuses, now = self.look.statuses(), datetime.now(UTC)
        overdue = dict(self._overdue())
        told: dict[tuple[str, ...], dict[str, float | None]] = {}
        for name in self._names:
            told[(name,)] = {"overdue": overdue.get(name)}
            if name in statuses:
                told[(name,)] |= _figures(statuses[name], now)
        return told

    def _overdue(self) -> Iterator[tuple[str, float]]:
        for name in self._names:
            try:
                if self._background.jobs.turn(name) is None:
                    continue  # nobody keeps schedules by these records; others know, and the least of all counts
                start = self._background.scheduler.next_start(name)
            except StateUnusable:
                return
            if start is not None:
                yield name, max(0.0, time.time() - start)

    def _tally(self) -> Tally:
        try:
            return self._background.jobs.tally()
        except StateUnusable:
            return Tally()

    def _jobs(self) -> Reading:
        return {labels: {"jobs": float(count)} for labels, count in self._tally().counts.items()}

    def _job_wait(self) -> Reading:
        oldest = self._tally().oldest
        return {(): {"oldest": 0.0 if oldest is None else max(0.0, time.time() - oldest)}}

    def _job_progress(self) -> Reading:
        return {labels: {"done": done, "total": total} for labels, (done, total) in self._tally().progress.items()}


def _figures(status: CollectionStatus | None, now: datetime) -> dict[str, Any]:
    """None: never synced, so nothing is stored."""
    counts = ("rows", "chunks", "empty", "quarantined")
    if status is None:
        return dict.fromkeys(counts, 0.0)
    return {name: float(getattr(status, name)) for name in counts} | asdict(behind(status, now))
