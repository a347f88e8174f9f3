"""How near does calibrated INT8 come to fp32, how much of the model is in INT8, and what does calibrating cost?

    python benchmarks/calibration.py [PART ...] [--rounds 5] [--texts 1000] [--threads 2]
                                     [--out benchmarks/results/calibration.json]

The packaged model as the ONNX graph of app/src/core/onnx_export, with Q/DQ written by each of its calibrators, on ONNX
Runtime on the CPU. Calibrated on 1,000 texts: half of them paragraphs of the descriptions of the packages that are
installed here, a quarter rows of the demo's tables, a quarter generated SAP-like texts. Judged on others of the same
kinds: 252 held out that decide which layers stay in float, and 1,200 that decide nothing, which the figures are of.

    entropy, minmax, percentile     the whole recipe, by calibrator
    plain                           entropy without smoothing, shifts and far channels, layers left out until it is met

      cosine, worst cosine, overlap   to fp32; shared part of ten nearest texts, the least of the three kinds
      INT8 share                      of the operations of the linear layers
      speed                           ONNX Runtime's seconds in fp32 over those in INT8, in turns: indicative only, for
                                      ONNX Runtime fuses other operators than TensorRT, and a GPU is not a CPU
      calibration                     seconds, with what was measured to choose (told for two cores)
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import distributions
from itertools import chain, islice
from typing import Any

from app.src.benchmark.harness import Figure, Report, at_least, at_most, interleaved, main, wall
from app.src.benchmark.workloads import sap_like_texts
from app.src.core.agreement import agreement
from app.src.core.backends.folder import find_folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.onnx_export.calibrators import Algorithm
from app.src.core.onnx_export.graph import build_graph
from app.src.core.onnx_export.quantise import Recipe, quantise, session, vectors
from app.src.core.tokens import TokenIds
from hana_emulator.sample import all_rows
from hana_emulator.sample.tables import TABLES

MODEL = "all-MiniLM-L6-v2"
JUDGED, HELD_OUT = 400, 84  # of each of the three kinds
SPEED_TEXTS = 200
COSINE, OVERLAP, SHARE, SECONDS = at_least(0.99), at_least(0.90), at_least(0.5), at_most(120)


def descriptions() -> list[str]:
    """Return paragraphs of installed packages' descriptions, shuffled with a fixed seed."""
    found: dict[str, None] = {}
    for package in sorted(distributions(), key=lambda each: str(each.metadata["Name"])):
        about: Any = package.metadata  # an email.message.Message, which its type does not tell
        whole = about.get_payload() or about.get("Description") or ""
        for part in (about.get("Summary") or "", *re.split(r"\n\s*\n", str(whole))):
            text = " ".join(part.split())
            if 40 < len(text) < 800 and sum(char.isalpha() or char == " " for char in text) > 0.8 * len(text):
                found[text] = None
    texts = list(found)
    random.Random(1).shuffle(texts)
    return texts


def demo_rows(count: int) -> list[str]:
    """Return rows of the emulator's sample tables as the demo renders them, numbered to reach `count`."""
    fields = {table.name: list(table.fields) for table in TABLES}
    rows = {
        name: [dict(zip(fields[name], row, strict=True)) for row in found] for name, found in all_rows().tables.items()
    }
    long = {(row["MATNR"], row["SPRAS"]): row["LTEXT"] or "" for row in rows["MATERIAL_TEXT"]}
    found = [f"{row['MAKTX']}. {long.get((row['MATNR'], row['SPRAS']), '')}" for row in rows["MAKT"]]
    found += [f"{row['QMTXT']}. {row['LTEXT'] or ''} (reported {row['QMDAT']})" for row in rows["QMEL"]]
    distinct = list(dict.fromkeys(text.strip() for text in found))
    more = (f"{text} No. {number}" for number in range(1, count) for text in distinct)
    return random.Random(5).sample([*distinct, *islice(more, max(0, count - len(distinct)))], count)


