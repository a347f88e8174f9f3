"""Named points at the borders of every stage of a sync, where a test stops the process. Nothing happens at them unless
something was armed. Knows nothing of what goes on around them.
"""

from __future__ import annotations

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
"""In the order in which a sync comes by; the last is that of a switch of generations."""

_hook: Callable[[str], None] | None = None


def arm(hook: Callable[[str], None] | None) -> None:
    """`hook` is called with the name of each point that is reached, in whichever thread; None: nothing happens."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    if _hook is not None:
        _hook(name)
