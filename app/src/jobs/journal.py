"""The records and events of jobs in one SQLite file that several processes share. Every change of state is one
transaction with its event. Knows no threads and no work.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.src.jobs.presence import is_alive
from app.src.jobs.record import Event, Job, JobOver, JobRunning, Kind, QueueFull, State, UnknownJob
from connector.stores.sqlite_file import Schema, SqliteFile

FILE = "jobs.sqlite"
EVENTS_KEPT = 1000
"""Progress events of one job; older ones say nothing that a newer one does not."""
_UNFINISHED = "('queued', 'running', 'waiting')"

# Statements are separated by an empty line. A migration that has been released never changes.
_LAYOUT_1 = """
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
    owner TEXT NOT NULL
);

CREATE UNIQUE INDEX one_unfinished ON jobs (collection) WHERE state IN ('queued', 'running', 'waiting');

CREATE INDEX jobs_of_collection ON jobs (collection, number);

CREATE TABLE events (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    id INTEGER NOT NULL,
    name TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, id)
) WITHOUT ROWID
"""
SCHEMA = Schema(
    application_id=0x4F574C4A,
    migrations=(_LAYOUT_1,),
    called="the file of job records",
    remedy="start again: it holds the history of jobs, no rows and no vectors",
)
"""The identity spells OWLJ."""
_COLUMNS = (
    "id, collection, kind, state, done, total, result, error, created, started, finished, cancelling, number, owner"
)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many records, how many days of them, and how many jobs may wait for their turn."""

    jobs: int = 1000
    days: float = 30.0
    queued: int = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: State
    result: Mapping[str, Any] | None = None
    error: str | None = None
    progress: tuple[int, int] | None = None


