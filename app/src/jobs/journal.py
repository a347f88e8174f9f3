"""The records and events of jobs in one SQLite file that several processes share. Each change of state is one
transaction with its event."""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.src.jobs.record import (
    OVER,
    Event,
    Job,
    JobOver,
    JobRunning,
    Kind,
    Outcome,
    QueueFull,
    State,
    Tally,
    Turn,
    UnknownJob,
)
from connector.stores.local.sqlite_file import Schema, SqliteFile

EVENTS_KEPT = 1000  # progress events of one job; newer ones replace older ones
NOBODY = ""  # the owner of a job that no process runs
HELD = "another worker holds the collection"
_GO_ON = "it goes on from what is stored as soon as a service or worker runs"
ENDED = f"interrupted: the service ended in the middle; {_GO_ON}"
INTERRUPTED = f"interrupted: its process died in the middle; {_GO_ON}"
_GIVEN_UP = (
    "given up: {} processes died while they ran it ([state] max_attempts). Nothing is lost: starting it again goes on "
    "from what is stored; look for the reason in the log of the service or the system (out of memory?) first"
)
_SUFFIX = ".alive"
FILE = "jobs.sqlite"

# `owner`: the process that runs the job, '' for none. `crashes`: how many processes died of it.
_LAYOUT = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    collection TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    done INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    error TEXT,
    created REAL NOT NULL,
    started REAL,
    finished REAL,
    cancelling INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL,
    request TEXT NOT NULL DEFAULT '{}',
    attempts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    note TEXT,
    next_try REAL,
    waits INTEGER NOT NULL DEFAULT 0,
    waiting_since REAL
);

CREATE UNIQUE INDEX one_unfinished ON jobs (collection) WHERE state IN ('queued', 'running', 'waiting');

CREATE INDEX jobs_of_collection ON jobs (collection, number);

CREATE INDEX unfinished_jobs ON jobs (state, number) WHERE state IN ('queued', 'running', 'waiting');

CREATE TABLE events (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    id INTEGER NOT NULL,
    name TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, id)
) WITHOUT ROWID;

CREATE TABLE turns (
    collection TEXT PRIMARY KEY,
    schedule TEXT NOT NULL,
    since REAL NOT NULL,
    last REAL
) WITHOUT ROWID
"""
SCHEMA = Schema(
    application_id=0x4F574C4A,  # spells OWLJ
    version=2,
    script=_LAYOUT,
    called="the file of job records",
    remedy="start again: it holds the history of jobs, no rows and no vectors",
)

UNFINISHED = "('queued', 'running', 'waiting')"
COLUMNS = (
    "id, collection, kind, state, done, total, result, error, created, started, finished, attempts, note, next_try, "
    "cancelling, request, waits, waiting_since"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many records are kept, for how many days, how many jobs may be queued, and after how many crashed processes a
    job fails."""

    jobs: int = 1000
    days: float = 30.0
    queued: int = 100
    attempts: int = 5


def job_of(row: Sequence[Any]) -> Job:
    """Return the job in a row of `COLUMNS`."""
    given = dict(zip(COLUMNS.split(", "), row, strict=True))
    done, total, result = given.pop("done"), given.pop("total"), given["result"]
    given |= {
        "result": None if result is None else orjson.loads(result),
        "request": orjson.loads(given["request"]),
        "cancelling": bool(given["cancelling"]),
    }
    return Job(progress={"done": done, "total": total}, **given)


