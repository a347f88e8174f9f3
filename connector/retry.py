"""Repeat work after temporary errors of HANA or the store, with growing pauses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from connector.cancellation import Cancellation
from connector.errors import ConnectorError, Overloaded

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, limited by attempts and total seconds. Only for `retryable` errors."""

    attempts: int = 5
    seconds: float = 30.0
    first_wait: float = 0.1
    longest_wait: float = 5.0
    sleep: Callable[[float], None] | None = None  # None: pause, but end at once when the call is cancelled

    def call(
        self, work: Callable[[], T], *, overloaded: int | None = None, cancellation: Cancellation | None = None
    ) -> T:
        """Return the result of `work`, or raise its last error. `overloaded`: attempts after which Overloaded is
        raised, for callers that then ask for less. Raises Cancelled if `cancellation` ends a pause."""
        import tenacity

        bounds = tenacity.stop_after_attempt(self.attempts) | tenacity.stop_after_delay(self.seconds)

        def stop(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            too_often = overloaded is not None and isinstance(error, Overloaded) and state.attempt_number >= overloaded
            return too_often or bounds(state)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, ConnectorError) and error.retryable),
            wait=tenacity.wait_random_exponential(multiplier=self.first_wait, max=self.longest_wait),
            stop=stop,
            sleep=self.sleep or (time.sleep if cancellation is None else cancellation.pause),
            reraise=True,
        )
        return retrying(work)


AS_USUAL = RetryPolicy()
