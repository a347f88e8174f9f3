-- The tables of jobs.sqlite. `owner`: the process that runs the job, '' for none. `crashes`: how many processes died
-- of it or lost their GPU. After a change raise the version in records.py.
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
