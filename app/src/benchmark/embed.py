"""How fast does our engine embed against other engines, with which agreement? The same texts, in turns; each peer in a
process of its own, at its best setting.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.src.benchmark.environments import DEFAULT_FOLDER, PeerUnavailable, peer, python_of
from app.src.benchmark.machine import cores, machine
from app.src.benchmark.peers import PeerProcess, in_rounds, left_out
from app.src.benchmark.report import Report
from app.src.benchmark.side_by_side import Figure, Rounds, Target, Work, interleaved, significant
from app.src.benchmark.workloads import Workload, overlap, texts
from app.src.core.backends.folder import find_folder
from app.src.core.engine import EmbeddingEngine
from app.src.settings import EmbeddingSettings
from connector.model import Vectors

OURS = "ours"
PAUSE = 0.25
"""Seconds between turns: thread pools of other engines spin for up to 0.2 s after their work."""
_NEIGHBOURS = 10
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """`scale`: of the workloads. `targets`: by workload and peer, for programs that have bars."""

    peers: Sequence[str] = ("sentence-transformers",)
    rounds: int = 5
    scale: float = 0.5
    folder: Path = DEFAULT_FOLDER
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)


def check(wanted: EmbeddingSettings, options: EmbedOptions) -> None:
    """Before a model is loaded. Raises PeerUnavailable."""
    for name in options.peers:
        found = peer(name, "embed")
        python_of(found, options.folder)
        if wanted.hashing and found.environment is not None:
            raise PeerUnavailable(
                f'"{wanted.model}" is the test embedder, which {name} cannot load: set [embedding] model to a real one'
            )


def threads_of(wanted: EmbeddingSettings) -> int:
    """That both sides get."""
    return wanted.threads or cores()


def measure(engine: EmbeddingEngine, wanted: EmbeddingSettings, options: EmbedOptions, say: Say) -> Report:
    """`wanted`: what `engine` was loaded by, with `threads_of` its threads. A peer that does not start is left out and
    noted; raises PeerUnavailable when none is left. One that fails later gets a figure that says so."""
    report = Report("embed", machine(), _options(engine, wanted, options))
    peers = [peer(name, "embed") for name in dict.fromkeys(options.peers)]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-")))
        processes = {each.name: PeerProcess(each, options.folder) for each in peers}  # all there, before one is started
        for name, process in list(processes.items()):
            say(f"starting {name}")
            with left_out(report, processes, name):
                held.enter_context(process)
                loaded = process.ask("load", **_wish(engine, wanted, process))
                report.peers[name] = process.versions | loaded.get("about", {})
        for load in texts(options.scale):
            report.figures += _Comparison(engine, processes, folder, load).figures(options, report, say)
    return report


def _options(engine: EmbeddingEngine, wanted: EmbeddingSettings, options: EmbedOptions) -> dict[str, Any]:
    ours = {"model": engine.model, "precision": engine.precision, "path": engine.path, "device": engine.profile.name}
    return ours | {"threads": threads_of(wanted), "rounds": options.rounds, "scale": options.scale}


def _wish(engine: EmbeddingEngine, wanted: EmbeddingSettings, process: PeerProcess) -> dict[str, Any]:
    model = wanted.model if wanted.hashing else str(find_folder(wanted.model, wanted.revision))
    return {
        "model": model,
        "device": engine.profile.kind,
        "threads": threads_of(wanted),
        "cache": str(process.cache / engine.weights_sha256[:16]),
        "how": dict(process.peer.how),
    }


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
            say(f"{self._load.name}: looking for the best setting of {name}")
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
        theirs = {name: found for name in tuned if (found := self._vectors(name, failed)) is not None}
        figures = []
        for name in tuned:
            label, target = f"{self._load.name}: {name} / {OURS}", options.targets.get((self._load.name, name))
            if name in failed:
                del self._processes[name]
                figures.append(Figure(label, (), target=target, error=failed[name]))
                continue
            figures.append(
                rounds.ratio(
                    label,
                    name,
                    OURS,
                    target,
                    cpu_ratio=self._cpu_ratio(name, options.rounds),
                    setting=tuned[name],
                    texts=len(self._load.texts),
                    tokens=tokens,
                    tokens_per_second=_rate(tokens, rounds, OURS),
                    their_tokens_per_second=_rate(tokens, rounds, name),
                    **agreement(ours, theirs[name]),
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

    def _cpu_ratio(self, name: str, rounds: int) -> float:
        """As the ratio, of CPU seconds: what is left of it where others compute on the same machine."""
        theirs, ours = self._busy[name][-rounds:], self._busy[OURS][-rounds:]
        return significant(float(np.median(np.array(theirs) / np.maximum(ours, 1e-9))))

    def _vectors(self, name: str, failed: dict[str, str]) -> Vectors | None:
        """None for one that failed, before or now."""
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


def _rate(tokens: int, rounds: Rounds, name: str) -> float:
    return significant(tokens / rounds.median(name))


def agreement(ours: Vectors, theirs: Vectors) -> dict[str, float]:
    """Least and mean cosine of vector and vector, and how many of the ten nearest others both name."""
    cosines = np.einsum("ij,ij->i", ours, theirs, dtype=np.float64)
    k = min(_NEIGHBOURS, len(ours) - 1)
    same = 1.0 if k < 1 else overlap(_nearest(theirs, k), _nearest(ours, k))
    return {
        "least_cosine": significant(float(cosines.min()), 7),
        "mean_cosine": significant(float(cosines.mean()), 7),
        "top_10_overlap": significant(same),
    }


def _nearest(vectors: Vectors, k: int) -> Any:
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    return np.argpartition(scores, -k, axis=1)[:, -k:]
