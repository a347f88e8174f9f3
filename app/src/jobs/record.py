"""What a job and its events are, and what can be wrong with asking for one. Pure vocabulary: no file, no thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["queued", "running", "waiting", "succeeded", "failed", "cancelled"]
Kind = Literal["sync", "verify", "retry", "build"]
STATES: tuple[State, ...] = ("queued", "running", "waiting", "succeeded", "failed", "cancelled")
OVER: tuple[State, ...] = ("succeeded", "failed", "cancelled")


class JobRunning(Exception):
    """The collection has an unfinished job; `job` is its id."""

    def __init__(self, collection: str, job: str, kind: str = "sync") -> None:
        super().__init__(f'a {kind} of "{collection}" is under way (job {job}); wait for it or look at /v1/jobs/{job}')
        self.job = job


class UnknownJob(Exception):
    """No such id; old jobs are forgotten ([state] keep_jobs, keep_days)."""


class JobOver(Exception):
    """What is over cannot be cancelled."""


class QueueFull(Exception):
    """As many jobs wait as [state] max_queued allows."""


class StateUnusable(Exception):
    """The folder for the job records cannot be made or written; the message says which setting names it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A record as it stood when it was read. Times are POSIX seconds; `error` is a sentence for people, never row data.

    `waiting`: another worker holds the collection. `cancelling`: somebody has asked it to stop.
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
    cancelling: bool = False

    @property
    def over(self) -> bool:
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """As REST and the command line show it."""
        shown = asdict(self)
        del shown["cancelling"]
        return shown


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. `id` counts from 1 within the job and never falls.

    `name`: `state` (with the error, if there is one), `progress`, and last of all `result` (the whole record).
    """

    id: int
    name: Literal["state", "progress", "result"]
    data: Mapping[str, Any]
