"""Named points between the stages of a sync where a test can stop the process. Unarmed points do nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

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
# Sorted by when a sync reaches them, except the last one, which a generation switch reaches.

ACTIONS = ("kill", "stop", "raise")  # SIGKILL, SIGSTOP, InjectedFailure

_hook: Callable[[str], None] | None = None


class InjectedFailure(RuntimeError):
    """Raised by a failpoint with action `raise`."""


def hook(text: str) -> Callable[[str], None]:
    """Return a hook for `arm` that counts the visits of all threads and acts once. `text`: `after_read`, `after_read:3`
    (on the third visit) or `after_read:3:stop`; the default action is kill. Raises ValueError with the valid choices.
    """
    name, _, rest = text.strip().partition(":")
    hit, _, action = rest.partition(":")
    if name not in NAMES:
        raise ValueError(f"unknown failpoint {name!r}; use one of {', '.join(NAMES)}")
    if hit and not (hit.isascii() and hit.isdecimal() and int(hit)):
        raise ValueError(f"invalid visit number {hit!r}; {name}:1 is the first visit")
    if action and action not in ACTIONS:
        raise ValueError(f"unknown action {action!r}; use one of {', '.join(ACTIONS)}")
    lock = threading.Lock()
    left = int(hit or 1)

    def visit(visited: str) -> None:
        nonlocal left
        if visited != name:
            return
        with lock:
            left -= 1
            struck = left == 0
        if struck and action == "raise":
            raise InjectedFailure(f"failpoint {name} was armed to raise")
        if struck:
            os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)

    return visit


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of each point reached, in any thread; None disarms."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    if _hook is not None:
        _hook(name)
