"""Runs jobs in threads of this process and keeps their records up to date. A record that cannot be written never ends
the work; work that does not listen never holds up the end of the process.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.src.jobs.journal import FILE, GO_ON, Journal, Outcome, Retention
from app.src.jobs.presence import Presence
from app.src.jobs.record import Event, Job, Kind, State, StateUnusable, UnknownJob
from connector.errors import ConnectorError

PROGRESS_SECONDS = 0.5
"""Progress is written so often at most, and so is the wish to cancel looked for."""
_RETRIES = (0.1, 1.0, 5.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """`workers` jobs run at once, the others wait. `expected`: exceptions whose message may be shown; of any other only
    the class is."""

    workers: int = 2
    expected: tuple[type[Exception], ...] = ()
    retention: Retention = field(default_factory=Retention)


class Run:
    """A job as its work sees it."""

    def __init__(self, job: Job, journal: Journal) -> None:
        self.id = job.id
        self.collection = job.collection
        self.journal = journal
        self._stop = threading.Event()
        self._looked = time.monotonic()
        self._written = 0.0
        self.last: tuple[int, int] | None = None

    def report(self, done: int, total: int) -> None:
        """Progress; written now and then, and at the end."""
        self.last = (done, total)
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._written = time.monotonic()
            with suppress(ConnectorError):
                self.journal.progress(self.id, done, total)

    def wait(self, waiting: bool) -> None:
        """Whether another worker keeps this job from working."""
        with suppress(ConnectorError):
            self.journal.wait(self.id, waiting)

    def stopping(self) -> bool:
        """Should the work end early? Costs a look into the file now and then: another process may have asked."""
        if not self._stop.is_set() and time.monotonic() - self._looked >= PROGRESS_SECONDS:
            self._looked = time.monotonic()
            with suppress(ConnectorError):
                if self.journal.cancelling(self.id):
                    self._stop.set()
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()


Work = Callable[[Run], Mapping[str, Any]]
"""Returns the result. One that holds `"stopped": false` came to its end although it was asked to stop."""


class Jobs:
    """The jobs in `folder`, which is made when the first job is, for its owner alone (0700).

    Threads are daemons: a process that must end does not wait for a batch, because the next sync heals whatever was cut
    short. Everything but `start` also works on jobs of other processes that share the folder.
    """

    def __init__(self, folder: Path, options: JobOptions | None = None) -> None:
        self.folder = folder
        self._options = options or JobOptions()
        self._slots = threading.Semaphore(self._options.workers)
        self._lock = threading.RLock()
        self._opened: tuple[Journal, Presence] | None = None
        self._runs: dict[str, tuple[Run, threading.Thread]] = {}
        self._unrecorded: dict[str, Outcome] = {}
        self._ending = self._closing = False

    # ------------------------------------------------------------------------------------------------- the folder

    def open(self) -> None:
        """Make the folder and the file, and end what died with an earlier process. Raises StateUnusable."""
        self._journal().settle()

    def _journal(self) -> Journal:
        journal, _ = self._open()
        for job_id, outcome in list(self._unrecorded.items()):
            with suppress(ConnectorError):
                journal.finish(job_id, outcome)
                self._unrecorded.pop(job_id, None)
        return journal

    def _open(self) -> tuple[Journal, Presence]:
        with self._lock:
            if self._closing:
                raise StateUnusable("the service is ending and starts no more jobs")
            if self._opened is None:
                self._opened = self._opening()
            return self._opened

    def _opening(self) -> tuple[Journal, Presence]:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            journal = Journal(self.folder, self._options.retention)
            try:
                return journal, Presence(self.folder)
            except BaseException:
                journal.close()
                raise
        except (OSError, ConnectorError) as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError | ConnectorError) -> StateUnusable:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return StateUnusable(
            f"the folder for job records, {self.folder}, cannot be used ({why}): set [state] path "
            "(OWL_SAP_STATE__PATH) to a folder that this user may write"
        )

    def _existing(self) -> Journal | None:
        """None while there never was a job: looking makes no folder. Raises StateUnusable."""
        if self._opened is None:
            try:
                (self.folder / FILE).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:  # another user's
                raise self._unusable(error) from None
        return self._journal()

    # ---------------------------------------------------------------------------------------------------- the jobs

    def start(self, collection: str, work: Work, kind: Kind = "sync") -> Job:
        """Raises JobRunning when the collection has an unfinished one, here or in another process; QueueFull;
        StateUnusable."""
        with self._lock:
            journal, (_, presence) = self._journal(), self._open()
            job = journal.add(collection, kind, presence.id)
            run = Run(job, journal)
            thread = threading.Thread(target=self._run, args=(run, work), name=f"job-{collection}", daemon=True)
            self._runs[job.id] = run, thread
            thread.start()
        return job

    def get(self, job_id: str) -> Job:
        """Raises UnknownJob."""
        journal = self._existing()
        if journal is None:
            raise UnknownJob(f"there is no job {job_id!r}")
        return journal.get(job_id)

    def all(self, collection: str | None = None, state: State | None = None, limit: int = 100) -> list[Job]:
        """Newest first."""
        journal = self._existing()
        return [] if journal is None else journal.all(collection, state, limit)

    def current(self, collection: str) -> Job | None:
        """The collection's unfinished job."""
        journal = self._existing()
        return None if journal is None else journal.current(collection)

    def cancel(self, job_id: str) -> Job:
        """A queued job ends at once, a running one after the batch in hand. Raises UnknownJob, JobOver."""
        journal = self._existing()
        if journal is None:
            raise UnknownJob(f"there is no job {job_id!r}")
        job = journal.cancel(job_id)
        with self._lock:
            run = self._runs.get(job_id)
        if run is not None:
            run[0].stop()
        return job

    def events(self, job_id: str, after: int = 0) -> list[Event]:
        """The job's events behind number `after`, oldest first; cheap enough to be asked several times a second."""
        journal = self._existing()
        return [] if journal is None else journal.events(job_id, after)

    def stop(self) -> None:
        """The process is going to end: ask every job of it to end early. Returns at once."""
        with self._lock:
            self._ending = True
            for run, _ in self._runs.values():
                run.stop()

    def close(self, timeout: float = 5.0) -> None:
        """Ask every job to stop, wait at most `timeout` seconds for all of them together, and record the others as
        interrupted."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closing = True
            threads = [thread for _, thread in self._runs.values()]
        self.stop()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            opened, self._opened = self._opened, None
            left = list(self._runs)
        if opened is None:
            return
        journal, presence = opened
        for job_id in left:
            with suppress(ConnectorError):
                journal.finish(job_id, Outcome("failed", error=f"interrupted: the service ended. {GO_ON}"))
        journal.close()
        presence.close()

    # ------------------------------------------------------------------------------------------------------ running

    def _run(self, run: Run, work: Work) -> None:
        outcome = self._outcome(run, work)
        try:
            for pause in (*_RETRIES, None):
                try:
                    run.journal.finish(run.id, outcome)
                    return
                except ConnectorError as error:
                    if self._closing or pause is None:
                        _log.error("the end of job %s (%s) is not recorded yet: %s", run.id, outcome.state, error)
                        self._unrecorded[run.id] = outcome
                        return
                    time.sleep(pause)
        finally:
            with self._lock:
                self._runs.pop(run.id, None)

    def _outcome(self, run: Run, work: Work) -> Outcome:
        try:
            if not self._turn(run):
                return Outcome("cancelled", error=self._why_ended())
            try:
                if not run.journal.begin(run.id):
                    return Outcome("cancelled")
                result = work(run)
            finally:
                self._slots.release()
        except self._options.expected as error:
            return Outcome("failed", error=str(error), progress=run.last)
        except Exception as error:
            # Its text stays out of the log: it may hold row data.
            frames = "".join(traceback.format_tb(error.__traceback__))
            _log.error("job %s failed: %s\n%s", run.id, type(error).__name__, frames)
            why = f"unexpected error ({type(error).__name__}); see the log of the service"
            return Outcome("failed", error=why, progress=run.last)
        if run.stopping() and result.get("stopped", True):
            return Outcome("cancelled", result, self._why_ended(), run.last)
        return Outcome("succeeded", result, progress=run.last)

    def _turn(self, run: Run) -> bool:
        """Wait for a free worker; False when the job was cancelled meanwhile."""
        while not run.stopping():
            if self._slots.acquire(timeout=0.1):
                if not run.stopping():
                    return True
                self._slots.release()
        return False

    def _why_ended(self) -> str | None:
        return f"interrupted: the service ended. {GO_ON}" if self._ending else None
