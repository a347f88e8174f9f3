"""Who holds what: the locks of transactions that are not on the SQLite writer now, and who waits for whom.

Knows no SQL and no SQLite; a table is the name that callers use for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hana_emulator.errors import HanaError, lock_wait_timeout

_POLL_SECONDS = 0.5
Key = tuple[int, tuple[object, ...]]
"""Which unique constraint of a table, and the values in its columns."""


class Holder:
    """A transaction as far as waiting goes."""

    def __init__(self) -> None:
        self.ended = False
        self.waits_for: Holder | None = None


class Blocked(Exception):
    """Not an error: the statement needs what `holder` has locked, has been undone, and may be tried again later."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.holder = holder


@dataclass(slots=True)
class Claims:
    """The locks of one transaction in one table: rows (by rowid), keys of rows that only it can see, everything.

    `vacated` are those of its rows whose keys will be free if it commits. `parents` are rows that must not change
    because uncommitted rows refer to them; many may hold them.
    """

    rows: set[int] = field(default_factory=set)
    vacated: set[int] = field(default_factory=set)
    keys: set[Key] = field(default_factory=set)
    parents: set[int] = field(default_factory=set)
    exclusive: bool = False


class LockTable:
    """Claims are entered, read and withdrawn only by the thread that has the turn to write; waiting needs no turn."""

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
        """The locks of all transactions that are not on the writer, in the table."""
        return self._claims.get(table, {})

    @property
    def any_claims(self) -> bool:
        return bool(self._claims)

    def check_open(self, table: str) -> None:
        """Raises Blocked when another transaction has locked the whole table."""
        for holder, claims in self.claims(table).items():
            if claims.exclusive:
                raise Blocked(holder)

    def check_unused(self, tables: Iterable[str]) -> None:
        """Raises Blocked when another transaction has locked anything at all in the tables."""
        for table in tables:
            for holder in self.claims(table):
                raise Blocked(holder)

    def check_rows(self, table: str, rowids: set[int]) -> None:
        """Raises Blocked when another transaction has locked one of the rows."""
        for holder, claims in self.claims(table).items():
            if claims.exclusive or not claims.rows.isdisjoint(rowids) or not claims.parents.isdisjoint(rowids):
                raise Blocked(holder)

    def check_parents(self, table: str, rowids: set[int]) -> None:
        """Raises Blocked when another transaction has changed one of the rows; references by others do not matter."""
        for holder, claims in self.claims(table).items():
            if claims.exclusive or not claims.rows.isdisjoint(rowids):
                raise Blocked(holder)

    def check_keys(self, table: str, keys: set[Key]) -> None:
        """Raises Blocked when another transaction has written a row with one of the keys."""
        for holder, claims in self.claims(table).items():
            if not claims.keys.isdisjoint(keys):
                raise Blocked(holder)

    # ------------------------------------------------------------------------------------------------------- waiting

    def end(self, holder: Holder) -> None:
        """Let go of everything; who waited may try again."""
        self.withdraw(holder)
        with self._changed:
            holder.ended = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Make those who wait ask once more whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def await_end(self, holder: Holder, seconds: float) -> None:
        """Returns when `holder` has ended, or after that time."""
        with self._changed:
            self._changed.wait_for(lambda: holder.ended, seconds)

    def wait(self, waiter: Holder, holder: Holder, until: float, check: Callable[[], None]) -> None:
        """Return when `holder` has ended.

        Raises 133 at once when `holder` waits for `waiter`, directly or not, 131 when the monotonic clock reaches
        `until`, and the errors of `check`.
        """
        with self._changed:
            if _leads_to(holder, waiter):
                raise deadlock()
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


def _leads_to(start: Holder, goal: Holder) -> bool:
    node: Holder | None = start
    while node is not None and node is not goal:
        node = node.waits_for
    return node is goal


def deadlock() -> HanaError:
    return HanaError(133, "transaction rolled back by detected deadlock")
