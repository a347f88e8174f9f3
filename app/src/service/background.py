"""What a service does in the background: sync, verify and retry as jobs, and syncs on schedule. Knows no HTTP and no
terminal, and of the service only the operations that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.src.core.backends.torch.compute_thread import give_back
from app.src.jobs import Job, JobOptions, Jobs, Kind, Limits, Patience, Run, StateUnusable, Unaccountable
from app.src.service.schedule import Scheduler
from app.src.settings import Settings
from connector.errors import ConnectorError
from connector.model import CollectionStatus
from connector.protocols import Observer

if TYPE_CHECKING:
    from connector.sync.quarantine import RetryReport
    from connector.sync.run import SyncReport
    from connector.sync.verify import VerifyReport

_STALE_SECONDS = 5.0
"""How long searches remember whether a collection is stale: they ask often."""
_SUMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sync": ("read", ("upserted", "unchanged", "empty", "quarantined", "superseded")),
    "build": ("read", ("upserted", "unchanged", "empty", "quarantined", "superseded")),
    "retry": ("retried", ("upserted", "empty", "gone", "quarantined")),
}
"""By kind of job: every row read must have met one of these fates."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """What one sync run was asked for; None: as configured. `retry_login`: somebody says that a login that was refused
    may be tried again, once."""

    full: bool = False
    max_deletes: float | None = None
    owner: str = "sync"
    retry_login: bool = False
    accept_schema: bool = False


class Operations(Protocol):
    """What can be done in the background. Raises the errors of the connector and of the engine."""

    def sync(
        self, name: str, request: SyncRequest | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> SyncReport: ...

    def build(
        self, name: str, request: SyncRequest | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> SyncReport: ...

    def verify(
        self,
        name: str,
        *,
        repair: bool,
        generation: int | None,
        observer: Observer | None,
        stop: Callable[[], bool],
    ) -> VerifyReport: ...

    def retry_ids(
        self, name: str, ids: list[str] | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> RetryReport: ...

    def allow_login(self) -> None: ...


class Background:
    """Jobs and schedules of the collections in `settings`. Nothing runs before the first job is started here, or `run`
    is called; `close` ends it."""

    def __init__(
        self,
        settings: Settings,
        file: Path | None,
        operations: Operations,
        expected: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`file`: where the settings were read. `expected`: errors whose message is meant for people."""
        self._operations = operations
        self._works: Mapping[Kind, Callable[[Run], Mapping[str, Any]]] = {
            "sync": self._sync,
            "build": self._build,
            "verify": self._verify,
            "retry": self._retry,
        }
        self._stale: dict[str, tuple[float, str | None]] = {}
        schedules = {collection.name: collection.schedule for collection in settings.collections}
        state, sync = settings.state, settings.sync
        options = JobOptions(
            settings.api.job_workers,
            expected,
            passing,
            tuple(schedules),
            Limits(state.keep_jobs, state.keep_days, state.max_queued, state.max_attempts),
            Patience(sync.longest_wait, sync.give_up_after),
        )
        self.jobs = Jobs(settings.state_folder(file), self._work, options, clock)
        self.scheduler = Scheduler(self.jobs, schedules, asdict(SyncRequest(owner="schedule")), clock)

    def run(self, workers: int | None = None, *, schedules: bool, most: int = 0) -> None:
        """Work from now on: what others left, what is asked for and, with `schedules`, what is due. `workers`: jobs at
        once, in place of `api.job_workers`. `most`: begin so many jobs and no more; 0: no bound. Raises
        StateUnusable."""
        self.jobs.run(workers, most)
        if schedules:
            self.scheduler.run()

    def stop(self) -> None:
        """The process is going to end: jobs finish the batch in hand. Returns at once."""
        self.scheduler.stop()
        self.jobs.stop()

    def close(self, seconds: float = 5.0) -> None:
        """Wait for the batches in hand, so long at most; what has not come to its end goes on elsewhere, later."""
        self.stop()
        self.scheduler.close()
        self.jobs.close(seconds)

    # ------------------------------------------------------------------------------------------------ asking for jobs

    def start_sync(self, name: str, request: SyncRequest) -> Job:
        """Raises JobRunning, QueueFull, StateUnusable."""
        return self.jobs.start(name, "sync", asdict(request))

    def start_build(self, name: str, request: SyncRequest) -> Job:
        """Raises as `start_sync`."""
        return self.jobs.start(name, "build", asdict(request))

    def start_verify(self, name: str, *, repair: bool, generation: int | None = None) -> Job:
        """Raises as `start_sync`."""
        return self.jobs.start(name, "verify", {"repair": repair, "generation": generation})

    def start_retry(self, name: str, ids: list[str] | None) -> Job:
        """Retry these entries of the quarantine; None: all. Raises as `start_sync`."""
        return self.jobs.start(name, "retry", {"ids": ids})

    # ---------------------------------------------------------------------------------------------------- doing them

    def _work(self, run: Run) -> Mapping[str, Any]:
        """Raises Unaccountable for a report that does not add up: such a job has not succeeded, whatever it says."""
        try:
            result = self._works[run.job.kind](run)
        finally:
            # A job's threads are new ones each time, so its memory comes from any of glibc's heaps, and each would keep
            # the most that a job ever took from it.
            give_back()
        total, fates = _SUMS.get(run.job.kind, ("", ()))
        if fates and not result.get("stopped"):
            accounted = sum(result[fate] for fate in fates)
            if result[total] != accounted:
                raise Unaccountable(
                    f"the report does not add up: {total} {result[total]}, but {' + '.join(fates)} = {accounted}; rows "
                    f"may be missing or doubled: run owl-sap verify {run.collection}, and report this as a defect",
                    result,
                )
        return result

    def _sync(self, run: Run) -> Mapping[str, Any]:
        request = self._sync_request(run)
        return self._operations.sync(run.collection, request, _JobObserver(run), run.stopping).as_dict()

    def _build(self, run: Run) -> Mapping[str, Any]:
        request = self._sync_request(run)
        return self._operations.build(run.collection, request, _JobObserver(run), run.stopping).as_dict()

    def _sync_request(self, run: Run) -> SyncRequest:
        asked = run.job.request
        request = SyncRequest(
            asked.get("full", False),
            asked.get("max_deletes"),
            asked.get("owner", "sync"),
            accept_schema=asked.get("accept_schema", False),
        )
        if asked.get("retry_login") and run.job.attempts == 1:  # never again without being asked: HANA locks users
            self._operations.allow_login()
        return request

    def _verify(self, run: Run) -> Mapping[str, Any]:
        asked = run.job.request
        report = self._operations.verify(
            run.collection,
            repair=asked.get("repair", False),
            generation=asked.get("generation"),
            observer=_JobObserver(run),
            stop=run.stopping,
        )
        return report.as_dict()

    def _retry(self, run: Run) -> Mapping[str, Any]:
        ids = run.job.request.get("ids")
        return self._operations.retry_ids(run.collection, ids, _JobObserver(run), run.stopping).as_dict()

    # ---------------------------------------------------------------------------------------------------- how it is

    def shown(self, name: str, status: CollectionStatus | None) -> dict[str, str | None]:
        """What `status` shows of a collection. Raises StateUnusable."""
        job, start = self.jobs.current(name), self.scheduler.next_start(name)
        return {
            "job": None if job is None else job.id,
            "next_sync": None if start is None else datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
            "stale_since": _stale_since(self.jobs.last(name), status),
        }

    def stale_since(self, name: str, stored: Callable[[str], CollectionStatus | None]) -> str | None:
        """When what is stored was last complete, if source or store are away since then; some seconds old at most.
        Never raises for records that cannot be read: searches go on without them."""
        asked, since = self._stale.get(name, (-_STALE_SECONDS, None))
        if time.monotonic() - asked >= _STALE_SECONDS:
            try:
                job = self.jobs.last(name)
                since = _stale_since(job, stored(name)) if _away(job) else None
            except (ConnectorError, StateUnusable):
                since = None
            self._stale[name] = (time.monotonic(), since)
        return since


def passing(error: Exception) -> bool:
    """Does it go away by itself? It has outlasted the pool's own attempts, so it takes longer."""
    return isinstance(error, ConnectorError) and error.retryable


def _away(job: Job | None) -> bool:
    """Has the collection's last job met a source or store that is away, and not got over it?"""
    return job is not None and job.waiting_since is not None and job.state not in ("succeeded", "cancelled")


def _stale_since(job: Job | None, status: CollectionStatus | None) -> str | None:
    """None also when another, the command line for one, has synced it since."""
    if not _away(job) or status is None or status.last_sync is None:
        return None
    last = status.last_sync if status.last_sync.tzinfo else status.last_sync.replace(tzinfo=UTC)
    assert job is not None
    overtaken = last.timestamp() > (job.waiting_since or 0.0)
    return None if overtaken else last.isoformat()


class _JobObserver:
    """A job as the Observer of its work."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def stage(self, name: str, seconds: float, items: int) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        self._run.report(done, total)

    def event(self, name: str, **fields: str | int | float) -> None:
        if name in ("waiting", "owned"):
            self._run.wait(name == "waiting")
