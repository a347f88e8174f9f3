"""An engine in a worker of the cluster, as a member of an EnginePool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from app.src.core.backends import EngineClosed, EngineError, InputType, Vectors
from app.src.core.loading import EngineOptions
from app.src.core.queue import EngineStats, Lane, Watcher
from app.src.scaling.worker import Answer, Block, Loaded

if TYPE_CHECKING:
    from app.src.scaling.cluster import RayWorker


class WorkerEngine(Loaded):
    """See `core.pool.Member`. Thread-safe."""

    def __init__(self, worker: RayWorker, options: EngineOptions, loaded: Loaded) -> None:
        """`loaded`: what the worker answered when it loaded these options."""
        super().__init__(**vars(loaded))
        self.worker, self.options = worker, options
        self._closed = False
        self._stats: dict[str, EngineStats] = {}  # of each process, also of those that died

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None,
        *,
        input_type: InputType,
        normalize: bool,
        counted: Callable[[list[int]], None] | None,
    ) -> Future[Vectors]:
        """As `Engine.submit`, but the worker tokenises later; then `counted` is called, and errors are the future's."""
        if self._closed:
            raise EngineClosed("the workers of the cluster are closed")
        answer = Future[Vectors]()
        block = Block(list(texts), lane, input_type, normalize, self.fingerprint)
        self.worker.call("embed", self.options, block).add_done_callback(partial(self._answered, answer, counted))
        return answer

    def _answered(
        self, answer: Future[Vectors], counted: Callable[[list[int]], None] | None, found: Future[Answer | EngineError]
    ) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            content = found.result()
            if isinstance(content, EngineError):
                raise content
            self._stats[content.worker] = content.stats
            if counted is not None:
                counted(content.counts)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(content.vectors.copy())  # the array is read-only and occupies the object store

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        """Do nothing: only the worker knows its queue, and a cluster serves no waiting callers."""

    def check_room(self, texts: Sequence[str]) -> None:
        """Do nothing: only the worker knows its queue."""

    def stats(self) -> EngineStats:
        each = list(self._stats.values())
        return EngineStats(
            **{item.name: sum(getattr(stats, item.name) for stats in each) for item in fields(EngineStats)}
        )

    def stalled(self) -> float:
        return 0.0  # Ray notices lost workers and nodes

    @property
    def ready(self) -> bool:
        return self.worker.ready

    @property
    def deaths(self) -> int:
        return self.worker.deaths

    @property
    def failed(self) -> str:
        return self.worker.failed

    def close(self) -> None:
        """Refuse further texts. The cluster ends the worker."""
        self._closed = True
