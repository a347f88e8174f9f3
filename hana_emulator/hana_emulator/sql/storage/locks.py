"""The locks of parked transactions, and which transaction waits for which.

A table is identified by the name that callers use for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hana_emulator.errors import HanaError, lock_wait_timeout

_POLL_SECONDS = 0.5
Key = tuple[int, tuple[object, ...]]  # (number of a table's unique constraint, values of its columns)


class Holder:
    """A transaction that can hold locks and wait for another."""

    def __init__(self) -> None:
        self.ended = False
        self.waits_for: Holder | None = None


class Blocked(Exception):
    """The statement needs a lock that `holder` has. It was undone and can be retried."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder


@dataclass(slots=True)
class Claims:
    """The locks of one transaction in one table: rows (by rowid), keys of its uncommitted rows, or the whole table.

    `vacated` are its rows whose keys become free on commit. `parents` are rows that must not change because uncommitted
    rows refer to them; transactions can share these locks.
    """

    rows: set[int] = field(default_factory=set)
    vacated: set[int] = field(default_factory=set)
    keys: set[Key] = field(default_factory=set)
    parents: set[int] = field(default_factory=set)
    exclusive: bool = False


class LockTable:
    """Only the thread with the turn to write adds, reads and removes claims; waiting needs no turn."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[Holder, Claims]] = {}
        self._changed = threading.Condition()

    def enter(self, holder: Holder, claims: Mapping[str, Claims]) -> None:
        for table, claimed in claims.items():
            self._claims.setdefault(table, {})[holder] = claimed

    def withdraw(self, holder: Holder) -> None:
        for table in [table for table, claims in self._claims.items() if claims.pop(holder, None) is not None]:
            if not self._claims[table]:
                del self._claims[table]

    def claims(self, table: str) -> Mapping[Holder, Claims]:
        return self._claims.get(table, {})

    @property
    def any_claims(self) -> bool:
        return bool(self._claims)

    def check_open(self, table: str) -> None:
        for holder, claims in self.claims(table).items():
            if claims.exclusive:
                raise Blocked(holder)

    def check_unused(self, tables: Iterable[str]) -> None:
        for table in tables:
            for holder in self.claims(table):
                raise Blocked(holder)

    def check_rows(self, table: str, rowids: set[int]) -> None:
        for holder, claims in self.claims(table).items():
            if claims.exclusive or not claims.rows.isdisjoint(rowids) or not claims.parents.isdisjoint(rowids):
                raise Blocked(holder)

    def check_parents(self, table: str, rowids: set[int]) -> None:
        """Raise Blocked if another transaction has changed one of the rows; shared references do not block."""
        for holder, claims in self.claims(table).items():
            if claims.exclusive or not claims.rows.isdisjoint(rowids):
                raise Blocked(holder)

    def check_keys(self, table: str, keys: set[Key]) -> None:
        """Raise Blocked if another transaction has written a row with one of the keys."""
        for holder, claims in self.claims(table).items():
            if not claims.keys.isdisjoint(keys):
                raise Blocked(holder)

    # ------------------------------------------------------------------------------------------------------- waiting

    def end(self, holder: Holder) -> None:
        self.withdraw(holder)
        with self._changed:
            holder.ended = True
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def await_end(self, holder: Holder, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holder.ended, seconds)

    def wait(self, waiter: Holder, holder: Holder, until: float, check: Callable[[], None]) -> None:
        """Wait until `holder` has ended. `until` is a time of the monotonic clock.

        Raises HanaError 133 at once on a deadlock, 131 at `until`, and the errors of `check`.
        """
        with self._changed:
            node: Holder | None = holder
            while node is not None and node is not waiter:
                node = node.waits_for
            if node is waiter:
                raise HanaError(133, "transaction rolled back by detected deadlock")
            waiter.waits_for = holder
            try:
                while not holder.ended:
                    check()
                    left = until - time.monotonic()
                    if left <= 0:
                        raise lock_wait_timeout("waited too long for another transaction")
                    self._changed.wait(min(left, _POLL_SECONDS))
            finally:
                waiter.waits_for = None
