"""Run jobs in threads of this process and keep their records up to date. An unwritable record does not end the work;
work that ignores a stop does not delay the end of the process."""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.src.jobs.journal import ENDED, FILE, Journal, Limits, Presence
from app.src.jobs.record import Event, Job, Kind, Outcome, State, StateUnusable, Tally, Turn, UnknownJob
from connector.errors import ConnectorError

PROGRESS_SECONDS = 0.5  # seconds between two writes of progress, and between two checks for a cancellation
FIRST_WAIT = 5.0  # seconds; the connection pool has already retried for shorter failures
_MOST_DOUBLINGS = 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a job waits before the next attempt, and when it gives up, in seconds. Waits are random and grow from
    `FIRST_WAIT` to `longest_wait`, so that workers that lost the same HANA return at different times. `give_up_after`
    counts from the first failed attempt."""

    longest_wait: float = 300.0
    give_up_after: float = 86_400.0

    def pause(self, failures: int) -> float:
        """Return the wait after `failures` failed attempts; for 1, between `FIRST_WAIT` and twice that."""
        most = min(self.longest_wait, FIRST_WAIT * 2.0 ** min(failures, _MOST_DOUBLINGS))
        return random.uniform(min(FIRST_WAIT, most), most)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """`workers`: concurrent jobs. `expected`: exceptions whose message may be shown; of others only the class is.
    `passing`: whether an error is temporary, so that the job is retried with `patience`. `collections`: those that this
    process can run; None: all. `look_seconds`: time between two checks for jobs of other processes."""

    workers: int = 2
    expected: tuple[type[Exception], ...] = ()
    passing: Callable[[Exception], bool] = lambda error: False
    collections: Sequence[str] | None = None
    limits: Limits = field(default_factory=Limits)
    patience: Patience = field(default_factory=Patience)
    look_seconds: float = 1.0


class Run:
    """A job as seen by its work."""

    def __init__(self, job: Job, journal: Journal, owner: str) -> None:
        self.job = job
        self.id = job.id
        self.collection = job.collection
        self.journal = journal
        self.owner = owner
        self.cancelled = False
        """Somebody has cancelled the job, as far as we know."""
        self._stop = threading.Event()
        self._looked = time.monotonic()
        self._written = 0.0
        self.last: tuple[int, int] | None = None

    def report(self, done: int, total: int) -> None:
        """Report progress; it is written every PROGRESS_SECONDS and at the end."""
        self.last = (done, total)
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._written = time.monotonic()
            with suppress(ConnectorError):
                self.journal.progress(self.id, self.owner, done, total)

    def wait(self, waiting: bool) -> None:
        """Record whether another worker blocks this job."""
        with suppress(ConnectorError):
            self.journal.wait(self.id, self.owner, waiting)

    def stopping(self) -> bool:
        """Return whether the work should end early. Reads the file now and then, because another process may have
        cancelled it."""
        if not self._stop.is_set() and time.monotonic() - self._looked >= PROGRESS_SECONDS:
            self._looked = time.monotonic()
            with suppress(ConnectorError):
                if self.journal.cancelling(self.id):
                    self.cancel()
        return self._stop.is_set()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop.set()

    def stop(self) -> None:
        """Ask the work to end, because the process will."""
        self._stop.set()


class Unaccountable(Exception):
    """The work returned an inconsistent report, `result`."""

    def __init__(self, message: str, result: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.result = result


Work = Callable[[Run], Mapping[str, Any]]
"""Does what the job asks for, however it got here, and returns the result. One that holds `"stopped": false` came to
its end although it was asked to stop. May raise Unaccountable."""


class Jobs:
    """The jobs in `folder`, which the first job creates with mode 0700.

    A process with a free thread takes queued jobs: this one from its first `start`, or from `run` on. Threads are
    daemons, so that the process can end during a batch; the next attempt repairs what was cut short. Reading and
    cancelling work from any process that shares the folder.
    """

    def __init__(
        self, folder: Path, work: Work, options: JobOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self._work = work
        self._options = options or JobOptions()
        self._clock = clock
        self._workers = self._options.workers
        self._lock = threading.RLock()
        self._opened: tuple[Journal, Presence] | None = None
        self._runs: dict[str, tuple[Run, threading.Thread]] = {}
        self._unrecorded: dict[str, Outcome] = {}
        self._dispatcher: threading.Thread | None = None
        self._news = threading.Event()
        self._ending = self._closing = False
        self._most = self._begun = 0
        self._spent = threading.Event()
        self._looked = time.monotonic()

    def open(self) -> None:
        """Create folder and file, and queue the jobs of dead processes again. Raises StateUnusable."""
        self._journal().settle()

    @property
    def owner(self) -> str:
        """Return the id of this process in the records. Raises StateUnusable."""
        return self._open()[1].id

    def _journal(self) -> Journal:
        journal, presence = self._open()
        for job_id, outcome in list(self._unrecorded.items()):
            with suppress(ConnectorError):
                journal.finish(job_id, presence.id, outcome)
                self._unrecorded.pop(job_id, None)
        return journal

    def _open(self) -> tuple[Journal, Presence]:
        with self._lock:
            if self._closing:
                raise StateUnusable("the service is ending and starts no more jobs")
            if self._opened is None:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._opened = Journal(self.folder, self._options.limits, self._clock), Presence(self.folder)
                except (OSError, ConnectorError) as error:
                    raise self._unusable(error) from None
            return self._opened

    def _unusable(self, error: OSError | ConnectorError) -> StateUnusable:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return StateUnusable(
            f"the folder for job records, {self.folder}, cannot be used ({why}): set [state] path "
            "(OWL_SAP_STATE__PATH) to a folder that this user may write"
        )

    def _existing(self) -> Journal | None:
        """Return the journal, None before the first job: reading creates no folder. Raises StateUnusable."""
        if self._opened is None:
            try:
                (self.folder / FILE).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:  # owned by another user
                raise self._unusable(error) from None
        return self._journal()

    def start(self, collection: str, kind: Kind = "sync", request: Mapping[str, Any] | None = None) -> Job:
        """Queue a job. Raises JobRunning when the collection has an unfinished one, in any process; QueueFull;
        StateUnusable."""
        job = self._add(collection, kind, request)
        assert job is not None
        return job

    def start_turn(self, collection: str, turn: Turn, request: Mapping[str, Any]) -> Job | None:
        """Queue a scheduled sync; None when another process has taken this turn. Raises as `start`."""
        return self._add(collection, "sync", request, turn)

    def _add(
        self, collection: str, kind: Kind, request: Mapping[str, Any] | None, turn: Turn | None = None
    ) -> Job | None:
        job = self._journal().add(collection, kind, request, turn)
        if self._workers:
            self._dispatch()
        return job

    def get(self, job_id: str) -> Job:
        """Return a job. Raises UnknownJob."""
        journal = self._existing()
        if journal is None:
            raise UnknownJob(f"there is no job {job_id!r}")
        return journal.get(job_id)

    def all(self, collection: str | None = None, state: State | None = None, limit: int = 100) -> list[Job]:
        """Return jobs, newest first."""
        journal = self._existing()
        return [] if journal is None else journal.all(collection, state, limit)

    def tally(self) -> Tally:
        """Return the counts of all jobs. Cheap; the jobs of a dead process still count as running."""
        journal = self._existing()
        return Tally() if journal is None else journal.tally()

    def current(self, collection: str) -> Job | None:
        """Return the collection's unfinished job, or None."""
        journal = self._existing()
        return None if journal is None else journal.current(collection)

    def last(self, collection: str) -> Job | None:
        """Return the collection's newest job, the unfinished one if there is one. Cheap."""
        journal = self._existing()
        return None if journal is None else journal.last(collection)

    def cancel(self, job_id: str) -> Job:
        """End a queued job at once, a running one after its current batch. Raises UnknownJob, JobOver."""
        journal = self._existing()
        if journal is None:
            raise UnknownJob(f"there is no job {job_id!r}")
        job = journal.cancel(job_id)
        with self._lock:
            run = self._runs.get(job_id)
        if run is not None:
            run[0].cancel()
        return job

    def events(self, job_id: str, after: int = 0) -> list[Event]:
        """Return the job's events after number `after`, oldest first. Cheap enough for several calls a second."""
        journal = self._existing()
        return [] if journal is None else journal.events(job_id, after)

    def turn(self, collection: str) -> Turn | None:
        """Return the collection's place in its schedule; None until a scheduler has registered it."""
        journal = self._existing()
        return None if journal is None else journal.turn(collection)

    def register(self, collection: str, schedule: str | None) -> None:
        """Set the collection's schedule; None: no schedule."""
        self._journal().register(collection, schedule)

    def stop(self) -> None:
        """Take no more jobs and ask running ones to end early. Returns at once."""
        with self._lock:
            self._ending = True
            for run, _ in self._runs.values():
                run.stop()
        self._news.set()

    def close(self, timeout: float = 5.0) -> None:
        """Ask all jobs to stop, wait at most `timeout` seconds for them together, and queue unfinished ones again."""
        deadline = time.monotonic() + timeout
        self.stop()
        with self._lock:
            self._closing = True
            dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            threads = [thread for _, thread in self._runs.values()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            opened, self._opened = self._opened, None
            left, self._runs = list(self._runs), {}
        if opened is None:
            return
        journal, presence = opened
        for job_id, outcome in ({job_id: Outcome("queued", error=ENDED) for job_id in left} | self._unrecorded).items():
            with suppress(ConnectorError):
                journal.finish(job_id, presence.id, outcome)
        journal.close()
        presence.close()

    def run(self, workers: int | None = None, most: int = 0) -> None:
        """Start working, also on jobs of other processes. `workers`: instead of the option. `most`: begin at most this
        many jobs (0: no limit), and `wait_spent` returns when they are over. Raises StateUnusable."""
        self._workers = self._workers if workers is None else workers
        self._most = most
        self.open()
        if self._workers:
            self._dispatch()

    def wait_spent(self, seconds: float) -> bool:
        """Wait until all jobs that `run` allowed are over; return whether they are."""
        return self._spent.wait(seconds)

    @property
    def looked_ago(self) -> float:
        """Return the seconds since this process last read the job records, normally about one."""
        return time.monotonic() - self._looked

    def _may_begin(self) -> bool:
        return not self._ending and not (self._most and self._begun >= self._most)

    def _dispatch(self) -> None:
        with self._lock:
            gone = self._dispatcher is None or not self._dispatcher.is_alive()
            if gone and not self._ending:
                self._dispatcher = threading.Thread(target=self._dispatching, name="jobs", daemon=True)
                self._dispatcher.start()
        self._news.set()

    def _dispatching(self) -> None:
        said = ""
        while not self._ending:
            self._news.clear()
            try:
                self._take_all()
                self._looked = time.monotonic()
                said = ""
            except Exception as error:  # any error: without this thread no job would ever begin again
                known = isinstance(error, ConnectorError | StateUnusable)
                why = str(error) if known else type(error).__name__
                if said != why and not self._ending:
                    _log.error("no job can be begun at the moment: %s", why)
                said = why
            self._news.wait(self._options.look_seconds)

    def _take_all(self) -> None:
        """Start a job in each free thread."""
        journal, presence = self._journal(), self._open()[1]
        journal.settle()
        while self._may_begin() and len(self._runs) < self._workers:
            job = journal.claim(presence.id, self._options.collections)
            if job is None:
                return
            run = Run(job, journal, presence.id)
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
                journal.finish(job.id, presence.id, Outcome("queued", error="no thread was free to work on it"))
                raise

    def _run(self, run: Run) -> None:
        outcome = self._outcome(run)
        try:
            if self._has(run):
                run.journal.finish(run.id, run.owner, outcome)
        except ConnectorError as error:
            _log.error("the end of job %s (%s) is not recorded yet: %s", run.id, outcome.state, error)
            self._unrecorded[run.id] = outcome
        finally:
            with self._lock:
                if self._has(run):
                    del self._runs[run.id]
                if not self._runs and not self._may_begin():
                    self._spent.set()
            self._news.set()

    def _has(self, run: Run) -> bool:
        """Return False when the process is ending, or when the next attempt at the same job has begun."""
        with self._lock:
            return run.id in self._runs and self._runs[run.id][0] is run

    def _outcome(self, run: Run) -> Outcome:
        try:
            result = self._work(run)
        except Unaccountable as error:
            return Outcome("failed", error.result, str(error), run.last)
        except BaseException as error:  # also an end of the thread: else the job would count as running
            if isinstance(error, Exception) and self._options.passing(error):
                return self._postponed(run, error)
            return Outcome("failed", error=self._shown(run, error), progress=run.last)
        if run.stopping() and result.get("stopped", True):
            return self._stopped(run, result)
        return Outcome("succeeded", result, progress=run.last)

    def _stopped(self, run: Run, result: Mapping[str, Any] | None) -> Outcome:
        if self._ending and not run.cancelled:
            return Outcome("queued", error=ENDED, progress=run.last)
        return Outcome("cancelled", result, progress=run.last)

    def _postponed(self, run: Run, error: Exception) -> Outcome:
        """Return when to try again, or a failure once `give_up_after` has passed."""
        if run.stopping():
            return self._stopped(run, None)
        now, job, patience = self._clock(), run.job, self._options.patience
        why = self._shown(run, error)
        since = now if job.waiting_since is None else job.waiting_since
        if now - since >= patience.give_up_after:
            why = f"gave up after {job.waits + 1} attempts in {max(0.0, now - since) / 3600:.1f} h: {why}"
            return Outcome("failed", error=why, progress=run.last, away=True)
        next_try = now + patience.pause(job.waits + 1)
        return Outcome("waiting", error=why, progress=run.last, next_try=next_try, away=True)

    def _shown(self, run: Run, error: BaseException) -> str:
        if isinstance(error, self._options.expected):
            return str(error)
        # The message may hold row data and stays out of the log.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _log.error("job %s failed: %s\n%s", run.id, type(error).__name__, frames)
        return f"unexpected error ({type(error).__name__}); see the log of the service"
