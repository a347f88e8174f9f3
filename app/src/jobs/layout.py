"""The tables of jobs.sqlite, their migrations, and a row of them as a Job. Knows no rule about jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from app.src.jobs.record import Job
from connector.stores.local.sqlite_file import Schema

FILE = "jobs.sqlite"

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
# `owner`: the process that works on the job; '' while none does. `crashes`: how many processes died of it.
_LAYOUT_2 = """
ALTER TABLE jobs ADD COLUMN request TEXT NOT NULL DEFAULT '{}';

ALTER TABLE jobs ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;

ALTER TABLE jobs ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;

ALTER TABLE jobs ADD COLUMN note TEXT;

ALTER TABLE jobs ADD COLUMN next_try REAL;

ALTER TABLE jobs ADD COLUMN waits INTEGER NOT NULL DEFAULT 0;

ALTER TABLE jobs ADD COLUMN waiting_since REAL;

CREATE INDEX unfinished_jobs ON jobs (state, number) WHERE state IN ('queued', 'running', 'waiting');

CREATE TABLE turns (
    collection TEXT PRIMARY KEY,
    schedule TEXT NOT NULL,
    since REAL NOT NULL,
    last REAL
) WITHOUT ROWID
"""
SCHEMA = Schema(
    application_id=0x4F574C4A,
    migrations=(_LAYOUT_1, _LAYOUT_2),
    called="the file of job records",
    remedy="start again: it holds the history of jobs, no rows and no vectors",
)
"""The identity spells OWLJ."""

UNFINISHED = "('queued', 'running', 'waiting')"
COLUMNS = (
    "id, collection, kind, state, done, total, result, error, created, started, finished, attempts, note, next_try, "
    "cancelling, request, waits, waiting_since"
)


def job_of(row: Sequence[Any]) -> Job:
    """Of a row of `COLUMNS`."""
    id_, collection, kind, state, done, total, result, error, *times = row
    created, started, finished, attempts, note, next_try, cancelling, request, waits, waiting_since = times
    return Job(
        id=id_,
        collection=collection,
        kind=kind,
        state=state,
        progress={"done": done, "total": total},
        result=None if result is None else orjson.loads(result),
        error=error,
        created=created,
        started=started,
        finished=finished,
        attempts=attempts,
        note=note,
        next_try=next_try,
        cancelling=bool(cancelling),
        request=orjson.loads(request),
        waits=waits,
        waiting_since=waiting_since,
    )
