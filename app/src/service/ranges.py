"""The key ranges of a sync on the workers of a Ray cluster. Each worker reads the settings of its node, so that no login
travels."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

from app.src.core.queue import WorkerDied
from app.src.scaling.member import Place
from app.src.scaling.worker import Model, Worker
from app.src.service.wiring import EngineEmbedder, Parts
from app.src.settings import load
from connector.errors import ConfigurationError
from connector.sync.options import Ends, SyncReport, Watch
from connector.sync.ranges import RangeTask, WorkerLost

_stopped: set[str] = set()  # runs that this worker must not continue


@dataclass(frozen=True, slots=True)
class Order:
    """`run`: an id of the sync. `config`: the settings file, None: owl-sap.toml where the worker runs."""

    run: str
    config: Path | None
    model: Model
    task: RangeTask


def work(worker: Worker, order: Order) -> SyncReport | Exception:
    """Do the task in a worker. Return its error as a value, because Ray loses the attributes of a raised one."""
    try:
        parts = _parts(order.config)
        ends = Ends(parts.source, parts.store, EngineEmbedder(worker.engine(order.model)))
        return order.task(ends, Watch(None, lambda: order.run in _stopped))
    except Exception as error:
        return error


def stop(worker: Worker, run: str) -> None:
    _stopped.add(run)


@cache
def _parts(config: Path | None) -> Parts:
    parts = Parts(load(config).settings)
    if not parts.store_in_hana:
        raise ConfigurationError(
            '[scale] ranges = true, but the settings of a node name a local store: every node needs [store] kind = "hana" '
            "with the HANA of the machine that syncs"
        )
    return parts


class RangeWorkers:
    """`connector.sync.ranges.Workers` of one sync, one for each place."""

    def __init__(self, places: list[Place], model: Model, config: Path | None) -> None:
        self.count = len(places)
        self._places, self._model, self._config = places, model, config
        self._run = secrets.token_hex(8)
        self._idle = SimpleQueue[Place]()
        for place in places:
            self._idle.put(place)

    def submit(self, task: RangeTask) -> Future[SyncReport]:
        place, future = self._idle.get(), Future[SyncReport]()
        order = Order(self._run, self._config, self._model, task)
        place.call("run", work, order).add_done_callback(partial(self._answered, place, future))
        return future

    def _answered(self, place: Place, future: Future[SyncReport], found: Future[SyncReport | Exception]) -> None:
        self._idle.put(place)
        content = found.exception() or found.result()
        if isinstance(content, SyncReport):
            future.set_result(content)
        else:
            future.set_exception(WorkerLost(str(content)) if isinstance(content, WorkerDied) else content)

    def stop(self) -> None:
        for place in self._places:
            place.call("run", stop, self._run)
