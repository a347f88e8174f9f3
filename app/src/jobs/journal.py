"""The records and events of jobs in one SQLite file that several processes share. Every change of state is one
transaction with its event. Knows no threads and no work.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.src.jobs.layout import COLUMNS, FILE, SCHEMA, UNFINISHED, job_of
from app.src.jobs.presence import is_alive
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
from connector.stores.local.sqlite_file import SqliteFile

EVENTS_KEPT = 1000
"""Progress events of one job; older ones say nothing that a newer one does not."""
NOBODY = ""
"""The owner of a job that nobody works on."""
HELD = "another worker holds the collection"


@dataclass(frozen=True, slots=True)
class Limits:
    """How many records, how many days of them, how many jobs may wait for their turn, and how many processes may die
    of one job before it is given up."""

    jobs: int = 1000
    days: float = 30.0
    queued: int = 100
    attempts: int = 5


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. `request`: JSON, so that another process can do it. `turn`: it is the collection's turn, if
    it still stands where `turn` says."""

    collection: str
    kind: Kind = "sync"
    request: Mapping[str, Any] | None = None
    turn: Turn | None = None


class Journal:
    """Thread-safe. Raises the errors of `SqliteFile`."""

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._file = SqliteFile(folder / FILE, SCHEMA)

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------------------------------------------- life of a job

    def add(self, wanted: Wanted) -> Job | None:
        """A queued job; None when somebody else has taken the turn. Raises JobRunning, QueueFull."""
        self.settle()
        now, id_ = self._clock(), uuid.uuid4().hex
        with self._file.write() as db:
            self._forget(db, now)
            other = db.execute(
                f"SELECT id, kind FROM jobs WHERE collection = ? AND state IN {UNFINISHED}",  # noqa: S608 - constant
                (wanted.collection,),
            ).fetchone()
            if other is not None:
                raise JobRunning(wanted.collection, *other)
            (waiting,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if waiting >= self._limits.queued:
                raise QueueFull(
                    f"{waiting} jobs wait for their turn already; try again later",
                    seconds=_until_a_place_is_free(db),
                )
            if wanted.turn is not None and not _take(db, wanted.collection, wanted.turn, now):
                return None
            request = orjson.dumps(wanted.request or {}).decode()
            inserted = db.execute(
                "INSERT INTO jobs (id, collection, kind, state, created, owner, request) "
                "VALUES (?, ?, ?, 'queued', ?, ?, ?)",
                (id_, wanted.collection, wanted.kind, now, NOBODY, request),
            )
            _tell(db, inserted.lastrowid or 0, "state", {"state": "queued"})
            return job_of(_row(db, id_))

    def claim(self, owner: str, collections: Sequence[str] | None) -> Job | None:
        """The oldest job whose time has come becomes the owner's and runs; None when there is none. `collections`: only
        theirs. Of several who ask at the same time one gets it."""
        ready = (
            "SELECT id FROM jobs WHERE (state = 'queued' OR (state = 'waiting' AND next_try <= ?1)) AND owner = '' "
            "AND (?2 IS NULL OR collection IN (SELECT value FROM json_each(?2))) ORDER BY number LIMIT 1"
        )
        chosen = None if collections is None else orjson.dumps(list(collections)).decode()
        values = (self._clock(), chosen)
        with self._file.read() as db:  # nearly always there is none, and looking must not lock out those who write
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
        """Running to waiting for another worker, or back."""
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
        """The end of an attempt, or of the job; nothing when the job is no longer the owner's."""
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
        """To be gone on with, by anybody."""
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
        """A job that nobody works on ends at once; of another the wish is recorded. Again: nothing more. Raises
        UnknownJob, JobOver (not for a job that is cancelled already)."""
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
        """Put the jobs back whose process is gone: they go on where somebody works. Anybody may do that."""
        with self._file.read() as db:
            sql = f"SELECT id, owner FROM jobs WHERE state IN {UNFINISHED} AND owner <> ''"  # noqa: S608 - constant
            owned = db.execute(sql).fetchall()
        gone = {owner for owner in {owner for _, owner in owned} if not is_alive(self._folder, owner)}
        dead = [(id_, owner) for id_, owner in owned if owner in gone]
        if not dead:
            return
        with self._file.write() as db:
            for id_, owner in dead:
                self._bury(db, id_, owner)

    def _bury(self, db: sqlite3.Connection, id_: str, owner: str) -> None:
        found = db.execute(
            f"SELECT state, cancelling, crashes FROM jobs WHERE id = ? AND owner = ? AND state IN {UNFINISHED}",  # noqa: S608
            (id_, owner),
        ).fetchone()
        if found is None:  # another has done it meanwhile
            return
        state, cancelling, crashes = found
        if cancelling:
            self._end(db, id_, Outcome("cancelled"))
        elif state == "queued":  # as layout 1 left it
            self._put_back(db, id_, Outcome("queued"))
        elif crashes + 1 >= self._limits.attempts:
            self._end(db, id_, Outcome("failed", error=_GIVEN_UP.format(crashes + 1)))
        else:
            self._put_back(db, id_, Outcome("queued", error=INTERRUPTED), crashed=True)

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, id_: str) -> Job:
        """Raises UnknownJob."""
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
        """Newest first."""
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
        """The collection's unfinished job."""
        self.settle()
        job = self.last(collection)
        return None if job is None or job.over else job

    def last(self, collection: str) -> Job | None:
        """The collection's newest job, the unfinished one if there is one. One look-up by key."""
        with self._file.read() as db:
            row = db.execute(
                f"SELECT {COLUMNS} FROM jobs WHERE collection = ? ORDER BY number DESC LIMIT 1",  # noqa: S608
                (collection,),
            ).fetchone()
        return None if row is None else job_of(row)

    def events(self, id_: str, after: int) -> list[Event]:
        """Those behind the event `after`, oldest first. One look-up by key; empty for a job that is not there."""
        with self._file.read() as db:
            rows = db.execute(
                "SELECT e.id, e.name, e.data FROM events e JOIN jobs j ON j.number = e.job "
                "WHERE j.id = ? AND e.id > ? ORDER BY e.id",
                (id_, after),
            ).fetchall()
        return [Event(number, name, orjson.loads(data)) for number, name, data in rows]

    # ----------------------------------------------------------------------------------------------------- schedules

    def turn(self, collection: str) -> Turn | None:
        """None while nobody who runs schedules has seen the collection's."""
        with self._file.read() as db:
            row = db.execute("SELECT since, last FROM turns WHERE collection = ?", (collection,)).fetchone()
        return None if row is None else Turn(*row)

    def register(self, collection: str, schedule: str | None) -> None:
        """This is the collection's schedule from now on, as a text; None: it has none. The same one again changes
        nothing, so that what was missed while nobody looked is still due."""
        with self._file.write() as db:
            if schedule is None:
                db.execute("DELETE FROM turns WHERE collection = ?", (collection,))
                return
            db.execute(
                "INSERT INTO turns (collection, schedule, since) VALUES (?1, ?2, ?3) ON CONFLICT (collection) "
                "DO UPDATE SET schedule = ?2, since = ?3 WHERE schedule <> ?2",
                (collection, schedule, self._clock()),
            )

    def _forget(self, db: sqlite3.Connection, now: float) -> None:
        """One record more than the bound is about to come."""
        db.execute(
            "DELETE FROM jobs WHERE finished IS NOT NULL AND (finished < ? OR number <= "
            "(SELECT number FROM jobs ORDER BY number DESC LIMIT 1 OFFSET ?))",
            (now - self._limits.days * 86_400, max(0, self._limits.jobs - 1)),
        )


