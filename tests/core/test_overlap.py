"""A device that works on its own: the next batch is launched before this one is waited for, and whatever goes wrong,
goes wrong late. The device of these tests computes when its result is asked for, or is told to; so nothing depends on
time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core import queue as queue_module
from app.src.core.backends import DeviceFailed, EngineClosed, NonFinite, OutOfMemory, Running, TokenBatch, Vectors
from app.src.core.engine import EmbeddingEngine
from app.src.core.queue import LANES, BatchRunner, Lane, WorkerDied
from tests.core.conftest import ScriptedBackend, words_by_text

PATIENCE = 20.0
POISON = "poison"


class Remote(ScriptedBackend):
    """`launch` only notes the batch; everything happens, and fails, in `result`. While the gate is shut each result
    waits for `let`."""

    def __init__(self, most_tokens: int | None = None, *, gate_open: bool = True) -> None:
        super().__init__(most_tokens)
        self.ahead = 1
        self.open = gate_open
        self.events: list[tuple[str, int]] = []
        """("launch" or "result", number of the batch), in order."""
        self.sizes: list[int] = []
        self.fail: Callable[[list[list[str]]], BaseException | None] = lambda _batch: None
        self.fail_launch: Callable[[list[list[str]]], BaseException | None] = lambda _batch: None
        self.now = 1000.0
        self.seconds_per_batch = 0.0
        self.launched: queue.Queue[int] = queue.Queue()
        self._permits = threading.Semaphore(0)

    def launch(self, batch: TokenBatch) -> Running:
        number = len(self.sizes)
        self.sizes.append(len(batch))
        self.events.append(("launch", number))
        self.launched.put(len(batch))
        if error := self.fail_launch(words_by_text(batch)):
            raise error
        return Awaited(self, number, batch).result

    def end(self, number: int, batch: TokenBatch) -> Vectors:
        if not self.open:
            assert self._permits.acquire(timeout=PATIENCE), "nobody opened the gate"
        self.events.append(("result", number))
        self.now += self.seconds_per_batch
        if error := self.fail(words_by_text(batch)):
            raise error
        return self.forward(batch)

    def let(self) -> None:
        self._permits.release()

    def let_all(self) -> None:
        self.open = True
        for _ in range(8):
            self._permits.release()

    def clock(self) -> float:
        return self.now


class Awaited:
    def __init__(self, backend: Remote, number: int, batch: TokenBatch) -> None:
        self._backend, self._number, self._batch = backend, number, batch

    def result(self) -> Vectors:
        return self._backend.end(self._number, self._batch)


@pytest.fixture
def remote() -> Remote:
    return Remote()


def many(count: int, length: int = 8) -> list[str]:
    return [f"{number} " + "pump " * (length - 1) for number in range(count)]


def expected(texts: Sequence[str]) -> Vectors:
    with EmbeddingEngine(ScriptedBackend()) as engine:
        return engine.embed(texts)


def is_poison(tokens: list[str]) -> bool:
    return tokens[:1] == [POISON]


def in_flight(events: Sequence[tuple[str, int]]) -> list[int]:
    """How many batches were on their way after each event."""
    launched = np.cumsum([1 if what == "launch" else -1 for what, _ in events])
    return [int(each) for each in launched]


# ----------------------------------------------------------------------------------------------------------- one caller


def test_the_next_batch_is_launched_before_this_one_is_waited_for(remote: Remote) -> None:
    np.testing.assert_allclose(EmbeddingEngine(remote).embed(many(600)), expected(many(600)), atol=1e-6)
    count = len(remote.sizes)
    assert count == 5
    order = [("launch", 0)]
    for number in range(1, count):
        order += [("launch", number), ("result", number - 1)]
    assert remote.events == [*order, ("result", count - 1)]


def test_switched_off_nothing_is_launched_ahead(remote: Remote) -> None:
    remote.ahead = 0
    engine = EmbeddingEngine(remote)
    np.testing.assert_allclose(engine.embed(many(600)), expected(many(600)), atol=1e-6)
    assert (engine._runner.ahead, remote.events) == (0, [])


@pytest.mark.parametrize("most_tokens", [40, 64, 300, 700])
@pytest.mark.proves(19)
def test_memory_that_runs_out_late_halves_and_changes_nothing(most_tokens: int) -> None:
    engine = EmbeddingEngine(Remote(most_tokens))
    before = engine.memory.token_budget
    np.testing.assert_allclose(engine.embed(many(500)), expected(many(500)), atol=1e-6)
    assert most_tokens / 2 < engine.memory.token_budget < before


def test_two_batches_of_one_plan_that_fail_halve_the_budget_once() -> None:
    remote = Remote(most_tokens=600)
    engine = EmbeddingEngine(remote)
    engine.embed(many(256))  # two batches of 1,024 tokens, both on their way when the first fails
    assert engine.memory.token_budget == 512
    assert engine.stats().out_of_memory == 2


def test_what_was_planned_before_memory_ran_out_is_planned_again() -> None:
    """Five batches were; only the first one fails."""
    engine = EmbeddingEngine(ScriptedBackend(most_tokens=600))
    np.testing.assert_allclose(engine.embed(many(600)), expected(many(600)), atol=1e-6)
    assert engine.stats().out_of_memory == 1


def test_memory_that_runs_out_at_launching_is_told_by_the_result() -> None:
    remote = Remote()
    remote.fail_launch = lambda batch: OutOfMemory("planted") if len(batch) > 70 else None
    engine = EmbeddingEngine(remote)
    np.testing.assert_allclose(engine.embed(many(500)), expected(many(500)), atol=1e-6)


def test_an_error_comes_out_and_leaves_a_healthy_engine(remote: Remote) -> None:
    engine = EmbeddingEngine(remote)
    remote.fail = lambda batch: RuntimeError("planted") if any(map(is_poison, batch)) else None
    with pytest.raises(RuntimeError, match="planted"):
        engine.embed([*many(600), f"{POISON} " * 9])
    np.testing.assert_allclose(engine.embed(many(5)), expected(many(5)), atol=1e-6)
    assert in_flight(remote.events)[-1] == 0


@pytest.mark.proves(21)
def test_rows_that_overflow_are_computed_again_while_the_next_batch_is_on_its_way(remote: Remote) -> None:
    remote.spoil = lambda tokens, exact: np.nan if is_poison(tokens) and not exact else None
    texts = [*many(300), POISON, f"{POISON} b"]
    np.testing.assert_allclose(EmbeddingEngine(remote).embed(texts), expected(texts), atol=1e-6)
    assert remote.exact_rows == 2
    remote.spoil = lambda tokens, _exact: np.nan if is_poison(tokens) else None
    with pytest.raises(NonFinite) as caught:
        EmbeddingEngine(remote).embed(texts)
    assert caught.value.indices == (300, 301)


def test_closing_refuses_the_next_launch_and_leaves_what_was_launched(remote: Remote) -> None:
    runner = BatchRunner(remote)
    tokens = remote.tokenize(many(3))
    running = runner.begin(tokens)
    runner.close()
    np.testing.assert_array_equal(running(), remote.forward(tokens))
    with pytest.raises(EngineClosed):
        runner.begin(tokens)()
    assert remote.closed == 1


def test_the_time_of_two_batches_at_once_counts_once(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched at 0 and 1, ended at 10 and 14: busy for 14 seconds, not for 23."""
    now = iter([0.0, 1.0, 10.0, 14.0])
    monkeypatch.setattr("app.src.core.queue.time.perf_counter", lambda: next(now))
    runner = BatchRunner(remote)
    tokens = remote.tokenize(many(3))
    first, second = runner.begin(tokens), runner.begin(tokens)
    first()
    assert runner.stats().compute_seconds == 10.0
    second()
    assert runner.stats().compute_seconds == 14.0


