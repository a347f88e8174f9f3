"""Rate limits of each principal (requests and tokens in a window, concurrent requests), and of failed authentications
by address. The counters are in memory, and bounded."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from limits import RateLimitItem, parse
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from app.src.access.principal import ANONYMOUS, LOOPBACK, Principal

# Counters that are kept; beyond it the oldest window is dropped.
MOST_COUNTED = 10_000
UNLIMITED = "unlimited"  # in place of a rate; for concurrency it is 0
_SOON = 1.0  # Retry-After for a full concurrency: how long the running requests take is unknown
_IPV6_CUSTOMER = 64  # bits of an IPv6 address that a provider assigns; its customer chooses the rest


class RateExceeded(Exception):
    """A limit was exceeded; the message names it and its setting. `seconds`: until the next try."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Standing:
    """The rest of a window: `remaining` of `quota` requests; `seconds` of `window` are left."""

    quota: int
    window: int
    remaining: int
    seconds: float


class _Windows(Storage):
    """The counters of `limits`' fixed windows. The storage of `limits` itself starts a thread for each
    clean-up, which races with counting, and is unbounded in names."""

    STORAGE_SCHEME = None

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        super().__init__()
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def base_exceptions(self) -> type[Exception]:
        return ValueError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        with self._lock:
            count, ends = self._now(key)
            if not count:
                self._counts.pop(key, None)  # a new window is the youngest
                ends = self._clock() + expiry
            self._counts[key] = count + amount, ends
            while len(self._counts) > self._most:
                self._counts.popitem(last=False)
            return count + amount

    def get(self, key: str) -> int:
        with self._lock:
            return self._now(key)[0]

    def get_expiry(self, key: str) -> float:
        with self._lock:
            return self._now(key)[1]

    def check(self) -> bool:
        return True

    def reset(self) -> int:
        with self._lock:
            kept = len(self._counts)
            self._counts.clear()
            return kept

    def clear(self, key: str) -> None:
        with self._lock:
            self._counts.pop(key, None)

    def _now(self, key: str) -> tuple[int, float]:
        now = self._clock()
        count, ends = self._counts.get(key, (0, now))
        return (count, ends) if ends > now else (0, now)


class _Limiter:
    """Windows that begin with the first request, so that a refusal can name the exact start of the next."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock = clock
        self._windows = FixedWindowRateLimiter(_Windows(clock, most))

    def hit(self, item: RateLimitItem, *names: str, cost: int = 1) -> Standing | None:
        """Count a request. Returns None, without counting, if it is refused."""
        if not self._windows.test(item, *names, cost=cost):
            return None
        self._windows.hit(item, *names, cost=cost)
        return self.standing(item, *names)

    def standing(self, item: RateLimitItem, *names: str) -> Standing:
        ends, remaining = self._windows.get_window_stats(item, *names)
        return Standing(item.amount, item.get_expiry(), remaining, max(0.0, ends - self._clock()))


class Rates:
    """Thread-safe. Limits nothing without authentication."""

    def __init__(
        self,
        rate: str = UNLIMITED,
        concurrency: int = 0,
        tokens: str = UNLIMITED,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_COUNTED,
    ) -> None:
        """Defaults for principals without own limits: `rate` ("600/minute"), `concurrency`, `tokens`
        ("1000000/minute")."""
        self._rate, self._concurrency, self._tokens = rate, concurrency, tokens
        self._limiter = _Limiter(clock, most)
        self._lock = threading.Lock()
        self._at_once: dict[str, int] = {}

    def enter(self, principal: Principal) -> Standing | None:
        """Begin a request; `leave` must follow. Returns None where the rate is unlimited. Raises RateExceeded without
        beginning."""
        if _free(principal):
            return None
        self._enter_beside(principal)
        rate = principal.rate or self._rate
        if rate == UNLIMITED:
            return None
        item = parse(rate)
        standing = self._limiter.hit(item, "requests", principal.identity)
        if standing is None:
            self.leave(principal)
            seconds = self._limiter.standing(item, "requests", principal.identity).seconds
            whose = "the rate of this key" if principal.rate else "setting access.rate"
            raise RateExceeded(f"{rate} requests are allowed ({whose}): try again in {seconds:.0f} s", seconds)
        return standing

    def _enter_beside(self, principal: Principal) -> None:
        own = principal.concurrency is not None
        most = principal.concurrency if principal.concurrency is not None else self._concurrency
        with self._lock:
            here = self._at_once.get(principal.identity, 0)
            if not most or here < most:
                self._at_once[principal.identity] = here + 1
                return
        whose = "the concurrency of this key" if own else "setting access.concurrency"
        raise RateExceeded(f"{most} requests of this key are running, the limit ({whose})", _SOON)

    def leave(self, principal: Principal) -> None:
        """End a request."""
        if _free(principal):
            return
        with self._lock:
            left = self._at_once.pop(principal.identity) - 1
            if left:
                self._at_once[principal.identity] = left

    def spend(self, principal: Principal, tokens: int) -> None:
        """Charge tokens to embed. A request above a whole window's quota takes one window for itself. Raises
        RateExceeded."""
        if _free(principal) or self._tokens == UNLIMITED:
            return
        item = parse(self._tokens)
        if self._limiter.hit(item, "tokens", principal.identity, cost=min(tokens, item.amount)) is None:
            standing = self._limiter.standing(item, "tokens", principal.identity)
            raise RateExceeded(
                f"{self._tokens} tokens are allowed (setting access.tokens), and {standing.remaining} are left: try "
                f"again in {standing.seconds:.0f} s",
                standing.seconds,
            )


def _free(principal: Principal) -> bool:
    """Return whether the caller is unidentified. ANONYMOUS gets only health and, if open, metrics."""
    return principal is LOOPBACK or principal is ANONYMOUS


class Failures:
    """Counts failed authentications by address. A valid key is never refused for failures of others at its address."""

    def __init__(self, rate: str, *, clock: Callable[[], float] = time.monotonic, most: int = MOST_COUNTED) -> None:
        self._item = None if rate == UNLIMITED else parse(rate)
        self._once = None if self._item is None else type(self._item)(1, self._item.multiples)
        self._limiter = _Limiter(clock, most)

    def add(self, address: str) -> float | None:
        """Count a failure. Returns the seconds to wait if there are too many, else None."""
        if self._item is None:
            return None
        where = _customer(address)
        if self._limiter.hit(self._item, where) is not None:
            return None
        return self._limiter.standing(self._item, where).seconds

    def news(self, address: str) -> bool:
        """Return whether to log that an address failed too often: once in each window, so that callers without
        rights cannot fill the log."""
        return self._once is None or self._limiter.hit(self._once, "told", _customer(address)) is not None


def _customer(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, _IPV6_CUSTOMER), strict=False))
    return str(found)