Tokens = Sequence[TokenIds]


@cache
def material(texts: int) -> tuple[Tokens, Tokens, dict[str, Tokens]]:
    """Return texts to calibrate on, held-out texts, and texts to judge by, of each kind."""
    wanted = {"descriptions": texts // 2, "demo": texts // 4, "generated": texts // 4}
    spare = JUDGED + HELD_OUT
    kinds = {
        "descriptions": descriptions(),
        "demo": demo_rows(wanted["demo"] + spare),
        "generated": sap_like_texts(random.Random(3), wanted["generated"] + spare, 2.8, 0.6, (5, 60)),
    }
    tokenizer = RustTokenizer.load(read_folder(find_folder(MODEL), MODEL))
    learnt: list[TokenIds] = []
    held_out: list[TokenIds] = []
    judged: dict[str, Tokens] = {}
    for name, found in kinds.items():
        if len(found) < wanted[name] + spare:
            raise SystemExit(f"{name}: {len(found)} texts here, {wanted[name] + spare} are wanted; give fewer --texts")
        judged[name] = tokenizer.ids(found[:JUDGED])
        held_out += tokenizer.ids(found[JUDGED:spare])
        learnt += tokenizer.ids(found[spare : spare + wanted[name]])
    return learnt, held_out, judged


@cache
def graph() -> Any:
    return build_graph(read_folder(find_folder(MODEL), MODEL))


def calibrated(algorithm: Algorithm, recipe: Recipe) -> Callable[[argparse.Namespace, Report], Iterator[Figure]]:
    def run(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        label = algorithm if recipe.far else f"plain {algorithm}"
        learnt, held_out, judged = material(given.texts)
        start, busy = time.perf_counter(), time.process_time()
        made, found = quantise(graph(), learnt, algorithm, held_out=held_out, recipe=recipe)
        took, busy = time.perf_counter() - start, time.process_time() - busy
        versions(report)
        plain, int8 = session(graph(), given.threads), session(made, given.threads)
        near = {name: agreement(vectors(int8, each), vectors(plain, each)) for name, each in judged.items()}
        kinds: dict[str, Any] = {name: [each.mean_cosine, each.overlap] for name, each in near.items()}
        mean = sum(each.mean_cosine for each in near.values()) / len(near)
        yield Figure(f"{label} cosine", [mean], "", COSINE, more={"by_kind": kinds, "report": found.to_dict()})
        yield Figure(f"{label} worst cosine", [min(each.least_cosine for each in near.values())], "")
        yield Figure(f"{label} overlap", [min(each.overlap for each in near.values())], "", OVERLAP)
        left = {"left in float": list(found.excluded), "held-out target met": found.met}
        yield Figure(f"{label} INT8 share", [found.share], "", SHARE, more=left)
        some = list(chain.from_iterable(each[: SPEED_TEXTS // len(judged)] for each in judged.values()))
        works = {"fp32": wall(lambda: vectors(plain, some)), "int8": wall(lambda: vectors(int8, some))}
        yield interleaved(works, given.rounds).ratio(f"{label} speed", "fp32", "int8")
        kept = {"cpu_seconds": round(busy, 1), "seconds": dict(found.seconds)}
        yield Figure(f"{label} calibration", [took], "s", SECONDS, more=kept)

    return run


def versions(report: Report) -> None:
    import onnx
    import onnxruntime

    report.options |= {"model": MODEL, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


PARTS = {
    "entropy": calibrated("entropy", Recipe()),
    "minmax": calibrated("minmax", Recipe()),
    "percentile": calibrated("percentile", Recipe()),
    "plain": calibrated("entropy", Recipe(alphas=(), shifts=False, far=0)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=1000, help="to calibrate on")
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime, where speed is measured")


if __name__ == "__main__":
    main("calibration", __doc__ or "", PARTS, add_options)
