"""The harness of all benchmarks: interleaved measurements, figures with targets and verdicts, the machine, and a
report.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.src.core.device import detect
from connector.errors import ConfigurationError
from connector.processors import processors

SCATTER = 1.3  # allowed ratio of the largest to the smallest round; above it, other work disturbed the figure
ROOT = Path(__file__).resolve().parents[3]  # the top of the checkout, or the folder of the installed packages
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_PACKAGES = ("numpy", "torch", "transformers", "sentence-transformers", "tokenizers", "hdbcli")

# One round: returns its cost, usually seconds; or seconds and CPU seconds.
Work = Callable[[], float | tuple[float, float]]
Say = Callable[[str], None]
Target = tuple[Literal[">=", "<="], float]


class PeerUnavailable(ConfigurationError):
    """A peer or server to compare with is unknown, is not installed, or fails."""


def wall(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs `work` and returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def significant(number: float, digits: int = 4) -> float:
    return float(f"{number:.{digits}g}")


def percentiles(values: Sequence[float], *shares: int) -> dict[str, float]:
    """Return {"p50": ..., "p95": ...} of the values; 0 for no values."""
    return {f"p{share}": significant(float(np.percentile(values, share))) if values else 0.0 for share in shares}


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of rounds. `unit`: "x" for a ratio. `scatter`: replaces SCATTER for figures that vary by nature.
    `more`: further JSON keys. `error`: why rounds are missing."""

    name: str
    rounds: Sequence[float]
    unit: str = "x"
    target: Target | None = None
    scatter: float = SCATTER
    more: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def median(self) -> float:
        """Return the median; NaN for a failed figure."""
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def disturbed(self) -> bool:
        """Return whether the rounds vary so much that other work must have run."""
        return bool(self.rounds) and max(self.rounds) > self.scatter * min(self.rounds)

    @property
    def verdict(self) -> Literal["met", "missed", "failed"] | None:
        """Return None without a goal, and for a disturbed figure that would have met it."""
        if self.error is not None:
            return "failed"
        if self.target is None:
            return None
        sign, goal = self.target
        if not (self.median >= goal if sign == ">=" else self.median <= goal):
            return "missed"
        return None if self.disturbed else "met"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "median": significant(self.median) if self.rounds else None,
            "unit": self.unit,
            "rounds": [significant(one) for one in self.rounds],
            "disturbed": self.disturbed,
            "target": None if self.target is None else f"{self.target[0]} {self.target[1]:g}",
            "verdict": self.verdict,
            **({} if self.error is None else {"error": self.error}),
            **self.more,
        }


# -------------------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True, slots=True)
class Rounds:
    """The results of each work by round, and the CPU seconds of works that return them."""

    took: Mapping[str, Sequence[float]]
    busy: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.took[name])

    def ratio(self, name: str, over: str, under: str, target: Target | None = None, **more: Any) -> Figure:
        """Divide `over` by `under` round by round, because the two ran next to each other. Keeps both medians, and the
        ratio of CPU seconds if known."""
        kept = {f"{work} seconds": significant(self.median(work)) for work in (over, under)}
        if over in self.busy and under in self.busy:
            shares = np.array(self.busy[over]) / np.maximum(self.busy[under], 1e-9)
            kept["cpu_ratio"] = significant(float(np.median(shares)))
        ratios = [above / below for above, below in zip(self.took[over], self.took[under], strict=True)]
        return Figure(name, ratios, target=target, more={**kept, **more})


def interleaved(works: Mapping[str, Work], rounds: int, *, pause: float = 0.0) -> Rounds:
    """Run every work once per round, reversing the order every second round to cancel order effects.

    The first round warms up and does not count. `pause`: seconds before each work, in which thread pools stop spinning.
    Collects garbage between works.
    """
    if rounds < 1:
        raise ValueError("rounds must be at least 1")
    took: dict[str, list[float]] = {name: [] for name in works}
    busy: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name in list(works) if turn % 2 else list(works)[::-1]:
            gc.collect()
            time.sleep(pause)
            result = works[name]()
            seconds, *cpu = result if isinstance(result, tuple) else (result,)
            if turn > 0:
                took[name].append(seconds)
                busy.setdefault(name, []).extend(cpu)
    return Rounds(took, {name: seconds for name, seconds in busy.items() if seconds})


# ------------------------------------------------------------------------------------------------------------- machine


def machine(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """Return a description of the machine, the commit, and the installed versions of `packages`. `instructions`: those
    of the CPU that matter for embedding (Linux)."""
    profile = detect("cpu")
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if sys.platform == "linux" else ()
    about: dict[str, Any] = {
        "cpu": profile.name,
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "cores": processors(),
        "memory_bytes": profile.memory_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit(),
    }
    for name in ("owl-sap-connector", *packages):
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            continue
    return about


def commit(root: Path = ROOT) -> str | None:
    """Return the commit of this checkout, with "+" if tracked files were changed; None if `root` is not the top of a
    checkout."""
    if not (root / ".git").exists():
        return None
    git = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        done = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True, timeout=10)  # nosec B607
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# -------------------------------------------------------------------------------------------------------------- report


@dataclass(slots=True)
class Report:
    """The figures of a benchmark, collected while it runs. `options`: how it ran. `peers`: versions of other engines.
    `details`: the data behind the figures."""

    benchmark: str
    machine: dict[str, Any] = field(default_factory=machine)
    options: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def disturbed(self) -> bool:
        return any(figure.disturbed for figure in self.figures)

    def as_dict(self) -> dict[str, Any]:
        loads = self.load_before, os.getloadavg()[0]
        return {
            "benchmark": self.benchmark,
            "machine": self.machine | {"load_average": [round(load, 2) for load in loads]},
            "options": self.options,
            "peers": self.peers,
            "figures": [figure.as_dict() for figure in self.figures],
            "notes": self.notes,
            **({"details": self.details} if self.details else {}),
        }
