"""Has a file changed since it was read? For those that are read again while the service runs."""

from __future__ import annotations

from pathlib import Path


def edition(path: Path) -> tuple[int, ...] | None:
    """Another one after each change, also where the file was replaced by one of the same age; None: it is not there, or
    out of reach."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino
