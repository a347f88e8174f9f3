"""What a service does in the background: sync, verify and retry as jobs. Knows no HTTP and no terminal, and of the
service only the operations that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from app.src.jobs import Job, Jobs, Run
from connector.model import Observer

if TYPE_CHECKING:
    from connector.quarantine import RetryReport
    from connector.sync import SyncReport
    from connector.verify import VerifyReport


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """What one sync run was asked for; None: as configured."""

    full: bool = False
    max_deletes: float | None = None
    owner: str = "sync"


class Operations(Protocol):
    """What can be done in the background. Raises the errors of the connector and of the engine."""

    def sync(
        self, name: str, request: SyncRequest | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> SyncReport: ...

    def verify(
        self, name: str, *, repair: bool, observer: Observer | None, stop: Callable[[], bool]
    ) -> VerifyReport: ...

    def retry_ids(
        self, name: str, ids: list[str] | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> RetryReport: ...


class Background:
    """Starts jobs; their names are those of collections that exist."""

    def __init__(self, jobs: Jobs, operations: Operations) -> None:
        self._jobs = jobs
        self._operations = operations

    def start_sync(self, name: str, request: SyncRequest) -> Job:
        """Raises JobRunning, QueueFull, StateUnusable."""

        def work(run: Run) -> Mapping[str, Any]:
            return self._operations.sync(name, request, _JobObserver(run), run.stopping).as_dict()

        return self._jobs.start(name, work)

    def start_verify(self, name: str, *, repair: bool) -> Job:
        """Raises as `start_sync`."""

        def work(run: Run) -> Mapping[str, Any]:
            watched, stop = _JobObserver(run), run.stopping
            return self._operations.verify(name, repair=repair, observer=watched, stop=stop).as_dict()

        return self._jobs.start(name, work, "verify")

    def start_retry(self, name: str, ids: list[str] | None) -> Job:
        """Retry these rows of the quarantine; None: all. Raises as `start_sync`."""

        def work(run: Run) -> Mapping[str, Any]:
            return self._operations.retry_ids(name, ids, _JobObserver(run), run.stopping).as_dict()

        return self._jobs.start(name, work, "retry")


class _JobObserver:
    """A job as the Observer of its work."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def stage(self, name: str, seconds: float, items: int) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        self._run.report(done, total)

    def event(self, name: str, **fields: str | int | float) -> None:
        if name in ("waiting", "owned"):
            self._run.wait(name == "waiting")
