"""Several engines behind one: division, order, failures of members, cancelling, closing; members in child processes."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core import child as child_module
from app.src.core import loading
from app.src.core import pool as pool_module
from app.src.core.backends import (
    DeviceFailed,
    DeviceUnavailable,
    EngineClosed,
    EngineError,
    ModelNotFound,
    NonFinite,
    OutOfMemory,
    Pause,
    TokenBatch,
    Vectors,
    WeightsMismatch,
)
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.backends.torch.backend import TorchBackend
from app.src.core.child import ChildEngine
from app.src.core.child_process import Calls
from app.src.core.device import detect, devices_of
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine, load_tokenizer_engine
from app.src.core.pool import EnginePool
from app.src.core.queue import EngineOverloaded, Lane, Watcher, WorkerDied
from tests.core.conftest import MakeFolder, ScriptedBackend, words_by_text

FEW = settings(max_examples=20, deadline=None)
TEXTS = [
    " ".join(f"word{number % 17} pump seal".split()[: 1 + number % 3] * (1 + number % 23)) for number in range(900)
]
TEXTS = [f"{number} {text}" for number, text in enumerate(TEXTS)]
CPUS = ["cpu:0", "cpu:1"]


class Gated(ScriptedBackend):
    """Waits in each batch until `go` is set; then raises `error`, if any. Its thread dies with a text that has the word
    `deadly` ("": with any), at most `lives` times."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.error: BaseException | None = None
        self.deadly: str | None = None
        self.lives, self.deaths = sys.maxsize, 0

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        self.inside.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        found = self.deadly is not None and any(self.deadly in [*words, ""] for words in words_by_text(batch))
        if found and self.deaths < self.lives:
            self.deaths += 1
            raise SystemExit
        return super().forward(batch, exact=exact)


class Scene:
    def __init__(self, members: int = 2) -> None:
        self.backends = [Gated() for _ in range(members)]
        engines = [EmbeddingEngine(backend) for backend in self.backends]
        self.pool = EnginePool(engines[0], engines)

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


def test_a_member_that_is_not_back_gets_work_only_if_no_other_is_ready(scene: Scene, alone: Vectors) -> None:
    away = scene.pool.members[1]
    assert isinstance(away, EmbeddingEngine)
    away.ready = False
    assert np.array_equal(scene.pool.embed(TEXTS, "bulk"), alone)
    assert scene.computed()[1] == 0
    scene.pool.members[0].ready = False  # type: ignore[misc]
    scene.pool.embed(TEXTS, "bulk")
    assert scene.computed()[1] > 0


def test_a_large_call_is_divided_and_its_rows_keep_their_order(scene: Scene, alone: Vectors) -> None:
    vectors, counts = scene.pool.embed_counted(TEXTS)
    np.testing.assert_array_equal(vectors, alone)
    assert counts == scene.pool.count_tokens(TEXTS)
    assert min(scene.computed()) > len(TEXTS) / 4
    assert sum(scene.computed()) == len(TEXTS)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_pool_may_divide_a_call_into_fewer_blocks(blocks: int) -> None:
    members = [EmbeddingEngine(ScriptedBackend()) for _ in range(2)]
    with EnginePool(members[0], members, blocks) as pool:
        pool.embed([f"pump {number:05d}" for number in range(900)])
        assert 2 * blocks <= pool.stats().blocks <= 2 * blocks + 1


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