_GO_ON = "it goes on from what is stored as soon as a service or worker runs"
ENDED = f"interrupted: the service ended in the middle; {_GO_ON}"
INTERRUPTED = f"interrupted: its process died in the middle; {_GO_ON}"
_TELLING_JOBS = 10
"""So many of the last tell how long a job takes."""
_LONGEST_GUESS = 3600.0
_GIVEN_UP = (
    "given up: {} processes died while they ran it ([state] max_attempts). Nothing is lost: starting it again goes on "
    "from what is stored; look for the reason in the log of the service or the system (out of memory?) first"
)


def _until_a_place_is_free(db: sqlite3.Connection) -> float | None:
    """Seconds, as the last jobs took and so many run now; None where none has ended yet, or none runs."""
    (took,) = db.execute(
        "SELECT avg(finished - started) FROM (SELECT finished, started FROM jobs "
        "WHERE finished IS NOT NULL AND started IS NOT NULL ORDER BY number DESC LIMIT ?)",
        (_TELLING_JOBS,),
    ).fetchone()
    (running,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'running'").fetchone()
    return None if took is None or not running else min(max(0.0, took) / running, _LONGEST_GUESS)


def _take(db: sqlite3.Connection, collection: str, turn: Turn, now: float) -> bool:
    """Compare and set: of two who see the same turn, one takes it."""
    sql = "UPDATE turns SET last = ? WHERE collection = ? AND last IS ? AND since = ?"
    return db.execute(sql, (now, collection, turn.last, turn.since)).rowcount == 1


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
    """Change the one job that fits; its number, or None. `what` and `where` are text of this module."""
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
