"""Processes that tokenise for an engine on a card. `tokenizers` returns lists of Python integers, which costs more
time under Python's lock than a fast card has for a text; workers return packed arrays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING

import numpy as np

from ..tokens import TokenBatch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)
MOST_WORKERS = 4
LEAST_TEXTS = 64  # a smaller call, such as a search, is tokenised sooner in this process
_PARTS = 2  # of a call for each worker: parts take different times
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEADER = struct.Struct("<qq")  # texts and bytes of UTF-8 of a request; texts and token ids of an answer
# The worker has this process' import path, imports neither torch nor transformers, and ends with its standard input.
_COMMAND = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import serve; serve(int(sys.argv[1]))"


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        self.count = count
        self._otherwise = otherwise
        self._process = os.getpid()
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = self._warned = False
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="owl-sap-tokenizer")
        content, threads = tokenizer.encode(), max(1, processors() // (count * engines))
        self.started = [self._threads.submit(self._start, content, threads) for _ in range(count)]

    def ids(self, texts: Sequence[str]) -> TokenBatch:
        """Return token ids as `otherwise` does."""
        if len(texts) < LEAST_TEXTS or self._closed or os.getpid() != self._process:
            return self._otherwise(texts)
        size = max(LEAST_TEXTS // 2, -(-len(texts) // (_PARTS * self.count)))
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        try:
            futures = [self._threads.submit(self._tokenize, part) for part in parts]
        except RuntimeError:  # closed just now
            return self._otherwise(texts)
        return TokenBatch.joined([future.result() for future in futures])

    def close(self) -> None:
        """End the workers and wait for them."""
        with self._closing:
            self._closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        self._threads.shutdown()

    def _start(self, tokenizer: bytes, threads: int) -> None:
        worker = None
        try:
            with self._closing:
                if self._closed:
                    return
                worker = _Worker(threads)
                self._workers.append(worker)
            worker.load(tokenizer)
        except (OSError, EOFError) as error:
            self._lost(worker, error)
        else:
            self._idle.put(worker)

    def _tokenize(self, texts: Sequence[str]) -> TokenBatch:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            return self._otherwise(texts)
        try:
            found = worker.ids(texts)
        except (OSError, EOFError, ValueError) as error:
            self._lost(worker, error)
            return self._otherwise(texts)
        self._idle.put(worker)
        return found

    def _lost(self, worker: _Worker | None, error: Exception) -> None:
        if worker is not None:
            worker.end()
        if not (self._warned or self._closed):
            self._warned = True
            _log.warning(
                "a tokenizer process ended unexpectedly (%s); its texts are tokenised in this process, more slowly. "
                "A restart starts it again",
                type(error).__name__,
            )


class _Worker:
    """One process. One thread at a time uses it."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, "-c", _COMMAND, str(threads), *sys.path]
        # A session of its own: Ctrl-C ends a sync only after its batch. Errors could show texts: they are not printed.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def load(self, tokenizer: bytes) -> None:
        """Send the tokenizer; wait until it is loaded."""
        self._send(_HEADER.pack(0, len(tokenizer)), tokenizer)
        self._receive(1)

    def ids(self, texts: Sequence[str]) -> TokenBatch:
        """Raises OSError and EOFError if the process has ended."""
        joined = "".join(texts)
        if not joined.isascii():
            joined = _SURROGATE.sub("\ufffd", joined)
        content = joined.encode()
        ends = np.cumsum(np.fromiter(map(len, texts), np.int32, len(texts)), dtype=np.int32)
        self._send(_HEADER.pack(len(texts), len(content)), ends.tobytes(), content)
        count, tokens = _HEADER.unpack(self._receive(_HEADER.size))
        numbers = np.frombuffer(self._receive(4 * (count + 1 + tokens)), np.int32)
        return TokenBatch(numbers[count + 1 :], numbers[: count + 1].astype(np.intp))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in self._streams:
            with contextlib.suppress(OSError):  # of a request that was not sent
                stream.close()

    @property
    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def _send(self, *parts: bytes) -> None:
        for part in parts:
            self._streams[0].write(part)
        self._streams[0].flush()

    def _receive(self, size: int) -> bytes:
        return _read(self._streams[1], size)


def _read(stream: IO[bytes], size: int) -> bytes:
    """Raises EOFError."""
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def serve(threads: int) -> None:
    """Tokenise in a worker process with so many threads, until standard input ends."""
    os.putenv("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    os.putenv("RAYON_NUM_THREADS", str(threads))
    from tokenizers import Tokenizer

    source, target = sys.stdin.buffer, sys.stdout.buffer
    _, size = _HEADER.unpack(_read(source, _HEADER.size))
    tokenizer = Tokenizer.from_str(_read(source, size).decode())
    target.write(b"1")
    target.flush()
    while header := source.read(_HEADER.size):
        count, size = _HEADER.unpack(header)
        ends = np.frombuffer(_read(source, 4 * count), np.int32).tolist()
        joined = _read(source, size).decode()
        texts = [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        batch = TokenBatch.of(encoding.ids for encoding in tokenizer.encode_batch_fast(texts))
        target.write(_HEADER.pack(count, len(batch.ids)))
        target.write(batch.offsets.astype(np.int32).tobytes())
        target.write(batch.ids.tobytes())
        target.flush()
