"""Run jobs in threads of this process and keep their records up to date. A job continues if its record cannot be
written; a job that ignores a stop does not delay the exit of the process."""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from app.src.jobs.journal import ENDED, Job, JobOptions, Journal, Kind, StateUnusable
from connector.errors import ConnectorError

if TYPE_CHECKING:
    from app.src.jobs.records import Records

PROGRESS_SECONDS = 0.5  # seconds between two writes of progress, and between two checks for a cancellation
FIRST_WAIT = 5.0  # seconds; the connection pool has already retried for shorter failures
_MOST_DOUBLINGS = 30
_LOOK_AGAIN_SECONDS = 30.0  # after an unexpected error in queueing due jobs
_log = logging.getLogger(__name__)


def pause(failures: int, longest: float) -> float:
    """Return the seconds to wait after `failures` failed attempts; for 1, between `FIRST_WAIT` and twice that. Random,
    so that workers that lost the same HANA retry at different times."""
    most = min(longest, FIRST_WAIT * 2.0 ** min(failures, _MOST_DOUBLINGS))
    return random.uniform(min(FIRST_WAIT, most), most)


def _cause(error: Exception) -> str:
    """Return the message of an error that names its remedy, of any other only the class: it may quote rows."""
    return str(error) if isinstance(error, ConnectorError | StateUnusable) else type(error).__name__


class Run:
    """A running job, passed to its work as an `Observer`. `fault`: set it to fail the job even if the work returns a
    result."""

    def __init__(self, job: Job, journal: Journal) -> None:
        self.job = job
        self.id = job.id
        self.collection = job.collection
        self.cancelled = False
        self.fault: str | None = None
        self.last: tuple[int, int] | None = None
        self._journal = journal
        self._stop = threading.Event()
        self._looked = time.monotonic()
        self._written = 0.0

    def progress(self, done: int, total: int) -> None:
        """Record progress, at most once per PROGRESS_SECONDS, and at the end."""
        self.last = (done, total)
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._written = time.monotonic()
            with suppress(ConnectorError, StateUnusable):
                self._journal.progress(self.id, done, total)

    def event(self, name: str) -> None:
        """Record whether another worker blocks this job."""
        if name in ("waiting", "owned"):
            with suppress(ConnectorError, StateUnusable):
                self._journal.wait(self.id, name == "waiting")

    def stopping(self) -> bool:
        """Return whether the work should end early. Reads the record now and then, because another process may have
        cancelled the job."""
        if not self._stop.is_set() and time.monotonic() - self._looked >= PROGRESS_SECONDS:
            self._looked = time.monotonic()
            with suppress(ConnectorError, StateUnusable):
                if self._journal.cancelling(self.id):
                    self.stop(cancelled=True)
        return self._stop.is_set()

    def stop(self, *, cancelled: bool = False) -> None:
        """Ask the work to end, because the process is ending or the job was cancelled."""
        self.cancelled = self.cancelled or cancelled
        self._stop.set()


# Does the job and returns its result. `"stopped": false` in it: the work finished although it was asked to stop.
Work = Callable[[Run], Mapping[str, Any]]