@pytest.fixture
def blocks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The member and the number of texts of each block, in order."""
    found: list[tuple[int, int]] = []
    for place, member in enumerate(scene.pool.members):
        submit = member.submit

        def seen(texts: list[str], *rest: Any, place: int = place, submit: Any = submit, **more: Any) -> Any:
            found.append((place, len(texts)))
            return submit(texts, *rest, **more)

        monkeypatch.setattr(member, "submit", seen)
    return found


def test_bulk_calls_share_the_room_at_the_members_and_others_do_not_wait_for_it(
    scene: Scene, blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, alone: Vectors
) -> None:
    asked, ask = list[Any](), scene.pool._waited_for_room

    def waited(*given: Any) -> bool:
        asked.append(given)
        return ask(*given)

    monkeypatch.setattr(scene.pool, "_waited_for_room", waited)
    for backend in scene.backends:
        backend.go.clear()
    calls = [later(partial(scene.pool.embed, TEXTS, "bulk")) for _ in range(3)]
    while len(asked) < 4 + len(calls):  # each call waits for room, two blocks are at each member
        time.sleep(0.001)
    search = later(partial(scene.pool.embed, ["oil"], "interactive"))
    while (0, 1) not in blocks and (1, 1) not in blocks:
        time.sleep(0.001)
    assert len(blocks) == 4 + 1
    for backend in scene.backends:
        backend.go.set()
    assert search.result(60).shape == (1, 32)
    for call in calls:
        np.testing.assert_array_equal(call.result(60), alone)
    assert scene.pool._bulk == 0


def test_a_call_that_fails_leaves_its_room(scene: Scene) -> None:
    for _ in range(5):
        with pytest.raises(ValueError, match='"query" or "document"'):
            scene.pool.embed(TEXTS, "bulk", input_type="other")  # type: ignore[arg-type]
    assert scene.pool._bulk == 0
    assert scene.pool.embed(TEXTS, "bulk").shape == (len(TEXTS), 32)


def test_blocks_of_short_texts_fill_a_fast_card(scene: Scene, blocks: list[tuple[int, int]]) -> None:
    scene.pool._first.memory.planned_tokens = 65_536
    scene.pool.embed([f"pump {number:05d}" for number in range(40_000)])
    sizes = [size for _, size in blocks]
    assert min(sizes[:-1]) * len("pump 00000") >= 65_536
    assert len({place for place, _ in blocks}) == 2


def test_blocks_of_a_very_large_call_fill_a_window(scene: Scene, blocks: list[tuple[int, int]]) -> None:
    scene.pool._first.memory.planned_tokens = 64
    scene.pool.embed([f"pump {number:05d}" for number in range(2_000)])
    assert max(size for _, size in blocks) * len("pump 00000") <= 4 * 64 * 4 + 10


def test_a_search_stays_in_this_process_and_bulk_work_goes_to_the_children_first(
    scene: Scene, blocks: list[tuple[int, int]]
) -> None:
    scene.pool.embed(["pump"])
    scene.pool.embed(TEXTS)
    assert [place for place, _ in blocks][:2] == [0, 1]


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


@pytest.mark.parametrize("number", [0, 1])
def test_the_others_compute_the_blocks_of_a_failed_member(
    scene: Scene, alone: Vectors, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = scene.backends[number], scene.backends[1 - number]
    failing.error = DeviceFailed("planted")
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


def test_a_member_whose_thread_died_computes_again(scene: Scene, alone: Vectors) -> None:
    first, second = scene.backends
    first.error = SystemExit()
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    assert scene.pool.deaths == scene.pool.members[0].deaths >= 1
    second.error = SystemExit()
    with pytest.raises(WorkerDied):  # as one engine: this text may be the reason
        scene.pool.submit(["oil leak"]).result(60)
    assert scene.pool.failures == ["", ""]
    first.error = second.error = None
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    assert min(scene.computed()) > 0


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


# ---------------------------------------------------------------------------------------------- texts that kill members


def deaths(scene: Scene) -> int:
    return sum(backend.deaths for backend in scene.backends)


@pytest.mark.proves(22, 29)
def test_texts_that_kill_members_are_found_and_no_other_text_is_blamed(scene: Scene, alone: Vectors) -> None:
    texts = list(TEXTS)
    for place in (0, 400, 899):
        texts[place] = f"poison {place}"
    for backend in scene.backends:
        backend.deadly = "poison"
    with pytest.raises(NonFinite) as caught:
        scene.pool.embed(texts, "bulk")
    assert caught.value.indices == (0, 400, 899)
    assert deaths(scene) <= 2 * 3 * (2 + 2 + math.log2(len(texts))), "halves, not text by text"
    good = [place for place in range(len(texts)) if place not in caught.value.indices]
    vectors, counts = scene.pool.embed_counted([texts[place] for place in good])
    np.testing.assert_array_equal(vectors, alone[good])
    assert counts == scene.pool.count_tokens([texts[place] for place in good])
    assert scene.pool.failures == ["", ""]


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_text_beside_one_that_kills_members_gets_its_vector(members: int) -> None:
    scene = Scene(members)
    for backend in scene.backends:
        backend.deadly = "poison"
    ended = threading.Event()

    def bad(number: int) -> list[tuple[int, ...]]:
        found = []
        for place in range(4):
            with pytest.raises(NonFinite) as caught:
                scene.pool.embed([f"seal {number} {place}", "poison"], "bulk")
            found.append(caught.value.indices)
        return found

    def good(number: int) -> int:
        calls = 0
        while not ended.is_set():
            scene.pool.embed([f"oil {number} {calls}"], "bulk")  # raises NonFinite if it is blamed
            calls += 1
        return calls

    others = [later(partial(good, number)) for number in range(3)]
    calls = [later(partial(bad, number)) for number in range(3)]
    assert [call.result(60) for call in calls] == [[(1,)] * 4] * 3
    ended.set()
    assert min(other.result(60) for other in others) > 0
    scene.pool.close()


@pytest.fixture
def attempts(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[int]]:
    """Call a function with the number of each attempt at the text `oil`, before it is computed; return the members."""

    def before(work: Callable[[int], None]) -> list[int]:
        found: list[int] = []
        for place, backend in enumerate(scene.backends):
            forward = backend.forward

            def watched(batch: TokenBatch, *, place: int = place, forward: Any = forward, **more: Any) -> Vectors:
                if ["oil"] in words_by_text(batch):
                    found.append(place)
                    work(len(found))
                vectors: Vectors = forward(batch, **more)
                return vectors

            monkeypatch.setattr(backend, "forward", watched)
        return found

    return before


def test_a_suspect_is_computed_alone_and_other_work_goes_to_other_members(
    scene: Scene, blocks: list[tuple[int, int]], attempts: Callable[[Callable[[int], None]], list[int]]
) -> None:
    others: list[Future[Vectors]] = []

    def work(attempt: int) -> None:
        if attempt >= 3:
            others.extend(scene.pool.submit([f"pump {number}"]) for number in range(3))
        if attempt <= 3:
            raise SystemExit

    members = attempts(work)
    assert scene.pool.embed(["oil"], "bulk").shape == (1, 32)
    assert sorted(members[2:]) == [0, 1], "after it died alone, it is tried at another member"
    assert [place for place, _ in blocks[3:6]] == [members[3]] * 3
    assert [other.result(60).shape for other in others] == [(1, 32)] * 6


def test_a_text_is_not_blamed_for_deaths_in_company(
    scene: Scene, attempts: Callable[[Callable[[int], None]], list[int]]
) -> None:
    scene.pool.members[1].close()
    others: list[Future[Vectors]] = []

    def work(attempt: int) -> None:
        if attempt > 2:
            others.append(scene.pool.submit([f"pump {attempt}"]))
        if attempt < 7:
            raise SystemExit

    members = attempts(work)
    assert scene.pool.embed(["oil"], "bulk").shape == (1, 32)
    assert members == [0] * 7
    assert [other.result(60).shape for other in others] == [(1, 32)] * 5


@pytest.mark.proves(29)
def test_a_block_that_killed_one_member_is_computed_whole_by_another(
    scene: Scene, blocks: list[tuple[int, int]], alone: Vectors
) -> None:
    scene.backends[1].deadly, scene.backends[1].lives = "", 1
    np.testing.assert_array_equal(scene.pool.embed(TEXTS), alone)
    assert deaths(scene) == 1
    sizes = Counter(size for _, size in blocks)
    undivided = Counter(stop - start for start, stop in scene.pool._blocks(TEXTS))
    assert sizes - undivided, "a block was given to two members"
    assert sizes.keys() == undivided.keys(), "and none was halved"
    stats = scene.pool.stats()
    assert stats.blocks == len(blocks)
    assert stats.repeated_blocks == len(blocks) - undivided.total()


def test_the_only_member_computes_again_what_it_died_of() -> None:
    scene = Scene(1)
    scene.backends[0].deadly, scene.backends[0].lives = "", 1
    assert scene.pool.submit(["oil"]).result(60).shape == (1, 32)
    scene.pool.close()


@pytest.mark.proves(29)
def test_members_that_always_die_fail_the_call_in_bounded_rounds(
    scene: Scene, blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "ROUNDS", 5)
    for backend in scene.backends:
        backend.deadly = ""
    with pytest.raises(WorkerDied, match="ended 6 times during one call"):
        scene.pool.embed(TEXTS)
    assert len(blocks) == 2 * len(scene.pool._blocks(TEXTS)) + 6


def test_a_search_kills_two_members_at_most(scene: Scene) -> None:
    for backend in scene.backends:
        backend.deadly = "poison"
    for call in (scene.pool.embed, lambda texts, lane: scene.pool.submit(texts, lane).result(60)):
        before = deaths(scene)
        with pytest.raises(WorkerDied):
            call(["poison"], "interactive")
        assert deaths(scene) == before + 2


def test_a_member_that_died_gets_a_second_part_when_it_has_computed_one(
    scene: Scene, blocks: list[tuple[int, int]]
) -> None:
    scene.backends[0].deadly, scene.backends[0].lives = "", 1
    scene.pool.submit(["oil"]).result(60)
    assert [place for place, _ in blocks] == [0, 1]
    for backend in scene.backends:
        backend.go.clear()
    futures = [scene.pool.submit([f"pump {number}"]) for number in range(5)]
    assert [place for place, _ in blocks[2:]] == [0, 1, 1, 1, 1]
    for backend in scene.backends:
        backend.go.set()
    assert [future.result(60).shape for future in futures] == [(1, 32)] * 5


class Deadly(ScriptedBackend):
    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        if any("poison" in words for words in words_by_text(batch)):
            os._exit(3)
        return super().forward(batch, exact=exact)


def load_deadly(_options: EngineOptions) -> EmbeddingEngine:
    return EmbeddingEngine(Deadly())


@pytest.mark.proves(22)
def test_a_text_that_kills_child_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "DEATHS", 1)  # a child that died is not started again
    first = load_tokenizer_engine(EngineOptions("hash:32"), 32)
    children = [ChildEngine(load_deadly, EngineOptions("hash:32", device="cpu")) for _ in range(3)]
    for child in children:
        child.load()
    with EnginePool(first, children) as pool:
        with pytest.raises(NonFinite) as caught:
            pool.embed(["oil leak", "poison"], "bulk")
        assert caught.value.indices == (1,)
        assert sorted(map(bool, pool.failures)) == [False, True, True]
        np.testing.assert_array_equal(pool.embed(["oil leak"], "bulk"), first.embed(["oil leak"]))


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


def test_a_call_is_refused_once_if_no_member_has_room(scene: Scene) -> None:
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
    assert len(refused) == 2
    for backend in scene.backends:
        backend.go.set()
    assert [future.result(60).shape for future in waiting] == [(1, 32)] * 4


def test_a_call_that_the_idlest_member_refuses_goes_to_another_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Future[Vectors]:
        raise EngineOverloaded("slow", seconds=60.0)

    refusals: list[bool] = []
    watcher = Watcher()
    monkeypatch.setattr(watcher, "refused", lambda: refusals.append(True))
    scene.pool.configure_queue(watcher=watcher)
    first, second = scene.pool.members
    monkeypatch.setattr(first, "submit", refuse)
    assert scene.pool.submit(["pump"]).result(60).shape == (1, 32)
    assert refusals == []
    monkeypatch.setattr(second, "submit", refuse)
    with pytest.raises(EngineOverloaded, match="slow"):
        scene.pool.submit(["pump"])
    assert refusals == [True]
    assert scene.pool.failures == ["", ""]


def test_what_a_pool_says_of_itself(scene: Scene) -> None:
    with EmbeddingEngine(ScriptedBackend()) as engine:
        assert scene.pool.fingerprint == engine.fingerprint
        assert scene.pool.max_tokens == engine.max_tokens
        assert scene.pool.token_budget == 2 * engine.token_budget
        assert scene.pool.planned_tokens == 2 * engine.planned_tokens
    assert scene.pool.profile == scene.pool.members[0].profile


# --------------------------------------------------------------------------------------- a first engine without weights


def write_e5_prompts(folder: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.mark.parametrize("prompted", [False, True], ids=["plain", "prompts"])
def test_an_engine_without_weights_describes_counts_and_splits_as_the_whole_one(
    make_folder: MakeFolder, prompted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder()
    if prompted:
        write_e5_prompts(folder)
    options = EngineOptions(str(folder), "fp32", "cpu", threads=1)
    long = "pump seal oil leak " * 40
    with load_engine(options) as whole:
        assert isinstance(whole, EmbeddingEngine)
        monkeypatch.setattr(TorchBackend, "__init__", lambda *_: pytest.fail("the weights were loaded"))
        with load_tokenizer_engine(options, 32) as first:
            device = {"precision", "precision_reason", "path", "path_reason", "profile", "memory"}
            for name in Engine.__annotations__.keys() - device:
                assert getattr(first, name) == getattr(whole, name), name
            assert first.count_tokens([long, "", "oil"]) == whole.count_tokens([long, "", "oil"])
            assert first.split(long, 20, 3) == whole.split(long, 20, 3)
            with pytest.raises(RuntimeError, match="not loaded"):
                first.embed(["oil"])
            pool = EnginePool(first, [whole])
            np.testing.assert_allclose(pool.embed(TEXTS[:50]), whole.embed(TEXTS[:50]), atol=1e-6)
            assert pool.embed_counted([long])[1] == whole.count_tokens([long])
            assert (pool.path, pool.profile, pool.members) == (whole.path, whole.profile, (whole,))
            assert first.stats().texts == 0, "it was given nothing"


@pytest.mark.parametrize("change", ["weights", "tokenizer", "prompt"])
def test_members_with_another_model_are_refused(make_folder: MakeFolder, change: str) -> None:
    options = EngineOptions(str(make_folder()), "fp32", "cpu", threads=1)
    with load_engine(options) as whole, load_engine(EngineOptions("hash:32")) as other:
        assert isinstance(whole, EmbeddingEngine)
        assert isinstance(other, EmbeddingEngine)
        first = load_tokenizer_engine(options, 32)
        with pytest.raises(DeviceUnavailable, match=r"engine 2 of 2 \(CPU\).* is hash:32@.*, not tiny@"):
            EnginePool(first, [whole, other])
        changed = Path(options.model)
        if change == "weights":
            weights = changed / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
        elif change == "tokenizer":
            (changed / "tokenizer.json").write_text((changed / "tokenizer.json").read_text() + " ")
        else:
            write_e5_prompts(changed)
        with pytest.raises(DeviceUnavailable, match="engine 1 of 1"):
            EnginePool(load_tokenizer_engine(options, 32), [whole])


def test_the_first_engine_without_weights_loads_no_int8_and_checks_its_files(make_folder: MakeFolder) -> None:
    options = EngineOptions(str(make_folder()), device="cpu")
    with pytest.raises(DeviceUnavailable, match="int8 uses one device"):
        load_tokenizer_engine(replace(options, precision="int8"), 32)
    with pytest.raises(WeightsMismatch):
        load_tokenizer_engine(replace(options, weights_sha256="0" * 64), 32)
    with load_tokenizer_engine(EngineOptions("hash:32", document_prompt="p: "), 32) as hashing:
        assert hashing.embed(["oil"]).shape == (1, 32)


# ----------------------------------------------------------------------------------------------------- child processes


@pytest.fixture(scope="module")
def hashing() -> Iterator[EmbeddingEngine]:
    with load_engine(EngineOptions("hash:32")) as engine:
        assert isinstance(engine, EmbeddingEngine)
        yield engine


@pytest.fixture
def children() -> Iterator[EnginePool]:
    """The second of its two members is in a child process."""
    with load_engine(EngineOptions("hash:32", device=CPUS)) as pool:
        assert isinstance(pool, EnginePool)
        yield pool


def child_of(pool: EnginePool) -> ChildEngine:
    child = pool.members[1]
    assert isinstance(child, ChildEngine)
    return child


def only_child(pool: EnginePool) -> ChildEngine:
    """Let the child compute alone."""
    pool.members[0].close()
    with pytest.raises(EngineClosed):
        pool.members[0].submit(["oil"], None, input_type="document", normalize=True, counted=None)
    return child_of(pool)


def test_a_child_computes_its_part(children: EnginePool, hashing: EmbeddingEngine) -> None:
    vectors, counts = children.embed_counted([*TEXTS, "", "🦉\ud800", TEXTS[0]])
    wanted, wanted_counts = hashing.embed_counted([*TEXTS, "", "🦉\ud800", TEXTS[0]])
    np.testing.assert_array_equal(vectors, wanted)
    assert counts == wanted_counts
    assert child_of(children).stats().computed_texts > len(TEXTS) / 4
    assert children.stats().tokens == sum(min(count, hashing.max_tokens) for count in counts[:-1])
    assert children.token_budget == 2 * hashing.token_budget
    assert (children.stalled(), children.deaths, children.failures) == (0.0, 0, ["", ""])


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.submit(["oil"], input_type="other"),
        lambda pool: pool.embed(["oil"], "bulk", input_type="other"),
        lambda pool: pool.embed(["oil"], "interactive", input_type="other"),
    ],
    ids=["submit", "bulk", "interactive"],
)
def test_a_childs_errors_are_those_of_an_engine(children: EnginePool, call: Callable[[EnginePool], Any]) -> None:
    only_child(children)
    with pytest.raises(ValueError, match='"query" or "document"'):
        call(children)
    assert children.embed(["oil"]).shape == (1, 32)


def test_counts_are_known_when_submit_returns_and_their_error_cancels(children: EnginePool) -> None:
    only_child(children)
    seen: list[int] = []
    future = children.submit(["oil leak", "pump"], counted=seen.extend)
    assert seen == [2, 1]
    assert future.result(60).shape == (2, 32)

    def refuse(_counts: list[int]) -> None:
        raise PermissionError("planted")

    with pytest.raises(PermissionError, match="planted"):
        children.submit(["oil"], counted=refuse)
    with pytest.raises(PermissionError, match="planted"):
        children.submit(["oil"], "bulk", counted=refuse).result(60)
    assert children.failures[1] == ""


@pytest.mark.parametrize(
    "error",
    [NonFinite([3, 5]), OutOfMemory("no"), EngineOverloaded("busy", seconds=4.0), DeviceFailed("gone")],
    ids=str,
)
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    theirs.send(error)
    found = ours.recv()
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_a_child_that_dies_in_a_call_is_replaced_by_the_others(children: EnginePool, hashing: EmbeddingEngine) -> None:
    child = child_of(children)
    os.kill(child._child.process.pid, signal.SIGSTOP)  # so that its block is still there when it dies
    call = later(lambda: children.embed_counted(TEXTS))
    while not child._child.waiting:
        time.sleep(0.001)
    child._child.process.kill()
    vectors, counts = call.result(60)
    np.testing.assert_array_equal(vectors, hashing.embed(TEXTS))
    assert counts == hashing.count_tokens(TEXTS)
    assert children.failures[0] == children.failed == ""
    assert "ended with exit status -9" in children.failures[1]
    np.testing.assert_array_equal(children.embed(TEXTS), vectors)


def test_a_dead_child_alone_leaves_nothing_to_compute_with(children: EnginePool) -> None:
    child = only_child(children)
    children.embed(["oil"])
    child._child.process.kill()
    child._child._reader.join(60)
    with pytest.raises(DeviceFailed, match="exit status -9"):
        children.embed(["oil"])
    assert "exit status -9" in children.failed


def test_a_child_that_reports_nothing_counts_as_stalled(children: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "SILENT_SECONDS", 0.0)
    child = child_of(children)
    os.kill(child._child.process.pid, signal.SIGSTOP)
    try:
        first = children.stalled()
        while children.stalled() <= first + 1.5:  # reports come every second
            time.sleep(0.01)
    finally:
        os.kill(child._child.process.pid, signal.SIGCONT)


def test_closing_ends_the_children_and_the_calls_that_wait(children: EnginePool) -> None:
    child = only_child(children)
    os.kill(child._child.process.pid, signal.SIGSTOP)
    call = later(lambda: children.embed(TEXTS, "bulk"))
    while not child._child.waiting:
        time.sleep(0.001)
    closing = later(children.close)
    while not child._closed:
        time.sleep(0.001)
    os.kill(child._child.process.pid, signal.SIGCONT)
    closing.result(60)
    assert child._child.process.returncode == 0
    assert isinstance(call.exception(60), EngineClosed) or call.result().shape == (len(TEXTS), 32)
    with pytest.raises(EngineClosed):
        child.submit(["oil"], "bulk", input_type="document", normalize=True, counted=None).result(0)


def test_a_child_that_reads_nothing_is_killed_at_closing(children: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = only_child(children)
    os.kill(child._child.process.pid, signal.SIGSTOP)
    call = later(lambda: children.embed(["pump " * 1_000_000], "bulk"))  # more than the socket takes
    while not child._child._messages._sending.locked():
        time.sleep(0.001)
    monkeypatch.setattr(child_module, "CLOSE_SECONDS", 0.1)
    later(children.close).result(60)
    assert child._child.process.returncode == -signal.SIGKILL
    assert isinstance(call.exception(60), EngineClosed)


def load_for_ever(_options: EngineOptions) -> EmbeddingEngine:
    signal.pause()
    raise AssertionError


def test_closing_does_not_wait_for_a_child_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "CLOSE_SECONDS", 600.0)
    child = ChildEngine(load_for_ever, EngineOptions("hash:32", device="cpu:1"))
    child.close()
    assert child._child.process.returncode == -signal.SIGKILL
    with pytest.raises(EngineClosed):
        child.load()


def bulk(child: ChildEngine) -> Future[Vectors]:
    return child.submit(["oil leak"], "bulk", input_type="document", normalize=True, counted=None)


def test_a_child_with_half_a_message_gets_no_other_one(children: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(children)

    def interrupted(_content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(child._child._messages, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bulk(child)
    child._child._reader.join(60)
    assert "exit status -9" in children.failures[1]
    assert children.embed(["oil leak"], "bulk").shape == (1, 32)


def test_an_answer_that_cannot_be_read_ends_the_child(children: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(children)

    def without_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(child._child._messages, "receive", without_memory)
    with suppress(WorkerDied):  # an answer may already have been on its way
        bulk(child).result(60)
    child._child._reader.join(60)
    assert "exit status -9" in children.failures[1]


def test_an_error_that_cannot_be_sent_is_answered_all_the_same() -> None:
    ours, theirs = map(Calls, socket.socketpair())
    theirs.answer(3, ValueError(threading.Lock()))
    number, error, last = ours.receive()
    for end in (ours, theirs):
        end.close()
    assert (number, type(error), last) == (3, EngineError, True)
    assert "ValueError" in str(error)


def test_texts_of_a_dead_child_do_not_wait_for_ever(children: EnginePool) -> None:
    waiting: list[int] = []

    class Seeing(Watcher):
        def queued(self, lane: Lane, texts: int) -> None:
            waiting.append(texts)

    children.configure_queue(watcher=Seeing())
    child = child_of(children)
    child._report(({}, [("queued", "bulk", 5), ("queued", "interactive", 2), ("queued", "bulk", -1)]))
    child._child.process.kill()
    child._child._reader.join(60)
    assert sum(waiting) == 0


def test_a_child_ignores_the_signals_that_its_parent_handles(children: EnginePool) -> None:
    child = child_of(children)
    assert os.getsid(child._child.process.pid) != os.getsid(0), "Ctrl-C goes to the session's foreground"
    child._child.process.send_signal(signal.SIGTERM)
    only_child(children)
    assert children.embed(["oil"]).shape == (1, 32)


def test_children_end_with_a_killed_parent() -> None:
    program = (
        "import signal; from app.src.core.loading import EngineOptions, load_engine\n"
        f"pool = load_engine(EngineOptions('hash:32', device={CPUS}))\n"
        "print(pool.members[1]._child.process.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        time.sleep(0.01)


def test_a_watcher_sees_the_childs_queue(children: EnginePool) -> None:
    seen: list[tuple[Any, ...]] = []

    class Seeing(Watcher):
        def queued(self, lane: Lane, texts: int) -> None:
            seen.append(("queued", lane, texts))

        def batch(self, lane: Lane, texts: int, tokens: int) -> None:
            seen.append(("batch", lane, texts, tokens))

    only_child(children)
    children.configure_queue(watcher=Seeing())
    children.embed(["oil leak", "pump"])
    child_of(children).close()
    assert [event for event in seen if event[0] == "batch"] == [("batch", "interactive", 2, 3)]
    assert sum(event[2] for event in seen if event[0] == "queued") == 0


def test_a_model_that_no_child_can_load_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    child = ChildEngine(load_engine, EngineOptions("hash:7", device="cpu:1"))
    with pytest.raises(ModelNotFound, match="hash:N with N from 8 to 4096"):
        child.load()
    child.close()


# -------------------------------------------------------------------------------------------------------------- loading


def test_small_models_get_processes_and_large_ones_threads() -> None:
    small, large = (load_engine(EngineOptions(f"hash:{size}", device=CPUS)) for size in (768, 1024))
    with small, large:
        assert [type(member) for member in small.members] == [EmbeddingEngine, ChildEngine]
        assert [type(member) for member in large.members] == [EmbeddingEngine, EmbeddingEngine]


@pytest.mark.parametrize("device", ["cpu", ["cpu"], "all", "cpu:1"])
def test_one_device_makes_no_pool(device: Any) -> None:
    with load_engine(EngineOptions("hash:32", device=device)) as engine:
        assert type(engine) is EmbeddingEngine
        assert engine.members == [engine]
        assert engine.failures == [""]


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ([], "cuda:0, cuda:1"),
        (["cpu", "tpu"], "cuda:0, cuda:1"),
        (["auto", "cuda:1"], "cuda:0, cuda:1"),
        (["cpu:0", "cpu"], "twice"),
        ("cuda,cuda:0", "twice"),
        (["cpu", "cuda:1"], "do not compute together"),
    ],
)
def test_lists_that_make_no_sense_are_refused(device: Any, why: str) -> None:
    with pytest.raises(DeviceUnavailable, match=why):
        load_engine(EngineOptions("hash:32", device=device))


def test_all_cards_are_those_that_this_torch_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cards = [SimpleNamespace(name=f"card {major}", major=major, minor=0, total_memory=1) for major in (8, 6, 9)]
    for card in cards:
        card.multi_processor_count = 80
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    assert devices_of("all") == ["cuda:0", "cuda:2"]
    assert detect("all").name == "card 8"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100"])
    with pytest.raises(DeviceUnavailable, match="sm_100"):
        devices_of("all")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceUnavailable, match="no CUDA device"):
        devices_of("all")


def test_int8_and_tensorrt_are_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="one device"):
        load_engine(EngineOptions("hash:32", "int8", CPUS))


def test_members_share_the_processors_for_their_tokenizers(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(RustTokenizer, "start_workers", lambda _self, *given: started.append(given))
    monkeypatch.setattr(loading, "THREADS_FROM", 1)
    options = EngineOptions(str(make_folder()), "fp32", CPUS, threads=1, tokenizer_workers=3)
    load_engine(options).close()
    assert started == [(3, 2), (3, 2)]


@pytest.mark.parametrize("child", [False, True], ids=["threads", "process"])
def test_a_transformer_on_two_cpus(make_folder: MakeFolder, child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "THREADS_FROM", 10_000 if child else 1)
    options = EngineOptions(str(make_folder()), "fp32", "cpu", threads=1)
    texts = TEXTS[:300]
    with load_engine(options) as alone, load_engine(replace(options, device=CPUS)) as pool:
        assert isinstance(pool, EnginePool)
        assert isinstance(pool.members[1], ChildEngine) is child
        vectors, counts = pool.embed_counted(texts)
        assert (vectors * alone.embed(texts)).sum(axis=1).min() >= 0.99999
        assert counts == alone.count_tokens(texts)
        assert min(member.stats().computed_texts for member in pool.members) > 0
        assert pool.fingerprint == alone.fingerprint
