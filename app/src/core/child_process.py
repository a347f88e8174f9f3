"""The child process of a `ChildEngine`: loads one model on one device and answers over a socket."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from .backends import EngineError, InputType, Vectors
from .child import STATE_SECONDS, ChildEngine, State
from .engine import Engine
from .loading import load_engine
from .queue import Lane, Watcher


class _Answers(Watcher):
    """Sends answers, each with the engine's state and the queue's events since the last one. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self.engine: Engine | None = None
        self._connection = connection
        self._lock = threading.Lock()
        self._events: list[tuple[Any, ...]] = []

    def send(self, kind: str, number: int = 0, content: object = None) -> None:
        engine, state = self.engine, State()
        if engine is not None:
            budgets = engine.token_budget, engine.planned_tokens
            state = State(engine.stats(), *budgets, engine.stalled(), engine.deaths, engine.failed)
        with self._lock:
            events, self._events = self._events, []
            self._connection.send((kind, number, content, state, events))

    def failed(self, number: int, error: BaseException) -> None:
        known = isinstance(error, EngineError) or type(error).__module__ == "builtins"
        self.send("failed", number, error if known else EngineError(f"{type(error).__name__}: {error}"))

    def queued(self, lane: Lane, texts: int) -> None:
        self._events.append(("queued", lane, texts))

    def began(self, lane: Lane, waited: float) -> None:
        self._events.append(("began", lane, waited))

    def batch(self, lane: Lane, texts: int, tokens: int) -> None:
        self._events.append(("batch", lane, texts, tokens))

    def refused(self) -> None:
        self._events.append(("refused",))


class _Calls:
    """Work in the bulk lane is tokenised in one thread, other work in another, so that it does not wait."""

    def __init__(self, engine: Engine, answers: _Answers) -> None:
        self._engine = engine
        self._answers = answers
        self._running: dict[int, Future[Vectors]] = {}
        self._bulk, self._other = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def take(self, kind: str, number: int, lane: Lane | None, content: Any) -> None:
        threads = self._bulk if lane == "bulk" else self._other
        if kind == "submit":
            threads.submit(self._submit, number, lane, *content)
        elif kind == "cancel":
            threads.submit(lambda: number in self._running and self._running[number].cancel())
        else:
            self._engine.configure_queue(max_wait=content, watcher=self._answers)

    def _submit(
        self, number: int, lane: Lane | None, texts: list[str], input_type: InputType, normalize: bool, count: bool
    ) -> None:
        counts: list[int] = []
        try:
            future = self._engine.submit(
                texts, lane, input_type=input_type, normalize=normalize, counted=counts.extend if count else None
            )
        except Exception as error:
            self._answers.failed(number, error)
            return
        self._running[number] = future
        self._answers.send("queued", number, counts)
        future.add_done_callback(lambda future: self._answer(number, future))

    def _answer(self, number: int, future: Future[Vectors]) -> None:
        del self._running[number]
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._answers.failed(number, error)
        else:
            self._answers.send("done", number, future.result())


def serve(socket: str) -> None:
    """Answer on the file descriptor `socket` until the parent says "close" or has ended."""
    with suppress(EOFError, OSError):  # the parent has ended
        _serve(Connection(int(socket)))
    os._exit(0)  # without waiting for threads, one of which may hang in the driver


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all processes of a service
    answers = _Answers(connection)
    try:
        engine = load_engine(connection.recv())
    except Exception as error:
        answers.failed(0, error)
        return
    answers.engine = engine
    answers.send("loaded", content={name: getattr(engine, name) for name in ChildEngine.__annotations__})
    threading.Thread(target=_report, args=(answers,), daemon=True).start()
    calls = _Calls(engine, answers)
    while (message := connection.recv())[0] != "close":
        calls.take(*message)
    engine.close()


def _report(answers: _Answers) -> None:
    while True:
        time.sleep(STATE_SECONDS)
        answers.send("state")
