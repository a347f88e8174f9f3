"""When something is worth trying again, how often and after what wait. Knows our errors, not what is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from connector.errors import ConnectorError, Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, bounded by attempts and by seconds in all. Only `retryable` errors."""

    attempts: int = 5
    seconds: float = 30.0
    first_wait: float = 0.1
    longest_wait: float = 5.0
    sleep: Callable[[float], None] = time.sleep

    def call(self, work: Callable[[], T], overloaded: int | None = None) -> T:
        """What `work` returns, or its last error. `overloaded`: attempts at most that end in Overloaded, for a caller
        who can do with less."""
        stop = stop_after_attempt(self.attempts) | stop_after_delay(self.seconds)
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, ConnectorError) and error.retryable),
            wait=wait_random_exponential(multiplier=self.first_wait, max=self.longest_wait),
            stop=stop if overloaded is None else stop | _StopOverloaded(overloaded),
            sleep=self.sleep,
            reraise=True,
        )
        return retrying(work)


class _StopOverloaded(stop_base):
    """After so many attempts, if the last one ended in Overloaded."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts

    def __call__(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        return isinstance(error, Overloaded) and state.attempt_number >= self._attempts


AS_USUAL = RetryPolicy()
ONCE = RetryPolicy(attempts=1)
