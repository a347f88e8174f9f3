"""How fast is our engine against sentence-transformers at its best, with the same vectors; how near is it to what the
processor can do; and does its memory stay where it is?

    python benchmarks/embed.py [PART ...] [--rounds 5] [--threads 2] [--out benchmarks/results/embed.json]

The baseline is sentence-transformers on torch in fp32 (on a GPU in fp16), at the best of its batch sizes for these very
texts, in this process, on as many threads, and on the same thread as our engine, which spares both the cost of a second
team of OpenMP; everything takes turns within each round, and ratios are of one round. --cpu-seconds with --threads 1
gives ratios that say something while other programs compute.

    short, skewed   generated SAP-like texts of 5 to 40 and of 10 to 250 tokens
    demo            2,000 rows of the demo's tables, rendered
      fp32 / auto / int8       sentence-transformers' seconds over ours; int8 only where the engine takes it
      of floor                 share of the rate of bare products (oneDNN, prepacked, this precision) just measured
      cosine, overlap          least cosine with sentence-transformers' fp32 vectors; shared part of ten nearest texts
    memory          MB of resident memory after 50,000 embedded rows above those after 1,000
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import (  # noqa: E402  # noqa: E402
    Figure,
    Part,
    Report,
    Rounds,
    Target,
    at_least,
    at_most,
    cpu,
    interleaved,
    main,
    wall,
)
from app.src.benchmark.processes import resident_bytes  # noqa: E402
from app.src.benchmark.workloads import Workload, sap_like_texts, texts  # noqa: E402
from app.src.core.agreement import agreement  # noqa: E402
from app.src.core.backends import DeviceUnavailable  # noqa: E402
from app.src.core.backends.folder import find_folder  # noqa: E402
from app.src.core.backends.torch.process import on_compute_thread  # noqa: E402
from app.src.core.engine import EmbeddingEngine  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
BATCH_SIZES = {"cpu": (8, 16, 32, 64), "cuda": (32, 64, 128, 256)}
PRECISIONS = ("fp32", "auto", "int8")
PEER = "sentence-transformers"
DEMO_ROWS = 2000
FEW, MANY, CALL = 1000, 50_000, 1000  # rows after which memory is read, and rows of a call: a sync's window
GEMM_TOKENS, GEMM_TIMES = 1024, 12

SPEED = {
    ("short", "fp32"): at_least(1.75, floor=1.6),
    ("skewed", "fp32"): at_least(1.85, floor=1.6),
    ("short", "bf16"): at_least(3.1, floor=2.8),
    ("skewed", "bf16"): at_least(3.1, floor=2.8),
    ("short", "int8"): at_least(4.5),
    ("skewed", "int8"): at_least(4.5),
}
COSINE: dict[str, Target] = {"fp32": at_least(0.99999)}
OVERLAP = {"bf16": at_least(0.985), "int8": at_least(0.92)}
MEMORY = at_most(100)


# ------------------------------------------------------------------------------------------------------ who takes part


@cache
def engine(precision: str, device: str, threads: int) -> EmbeddingEngine | None:
    """Return the engine, None for a precision that this machine lacks."""
    try:
        return load_engine(EngineOptions(MODEL, device=device, precision=precision, threads=threads))
    except DeviceUnavailable:
        return None


@cache
def peer(device: str) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    dtype = torch.float16 if device.startswith("cuda") else torch.float32
    return SentenceTransformer(str(find_folder(MODEL)), device=device, model_kwargs={"dtype": dtype})


def best_batch_size(encode: Callable[..., Any], load: Workload, sizes: Sequence[int]) -> int:
    """Return the fastest size, by the better of two runs each."""

    def took(size: int) -> float:
        return min(wall(lambda: on_compute_thread(lambda: encode(load.texts, batch_size=size)))() for _ in range(2))

    return min(sizes, key=took)


def demo_rows(count: int = DEMO_ROWS) -> Workload:
    """Return rows of the emulator's sample tables as the demo renders them, numbered to reach `count`."""
    from hana_emulator.sample import all_rows
    from hana_emulator.sample.tables import TABLES

    fields = {table.name: list(table.fields) for table in TABLES}
    rows = {
        name: [dict(zip(fields[name], row, strict=True)) for row in found] for name, found in all_rows().tables.items()
    }
    long = {(row["MATNR"], row["SPRAS"]): row["LTEXT"] or "" for row in rows["MATERIAL_TEXT"]}
    found = [f"{row['MAKTX']}. {long.get((row['MATNR'], row['SPRAS']), '')}" for row in rows["MAKT"]]
    found += [f"{row['QMTXT']}. {row['LTEXT'] or ''} (reported {row['QMDAT']})" for row in rows["QMEL"]]
    distinct = list(dict.fromkeys(text.strip() for text in found))
    more = (f"{text} No. {number}" for number in range(1, count) for text in distinct)
    whole = [*distinct, *islice(more, max(0, count - len(distinct)))]
    return Workload("demo", random.Random(5).sample(whole, count))


