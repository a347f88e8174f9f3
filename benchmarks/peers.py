"""Our engine and our search against every other engine whose environment is there, in one run.

    ./scripts/peers benchmark                                              makes the environments, the first time
    python benchmarks/peers.py [fp32] [auto] [search] [--rounds 5] [--out benchmarks/results/peers.json]

    fp32     against sentence-transformers (>= 1.75 x on short, >= 1.85 x on skewed texts), infinity and ONNX Runtime
    auto     the precision that the probe chooses against the same, OpenVINO (ahead of it) and ONNX Runtime in int8;
             >= 3.1 x sentence-transformers where the probe allows bf16
    search   100,000 vectors of 384 numbers, exactly, against NumPy (<= 0.6 of its time), sqlite-vec, usearch, lancedb
             and faiss

Each peer runs in an environment of its own, at the best of its settings, looked for on the texts that are measured; one
computes at a time. A peer without an environment is left out and named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark import embed, search  # noqa: E402
from app.src.benchmark.harness import (  # noqa: E402  # noqa: E402
    Figure,
    Report,
    Target,
    at_least,
    at_most,
    cores,
    main,
)
from app.src.benchmark.peers import DEFAULT_FOLDER, PeerUnavailable, peer, python_of  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402
from app.src.settings import EmbeddingSettings  # noqa: E402

ANCHOR = "sentence-transformers"
FP32 = (ANCHOR, "infinity", "onnx")
AUTO = (ANCHOR, "openvino", "onnx-int8")
SEARCH = ("numpy", "sqlite-vec", "usearch", "lancedb", "faiss")


def of_fp32(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    targets = {("short", ANCHOR): at_least(1.75, 1.6), ("skewed", ANCHOR): at_least(1.85, 1.6)}
    yield from _embedded(given, report, "fp32", FP32, targets)


def of_auto(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    targets = {(load, "openvino"): at_least(1.0) for load in ("short", "skewed")}
    if given.bf16:
        targets |= {(load, ANCHOR): at_least(3.1, 2.8) for load in ("short", "skewed")}
    yield from _embedded(given, report, "auto", AUTO, targets)


def _embedded(
    given: argparse.Namespace,
    report: Report,
    precision: Literal["fp32", "auto"],
    peers: Sequence[str],
    targets: dict[tuple[str, str], Target],
) -> Iterator[Figure]:
    there = _there(peers, "embed", given.peers, report)
    wanted = EmbeddingSettings(precision=precision, threads=cores())
    with load_engine(EngineOptions(precision=precision, threads=cores(), device="cpu")) as engine:
        options = embed.EmbedOptions(there, given.rounds, given.scale, given.peers, targets)
        found = embed.measure(engine, wanted, options, _say)
        _keep(report, found, precision)
        for figure in found.figures:
            yield replace(figure, name=f"{engine.precision}, {figure.name}")


def of_search(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    there = _there(SEARCH, "search", given.peers, report)
    options = search.SearchOptions(there, given.rounds, given.rows, folder=given.peers, target=at_most(0.6))
    found = search.measure(options, _say)
    _keep(report, found, "search")
    for figure in found.figures:
        yield replace(figure, name=f"search, {figure.name}")


def _keep(report: Report, found: Report, part: str) -> None:
    report.peers |= found.peers
    report.options[part] = found.options
    report.notes += found.notes


def _there(names: Sequence[str], kind: str, folder: Path, report: Report) -> list[str]:
    found = []
    for name in names:
        try:
            python_of(peer(name, "embed" if kind == "embed" else "search"), folder)
            found.append(name)
        except PeerUnavailable as error:
            report.notes.append(f"left out: {error}")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads of texts")
    parser.add_argument("--rows", type=int, default=100_000, help="vectors to search among")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of their environments")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="the CPU has none: no bar for auto")


if __name__ == "__main__":
    main("peers", __doc__ or "", {"fp32": of_fp32, "auto": of_auto, "search": of_search}, add_options)
