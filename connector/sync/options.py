"""Input and output shared by all runs over a collection: source, store, embedder; options; progress; report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from connector.protocols import Embedder, Observer, Source
from connector.stores.store import VectorStore

STAGES = ("read", "render", "tokenize", "embed", "apply")
Stop = Callable[[], bool]  # called between pages; True ends the run early and keeps finished work


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Ends:
    """The source, the store, and the embedder between them."""

    source: Source
    store: VectorStore
    embedder: Embedder


@dataclass(frozen=True, slots=True)
class Watch:
    """The observer of a run, and a check that can end the run early."""

    observer: Observer | None = None
    stop: Stop = never

    def event(self, name: str) -> None:
        if self.observer is not None:
            self.observer.event(name)

    def progress(self, done: int, total: int) -> None:
        if self.observer is not None:
            self.observer.progress(done, max(done, total))


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """`max_deletes`: the largest share of stored documents that one run may delete.
    `lease_wait`: seconds to wait for the lease.

    `window`: changed documents to embed together; a large window allows batches of similar lengths. `windows`: how many
    to embed at a time; more than one keeps several devices busy. `readers`: threads that read a large table, one key
    range each. `full`: compare every row, regardless of the method. `accept_schema`: continue although a used column
    changed its type. `max_attempts`: attempts after which a quarantined row is skipped until its content changes or it
    is retried by hand. `rows_stay`: let rows stay in HANA where HANA's model embeds them and `rows_in_sql` can.
    """

    page_rows: int = 1000
    max_deletes: float = 0.2
    full: bool = False
    owner: str = "sync"
    lease_wait: float = 60.0
    window: int = 1000
    accept_schema: bool = False
    max_attempts: int = 6
    readers: int = 2
    windows: int = 1
    rows_stay: bool = True


@dataclass(slots=True)
class Report:
    collection: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class SyncReport(Report):
    """Counts in source rows: `read = upserted + unchanged + empty + quarantined + superseded`; `deleted` is separate.

    `emptied`: stored rows that became blank; they are part of `empty`, and removed unless the run pauses or stops.
    `paused` is None, `max_deletes` (upserts were applied, deletions were not), `schema_changed` (nothing was applied)
    or `log_missing` (nothing was read). `stopped`: ended early on request, with no deletions and the old checkpoint.
    `complete`: every row was compared. `method`: `full` (all rows by value), `hash` or `rowid` (all, unchanged ones not
    transferred), `watermark`, `log` or `delta`. `loaded`: rows whose values were read. `stages`: seconds busy. `blocks`
    of texts were given to several engines, `repeated_blocks` of them again because an engine died; both include those
    of other runs with the same model at that time.
    """

    method: str = "full"
    read: int = 0
    loaded: int = 0
    upserted: int = 0
    unchanged: int = 0
    empty: int = 0
    quarantined: int = 0
    superseded: int = 0
    deleted: int = 0
    emptied: int = 0
    paused: str | None = None
    stopped: bool = False
    complete: bool = True
    to_delete: int = 0
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0
    blocks: int = 0
    repeated_blocks: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    notes: list[str] = field(default_factory=list)


class StageClock:
    """Counts the seconds that each stage was busy. Thread-safe."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self.seconds[stage] += seconds
