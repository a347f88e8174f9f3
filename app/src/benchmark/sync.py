"""Measure the cost of a first sync against embedding the same texts alone: rows in the emulator, a local store."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from app.src.benchmark.harness import Report, Say, interleaved, machine, wall
from app.src.benchmark.processes import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material_text
from app.src.service.wiring import EngineEmbedder
from app.src.settings.model import SyncSettings
from connector.hana.source import HanaSource
from connector.model import CollectionSpec
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync


def measure(embedder: EngineEmbedder, settings: SyncSettings, count: int, rows: int, say: Say) -> Report:
    """Sync `rows` rows into an empty store each round. Raises Unavailable if the emulator does not start."""
    run = SyncOptions(page_rows=settings.page_rows, window=settings.window, readers=settings.readers, owner="benchmark")
    kept = {"page_rows": run.page_rows, "window": run.window, "readers": run.readers}
    about = {"model": embedder.model, "rows": rows, "rounds": count, "source": "the emulator"}
    report = Report("sync", machine(), about | kept)
    texts = [material_text(number) for number in range(rows)]
    last: list[SyncReport] = []
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder:
        say(f"starting the emulator and loading {rows} rows")
        with MaterialsInEmulator(Path(folder)) as emulator:
            spec = CollectionSpec("benchmark", emulator.table(rows), TEMPLATE, metadata=("MTART",))
            source = HanaSource(emulator.pool())

            def whole() -> None:
                with tempfile.TemporaryDirectory(dir=folder) as place, closing(LocalStore(Path(place))) as store:
                    done = sync(spec, Ends(source, store, embedder), run)
                if done.upserted != rows:
                    raise RuntimeError(f"{done.upserted} of {rows} rows were stored")
                last[:] = [done]

            say(f"{count} rounds of the engine alone and a whole sync")
            works = {"engine": wall(lambda: embedder.embed_documents(texts)), "sync": wall(whole)}
            rounds = interleaved(works, count)
    stages = {name: round(seconds, 3) for name, seconds in last[0].stages.items()}
    rate = round(rows / rounds.median("sync"))
    report.figures.append(rounds.ratio("sync / engine alone", "sync", "engine", rows_per_second=rate, stages=stages))
    return report
