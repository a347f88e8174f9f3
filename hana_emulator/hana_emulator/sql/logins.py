"""Count login attempts and failures since the start, in memory, and lock users after too many failures."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass

from hana_emulator.errors import HanaError, authentication_failed

MAXIMUM_FAILURES = 6  # HANA's default for the password policy `maximum_invalid_connect_attempts`
_MOST_NAMES = 1_000  # Clients can try any name, so the oldest records are dropped


@dataclass(slots=True)
class _Record:
    attempts: int = 0
    failures: int = 0
    consecutive: int = 0  # Failures since the last success or reset: HANA's INVALID_CONNECT_ATTEMPTS
    locked: bool = False


class LoginBook:
    """Login counts of all sessions. `maximum` consecutive failures lock a user (0: never) until a reset."""

    def __init__(self, maximum: int = MAXIMUM_FAILURES) -> None:
        self.maximum = maximum
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def admit(self, user: str, *, proven: bool, deactivated: bool) -> None:
        """Count an attempt. Raises HanaError 10 for a wrong password; 415 (deactivated) and 416 (locked) even for a
        correct one."""
        with self._lock:
            record = self._records.setdefault(user, _Record())
            while len(self._records) > _MOST_NAMES:
                self._records.popitem(last=False)
            record.attempts += 1
            if proven and not deactivated and not record.locked:
                record.consecutive = 0
                return
            record.failures += 1
            if deactivated:
                raise HanaError(415, "user is deactivated")
            if record.locked:
                raise HanaError(416, "user is locked; try again later: it stays locked until its attempts are reset")
            record.consecutive += 1
            record.locked = 0 < self.maximum <= record.consecutive
            raise authentication_failed()

    def reset(self, user: str) -> None:
        with self._lock:
            if (record := self._records.get(user)) is not None:
                record.consecutive, record.locked = 0, False

    def as_json(self) -> str:
        """Return an array of the records, each with its `user`, for the SYS views."""
        with self._lock:
            return json.dumps([asdict(record) | {"user": user} for user, record in self._records.items()])
