"""A call that runs in a thread of its own, for tests in which one session waits for another."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hana_emulator.sql.storage.locks import LockTable

PATIENCE = 60.0
"""Seconds until something hangs; a machine that does other things may need some of them."""


class Background:
    """Started at once; `result` joins and gives what the call returned, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._value: Any = None
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._value = call()
        except BaseException as error:
            self._raised = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def assert_waits(self) -> None:
        """The call has come to where it waits for another's lock, and stays there. For sessions of this process."""
        deadline = time.monotonic() + PATIENCE
        while self.is_running and not self._stands():
            assert time.monotonic() < deadline, "it runs, and waits for no lock"
            time.sleep(0.002)
        self.assert_lasts(0.02)

    def assert_lasts(self, seconds: float = 0.2) -> None:
        """The call is still running after that time. What goes through a driver may not have begun by then."""
        self._thread.join(seconds)
        assert self.is_running, f"did not wait: {self._value!r} {self._raised!r}"

    def _stands(self) -> bool:
        """Its innermost call but one is that of a wait that others already see."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code is not threading.Condition.wait.__code__:
            frame = frame.f_back
        caller = frame and frame.f_back
        return caller is not None and caller.f_code is LockTable.wait.__code__

    def result(self, seconds: float = PATIENCE) -> Any:
        self._thread.join(seconds)
        assert not self.is_running, "still waiting"
        if self._raised is not None:
            raise self._raised
        return self._value

    def code(self, seconds: float = PATIENCE) -> int:
        """The code of the HANA error that the call ended with."""
        self._thread.join(seconds)
        assert not self.is_running, "still waiting"
        found = getattr(self._raised, "code", None) or getattr(self._raised, "errorcode", None)
        assert found is not None, f"no such error: {self._raised!r}"
        return int(found)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
