"""A call that runs in a thread of its own, for tests in which one session waits for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


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

    def assert_waits(self, seconds: float = 0.2) -> None:
        """The call is still running after that time."""
        self._thread.join(seconds)
        assert self.is_running, f"did not wait: {self._value!r} {self._raised!r}"

    def result(self, seconds: float = 10.0) -> Any:
        self._thread.join(seconds)
        assert not self.is_running, "still waiting"
        if self._raised is not None:
            raise self._raised
        return self._value

    def code(self, seconds: float = 10.0) -> int:
        """The code of the HANA error that the call ended with."""
        self._thread.join(seconds)
        assert not self.is_running, "still waiting"
        found = getattr(self._raised, "code", None) or getattr(self._raised, "errorcode", None)
        assert found is not None, f"no such error: {self._raised!r}"
        return int(found)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
