"""The embedding engine: texts in, unit vectors out, in the same order. Plans batches by tokens, tokenises ahead of
computing, survives running out of memory, lets no vector out that is not finite.

Knows backends and memory; never HANA, HTTP, settings or the environment.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backends import Backend, NonFinite, OutOfMemory, TokenIds, Vectors
from .backends.footprint import Measurable
from .computing import Computing, Running
from .computing import normalized as normalized
from .computing import usable as usable
from .device import DeviceProfile
from .memory import MemoryLimits, T4MemoryManager
from .planning import padded, plan_batches, windows_of
from .splitting import piece_spans

AHEAD = 2
"""Tokenised windows that may wait for the device."""
UNPADDED = ("packed", "hashing")
"""Paths on which a batch costs the sum of its lengths."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since loading. `tokens` counts what was computed, special tokens included; seconds are busy seconds."""

    texts: int = 0
    computed_texts: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    tokenize_seconds: float = 0.0
    compute_seconds: float = 0.0
    out_of_memory: int = 0
    recomputed: int = 0
    """Rows computed again in fp32, because they were not finite."""

    @property
    def padding_ratio(self) -> float:
        """Tokens computed per token that was in a text; 1.0 without waste."""
        return self.padded_tokens / self.tokens if self.tokens else 1.0


# --------------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokenised texts of one window; `positions` are those of the unique texts of the call."""

    positions: Sequence[int]
    tokens: Sequence[TokenIds]


class _Flight(NamedTuple):
    """A batch that was begun: texts of a window, by their places in it."""

    window: _Window
    places: Sequence[int]
    running: Running