class Journal:
    """Thread-safe. Raises the errors of `SqliteFile`."""

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder = folder
        self._retention = retention
        self._file = SqliteFile(folder / FILE, SCHEMA)

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------------------------------------------- life of a job

    def add(self, collection: str, kind: Kind, owner: str) -> Job:
        """A queued job. Raises JobRunning, QueueFull."""
        self.settle()
        now, id_ = time.time(), uuid.uuid4().hex
        with self._file.write() as db:
            self._forget(db, now)
            other = db.execute(
                f"SELECT id, kind FROM jobs WHERE collection = ? AND state IN {_UNFINISHED}",  # noqa: S608 - constant
                (collection,),
            ).fetchone()
            if other is not None:
                raise JobRunning(collection, *other)
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._retention.queued:
                raise QueueFull(f"{waiting} jobs wait for their turn already ([state] max_queued); try again later")
            inserted = db.execute(
                "INSERT INTO jobs (id, collection, kind, state, created, owner) VALUES (?, ?, ?, 'queued', ?, ?)",
                (id_, collection, kind, now, owner),
            )
            _tell(db, inserted.lastrowid or 0, "state", {"state": "queued"})
            return _job(_row(db, id_))

    def begin(self, id_: str) -> bool:
        """Queued to running; False when it was cancelled before its turn."""
        with self._file.write() as db:
            number = _change(db, "state = 'running', started = ?", "id = ? AND state = 'queued'", (time.time(), id_))
            if number is not None:
                _tell(db, number, "state", {"state": "running"})
            return number is not None

    def wait(self, id_: str, waiting: bool) -> None:
        """Running to waiting, or back."""
        new, old = ("waiting", "running") if waiting else ("running", "waiting")
        with self._file.write() as db:
            number = _change(db, "state = ?", "id = ? AND state = ?", (new, id_, old))
            if number is not None:
                _tell(db, number, "state", {"state": new})

    def progress(self, id_: str, done: int, total: int) -> None:
        with self._file.write() as db:
            where = f"id = ? AND state IN {_UNFINISHED}"
            number = _change(db, "done = ?, total = ?", where, (done, total, id_))
            if number is not None:
                _tell(db, number, "progress", {"done": done, "total": total})

    def finish(self, id_: str, outcome: Outcome) -> None:
        """The end of a job that has not ended yet; otherwise nothing."""
        with self._file.write() as db:
            self._end(db, id_, outcome)

    def _end(self, db: sqlite3.Connection, id_: str, outcome: Outcome) -> bool:
        result = None if outcome.result is None else orjson.dumps(outcome.result, default=str).decode()
        number = _change(
            db,
            "state = ?, result = ?, error = ?, finished = ?",
            f"id = ? AND state IN {_UNFINISHED}",
            (outcome.state, result, outcome.error, time.time(), id_),
        )
        if number is None:
            return False
        if outcome.progress is not None:
            done, total = outcome.progress
            changed = "UPDATE jobs SET done = ?1, total = ?2 WHERE number = ?3 AND (done <> ?1 OR total <> ?2)"
            if db.execute(changed, (done, total, number)).rowcount:
                _tell(db, number, "progress", {"done": done, "total": total})
        told = {"state": outcome.state} | ({} if outcome.error is None else {"error": outcome.error})
        _tell(db, number, "state", told)
        _tell(db, number, "result", _job(_row(db, id_)).as_dict())
        return True

    def cancel(self, id_: str) -> Job:
        """A queued job ends at once; of a running one the wish is recorded. Again: nothing more. Raises UnknownJob,
        JobOver (not for a job that is cancelled already)."""
        self.settle()
        with self._file.write() as db:
            job = _job(_row(db, id_))
            if job.state == "cancelled":
                return job
            if job.over:
                raise JobOver(f"job {id_} is over ({job.state}): there is nothing to cancel")
            if job.state == "queued":
                self._end(db, id_, Outcome("cancelled"))
            else:
                db.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", (id_,))
            return _job(_row(db, id_))

    def settle(self) -> None:
        """End the jobs whose process is gone: nobody else will."""
        with self._file.read() as db:
            sql = f"SELECT id, owner, state FROM jobs WHERE state IN {_UNFINISHED}"  # noqa: S608 - constant
            unfinished = db.execute(sql).fetchall()
        owners = {owner for _, owner, _ in unfinished}
        gone = {owner for owner in owners if not is_alive(self._folder, owner)}
        dead = [(id_, state) for id_, owner, state in unfinished if owner in gone]
        if not dead:
            return
        with self._file.write() as db:
            for id_, state in dead:
                how = "before it began" if state == "queued" else "in the middle"
                self._end(db, id_, Outcome("failed", error=f"interrupted {how}: its process ended. {GO_ON}"))

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, id_: str) -> Job:
        """Raises UnknownJob."""
        with self._file.read() as db:
            job = _job(_row(db, id_))
        if job.over:
            return job
        self.settle()
        with self._file.read() as db:
            return _job(_row(db, id_))

    def cancelling(self, id_: str) -> bool:
        with self._file.read() as db:
            row = db.execute("SELECT cancelling FROM jobs WHERE id = ?", (id_,)).fetchone()
        return bool(row and row[0])

    def all(self, collection: str | None, state: State | None, limit: int) -> list[Job]:
        """Newest first."""
        self.settle()
        with self._file.read() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE (?1 IS NULL OR collection = ?1) AND (?2 IS NULL OR state = ?2) "  # noqa: S608
                "ORDER BY number DESC LIMIT ?3",
                (collection, state, limit),
            ).fetchall()
        return [_job(row) for row in rows]

    def current(self, collection: str) -> Job | None:
        """The collection's unfinished job."""
        self.settle()
        with self._file.read() as db:
            row = db.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE collection = ? AND state IN {_UNFINISHED}",  # noqa: S608
                (collection,),
            ).fetchone()
        return None if row is None else _job(row)

    def events(self, id_: str, after: int) -> list[Event]:
        """Those behind the event `after`, oldest first. One look-up by key; empty for a job that is not there."""
        with self._file.read() as db:
            rows = db.execute(
                "SELECT e.id, e.name, e.data FROM events e JOIN jobs j ON j.number = e.job "
                "WHERE j.id = ? AND e.id > ? ORDER BY e.id",
                (id_, after),
            ).fetchall()
        return [Event(number, name, orjson.loads(data)) for number, name, data in rows]

    def _forget(self, db: sqlite3.Connection, now: float) -> None:
        """One record more than the bound is about to come."""
        db.execute(
            "DELETE FROM jobs WHERE finished IS NOT NULL AND (finished < ? OR number <= "
            "(SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET ?))",
            (now - self._retention.days * 86_400, max(0, self._retention.jobs - 1)),
        )


GO_ON = "Nothing is lost: starting it again goes on from what is stored"


def _change(db: sqlite3.Connection, what: str, where: str, values: Sequence[Any]) -> int | None:
    """Change the one job that fits; its number, or None. `what` and `where` are text of this module."""
    row = db.execute(f"UPDATE jobs SET {what} WHERE {where} RETURNING number", values).fetchall()  # noqa: S608
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
    row: Sequence[Any] | None = db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (id_,)).fetchone()  # noqa: S608
    if row is None:
        raise UnknownJob(f"there is no job {id_!r}")
    return row


def _job(row: Sequence[Any]) -> Job:
    id_, collection, kind, state, done, total, result, error, created, started, finished, cancelling, _, _ = row
    return Job(
        id_,
        collection,
        kind,
        state,
        {"done": done, "total": total},
        None if result is None else orjson.loads(result),
        error,
        created,
        started,
        finished,
        bool(cancelling),
    )
