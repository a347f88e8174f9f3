"""Background jobs of one process: one at a time per collection, with progress, result and cancellation. Runs a callable
it is given and knows nothing about it. Records live in memory only: durable ones come with a later version.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["queued", "running", "waiting", "succeeded", "failed", "cancelled"]
_KEPT = 200
_log = logging.getLogger(__name__)


class JobRunning(Exception):
    """The collection has an unfinished job; `job` is its id."""

    def __init__(self, collection: str, job: str) -> None:
        super().__init__(f'a sync of "{collection}" is under way (job {job}); wait for it or look at /v1/jobs/{job}')
        self.job = job


class UnknownJob(Exception):
    """No such id; finished jobs are forgotten after the newest 200 and with the process."""


@dataclass(slots=True)
class Job:
    """One job. `error` is a sentence for people, never row data."""

    id: str
    collection: str
    state: State = "queued"
    progress: dict[str, int] = field(default_factory=lambda: {"done": 0, "total": 0})
    result: Mapping[str, Any] | None = None
    error: str | None = None
    created: float = field(default_factory=time.time)
    finished: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)

    def report(self, done: int, total: int) -> None:
        self.progress = {"done": done, "total": total}

    def stopping(self) -> bool:
        return self._stop.is_set()

    def cancel(self) -> None:
        self._stop.set()

    @property
    def over(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")

    def as_dict(self) -> dict[str, Any]:
        names = ("id", "collection", "state", "progress", "result", "error", "created", "finished")
        return {name: getattr(self, name) for name in names}


Work = Callable[[Job], Mapping[str, Any]]


class Jobs:
    """`expected`: exceptions whose message may be shown; of any other only the class is.

    At most `workers` jobs run at once, the others are queued. Threads are daemons: a process that must end does not
    wait for a batch, because the next sync heals whatever was cut short.
    """

    def __init__(self, workers: int = 2, expected: tuple[type[Exception], ...] = ()) -> None:
        self._slots = threading.Semaphore(workers)
        self._expected = expected
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: dict[str, threading.Thread] = {}

    def start(self, collection: str, work: Work) -> Job:
        """Raises JobRunning when the collection has an unfinished one."""
        with self._lock:
            current = self._current(collection)
            if current is not None:
                raise JobRunning(collection, current.id)
            job = Job(uuid.uuid4().hex, collection)
            self._jobs[job.id] = job
            self._forget()
            thread = threading.Thread(target=self._run, args=(job, work), name=f"job-{collection}", daemon=True)
            self._threads[job.id] = thread
            thread.start()
        return job

    def get(self, job_id: str) -> Job:
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"there is no job {job_id!r}")
        return job

    def all(self) -> list[Job]:
        """Newest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def current(self, collection: str) -> Job | None:
        """The collection's unfinished job."""
        with self._lock:
            return self._current(collection)

    def close(self, timeout: float = 5.0) -> None:
        """Ask every job to stop and wait at most `timeout` seconds for all of them together."""
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = list(self._threads.values())
            for job in self._jobs.values():
                job.cancel()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _current(self, collection: str) -> Job | None:
        return next((job for job in self._jobs.values() if job.collection == collection and not job.over), None)

    def _forget(self) -> None:
        over = [job.id for job in self._jobs.values() if job.over]
        for job_id in over[: max(0, len(self._jobs) - _KEPT)]:
            del self._jobs[job_id]

    def _run(self, job: Job, work: Work) -> None:
        try:
            with self._slots:
                if not job.stopping():
                    job.state = "running"
                    job.result = work(job)
            state: State = "cancelled" if job.stopping() else "succeeded"
        except self._expected as error:
            job.error, state = str(error), "failed"
        except Exception as error:
            # Its text stays out of the log: it may hold row data.
            frames = "".join(traceback.format_tb(error.__traceback__))
            _log.error("job %s failed: %s\n%s", job.id, type(error).__name__, frames)
            job.error, state = f"unexpected error ({type(error).__name__}); see the log of the service", "failed"
        job.finished = time.time()
        with self._lock:
            job.state = state
            self._threads.pop(job.id, None)
