"""Named points at the borders of every stage of a sync, where a test stops the process. Nothing happens at them unless
something was armed. Knows nothing of what goes on around them.
"""

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
"""In the order in which a sync comes by; the last is that of a switch of generations."""

ACTIONS = ("kill", "stop", "raise")
"""SIGKILL, SIGSTOP, or an exception that nobody expects."""

_hook: Callable[[str], None] | None = None


class InjectedFailure(RuntimeError):
    """What a failpoint armed with `raise` raises."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """The `hit`-th time (from 1) that `name` is reached, `action` happens to this process; once."""

    name: str
    hit: int = 1
    action: str = "kill"

    @classmethod
    def parse(cls, text: str) -> Failpoint:
        """`after_read`, `after_read:3`, `after_read:3:stop`. Raises ValueError that says what is possible.

        >>> Failpoint.parse("mid_delete:2")
        Failpoint(name='mid_delete', hit=2, action='kill')
        """
        name, _, rest = text.strip().partition(":")
        hit, _, action = rest.partition(":")
        if name not in NAMES:
            raise ValueError(f"{name!r} is no failpoint; there are {', '.join(NAMES)}")
        if hit and not (hit.isascii() and hit.isdecimal() and int(hit)):
            raise ValueError(f"{hit!r} is no number of a visit: {name}:1 is the first one")
        if action and action not in ACTIONS:
            raise ValueError(f"{action!r} is nothing that can happen at a failpoint: {', '.join(ACTIONS)}")
        return cls(name, int(hit or 1), action or "kill")

    def __str__(self) -> str:
        return f"{self.name}:{self.hit}:{self.action}"

    def hook(self) -> Callable[[str], None]:
        """For `arm`. Counts the visits of all threads."""
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
    """`hook` is called with the name of each point that is reached, in whichever thread; None: nothing happens."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    if _hook is not None:
        _hook(name)
