"""The parts that measure speed: products, models against `encode`, short texts, the queue, and single queries."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Target, Work, interleaved, significant, wall
from app.src.core.agreement import agreement
from app.src.core.backends.folder import read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.device import Setting
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import load_engine
from app.src.core.pool import EnginePool
from app.src.core.queue import Request
from app.src.core.t4_gpu_optimizer import measure_products
from benchmarks.program import at_least, at_most
from connector.processors import processors

from .models import LOADS, lengths_of, texts_of
from .peer import BATCH_SIZES, Peer, Products
from .run import Run, WrongVectors, same

OURS, ENCODE, PRODUCTS = "ours", "encode", "products"
FASTER = {"minilm": at_least(3), "bert-base": at_least(2.5), "bert-large": at_least(1.8)}  # than encode, mixed texts
SHARE, COSINE = at_least(0.6), at_least(0.999)  # of products, for BERT-large; with fp32, for all
TOKENISED, FROM_TEXT = at_least(100_000), at_least(60_000)  # short texts a second of a small multilingual model
QUERY_MS = at_most(1.5)
COMPARED = 64  # texts whose vectors are compared with those in fp32
CALLS = {"1 x 16": (1, 16), "1 x 64": (1, 64), "8 x 32": (8, 32)}
MOST_TEXTS = 200_000  # of a workload
CALLERS, CALL_TEXTS = 8, 256


def products(run: Run) -> Iterator[Figure | str]:
    """Measure matrix products in every precision."""
    edges = (64, 128) if run.quick else (4096, 8192)
    for row in measure_products(run.profile, edges, None, 0.3 if run.quick else min(8.0, run.left / 2)):
        if isinstance(row, Setting):
            yield f"{row.name}: {row.reason}"
        elif row["tflops"] is not None:
            about = {name: row[name] for name in ("share_of_peak", "spread", "relative_error")}
            yield Figure(f"products, {row['dtype']}, {row['m']}", [row["tflops"]], "TFLOP/s", more=about)


def of_model(name: str, run: Run) -> Iterator[Figure | str]:
    """Compare one model with `encode` at its best, and with bare products."""
    shape, folder = run.folder_of(name)
    peer = Peer(folder, run.profile)
    some = texts_of(folder, lengths_of("mixed", 32 if run.quick else COMPARED), seed=17)
    exact = peer.exact(some)
    with run.engine(name) as engine:
        yield f"{name}: {engine.precision} ({engine.precision_reason}), {engine.path} ({engine.path_reason})"
        bare = Products(run.profile, engine.precision, 256 if run.quick else None)
        seconds = 0.02 if run.quick else min(1.0, run.left / 45)
        for load in LOADS:
            if run.left < 0:
                yield f"not measured, out of time: {name}, {load}"
                continue
            mixed, label = load == "mixed", f"{name}, {load}"
            few = 4 if run.quick else 64
            lengths = lengths_of(load, sized(engine, folder, load, seconds if mixed else seconds / 2, few))
            texts = texts_of(folder, lengths)
            size = peer.best_batch_size(texts[: max(1024, len(texts) // 4)], (4, 8) if run.quick else BATCH_SIZES)
            works: dict[str, Work] = {
                PRODUCTS: bare,
                OURS: wall(partial(engine.embed, texts)),
                ENCODE: wall(partial(peer.encode, texts, size)),
            }
            rounds = interleaved(works, run.rounds)
            tokens = sum(lengths)
            for side, more in ((OURS, {}), (ENCODE, {"batch_size": size, "precision": peer.precision})):
                about = {"texts": len(texts), "tokens_per_second": significant(tokens / rounds.median(side))} | more
                yield Figure(f"{label}: {side}", _rates(len(texts), rounds.took[side]), "texts/s", more=about)
            faster = run.goal(FASTER[name]) if mixed else None
            yield rounds.ratio(f"{label}: ours / encode", ENCODE, OURS, faster)
            needed = shape.operations(lengths)
            full = [bare.operations / took for took in rounds.took[PRODUCTS]]
            shares = [needed / took / one for took, one in zip(rounds.took[OURS], full, strict=True)]
            of_bare = {"products_tflops": significant(statistics.median(full) / 1e12), "products_edge": bare.edge}
            target = run.goal(SHARE) if name == "bert-large" else None
            yield Figure(f"{label}: of products", shares, "", target, more=of_bare)
            ours = agreement(engine.embed(some), exact)
            theirs = agreement(peer.encode(some, size), exact)
            near = {"mean": significant(ours[0], 7), "encode": significant(theirs[1], 7)}
            yield Figure(f"{label}: cosine", [ours[1]], "", run.goal(COSINE), more=near)


def sized(engine: EmbeddingEngine, folder: Any, load: str, seconds: float, few: int) -> int:
    """Return how many texts our engine embeds in `seconds`, at least `few`."""
    tried, count, took = 1, few, 0.0
    while took < seconds / 4 and count < MOST_TEXTS:
        embed = wall(partial(engine.embed, texts_of(folder, lengths_of(load, count), seed=1)))
        took = min(embed() for _ in range(2))
        tried, count = count, 4 * count
    return int(min(MOST_TEXTS, max(few, seconds * tried / took)))


def short(run: Run) -> Iterator[Figure | str]:
    """Measure short texts through a model of multilingual-e5-small's shape: from tokens, from texts, and tokenising."""
    name = "e5-small"
    _, folder = run.folder_of(name)
    with run.engine(name) as engine:
        for load in ("short", "fixed 68"):
            if run.left < 0:
                yield f"not measured, out of time: {name}, {load}"
                continue
            texts = texts_of(folder, lengths_of(load, sized(engine, folder, load, 0.02 if run.quick else 1.0, 64)))
            tokenize = engine._backend.tokenize
            parts = [tokenize(texts[start : start + 2048]) for start in range(0, len(texts), 2048)]

            def tokenised(parts: Any = parts) -> None:
                def request(tokens: Any) -> Request:
                    vectors = np.empty((len(tokens), engine.dimension), np.float32)
                    return Request(tokens, "bulk", vectors, engine._queue.clock())

                for future in [engine._queue.add(request(tokens)) for tokens in parts]:
                    engine._queue.wait_for(future)

            works: dict[str, Work] = {
                "tokens to vectors": wall(tokenised),
                "texts to vectors": wall(partial(engine.embed, texts)),
                "texts to tokens": wall(partial(tokenize, texts)),
            }
            rounds = interleaved(works, run.rounds)
            bars = {"tokens to vectors": TOKENISED, "texts to vectors": FROM_TEXT} if load == "short" else {}
            about = {"texts": len(texts), "tokens": sum(part.tokens for part in parts)}
            for work in works:
                target = run.goal(bars.get(work))
                yield Figure(
                    f"{name}, {load}: {work}", _rates(len(texts), rounds.took[work]), "texts/s", target, more=about
                )


