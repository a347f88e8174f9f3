"""Processes that tokenise for an engine on a card. `tokenizers` returns lists of Python integers, which costs more
time under Python's lock than a fast card has for a text; workers return packed arrays.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from connector.processors import processors

from ..child_process import Calls, ChildProcess
from ..tokens import TokenBatch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)
MOST_WORKERS = 4
LEAST_TEXTS = 64  # a smaller call, such as a search, is tokenised sooner in this process
_PARTS = 2  # of a call for each worker: parts take different times
_SURROGATE = re.compile("[\ud800-\udfff]")


def default_workers(kind: str, engines: int = 1) -> int:
    """Return the number of workers of each engine for a kind of device: none for a CPU, which needs the processors
    itself."""
    return min(MOST_WORKERS, processors() // (2 * engines)) if kind == "cuda" else 0


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenBatch:
    """Tokenise in this process."""
    return TokenBatch.of(encoding.ids for encoding in tokenizer.encode_batch_fast(encodable(texts)))


def encodable(texts: Sequence[str]) -> list[str]:
    """Replace lone surrogates (damaged emojis), which Rust strings cannot hold, by one character each."""
    return [text if text.isascii() else _SURROGATE.sub("\ufffd", text) for text in texts]


class TokenizerWorkers:
    """Worker processes with a copy of one tokenizer, each with a share of the processors. Thread-safe.

    What no worker can do is done by `otherwise`, in this process: before the workers have started, after one has died
    (it is not started again), in a fork and after `close`.
    """

    def __init__(
        self, tokenizer: str, count: int, otherwise: Callable[[Sequence[str]], TokenBatch], *, engines: int = 1
    ) -> None:
        """Start `count` workers without waiting. `tokenizer`: as `Tokenizer.to_str` returns it. `engines`: with so many
        workers each; all share the processors."""
        self._otherwise = otherwise
        self._process = os.getpid()
        self._closed = self._warned = False
        share = max(1, processors() // (count * engines))
        # Errors could show texts: they are not printed.
        self._workers = [ChildProcess(serve, stderr=subprocess.DEVNULL) for _ in range(count)]
        waiting = ThreadPoolExecutor(count, thread_name_prefix="owl-sap-tokenizer")  # until they read the tokenizer
        self.started = [
            waiting.submit(lambda worker: worker.call(tokenizer, share).result(), worker) for worker in self._workers
        ]
        waiting.shutdown(wait=False)
        for each in self.started:
            each.add_done_callback(self._answered)

    def ids(self, texts: Sequence[str]) -> TokenBatch:
        """Return token ids as `otherwise` does."""
        workers = [
            worker
            for worker, started in zip(self._workers, self.started, strict=True)
            if started.done() and not worker.ended
        ]
        if len(texts) < LEAST_TEXTS or self._closed or os.getpid() != self._process or not workers:
            return self._otherwise(texts)
        size = max(LEAST_TEXTS // 2, -(-len(texts) // (_PARTS * len(workers))))
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        answers = [min(workers, key=lambda worker: worker.waiting).call(part) for part in parts]
        return TokenBatch.joined(
            [
                TokenBatch(*answer.result()) if self._answered(answer) else self._otherwise(part)
                for part, answer in zip(parts, answers, strict=True)
            ]
        )

    def close(self) -> None:
        """End the workers and wait for them."""
        self._closed = True
        for worker in self._workers:
            worker.close(0)

    def _answered(self, answer: Future[Any]) -> bool:
        """Return whether a worker did its work; log once if not."""
        error = answer.exception()
        if error is not None and not (self._warned or self._closed):
            self._warned = True
            _log.warning(
                "a tokenizer process ended unexpectedly (%s); its texts are tokenised in this process, more slowly. "
                "A restart starts it again",
                type(error).__name__,
            )
        return error is None


def serve(calls: Calls) -> None:
    """Tokenise in a worker process. The first call brings the tokenizer and the number of threads. Imports neither
    torch nor transformers."""
    messages = iter(calls)
    number, (content, threads) = next(messages)
    os.putenv("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    os.putenv("RAYON_NUM_THREADS", str(threads))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    calls.answer(number, None)
    for number, (texts,) in messages:
        batch = ids_of(tokenizer, texts)
        calls.answer(number, (batch.ids, batch.offsets))