# --------------------------------------------------------------------------------------------------- what is possible


class Floor:
    """The products of one layer of the model over a batch, prepacked, in one precision, with nothing around them."""

    def __init__(self, dtype: Any) -> None:
        import torch

        from app.src.core.backends.torch.linears import Affine, prepacked

        config = json.loads((find_folder(MODEL) / "config.json").read_text(encoding="utf-8"))
        self._hidden, self._wide = int(config["hidden_size"]), int(config["intermediate_size"])
        self._layers = int(config["num_hidden_layers"])
        h, i = self._hidden, self._wide
        generator = torch.Generator().manual_seed(3)
        self._products = []
        for rows, columns, gelu in ((h, 3 * h, False), (h, h, False), (h, i, True), (i, h, False)):
            weight = torch.randn(columns, rows, generator=generator).to(dtype)
            layer = prepacked(Affine(weight, torch.zeros(columns, dtype=dtype)), gelu=gelu)
            if layer is None:
                raise DeviceUnavailable("this torch has no prepacked products")
            self._products.append((layer, torch.randn(GEMM_TOKENS, rows, generator=generator).to(dtype)))

    def __call__(self) -> None:
        import torch

        with torch.inference_mode():
            for _ in range(GEMM_TIMES):
                for layer, x in self._products:
                    layer(x)

    @property
    def of_a_call(self) -> int:
        """Floating-point operations."""
        return GEMM_TIMES * GEMM_TOKENS * self._of_a_token

    @property
    def _of_a_token(self) -> int:
        return 2 * (4 * self._hidden**2 + 2 * self._hidden * self._wide)

    def operations(self, lengths: Sequence[int]) -> int:
        """Count the whole model's operations for texts of so many tokens, special ones included."""
        attention = 4 * self._hidden * sum(length * length for length in lengths)
        return self._layers * (self._of_a_token * sum(lengths) + attention)


