"""The records and events of jobs in one SQLite file that several processes share. Each change of state is one
transaction with its event."""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import orjson

from app.src.jobs import State
from connector.errors import ConnectorError, StoreCorrupt
from connector.stores.local.sqlite_file import Schema, SqliteFile

Kind = Literal["sync", "verify", "retry", "build"]
Turn = tuple[float, float | None]
"""A collection's place in its schedule, in POSIX seconds: when this schedule was first seen, and the start of the last
turn, None before the first."""
OVER: tuple[State, ...] = ("succeeded", "failed", "cancelled")
EVENTS_KEPT = 1000  # progress events of one job; newer ones replace older ones
_GO_ON = "it goes on from what is stored as soon as a service or worker runs"
ENDED = f"interrupted: the service ended in the middle; {_GO_ON}"
_GIVEN_UP = (
    "given up: {} processes died or lost their GPU while they ran it ([state] max_attempts). Nothing is lost: starting "
    "it again goes on from what is stored; look for the reason in the log of the service or the system (out of memory?)"
    " first"
)
_FILE = "jobs.sqlite"
_LAYOUT = files(__package__).joinpath("layout.sql").read_text(encoding="utf-8")
SCHEMA = Schema(
    application_id=0x4F574C4A,  # spells OWLJ
    version=3,
    script=_LAYOUT,
    called="the file of job records",
    remedy="start again: it holds the history of jobs, no rows and no vectors",
)
_UNFINISHED = "state IN ('queued', 'running', 'waiting')"
_COLUMNS = (
    "id, collection, kind, state, done, total, result, error, created, started, finished, attempts, note, next_try, "
    "cancelling, request, waits, waiting_since"
)


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
    """The queue of jobs is full. `seconds`: how long to wait before trying again."""

    seconds = 60.0  # jobs take minutes


