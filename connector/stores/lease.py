"""Leases: the right of one worker at a time to write to a collection, renewed in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from connector.errors import ConnectorError, LeaseLost
from connector.model import Lease


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. `ttl`: how long a lease outlives a crashed worker; `renew`: well below `ttl`; `poll`: while waiting."""

    ttl: float = 30.0
    renew: float = 8.0
    poll: float = 0.25


DEFAULT_TIMES = LeaseTimes()


class LeaseTable(Protocol):
    """Stores leases. Each call is one transaction and uses the store's clock."""

    def take_lease(self, collection: str, owner: str, ttl: float) -> int | str:
        """Return the new epoch, or the name of the current owner. Takes over an expired lease."""
        ...

    def renew_lease(self, lease: Lease, ttl: float) -> bool:
        """Return False if another worker has taken the lease over."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Release the lease and reject later writes with its epoch."""
        ...


@contextmanager
def held(table: LeaseTable, collection: str, owner: str, wait: float, times: LeaseTimes) -> Iterator[Lease]:
    """Own the collection inside the block. Raises LeaseLost when another owner keeps it longer than `wait` seconds."""
    lease = _take(table, collection, owner, wait, times)
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(table, lease, times, done), name=f"lease-{collection}", daemon=True)
    keeper.start()
    try:
        yield lease
    finally:
        done.set()
        keeper.join()
        with suppress(ConnectorError):  # it expires by itself
            table.release_lease(lease)


def _take(table: LeaseTable, collection: str, owner: str, wait: float, times: LeaseTimes) -> Lease:
    deadline = time.monotonic() + wait
    while True:
        taken = table.take_lease(collection, owner, times.ttl)
        if isinstance(taken, int):
            return Lease(collection, owner, taken)
        left = deadline - time.monotonic()
        if left <= 0:
            raise LeaseLost(
                f"collection {collection!r} is being written by {taken!r} and did not become free in time; "
                "wait until it is done, then try again"
            )
        time.sleep(min(times.poll, left))


def _keep(table: LeaseTable, lease: Lease, times: LeaseTimes, done: threading.Event) -> None:
    """Renew until done or lost, retrying failures. If all fail, the lease expires and writes raise LeaseLost."""
    pause = times.renew
    while not done.wait(pause):
        try:
            if not table.renew_lease(lease, times.ttl):
                return
            pause = times.renew
        except ConnectorError:
            pause = times.renew / 4


def lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"another worker has taken over collection {lease.collection!r}; nothing of this change was written"
    )
