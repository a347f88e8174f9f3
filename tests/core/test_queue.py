"""Many callers, one engine: who is served when, what becomes of failures, and that nobody waits for ever. The backend
computes when it is told to, so that nothing here depends on how fast anything is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.src.core import engine as engine_module
from app.src.core import queue as queue_module
from app.src.core.backends import DeviceFailed, EngineClosed, NonFinite, OutOfMemory, Pause, TokenBatch, Vectors
from app.src.core.engine import EmbeddingEngine
from app.src.core.queue import LANES, EmbeddingQueue, EngineOverloaded, Lane, Watcher, WorkerDied
from connector.errors import ConnectionLost
from tests.core.conftest import ScriptedBackend, words_by_text

PATIENCE = 20.0
"""Seconds until a test gives up; none of them waits so long when all is well."""
POISON = "poison"


class Gated(ScriptedBackend):
    """Lets each batch wait until `let` is called, unless the gate is `open`."""

    def __init__(self, *, gate_open: bool = False, pauses: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self.open = gate_open
        self.pauses = pauses
        self.fail: Callable[[list[list[str]]], BaseException | None] = lambda _batch: None
        self.seconds_per_batch = 0.0
        self.now = 1000.0
        self._reached: queue.Queue[int] = queue.Queue()
        self._permits = threading.Semaphore(0)
        self.order: list[int] = []
        """Texts of each batch, in the order in which they ended."""

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        for _ in range(self.pauses):
            self._wait(batch)
            if pause is not None:
                pause()
        self._wait(batch)
        self.now += self.seconds_per_batch
        if error := self.fail(words_by_text(batch)):
            raise error
        found = super().forward(batch, exact=exact)
        self.order.append(len(batch))
        return found

    def _wait(self, batch: TokenBatch) -> None:
        if not self.open:
            self._reached.put(len(batch))
            assert self._permits.acquire(timeout=PATIENCE), "nobody opened the gate"

    def reached(self) -> int:
        """Texts of the batch that stands, or soon will, before the gate."""
        return self._reached.get(timeout=PATIENCE)

    def let(self) -> None:
        self._permits.release()

    def let_all(self) -> None:
        self.open = True
        self._permits.release()

    def clock(self) -> float:
        return self.now


class Told(Watcher):
    """A watcher that keeps count."""

    def __init__(self) -> None:
        self.waiting = dict.fromkeys(LANES, 0)
        self.waits: list[tuple[Lane, float]] = []
        self.batches: list[tuple[Lane, int]] = []
        self.batch_tokens: list[int] = []
        self.refusals = 0
        self._lock = threading.Lock()

    def queued(self, lane: Lane, texts: int) -> None:
        with self._lock:
            self.waiting[lane] += texts

    def began(self, lane: Lane, waited: float) -> None:
        self.waits.append((lane, waited))

    def batch(self, lane: Lane, texts: int, tokens: int) -> None:
        self.batches.append((lane, texts))
        self.batch_tokens.append(tokens)

    def refused(self) -> None:
        self.refusals += 1


class Scene:
    def __init__(self, backend: Gated, max_wait: float | None = None) -> None:
        self.backend = backend
        self.told = Told()
        self.engine = EmbeddingEngine(backend, clock=backend.clock)
        self.engine.configure_queue(max_wait=max_wait, watcher=self.told)

    def close(self) -> None:
        self.backend.let_all()
        self.engine.close()


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(max_wait: float | None = None, **backend: Any) -> Scene:
        made.append(Scene(Gated(**backend), max_wait))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.fixture
def scene(scenes: Callable[..., Scene]) -> Scene:
    return scenes()


def words(*names: str, length: int = 4) -> list[str]:
    return [" ".join([name] * length) for name in names]


def many(count: int, length: int = 8) -> list[str]:
    """Different texts of so many tokens."""
    return [f"{number} " + "pump " * (length - 1) for number in range(count)]


def expected(texts: Sequence[str], *, normalize: bool = True) -> Vectors:
    """What the engine alone gives."""
    with EmbeddingEngine(ScriptedBackend()) as engine:
        return engine.embed(texts, normalize=normalize)


# ------------------------------------------------------------------------------------------------- everybody's vectors

CALLS = st.lists(
    st.tuples(st.sampled_from([*LANES, None]), st.lists(st.text("ab c", max_size=12), max_size=9)), max_size=9
)


@given(CALLS)
@settings(max_examples=30, deadline=None)
def test_every_caller_gets_his_own_vectors_in_order(calls: list[tuple[Lane | None, list[str]]]) -> None:
    scene = Scene(Gated())
    try:
        first = scene.engine.submit(["first"])
        scene.backend.reached()
        futures = [scene.engine.submit(texts, lane) for lane, texts in calls]
        scene.backend.let_all()
        np.testing.assert_array_equal(first.result(PATIENCE), expected(["first"]))
        for (_, texts), future in zip(calls, futures, strict=True):
            np.testing.assert_allclose(future.result(PATIENCE), expected(texts), atol=1e-6)
    finally:
        scene.close()
    assert scene.told.waiting == dict.fromkeys(LANES, 0)
    assert [scene.engine.queued(lane) for lane in LANES] == [(0, 0), (0, 0)]


def test_callers_in_threads_at_once(scenes: Callable[..., Scene]) -> None:
    scene = scenes(gate_open=True)
    found: dict[int, Vectors] = {}

    def call(number: int) -> None:
        lane: Lane = LANES[number % 2]
        found[number] = scene.engine.embed(many(5 + 40 * (number % 3), 2 + number), lane)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for number in range(16):
        np.testing.assert_allclose(found[number], expected(many(5 + 40 * (number % 3), 2 + number)), atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_it_gives_what_the_engine_gives(scenes: Callable[..., Scene], normalize: bool) -> None:
    scene = scenes(gate_open=True)
    texts = ["oil", "", "pump seal", "oil", "🦉 " * 300]
    for lane in (None, *LANES):
        found = scene.engine.embed(texts, lane, normalize=normalize)
        np.testing.assert_allclose(found, expected(texts, normalize=normalize), rtol=1e-6)
        assert found.dtype == np.float32
    assert scene.engine.embed([]).shape == (0, 32)
    assert scene.engine.submit([]).result(PATIENCE).shape == (0, 32)
    with pytest.raises(TypeError, match="not one string"):
        scene.engine.embed("oil")
    stats = scene.engine.stats()
    assert (stats.texts, stats.computed_texts) == (15, 12)


def test_a_large_call_goes_in_parts(scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 7)
    monkeypatch.setattr(engine_module, "REQUEST_CHARACTERS", 150)
    scene = scenes(gate_open=True)
    scene.backend.spoil = lambda tokens, _exact: np.nan if tokens[:1] == ["5"] else None
    texts = many(40)
    with pytest.raises(NonFinite) as caught:
        scene.engine.embed([*texts, texts[5]], "bulk")
    assert caught.value.indices == (5, 40)
    good = [text for text in texts if not text.startswith("5 ")]
    np.testing.assert_allclose(scene.engine.embed(good, "bulk"), expected(good), atol=1e-6)
    assert scene.told.waiting == dict.fromkeys(LANES, 0)


def test_a_call_keeps_what_the_device_takes_at_once_queued(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a few short texts would starve a device that computes 1,024 tokens at a time."""
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 7)
    scene = scenes()
    parts: queue.Queue[int] = queue.Queue()
    tokenize = scene.backend.tokenize

    def counted(texts: Sequence[str]) -> TokenBatch:
        parts.put(len(texts))
        return tokenize(texts)

    monkeypatch.setattr(scene.backend, "tokenize", counted)
    texts, found = many(2000), list[Vectors]()
    call = threading.Thread(target=lambda: found.append(scene.engine.embed(texts)))
    call.start()
    scene.backend.reached()
    tokens = sizes = 0
    while tokens < queue_module.WINDOW * scene.engine.token_budget:
        tokens += 8 * parts.get(timeout=PATIENCE)
        sizes += 1
    assert tokens / sizes > 0.5 * scene.engine.token_budget
    scene.backend.let_all()
    call.join(PATIENCE)
    np.testing.assert_allclose(found[0], expected(texts), atol=1e-6)
    assert scene.backend.order.count(1024 // 8) >= 12, "batches are full"


# ------------------------------------------------------------------------------------------------------- whose turn


def test_small_requests_that_wait_go_together(scene: Scene) -> None:
    futures = [scene.engine.submit(["alone"])]
    assert scene.backend.reached() == 1
    futures += [scene.engine.submit(words(name)) for name in "abcdefg"]
    scene.backend.let_all()
    for future in futures:
        future.result(PATIENCE)
    assert scene.backend.order == [1, 7]


def test_a_request_meets_no_wait_when_nobody_is_there(scene: Scene) -> None:
    future = scene.engine.submit(["alone"])
    assert scene.backend.reached() == 1
    scene.backend.let()
    future.result(PATIENCE)
    assert scene.told.waits == [("interactive", 0.0)]


def test_interactive_goes_before_bulk_at_every_border_of_batches(scene: Scene) -> None:
    bulk = scene.engine.submit(many(600), "bulk")
    assert scene.backend.reached() == 128  # 1024 tokens
    query = scene.engine.submit(["who waits"], "interactive")
    scene.backend.let()
    assert scene.backend.reached() == 1
    assert not bulk.done()
    scene.backend.let_all()
    query.result(PATIENCE)
    np.testing.assert_allclose(bulk.result(PATIENCE), expected(many(600)), atol=1e-6)
    assert [lane for lane, _ in scene.told.batches[:3]] == ["bulk", "interactive", "bulk"]


def test_bulk_batches_are_small_while_somebody_interactive_is_there(scene: Scene) -> None:
    """At 200 tokens a second a step of 5 ms would hold one text: it holds a quarter of a batch."""
    backend = scene.backend
    backend.seconds_per_batch = 5.12
    bulk = scene.engine.submit(many(600), "bulk")
    backend.reached()
    backend.let()
    assert backend.reached() == 128  # nobody interactive yet
    query = scene.engine.submit(["who waits"], "interactive")
    backend.let()
    assert backend.reached() == 1
    backend.seconds_per_batch = 0.01
    backend.let()
    assert backend.reached() == 32
    backend.now += queue_module.RECENT_SECONDS
    backend.let()
    assert backend.reached() == 96  # the rest of the batch that was planned
    backend.let_all()
    query.result(PATIENCE)
    bulk.result(PATIENCE)


def test_bulk_is_not_starved(scene: Scene) -> None:
    """Somebody interactive is always there; each batch takes 0.06 s."""
    backend = scene.backend
    backend.seconds_per_batch = 0.06
    bulk = scene.engine.submit(many(20, 250), "bulk")
    queries = [scene.engine.submit(["query 0"], "interactive")]
    lanes = ""
    for number in range(1, 40):
        backend.reached()
        queries.append(scene.engine.submit([f"query {number}"], "interactive"))
        backend.let()
    backend.let_all()
    bulk.result(PATIENCE)
    for query in queries:
        query.result(PATIENCE)
    lanes = "".join(lane[0] for lane, _ in scene.told.batches)
    assert "biibiibii" in lanes
    assert "iii" not in lanes[: lanes.rindex("b")]


def test_a_query_passes_in_the_midst_of_a_batch(scenes: Callable[..., Scene]) -> None:
    scene = scenes(pauses=3)
    backend = scene.backend
    bulk = scene.engine.submit(many(100), "bulk")
    assert backend.reached() == 100
    backend.let()
    assert backend.reached() == 100  # one layer is done
    query = scene.engine.submit(["who waits"], "interactive")
    backend.let()
    assert backend.reached() == 1
    assert not bulk.done()
    for _ in range(4):
        backend.let()
    query.result(PATIENCE)
    assert not bulk.done()
    backend.let_all()
    np.testing.assert_allclose(bulk.result(PATIENCE), expected(many(100)), atol=1e-6)
    assert backend.order == [1, 100]
    assert scene.told.batches == [("bulk", 100), ("interactive", 1)]
    assert sum(scene.told.batch_tokens) == scene.engine.stats().tokens, "tokens are told without padding"


def test_a_query_passes_between_the_layers_of_a_real_model(
    minilm: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks when the first layer of the bulk batch is done, so nothing depends on speed."""
    told, ended, texts = Told(), [], many(40)
    minilm.configure_queue(watcher=told)
    queue = minilm._queue
    pass_interactive = queue._pass_interactive
    queries: list[Any] = []

    def ask_once() -> None:
        if not queries:
            queries.append(minilm.submit(["who waits"], "interactive"))
            queries[0].add_done_callback(lambda _: ended.append("query"))
        pass_interactive()

    monkeypatch.setattr(queue, "_pass_interactive", ask_once)
    bulk = minilm.submit(texts, "bulk")
    bulk.add_done_callback(lambda _: ended.append("bulk"))
    found = bulk.result(PATIENCE)
    assert ended == ["query", "bulk"]
    assert told.batches.index(("interactive", 1)) == 1, "it went while the first bulk batch was computed"
    assert sum(texts for lane, texts in told.batches if lane == "bulk") == 40, (
        "in as many batches as the machine's speed asks"
    )
    assert minilm._runner.steps == 7
    minilm.configure_queue(watcher=Watcher())
    np.testing.assert_allclose(found, minilm.embed(texts), atol=1e-5)
    np.testing.assert_allclose(queries[0].result(PATIENCE), minilm.embed(["who waits"]), atol=1e-5)


def test_a_batch_that_lets_pass_comes_to_its_end_all_the_same(scenes: Callable[..., Scene]) -> None:
    scene = scenes(pauses=3)
    backend = scene.backend
    backend.seconds_per_batch = 0.06
    bulk = scene.engine.submit(many(100), "bulk")
    futures = [bulk]
    while not backend.order or max(backend.order) < 100:
        backend.reached()
        futures.append(scene.engine.submit([f"query {len(futures)}"], "interactive"))
        backend.let()
        assert len(futures) < 40, "bulk work starves"
    backend.let_all()
    for future in futures:
        future.result(PATIENCE)


def test_what_passes_may_fail_without_harm(scenes: Callable[..., Scene]) -> None:
    scene = scenes(pauses=1)
    backend = scene.backend
    backend.fail = lambda batch: RuntimeError("planted") if len(batch) == 1 else None
    bulk = scene.engine.submit(many(10), "bulk")
    backend.reached()
    query = scene.engine.submit(["who waits"], "interactive")
    backend.let_all()
    with pytest.raises(RuntimeError, match="planted"):
        query.result(PATIENCE)
    np.testing.assert_allclose(bulk.result(PATIENCE), expected(many(10)), atol=1e-6)


def test_a_small_bulk_request_does_not_wait_for_a_large_one(scene: Scene) -> None:
    large = scene.engine.submit(many(2000), "bulk")
    scene.backend.reached()
    small = scene.engine.submit(words("a", "b"), "bulk")
    for _ in range(10):
        scene.backend.let()
        scene.backend.reached()
    small.result(PATIENCE)
    assert not large.done()


def test_a_request_chooses_its_lane_by_its_size(scene: Scene) -> None:
    texts = many(600)
    scene.engine.submit(["at the gate"])
    scene.backend.reached()
    for count, lane in ((32, "interactive"), (33, "bulk")):  # a quarter of 1024 tokens
        before = scene.told.waiting[lane]  # type: ignore[index]
        scene.engine.submit(texts[:count])
        assert scene.told.waiting[lane] - before == count  # type: ignore[index]


# --------------------------------------------------------------------------------------------- leaving, and overload


@pytest.mark.proves(28)
def test_what_is_cancelled_is_never_computed(scene: Scene) -> None:
    scene.engine.submit(["at the gate"])
    scene.backend.reached()
    gone = [scene.engine.submit(many(50), lane) for lane in LANES]
    kept = scene.engine.submit(["stays"])
    assert [scene.engine.queued(lane)[0] for lane in LANES] == [51, 50]
    assert all(future.cancel() for future in gone)
    assert [scene.engine.queued(lane)[0] for lane in LANES] == [1, 0]
    scene.backend.let_all()
    kept.result(PATIENCE)
    assert scene.backend.order == [1, 1]
    assert scene.told.waiting == dict.fromkeys(LANES, 0)


@pytest.mark.proves(28)
def test_of_a_request_cancelled_half_way_the_rest_is_dropped(scene: Scene) -> None:
    bulk = scene.engine.submit(many(600), "bulk")
    scene.backend.reached()
    assert bulk.cancel()
    scene.backend.let_all()
    scene.engine.embed(["next"])
    assert scene.backend.order == [128, 1]


@pytest.mark.proves(28)
def test_an_interrupted_caller_leaves_nothing_in_the_queue(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.engine.submit(["at the gate"])
    scene.backend.reached()

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue_module, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.engine.embed(many(50), "bulk")
    assert scene.engine.queued("bulk") == (0, 0)
    scene.backend.let_all()
    assert scene.engine.embed(["next"]).shape == (1, 32)
    assert 50 not in scene.backend.order


@pytest.mark.proves(27)
def test_who_would_wait_too_long_is_refused(scenes: Callable[..., Scene]) -> None:
    scene = scenes(max_wait=2.0)
    backend = scene.backend
    backend.seconds_per_batch = 1.0
    first = scene.engine.submit(many(10, 10))  # 100 tokens in one second
    backend.reached()
    backend.let()
    first.result(PATIENCE)
    waiting = [scene.engine.submit(["at the gate"])]
    backend.reached()
    waiting += [scene.engine.submit(many(10, 10)) for _ in range(3)]  # before the third there are 2 seconds' worth
    with pytest.raises(EngineOverloaded, match=r"busy for another 3 s.*2 s is the longest wait") as caught:
        scene.engine.submit(["one more"])
    assert caught.value.retryable
    assert caught.value.seconds == pytest.approx(3.0, abs=0.6), "what is said is what was measured"
    with pytest.raises(EngineOverloaded):
        scene.engine.embed(["one more"], "interactive")
    assert scene.told.refusals == 2
    waiting.append(scene.engine.submit(many(1000), "bulk"))  # who has time is not refused
    backend.let_all()
    for future in waiting:
        future.result(PATIENCE)
    assert scene.engine.embed(["again"], "interactive").shape == (1, 32)


def test_large_requests_that_somebody_waits_for_are_refused_too(scenes: Callable[..., Scene]) -> None:
    scene = scenes(max_wait=2.0)
    backend = scene.backend
    backend.seconds_per_batch = 1.0
    first = scene.engine.submit(many(10, 10))
    backend.reached()
    backend.let()
    first.result(PATIENCE)
    large = many(60, 10)  # above a quarter of a batch, so it takes its turn with the bulk work
    scene.engine.submit(["at the gate"])
    backend.reached()
    sync = scene.engine.submit(large, "bulk")  # does not count against those who wait
    waiting = scene.engine.submit(large)
    assert scene.engine.queued("bulk")[0] == 120
    with pytest.raises(EngineOverloaded):
        scene.engine.submit(large)
    backend.let_all()
    for future in (sync, waiting):
        future.result(PATIENCE)


def test_few_tokens_say_nothing_about_speed(scenes: Callable[..., Scene]) -> None:
    scene = scenes(max_wait=0.001, gate_open=True)
    scene.backend.seconds_per_batch = 1.0
    for number in range(20):
        scene.engine.submit([f"query {number}"]).result(PATIENCE)
    assert scene.engine.submit(many(5)).result(PATIENCE).shape == (5, 32)


# ----------------------------------------------------------------------------------------------------------- failures


def test_who_cannot_be_planned_for_is_told_and_the_others_are_served(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes()
    plan, failing = scene.engine._runner.plan, [True]

    def fail_once(lengths: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        if failing:
            failing.clear()
            raise MemoryError
        return plan(lengths)

    scene.engine.submit(["at the gate"])
    scene.backend.reached()
    monkeypatch.setattr(scene.engine._runner, "plan", fail_once)
    query, bulk = scene.engine.submit(["query"], "interactive"), scene.engine.submit(many(20), "bulk")
    scene.backend.let_all()
    with pytest.raises(MemoryError):
        query.result(PATIENCE)
    assert bulk.result(PATIENCE).shape == (20, 32)
    assert scene.engine.submit(["next"]).result(PATIENCE).shape == (1, 32)


def is_poison(tokens: list[str]) -> bool:
    return tokens[:1] == [POISON]


def together(scene: Scene, *calls: list[str]) -> list[Any]:
    """The futures of requests that are computed in one batch."""
    scene.engine.submit(["at the gate"])
    scene.backend.reached()
    futures = [scene.engine.submit(texts, "interactive") for texts in calls]
    scene.backend.let_all()
    return futures


def test_a_text_without_a_vector_fails_its_own_request_only(scene: Scene) -> None:
    scene.backend.spoil = lambda tokens, _exact: np.nan if is_poison(tokens) else None
    good, bad, other = together(scene, ["a", "b"], ["c", POISON, "d", POISON], ["e"])
    np.testing.assert_allclose(good.result(PATIENCE), expected(["a", "b"]), atol=1e-6)
    np.testing.assert_allclose(other.result(PATIENCE), expected(["e"]), atol=1e-6)
    with pytest.raises(NonFinite) as caught:
        bad.result(PATIENCE)
    assert caught.value.indices == (1, 3)
    assert scene.backend.exact_rows == 1


def test_a_failing_batch_fails_the_request_to_blame_only(scene: Scene) -> None:
    scene.backend.fail = lambda batch: RuntimeError("planted") if any(map(is_poison, batch)) else None
    good, bad, other = together(scene, ["a", "b"], ["c", POISON], ["e"])
    np.testing.assert_allclose(good.result(PATIENCE), expected(["a", "b"]), atol=1e-6)
    np.testing.assert_allclose(other.result(PATIENCE), expected(["e"]), atol=1e-6)
    with pytest.raises(RuntimeError, match="planted"):
        bad.result(PATIENCE)
    np.testing.assert_allclose(scene.engine.embed(["next"]), expected(["next"]), atol=1e-6)


def test_a_retryable_error_fails_a_batch_that_is_not_computed_again(scene: Scene) -> None:
    """Such as that of a HANA that does not answer: each try would last minutes."""
    tried: list[int] = []

    def fail(batch: list[list[str]]) -> BaseException | None:
        tried.append(len(batch))
        return ConnectionLost("HANA is silent") if len(batch) > 1 else None

    scene.backend.fail = fail
    for future in together(scene, ["a", "b"], ["c"], ["e"]):
        with pytest.raises(ConnectionLost, match="silent"):
            future.result(PATIENCE)
    assert tried == [1, 4]
    assert scene.engine.submit(["next"]).result(PATIENCE).shape == (1, 32)


@pytest.mark.proves(20)
def test_a_device_that_fails_is_not_tried_with_each_request(scene: Scene) -> None:
    """Here it computes at once, as on a CPU or in ONNX Runtime."""
    tried: list[int] = []

    def fail(batch: list[list[str]]) -> BaseException | None:
        tried.append(len(batch))
        return DeviceFailed("the card is gone") if len(batch) > 1 else None

    scene.backend.fail = fail
    for future in together(scene, ["a", "b"], ["c"], ["e"]):
        with pytest.raises(DeviceFailed, match="the card is gone"):
            future.result(PATIENCE)
    assert tried == [1, 4], "the batch in hand, and theirs"
    assert scene.engine.failed == "the card is gone"
    assert scene.engine.deaths == 0


def test_memory_that_runs_out_means_smaller_batches(scenes: Callable[..., Scene]) -> None:
    scene = scenes(most_tokens=100)
    scene.backend.let_all()
    np.testing.assert_allclose(scene.engine.embed(many(100), "bulk"), expected(many(100)), atol=1e-6)
    assert max(scene.backend.order) * 8 <= 100
    assert scene.engine.stats().out_of_memory > 0


def test_a_text_too_large_for_memory_fails_its_own_request_only(scenes: Callable[..., Scene]) -> None:
    scene = scenes(most_tokens=100)
    good, bad = together(scene, words("a", "b"), [*words("c"), "x " * 101])
    np.testing.assert_allclose(good.result(PATIENCE), expected(words("a", "b")), atol=1e-6)
    with pytest.raises(OutOfMemory):
        bad.result(PATIENCE)
    assert scene.engine.embed(["next"]).shape == (1, 32)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.proves(29)
def test_a_dying_thread_takes_its_batch_with_it_and_nothing_else(scene: Scene, kind: type[BaseException]) -> None:
    dying = scene.engine.submit(many(50), "bulk")
    scene.backend.reached()
    queued = [scene.engine.submit(many(3), lane) for lane in LANES]
    scene.backend.fail = lambda batch: kind() if len(batch) == 50 else None
    scene.backend.let_all()
    with pytest.raises(WorkerDied) as caught:
        dying.result(PATIENCE)
    assert isinstance(caught.value.__cause__, kind)
    for future in queued:
        np.testing.assert_allclose(future.result(PATIENCE), expected(many(3)), atol=1e-6)


@pytest.mark.proves(29)
def test_a_thread_that_vanished_is_noticed_and_replaced(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word, as after a fork: those who wait look after it."""
    monkeypatch.setattr(queue_module, "_WATCH_SECONDS", 0.01)
    scene = scenes(gate_open=True)
    work = EmbeddingQueue._work

    def vanish(queue: EmbeddingQueue) -> None:
        monkeypatch.setattr(EmbeddingQueue, "_work", work)
        queue._next()

    monkeypatch.setattr(EmbeddingQueue, "_work", vanish)
    with pytest.raises(WorkerDied, match="ended unexpectedly"):
        scene.engine.embed(many(50), "bulk")
    assert scene.engine.embed(["next"]).shape == (1, 32)


# ---------------------------------------------------------------------------------------------------------------- end


def test_closing_ends_everybodys_waiting(scene: Scene) -> None:
    in_hand = scene.engine.submit(["in hand"])
    scene.backend.reached()
    half, queued = scene.engine.submit(many(600), "bulk"), scene.engine.submit(["queued"])
    closing = threading.Thread(target=scene.engine.close)
    closing.start()
    for future in (half, queued):
        with pytest.raises(EngineClosed, match="is closed"):
            future.result(PATIENCE)
    assert closing.is_alive()  # it waits for the batch in hand
    scene.backend.let_all()
    closing.join(PATIENCE)
    np.testing.assert_array_equal(in_hand.result(PATIENCE), expected(["in hand"]))
    assert scene.told.waiting == dict.fromkeys(LANES, 0)
    for call in (scene.engine.embed, scene.engine.submit):
        with pytest.raises(EngineClosed):
            call(["too late"])
    scene.engine.close()


def test_closing_while_a_batch_dies_leaves_nobody_waiting(scene: Scene) -> None:
    dying = scene.engine.submit(["in hand"])
    scene.backend.reached()
    scene.backend.fail = lambda _batch: SystemExit()
    closing = threading.Thread(target=scene.engine.close)
    closing.start()
    scene.backend.let_all()
    with pytest.raises(WorkerDied):
        dying.result(PATIENCE)
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_an_engine_that_was_closed_says_so(scene: Scene) -> None:
    scene.engine.close()
    with pytest.raises(EngineClosed):
        scene.engine.embed(["too late"])


def test_an_idle_thread_ends_and_another_one_starts(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "IDLE_SECONDS", 0.01)
    scene = scenes(gate_open=True)
    scene.engine.embed(["first"])
    thread = scene.engine._queue._thread
    if thread is not None:
        thread.join(PATIENCE)
    assert scene.engine._queue._thread is None
    assert scene.engine.embed(["second"]).shape == (1, 32)
