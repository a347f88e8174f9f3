"""Named points between the stages of a sync where a test can stop the process. Unarmed points do nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "after_lease",
    "after_read",
    "after_render",
    "after_embed",
    "before_apply",
    "mid_upsert",
    "after_apply",
    "mid_delete",
    "before_checkpoint",
    "mid_checkpoint",
    "after_checkpoint",
    "before_log_delete",
    "after_log_delete",
    "mid_alias_swap",
)
# In the order in which a sync reaches them; the last one is in a generation switch.

ACTIONS = ("kill", "stop", "raise")  # SIGKILL, SIGSTOP, InjectedFailure

_hook: Callable[[str], None] | None = None


class InjectedFailure(RuntimeError):
    """Raised by a failpoint with action `raise`."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """Do `action` once, on the `hit`-th visit (from 1) of `name`."""

    name: str
    hit: int = 1
    action: str = "kill"

    @classmethod
    def parse(cls, text: str) -> Failpoint:
        """Parse `after_read`, `after_read:3` or `after_read:3:stop`. Raises ValueError with the valid choices.

        >>> Failpoint.parse("mid_delete:2")
        Failpoint(name='mid_delete', hit=2, action='kill')
        """
        name, _, rest = text.strip().partition(":")
        hit, _, action = rest.partition(":")
        if name not in NAMES:
            raise ValueError(f"unknown failpoint {name!r}; use one of {', '.join(NAMES)}")
        if hit and not (hit.isascii() and hit.isdecimal() and int(hit)):
            raise ValueError(f"invalid visit number {hit!r}; {name}:1 is the first visit")
        if action and action not in ACTIONS:
            raise ValueError(f"unknown action {action!r}; use one of {', '.join(ACTIONS)}")
        return cls(name, int(hit or 1), action or "kill")

    def __str__(self) -> str:
        return f"{self.name}:{self.hit}:{self.action}"

    def hook(self) -> Callable[[str], None]:
        """Return a hook for `arm` that counts the visits of all threads."""
        lock = threading.Lock()
        visits = 0

        def visit(name: str) -> None:
            nonlocal visits
            if name != self.name:
                return
            with lock:
                visits += 1
                struck = visits == self.hit
            if struck:
                self._act()

        return visit

    def _act(self) -> None:
        if self.action == "raise":
            raise InjectedFailure(f"failpoint {self.name} was armed to raise")
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of each point reached, in any thread; None disarms."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    if _hook is not None:
        _hook(name)
