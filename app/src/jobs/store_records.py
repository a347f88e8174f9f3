"""The records of jobs in HANA, beside the vectors, for the processes of several machines."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from app.src.jobs.journal import OWNED, StateUnusable
from connector.errors import ConnectorError, UnknownTable
from connector.hana.connection import HanaPool, quote
from connector.stores.hana.tables import create
from connector.stores.state import LeaseTimes

if TYPE_CHECKING:
    from connector.stores.state import Query, Session

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608

T = TypeVar("T")
_DOING = "using the records of jobs"
_NOW = "CURRENT_UTCTIMESTAMP"
TABLES = {
    "OWL_JOBS": """(
"NUMBER" BIGINT PRIMARY KEY, "ID" NVARCHAR(32) NOT NULL UNIQUE, "COLLECTION" NVARCHAR(200) NOT NULL,
"KIND" NVARCHAR(20) NOT NULL, "STATE" NVARCHAR(20) NOT NULL, "DONE" BIGINT DEFAULT 0 NOT NULL,
"TOTAL" BIGINT DEFAULT 0 NOT NULL, "RESULT" NCLOB, "ERROR" NCLOB, "CREATED" DOUBLE NOT NULL, "STARTED" DOUBLE,
"FINISHED" DOUBLE, "CANCELLING" INTEGER DEFAULT 0 NOT NULL, "OWNER" NVARCHAR(200) NOT NULL, "REQUEST" NCLOB NOT NULL,
"ATTEMPTS" INTEGER DEFAULT 0 NOT NULL, "CRASHES" INTEGER DEFAULT 0 NOT NULL, "NOTE" NCLOB, "NEXT_TRY" DOUBLE,
"WAITS" INTEGER DEFAULT 0 NOT NULL, "WAITING_SINCE" DOUBLE, "OWNED_UNTIL" TIMESTAMP)""",
    "OWL_JOB_EVENTS": """(
"JOB" BIGINT NOT NULL, "ID" BIGINT NOT NULL, "NAME" NVARCHAR(20) NOT NULL, "DATA" NCLOB NOT NULL,
PRIMARY KEY ("JOB", "ID"))""",
    "OWL_JOB_TURNS": """(
"COLLECTION" NVARCHAR(200) PRIMARY KEY, "SCHEDULE" NVARCHAR(5000) NOT NULL, "SINCE" DOUBLE NOT NULL,
"LAST" DOUBLE)""",
}


class StoreRecords:
    """Records in `schema` of the store's HANA. The first write creates the tables.

    A process holds a lease on each job that it runs, by HANA's clock, and renews it in the background. The lease
    expires 30 s after a crash; then another process takes the job over. `pool` and `schema` are called on first use, so
    that a process starts while HANA is away. The caller closes the pool. Raises the pool's errors.
    """

    def __init__(
        self, pool: Callable[[], HanaPool], schema: Callable[[], str], times: LeaseTimes | None = None
    ) -> None:
        self.owner = f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(6)}"
        self._pool = pool
        self._schema = schema
        self._times = times or LeaseTimes()
        self._held = f'"OWNED_UNTIL" = ADD_SECONDS({_NOW}, {self._times.ttl:g})'
        self.claimed = f", {self._held}"
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def jobs(self) -> str:
        return self._table("OWL_JOBS")

    @property
    def events(self) -> str:
        return self._table("OWL_JOB_EVENTS")

    @property
    def turns(self) -> str:
        return self._table("OWL_JOB_TURNS")

    def _table(self, name: str) -> str:
        return f"{quote(self._schema())}.{quote(name)}"

    def open(self) -> None:
        if self._closed.is_set():
            raise StateUnusable("the service is ending and starts no more jobs")

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._pool().read(sql, parameters, doing=_DOING)
        except UnknownTable:
            return []

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` while no other process writes: it holds a lock on the table of jobs, which readers ignore."""
        self.open()
        lock = f"LOCK TABLE {self.jobs} IN EXCLUSIVE MODE"

        def alone(session: Session) -> T:
            session.execute(lock, doing=_DOING)
            return work(session)

        try:
            return self._pool().in_transaction(alone, doing=_DOING)
        except UnknownTable:
            for name, definition in TABLES.items():
                create(self._pool(), self._schema(), f"CREATE COLUMN TABLE {self._table(name)} {definition}")
            return self._pool().in_transaction(alone, doing=_DOING)

    def left(self, query: Query) -> list[tuple[str, bool]]:
        sql = f'SELECT "ID", "CANCELLING" FROM {self.jobs} WHERE {OWNED} AND "OWNED_UNTIL" < {_NOW}'
        with self._lock:
            kept = self._kept.copy()  # this process runs them still, and renews their leases as soon as it can
        return [(id_, bool(cancelling)) for id_, cancelling in query(sql, ()) if id_ not in kept]

    def keep(self, job: str) -> None:
        with self._lock:
            self._kept.add(job)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._renew, name="jobs-lease", daemon=True)
                self._keeper.start()

    def drop(self, job: str) -> None:
        with self._lock:
            self._kept.discard(job)

    def _renew_all(self, kept: Sequence[tuple[str, str]], session: Session) -> None:
        sql = f'UPDATE {self.jobs} SET {self._held} WHERE "ID" = ? AND "OWNER" = ?'
        session.execute_many(sql, kept, doing="renewing the leases on jobs")

    def _renew(self) -> None:
        """Renew the leases until `close`, and sooner after a failure."""
        pause = self._times.renew
        while not self._closed.wait(pause):
            with self._lock:
                kept = [(job, self.owner) for job in sorted(self._kept)]
            pause = self._times.renew
            try:
                if kept:
                    self.write(partial(self._renew_all, kept))
            except (ConnectorError, StateUnusable):
                pause = self._times.renew / 4

    def close(self) -> None:
        self._closed.set()
