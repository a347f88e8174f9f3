"""Concurrency bugs, each planted into the code under test for the time of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest.mock import patch

from connector.hana.connection import Session
from connector.model import ChangeSet, Lease
from connector.stores.hana.store import HanaStore
from connector.sync import ranges, reconcile
from connector.sync.feeds import full
from connector.sync.feeds.feed import Batches
from tests.simulation.database import Faults

Planted = Callable[[], AbstractContextManager[Any]]


def no_epoch_check() -> AbstractContextManager[Any]:
    return patch.object(HanaStore, "_check", lambda self, session, lease: None)


@contextmanager
def late_writer_accepted() -> Iterator[None]:
    """The epoch is compared in a transaction before the one that writes."""
    apply, check = HanaStore.apply, HanaStore._check

    def checked_before(self: HanaStore, lease: Lease, changes: ChangeSet) -> None:
        self.pool.in_transaction(lambda session: check(self, session, lease))
        apply(self, lease, changes)

    with patch.object(HanaStore, "apply", checked_before), no_epoch_check():
        yield


@contextmanager
def checkpoint_before_data() -> Iterator[None]:
    read = reconcile.Run._read

    def marked_first(self: reconcile.Run) -> None:
        checkpoint = self._checkpoint(self._feed.mark)
        self._ends.store.apply(self._lease, ChangeSet(checkpoint=checkpoint))
        read(self)

    with patch.object(reconcile.Run, "_read", marked_first):
        yield


@contextmanager
def log_emptied_before_commit() -> Iterator[None]:
    flush = reconcile.Run._flush

    def emptied(self: reconcile.Run) -> None:
        for done in self._window.done:
            done()
        self._window.done.clear()
        flush(self)

    with patch.object(reconcile.Run, "_flush", emptied):
        yield


class _Attempts:
    """A session that leaves out the deletions of a repeated transaction."""

    def __init__(self, session: Any, again: bool) -> None:
        self._session, self._again = session, again

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        if self._again and sql.startswith("DELETE"):
            return 0
        return int(self._session.execute(sql, parameters, doing=doing))

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]], *, doing: str = "") -> None:
        self._session.execute_many(sql, rows, doing=doing)


@contextmanager
def retry_not_idempotent() -> Iterator[None]:
    """A repeated transaction relies on the deletions of the first attempt."""
    writer = HanaStore._writer

    def planted(self: HanaStore, found: Any, changes: ChangeSet) -> Callable[[Any], None]:
        write, attempts = writer(self, found, changes), list[bool]()

        def attempt(session: Any) -> None:
            write(cast(Any, _Attempts(session, bool(attempts))))
            attempts.append(True)

        return attempt

    with patch.object(HanaStore, "_writer", planted):
        yield


@contextmanager
def epoch_kept() -> Iterator[None]:
    """Whoever takes over a lease gets the epoch of the last owner."""
    execute = Session.execute

    def planted(self: Session, sql: str, parameters: Sequence[Any] = (), *, doing: str = "") -> int:
        return execute(self, sql.replace('"LEASE_EPOCH" + 1', '"LEASE_EPOCH"'), parameters, doing=doing)

    with patch.object(Session, "execute", planted):
        yield


@contextmanager
def range_lost() -> Iterator[None]:
    """The last key range of a table that several threads read is left out."""
    all_rows = full.all_rows

    def planted(plan: Any, source: Any) -> Batches:
        rows, streams = all_rows(plan, source)
        return rows, streams[:-1] if len(streams) > 1 else streams

    with patch.object(full, "all_rows", planted):
        yield


def parts_kept() -> AbstractContextManager[Any]:
    """A worker of a key range that was taken for lost may write while its successor or the driver does."""
    return patch.object(HanaStore, "end_parts", lambda self, lease: None)


def row_near_a_gone_one_deleted() -> AbstractContextManager[Any]:
    """The driver deletes all rows of a bucket whose sum is not 0, without a look into the source."""
    return patch.object(ranges._ClosingRun, "_key", lambda self, id_: None)


def closing_compares_nothing() -> AbstractContextManager[Any]:
    """The driver trusts the ranges: nothing that they did not meet is looked at."""
    return patch.object(ranges.IdSums, "remain", lambda self: False)


PLANTED: Mapping[str, Planted] = {
    planted.__name__: planted
    for planted in (
        no_epoch_check,
        late_writer_accepted,
        checkpoint_before_data,
        log_emptied_before_commit,
        retry_not_idempotent,
        epoch_kept,
        range_lost,
        parts_kept,
        row_near_a_gone_one_deleted,
        closing_compares_nothing,
    )
}

_SPREAD = {"way": "full", "spread": 3, "page_rows": 1}
FOCUS: Mapping[str, Mapping[str, Any]] = {
    "log_emptied_before_commit": {"way": "log", "synced": True},
    "retry_not_idempotent": {"faults": Faults(reply_lost=0.1)},
    "late_writer_accepted": {"workers": 3, "spread": 0, "actions": ("change", "pause", "jump")},
    **dict.fromkeys(
        ("row_near_a_gone_one_deleted", "closing_compares_nothing"),
        _SPREAD | {"synced": True, "max_deletes": 1.0},
    ),
    "parts_kept": _SPREAD
    | {
        "events": 40,
        "calm": 20,
        "actions": ("change", "presume"),
        "faults": Faults(slow=0.05, slow_seconds=10.0),
    },
}
"""What a seed must hold for some of the bugs to show often."""