def tokenising(run: Run) -> Iterator[Figure | str]:
    """Measure the tokenizer of the small multilingual model in this process and in one to eight workers."""
    folder = read_folder(run.folder_of("e5-small")[1], "e5-small")
    tokenizer = RustTokenizer.load(folder)
    texts = texts_of(folder.path, lengths_of("short", 256 if run.quick else 40_000))
    wanted = tokenizer.ids(texts)
    works: dict[str, Work] = {"no worker": wall(partial(tokenizer.ids, texts))}
    with contextlib.ExitStack() as started:
        for count in (1, 2) if run.quick else (1, 2, 4, 8):
            workers = started.enter_context(contextlib.closing(tokenizer.start_workers(count)))
            for ready in workers.started:
                ready.result()
            found = workers.ids(texts)
            if not (np.array_equal(found.ids, wanted.ids) and np.array_equal(found.offsets, wanted.offsets)):
                raise WrongVectors(f"{count} workers give other tokens")
            works[f"{count} workers"] = wall(partial(workers.ids, texts))
        rounds = interleaved(works, run.rounds)
    for work in works:
        yield Figure(
            f"tokenizer, {work}", _rates(len(texts), rounds.took[work]), "texts/s", more={"cores": processors()}
        )


def pool(run: Run) -> Iterator[Figure | str]:
    """Compare all cards together with one of them."""
    import torch

    if run.on_card and torch.cuda.device_count() < 2:
        yield "pool: this machine has one card"
        return
    devices = "all" if run.on_card else ("cpu:0", "cpu:1")
    for name in ("minilm", "bert-large"):
        if run.left < 0:
            yield f"not measured, out of time: pool, {name}"
            continue
        _, folder = run.folder_of(name)
        with run.engine(name) as one, load_engine(run.options(name, device=devices)) as all_of_them:
            assert isinstance(all_of_them, EnginePool)
            texts = texts_of(folder, lengths_of("mixed", sized(one, folder, "mixed", 0.02 if run.quick else 2.0, 64)))
            same(f"vectors of a pool, {name}", all_of_them.embed(texts[:256]), one.embed(texts[:256]))
            works: dict[str, Work] = {
                "one": wall(partial(one.embed, texts, "bulk")),
                "all": wall(partial(all_of_them.embed, texts, "bulk")),
            }
            rounds = interleaved(works, run.rounds)
            yield rounds.ratio(f"pool, {name}: all over one", "one", "all", devices=len(all_of_them.members))


