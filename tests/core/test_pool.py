"""Several engines behind one: division, order, failures of members, cancelling, closing; members in child processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.backends import (
    DeviceFailed,
    EngineClosed,
    NonFinite,
    OutOfMemory,
    Pause,
    TokenBatch,
    Vectors,
)
from app.src.core.engine import EmbeddingEngine
from app.src.core.pool import EnginePool
from app.src.core.queue import EngineOverloaded, Watcher
from tests.core.conftest import ScriptedBackend

FEW = settings(max_examples=20, deadline=None)
TEXTS = [
    " ".join(f"word{number % 17} pump seal".split()[: 1 + number % 3] * (1 + number % 23)) for number in range(900)
]
TEXTS = [f"{number} {text}" for number, text in enumerate(TEXTS)]
CPUS = ["cpu:0", "cpu:1"]


class Gated(ScriptedBackend):
    """Waits in each batch until `go` is set; then raises `error`, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.error: BaseException | None = None

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        self.inside.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return super().forward(batch, exact=exact)


class Scene:
    def __init__(self, members: int = 2) -> None:
        self.backends = [Gated() for _ in range(members)]
        self.pool = EnginePool([EmbeddingEngine(backend) for backend in self.backends])

    def computed(self) -> list[int]:
        return [sum(map(len, backend.batches)) for backend in self.backends]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    for backend in scene.backends:
        backend.go.set()
    scene.pool.close()


@pytest.fixture(scope="module")
def alone() -> Vectors:
    with EmbeddingEngine(ScriptedBackend()) as engine:
        return engine.embed(TEXTS)


def later(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# ------------------------------------------------------------------------------------------------------------- division


def test_a_large_call_is_divided_and_its_rows_keep_their_order(scene: Scene, alone: Vectors) -> None:
    vectors, counts = scene.pool.embed_counted(TEXTS)
    np.testing.assert_array_equal(vectors, alone)
    assert counts == scene.pool.count_tokens(TEXTS)
    assert min(scene.computed()) > len(TEXTS) / 4
    assert sum(scene.computed()) == len(TEXTS)


def test_every_member_computes_at_the_same_time(scene: Scene, alone: Vectors) -> None:
    for backend in scene.backends:
        backend.go.clear()
    call = later(lambda: scene.pool.embed(TEXTS))
    for backend in scene.backends:
        assert backend.inside.wait(60)
    for backend in scene.backends:
        backend.go.set()
    np.testing.assert_array_equal(call.result(60), alone)


def test_a_small_call_goes_whole_to_the_member_with_less_work(scene: Scene) -> None:
    first, second = scene.backends
    first.go.clear()
    waiting = scene.pool.submit(["oil leak"])
    assert first.inside.wait(60)
    scene.pool.embed(["pump", "seal", "pump"])
    assert [sorted(batch) for batch in second.batches] == [[["pump"], ["seal"]]]
    first.go.set()
    assert waiting.result(60).shape == (1, 32)


@FEW
@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 4))
def test_rows_follow_the_texts_whatever_their_lengths(lengths: list[int], members: int) -> None:
    texts = [f"{place % 50} " + "pump " * length for place, length in enumerate(lengths)]
    engine = EmbeddingEngine(ScriptedBackend())
    scene = Scene(members)
    scene.pool._first.memory.planned_tokens = 64  # so that short calls are divided too
    np.testing.assert_array_equal(scene.pool.embed(texts), engine.embed(texts))
    assert sum(scene.computed()) == len(set(texts))
    assert scene.pool.stats().texts == len(texts)
    assert scene.pool.stats().computed_texts == len(set(texts))


# ----------------------------------------------------------------------------------------------------- failing members


def test_out_of_memory_is_answered_by_that_member_alone(scene: Scene, alone: Vectors) -> None:
    scene.backends[1].most_tokens = 100
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    first, second = scene.pool.members
    assert second.stats().out_of_memory > 0
    assert first.stats().out_of_memory == 0
    assert first.token_budget > second.token_budget
    assert scene.pool.stats().out_of_memory == second.stats().out_of_memory
    assert scene.pool.failures == ["", ""]


def test_a_text_that_does_not_fit_is_the_callers_error(scene: Scene) -> None:
    for backend in scene.backends:
        backend.most_tokens = 20
    with pytest.raises(OutOfMemory):
        scene.pool.embed([*TEXTS, "pump " * 30])
    assert scene.pool.failed == ""