class StateUnusable(Exception):
    """The folder for job records cannot be created or written; the message names its setting."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job's record when it was read. Times are POSIX seconds; `error` and `note` are messages without row data.

    `queued`: no process runs the job; `note` is set if one did. `waiting`: another worker holds the collection or, with
    `next_try`, source or store were unreachable and are tried again then. `attempts`: how often the job was begun.
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
    attempts: int
    note: str | None
    next_try: float | None
    cancelling: bool
    request: Mapping[str, Any]
    waits: int
    waiting_since: float | None

    @property
    def over(self) -> bool:
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """Return the form shown by REST and the command line, without the request, which may hold keys of rows."""
        hidden = ("cancelling", "request", "waits", "waiting_since")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job. `id` counts up from 1 within the job. `name`: `state` (with the error, or a note on the
    state), `progress`, and last `result` (the whole record)."""

    id: int
    name: Literal["state", "progress", "result"]
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """`workers`: concurrent jobs. `expected`: exceptions whose message may be shown; others show only their class.
    `passing`: whether an error is temporary, so that the job is retried. `collections`: those that this process can
    run; None: all. `unable`: why this process can run no more jobs, "" if it can; its jobs are queued for another one.
    `look_seconds`: time between two checks for jobs of other processes.

    `keep_jobs`, `keep_days`: how many records are kept, and how long. `max_queued`: jobs in the queue. `max_attempts`:
    crashed processes after which a job fails. For jobs whose source or store is unreachable, in seconds:
    `longest_wait`, the most between two attempts; `give_up_after`, the time after the first one until the job fails.
    """

    workers: int = 2
    expected: tuple[type[Exception], ...] = ()
    passing: Callable[[Exception], bool] = lambda error: False
    collections: Sequence[str] | None = None
    unable: Callable[[], str] = lambda: ""
    look_seconds: float = 1.0
    keep_jobs: int = 1000
    keep_days: float = 30.0
    max_queued: int = 100
    max_attempts: int = 5
    longest_wait: float = 300.0
    give_up_after: float = 86_400.0


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether the process with this `Journal.owner` still runs. Removes the file of a dead process."""
    path = folder / f"{owner}.alive"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # a process of another user
    try:
        # Shared, so that two concurrent callers do not mistake each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    with suppress(OSError):
        path.unlink()
    return False


class Journal:
    """The records in `folder`, which the first write creates with mode 0700: reading creates nothing. Thread-safe.
    Raises StateUnusable, and the errors of `SqliteFile`.

    `owner` names this process in the records once they are open. The process locks a file that other processes on this
    machine see (wherever SQLite's own locks work), and the kernel releases the lock when the process ends. No clock is
    involved, so a slow or stopped process does not count as dead.
    """

    def __init__(self, folder: Path, options: JobOptions | None = None, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.owner = ""
        self._options = options or JobOptions()
        self._clock = clock
        self._lock = threading.RLock()
        self._file: SqliteFile | None = None
        self._alive = -1
        self._closed = False

    def _opened(self) -> SqliteFile:
        with self._lock:
            if self._closed:
                raise StateUnusable("the service is ending and starts no more jobs")
            if self._file is None:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    file = SqliteFile(self.folder / _FILE, SCHEMA)
                    self.owner = f"{os.getpid()}-{secrets.token_hex(6)}"
                    self._lock_file = self.folder / f"{self.owner}.alive"
                    self._alive = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                    fcntl.flock(self._alive, fcntl.LOCK_EX)
                except (OSError, ConnectorError) as error:
                    raise self._unusable(error) from None
                self._file = file
            return self._file

    def _unusable(self, error: OSError | ConnectorError) -> StateUnusable:
        if isinstance(error, StoreCorrupt):  # damaged, or of another version: another folder is not the remedy
            return StateUnusable(str(error))
        why = error.strerror if isinstance(error, OSError) else str(error)
        return StateUnusable(
            f"the folder for job records, {self.folder}, cannot be used ({why}): set [state] path "
            "(OWL_SAP_STATE__PATH) to a folder that this user may write"
        )

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        """Open a read transaction; before the first job, on an empty database in memory."""
        try:
            there = self._file is not None or bool((self.folder / _FILE).stat())
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError as error:  # owned by another user
            raise self._unusable(error) from None
        if there:
            with self._opened().read() as db:
                yield db
        else:
            with closing(sqlite3.connect(":memory:")) as db:
                db.executescript(_LAYOUT)
                yield db

    def close(self) -> None:
        with self._lock:
            self._closed = True
            file, self._file = self._file, None
        if file is not None:
            file.close()
            with suppress(OSError):
                self._lock_file.unlink()
            os.close(self._alive)

    # ---------------------------------------------------------------------------------------------- requests for jobs

    def add(
        self,
        collection: str,
        kind: Kind = "sync",
        request: Mapping[str, Any] | None = None,
        turn: Turn | None = None,
    ) -> Job | None:
        """Queue a job. `request`: JSON, for the process that runs the job. `turn`: add the job only if this is still
        the collection's turn, and return None if another process has taken it. Raises JobRunning if the collection has
        an unfinished job, in any process, and QueueFull."""
        file = self._opened()
        self.settle()
        now, id_, options = self._clock(), uuid.uuid4().hex, self._options
        with file.write() as db:
            db.execute(  # delete old records first, so that one more fits
                "DELETE FROM jobs WHERE finished IS NOT NULL AND (finished < ? OR number <= "
                "(SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET ?))",
                (now - options.keep_days * 86_400, max(0, options.keep_jobs - 1)),
            )
            other = db.execute(
                f"SELECT id, kind FROM jobs WHERE collection = ? AND {_UNFINISHED}",  # noqa: S608 - constant
                (collection,),
            ).fetchone()
            if other is not None:
                raise JobRunning(collection, *other)
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= options.max_queued:
                raise QueueFull(f"{waiting} jobs wait for their turn already; try again later")
            if turn is not None:  # compare and set: only one of two processes that see the same turn takes it
                sql = "UPDATE turns SET last = ? WHERE collection = ? AND since = ? AND last IS ?"
                if db.execute(sql, (now, collection, *turn)).rowcount != 1:
                    return None
            inserted = db.execute(
                "INSERT INTO jobs (id, collection, kind, state, created, owner, request) "
                "VALUES (?, ?, ?, 'queued', ?, '', ?)",
                (id_, collection, kind, now, orjson.dumps(request or {}).decode()),
            )
            _tell(db, inserted.lastrowid, "state", {"state": "queued"})
            return _job(db, id_)

    def cancel(self, id_: str) -> Job:
        """End a job that no process runs; ask the process of a running one to stop after its current batch. Raises
        UnknownJob, and JobOver for a job that ended otherwise than cancelled."""
        self.get(id_)
        with self._opened().write() as db:
            job = _job(db, id_)
            if job.state == "cancelled":
                return job
            if job.over:
                raise JobOver(f"job {id_} is over ({job.state}): there is nothing to cancel")
            if db.execute("UPDATE jobs SET cancelling = 1 WHERE id = ? AND owner <> ''", (id_,)).rowcount == 0:
                self._leave(db, id_, "cancelled")
            return _job(db, id_)

    # ---------------------------------------------------------------------------------------------------- working

    def claim(self, collections: Sequence[str] | None) -> Job | None:
        """Take the oldest due job, or return None. `collections`: take only theirs. Safe for concurrent callers."""
        ready = (
            "SELECT id FROM jobs WHERE (state = 'queued' OR (state = 'waiting' AND next_try <= ?1)) AND owner = '' "
            "AND (?2 IS NULL OR collection IN (SELECT value FROM json_each(?2))) ORDER BY number LIMIT 1"
        )
        now, chosen = self._clock(), None if collections is None else orjson.dumps(list(collections)).decode()
        with self._read() as db:  # usually no job is due, and looking must not lock out writers
            if db.execute(ready, (now, chosen)).fetchone() is None:
                return None
        with self._opened().write() as db:
            taken = db.execute(
                "UPDATE jobs SET state = 'running', owner = ?3, attempts = attempts + 1, "  # noqa: S608 - constant
                f"started = coalesce(started, ?1), note = NULL, next_try = NULL WHERE id = ({ready}) "
                "RETURNING number, id",
                (now, chosen, self.owner),
            ).fetchall()
            if not taken:
                return None
            number, id_ = taken[0]
            job = _job(db, id_)
            _tell(db, number, "state", {"state": "running", "attempt": job.attempts})
            return job

    def wait(self, id_: str, waiting: bool) -> None:
        """Change a running job to waiting for another worker, or back."""
        new, old = ("waiting", "running") if waiting else ("running", "waiting")
        note = {"note": "another worker holds the collection"} if waiting else {}
        with self._opened().write() as db:
            number = self._number(db, id_, f"state = '{old}'")
            if number is not None:
                db.execute("UPDATE jobs SET state = ?, note = ? WHERE number = ?", (new, note.get("note"), number))
                _tell(db, number, "state", {"state": new, **note})

    def progress(self, id_: str, done: int, total: int) -> None:
        with self._opened().write() as db:
            _progress(db, self._number(db, id_), (done, total))

    def finish(self, id_: str, state: State, **outcome: Any) -> None:
        """Record the end of an attempt or of the job, unless another process owns the job now. `outcome`: `error`,
        `crashed`, and the fields of `outcome` in `_leave`."""
        with self._opened().write() as db:
            if self._number(db, id_) is None:
                return
            if state not in OVER and _job(db, id_).cancelling:
                state, outcome = "cancelled", {key: outcome.get(key) for key in ("result", "progress")}
            if outcome.pop("crashed", False):
                self._crash(db, id_, **outcome)
            else:
                self._leave(db, id_, state, **outcome)

    def settle(self) -> None:
        """Queue the jobs of dead processes again, or end those cancelled or crashed too often."""
        owned_sql = f"SELECT id, owner, cancelling FROM jobs WHERE {_UNFINISHED} AND owner <> ''"  # noqa: S608
        with self._read() as db:
            owners = {owner for _, owner, *_ in db.execute(owned_sql).fetchall()}
        gone = {owner for owner in owners if not is_alive(self.folder, owner)}
        if not gone:
            return
        with self._opened().write() as db:
            for id_, owner, cancelling in db.execute(owned_sql).fetchall():
                if owner not in gone:
                    continue
                if cancelling:
                    self._leave(db, id_, "cancelled")
                else:
                    self._crash(db, id_, "its process died in the middle")

    def _crash(self, db: sqlite3.Connection, id_: str, error: str, **outcome: Any) -> None:
        """Queue a job again whose process died or can do no more, or end it after `max_attempts` of them."""
        ((crashes,),) = db.execute("SELECT crashes + 1 FROM jobs WHERE id = ?", (id_,)).fetchall()
        if crashes >= self._options.max_attempts:
            self._leave(db, id_, "failed", error=_GIVEN_UP.format(crashes), **outcome)
        else:
            self._leave(db, id_, "queued", error=f"interrupted: {error}; {_GO_ON}", crashed=True, **outcome)

    def _number(self, db: sqlite3.Connection, id_: str, where: str = _UNFINISHED) -> int | None:
        """Return the number of an unfinished job that this process owns, else None."""
        sql = f"SELECT number FROM jobs WHERE id = ? AND owner = ? AND {where}"  # noqa: S608 - constants
        row = db.execute(sql, (id_, self.owner)).fetchone()
        return None if row is None else int(row[0])

    def _leave(
        self,
        db: sqlite3.Connection,
        id_: str,
        state: State,
        error: str | None = None,
        *,
        crashed: bool = False,
        **outcome: Any,
    ) -> None:
        """End an attempt at a job. A state in OVER ends the job; `queued`: it continues as soon as a process is free;
        `waiting`: not before `next_try`. `error`: the reason, in these two states too. `crashed`: the process died or
        can do no more. `outcome`: `result`, `progress` as (rows done, rows in all), `next_try`, and `away`: source or
        store are unreachable."""
        over, now, away = state in OVER, self._clock(), outcome.get("away", False)
        reason, result = "error" if over else "note", outcome.get("result")
        ((number,),) = db.execute(
            f"UPDATE jobs SET note = NULL, {reason} = ?, state = ?, owner = '', result = ?, next_try = ?, "  # noqa: S608
            "finished = ?, waits = waits + ?, crashes = crashes + ?, "
            "waiting_since = CASE WHEN ? THEN coalesce(waiting_since, ?) ELSE waiting_since END "
            "WHERE id = ? RETURNING number",
            (
                *(error, state, None if result is None else orjson.dumps(result, default=str).decode()),
                *(outcome.get("next_try"), now if over else None, away, crashed, away, now, id_),
            ),
        ).fetchall()
        _progress(db, number, outcome.get("progress"))
        _tell(db, number, "state", {"state": state} | ({} if error is None else {reason: error}))
        if over:
            _tell(db, number, "result", _job(db, id_).as_dict())

    # ---------------------------------------------------------------------------------------------------- reading

    def get(self, id_: str) -> Job:
        """Return a job. Raises UnknownJob."""
        self.settle()
        with self._read() as db:
            return _job(db, id_)

    def all(self, collection: str | None = None, state: State | None = None, limit: int = 100) -> list[Job]:
        """Return jobs, newest first."""
        self.settle()
        with self._read() as db:
            return _jobs(
                db,
                "(?1 IS NULL OR collection = ?1) AND (?2 IS NULL OR state = ?2) ORDER BY number DESC LIMIT ?3",
                (collection, state, limit),
            )

    def current(self, collection: str) -> Job | None:
        """Return the collection's unfinished job, or None."""
        self.settle()
        job = self.last(collection)
        return None if job is None or job.over else job

    def last(self, collection: str) -> Job | None:
        """Return the collection's newest job, or None; an unfinished job is always the newest. Cheap."""
        with self._read() as db:
            found = _jobs(db, "collection = ? ORDER BY number DESC LIMIT 1", (collection,))
        return found[0] if found else None

    def cancelling(self, id_: str) -> bool:
        """Return whether a cancellation was requested. Cheap."""
        with self._read() as db:
            return any(job.cancelling for job in _jobs(db, "id = ?", (id_,)))

    def tally(self) -> tuple[dict[tuple[str, str], int], float | None, dict[tuple[str, str], tuple[int, int]]]:
        """Return the number of kept jobs by kind and state, the POSIX seconds at which the oldest queued job was
        requested, and the progress of running jobs by collection and kind as (rows done, rows in all). Cheap; the jobs
        of a dead process still count as running."""
        with self._read() as db:
            counted = db.execute("SELECT kind, state, count(*) FROM jobs GROUP BY kind, state").fetchall()
            (oldest,) = db.execute("SELECT min(created) FROM jobs WHERE state = 'queued'").fetchone()
            running = db.execute("SELECT collection, kind, done, total FROM jobs WHERE state = 'running'").fetchall()
        counts = {(kind, state): count for kind, state, count in counted}
        return counts, oldest, {(collection, kind): (done, total) for collection, kind, done, total in running}

    def events(self, id_: str, after: int = 0) -> list[Event]:
        """Return the job's events after number `after`, oldest first; none for an unknown job. Cheap enough for several
        calls a second."""
        with self._read() as db:
            rows = db.execute(
                "SELECT e.id, e.name, e.data FROM events e JOIN jobs j ON j.number = e.job "
                "WHERE j.id = ? AND e.id > ? ORDER BY e.id",
                (id_, after),
            ).fetchall()
        return [Event(number, name, orjson.loads(data)) for number, name, data in rows]

    def turn(self, collection: str) -> Turn | None:
        """Return the collection's place in its schedule; None until a scheduler has registered it."""
        with self._read() as db:
            found: Turn | None = db.execute(
                "SELECT since, last FROM turns WHERE collection = ?", (collection,)
            ).fetchone()
        return found

    def register(self, collection: str, schedule: str | None) -> None:
        """Set the collection's schedule as text; None: no schedule. Setting the same text again changes nothing, so
        a missed turn stays due."""
        with self._opened().write() as db:
            if schedule is None:
                db.execute("DELETE FROM turns WHERE collection = ?", (collection,))
                return
            db.execute(
                "INSERT INTO turns (collection, schedule, since) VALUES (?1, ?2, ?3) ON CONFLICT (collection) "
                "DO UPDATE SET schedule = ?2, since = ?3 WHERE schedule <> ?2",
                (collection, schedule, self._clock()),
            )


def _jobs(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[Job]:
    """Return the jobs that match. `where`: a constant of this module."""
    jobs = []
    sql = f"SELECT {_COLUMNS} FROM jobs WHERE {where}"  # noqa: S608 - constants
    for row in db.execute(sql, values).fetchall():
        given = dict(zip(_COLUMNS.split(", "), row, strict=True))
        given["progress"] = {"done": given.pop("done"), "total": given.pop("total")}
        given["result"] = None if given["result"] is None else orjson.loads(given["result"])
        given |= {"request": orjson.loads(given["request"]), "cancelling": bool(given["cancelling"])}
        jobs.append(Job(**given))
    return jobs


def _job(db: sqlite3.Connection, id_: str) -> Job:
    found = _jobs(db, "id = ?", (id_,))
    if not found:
        raise UnknownJob(f"there is no job {id_!r}")
    return found[0]


def _progress(db: sqlite3.Connection, number: int | None, progress: tuple[int, int] | None) -> None:
    if number is None or progress is None:
        return
    changed = "UPDATE jobs SET done = ?1, total = ?2 WHERE number = ?3 AND (done <> ?1 OR total <> ?2)"
    if db.execute(changed, (*progress, number)).rowcount:
        _tell(db, number, "progress", dict(zip(("done", "total"), progress, strict=True)))


def _tell(db: sqlite3.Connection, number: int | None, name: str, data: Mapping[str, Any]) -> None:
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM events WHERE job = ?", (number,)).fetchone()
    text = orjson.dumps(data, default=str).decode()
    db.execute("INSERT INTO events (job, id, name, data) VALUES (?, ?, ?, ?)", (number, last + 1, name, text))
    if name == "progress":
        db.execute(
            "DELETE FROM events WHERE job = ? AND id <= ? AND name = 'progress'", (number, last + 1 - EVENTS_KEPT)
        )
