"""What is killed: one sync in a process of its own, forked from a server that has imported everything and connected to
nothing, so that hundreds can be killed in a minute.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hdbcli import dbapi  # noqa: F401 - imported before the fork, as slow as it is

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector import failpoints
from connector.errors import ConnectorError, TextsNotEmbeddable
from connector.hana.connection import HanaPool
from connector.hana.source import HanaSource
from connector.model import Vectors
from connector.sync.run import Ends, SyncOptions, sync
from tests.forked import processes
from tests.native import embedder_of
from tests.proof.ground import PAGE, POISON, Plan

PATIENCE = 60.0


class Choosy(EngineEmbedder):
    """Refuses every text with the word in it."""

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        bad = [place for place, text in enumerate(texts) if POISON in text]
        if bad:
            raise TextsNotEmbeddable("planted", indices=bad)
        return super().embed_counted(texts)


def embedder() -> Choosy:
    return Choosy(load_engine(EngineOptions(model="hash:16")))


def embedder_for(plan: Plan, pool: HanaPool) -> EngineEmbedder:
    """HANA's model refuses the same texts (`tests/hana_models.py`)."""
    return embedder_of(pool) if plan.kind == "native" else embedder()


@dataclass(frozen=True)
class Order:
    """One run. `failpoint`: where it ends itself."""

    plan: Plan
    full: bool = False
    failpoint: str = ""
    port: int = 0
    """Of a line that may fail, in place of the emulator's own."""


def main(order: Order, answer: str) -> None:
    """Writes the report, or the error, into the file `answer`."""
    if order.failpoint:
        failpoints.arm(failpoints.hook(order.failpoint))
    with order.plan.pool(order.port) as pool, closing(order.plan.store(pool)) as store:
        options = SyncOptions(
            page_rows=PAGE, window=PAGE, lease_wait=30, max_deletes=1.0, full=order.full, owner=f"worker {os.getpid()}"
        )
        try:
            ends = Ends(HanaSource(pool), store, embedder_for(order.plan, pool))
            report: dict[str, Any] = sync(order.plan.spec, ends, options).as_dict()
        except ConnectorError as error:
            report = {"error": type(error).__name__, "message": str(error)}
    Path(answer).write_text(json.dumps(report), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # what other threads hold is given back by the system, and nothing is waited for


class Worker:
    """A run under way."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._answer = folder / f"answer-{time.monotonic_ns()}.json"
        self._process: ForkServerProcess = processes.Process(target=main, args=(order, str(self._answer)), daemon=True)
        self._process.start()

    @property
    def owner(self) -> str:
        """As it signs its lease."""
        return f"worker {self._process.pid}"

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stopped(self, seconds: float = PATIENCE) -> bool:
        """Whether it has stopped itself; False when it came to its end instead."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.join(0.01)
            if self._process.exitcode is not None:
                return False
            if _state(self._process.pid) == "T":
                return True
        raise AssertionError(f"it neither stopped nor ended within {seconds} s")

    def wait(self, seconds: float = PATIENCE) -> dict[str, Any] | None:
        """The report; None when it was killed."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        assert code is not None, f"it did not end within {seconds} s"
        assert code in (0, -signal.SIGKILL), f"it ended with {code}"
        if code != 0 or not self._answer.exists():
            return None
        report: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
        self._answer.unlink()
        return report

    def kill_after(self, seconds: float) -> dict[str, Any] | None:
        """SIGKILL, unless it ends before."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
        return self.wait()


def _state(pid: int | None) -> str:
    """As ps shows it: R, S, T ..."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