class EmbeddingEngine:
    """One model on one device. Thread-safe: calls share the device batch by batch."""

    def __init__(self, backend: Backend, limits: MemoryLimits | None = None) -> None:
        self._backend = backend
        self._memory = _memory_of(backend, limits)
        self._packed = backend.info.path in UNPADDED
        self._multiple = backend.profile.padding_multiple(backend.info.precision)
        self._computing = Computing(backend, self._batch_done)
        self._counting = threading.Lock()
        self._stats = EngineStats()

    # -- what it is

    @property
    def model(self) -> str:
        return self._backend.info.name

    @property
    def dimension(self) -> int:
        return self._backend.info.dimension

    @property
    def matryoshka(self) -> Sequence[int]:
        """Shorter lengths that the model was trained to be cut to; empty for most models."""
        return self._backend.info.matryoshka

    @property
    def max_tokens(self) -> int:
        """Longest text in tokens, without special tokens; what is longer is cut."""
        return self._backend.info.max_tokens

    @property
    def weights_sha256(self) -> str:
        return self._backend.info.weights_sha256

    @property
    def precision(self) -> str:
        return self._backend.info.precision

    @property
    def precision_reason(self) -> str:
        return self._backend.info.precision_reason

    @property
    def path(self) -> str:
        """How vectors are computed: packed, padded, sentence-transformers, onnx-runtime or hashing."""
        return self._backend.info.path

    @property
    def path_reason(self) -> str:
        return self._backend.info.path_reason

    @property
    def profile(self) -> DeviceProfile:
        return self._backend.profile

    @property
    def memory(self) -> T4MemoryManager:
        return self._memory

    @property
    def fingerprint(self) -> str:
        """Changes whenever vectors would. All float precisions are one family: their vectors agree to cosine 0.999
        and better, so that an index made on a GPU serves a CPU; int8 is another, and one for each calibrated graph.
        Names no path and no device."""
        info = self._backend.info
        family = info.variant or ("int8" if info.precision == "int8" else "float")
        sums = f"{info.weights_sha256[:16]}.{info.tokenizer_sha256[:8]}"
        return f"{info.name}@{sums}/{info.pooling}/{info.max_tokens}/unit/{family}"

    def stats(self) -> EngineStats:
        with self._counting:
            return replace(self._stats, out_of_memory=self._memory.out_of_memory_count)

    # -- what it does for one caller at a time

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> Vectors:
        """Float32 (n, dimension), row i for text i, every row finite and, unless `normalize` is off, of length 1.

        Texts above `max_tokens` are cut. Identical texts are computed once. Raises NonFinite naming every text without
        a vector, OutOfMemory when a single text does not fit, EngineClosed.
        """
        return self._embed(texts, normalize=normalize)[0]

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        """As `embed`, with the tokens of each whole text as `count_tokens` gives them: what was tokenised to be
        computed is counted too, and only texts that fill or exceed `max_tokens` are looked at again."""
        return self._embed(texts, counted=True)

    def _embed(
        self, texts: Sequence[str], *, normalize: bool = True, counted: bool = False
    ) -> tuple[Vectors, list[int]]:
        places: dict[str, int] = {}
        rows = np.fromiter((places.setdefault(text, len(places)) for text in strings(texts)), np.intp, len(texts))
        unique = list(places)
        vectors = np.empty((len(unique), self.dimension), dtype=np.float32)
        lengths = self._embed_unique(unique, vectors)
        self._refuse_bad(vectors, rows)
        if normalize:
            vectors = normalized(vectors)
        counts = self.whole_lengths(unique, lengths)[rows].tolist() if counted else []
        self.count_texts(len(texts), len(unique))
        return (vectors[rows] if len(unique) < len(texts) else vectors), counts

    def token_vectors(self, texts: Sequence[str]) -> list[Vectors]:
        """Of each text float32 (tokens, hidden), without special tokens, as long as the model left them; texts are cut
        to `max_tokens`. Batch by batch, between those of others. Raises ModelUnsupported, OutOfMemory, EngineClosed."""
        tokens = self.tokenize(strings(texts))
        found: dict[int, Vectors] = {}
        for batch in self.plan([len(each) for each in tokens]):
            found.update(zip(batch, self._computing.token_vectors([tokens[place] for place in batch]), strict=True))
        return [found[place] for place in range(len(tokens))]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each whole text, without special tokens."""
        self._computing.check_open()
        return self._backend.count(strings(texts))

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Exact substrings of at most `max_tokens` tokens that together cover `text`, each beginning up to `overlap`
        tokens before the end of the one before; cut at blank space where there is any, else at words."""
        if max_tokens < 1 or not 0 <= overlap < max_tokens:
            raise ValueError(f"cannot split by {max_tokens} tokens with {overlap} overlapping: need 0 <= overlap < max")
        return [text[begin:stop] for begin, stop in self.piece_spans(text, max_tokens, overlap)]

    def piece_spans(self, text: str, max_tokens: int, overlap: int) -> Iterator[tuple[int, int]]:
        """Where the pieces of `split` stand: first character, one after the last."""
        self._computing.check_open()
        return piece_spans(text, self._backend.offsets(text), max_tokens, overlap, self._tokens_of)

    # -- for the batcher, which plans for many callers

    @property
    def token_budget(self) -> int:
        """Tokens of one batch."""
        return self._memory.token_budget

    @property
    def full_batch(self) -> int:
        """Tokens of one batch while memory does not run out."""
        return self._memory.planned_tokens

    @property
    def steps(self) -> int:
        """In how many parts of about equal length `begin` can be interrupted; 1: not at all."""
        return self._computing.steps

    @property
    def ahead(self) -> int:
        """How many batches should be begun beside the one that is waited for. 0: `begin` returns when its batch is
        done."""
        return self._computing.ahead

    def tokenize(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids with special tokens, cut to what the model takes."""
        self._computing.check_open()
        return list(self._tokenize(texts, range(len(texts))).tokens)

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Positions in batches that the device takes, longest first."""
        return self._planned(lengths, self._memory.token_budget)

    def smaller(self, lengths: Sequence[int]) -> list[list[int]]:
        """Positions of a batch that ran out of memory, in smaller ones; later batches are planned smaller, too."""
        return self._smaller(range(len(lengths)), lengths)

    def begin(self, batch: Sequence[TokenIds], pause: Callable[[], None] | None = None) -> Running:
        """One batch: float32 (n, dimension), not normalised, rows without a finite vector included (`usable`). Whatever
        goes wrong with it is raised by its `result`: OutOfMemory, EngineClosed.

        `pause` is called now and then in its midst, by backends that can (`steps`); it may begin another one.
        """
        return self._computing.begin(batch, pause)

    def count_texts(self, texts: int, computed: int) -> None:
        """Texts of a call, and how many of them are different."""
        self._count(texts=texts, computed_texts=computed)

    # -- its end

    def close(self) -> None:
        """Wait for the batch in progress, then let go of model and memory. Calls after that raise EngineClosed."""
        self._computing.close()

    def __enter__(self) -> EmbeddingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- how

    def _tokens_of(self, text: str) -> int:
        return self._backend.count([text])[0]

    def _embed_unique(self, texts: Sequence[str], vectors: Vectors) -> NDArray[np.intp]:
        """Tokens of each text as it was computed: cut, special ones included."""
        self._computing.check_open()
        lengths = np.zeros(len(texts), dtype=np.intp)
        with contextlib.closing(self._tokenized(texts)) as windows:  # a failure must stop the tokenising thread at once
            flying: deque[_Flight] = deque()
            for window in windows:
                lengths[window.positions] = [len(tokens) for tokens in window.tokens]
                self._launch(window, flying, vectors)
            self._land(flying, vectors, 0)
        return lengths

    def whole_lengths(self, texts: Sequence[str], lengths: NDArray[np.intp]) -> NDArray[np.intp]:
        """Tokens of each whole text as `count_tokens` gives them; `lengths`: of what `tokenize` gave."""
        whole = lengths - self._backend.info.special_tokens
        full = np.flatnonzero(whole >= self.max_tokens).tolist()
        if full:
            whole[full] = self._backend.count([texts[place] for place in full])
        return whole

    def _tokenized(self, texts: Sequence[str]) -> Generator[_Window]:
        """Windows in order, the next one tokenised on a thread while the caller computes this one."""
        windows = list(windows_of(texts))
        if len(windows) < 2:
            yield from (self._tokenize(texts, window) for window in windows)
        else:
            yield from _ahead(self._tokenize(texts, window) for window in windows)

    def _tokenize(self, texts: Sequence[str], window: Sequence[int]) -> _Window:
        started = time.perf_counter()
        tokens = self._backend.tokenize([texts[position] for position in window])
        self._count(tokenize_seconds=time.perf_counter() - started)
        return _Window(window, tokens)

    def _launch(self, window: _Window, flying: deque[_Flight], vectors: Vectors) -> None:
        """The last batches of a window may still be on their way when this returns."""
        lengths = [len(tokens) for tokens in window.tokens]
        pending = deque(self._planned(lengths, self._memory.token_budget))
        while pending:
            places = pending.popleft()
            own, budget = [lengths[place] for place in places], self._memory.token_budget
            if len(places) > 1 and self._cost(own) > budget:  # planned before memory ran out
                pending.extendleft([places[each] for each in part] for part in reversed(self._planned(own, budget)))
                continue
            flying.append(_Flight(window, places, self.begin([window.tokens[place] for place in places])))
            self._land(flying, vectors, self.ahead)

    def _land(self, flying: deque[_Flight], vectors: Vectors, left: int) -> None:
        """Wait for the first ones, until so many are left."""
        while len(flying) > left:
            self._settle(flying.popleft(), vectors)

    def _settle(self, flight: _Flight, vectors: Vectors) -> None:
        """What runs out of memory is computed again in smaller parts, one after the other."""
        window, places, running = flight
        try:
            found = running.result()
        except OutOfMemory:
            if len(places) == 1:
                raise
            smaller = self._smaller(places, [len(tokens) for tokens in window.tokens])
        else:
            vectors[[window.positions[place] for place in places]] = found
            return
        for part in smaller:
            self._settle(_Flight(window, part, self.begin([window.tokens[place] for place in part])), vectors)

    def _planned(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        return plan_batches(lengths, budget, self._multiple, packed=self._packed)

    def _cost(self, lengths: Sequence[int]) -> int:
        """What a batch counts against the budget."""
        return sum(lengths) if self._packed else padded(max(lengths), self._multiple) * len(lengths)

    def _smaller(self, batch: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        failed = [lengths[place] for place in batch]
        budget = self._memory.shrink(self._cost(failed))
        plan = self._planned(failed, budget)
        if len(plan) == 1:  # the least budget still takes it whole
            plan = [plan[0][: len(batch) // 2], plan[0][len(batch) // 2 :]]
        return [[batch[place] for place in part] for part in plan]

    def _refuse_bad(self, vectors: Vectors, rows: NDArray[np.intp]) -> None:
        good = usable(vectors)
        if not good.all():
            raise NonFinite([int(index) for index in np.flatnonzero(~good[rows])])

    def _batch_done(self, tokens: Sequence[TokenIds], seconds: float, recomputed: int) -> None:
        lengths = [len(ids) for ids in tokens]
        cost = self._cost(lengths)
        self._memory.succeeded(cost)
        self._count(
            batches=1,
            tokens=sum(lengths),
            padded_tokens=cost,
            compute_seconds=seconds,
            recomputed=recomputed,
        )

    def _count(self, **more: float) -> None:
        with self._counting:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + more[name] for name in more})


def strings(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("a list of texts is wanted, not one string")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text {index} is {type(text).__name__}, not a string")
    return list(texts)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _ahead(windows: Iterator[_Window]) -> Iterator[_Window]:
    """Iterate `windows` on a thread, at most AHEAD of them in advance. Errors come out here; leaving early stops it."""
    ready: queue.Queue[_Window | _Failure | None] = queue.Queue(AHEAD)
    stopped = threading.Event()

    def offer(item: _Window | _Failure | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for window in windows:
                if not offer(window):
                    return
            offer(None)
        except BaseException as error:
            offer(_Failure(error))

    thread = threading.Thread(target=produce, name="owl-sap-tokenize", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        thread.join()


def _memory_of(backend: Backend, limits: MemoryLimits | None) -> T4MemoryManager:
    """The budget by what a batch measures to cost, where the backend can tell; else by an estimate."""
    info, measured = backend.info, None
    used = 0
    if isinstance(backend, Measurable):
        measured = backend.token_cost()
        used = backend.used_bytes()
    memory = T4MemoryManager(backend.profile, limits, free_bytes=backend.free_bytes(), used_bytes=used)
    memory.plan_for(info.shape, info.precision, measured)
    return memory
