"""The service that `serve` puts under load: the user's model and limits over an empty store, without collections, jobs
and schedules. `python -m app.src.benchmark.served FOLDER [CONFIG]`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from app.src.api import server
from app.src.service.service import Service
from app.src.settings import Settings, StateSettings, StoreSettings, load


def isolated(wanted: Settings, folder: Path) -> Settings:
    """Return settings that neither read, write nor start anything of the user's."""
    return Settings(
        embedding=wanted.embedding,
        api=wanted.api.model_copy(update={"run_schedules": False, "job_workers": 0}),
        store=StoreSettings(kind="local", path=folder / "store"),
        state=StateSettings(path=folder / "state"),
    )


def main(folder: Path, config: Path | None) -> None:
    service = Service(isolated(load(config).settings, folder))
    try:
        server.serve(service, "127.0.0.1", 0, lambda url: print(json.dumps({"url": url}), flush=True))  # noqa: T201
    finally:
        service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
