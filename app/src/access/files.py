"""Reload changed files, and replace private files atomically."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from app.src.access.principal import AccessUnusable
from connector.errors import ConfigurationError

Content = TypeVar("Content")
LOOK_SECONDS = 0.5  # minimum seconds between two checks for changed files
_log = logging.getLogger(__name__)


def edition(path: Path) -> tuple[int, ...] | None:
    """Return a version that differs after each change or replacement of the file; None: missing or inaccessible."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino


class Reloaded(ABC, Generic[Content]):
    """The content of files, loaded again when they change. If the files are unusable, the error is logged
    once, loading is retried, and the last good content stays in use; `fault` is the reason. Thread-safe."""

    def __init__(self, *paths: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the paths; `open` reads the files."""
        self._paths, self._clock = paths, clock
        self.content: Content
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._seen: list[object] = []
        self.fault: str | None = None

    @abstractmethod
    def load(self) -> Content:
        """Return the content of the files. Raises ConfigurationError."""

    def open(self) -> None:
        """Load. Raises ConfigurationError."""
        self._looked = self._clock()
        self._seen = [edition(path) for path in self._paths]
        self.content = self.load()
        self.fault = None

    def refresh(self) -> None:
        """Load changed files. Never waits for a concurrent check."""
        if self._clock() - self._looked < LOOK_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = self._clock()
            # Retry after a fault even without a change: the files may be valid, and only reading them failed.
            if self.fault is not None or self._seen != [edition(path) for path in self._paths]:
                self.open()
        except ConfigurationError as error:
            if self.fault != str(error):
                _log.error("%s; the last good content stays in force", error)
            self.fault = str(error)
        finally:
            self._lock.release()


def write_private(path: Path, content: bytes) -> None:
    """Replace the file atomically, with mode 0600. Raises AccessUnusable."""
    try:
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise AccessUnusable(f"{path.parent}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):  # root may change the keys of a service that runs as another user
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise AccessUnusable(
            f"{path}: cannot be replaced ({error.strerror}); in a container mount its folder, not the file alone"
        ) from None
