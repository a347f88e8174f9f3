"""Embedding speed and agreement of our engine and other engines: the same texts in turns, each peer in a process of its
own at its best setting.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from app.src.benchmark.harness import (
    Figure,
    Report,
    Say,
    Target,
    Work,
    cores,
    interleaved,
    machine,
    ratio_of_last,
    significant,
)
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
from connector.model import Vectors

OURS = "ours"
PAUSE = 0.25  # seconds between turns: thread pools of other engines spin for up to 0.2 s after their work


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """`scale`: of the workloads. `targets`: by workload and peer."""

    peers: Sequence[str] = ("sentence-transformers",)
    rounds: int = 5
    scale: float = 0.5
    folder: Path = DEFAULT_FOLDER
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)


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
    """Return the threads that all engines get."""
    return settings.threads or cores()


def measure(engine: EmbeddingEngine, settings: EmbeddingSettings, options: EmbedOptions, say: Say) -> Report:
    """Measure all peers; `engine` was loaded by `settings` with `threads_of` its threads. A peer that does not start is
    left out with a note (PeerUnavailable when none remains); one that fails later gets a failed figure."""
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
                loaded = process.ask(
                    "load",
                    model=model,
                    device=engine.profile.kind,
                    threads=threads,
                    cache=str(process.cache / engine.weights_sha256[:16]),
                )
                report.peers[name] = process.versions | loaded.get("about", {})
        for load in texts(options.scale):
            report.figures += _Comparison(engine, processes, folder, load).figures(options, report, say)
    return report


class _Comparison:
    """One workload, all engines."""

    def __init__(
        self, engine: EmbeddingEngine, processes: dict[str, PeerProcess], folder: Path, load: Workload
    ) -> None:
        self._engine = engine
        self._processes = processes
        self._folder = folder
        self._load = load
        self._file = folder / f"{load.name}.json"
        self._file.write_text(json.dumps(load.texts), encoding="utf-8")
        self._busy: dict[str, list[float]] = {name: [] for name in (OURS, *processes)}

    def figures(self, options: EmbedOptions, report: Report, say: Say) -> list[Figure]:
        tuned = {}
        for name, process in list(self._processes.items()):
            say(f"{self._load.name}: searching for the best setting of {name}")
            with left_out(report, self._processes, name):
                tuned[name] = process.ask("tune", texts=str(self._file)).get("setting")
        if not tuned:
            return []
        works: dict[str, Work] = {OURS: self._ours} | {name: self._theirs(name) for name in self._processes}
        say(f"{self._load.name}: {options.rounds} rounds of {', '.join(works)}")
        rounds = interleaved(works, options.rounds, pause=PAUSE)
        tokens = sum(self._engine.count_tokens(self._load.texts))
        ours = self._engine.embed(self._load.texts)
        failed = dict(rounds.failed)
        figures = []
        for name in tuned:
            label, target = f"{self._load.name}: {name} / {OURS}", options.targets.get((self._load.name, name))
            theirs = self._vectors(name, failed)
            if theirs is None:
                del self._processes[name]
                figures.append(Figure(label, (), target=target, error=failed[name]))
                continue
            near = agreement(theirs, ours)
            figures.append(
                rounds.ratio(
                    label,
                    name,
                    OURS,
                    target,
                    cpu_ratio=ratio_of_last(self._busy[name], self._busy[OURS], options.rounds),
                    setting=tuned[name],
                    texts=len(self._load.texts),
                    tokens=tokens,
                    tokens_per_second=significant(tokens / rounds.median(OURS)),
                    their_tokens_per_second=significant(tokens / rounds.median(name)),
                    least_cosine=significant(near.least_cosine, 7),
                    mean_cosine=significant(near.mean_cosine, 7),
                    top_10_overlap=significant(near.overlap),
                )
            )
        return figures

    def _ours(self) -> float:
        start, busy = time.perf_counter(), time.process_time()
        self._engine.embed(self._load.texts)
        took = time.perf_counter() - start
        self._busy[OURS].append(time.process_time() - busy)
        return took

    def _theirs(self, name: str) -> Work:
        def run() -> float:
            took = self._processes[name].ask("embed", texts=str(self._file))
            self._busy[name].append(float(took["cpu_seconds"]))
            return float(took["seconds"])

        return in_rounds(run)

    def _vectors(self, name: str, failed: dict[str, str]) -> Vectors | None:
        """Return the peer's vectors, None for a peer that failed."""
        if name in failed:
            return None
        out = self._folder / "vectors.npy"
        try:
            self._processes[name].ask("embed", texts=str(self._file), out=str(out))
        except PeerUnavailable as error:
            failed[name] = str(error)
            return None
        found: Vectors = np.load(out)
        return found
