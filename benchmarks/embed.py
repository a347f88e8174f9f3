"""How fast is our engine against sentence-transformers at its best batch size, with the same vectors?

    python benchmarks/embed.py [--rounds 5] [--threads 2] [--precision fp32] [--out benchmarks/results/embed.json]

Both embed the same generated SAP-like texts in one process, taking turns; the median of each is compared. The load
average before and after is part of the result: on a machine that does other work the rounds scatter, the result is
marked `disturbed`, and its ratios say nothing.

Expected from published measurements on another CPU (AMD Zen 4): fp32 on two cores 1.75 x on short and 1.85 x on skewed
texts, from computing no padding and from oneDNN's prepacked linear layers with GELU inside; bf16 about 3.1 x where the
CPU has bf16 instructions, ruinous elsewhere. Not a blind prediction: an informal run of the engine on a Zen 5 machine,
about 2.4 x in fp32 and 4 x in bf16, had been seen before this file was written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.core.backends.folder import find_folder  # noqa: E402
from app.src.core.device import detect  # noqa: E402
from app.src.core.engine import EngineOptions, load_engine  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
BATCH_SIZES = (8, 16, 32, 64)
SCATTER = 1.3
"""Largest over smallest ratio of the rounds, above which something else was running."""
NOUNS = [
    *("hydraulic pump", "ball valve", "shaft seal", "roller bearing", "gear box", "oil filter", "pressure sensor"),
    *("hexagon bolt", "gasket", "conveyor belt", "electric motor", "housing", "cable gland", "compressor", "coupling"),
]
REST = [
    *("stainless steel", "DIN 933", "M8x20", "leaks at the flange", "makes noise under load", "was replaced"),
    *("customer complaint", "delivery late", "vibration above limit", "checked by maintenance", "plant 1000"),
    *("order blocked", "temperature rises", "as per drawing", "spare part missing", "next inspection in May"),
    *("cleaned and greased", "see notification", "80 bar", "galvanised", "for the export market", "damaged in transit"),
]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    texts: list[str]
    tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds are medians over the rounds; `ratio` is theirs over ours."""

    workload: str
    texts: int
    tokens: int
    ours_seconds: float
    theirs_seconds: float
    theirs_batch_size: int
    ratio: float
    ratios: list[float]
    disturbed: bool
    ours_tokens_per_second: float
    padding_ratio: float
    least_cosine: float


def sap_like(rng: random.Random, tokens: int) -> str:
    """A material text or notification of about so many tokens (3.6 a phrase)."""
    phrases = [rng.choice(NOUNS), *(rng.choice(REST) for _ in range(max(0, round(tokens / 3.6) - 2)))]
    return f"{', '.join(phrases)} {rng.randrange(10**5)}"


def workloads(count: Callable[[Sequence[str]], list[int]], scale: float) -> list[Workload]:
    """Short texts of 5 to 40 tokens, and skewed ones of 10 to 250."""
    rng = random.Random(11)
    short = [sap_like(rng, min(40, max(5, int(rng.lognormvariate(2.8, 0.5))))) for _ in range(int(800 * scale))]
    skewed = [sap_like(rng, min(250, max(10, int(rng.lognormvariate(4.0, 0.8))))) for _ in range(int(200 * scale))]
    return [Workload(name, texts, sum(count(texts))) for name, texts in (("short", short), ("skewed", skewed))]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_batch_size(encode: Callable[..., Any], texts: list[str]) -> int:
    """The fastest for them, best of two each."""
    times = {size: min(seconds(lambda: encode(texts, batch_size=size)) for _ in range(2)) for size in BATCH_SIZES}  # noqa: B023
    return min(times, key=times.__getitem__)


def compare(engine: Any, peer: Any, workload: Workload, rounds: int) -> Result:
    texts = workload.texts
    size = best_batch_size(peer.encode, texts)
    cosines = np.einsum("ij,ij->i", engine.embed(texts), peer.encode(texts, batch_size=size))
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(seconds(lambda: engine.embed(texts)))
        theirs.append(seconds(lambda: peer.encode(texts, batch_size=size)))
    ratios = [round(their / our, 3) for our, their in zip(ours, theirs, strict=True)]
    our_time, their_time = statistics.median(ours), statistics.median(theirs)
    return Result(
        workload=workload.name,
        texts=len(texts),
        tokens=workload.tokens,
        ours_seconds=round(our_time, 4),
        theirs_seconds=round(their_time, 4),
        theirs_batch_size=size,
        ratio=round(their_time / our_time, 3),
        ratios=ratios,
        disturbed=max(ratios) > SCATTER * min(ratios),
        ours_tokens_per_second=round(workload.tokens / our_time, 1),
        padding_ratio=round(engine.stats().padding_ratio, 4),
        least_cosine=float(cosines.min()),
    )


def machine(threads: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "sentence-transformers", "tokenizers", "numpy")
    profile = detect("cpu")
    return {
        "cpu": profile.name,
        "threads": threads,
        "memory_bytes": profile.memory_bytes,
        "python": platform.python_version(),
        "commit": commit(),
        **{name: version(name) for name in packages},
    }


def commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run(threads: int, precision: str, rounds: int, scale: float) -> dict[str, Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    load_before = os.getloadavg()[0]
    peer = SentenceTransformer(str(find_folder(MODEL)), device="cpu")
    with load_engine(EngineOptions(MODEL, device="cpu", precision=precision, threads=threads)) as engine:
        results = [compare(engine, peer, load, rounds) for load in workloads(engine.count_tokens, scale)]
        how = {"model": MODEL, "precision": engine.precision, "path": engine.path}
    about = machine(threads) | {"load_average": [load_before, os.getloadavg()[0]]}
    return {"machine": about, "ours": how, "results": [asdict(result) for result in results]}


def show(report: dict[str, Any]) -> None:
    about = report["machine"]
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}", end="")
    print(f", sentence-transformers {about['sentence-transformers']}; ours: {report['ours']}")
    for row in report["results"]:
        print(
            f"{row['workload']:<8} {row['texts']:>5} texts {row['tokens']:>7} tokens: {row['ratio']:.2f} x"
            f" sentence-transformers (batch {row['theirs_batch_size']}), {row['ours_tokens_per_second']:.0f} tokens/s,"
            f" least cosine {row['least_cosine']:.7f}, rounds {row['ratios']}{' DISTURBED' if row['disturbed'] else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    report = run(given.threads, given.precision, given.rounds, given.scale)
    show(report)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
