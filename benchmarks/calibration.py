"""How close does calibrated INT8 come to fp32, how much of the model is in INT8, and what does calibration cost?

    python benchmarks/calibration.py [PART ...] [--rounds 5] [--texts 1000] [--threads 2]
                                     [--out benchmarks/results/calibration.json]

Runs the packaged model as the ONNX graph of app/src/core/onnx_export, with Q/DQ, on ONNX Runtime on the CPU. Calibrates
on 1,000 texts: half are paragraphs from the descriptions of installed packages, a quarter rows of the demo's tables, a
quarter generated SAP-like texts. Measures on 1,200 held-out texts of the same kinds.

    minmax

      cosine, worst cosine, overlap   with fp32; share of the ten nearest texts in common, lowest of the three kinds
      INT8 share                      of the operations of the linear layers
      speed                           ONNX Runtime's seconds in fp32 over those in INT8, in turns: indicative only,
                                      because this is a CPU, and TensorRT fuses other operators
      calibration                     seconds; the goal is for two cores
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distributions
from itertools import chain, islice
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Report, interleaved, wall
from app.src.benchmark.workloads import sap_like_texts
from app.src.core.agreement import LEAST_COSINE, LEAST_OVERLAP, agreement
from app.src.core.backends.folder import Folder, find_folder, read_folder
from app.src.core.backends.onnx import make_session
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.onnx_export.graph import ATTENTION_MASK, INPUT_IDS, OUTPUT, build_graph
from app.src.core.onnx_export.quantise import quantise
from app.src.core.tokens import TokenBatch, plan_batches, rectangle
from benchmarks.program import at_least, at_most, main
from hana_emulator.sample import all_rows
from hana_emulator.sample.tables import TABLES

MODEL = "all-MiniLM-L6-v2"
CPU = ("CPUExecutionProvider", dict[str, str]())
JUDGED = 400  # held-out texts of each of the three kinds
SPEED_TEXTS = 200
COSINE, OVERLAP, SHARE, SECONDS = at_least(LEAST_COSINE), at_least(LEAST_OVERLAP), at_least(0.5), at_most(120)


@cache
def folder() -> Folder:
    return read_folder(find_folder(MODEL), MODEL)


@cache
def material(texts: int) -> tuple[list[str], dict[str, list[str]]]:
    """Return the calibration texts, and the held-out texts by kind: paragraphs from the descriptions of installed
    packages, rows of the emulator's sample tables as the demo renders them, and generated texts."""
    wanted = {"descriptions": texts // 2, "demo": texts // 4, "generated": texts // 4}
    described: dict[str, None] = {}
    for package in sorted(distributions(), key=lambda each: str(each.metadata["Name"])):
        about: Any = package.metadata  # an email.message.Message, but typed differently
        whole = about.get_payload() or about.get("Description") or ""
        for part in (about.get("Summary") or "", *re.split(r"\n\s*\n", str(whole))):
            text = " ".join(part.split())
            if 40 < len(text) < 800 and sum(char.isalpha() or char == " " for char in text) > 0.8 * len(text):
                described[text] = None
    paragraphs = list(described)
    random.Random(1).shuffle(paragraphs)
    fields = {table.name: list(table.fields) for table in TABLES}
    rows = {
        name: [dict(zip(fields[name], row, strict=True)) for row in found] for name, found in all_rows().tables.items()
    }
    long = {(row["MATNR"], row["SPRAS"]): row["LTEXT"] or "" for row in rows["MATERIAL_TEXT"]}
    found = [f"{row['MAKTX']}. {long.get((row['MATNR'], row['SPRAS']), '')}" for row in rows["MAKT"]]
    found += [f"{row['QMTXT']}. {row['LTEXT'] or ''} (reported {row['QMDAT']})" for row in rows["QMEL"]]
    distinct, count = list(dict.fromkeys(text.strip() for text in found)), wanted["demo"] + JUDGED
    numbered = (f"{text} No. {number}" for number in range(1, count) for text in distinct)
    kinds = {
        "descriptions": paragraphs,
        "demo": random.Random(5).sample([*distinct, *islice(numbered, max(0, count - len(distinct)))], count),
        "generated": sap_like_texts(random.Random(3), wanted["generated"] + JUDGED, 2.8, 0.6, (5, 60)),
    }
    for name, some in kinds.items():
        if len(some) < wanted[name] + JUDGED:
            raise SystemExit(f"{name}: {len(some)} texts found, {wanted[name] + JUDGED} required; reduce --texts")
    chosen = [text for name, some in kinds.items() for text in some[JUDGED : JUDGED + wanted[name]]]
    return chosen, {name: some[:JUDGED] for name, some in kinds.items()}


def vectors(session: Any, texts: Sequence[str]) -> Any:
    batch = RustTokenizer.load(folder()).ids(texts)
    return _computed(session, batch)


def _computed(session: Any, tokens: TokenBatch) -> Any:
    made = np.empty((len(tokens), 384), np.float32)
    for batch in plan_batches(tokens.lengths.tolist(), 1024, 1):
        some = tokens.select(batch)
        ids, mask = rectangle(some, width=int(some.lengths.max()), pad_id=0)
        made[batch] = session.run([OUTPUT], {INPUT_IDS: ids, ATTENTION_MASK: mask})[0]
    return made


def minmax(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    chosen, judged = material(given.texts)
    start, busy = time.perf_counter(), time.process_time()
    made, found = quantise(folder(), chosen)
    took, busy = time.perf_counter() - start, time.process_time() - busy
    versions(report)
    graphs = build_graph(folder()), made
    plain, int8 = (make_session(each.SerializeToString(), [CPU], given.threads) for each in graphs)
    near = {name: agreement(vectors(int8, each), vectors(plain, each)) for name, each in judged.items()}
    kinds: dict[str, Any] = {name: [each[0], each[2]] for name, each in near.items()}
    mean = sum(each[0] for each in near.values()) / len(near)
    yield Figure("minmax cosine", [mean], "", COSINE, more={"by_kind": kinds, "report": dict(found)})
    yield Figure("minmax worst cosine", [min(each[1] for each in near.values())], "")
    yield Figure("minmax overlap", [min(each[2] for each in near.values())], "", OVERLAP)
    yield Figure("minmax INT8 share", [found["int8_share"]], "", SHARE)
    some = RustTokenizer.load(folder()).ids(
        list(chain.from_iterable(each[: SPEED_TEXTS // len(judged)] for each in judged.values()))
    )
    works = {"fp32": wall(lambda: _computed(plain, some)), "int8": wall(lambda: _computed(int8, some))}
    yield interleaved(works, given.rounds).ratio("minmax speed", "fp32", "int8")
    yield Figure("minmax calibration", [took], "s", SECONDS, more={"cpu_seconds": round(busy, 1)})


def versions(report: Report) -> None:
    import onnx
    import onnxruntime

    report.options |= {"model": MODEL, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=1000, help="number of texts to calibrate on")
    parser.add_argument("--threads", type=int, default=2, help="ONNX Runtime's threads for the speed part")


if __name__ == "__main__":
    main("calibration", __doc__ or "", {"minmax": minmax}, add_options)
