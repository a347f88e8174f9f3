"""Detect changed files, and replace private files atomically."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from app.src.access.principal import AccessUnusable


def edition(path: Path) -> tuple[int, ...] | None:
    """Return a version that differs after each change, also if a file of the same age replaced it. None: missing or
    inaccessible."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino


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
