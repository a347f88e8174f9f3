"""The key ranges of a sync on the workers of a Ray cluster. Each worker reads its node's settings: no login is sent."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from app.src.core.backends import DeviceFailed
from app.src.core.engine import Device
from app.src.core.loading import EngineOptions
from app.src.core.queue import WorkerDied
from app.src.scaling.engine import WorkerEngine
from app.src.scaling.worker import Worker
from app.src.service.wiring import EngineEmbedder, Parts
from app.src.settings import load
from connector.errors import ConfigurationError
from connector.sync.options import Ends, Watch
from connector.sync.ranges import RangeReport, RangeTask, WorkerLost

_stopped: set[str] = set()  # runs that this worker must not continue


@dataclass(frozen=True, slots=True)
class Order:
    """`run`: an id of the sync. `config`: the settings file; `folder`: of owl-sap.toml and .env; both on the node."""

    run: str
    config: Path | None
    folder: Path
    options: EngineOptions
    task: RangeTask


def work(worker: Worker, order: Order) -> RangeReport | Exception:
    """Do the task in a worker. Return its error, with the node's name, as a value: Ray loses the attributes of a raised
    one."""
    try:
        parts = _parts(order.config, order.folder)
        ends = Ends(parts.source, parts.store, EngineEmbedder(worker.engine(order.options)))
        return order.task(ends, Watch(None, lambda: order.run in _stopped))
    except Exception as error:
        error.args = (f"{platform.node()}: {error}",)
        return error


def stop(worker: Worker, run: str) -> None:
    _stopped.add(run)


@cache
def _parts(config: Path | None, folder: Path) -> Parts:
    parts = Parts(load(config, folder=folder).settings)
    if not parts.store_in_hana:
        raise ConfigurationError(
            "[scale] ranges = true, but the settings of a node name a local store: give every node the settings of the "
            'machine that syncs, with [store] kind = "hana"'
        )
    return parts


class RangeWorkers:
    """`connector.sync.ranges.Workers` of one sync, one on each worker of the cluster."""

    def __init__(self, members: Sequence[Device], file: Path | None) -> None:
        """`members`: of the model, on the cluster. `file`: the settings file."""
        self._members = [member for member in members if isinstance(member, WorkerEngine) and not member.failed]
        self._order = secrets.token_hex(8), file and file.resolve(), Path.cwd()
        self._idle = list(self._members)

    @property
    def count(self) -> int:
        """As many workers as are ready, so that no range waits for a process as long as others work; if none is, all
        that have not failed."""
        working = [member.ready for member in self._members if not member.failed]
        return sum(working) or len(working)

    def submit(self, task: RangeTask) -> Future[RangeReport]:
        member, future = max(self._idle, key=lambda each: (not each.failed, each.ready)), Future[RangeReport]()
        self._idle.remove(member)
        order = Order(*self._order, member.options, task)
        member.worker.call("run", work, order).add_done_callback(partial(self._answered, member, future))
        return future

    def _answered(
        self, member: WorkerEngine, future: Future[RangeReport], found: Future[RangeReport | Exception]
    ) -> None:
        self._idle.append(member)
        lost = found.exception()
        content = lost or found.result()
        if isinstance(content, RangeReport):
            future.set_result(content)
        elif isinstance(lost, WorkerDied | DeviceFailed):
            future.set_exception(WorkerLost(str(lost)))
        else:
            future.set_exception(content)

    def stop(self) -> None:
        for member in self._members:
            member.worker.call("run", stop, self._order[0])
