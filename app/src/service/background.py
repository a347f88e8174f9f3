"""Work in the background: sync, build, verify and retry as jobs, and syncs on schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.src.core.backends.torch.process import give_back
from app.src.jobs import Job, JobOptions, Jobs, Kind, Limits, Patience, Run, StateUnusable, Unaccountable
from app.src.service.collections import Collections
from app.src.service.quarantine import Quarantine
from app.src.service.schedule import Scheduler
from app.src.service.sync import Sync, SyncRequest
from app.src.service.wiring import Parts
from connector.errors import ConnectorError
from connector.model import CollectionStatus
from connector.sync.quarantine import GivenKey

_STALE_SECONDS = 5.0  # age of a remembered answer of `stale_since`, which every search asks for
_READ = ("read", ("upserted", "unchanged", "empty", "quarantined", "superseded"))
# By kind of job: the count of rows, and the counts that must add up to it.
_SUMS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "sync": _READ,
    "build": _READ,
    "retry": ("retried", ("upserted", "empty", "gone", "quarantined")),
}


class Background:
    """Jobs and schedules of the configured collections. Nothing runs before the first job is started here, or `run` is
    called; `close` ends it."""

    def __init__(
        self,
        parts: Parts,
        collections: Collections,
        sync: Sync,
        quarantine: Quarantine,
        file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`file`: where the settings were read: the records of jobs lie beside it."""
        settings = parts.settings
        self._parts = parts
        self._collections = collections
        self._sync = sync
        self._quarantine = quarantine
        self._stale: dict[str, tuple[float, str | None]] = {}
        schedules = {collection.name: collection.schedule for collection in settings.collections}
        state = settings.state
        options = JobOptions(
            settings.api.job_workers,
            parts.expected_errors,
            passing,
            tuple(schedules),
            Limits(state.keep_jobs, state.keep_days, state.max_queued, state.max_attempts),
            Patience(settings.sync.longest_wait, settings.sync.give_up_after),
        )
        self.jobs = Jobs(settings.state_folder(file), self._work, options, clock)
        self.scheduler = Scheduler(self.jobs, schedules, asdict(SyncRequest(owner="schedule")), clock)

    def run(self, workers: int | None = None, *, schedules: bool, most: int = 0) -> None:
        """Work from now on: on jobs left by other processes too and, with `schedules`, on what is due. `workers`: jobs
        at once, in place of `api.job_workers`. `most`: begin this many jobs and no more; 0: no limit. Raises
        StateUnusable."""
        self.jobs.run(workers, most)
        if schedules:
            self.scheduler.run()

    def stop(self) -> None:
        """Let running jobs finish the batch in hand and begin no others. Return at once."""
        self.scheduler.stop()
        self.jobs.stop()

    def close(self, seconds: float = 5.0) -> None:
        """Stop and wait for the batches in hand, at most this long; unfinished jobs go back to the queue."""
        self.stop()
        self.scheduler.close()
        self.jobs.close(seconds)

    # ----------------------------------------------------------------------------------------------- starting a job

    def start_sync(self, name: str, request: SyncRequest) -> Job:
        """Raises UnknownCollection, WrongOrigin, JobRunning, QueueFull, StateUnusable."""
        return self._start(name, "sync", asdict(request))

    def start_build(self, name: str, request: SyncRequest) -> Job:
        """Build another generation. Raises as `start_sync`."""
        return self._start(name, "build", asdict(request))

    def start_verify(self, name: str, *, repair: bool, generation: int | None = None) -> Job:
        """Raises as `start_sync`."""
        return self._start(name, "verify", {"repair": repair, "generation": generation})

    def start_retry(self, name: str, wanted: Sequence[GivenKey] | None) -> Job:
        """Retry these entries of the quarantine; None: all. Raises UnknownKey, and as `start_sync`."""
        self._collections.spec_of_table(name)
        return self._start(name, "retry", {"ids": self._quarantine.ids(name, wanted)})

    def _start(self, name: str, kind: Kind, request: Mapping[str, Any]) -> Job:
        self._collections.spec_of_table(name)
        return self.jobs.start(name, kind, request)

    # ---------------------------------------------------------------------------------------------------- working

    def _work(self, run: Run) -> Mapping[str, Any]:
        """Raises Unaccountable for a report whose counts do not add up: such a job has failed."""
        try:
            result = self._report(run)
        finally:
            give_back()  # each job has new threads, and each of glibc's heaps would keep the most that a job ever used
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

    def _report(self, run: Run) -> Mapping[str, Any]:
        name, asked, observer = run.collection, run.job.request, _JobObserver(run)
        match run.job.kind:
            case "sync" | "build":
                request = SyncRequest(
                    full=asked.get("full", False),
                    max_deletes=asked.get("max_deletes"),
                    owner=asked.get("owner", "sync"),
                    accept_schema=asked.get("accept_schema", False),
                )
                if asked.get("retry_login") and run.job.attempts == 1:  # only once: HANA locks users
                    self._parts.allow_login()
                work = self._sync.run if run.job.kind == "sync" else self._sync.build
                return work(name, request, observer, run.stopping).as_dict()
            case "verify":
                repair, generation = asked.get("repair", False), asked.get("generation")
                return self._sync.verify(
                    name, repair=repair, generation=generation, observer=observer, stop=run.stopping
                ).as_dict()
            case "retry":
                return self._quarantine.retry_ids(name, asked.get("ids"), observer, run.stopping).as_dict()

    # ------------------------------------------------------------------------------------------------------- status

    def shown(self, name: str, status: CollectionStatus | None) -> dict[str, str | None]:
        """What the status of a collection says of jobs and schedule. Raises StateUnusable."""
        job, start = self.jobs.current(name), self.scheduler.next_start(name)
        return {
            "job": None if job is None else job.id,
            "next_sync": None if start is None else datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
            "stale_since": _stale_since(self.jobs.last(name), status),
        }

    def stale_since(self, name: str) -> str | None:
        """Return the UTC time of the last complete sync if source or store have been away since then, else None; at
        most some seconds old. Unreadable job records count as not stale: searches go on without them."""
        asked, since = self._stale.get(name, (-_STALE_SECONDS, None))
        if time.monotonic() - asked >= _STALE_SECONDS:
            try:
                job = self.jobs.last(name)
                since = _stale_since(job, self._collections.stored(name)) if _away(job) else None
            except (ConnectorError, StateUnusable):
                since = None
            self._stale[name] = (time.monotonic(), since)
        return since


def passing(error: Exception) -> bool:
    """Whether the error goes away by itself: the pool's own short retries have failed, so the job waits longer."""
    return isinstance(error, ConnectorError) and error.retryable


def _away(job: Job | None) -> bool:
    """Whether source or store were away in the collection's last job, and it has not recovered."""
    return job is not None and job.waiting_since is not None and job.state not in ("succeeded", "cancelled")


def _stale_since(job: Job | None, status: CollectionStatus | None) -> str | None:
    """None also when another process has synced it since."""
    if not _away(job) or status is None or status.last_sync is None:
        return None
    last = status.last_sync if status.last_sync.tzinfo else status.last_sync.replace(tzinfo=UTC)
    assert job is not None
    overtaken = last.timestamp() > (job.waiting_since or 0.0)
    return None if overtaken else last.isoformat()


class _JobObserver:
    """Reports the progress of a job."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def stage(self, name: str, seconds: float, items: int) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        self._run.report(done, total)

    def event(self, name: str, **fields: str | int | float) -> None:
        if name in ("waiting", "owned"):
            self._run.wait(name == "waiting")
