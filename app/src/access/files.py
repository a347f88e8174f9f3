"""Files that a service reads again when they change, and private files that it replaces whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from app.src.access.principal import AccessUnusable


def edition(path: Path) -> tuple[int, ...] | None:
    """Another one after each change, also where the file was replaced by one of the same age; None: it is not there, or
    out of reach."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino


def write_private(path: Path, content: bytes) -> None:
    """A file with mode 0600, replaced whole. Raises AccessUnusable."""
    try:
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise AccessUnusable(f"{path.parent}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):  # root changes the keys of a service that is not root
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise AccessUnusable(
            f"{path}: cannot be replaced ({error.strerror}); in a container mount its folder, not the file alone"
        ) from None
