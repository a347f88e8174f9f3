"""A sync in a process of its own that kills itself at a given event: `python -m tests.e2e.sync_child JSON`.
Events are statements sent to the emulator or run by SQLite, and calls of the embedder; those about leases are left out,
because their number depends on time."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, TableRef
from connector.stores.hana.store import HanaStore
from connector.stores.local import store as local
from connector.stores.state import LeaseTimes
from connector.stores.store import VectorStore
from connector.sync.run import Ends, SyncOptions, sync

TIMES = LeaseTimes(ttl=1, renew=0.3, poll=0.05)
PATIENT = LeaseTimes(ttl=60, renew=5, poll=0.05)
"""For a worker that nobody kills: a busy machine does not cost it its lease."""
OPTIONS = SyncOptions(page_rows=20, window=30, max_deletes=1.0, lease_wait=60)


def spec(schema: str) -> CollectionSpec:
    return CollectionSpec("notes", TableRef(schema, "NOTES"), "{TXT}", metadata=("N",))


@dataclass
class Countdown:
    """Kills this process without warning at event number `left`; never when that is 0."""

    left: int

    def __call__(self, what: str) -> None:
        if "LEASE_" in what.upper() or what.startswith(("BEGIN", "COMMIT")):
            return
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


class CountingEmbedder(EngineEmbedder):
    def __init__(self, event: Callable[[str], None]) -> None:
        super().__init__(load_engine(EngineOptions(model="hash:64")))
        self._event = event

    def embed_counted(self, texts: Any) -> Any:
        self._event("embed")
        return super().embed_counted(texts)


def local_store(folder: Path, event: Callable[[str], None], times: LeaseTimes) -> local.LocalStore:
    whole = local.SCHEMA

    def prepare(connection: Any) -> None:
        whole.prepare(connection)
        connection.set_trace_callback(event)

    local.SCHEMA = replace(whole, prepare=prepare)
    return local.LocalStore(folder, lease_times=times)


def main(wanted: dict[str, Any]) -> None:
    event = Countdown(wanted["kill_at"])
    login = ConnectionOptions(**wanted["login"], encrypt=False)
    with HanaPool(login, on_statement=event) as pool:
        folder, times = wanted["folder"], TIMES if wanted["kill_at"] else PATIENT
        if folder:
            store: VectorStore = local_store(Path(folder), event, times)
        else:
            store = HanaStore(pool, wanted["schema"], lease_times=times)
        report = sync(spec(wanted["schema"]), Ends(HanaSource(pool), store, CountingEmbedder(event)), OPTIONS)
        store.close()
    print(json.dumps(report.as_dict()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