class Presence:
    """This process, visible to others on this machine that share `folder` (where SQLite's own locks work). It locks a
    file, and the kernel releases the lock when the process ends. No clock is involved, so a slow or stopped process
    does not count as dead."""

    def __init__(self, folder: Path) -> None:
        self.id = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._path = folder / f"{self.id}{_SUFFIX}"
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether the process with this `Presence.id` still runs. Removes the file of a dead process."""
    path = folder / f"{owner}{_SUFFIX}"
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
    """Thread-safe. Raises the errors of `SqliteFile`."""

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._file = SqliteFile(folder / FILE, SCHEMA)

    def close(self) -> None:
        self._file.close()

    def add(
        self,
        collection: str,
        kind: Kind = "sync",
        request: Mapping[str, Any] | None = None,
        turn: Turn | None = None,
    ) -> Job | None:
        """Add a queued job. `request`: JSON, for whichever process runs it. `turn`: add only if the collection's turn
        is still this one; None if another process has taken it. Raises JobRunning, QueueFull."""
        self.settle()
        now, id_ = self._clock(), uuid.uuid4().hex
        with self._file.write() as db:
            db.execute(  # delete old records first, so that one more fits
                "DELETE FROM jobs WHERE finished IS NOT NULL AND (finished < ? OR number <= "
                "(SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET ?))",
                (now - self._limits.days * 86_400, max(0, self._limits.jobs - 1)),
            )
            other = db.execute(
                f"SELECT id, kind FROM jobs WHERE collection = ? AND state IN {UNFINISHED}",  # noqa: S608 - constant
                (collection,),
            ).fetchone()
            if other is not None:
                raise JobRunning(collection, *other)
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._limits.queued:
                raise QueueFull(f"{waiting} jobs wait for their turn already; try again later")
            if turn is not None:  # compare and set: only one of two processes that see the same turn takes it
                sql = "UPDATE turns SET last = ? WHERE collection = ? AND last IS ? AND since = ?"
                if db.execute(sql, (now, collection, turn.last, turn.since)).rowcount != 1:
                    return None
            inserted = db.execute(
                "INSERT INTO jobs (id, collection, kind, state, created, owner, request) "
                "VALUES (?, ?, ?, 'queued', ?, ?, ?)",
                (id_, collection, kind, now, NOBODY, orjson.dumps(request or {}).decode()),
            )
            _tell(db, inserted.lastrowid or 0, "state", {"state": "queued"})
            return job_of(_row(db, id_))

    def claim(self, owner: str, collections: Sequence[str] | None) -> Job | None:
        """Give the oldest due job to the owner; None without one. `collections`: only theirs. Safe for concurrent
        callers."""
        ready = (
            "SELECT id FROM jobs WHERE (state = 'queued' OR (state = 'waiting' AND next_try <= ?1)) AND owner = '' "
            "AND (?2 IS NULL OR collection IN (SELECT value FROM json_each(?2))) ORDER BY number LIMIT 1"
        )
        chosen = None if collections is None else orjson.dumps(list(collections)).decode()
        values = (self._clock(), chosen)
        with self._file.read() as db:  # usually there is none, and looking must not lock out writers
            if db.execute(ready, values).fetchone() is None:
                return None
        with self._file.write() as db:
            found = db.execute(ready, values).fetchone()
            if found is None:
                return None
            number = _change(
                db,
                "state = 'running', owner = ?, attempts = attempts + 1, started = coalesce(started, ?), note = NULL, "
                "next_try = NULL",
                "id = ?",
                (owner, self._clock(), found[0]),
            )
            job = job_of(_row(db, found[0]))
            _tell(db, number or 0, "state", {"state": "running", "attempt": job.attempts})
            return job

    def wait(self, id_: str, owner: str, waiting: bool) -> None:
        """Change a running job to waiting for another worker, or back."""
        states: tuple[State, State] = ("waiting", "running") if waiting else ("running", "waiting")
        (new, old), note = states, HELD if waiting else None
        with self._file.write() as db:
            where = "id = ? AND owner = ? AND state = ?"
            number = _change(db, "state = ?, note = ?", where, (new, note, id_, owner, old))
            if number is not None:
                _tell(db, number, "state", _told(new, note=note))

    def progress(self, id_: str, owner: str, done: int, total: int) -> None:
        with self._file.write() as db:
            where = f"id = ? AND owner = ? AND state IN {UNFINISHED}"
            number = _change(db, "done = ?, total = ?", where, (done, total, id_, owner))
            if number is not None:
                _tell(db, number, "progress", {"done": done, "total": total})

    def finish(self, id_: str, owner: str, outcome: Outcome) -> None:
        """Record the end of an attempt or of the job; nothing when another process owns the job now."""
        with self._file.write() as db:
            found = db.execute(
                f"SELECT cancelling FROM jobs WHERE id = ? AND owner = ? AND state IN {UNFINISHED}",  # noqa: S608
                (id_, owner),
            ).fetchone()
            if found is None:
                return
            if outcome.state in OVER:
                self._end(db, id_, outcome)
            elif found[0]:
                self._end(db, id_, Outcome("cancelled", outcome.result, progress=outcome.progress))
            else:
                self._put_back(db, id_, outcome)

    def _put_back(self, db: sqlite3.Connection, id_: str, outcome: Outcome, *, crashed: bool = False) -> None:
        """Return the job to the queue, for any process."""
        number = _change(
            db,
            "state = ?, owner = '', note = ?, next_try = ?, waits = waits + ?, crashes = crashes + ?, "
            "waiting_since = CASE WHEN ? THEN coalesce(waiting_since, ?) ELSE waiting_since END",
            "id = ?",
            (
                *(outcome.state, outcome.error, outcome.next_try, outcome.away, crashed),
                *(outcome.away, self._clock(), id_),
            ),
        )
        _progress(db, number or 0, outcome.progress)
        _tell(db, number or 0, "state", _told(outcome.state, note=outcome.error))

    def _end(self, db: sqlite3.Connection, id_: str, outcome: Outcome) -> None:
        result = None if outcome.result is None else orjson.dumps(outcome.result, default=str).decode()
        now = self._clock()
        number = _change(
            db,
            "state = ?, owner = '', result = ?, error = ?, finished = ?, note = NULL, next_try = NULL, "
            "waiting_since = CASE WHEN ? THEN coalesce(waiting_since, ?) ELSE waiting_since END",
            f"id = ? AND state IN {UNFINISHED}",
            (outcome.state, result, outcome.error, now, outcome.away, now, id_),
        )
        if number is None:
            return
        _progress(db, number, outcome.progress)
        _tell(db, number, "state", _told(outcome.state, error=outcome.error))
        _tell(db, number, "result", job_of(_row(db, id_)).as_dict())

    def cancel(self, id_: str) -> Job:
        """End a job that no process runs; ask the process of a running one to stop. Raises UnknownJob, and JobOver
        unless it was cancelled."""
        self.settle()
        with self._file.write() as db:
            job = job_of(_row(db, id_))
            if job.state == "cancelled":
                return job
            if job.over:
                raise JobOver(f"job {id_} is over ({job.state}): there is nothing to cancel")
            (owner,) = db.execute("SELECT owner FROM jobs WHERE id = ?", (id_,)).fetchone()
            if owner == NOBODY:
                self._end(db, id_, Outcome("cancelled"))
            else:
                db.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", (id_,))
            return job_of(_row(db, id_))

    def settle(self) -> None:
        """Queue the jobs of dead processes again."""
        owned_sql = f"SELECT id, owner FROM jobs WHERE state IN {UNFINISHED} AND owner <> ''"  # noqa: S608 - constant
        with self._file.read() as db:
            owned = db.execute(owned_sql).fetchall()
        gone = {owner for owner in {owner for _, owner in owned} if not is_alive(self._folder, owner)}
        if not gone:
            return
        with self._file.write() as db:
            for id_, owner in db.execute(owned_sql).fetchall():
                if owner not in gone:
                    continue
                cancelling, crashes = db.execute("SELECT cancelling, crashes FROM jobs WHERE id = ?", (id_,)).fetchone()
                if cancelling:
                    self._end(db, id_, Outcome("cancelled"))
                elif crashes + 1 >= self._limits.attempts:
                    self._end(db, id_, Outcome("failed", error=_GIVEN_UP.format(crashes + 1)))
                else:
                    self._put_back(db, id_, Outcome("queued", error=INTERRUPTED), crashed=True)

    def get(self, id_: str) -> Job:
        """Return a job. Raises UnknownJob."""
        with self._file.read() as db:
            job = job_of(_row(db, id_))
        if job.over:
            return job
        self.settle()
        with self._file.read() as db:
            return job_of(_row(db, id_))

    def cancelling(self, id_: str) -> bool:
        with self._file.read() as db:
            row = db.execute("SELECT cancelling FROM jobs WHERE id = ?", (id_,)).fetchone()
        return bool(row and row[0])

    def all(self, collection: str | None, state: State | None, limit: int) -> list[Job]:
        """Return jobs, newest first."""
        self.settle()
        with self._file.read() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM jobs WHERE (?1 IS NULL OR collection = ?1) AND (?2 IS NULL OR state = ?2) "  # noqa: S608
                "ORDER BY number DESC LIMIT ?3",
                (collection, state, limit),
            ).fetchall()
        return [job_of(row) for row in rows]

    def tally(self) -> Tally:
        with self._file.read() as db:
            counted = db.execute("SELECT kind, state, count(*) FROM jobs GROUP BY kind, state").fetchall()
            (oldest,) = db.execute("SELECT min(created) FROM jobs WHERE state = 'queued'").fetchone()
            running = db.execute("SELECT collection, kind, done, total FROM jobs WHERE state = 'running'").fetchall()
        progress = {(collection, kind): (done, total) for collection, kind, done, total in running}
        return Tally({(kind, state): count for kind, state, count in counted}, oldest, progress)

    def current(self, collection: str) -> Job | None:
        """Return the collection's unfinished job, or None."""
        self.settle()
        job = self.last(collection)
        return None if job is None or job.over else job

    def last(self, collection: str) -> Job | None:
        """Return the collection's newest job, the unfinished one if there is one."""
        with self._file.read() as db:
            row = db.execute(
                f"SELECT {COLUMNS} FROM jobs WHERE collection = ? ORDER BY number DESC LIMIT 1",  # noqa: S608
                (collection,),
            ).fetchone()
        return None if row is None else job_of(row)

    def events(self, id_: str, after: int) -> list[Event]:
        """Return the events after number `after`, oldest first; none for an unknown job."""
        with self._file.read() as db:
            rows = db.execute(
                "SELECT e.id, e.name, e.data FROM events e JOIN jobs j ON j.number = e.job "
                "WHERE j.id = ? AND e.id > ? ORDER BY e.id",
                (id_, after),
            ).fetchall()
        return [Event(number, name, orjson.loads(data)) for number, name, data in rows]

    def turn(self, collection: str) -> Turn | None:
        """Return the collection's place in its schedule; None until a scheduler has registered it."""
        with self._file.read() as db:
            row = db.execute("SELECT since, last FROM turns WHERE collection = ?", (collection,)).fetchone()
        return None if row is None else Turn(*row)

    def register(self, collection: str, schedule: str | None) -> None:
        """Set the collection's schedule as text; None: no schedule. The same text again changes nothing, so that a
        missed turn is still due."""
        with self._file.write() as db:
            if schedule is None:
                db.execute("DELETE FROM turns WHERE collection = ?", (collection,))
                return
            db.execute(
                "INSERT INTO turns (collection, schedule, since) VALUES (?1, ?2, ?3) ON CONFLICT (collection) "
                "DO UPDATE SET schedule = ?2, since = ?3 WHERE schedule <> ?2",
                (collection, schedule, self._clock()),
            )


