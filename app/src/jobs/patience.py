"""How long to wait before a job is tried again, and when to give up. Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, wait_random_exponential

FIRST_WAIT = 5.0
"""Seconds: what is shorter, the connection pool has waited for already."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. Waits grow from `FIRST_WAIT` to `longest_wait`, by chance, so that many workers that lost one HANA do
    not come back at the same moment. `give_up_after` counts from the first attempt in vain."""

    longest_wait: float = 300.0
    give_up_after: float = 86_400.0

    def pause(self, failures: int) -> float:
        """The wait after so many attempts in vain (from 1): between `FIRST_WAIT` and its double for the first."""
        least = min(FIRST_WAIT, self.longest_wait)
        wait = wait_random_exponential(multiplier=2 * FIRST_WAIT, max=self.longest_wait, min=least)
        state = RetryCallState(Retrying(), None, (), {})
        state.attempt_number = failures
        return wait(state)

    def over(self, waited: float) -> bool:
        return waited >= self.give_up_after
