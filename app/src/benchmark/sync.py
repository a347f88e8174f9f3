"""The cost of a first sync, compared with embedding the same texts alone: rows in the emulator, a local store."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from app.src.benchmark.harness import Report, Say, Target, interleaved, machine, wall
from app.src.benchmark.processes import TEMPLATE, MaterialsInEmulator
from app.src.benchmark.workloads import material_text
from app.src.service.wiring import EngineEmbedder
from app.src.settings import SyncSettings
from connector.hana.source import HanaSource
from connector.model import CollectionSpec
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, SyncReport, sync


@dataclass(frozen=True, slots=True)
class SyncBenchmark:
    rounds: int = 3
    rows: int = 2_000
    target: Target | None = None


def measure(embedder: EngineEmbedder, settings: SyncSettings, options: SyncBenchmark, say: Say) -> Report:
    """Sync into an empty store each round. Raises Unavailable when the emulator does not start."""
    run = SyncOptions(page_rows=settings.page_rows, window=settings.window, readers=settings.readers, owner="benchmark")
    kept = {"page_rows": run.page_rows, "window": run.window, "readers": run.readers}
    about = {"model": embedder.model, "rows": options.rows, "rounds": options.rounds, "source": "the emulator"}
    report = Report("sync", machine(), about | kept)
    texts = [material_text(number) for number in range(options.rows)]
    last: list[SyncReport] = []
    with tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-") as folder:
        say(f"starting the emulator and loading {options.rows} rows")
        with MaterialsInEmulator(Path(folder)) as emulator:
            spec = CollectionSpec("benchmark", emulator.table(options.rows), TEMPLATE, metadata=("MTART",))
            source = HanaSource(emulator.pool())

            def whole() -> None:
                with tempfile.TemporaryDirectory(dir=folder) as place, closing(LocalStore(Path(place))) as store:
                    done = sync(spec, Ends(source, store, embedder), run)
                if done.upserted != options.rows:
                    raise RuntimeError(f"{done.upserted} of {options.rows} rows were stored")
                last[:] = [done]

            say(f"{options.rounds} rounds of the engine alone and a whole sync")
            works = {"engine": wall(lambda: embedder.embed_documents(texts)), "sync": wall(whole)}
            rounds = interleaved(works, options.rounds)
    stages = {name: round(seconds, 3) for name, seconds in last[0].stages.items()}
    rate = round(options.rows / rounds.median("sync"))
    report.figures.append(
        rounds.ratio("sync / engine alone", "sync", "engine", options.target, rows_per_second=rate, stages=stages)
    )
    return report