@pytest.mark.parametrize("error", [DeviceFailed("planted"), SystemExit()], ids=["device", "worker"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_others_compute_the_parts_of_a_failed_member(
    scene: Scene, alone: Vectors, number: int, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = scene.backends[number], scene.backends[1 - number]
    failing.error = error
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    assert bool(scene.pool.failures[number])
    assert scene.pool.failures[1 - number] == scene.pool.failed == ""
    failing.error = None
    before = len(other.batches)
    assert scene.pool.embed_counted(["oil", "leak"])[1] == [1, 1]
    assert scene.pool.split("oil leak", 1, 0) == ["oil ", "leak"]
    assert len(other.batches) == before + 1
    assert failing.batches == []
    told = [record for record in caplog.records if record.name.endswith("pool")]
    assert [record.levelno for record in told] == [logging.ERROR]
    assert "cpu" in told[0].getMessage()


def test_a_closed_member_gets_no_more_work(scene: Scene, alone: Vectors) -> None:
    scene.pool.members[1].close()
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    assert scene.pool.failures[0] == ""
    assert "closed" in scene.pool.failures[1]


def test_a_waiting_call_moves_to_another_member(scene: Scene) -> None:
    failing = scene.backends[0]
    failing.go.clear()
    failing.error = DeviceFailed("planted")
    call = scene.pool.submit(["oil leak"], counted=(seen := list[list[int]]()).append)
    assert failing.inside.wait(60)
    failing.go.set()
    assert call.result(60).shape == (1, 32)
    assert seen == [[2]]


def test_a_pool_without_members_has_failed(scene: Scene) -> None:
    for backend in scene.backends:
        backend.error = DeviceFailed("planted")
    with pytest.raises(DeviceFailed, match="planted"):
        scene.pool.embed(TEXTS)
    assert "planted" in scene.pool.failed
    for call in (scene.pool.embed, scene.pool.submit, scene.pool.check_room):
        with pytest.raises(DeviceFailed, match="planted"):
            call(["oil"])
    assert (scene.pool.stalled(), scene.pool.deaths) == (0.0, 0)


def test_an_error_of_the_texts_is_the_callers_and_ends_the_call(scene: Scene) -> None:
    scene.backends[1].error = ZeroDivisionError("planted")
    with pytest.raises(ZeroDivisionError, match="planted"):
        scene.pool.embed(TEXTS)
    assert scene.pool.failures == ["", ""]
    scene.backends[1].error = None
    assert scene.pool.embed(TEXTS).shape == (len(TEXTS), 32)


def test_positions_without_vectors_are_those_in_the_call(scene: Scene) -> None:
    for backend in scene.backends:
        backend.spoil = lambda tokens, _exact: np.nan if tokens[-1] == "bad" else None
    texts = [*TEXTS, "bad", *TEXTS[::-1], "bad"]
    texts[0] = texts[500] = "very bad"
    with pytest.raises(NonFinite) as caught:
        scene.pool.embed(texts)
    assert caught.value.indices == (0, 500, len(TEXTS), len(texts) - 1)
    with pytest.raises(NonFinite) as caught:
        scene.pool.submit(["pump", "bad"]).result(60)
    assert caught.value.indices == (1,)


# ------------------------------------------------------------------------------------------- cancelling, closing, rooms


def test_a_cancelled_call_leaves_the_queue(scene: Scene) -> None:
    for backend in scene.backends:
        backend.go.clear()
    running = [scene.pool.submit(["oil"]), scene.pool.submit(["leak"])]
    for backend in scene.backends:
        assert backend.inside.wait(60)
    call = scene.pool.submit(["pump"])
    assert call.cancel()
    for backend in scene.backends:
        backend.go.set()
    assert [future.result(60).shape for future in running] == [(1, 32)] * 2
    with pytest.raises(CancelledError):
        call.result()
    scene.pool.embed(TEXTS[:3])
    assert ["pump"] not in [text for backend in scene.backends for batch in backend.batches for text in batch]


def test_closing_fails_the_calls_that_wait(scene: Scene) -> None:
    for backend in scene.backends:
        backend.go.clear()
    call = later(lambda: scene.pool.embed(TEXTS))
    for backend in scene.backends:
        assert backend.inside.wait(60)
    closing = later(scene.pool.close)
    last = later(lambda: [scene.pool.submit([]) for _ in iter(int, 1)])  # until it raises
    assert isinstance(last.exception(60), EngineClosed)
    for backend in scene.backends:
        backend.go.set()
    closing.result(60)
    assert isinstance(call.exception(60), EngineClosed)
    assert [backend.closed for backend in scene.backends] == [1, 1]
    with pytest.raises(EngineClosed):
        scene.pool.embed([])


def test_a_call_is_refused_if_the_member_with_the_least_work_has_no_room(scene: Scene) -> None:
    refused: list[bool] = []

    class Counting(Watcher):
        def refused(self) -> None:
            refused.append(True)

    scene.pool.embed(TEXTS)  # so that each member knows its speed
    scene.pool.configure_queue(max_wait=0.0, watcher=Counting())
    for backend in scene.backends:
        backend.inside.clear()
        backend.go.clear()
    waiting = [scene.pool.submit(["oil"]), scene.pool.submit(["leak"])]
    for backend in scene.backends:
        assert backend.inside.wait(60)
    scene.pool.check_room(["pump"])
    waiting.append(scene.pool.submit(["pump"]))
    scene.pool.check_room(["pump"])  # the other one has room
    waiting.append(scene.pool.submit(["seal"]))
    for call in (scene.pool.check_room, scene.pool.submit):
        with pytest.raises(EngineOverloaded):
            call(["pump"])
    assert len(refused) >= 2
    for backend in scene.backends:
        backend.go.set()
    assert [future.result(60).shape for future in waiting] == [(1, 32)] * 4


def test_what_a_pool_says_of_itself(scene: Scene) -> None:
    with EmbeddingEngine(ScriptedBackend()) as engine:
        assert scene.pool.fingerprint == engine.fingerprint
        assert scene.pool.max_tokens == engine.max_tokens
        assert scene.pool.token_budget == 2 * engine.token_budget
        assert scene.pool.planned_tokens == 2 * engine.planned_tokens
    assert scene.pool.profile == scene.pool.members[0].profile
