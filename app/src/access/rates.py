"""Limits per principal (requests and tokens in a window, concurrent requests), and of failed authentications per
address. Counters are in memory and bounded."""

from __future__ import annotations

import functools
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from limits import RateLimitItem, parse

from app.src.access.principal import ANONYMOUS, LOOPBACK, OPERATOR, Principal
from app.src.settings.model import UNLIMITED

# Limit of counters; above it, the oldest window is dropped.
MOST_COUNTED = 10_000
_SOON = 1.0  # Retry-After at the concurrency limit: the duration of the running requests is unknown
_limit = functools.lru_cache(maxsize=256)(parse)


class RateExceeded(Exception):
    """A limit was exceeded; the message names it and its setting. `seconds`: until the next try."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Standing:
    """A window: `remaining` requests of `quota`, `seconds` left of `window`. An `exceeded` request was not counted."""

    quota: int
    window: int
    remaining: int
    seconds: float
    exceeded: bool


class _Windows:
    """Fixed windows that begin with the first request, so that a refusal can state the start of the next. The storage
    of the `limits` library is not used: it is unbounded, counts refused requests, and starts a thread for each
    clean-up."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock, self._most, self._lock = clock, most, threading.Lock()
        self._counts: OrderedDict[tuple[str, ...], tuple[int, float]] = OrderedDict()

    def hit(self, item: RateLimitItem, *names: str, cost: int = 1) -> Standing:
        """Count a request, unless it exceeds the limit."""
        now, window, name = self._clock(), item.get_expiry(), (*names, str(item))
        with self._lock:
            count, ends = self._counts.get(name, (0, now))
            if ends <= now:
                self._counts.pop(name, None)  # reinsert it below: a new window is the youngest
                count, ends = 0, now + window
            exceeded = count + cost > item.amount
            if not exceeded:
                count += cost
                self._counts[name] = count, ends
                while len(self._counts) > self._most:
                    self._counts.popitem(last=False)
        return Standing(item.amount, window, item.amount - count, ends - now, exceeded)


class Rates:
    """Limits of principals (none without authentication) and of failed authentications by address. Thread-safe."""

    def __init__(
        self,
        rate: str = UNLIMITED,
        concurrency: int = 0,
        tokens: str = UNLIMITED,
        failures: str = UNLIMITED,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_COUNTED,
    ) -> None:
        """`rate` ("600/minute") and `concurrency` are for principals without limits of their own."""
        self._rate, self._concurrency, self._tokens, self._failures = rate, concurrency, tokens, failures
        self._windows, self._failed = _Windows(clock, most), _Windows(clock, most)
        self._lock = threading.Lock()
        self._at_once: dict[str, int] = {}

    def enter(self, principal: Principal) -> Standing | None:
        """Begin a request; `leave` must follow. Returns None where the rate is unlimited. Raises RateExceeded."""
        if _free(principal):
            return None
        most = self._concurrency if principal.concurrency is None else principal.concurrency
        with self._lock:
            here = self._at_once.get(principal.identity, 0)
            if most and here >= most:
                whose = "setting access.concurrency" if principal.concurrency is None else "the concurrency of this key"
                raise RateExceeded(f"{most} requests of this key are running, the limit ({whose})", _SOON)
            self._at_once[principal.identity] = here + 1
        rate = principal.rate or self._rate
        if rate == UNLIMITED:
            return None
        standing = self._windows.hit(_limit(rate), "requests", principal.identity)
        if standing.exceeded:
            self.leave(principal)
            whose, seconds = "the rate of this key" if principal.rate else "setting access.rate", standing.seconds
            raise RateExceeded(f"{rate} requests are allowed ({whose}): try again in {seconds:.0f} s", seconds)
        return standing

    def leave(self, principal: Principal) -> None:
        """End a request."""
        if _free(principal):
            return
        with self._lock:
            left = self._at_once.pop(principal.identity) - 1
            if left:
                self._at_once[principal.identity] = left

    def spend(self, principal: Principal, tokens: int) -> None:
        """Charge tokens. A request above the quota needs, and uses up, a whole new window. Raises RateExceeded."""
        if _free(principal) or self._tokens == UNLIMITED:
            return
        item = _limit(self._tokens)
        standing = self._windows.hit(item, "tokens", principal.identity, cost=min(tokens, item.amount))
        if standing.exceeded:
            why = f"{self._tokens} tokens are allowed (setting access.tokens), and {standing.remaining} are left"
            raise RateExceeded(f"{why}: try again in {standing.seconds:.0f} s", standing.seconds)

    def fail(self, address: str) -> tuple[float, bool] | None:
        """Count a failed authentication, by IPv4 address or by a customer's IPv6 prefix; a valid key is never refused
        for failures of others. After too many failures, return the seconds to wait, and whether to log this one: only
        once per window, so that callers without rights cannot fill the log."""
        if self._failures == UNLIMITED:
            return None
        item, customer = _limit(self._failures), "unknown"
        with suppress(ValueError):
            found = ipaddress.ip_address(address.partition("%")[0])
            mapped = found if found.version == 4 else found.ipv4_mapped
            customer = str(mapped or ipaddress.ip_network((found, 64), strict=False))  # as providers assign them
        standing = self._failed.hit(item, customer)
        if not standing.exceeded:
            return None
        once = type(item)(1, item.multiples)
        return standing.seconds, not self._failed.hit(once, "told", customer).exceeded


def _free(principal: Principal) -> bool:
    """Return whether no limits apply to the caller: anonymous callers reach only open routes."""
    return principal is LOOPBACK or principal is ANONYMOUS or principal is OPERATOR
