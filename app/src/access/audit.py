"""The audit log: one JSON line per request, written by a thread so that requests never wait for a disk. The log
contains no query, value, vector, text or secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from connector.errors import BadFilter, ConfigurationError
from connector.model import Filter

WAITING = 10_000  # limit of queued entries; further entries are dropped and counted
_WARN_EVERY = 60.0
_CLOSE_SECONDS = 2.0
_log = logging.getLogger(__name__)


class AuditLog:
    """Thread-safe. An entry that cannot be written (disk full, file gone, too many entries) is dropped: `lost` gets the
    number of dropped entries, and the service's log the reason, at most once a minute. If logrotate renames the file,
    the next entry creates a new one. A kill -9 loses the entries in memory."""

    def __init__(self, path: str, lost: Callable[[int], None]) -> None:
        """`path`: created if absent, for this user only; "-": standard error. Raises ConfigurationError."""
        self._path = None if path == "-" else Path(path)
        self._lost = lost
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(WAITING)
        self._warned = -_WARN_EVERY
        self._torn = False  # the last line was written only partly
        try:
            self._write(b"")
        except OSError as error:
            raise ConfigurationError(
                f"access.audit: {path} cannot be opened for appending ({error.strerror}); name a file in a folder "
                'that exists and may be written to, or "-" for standard error'
            ) from None
        self._thread = threading.Thread(target=self._work, name="owl-sap-audit", daemon=True)
        self._thread.start()

    def record(self, entry: Mapping[str, Any]) -> None:
        """Queue an entry without waiting."""
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._fail("entries arrive faster than they can be written")

    def close(self) -> None:
        """Write the queued entries, for at most two seconds."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                self._write(json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n")
            except OSError as error:
                self._fail(error.strerror or type(error).__name__)

    def _write(self, line: bytes) -> None:
        """Write in one call, so that processes do not mix their lines. Logrotate may rename the file at any time."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = 2 if self._path is None else os.open(self._path, flags, 0o600)
        try:
            if self._torn:
                os.write(file, b"\n")
                self._torn = False
            if os.write(file, line) < len(line):
                self._torn = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            if self._path is not None:
                os.close(file)

    def _fail(self, why: str) -> None:
        self._lost(1)
        if time.monotonic() - self._warned >= _WARN_EVERY:
            self._warned = time.monotonic()
            _log.error("entries of the audit log are lost (%s); owl_sap_audit_failures_total counts them", why)


def shape_of(where: Filter | None, names: Mapping[str, str]) -> Any:
    """Return a filter without its values: {"MTART": "$eq"}, {"$and": [{"MTART": "$in"}, {"?": "$gt"}]}; None for no
    filter. Fields not declared in `names` (column -> metadata name) become "?", because callers choose their names. An
    invalid filter becomes "invalid"."""
    from connector.stores.filters import Group, parse

    def shape(condition: Any) -> dict[str, Any]:
        if isinstance(condition, Group):
            return {f"${condition.word.lower()}": [shape(part) for part in condition.parts]}
        return {condition.field if condition.field in names.values() else "?": condition.operator}

    try:
        condition = parse(where, names)
    except BadFilter:
        return "invalid"
    return None if condition is None else shape(condition)
