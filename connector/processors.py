"""How many processors this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Quota and period of control groups: version 2, where "max" means no limit, and version 1, where -1 does.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def processors(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of processors that this process may use. A container's CPU quota limits it, rounded up."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _QUOTAS:
        with suppress(OSError, ValueError):
            quota, period = (int(word) for file in files for word in (groups / file).read_text("ascii").split())
            if quota > 0:
                number = min(number, -(-quota // period))
    return number
