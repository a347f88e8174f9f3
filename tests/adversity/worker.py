"""A sync in a process of its own with short leases, for tests that stop it with signals. Arguments: a JSON object;
with `stand_still` the process stops itself (SIGSTOP) before it applies its piece of work of that number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from app.src.core.engine import EngineOptions, load_engine
from app.src.parts import EngineEmbedder
from connector import failpoints
from connector.errors import ConnectorError
from connector.hana import ConnectionOptions, HanaPool
from connector.model import ChunkSpec, CollectionSpec, TableRef
from connector.source import HanaSource
from connector.stores.hana import HanaStore
from connector.stores.lease import LeaseTimes
from connector.stores.local import LocalStore
from connector.sync import Ends, SyncOptions, sync


def stand_still(at: int) -> None:
    """No transaction is open then, which would keep others out as long as the process stands still."""
    came_by: list[str] = []

    def stop(name: str) -> None:
        if name == "before_apply":
            came_by.append(name)
            if len(came_by) == at:
                os.kill(os.getpid(), signal.SIGSTOP)

    failpoints.arm(stop)


def main() -> None:
    """Prints the report, or the name of the error and its message."""
    wanted = json.loads(sys.argv[1])
    stand_still(wanted["stand_still"])
    times = LeaseTimes(ttl=1, renew=0.2, poll=0.02)
    spec = CollectionSpec(
        "rows",
        TableRef(wanted["schema"], "ROWS"),
        "{TXT}",
        metadata=("GRP",),
        chunk=ChunkSpec(max_tokens=12, overlap=2),
    )
    with HanaPool(ConnectionOptions(**wanted["login"], encrypt=False)) as pool:
        store = (
            HanaStore(pool, wanted["schema"], lease_times=times)
            if wanted["kind"] == "hana"
            else LocalStore(Path(wanted["folder"]), lease_times=times)
        )
        ends = Ends(HanaSource(pool), store, EngineEmbedder(load_engine(EngineOptions(model="hash:64"))))
        try:
            report = sync(spec, ends, SyncOptions(page_rows=20, window=20, owner="worker", max_deletes=1.0))
            print(json.dumps({"upserted": report.upserted, "unchanged": report.unchanged}))
        except ConnectorError as error:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))


if __name__ == "__main__":
    main()
