"""The records and events of jobs, shared by several processes. Each change of state is one transaction with its
event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from app.src.jobs import State
from connector.errors import PermissionRefused

if TYPE_CHECKING:
    from app.src.jobs.records import Records
    from connector.stores.state import Query, Session

# This module formats only names of tables and constants into SQL; values are always bound.
# ruff: noqa: S608

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
UNFINISHED = "\"STATE\" IN ('queued', 'running', 'waiting')"
_COLUMNS = (
    *("id", "collection", "kind", "state", "done", "total", "result", "error", "created", "started", "finished"),
    *("attempts", "note", "next_try", "cancelling", "request", "waits", "waiting_since", "number", "crashes"),
)
_SELECTED = ", ".join(f'"{name.upper()}"' for name in _COLUMNS)
OWNED = f"{UNFINISHED} AND \"OWNER\" <> ''"


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
    `number`: jobs are numbered in the order in which they were requested. `crashes`: processes that died of it.
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
    number: int
    crashes: int

    @property
    def over(self) -> bool:
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """Return the form shown by REST and the command line, without the request, which may hold keys of rows."""
        hidden = ("cancelling", "request", "waits", "waiting_since", "number", "crashes")
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


class Journal:
    """The job records in `records`. Thread-safe. Raises StateUnusable and the store's errors."""

    def __init__(
        self, records: Records, options: JobOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._records = records
        self._options = options or JobOptions()
        self._clock = clock

    @property
    def owner(self) -> str:
        """Return the name of this process in the records."""
        return self._records.owner

    def close(self) -> None:
        self._records.close()

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
        self.settle()
        tables, now, id_, options = self._records, self._clock(), uuid.uuid4().hex, self._options

        def insert(session: Session) -> Job | None:
            if done := self._jobs(
                session.query, '"ID" = ?', (id_,)
            ):  # an earlier attempt of this transaction succeeded
                return done[0]
            (number,) = session.query(f'SELECT coalesce(max("NUMBER"), 0) + 1 FROM {tables.jobs}')[0]
            old = '"FINISHED" IS NOT NULL AND ("FINISHED" < ? OR "NUMBER" <= ?)'
            kept = now - options.keep_days * 86_400, number - options.keep_jobs
            sql = f'DELETE FROM {tables.events} WHERE "JOB" IN (SELECT "NUMBER" FROM {tables.jobs} WHERE {old})'
            session.execute(sql, kept)
            sql = f"DELETE FROM {tables.jobs} WHERE {old}"
            session.execute(sql, kept)
            sql = f'SELECT "ID", "KIND" FROM {tables.jobs} WHERE "COLLECTION" = ? AND {UNFINISHED}'
            for other, its_kind in session.query(sql, (collection,)):
                raise JobRunning(collection, other, its_kind)
            ((waiting,),) = session.query(f"SELECT count(*) FROM {tables.jobs} WHERE \"STATE\" = 'queued'")
            if waiting >= options.max_queued:
                raise QueueFull(f"{waiting} jobs wait for their turn already; try again later")
            if turn is not None:  # compare and set: only one of two processes that see the same turn takes it
                since, last = turn
                sql = f'UPDATE {tables.turns} SET "LAST" = ? WHERE "COLLECTION" = ? AND "SINCE" = ? AND "LAST" '
                sql, values = (f"{sql}IS NULL", ()) if last is None else (f"{sql}= ?", (last,))
                if session.execute(sql, (now, collection, since, *values)) != 1:
                    return None
            sql = (
                f'INSERT INTO {tables.jobs} ("NUMBER", "ID", "COLLECTION", "KIND", "STATE", "CREATED", "OWNER", '
                "\"REQUEST\") VALUES (?, ?, ?, ?, 'queued', ?, '', ?)"
            )
            session.execute(sql, (number, id_, collection, kind, now, orjson.dumps(request or {}).decode()))
            self._tell(session, number, "state", {"state": "queued"})
            return self._found(session.query, id_)

        return tables.write(insert)

    def cancel(self, id_: str) -> Job:
        """End a job that no process runs; ask the process of a running one to stop after its current batch. Raises
        UnknownJob, and JobOver for a job that ended otherwise than cancelled."""
        self.get(id_)

        def cancel(session: Session) -> Job:
            job = self._found(session.query, id_)
            if job.state == "cancelled":
                return job
            if job.over:
                raise JobOver(f"job {id_} is over ({job.state}): there is nothing to cancel")
            sql = f'UPDATE {self._records.jobs} SET "CANCELLING" = 1 WHERE "ID" = ? AND "OWNER" <> \'\''
            if session.execute(sql, (id_,)) == 0:
                self._leave(session, id_, "cancelled")
            return self._found(session.query, id_)

        return self._records.write(cancel)

    # ---------------------------------------------------------------------------------------------------- working

    def claim(self, collections: Sequence[str] | None) -> Job | None:
        """Take the oldest due job, or return None. `collections`: take only theirs. Safe for concurrent callers."""
        tables, now, chosen = self._records, self._clock(), ""
        due_sql = (
            f'SELECT "ID", "COLLECTION" FROM {tables.jobs} WHERE ("STATE" = \'queued\' OR ("STATE" = \'waiting\' '
            'AND "NEXT_TRY" <= ?)) AND "OWNER" = \'\' ORDER BY "NUMBER"'
        )

        def due(query: Query) -> str | None:
            found = query(due_sql, (now,))
            return next((id_ for id_, name in found if collections is None or name in collections), None)

        def take(session: Session) -> Job | None:
            nonlocal chosen
            if chosen and self._number(session, chosen) is not None:  # an earlier attempt of this transaction succeeded
                return self._found(session.query, chosen)
            chosen = due(session.query) or ""
            if not chosen:
                return None
            job = self._found(session.query, chosen)
            sql = (
                f'UPDATE {tables.jobs} SET "STATE" = \'running\', "OWNER" = ?, "ATTEMPTS" = ?, "STARTED" = ?, '
                f'"NOTE" = NULL, "NEXT_TRY" = NULL{tables.claimed} WHERE "ID" = ?'
            )
            started = now if job.started is None else job.started
            session.execute(sql, (self.owner, job.attempts + 1, started, chosen))
            self._tell(session, job.number, "state", {"state": "running", "attempt": job.attempts + 1})
            return self._found(session.query, chosen)

        if due(tables.read) is None:  # usually no job is due, and looking must not lock out writers
            return None
        job = tables.write(take)
        if job is not None:
            tables.keep(job.id)
        return job

    def wait(self, id_: str, waiting: bool) -> None:
        """Change a running job to waiting for another worker, or back."""
        new, old = ("waiting", "running") if waiting else ("running", "waiting")
        note = {"note": "another worker holds the collection"} if waiting else {}

        def change(session: Session) -> None:
            number = self._number(session, id_, f"\"STATE\" = '{old}'")
            if number is not None:
                sql = f'UPDATE {self._records.jobs} SET "STATE" = ?, "NOTE" = ? WHERE "NUMBER" = ?'
                session.execute(sql, (new, note.get("note"), number))
                self._tell(session, number, "state", {"state": new, **note})

        self._records.write(change)

    def progress(self, id_: str, done: int, total: int) -> None:
        def change(session: Session) -> None:
            if self._number(session, id_) is not None:
                self._progress(session, self._found(session.query, id_), (done, total))

        self._records.write(change)

    def finish(self, id_: str, state: State, **outcome: Any) -> None:
        """Record the end of an attempt or of the job, unless another process owns the job now. `outcome`: `error`,
        `crashed`, and the fields of `outcome` in `_leave`."""

        def end(session: Session) -> None:
            if self._number(session, id_) is None:
                return
            new, how = state, dict(outcome)
            if new not in OVER and self._found(session.query, id_).cancelling:
                new, how = "cancelled", {key: how.get(key) for key in ("result", "progress")}
            if how.pop("crashed", False):
                self._crash(session, id_, **how)
            else:
                self._leave(session, id_, new, **how)

        self._records.write(end)
        self._records.drop(id_)

    def settle(self) -> None:
        """Queue the jobs of dead processes again, or end those cancelled or crashed too often."""

        def requeue(session: Session) -> None:
            for id_, cancelling in self._records.left(session.query):
                if cancelling:
                    self._leave(session, id_, "cancelled")
                else:
                    self._crash(session, id_, "its process died in the middle")

        if self._records.left(self._records.read):
            with suppress(PermissionRefused):  # this process may only search: another one does it
                self._records.write(requeue)

    def _crash(self, session: Session, id_: str, error: str, **outcome: Any) -> None:
        """Queue a job again whose process died or can do no more, or end it after `max_attempts` of them."""
        crashes = self._found(session.query, id_).crashes + 1
        if crashes >= self._options.max_attempts:
            self._leave(session, id_, "failed", error=_GIVEN_UP.format(crashes), **outcome)
        else:
            self._leave(session, id_, "queued", error=f"interrupted: {error}; {_GO_ON}", crashed=True, **outcome)

    def _number(self, session: Session, id_: str, where: str = UNFINISHED) -> int | None:
        """Return the number of an unfinished job that this process owns, else None."""
        sql = f'SELECT "NUMBER" FROM {self._records.jobs} WHERE "ID" = ? AND "OWNER" = ? AND {where}'
        found = session.query(sql, (id_, self.owner))
        return int(found[0][0]) if found else None

    def _leave(
        self,
        session: Session,
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
        job, over, now, away = self._found(session.query, id_), state in OVER, self._clock(), outcome.get("away", False)
        reason, result = "error" if over else "note", outcome.get("result")
        since = now if away and job.waiting_since is None else job.waiting_since
        sql = (
            f'UPDATE {self._records.jobs} SET "NOTE" = ?, "ERROR" = ?, "STATE" = ?, "OWNER" = \'\', "RESULT" = ?, '
            '"NEXT_TRY" = ?, "FINISHED" = ?, "WAITS" = ?, "CRASHES" = ?, "WAITING_SINCE" = ? WHERE "ID" = ?'
        )
        values = (
            *((None, error) if over else (error, job.error)),
            *(state, None if result is None else orjson.dumps(result, default=str).decode()),
            *(outcome.get("next_try"), now if over else None, job.waits + bool(away), job.crashes + bool(crashed)),
            *(since, id_),
        )
        session.execute(sql, values)
        self._progress(session, job, outcome.get("progress"))
        self._tell(session, job.number, "state", {"state": state} | ({} if error is None else {reason: error}))
        if over:
            self._tell(session, job.number, "result", self._found(session.query, id_).as_dict())

    def _progress(self, session: Session, job: Job, progress: tuple[int, int] | None) -> None:
        if progress is None or progress == (job.progress["done"], job.progress["total"]):
            return
        sql = f'UPDATE {self._records.jobs} SET "DONE" = ?, "TOTAL" = ? WHERE "NUMBER" = ?'
        session.execute(sql, (*progress, job.number))
        self._tell(session, job.number, "progress", dict(zip(("done", "total"), progress, strict=True)))

    def _tell(self, session: Session, number: int, name: str, data: Mapping[str, Any]) -> None:
        events = self._records.events
        ((id_,),) = session.query(f'SELECT coalesce(max("ID"), 0) + 1 FROM {events} WHERE "JOB" = ?', (number,))
        sql = f'INSERT INTO {events} ("JOB", "ID", "NAME", "DATA") VALUES (?, ?, ?, ?)'
        session.execute(sql, (number, id_, name, orjson.dumps(data, default=str).decode()))
        if name == "progress":
            sql = f'DELETE FROM {events} WHERE "JOB" = ? AND "ID" <= ? AND "NAME" = \'progress\''
            session.execute(sql, (number, id_ - EVENTS_KEPT))

    # ---------------------------------------------------------------------------------------------------- reading

    def get(self, id_: str) -> Job:
        """Return a job. Raises UnknownJob."""
        self.settle()
        return self._found(self._records.read, id_)

    def all(self, collection: str | None = None, state: State | None = None, limit: int = 100) -> list[Job]:
        """Return jobs, newest first."""
        self.settle()
        chosen = {name: value for name, value in (("COLLECTION", collection), ("STATE", state)) if value is not None}
        where = " AND ".join(f'"{name}" = ?' for name in chosen) or '"NUMBER" > 0'
        return self._jobs(self._records.read, f'{where} ORDER BY "NUMBER" DESC LIMIT ?', (*chosen.values(), limit))

    def current(self, collection: str) -> Job | None:
        """Return the collection's unfinished job, or None."""
        self.settle()
        job = self.last(collection)
        return None if job is None or job.over else job

    def last(self, collection: str) -> Job | None:
        """Return the collection's newest job, or None; an unfinished job is always the newest. Cheap."""
        found = self._jobs(self._records.read, '"COLLECTION" = ? ORDER BY "NUMBER" DESC LIMIT ?', (collection, 1))
        return found[0] if found else None

    def cancelling(self, id_: str) -> bool:
        """Return whether a cancellation was requested. Cheap."""
        return any(job.cancelling for job in self._jobs(self._records.read, '"ID" = ?', (id_,)))

    def tally(self) -> tuple[dict[tuple[str, str], int], float | None, dict[tuple[str, str], tuple[int, int]]]:
        """Return the number of kept jobs by kind and state, the POSIX seconds at which the oldest queued job was
        requested, and the progress of running jobs by collection and kind as (rows done, rows in all). Cheap; the jobs
        of a dead process still count as running."""
        read, jobs = self._records.read, self._records.jobs
        counted = read(f'SELECT "KIND", "STATE", count(*), min("CREATED") FROM {jobs} GROUP BY "KIND", "STATE"')
        running = read(f'SELECT "COLLECTION", "KIND", "DONE", "TOTAL" FROM {jobs} WHERE "STATE" = \'running\'')
        counts = {(kind, state): count for kind, state, count, _ in counted}
        oldest = min((created for _, state, _, created in counted if state == "queued"), default=None)
        return counts, oldest, {(collection, kind): (done, total) for collection, kind, done, total in running}

    def events(self, id_: str, after: int = 0) -> list[Event]:
        """Return the job's events after number `after`, oldest first; none for an unknown job. Cheap enough for several
        calls a second."""
        sql = (
            f'SELECT E."ID", E."NAME", E."DATA" FROM {self._records.events} AS E JOIN {self._records.jobs} AS J '
            'ON J."NUMBER" = E."JOB" WHERE J."ID" = ? AND E."ID" > ? ORDER BY E."ID"'
        )
        rows = self._records.read(sql, (id_, after))
        return [Event(number, name, orjson.loads(data)) for number, name, data in rows]

    def turn(self, collection: str) -> Turn | None:
        """Return the collection's place in its schedule; None until a scheduler has registered it."""
        found = self._records.read(
            f'SELECT "SINCE", "LAST" FROM {self._records.turns} WHERE "COLLECTION" = ?', (collection,)
        )
        return (found[0][0], found[0][1]) if found else None

    def register(self, collection: str, schedule: str | None) -> None:
        """Set the collection's schedule as text; None: no schedule. Setting the same text again changes nothing, so
        a missed turn stays due."""
        turns, now = self._records.turns, self._clock()

        def change(session: Session) -> None:
            found = session.query(f'SELECT "SCHEDULE" FROM {turns} WHERE "COLLECTION" = ?', (collection,))
            if schedule is None:
                sql = f'DELETE FROM {turns} WHERE "COLLECTION" = ?'
                session.execute(sql, (collection,))
            elif not found:
                sql = f'INSERT INTO {turns} ("COLLECTION", "SCHEDULE", "SINCE") VALUES (?, ?, ?)'
                session.execute(sql, (collection, schedule, now))
            elif found[0][0] != schedule:
                sql = f'UPDATE {turns} SET "SCHEDULE" = ?, "SINCE" = ? WHERE "COLLECTION" = ?'
                session.execute(sql, (schedule, now, collection))

        self._records.write(change)

    def _jobs(self, query: Query, where: str, values: Sequence[Any]) -> list[Job]:
        """Return the jobs that match. `where`: a constant of this module."""
        jobs = []
        for row in query(f"SELECT {_SELECTED} FROM {self._records.jobs} WHERE {where}", values):
            given = dict(zip(_COLUMNS, row, strict=True))
            given["progress"] = {"done": given.pop("done"), "total": given.pop("total")}
            given["result"] = None if given["result"] is None else orjson.loads(given["result"])
            given |= {"request": orjson.loads(given["request"]), "cancelling": bool(given["cancelling"])}
            jobs.append(Job(**given))
        return jobs

    def _found(self, query: Query, id_: str) -> Job:
        found = self._jobs(query, '"ID" = ?', (id_,))
        if not found:
            raise UnknownJob(f"there is no job {id_!r}")
        return found[0]
