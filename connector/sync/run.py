"""What a run is told and what it tells: its ends, its options, who looks on, its report. Knows the protocols of
`protocols.py` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from connector.protocols import Embedder, Observer, Source
from connector.stores.store import VectorStore
from connector.sync.clock import STAGES

Stop = Callable[[], bool]
"""Asked between pages; True: end early, keeping what is done."""


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks on at a run, and who may end it early."""

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
    """`max_deletes`: the largest share of the stored documents that one run may delete. `lease_wait` in seconds.

    `window` is how many changed documents are collected before they are embedded together: a large window gives the
    engine batches of like lengths. `readers`: so many threads read a large table at once, each a range of keys.
    `full`: compare everything, whatever the change method. `accept_schema`: go on although the type of a column in use
    is another one than at the last sync.
    """

    page_rows: int = 1000
    max_deletes: float = 0.2
    full: bool = False
    owner: str = "sync"
    lease_wait: float = 60.0
    window: int = 1000
    accept_schema: bool = False
    max_attempts: int = 6
    """Of a row in quarantine; after them it is left alone until its content changes or somebody has it retried."""
    readers: int = 2


@dataclass(slots=True)
class SyncReport:
    """Counts in source rows: `read = upserted + unchanged + empty + quarantined + superseded`; `deleted` beside it.

    `paused` is None or a reason: `max_deletes` (upserts were applied, deletions were not), `schema_changed` (nothing
    was), `log_missing` (nothing was read). `stopped`: the run was asked to end early, so nothing was deleted and the
    checkpoint stayed. `complete`: every row was compared. `method`: how rows were found, by comparing all of them
    (`full`; by `hash` or `rowid` without moving the unchanged ones) or by `watermark` or `log`. `loaded`: rows whose
    values were read. `late_rows`: those a full comparison found changed that the watermark would have missed.
    `stages`: seconds busy.
    """

    collection: str
    method: str = "full"
    read: int = 0
    loaded: int = 0
    upserted: int = 0
    unchanged: int = 0
    empty: int = 0
    quarantined: int = 0
    superseded: int = 0
    deleted: int = 0
    paused: str | None = None
    stopped: bool = False
    complete: bool = True
    to_delete: int = 0
    late_rows: int = 0
    embedded_texts: int = 0
    reused_texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    notes: list[str] = field(default_factory=list)
    """What a person should know and no count says."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a sync and what stands between them."""

    source: Source
    store: VectorStore
    embedder: Embedder