def floors(engines: dict[str, EmbeddingEngine], device: str) -> dict[str, Floor]:
    """Return the products by name of the engine; none on a GPU or without prepacked products."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = {}
    for name, each in engines.items():
        if device == "cpu" and each.precision in kinds and each.path == "packed":
            found[name] = Floor(kinds[each.precision])
    return found


# ---------------------------------------------------------------------------------------------------------- the figures


def compared(load: Workload, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    import torch

    torch.set_num_threads(given.threads)
    found = {name: engine(name, given.device, given.threads) for name in PRECISIONS}
    engines = {name: each for name, each in found.items() if each is not None}
    for name, each in engines.items():
        report.options[name] = f"{each.precision} ({each.precision_reason}), {each.path} ({each.path_reason})"
    if missing := [name for name in PRECISIONS if name not in engines]:
        report.note(f"not measured, because the engine does not support it here: {', '.join(missing)}")
    bare = floors(engines, given.device)
    works: dict[str, Callable[[], object]] = {name: partial(each.embed, load.texts) for name, each in engines.items()}
    works |= {f"floor {name}": partial(on_compute_thread, floor) for name, floor in bare.items()}
    encode = peer(given.device).encode
    size = best_batch_size(encode, load, BATCH_SIZES[given.device.partition(":")[0]])
    works[PEER] = lambda: on_compute_thread(lambda: encode(load.texts, batch_size=size))
    clock = cpu if given.cpu_seconds else wall
    rounds = interleaved({name: clock(work) for name, work in works.items()}, given.rounds)
    reference = peer("cpu").encode(load.texts, batch_size=32)
    comparison = Comparison(load, rounds, reference, size)
    for name, each in engines.items():
        yield from comparison.figures(name, each, bare.get(name))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All engines over one workload. `reference`: the peer's vectors in fp32; `batch_size`: the peer's best."""

    load: Workload
    rounds: Rounds
    reference: Any
    batch_size: int

    def figures(self, name: str, each: EmbeddingEngine, floor: Floor | None) -> Iterator[Figure]:
        load, rounds, precision = self.load, self.rounds, each.precision
        counts = [min(count, each.max_tokens) for count in each.count_tokens(load.texts)]
        tokens = sum(counts)
        about = {"precision": precision, "path": each.path, "texts": len(load.texts), "tokens": tokens}
        rate = {"their_batch_size": self.batch_size, "tokens_per_second": round(tokens / rounds.median(name))}
        label = f"{load.name} {name}" if name == precision else f"{load.name} {name} ({precision})"
        yield rounds.ratio(label, PEER, name, SPEED.get((load.name, precision)), **about, **rate)
        if floor is not None:
            least = floor.operations([count + 2 for count in counts]) / floor.of_a_call
            shares = [
                least * bare / ours for bare, ours in zip(rounds.took[f"floor {name}"], rounds.took[name], strict=True)
            ]
            gflops = round(1e-9 * floor.of_a_call / rounds.median(f"floor {name}"), 1)
            yield Figure(f"{label} of floor", shares, "", more={"gflop_per_second": gflops})
        near = agreement(each.embed(load.texts), self.reference)
        yield Figure(f"{label} cosine", [near.least_cosine], "", COSINE.get(precision), more=asdict(near))
        yield Figure(f"{label} overlap", [near.overlap], "", OVERLAP.get(precision))


# --------------------------------------------------------------------------------------------------------------- memory


def memory(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Measure each precision in its own process, because memory of others would hide the growth."""
    for precision in ("fp32", "auto"):
        command = [sys.executable, __file__, "--memory-of", precision, "--threads", str(given.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(done.stdout)
        growth = max(0.0, round(found["many_mb"] - found["few_mb"], 1))
        yield Figure(f"memory {precision}", [growth], "MB", MEMORY, more=found)


def memory_of(precision: str, threads: int) -> None:
    """Embed rows as a sync does, a window a call, and print the resident memory on the way."""
    rng = random.Random(17)
    seen: dict[str, Any] = {}
    with load_engine(EngineOptions(MODEL, device="cpu", precision=precision, threads=threads)) as each:
        seen["precision"] = each.precision
        for done in range(CALL, MANY + 1, CALL):
            each.embed(sap_like_texts(rng, CALL, 2.8, 0.7, (5, 250)))
            if done == FEW:
                seen["few_mb"] = round(resident_bytes() / 1e6, 1)
        seen["many_mb"] = round(resident_bytes() / 1e6, 1)
    print(json.dumps(seen))


# ----------------------------------------------------------------------------------------------------------------- main

PARTS: dict[str, Part] = {
    "short": lambda given, report: compared(texts()[0], given, report),
    "skewed": lambda given, report: compared(texts()[1], given, report),
    "demo": lambda given, report: compared(demo_rows(), given, report),
    "memory": memory,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--cpu-seconds", action="store_true", help="count CPU seconds, not the clock on the wall")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)


if __name__ == "__main__":
    if "--memory-of" in sys.argv:
        child = argparse.ArgumentParser()
        child.add_argument("--memory-of")
        child.add_argument("--threads", type=int)
        asked = child.parse_args()
        memory_of(asked.memory_of, asked.threads)
    else:
        main("embed", __doc__ or "", PARTS, add_options)
