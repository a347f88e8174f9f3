"""How many texts does the host prepare in a second, for a card that computes them at once?

    python benchmarks/host.py [tokenizer] [engine] [--model MODEL] [--workers 0,1,2,4] [--rounds 3] [--out FILE]

    tokenizer   texts/s of the tokenizer alone, by worker processes (0: threads of this process)
    engine      texts/s from text to vector with a device of infinite speed, by workers, and the CPU microseconds of
                this process for a text; ones instead of vectors, the token budget of an H100

For texts of 17 and of 128 tokens. Needs no card and does not import torch for a packaged model.
`tokenizer_rate` and `host_rate` measure one case, for other programs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from app.src.benchmark.harness import Figure, Report, significant
from app.src.core.backends import ModelInfo, Pause, Running, TokenBatch, Vectors
from app.src.core.backends.folder import Folder, find_folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer, TokenizingBackend
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from benchmarks.program import main

LENGTHS = {17: 40_000, 128: 8_000}  # tokens of a text -> texts of a call
PART = 4096  # texts tokenised at once
_WORDS = ("pump", "valve", "seal", "motor", "oil", "filter", "leak", "order", "plant", "steel", "shaft", "cable")


class InfiniteDevice(TokenizingBackend):
    """A card that has every batch's vectors, all ones, when it is launched."""

    ahead = 1

    def __init__(self, folder: Folder, tokenizer: RustTokenizer, card: str = "NVIDIA H100") -> None:
        self._tokenizer = tokenizer
        self.profile = DeviceProfile.of_card(card, 80)
        special = tokenizer.special_tokens
        self.info = ModelInfo(
            name=folder.name,
            dimension=folder.shape.hidden,
            max_tokens=folder.max_length - special,
            special_tokens=special,
            pooling="mean",
            weights_sha256="0" * 64,
            tokenizer_sha256="0" * 64,
            precision="fp16",
            precision_reason="it computes nothing",
            shape=folder.shape,
            path="packed",
            path_reason="it computes nothing",
        )

    def free_bytes(self) -> int:
        return 0

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        return self.launch(batch)()

    def launch(self, batch: TokenBatch) -> Running:
        vectors = np.ones((len(batch), self.info.dimension), np.float32)
        return lambda: vectors


def texts_of(tokens: int, count: int, tokenizer: RustTokenizer) -> list[str]:
    """Return different texts of about so many tokens, special ones included."""
    rng = random.Random(tokens)

    def text(words: int) -> str:
        return f"{' '.join(rng.choice(_WORDS) for _ in range(words))} {rng.randrange(10**5)}"

    found = tokenizer.ids([text(tokens) for _ in range(100)]).tokens / 100
    return [text(max(1, round(tokens * tokens / found))) for _ in range(count)]


def tokenizer_rate(tokenizer: RustTokenizer, workers: int, texts: Sequence[str]) -> float:
    """Return texts a second. Starting the workers does not count."""
    if not workers:
        return _rate(tokenizer.ids, texts)
    processes = tokenizer.start_workers(workers)
    try:
        for each in processes.started:
            each.result()
        return _rate(processes.ids, texts)
    finally:
        processes.close()


def _rate(ids: Callable[[Sequence[str]], TokenBatch], texts: Sequence[str]) -> float:
    ids(texts[:PART])
    start = time.perf_counter()
    for place in range(0, len(texts), PART):
        ids(texts[place : place + PART])
    return len(texts) / (time.perf_counter() - start)


def host_rate(folder: Folder, tokenizer: RustTokenizer, workers: int, texts: Sequence[str]) -> tuple[float, float]:
    """Return texts a second from text to vector with an `InfiniteDevice`, and this process' CPU microseconds for each
    text."""
    backend = InfiniteDevice(folder, tokenizer)
    backend.start_tokenizers(workers)
    with EmbeddingEngine(backend) as engine:
        if backend._workers is not None:
            for each in backend._workers.started:
                each.result()
        engine.embed(texts[:PART], "bulk")
        start, busy = time.perf_counter(), time.process_time()
        engine.embed(texts, "bulk")
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return len(texts) / seconds, busy / len(texts) * 1e6


def _cases(given: argparse.Namespace) -> Iterator[tuple[Folder, RustTokenizer, int, int, list[str]]]:
    path = find_folder(given.model)
    folder = read_folder(path, given.model if not Path(given.model).is_dir() else path.name)
    tokenizer = RustTokenizer.load(folder)
    for tokens, count in LENGTHS.items():
        texts = texts_of(tokens, count, tokenizer)
        for workers in given.workers:
            yield folder, tokenizer, tokens, workers, texts


def tokenizer_part(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    for _, tokenizer, tokens, workers, texts in _cases(given):
        rounds = [tokenizer_rate(tokenizer, workers, texts) for _ in range(given.rounds)]
        yield Figure(f"{given.model}, {tokens} tokens: tokenizer, {workers} workers", rounds, "texts/s")


def engine_part(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    for folder, tokenizer, tokens, workers, texts in _cases(given):
        rounds, busy = zip(*(host_rate(folder, tokenizer, workers, texts) for _ in range(given.rounds)), strict=True)
        more = {"CPU microseconds of a text in this process": significant(sorted(busy)[len(busy) // 2])}
        yield Figure(f"{given.model}, {tokens} tokens: engine, {workers} workers", rounds, "texts/s", more=more)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--workers", default=[0, 1, 2, 4], type=lambda given: [int(each) for each in given.split(",")])


if __name__ == "__main__":
    main("host", __doc__ or "", {"tokenizer": tokenizer_part, "engine": engine_part}, add_options)