def _told(state: State, *, error: str | None = None, note: str | None = None) -> dict[str, Any]:
    said = {"error": error, "note": note}
    return {"state": state} | {name: text for name, text in said.items() if text is not None}


def _progress(db: sqlite3.Connection, number: int, progress: tuple[int, int] | None) -> None:
    if progress is None:
        return
    done, total = progress
    changed = "UPDATE jobs SET done = ?1, total = ?2 WHERE number = ?3 AND (done <> ?1 OR total <> ?2)"
    if db.execute(changed, (done, total, number)).rowcount:
        _tell(db, number, "progress", {"done": done, "total": total})


def _change(db: sqlite3.Connection, what: str, where: str, values: Sequence[Any]) -> int | None:
    """Change the one job that matches; return its number, or None. `what` and `where`: constants of this module."""
    sql = f"UPDATE jobs SET {what} WHERE {where} RETURNING number"  # noqa: S608
    row = db.execute(sql, values).fetchall()
    return int(row[0][0]) if row else None


def _tell(db: sqlite3.Connection, number: int, name: str, data: Mapping[str, Any]) -> None:
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM events WHERE job = ?", (number,)).fetchone()
    text = orjson.dumps(data, default=str).decode()
    db.execute("INSERT INTO events (job, id, name, data) VALUES (?, ?, ?, ?)", (number, last + 1, name, text))
    if name == "progress":
        db.execute(
            "DELETE FROM events WHERE job = ? AND id <= ? AND name = 'progress'", (number, last + 1 - EVENTS_KEPT)
        )


def _row(db: sqlite3.Connection, id_: str) -> Sequence[Any]:
    row: Sequence[Any] | None = db.execute(f"SELECT {COLUMNS} FROM jobs WHERE id = ?", (id_,)).fetchone()  # noqa: S608
    if row is None:
        raise UnknownJob(f"there is no job {id_!r}")
    return row
