"""Is the process that owns a job still there? Each holds a lock on a file of its own, which the kernel lets go when the
process ends, however it ends: no clock, and a process that is only slow or stopped is not taken for dead.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".alive"


class Presence:
    """This process, to others on this machine that share `folder` (as far as SQLite's own locks reach)."""

    def __init__(self, folder: Path) -> None:
        self.id = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._path = folder / f"{self.id}{_SUFFIX}"
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def is_alive(folder: Path, owner: str) -> bool:
    """Whether the process with this `Presence.id` still runs. Tidies up after one that does not."""
    path = folder / f"{owner}{_SUFFIX}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's: not for us to judge
    try:
        # Shared, so that two who ask at the same time do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    with suppress(OSError):
        path.unlink()
    return False
