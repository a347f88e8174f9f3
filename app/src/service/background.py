"""Background jobs: sync, build, verify, retry, and scheduled syncs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from cronsim import CronSim

from app.src.core.backends.torch.process import give_back
from app.src.jobs.journal import Job, JobOptions, JobRunning, Kind, QueueFull, StateUnusable, Turn
from app.src.jobs.records import FileRecords, Records
from app.src.jobs.runner import Jobs, Run
from app.src.service.collections import Collections
from app.src.service.wiring import Parts
from app.src.settings.collections import ScheduleSettings
from connector.errors import ConnectorError
from connector.model import CollectionStatus

if TYPE_CHECKING:
    from app.src.service.sync import Quarantine, Sync, SyncRequest
    from connector.sync.quarantine import GivenKey

_log = logging.getLogger(__name__)
LOOK_SECONDS = 30.0  # longest wait between checks: clocks change, machines sleep, other processes take turns
_FILE_SECONDS = 5.0  # longest wait until a collection is noticed that another process added to the settings file
_BUSY_SECONDS = 1.0  # wait while a sync is due and the previous job still runs
_STALE_SECONDS = 5.0  # age of a cached `stale_since`, which every search reads
_READ = ("read", ("upserted", "unchanged", "empty", "quarantined", "superseded"))
# Per kind of job: the total, and the counts that must add up to it.
_SUMS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "sync": _READ,
    "build": _READ,
    "retry": ("retried", ("upserted", "empty", "gone", "quarantined")),
}


def next_start(schedule: ScheduleSettings, turn: Turn | None, now: float) -> float:
    """Return the start after `turn` (None: the first start) in POSIX seconds; an overdue start is in the past. Missed
    turns count as one. A turn in the future (the clock was set back) counts as now."""
    since, last = (now, None) if turn is None else turn
    since, last = min(since, now), None if last is None else min(last, now)
    if schedule.every is not None:
        start = since if last is None else last + schedule.every
    else:
        zone = UTC if schedule.timezone == "UTC" else ZoneInfo(schedule.timezone)
        after = datetime.fromtimestamp(since if last is None else max(since, last), zone)
        start = next(CronSim(schedule.cron or "", after)).timestamp()
    # Random, but the same in every process.
    return start + random.Random(f"{turn}{start}").uniform(0, schedule.jitter)


class Scheduler:
    """Queues due syncs. `schedules`: by collection; None: no schedule. The job records hold the turns, so several
    processes may run the same schedules. Thread-safe."""

    def __init__(
        self,
        jobs: Jobs,
        schedules: Mapping[str, ScheduleSettings | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = jobs
        self._schedules = schedules
        self._clock = clock

    def next_start(self, collection: str) -> float | None:
        """Return the next start in POSIX seconds, None without a schedule. Raises StateUnusable."""
        schedule = self._schedules.get(collection)
        return None if schedule is None else next_start(schedule, self._jobs.turn(collection), self._clock())

    def register(self) -> None:
        """Record the schedules. Raises StateUnusable."""
        for name, schedule in list(self._schedules.items()):
            if schedule is not None or self._jobs.turn(name) is not None:
                self._jobs.register(name, None if schedule is None else schedule.model_dump_json())

    def look(self) -> float:
        """Queue due syncs; return the seconds until the next check. An error of one schedule does not stop the
        others."""
        now = self._clock()
        due = [now + LOOK_SECONDS]
        for name, schedule in list(self._schedules.items()):
            if schedule is None:
                continue
            try:
                turn = self._jobs.turn(name)
                if turn is None:  # the folder of the job records was cleared
                    self.register()
                    turn = (now, None)
                due.append(next_start(schedule, turn, now))
                if due[-1] <= now:
                    due[-1] = now + _BUSY_SECONDS
                    if self._jobs.current(name) is None and self._jobs.add(name, "sync", {"owner": "schedule"}, turn):
                        due[-1] = next_start(schedule, (turn[0], now), now)
            except (JobRunning, QueueFull):
                pass
            except Exception as error:  # any error: it must not stop the other schedules
                why = str(error) if isinstance(error, ConnectorError | StateUnusable) else type(error).__name__
                _log.error('the schedule of "%s" cannot be kept at the moment: %s', name, why)
        return max(0.01, min(due) - now)


class Background:
    """Jobs and schedules of the configured collections. Nothing runs before a job is started or `run` is called."""

    def __init__(
        self,
        parts: Parts,
        collections: Collections,
        sync: Callable[[], Sync],
        quarantine: Callable[[], Quarantine],
        file: Path | None = None,
    ) -> None:
        """`file`: the settings file; job records are kept beside it."""
        settings = parts.settings
        self._parts = parts
        self._collections = collections
        self._sync = sync
        self._quarantine = quarantine
        self._stale: dict[str, tuple[float, str | None]] = {}
        self._schedules = {collection.name: collection.schedule for collection in settings.collections}
        collections.on_new.append(lambda block: self._schedules.update({block.name: block.schedule}))
        options = JobOptions(
            settings.api.job_workers,
            parts.expected_errors,
            passing,
            collections.names,
            lambda: parts.failed,
            max_attempts=settings.state.max_attempts,
            longest_wait=settings.sync.longest_wait,
            give_up_after=settings.sync.give_up_after,
        )
        self.jobs = Jobs(_records(parts, file), self._work, options)
        self.scheduler = Scheduler(self.jobs, self._schedules)

    def run(self, workers: int | None = None, *, schedules: bool, most: int = 0) -> None:
        """Run jobs, including those left by ended processes; with `schedules`, queue due syncs. `workers`: concurrent
        jobs, instead of `api.job_workers`. `most`: begin at most this many jobs; 0: no limit. Raises StateUnusable.
        HANA may be unreachable."""
        registered = not schedules

        def look() -> float:
            nonlocal registered
            self._collections.refresh()
            if not registered:  # not before: the records may be in HANA, and HANA may be unreachable
                self.scheduler.register()
                registered = True
            return min(_FILE_SECONDS, self.scheduler.look() if schedules else _FILE_SECONDS)

        works = self._parts.settings.api.job_workers if workers is None else workers
        self.jobs.run(workers, most, look if schedules or works else None)

    # ----------------------------------------------------------------------------------------------- starting a job

    def start_sync(self, name: str, request: SyncRequest, kind: Kind = "sync") -> Job:
        """Queue a sync, or with kind "build" a new generation. Raises UnknownCollection, WrongOrigin, JobRunning,
        QueueFull, StateUnusable."""
        self._collections.spec_of_table(name)
        return self.jobs.start(name, kind, asdict(request))

    def start_verify(self, name: str, *, repair: bool, generation: int | None = None) -> Job:
        """Queue a verification. Raises as `start_sync`."""
        self._collections.spec_of_table(name)
        return self.jobs.start(name, "verify", {"repair": repair, "generation": generation})

    def start_retry(self, name: str, wanted: Sequence[GivenKey] | None) -> Job:
        """Queue a retry of these quarantine entries; None: all. Raises UnknownKey, and as `start_sync`."""
        self._collections.spec_of_table(name)
        return self.jobs.start(name, "retry", {"ids": self._quarantine().ids(name, wanted)})

    # ---------------------------------------------------------------------------------------------------- working

    def _work(self, run: Run) -> Mapping[str, Any]:
        """Run a job and return its report. The job fails if the counts of the report do not add up."""
        try:
            result = self._report(run)
        finally:
            give_back()  # each job has new threads, and glibc would keep the peak memory of each thread's heap
        total, fates = _SUMS.get(run.job.kind, ("", ()))
        if fates and not result.get("stopped"):
            accounted = sum(result[fate] for fate in fates)
            if result[total] != accounted:
                run.fault = (
                    f"the report does not add up: {total} {result[total]}, but {' + '.join(fates)} = {accounted}; rows "
                    f"may be missing or doubled: run owl-sap verify {run.collection}, and report this as a defect"
                )
        return result

    def _report(self, run: Run) -> Mapping[str, Any]:
        from app.src.service.sync import SyncRequest

        name, asked = run.collection, run.job.request
        match run.job.kind:
            case "sync" | "build":
                known = ("full", "max_deletes", "owner", "accept_schema")
                request = SyncRequest(**{key: asked[key] for key in known if key in asked})
                if asked.get("retry_login") and run.job.attempts == 1:  # only once: refused logins lock the HANA user
                    self._parts.allow_login()
                work = self._sync().run if run.job.kind == "sync" else self._sync().build
                return work(name, request, run, run.stopping).as_dict()
            case "verify":
                return self._sync().verify(name, **asked, observer=run, stop=run.stopping).as_dict()
            case "retry":
                return self._quarantine().retry(name, asked.get("ids"), run, run.stopping).as_dict()

    # ------------------------------------------------------------------------------------------------------- status

    def shown(self, name: str, status: CollectionStatus | None) -> dict[str, str | None]:
        """Return the job and schedule fields of a collection's status. Raises StateUnusable."""
        job, start = self.jobs.current(name), self.scheduler.next_start(name)
        return {
            "job": None if job is None else job.id,
            "next_sync": None if start is None else datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
            "stale_since": _stale_since(self.jobs.last(name), lambda: status),
        }

    def stale_since(self, name: str) -> str | None:
        """Return the UTC time of the last complete sync if source or store have been unreachable since, else None.
        Cached for some seconds. Unreadable job records count as not stale, so that searches still work."""
        asked, since = self._stale.get(name, (-_STALE_SECONDS, None))
        if time.monotonic() - asked >= _STALE_SECONDS:
            try:
                since = _stale_since(self.jobs.last(name), lambda: self._collections.stored(name))
            except (ConnectorError, StateUnusable):
                since = None
            self._stale[name] = (time.monotonic(), since)
        return since


def _records(parts: Parts, file: Path | None) -> Records:
    if parts.settings.state.records == "file":
        return FileRecords(parts.settings.state_folder(file))
    from app.src.jobs.store_records import StoreRecords

    return StoreRecords(lambda: parts.store_pool, parts.schema)


def passing(error: Exception) -> bool:
    """Return whether the error is temporary. The pool's short retries have already failed, so the job waits longer."""
    return isinstance(error, ConnectorError) and error.retryable


def _stale_since(job: Job | None, status_of: Callable[[], CollectionStatus | None]) -> str | None:
    """Return the UTC time of the last complete sync if the collection's last job could not reach source or store, and
    no other process has synced the collection since."""
    if job is None or job.state in ("succeeded", "cancelled") or job.waiting_since is None:
        return None
    status = status_of()
    last = None if status is None else status.last_sync
    return None if last is None or last.timestamp() > job.waiting_since else last.isoformat()