def queue(run: Run) -> Iterator[Figure]:
    """Measure several callers at once, who meet in the queue, against one caller with all their texts."""
    _, folder = run.folder_of("minilm")
    with run.engine("minilm") as engine, ThreadPoolExecutor(CALLERS) as threads:
        each = 8 if run.quick else CALL_TEXTS
        calls = max(2 * CALLERS, sized(engine, folder, "mixed", 0.02 if run.quick else 1.0, 64) // each)
        texts = texts_of(folder, lengths_of("mixed", calls * each))
        parts = [texts[start : start + each] for start in range(0, len(texts), each)]
        works: dict[str, Work] = {
            "one caller": wall(partial(engine.embed, texts, "bulk")),
            "callers": wall(lambda: list(threads.map(lambda part: engine.embed(part, "bulk"), parts))),
        }
        rounds = interleaved(works, run.rounds)
        label = f"queue, {CALLERS} callers x {each} texts"
        yield Figure(label, _rates(len(texts), rounds.took["callers"]), "texts/s")
        yield rounds.ratio(f"{label}: over one caller", "one caller", "callers")


def latency(run: Run) -> Iterator[Figure | str]:
    """Measure small calls against `encode`, and single queries while a bulk load computes."""
    for name in ("minilm", "bert-base"):
        if run.left < 0:
            yield f"not measured, out of time: latency, {name}"
            continue
        _, folder = run.folder_of(name)
        peer = Peer(folder, run.profile)
        with run.engine(name) as engine:
            for what, (count, length) in CALLS.items():
                calls = cycle([texts_of(folder, [length] * count, seed) for seed in range(64)])
                timed = partial(_median_ms, calls, 3 if run.quick else 60)
                works: dict[str, Work] = {
                    OURS: partial(timed, engine.embed),
                    ENCODE: partial(timed, partial(peer.encode, batch_size=BATCH_SIZES[0])),
                }
                rounds = interleaved(works, run.rounds)
                label = f"latency, {name}, {what} tokens"
                bar: Target | None = QUERY_MS if (name, what) == ("minilm", "1 x 16") else None
                yield Figure(label, rounds.took[OURS], "ms", run.goal(bar), more={"path_reason": engine.path_reason})
                yield rounds.ratio(f"{label}: encode / ours", ENCODE, OURS)
            yield _beside_bulk(run, name, engine, folder)


def _beside_bulk(run: Run, name: str, engine: EmbeddingEngine, folder: Any) -> Figure:
    bulk = texts_of(folder, lengths_of("mixed", sized(engine, folder, "mixed", 0.02 if run.quick else 0.5, 64)))
    queries = cycle([texts_of(folder, [16], seed) for seed in range(64)])
    ended = threading.Event()

    def load() -> None:
        while not ended.is_set():
            engine.embed(bulk, "bulk")

    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load)
        try:
            times = [_median_ms(queries, 1, engine.embed) for _ in range(10 if run.quick else 200)]
        finally:
            ended.set()
        loading.result()
    more = {"p95": significant(float(np.percentile(times, 95)))}
    return Figure(f"latency, {name}, 1 x 16 tokens beside a bulk load", [statistics.median(times)], "ms", more=more)


def _median_ms(calls: Iterator[list[str]], times: int, embed: Any) -> float:
    return 1000 * statistics.median(wall(partial(embed, next(calls)))() for _ in range(times))


def _rates(texts: int, took: Sequence[float]) -> list[float]:
    return [texts / seconds for seconds in took]