def test_callers_in_threads_launch_between_each_other(remote: Remote) -> None:
    engine = EmbeddingEngine(remote)
    found: dict[int, Vectors] = {}

    def call(number: int) -> None:
        found[number] = engine.embed(many(50 * number, 2 + number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for number in range(1, 9):
        np.testing.assert_allclose(found[number], expected(many(50 * number, 2 + number)), atol=1e-6)


# --------------------------------------------------------------------------------------------------------- many callers


class Scene:
    def __init__(self, backend: Remote) -> None:
        self.backend = backend
        self.engine = EmbeddingEngine(backend, clock=backend.clock)

    def close(self) -> None:
        self.backend.let_all()
        self.engine.close()


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**backend: Any) -> Scene:
        made.append(Scene(Remote(**backend)))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.fixture
def shut(scenes: Callable[..., Scene]) -> Scene:
    return scenes(gate_open=False)


def test_the_queue_keeps_one_batch_ahead(scenes: Callable[..., Scene]) -> None:
    scene = scenes()
    np.testing.assert_allclose(scene.engine.embed(many(1200), "bulk"), expected(many(1200)), atol=1e-6)
    events = scene.backend.events
    assert max(in_flight(events)) == 2
    assert [number for what, number in events if what == "result"] == list(range(len(scene.backend.sizes)))
    ahead = [events.index(("launch", number + 1)) < events.index(("result", number)) for number in range(8)]
    assert all(ahead)


def test_a_single_query_does_not_wait_for_company(shut: Scene) -> None:
    query = shut.engine.submit(["alone"])
    assert shut.backend.launched.get(timeout=PATIENCE) == 1
    shut.backend.let()
    assert query.result(PATIENCE).shape == (1, 32)
    assert shut.backend.events == [("launch", 0), ("result", 0)]


def test_a_query_is_launched_behind_the_batch_that_computes(shut: Scene) -> None:
    """It need not wait for the bulk batch to come back, nor for the next one."""
    backend = shut.backend
    bulk = shut.engine.submit(many(600), "bulk")
    assert [backend.launched.get(timeout=PATIENCE) for _ in range(2)] == [128, 128]
    query = shut.engine.submit(["who waits"], "interactive")
    backend.let()
    assert backend.launched.get(timeout=PATIENCE) == 1
    backend.let()
    backend.let()
    query.result(PATIENCE)
    assert not bulk.done()
    backend.let_all()
    np.testing.assert_allclose(bulk.result(PATIENCE), expected(many(600)), atol=1e-6)


def test_steps_of_bulk_work_are_half_as_long_with_one_ahead(shut: Scene) -> None:
    """Whoever interactive comes waits for both, so both together take what one took."""
    backend = shut.backend
    backend.seconds_per_batch = 5.0
    first = shut.engine.submit(many(100), "bulk")
    backend.let()
    first.result(PATIENCE)
    query = shut.engine.submit(["was here lately"])
    backend.let()
    query.result(PATIENCE)
    while not backend.launched.empty():
        backend.launched.get()
    bulk = shut.engine.submit(many(600), "bulk")
    assert [backend.launched.get(timeout=PATIENCE) for _ in range(2)] == [16, 16]  # an eighth of 1,024 tokens
    backend.let_all()
    while not bulk.done():
        backend.let_all()
        bulk.exception(PATIENCE)
    np.testing.assert_allclose(bulk.result(), expected(many(600)), atol=1e-6)


def test_a_shrunken_budget_recovers_while_somebody_searches(scenes: Callable[..., Scene]) -> None:
    """Steps that get smaller with the budget would never be full, and nothing would ever grow again."""
    scene = scenes()
    scene.backend.seconds_per_batch = 0.01  # so that steps are as small as they may be
    full = scene.engine.token_budget
    while scene.engine.token_budget > 64:
        scene.engine.memory.shrink(scene.engine.token_budget)
    for _ in range(10):
        scene.engine.embed(["who searches"], "interactive")
        scene.engine.embed(many(800), "bulk")
    assert full // 8 <= scene.engine.token_budget <= full
    assert max(scene.backend.sizes[-10:]) == full // 8 // 8  # texts of 8 tokens


CALLS = st.lists(
    st.tuples(st.sampled_from([*LANES, None]), st.integers(0, 40), st.sampled_from(["", "", POISON, "nan"])), max_size=9
)


@settings(max_examples=30, deadline=None)
@given(calls=CALLS, most=st.sampled_from([None, 60, 200]), length=st.integers(1, 12))
def test_everybody_gets_his_own_vectors_or_his_own_error(
    calls: list[tuple[Lane | None, int, str]], most: int | None, length: int
) -> None:
    remote = Remote(most)
    remote.fail = lambda batch: RuntimeError("planted") if any(map(is_poison, batch)) else None
    remote.spoil = lambda tokens, _exact: np.nan if tokens[:1] == ["nan"] else None
    scene = Scene(remote)
    try:
        wanted = [[*many(count, length), *([extra] if extra else [])] for _, count, extra in calls]
        futures = [scene.engine.submit(texts, calls[place][0]) for place, texts in enumerate(wanted)]
        for (_, count, extra), texts, future in zip(calls, wanted, futures, strict=True):
            if extra == POISON:
                with pytest.raises(RuntimeError, match="planted"):
                    future.result(PATIENCE)
            elif extra:
                with pytest.raises(NonFinite) as caught:
                    future.result(PATIENCE)
                assert caught.value.indices == (count,)
            else:
                np.testing.assert_allclose(future.result(PATIENCE), expected(texts), atol=1e-6)
    finally:
        scene.close()
    assert in_flight(remote.events)[-1:] in ([], [0])


def test_what_is_cancelled_on_its_way_harms_nobody(shut: Scene) -> None:
    backend = shut.backend
    gone = shut.engine.submit(many(600), "bulk")
    for _ in range(2):
        backend.launched.get(timeout=PATIENCE)
    assert gone.cancel()
    kept = shut.engine.submit(["stays"])
    backend.let_all()
    np.testing.assert_allclose(kept.result(PATIENCE), expected(["stays"]), atol=1e-6)
    assert backend.sizes == [128, 128, 1]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("late", [True, False])
def test_a_dying_thread_takes_what_was_launched_with_it_and_nothing_else(
    shut: Scene, kind: type[BaseException], late: bool
) -> None:
    backend = shut.backend
    if late:
        backend.fail = lambda batch: kind() if len(batch) == 30 else None
    else:
        backend.fail_launch = lambda batch: kind() if len(batch) == 100 else None
    shut.engine.submit(["at the gate"])
    assert backend.launched.get(timeout=PATIENCE) == 1
    query = shut.engine.submit(many(30), "interactive")  # first: the thread may look for more work between the two
    bulk = shut.engine.submit(many(100), "bulk")
    backend.let()
    assert [backend.launched.get(timeout=PATIENCE) for _ in range(2)] == [30, 100]
    queued = shut.engine.submit(many(5), "bulk")
    backend.let_all()
    for future in (query, bulk):
        outcome = future.exception(PATIENCE)
        assert isinstance(outcome, WorkerDied)
        assert isinstance(outcome.__cause__, kind)
    np.testing.assert_allclose(queued.result(PATIENCE), expected(many(5)), atol=1e-6)


def test_a_batch_that_dies_behind_one_that_came_back_is_not_forgotten(shut: Scene) -> None:
    backend = shut.backend
    backend.fail = lambda batch: SystemExit() if backend.events[-1] == ("result", 1) else None
    bulk = shut.engine.submit(many(256), "bulk")
    for _ in range(2):
        backend.launched.get(timeout=PATIENCE)
    backend.let_all()
    assert isinstance(bulk.exception(PATIENCE), WorkerDied)


def test_a_failing_launch_leaves_the_batch_before_it_alone(shut: Scene) -> None:
    backend = shut.backend
    backend.fail_launch = lambda batch: RuntimeError("planted") if any(map(is_poison, batch)) else None
    good = shut.engine.submit(many(128), "bulk")
    backend.launched.get(timeout=PATIENCE)
    bad = shut.engine.submit([POISON], "interactive")
    backend.let_all()
    with pytest.raises(RuntimeError, match="planted"):
        bad.result(PATIENCE)
    np.testing.assert_allclose(good.result(PATIENCE), expected(many(128)), atol=1e-6)


@pytest.mark.parametrize("late", [True, False], ids=["result", "launch"])
@pytest.mark.proves(20)
def test_a_device_that_fails_ends_every_request_at_once(shut: Scene, late: bool) -> None:
    """Those of the batches launched, those that wait and those that come later; none is tried again. Batches that were
    computed before a launch failed are delivered."""
    backend, engine = shut.backend, shut.engine
    bulk = engine.submit(many(256), "bulk")
    for _ in range(2):
        backend.launched.get(timeout=PATIENCE)
    waiting = [engine.submit(many(3), lane) for lane in LANES] + [engine.submit(many(600), "bulk")]
    setattr(backend, "fail" if late else "fail_launch", lambda _batch: DeviceFailed("CUDA error: the card is gone"))
    assert engine.failed == ""
    backend.let_all()
    if not late:
        np.testing.assert_allclose(bulk.result(PATIENCE), expected(many(256)), atol=1e-6)
    for future in (bulk, *waiting)[not late :]:
        with pytest.raises(DeviceFailed, match="the card is gone"):
            future.result(PATIENCE)
    assert engine.failed == "CUDA error: the card is gone"
    computed = len(backend.sizes)
    for call in (engine.embed, engine.submit, engine.embed_counted):
        with pytest.raises(DeviceFailed, match="the card is gone"):
            call(["too late"])
    assert engine.count_tokens(["too late"]) == [2], "for which no device is needed"
    assert computed == len(backend.sizes) == (2 if late else 4), "nothing is launched any more"
    assert [engine.queued(lane) for lane in LANES] == [(0, 0), (0, 0)]
    engine.close()
    assert backend.closed == 1
    with pytest.raises(EngineClosed):
        engine.embed(["too late"])


def test_closing_waits_for_both_and_delivers_them(shut: Scene) -> None:
    backend = shut.backend
    launched = shut.engine.submit(many(256), "bulk")
    for _ in range(2):
        backend.launched.get(timeout=PATIENCE)
    queued = shut.engine.submit(many(600), "bulk")
    closing = threading.Thread(target=shut.engine.close)
    closing.start()
    with pytest.raises(EngineClosed):
        queued.result(PATIENCE)
    assert closing.is_alive()
    backend.let_all()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    np.testing.assert_allclose(launched.result(PATIENCE), expected(many(256)), atol=1e-6)


def test_an_idle_thread_ends_with_nothing_on_its_way(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "IDLE_SECONDS", 0.01)
    scene = scenes()
    scene.engine.embed(many(300), "bulk")
    thread = scene.engine._queue._thread
    if thread is not None:
        thread.join(PATIENCE)
    assert scene.engine._queue._thread is None
    assert scene.engine._queue._in_progress == []
    assert scene.engine.embed(["again"]).shape == (1, 32)
