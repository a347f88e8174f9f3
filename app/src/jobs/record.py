"""Jobs, their events, and the errors of requests for them."""

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
    """No job has this id; old jobs are deleted."""


class JobOver(Exception):
    """A finished job cannot be cancelled."""


class QueueFull(Exception):
    """The queue of jobs is full. `seconds`: until the next try."""

    seconds = 60.0  # jobs take minutes


class StateUnusable(Exception):
    """The folder for job records cannot be created or written; the message names its setting."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the kept records: jobs by kind and state, the POSIX seconds at which the oldest queued job was
    requested, and the progress of running jobs by collection and kind as (rows done, rows in all)."""

    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    oldest: float | None = None
    progress: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A job's record when it was read. Times are POSIX seconds; `error` and `note` are messages without row data.

    `queued`: no process runs it; with a note if one did. `waiting`: another worker holds the collection or, with
    `next_try`, source or store are unreachable until the next attempt. `attempts`: how often it was begun.
    `cancelling`: a cancellation was requested. `request`: JSON. `waits`: failed attempts since `waiting_since`.
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
        """Return the form shown by REST and the command line."""
        shown = asdict(self)
        for name in _HIDDEN:
            del shown[name]
        return shown


_HIDDEN = ("cancelling", "request", "waits", "waiting_since")
"""A request may hold the keys of rows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt. A state in `OVER` ends the job; `queued`: it continues as soon as a process is free;
    `waiting`: not before `next_try`. `error`: why, in these two states too. `away`: source or store are unreachable."""

    state: State
    result: Mapping[str, Any] | None = None
    error: str | None = None
    progress: tuple[int, int] | None = None
    next_try: float | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A collection's place in its schedule. `last`: start of the last turn, None before the first; `since`: when this
    schedule was first seen. POSIX seconds."""

    since: float
    last: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job. `id` counts up from 1 within the job. `name`: `state` (with the error, or a note on the
    state), `progress`, and last `result` (the whole record)."""

    id: int
    name: Literal["state", "progress", "result"]
    data: Mapping[str, Any]
