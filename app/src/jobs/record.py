"""What a job and its events are, and what can be wrong with asking for one. Pure vocabulary: no file, no thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["queued", "running", "waiting", "succeeded", "failed", "cancelled"]
Kind = Literal["sync", "verify", "retry", "build"]
STATES: tuple[State, ...] = ("queued", "running", "waiting", "succeeded", "failed", "cancelled")
OVER: tuple[State, ...] = ("succeeded", "failed", "cancelled")


class JobRunning(Exception):
    """The collection has an unfinished job; `job` is its id."""

    def __init__(self, collection: str, job: str, kind: str = "sync") -> None:
        super().__init__(
            f'a {kind} of "{collection}" is under way (job {job}); wait for it, look at /v1/jobs/{job}, or cancel it'
        )
        self.job = job


class UnknownJob(Exception):
    """No such id; old jobs are forgotten."""


class JobOver(Exception):
    """What is over cannot be cancelled."""


class QueueFull(Exception):
    """As many jobs wait as may. `seconds`: until the next try."""

    seconds = 60.0  # jobs take minutes


class StateUnusable(Exception):
    """The folder for the job records cannot be made or written; the message says which setting names it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Of all records that are kept: how many by kind and state, when (POSIX seconds) the oldest queued one was asked
    for, and how far those that run have come, by collection and kind: (rows handled, rows in all)."""

    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    oldest: float | None = None
    progress: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A record as it stood when it was read. Times are POSIX seconds; `error` and `note` are sentences for people,
    never row data.

    `queued`: nobody works on it; with a note when somebody did. `waiting`: another worker holds the collection, or,
    with `next_try`, source or store are away and it is tried again then. `attempts`: how often it was begun.
    `cancelling`: somebody has asked it to stop. `request`: what was asked for, as JSON. `waits` counts attempts in vain
    since `waiting_since`.
    """

    id: str
    collection: str
    kind: Kind
    state: State
    progress: Mapping[str, int]
    result: Mapping[str, Any] | None
    error: str | None
    created: float
    started: float | None
    finished: float | None
    attempts: int = 0
    note: str | None = None
    next_try: float | None = None
    cancelling: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)
    waits: int = 0
    waiting_since: float | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """As REST and the command line show it."""
        shown = asdict(self)
        for name in _HIDDEN:
            del shown[name]
        return shown


_HIDDEN = ("cancelling", "request", "waits", "waiting_since")
"""A request may hold the keys of rows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. In a state that is `OVER` the job is over; `queued`: it goes on as soon as somebody works;
    `waiting`: not before `next_try`. `error`: why, in both cases too. `away`: because source or store are away."""

    state: State
    result: Mapping[str, Any] | None = None
    error: str | None = None
    progress: tuple[int, int] | None = None
    next_try: float | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A collection's place in its schedule: `last` is the start of its last turn, None before the first; `since` when
    this schedule was first seen. POSIX seconds."""

    since: float
    last: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. `id` counts from 1 within the job and never falls.

    `name`: `state` (with the error, or a note on why it is in this state), `progress`, and last of all `result` (the
    whole record).
    """

    id: int
    name: Literal["state", "progress", "result"]
    data: Mapping[str, Any]