class Jobs(Journal):
    """The jobs in `records`.

    Any process with a free thread takes queued jobs; this process does so after its first `start` or `run`. Threads are
    daemons, so that the process can end during a batch; the next attempt repairs incomplete writes. Reading and
    cancelling work from any process that shares the records.
    """

    def __init__(
        self, records: Records, work: Work, options: JobOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(records, options, clock)
        self._lock = threading.RLock()
        self._work = work
        self._workers = self._options.workers
        self._runs: dict[str, tuple[Run, threading.Thread]] = {}
        self._unrecorded: dict[str, dict[str, Any]] = {}
        self._dispatcher: threading.Thread | None = None
        self._look: Callable[[], float] | None = None
        self._news = threading.Event()
        self._ending = False
        self._most = self._begun = 0
        self._spent = threading.Event()
        self._looked = time.monotonic()

    def open(self) -> None:
        """Prepare the records without contacting HANA. Raises StateUnusable."""
        self._records.open()

    def settle(self) -> None:
        """Write outcomes that could not be written before, and requeue the jobs of dead processes."""
        for job_id, outcome in list(self._unrecorded.items()):
            with suppress(ConnectorError):
                self.finish(job_id, **outcome)
                self._unrecorded.pop(job_id, None)
        super().settle()

    def start(self, collection: str, kind: Kind = "sync", request: Mapping[str, Any] | None = None) -> Job:
        """Queue a job, which a thread of this process may also take. Raises the errors of `add`."""
        job = self.add(collection, kind, request)
        assert job is not None
        if self._workers:
            self._dispatch()
        return job

    def cancel(self, id_: str) -> Job:
        job = super().cancel(id_)
        with self._lock:
            if id_ in self._runs:
                self._runs[id_][0].stop(cancelled=True)
        return job

    def stop(self) -> None:
        """Take no more jobs and ask running ones to end early. Returns at once."""
        with self._lock:
            self._ending = True
            for run, _ in self._runs.values():
                run.stop()
        self._news.set()

    def close(self, timeout: float = 5.0) -> None:
        """Ask all jobs to stop, wait at most `timeout` seconds for them together, and requeue unfinished ones."""
        deadline = time.monotonic() + timeout
        self.stop()
        if self._dispatcher is not None:
            self._dispatcher.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            threads = [thread for _, thread in self._runs.values()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            left, self._runs = {job_id: {"state": "queued", "error": ENDED} for job_id in self._runs}, {}
        for job_id, outcome in (left | self._unrecorded).items():
            with suppress(ConnectorError, StateUnusable):
                self.finish(job_id, **outcome)
        super().close()

    def run(self, workers: int | None = None, most: int = 0, look: Callable[[], float] | None = None) -> None:
        """Start working, including on jobs that other processes queued. `workers` overrides the option. `most`: start
        at most this many jobs (0: no limit); `wait_spent` waits for them. `look`: queues due jobs and returns the
        seconds until its next call. Raises StateUnusable."""
        self._workers = self._workers if workers is None else workers
        self._most, self._look = most, look
        self.open()
        if self._workers or look is not None:
            self._dispatch()

    def wait_spent(self, seconds: float) -> bool:
        """Wait at most `seconds` for all jobs that `run` allowed; return whether they have ended."""
        return self._spent.wait(seconds)

    @property
    def looked_ago(self) -> float:
        """Return the seconds since this process last read the job records, normally about one."""
        return time.monotonic() - self._looked

    def _may_begin(self) -> bool:
        spent = self._most and self._begun >= self._most
        return not (self._ending or spent or self._options.unable())

    def _dispatch(self) -> None:
        with self._lock:
            gone = self._dispatcher is None or not self._dispatcher.is_alive()
            if gone and not self._ending:
                self._dispatcher = threading.Thread(target=self._take_jobs, name="jobs", daemon=True)
                self._dispatcher.start()
        self._news.set()

    def _take_jobs(self) -> None:
        """Until the process ends: queue due jobs, and start a queued job in each free thread."""
        said, due = "", 0.0
        while not self._ending:
            self._news.clear()
            wait = self._options.look_seconds
            if self._look is not None and time.monotonic() >= due:
                due = time.monotonic() + _LOOK_AGAIN_SECONDS
                try:
                    due = time.monotonic() + self._look()
                except Exception as error:  # any error: queued jobs must still start
                    _log.error("cannot queue due jobs at the moment: %s", _cause(error))
            try:
                self.settle()
                while self._may_begin() and len(self._runs) < self._workers and self._begin_one():
                    pass
                self._looked, said = time.monotonic(), ""
                wait = min(wait, due - self._looked) if self._look is not None else wait
            except Exception as error:  # any error: without this thread no job would start again
                why = _cause(error)
                if said != why and not self._ending:
                    _log.error("cannot start jobs at the moment: %s", why)
                said = why
            self._news.wait(max(0.0, wait))

    def _begin_one(self) -> bool:
        job = self.claim(self._options.collections)
        if job is None:
            return False
        run = Run(job, self)
        thread = threading.Thread(target=self._run, args=(run,), name=f"job-{job.collection}", daemon=True)
        with self._lock:
            self._runs[job.id] = run, thread
            self._begun += 1
            if self._ending:
                run.stop()
        try:
            thread.start()
        except RuntimeError:  # the system cannot start a thread
            with self._lock:
                self._runs.pop(job.id, None)
                self._begun -= 1
            self.finish(job.id, "queued", error="the system could not start a thread for it")
            raise
        return True

    def _run(self, run: Run) -> None:
        def is_mine() -> bool:  # False if the process is ending or the next attempt at this job has started
            with self._lock:
                return run.id in self._runs and self._runs[run.id][0] is run

        outcome = self._outcome(run) | {"progress": run.last}
        try:
            if is_mine():
                self.finish(run.id, **outcome)
        except ConnectorError as error:
            _log.error("cannot record the end of job %s (%s) yet: %s", run.id, outcome["state"], error)
            self._unrecorded[run.id] = outcome
        finally:
            with self._lock:
                if is_mine():
                    del self._runs[run.id]
                if not self._runs and not self._may_begin():
                    self._spent.set()
            self._news.set()

    def _outcome(self, run: Run) -> dict[str, Any]:
        """Do the work; return the arguments of `finish`."""
        result: Mapping[str, Any] | None = None
        try:
            result = self._work(run)
        except BaseException as error:  # SystemExit too: otherwise the job would count as running
            shown = str(error)
            if not isinstance(error, self._options.expected):
                # The message may hold row data and stays out of the log.
                frames = "".join(traceback.format_tb(error.__traceback__))
                _log.error("job %s failed: %s\n%s", run.id, type(error).__name__, frames)
                shown = f"unexpected error ({type(error).__name__}); see the log of the service"
            if unable := self._options.unable():  # whatever the error was: another process does the job again
                return {"state": "queued", "error": unable, "crashed": True}
            if not (isinstance(error, Exception) and self._options.passing(error)):
                return {"state": "failed", "error": shown}
            if not run.stopping():
                return self._postponed(run.job, shown)
        if run.fault is not None:
            return {"state": "failed", "result": result, "error": run.fault}
        if not run.stopping() or (result is not None and not result.get("stopped", True)):
            return {"state": "succeeded", "result": result}
        if self._ending and not run.cancelled:
            return {"state": "queued", "error": ENDED}
        return {"state": "cancelled", "result": result}

    def _postponed(self, job: Job, why: str) -> dict[str, Any]:
        """Return a waiting outcome with the time of the next attempt, or a failure after `give_up_after`."""
        now, options = self._clock(), self._options
        since = now if job.waiting_since is None else job.waiting_since
        if now - since >= options.give_up_after:
            why = f"gave up after {job.waits + 1} attempts in {max(0.0, now - since) / 3600:.1f} h: {why}"
            return {"state": "failed", "error": why, "away": True}
        next_try = now + pause(job.waits + 1, options.longest_wait)
        return {"state": "waiting", "error": why, "next_try": next_try, "away": True}
