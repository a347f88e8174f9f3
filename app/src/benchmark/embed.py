"""Compare embedding speed and results of our engine and other engines: the same texts in alternating rounds, each peer
in its own process at its best setting.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Report, Say, Work, cores, interleaved, machine, ratio_of_last, significant
from app.src.benchmark.peers import (
    DEFAULT_FOLDER,
    PeerProcess,
    PeerUnavailable,
    in_rounds,
    left_out,
    peer,
    python_of,
)
from app.src.benchmark.workloads import Workload, texts
from app.src.core.agreement import agreement
from app.src.core.backends.folder import find_folder
from app.src.core.engine import EmbeddingEngine
from app.src.settings import EmbeddingSettings

OURS = "ours"
PAUSE = 0.25  # seconds between turns: thread pools of other engines spin for up to 0.2 s after their work


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """`scale`: of the workloads."""

    peers: Sequence[str] = ("sentence-transformers",)
    rounds: int = 5
    scale: float = 0.5
    folder: Path = DEFAULT_FOLDER


def check(settings: EmbeddingSettings, options: EmbedOptions) -> None:
    """Check the peers before a model is loaded. Raises PeerUnavailable."""
    for name in options.peers:
        found = peer(name, "embed")
        python_of(found, options.folder)
        if settings.hashing and found.environment is not None:
            raise PeerUnavailable(
                f'"{settings.model}" is the test embedder, which {name} cannot load: set [embedding] model to a real '
                "one"
            )


def threads_of(settings: EmbeddingSettings) -> int:
    """Return the number of threads for all engines."""
    return settings.threads or cores()


def measure(engine: EmbeddingEngine, settings: EmbeddingSettings, options: EmbedOptions, say: Say) -> Report:
    """Measure all peers. `engine` must have been loaded from `settings` with `threads_of` threads. A peer that does not
    start is skipped with a note (PeerUnavailable if none remains); one that fails later gets a failed figure."""
    threads = threads_of(settings)
    ours = {"model": engine.model, "precision": engine.precision, "path": engine.path, "device": engine.profile.name}
    about = {"threads": threads, "rounds": options.rounds, "scale": options.scale}
    report = Report("embed", machine(), ours | about)
    model = settings.model if settings.hashing else str(find_folder(settings.model, settings.revision))
    peers = [peer(name, "embed") for name in dict.fromkeys(options.peers)]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-")))
        processes = {each.name: PeerProcess(each, options.folder) for each in peers}  # raises before one is started
        for name, process in list(processes.items()):
            say(f"starting {name}")
            with left_out(report, processes, name):
                held.enter_context(process)
                cache = str(process.cache / engine.weights_sha256[:16])
                loaded = process.ask("load", model=model, device=engine.profile.kind, threads=threads, cache=cache)
                report.peers[name] = process.versions | loaded.get("about", {})
        for load in texts(options.scale):
            file = folder / f"{load.name}.json"
            file.write_text(json.dumps(load.texts), encoding="utf-8")
            tuned = {}
            for name, process in list(processes.items()):
                say(f"{load.name}: searching for the best setting of {name}")
                with left_out(report, processes, name):
                    tuned[name] = process.ask("tune", texts=str(file)).get("setting")
            if tuned:
                say(f"{load.name}: {options.rounds} rounds of {', '.join((OURS, *processes))}")
                report.figures += _compared(engine, processes, (load, file), tuned, options.rounds)
    return report


def _compared(
    engine: EmbeddingEngine,
    processes: dict[str, PeerProcess],
    workload: tuple[Workload, Path],
    tuned: dict[str, Any],
    count: int,
) -> list[Figure]:
    """Measure one workload in rounds. Removes a failing peer from `processes`."""
    load, file = workload
    busy: dict[str, list[float]] = {name: [] for name in (OURS, *processes)}

    def ours() -> float:
        start, before = time.perf_counter(), time.process_time()
        engine.embed(load.texts)
        took = time.perf_counter() - start
        busy[OURS].append(time.process_time() - before)
        return took

    def theirs(name: str) -> float:
        took = processes[name].ask("embed", texts=str(file))
        busy[name].append(float(took["cpu_seconds"]))
        return float(took["seconds"])

    works: dict[str, Work] = {OURS: ours}
    works |= {name: in_rounds(lambda name=name: theirs(name)) for name in processes}  # type: ignore[misc]
    rounds = interleaved(works, count, pause=PAUSE)
    failed = dict(rounds.failed)
    tokens, vectors = sum(engine.count_tokens(load.texts)), engine.embed(load.texts)
    figures = []
    for name in tuned:
        label, out = f"{load.name}: {name} / {OURS}", file.with_suffix(".npy")
        if name not in failed:
            try:
                processes[name].ask("embed", texts=str(file), out=str(out))
            except PeerUnavailable as error:
                failed[name] = str(error)
        if name in failed:
            del processes[name]
            figures.append(Figure(label, (), error=failed[name]))
            continue
        near = agreement(np.load(out), vectors)
        figures.append(
            rounds.ratio(
                label,
                name,
                OURS,
                cpu_ratio=ratio_of_last(busy[name], busy[OURS], count),
                setting=tuned[name],
                texts=len(load.texts),
                tokens=tokens,
                tokens_per_second=significant(tokens / rounds.median(OURS)),
                their_tokens_per_second=significant(tokens / rounds.median(name)),
                least_cosine=significant(near.least_cosine, 7),
                mean_cosine=significant(near.mean_cosine, 7),
                top_10_overlap=significant(near.overlap),
            )
        )
    return figures
