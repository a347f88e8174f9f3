"""What must hold of the engine whatever texts come, in whatever order, batches, threads and troubles."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core import engine as engine_module
from app.src.core.backends import EngineClosed, EngineError, NonFinite, OutOfMemory, Pause, TokenBatch, Vectors
from app.src.core.engine import EmbeddingEngine
from app.src.core.tokens import LAUNCH_TOKENS, padded
from tests.core.conftest import ScriptedBackend, batches_of

FEW = settings(max_examples=25, deadline=None)
PARTS = ("pump", "Öl", "seal-ring", "漢字", "🦉", "4711", "/BIC/AZD", "leak.", "\t", "STEEL")
a_text = st.lists(st.sampled_from(PARTS), max_size=30).map(" ".join)
some_texts = st.lists(a_text, min_size=1, max_size=40)
VARIED = [" ".join(PARTS[(row + place * row) % len(PARTS)] for place in range(1 + row % 23)) for row in range(70)]


def fresh(**attributes: Any) -> tuple[EmbeddingEngine, ScriptedBackend]:
    backend = ScriptedBackend()
    for name, value in attributes.items():
        setattr(backend, name, value)
    return EmbeddingEngine(backend), backend


class FailsAt(ScriptedBackend):
    """Raises `error` at `times` calls of `forward`, from the one with this number, counted from 1."""

    def __init__(self, number: int, error: type[Exception] = OutOfMemory, times: int = 1) -> None:
        super().__init__()
        self.failing, self.error, self.calls = range(number, number + times), error, 0

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        self.calls += 1
        if self.calls in self.failing:
            raise self.error("planted")
        return super().forward(batch, exact=exact)


# ------------------------------------------------------------------------------------------------------------- planning


@FEW
@given(st.lists(st.integers(0, 260), max_size=80), st.integers(1, LAUNCH_TOKENS), st.sampled_from([1, 4, 8, 16]))
def test_no_batch_could_have_taken_the_next_text(lengths: list[int], budget: int, multiple: int) -> None:
    """Greedy over descending lengths: a batch of a CPU's size ends only because one text more would have passed the
    budget."""
    plan = batches_of(lengths, budget, multiple)
    for batch in plan[:-1]:
        assert padded(lengths[batch[0]], multiple) * (len(batch) + 1) > budget


@FEW
@given(st.lists(st.integers(1, 260), min_size=1, max_size=80), st.integers(64, LAUNCH_TOKENS // 2))
def test_a_larger_budget_never_needs_more_batches(lengths: list[int], budget: int) -> None:
    assert len(batches_of(lengths, 2 * budget)) <= len(batches_of(lengths, budget))


@FEW
@given(st.integers(0, 300), st.integers(1, 500))
def test_equal_lengths_stay_in_their_order(length: int, count: int) -> None:
    plan = batches_of([length] * count, 512, 8)
    assert [position for batch in plan for position in batch] == list(range(count))


@pytest.mark.parametrize(
    ("length", "multiple", "cost"),
    [(0, 1, 1), (0, 8, 8), (1, 8, 8), (7, 8, 8), (8, 8, 8), (9, 8, 16), (255, 16, 256), (256, 16, 256), (5, 1, 5)],
)
def test_what_a_length_costs(length: int, multiple: int, cost: int) -> None:
    assert padded(length, multiple) == cost


@pytest.mark.parametrize(
    ("lengths", "budget", "multiple", "plan"),
    [
        ([], 64, 8, []),
        ([0], 64, 8, [[0]]),
        ([0, 0, 0], 16, 8, [[0, 1], [2]]),
        ([100], 64, 8, [[0]]),  # above the budget alone: its own batch, not an error
        ([100, 100], 64, 8, [[0], [1]]),
        ([8, 8], 16, 8, [[0, 1]]),  # exactly the budget
        ([8, 8], 15, 8, [[0], [1]]),  # one below
        ([9, 8], 16, 8, [[0], [1]]),  # the longest decides for both
        ([1, 2, 3, 4], 12, 1, [[3, 2, 1], [0]]),
        ([5, 1, 1, 1, 1], 5, 1, [[0], [1, 2, 3, 4]]),
    ],
)
def test_plans_by_hand(lengths: list[int], budget: int, multiple: int, plan: list[list[int]]) -> None:
    assert batches_of(lengths, budget, multiple) == plan


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ([512, 512, *[24] * 4], [6]),  # 4 x 488 tokens of padding are less than a launch
        ([512, 512, *[24] * 5], [2, 7]),
        ([512] * 20 + [256] * 20 + [24] * 40, [20, 40, 80]),
        ([256] * 100, [100]),
    ],
)
def test_a_large_padded_batch_ends_where_a_launch_costs_less_than_padding(lengths: list[int], ends: list[int]) -> None:
    """With the budget of an H100, which holds 88 texts of 512 tokens."""
    plan = batches_of(lengths, 45_056, 8)
    assert list(accumulate(map(len, plan))) == ends
    assert [position for batch in plan for position in batch] == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "budget", "plan"),
    [
        ([], 64, []),
        ([100], 64, [[0]]),
        ([9, 8], 17, [[0, 1]]),  # the sum decides, and no length is rounded up
        ([9, 8], 16, [[0], [1]]),
        ([1, 5, 3], 8, [[1, 2], [0]]),
        ([0, 0], 1, [[0], [1]]),
    ],
)
def test_packed_plans_by_hand(lengths: list[int], budget: int, plan: list[list[int]]) -> None:
    assert batches_of(lengths, budget, 8, packed=True) == plan


@FEW
@given(st.lists(st.integers(1, 260), max_size=80), st.integers(64, 4096))
def test_packed_plans_fill_the_budget_and_keep_it(lengths: list[int], budget: int) -> None:
    plan = batches_of(lengths, budget, packed=True)
    assert sorted(position for batch in plan for position in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[place] for place in batch) <= budget for batch in plan)
    for batch, following in pairwise(plan):
        assert sum(lengths[place] for place in batch) + lengths[following[0]] > budget


# ------------------------------------------------------------------------------------- order, company and duplicates


@FEW
@given(some_texts, st.randoms(use_true_random=False))
def test_any_permutation_permutes_the_rows(texts: list[str], chance: random.Random) -> None:
    engine, _ = fresh()
    order = list(range(len(texts)))
    chance.shuffle(order)
    plain = engine.embed(texts)
    np.testing.assert_array_equal(engine.embed([texts[place] for place in order]), plain[order])


@FEW
@given(some_texts, st.integers(64, 400))
def test_the_budget_changes_batches_and_no_vector(texts: list[str], budget: int) -> None:
    large, _ = fresh()
    small, scripted = fresh()
    small.memory.shrink(budget)
    np.testing.assert_array_equal(small.embed(texts), large.embed(texts))
    assert all(len(batch) == 1 or sum(map(len, batch)) <= budget for batch in scripted.batches)


@FEW
@given(some_texts)
def test_each_different_text_is_computed_once(texts: list[str]) -> None:
    engine, scripted = fresh()
    vectors = engine.embed(texts + texts[::-1])
    assert sum(map(len, scripted.batches)) == len(set(texts))
    np.testing.assert_array_equal(vectors[: len(texts)], vectors[len(texts) :][::-1])
    stats = engine.stats()
    assert (stats.texts, stats.computed_texts, stats.batches) == (
        2 * len(texts),
        len(set(texts)),
        len(scripted.batches),
    )
    assert stats.tokens == sum(len(tokens) for batch in scripted.batches for tokens in batch)


def test_the_caller_may_write_into_its_rows(engine: EmbeddingEngine) -> None:
    first = engine.embed(["pump", "pump", "seal"])
    kept = first.copy()
    first[0] = 0
    assert first[1].any(), "rows of identical texts must not share memory"
    np.testing.assert_array_equal(engine.embed(["pump", "pump", "seal"]), kept)


COMPANY = [
    "hydraulic pump",
    "",
    "🦉",
    "Ölfilter für Hydraulikaggregat, Größe 12",
    "a",
    "word " * 300,
    "order 4711 " * 40,
    "MARA-MATNR 000000000000004711",
]


def test_a_real_text_has_one_vector_alone_and_in_company(minilm: EmbeddingEngine) -> None:
    together = minilm.embed(COMPANY)
    alone = np.concatenate([minilm.embed([text]) for text in COMPANY])
    assert (together * alone).sum(axis=1).min() >= 0.999999
    doubled = minilm.embed([text for text in COMPANY for _ in range(2)])
    assert (doubled[::2] * together).sum(axis=1).min() >= 0.999999


def test_real_rows_follow_any_order(minilm: EmbeddingEngine) -> None:
    texts = [text[:200] for text in COMPANY]
    plain = minilm.embed(texts)
    for seed in range(3):
        order = list(range(len(texts)))
        random.Random(seed).shuffle(order)
        shuffled = minilm.embed([texts[place] for place in order])
        assert (shuffled * plain[order]).sum(axis=1).min() >= 0.999999


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Pump", "pump", True),  # an uncased model
        ("Öl", "Ol", True),  # it strips accents
        ("oil  leak", "oil leak", True),
        (" oil leak\n", "oil leak", True),
        ("oil leak", "leak oil", False),
        ("oil leak", "oil leaks", False),
        ("10", "100", False),
        ("oil", "", False),
    ],
)
def test_what_the_real_model_tells_apart(minilm: EmbeddingEngine, one: str, other: str, same: bool) -> None:
    first, second = minilm.embed([one, other])
    assert bool(first @ second > 0.99999) is same


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.proves(19)
def test_running_out_of_memory_at_any_call_changes_nothing() -> None:
    """The n-th call fails, for every n until a run has fewer calls than that."""
    wanted, _ = fresh()
    vectors = wanted.embed(VARIED)
    number = 0
    while True:
        number += 1
        backend = FailsAt(number)
        engine = EmbeddingEngine(backend)
        engine.memory.shrink(360)
        np.testing.assert_array_equal(engine.embed(VARIED), vectors)
        assert engine.stats().computed_texts == len(set(VARIED))
        if backend.calls < number:
            break
        assert engine.stats().out_of_memory == 2  # the one above to make batches small, and this one
    assert number > 4


@pytest.mark.proves(20)
def test_a_failing_batch_leaves_a_healthy_engine() -> None:
    for number in (1, 2, 3):
        backend = FailsAt(number, RuntimeError)
        engine = EmbeddingEngine(backend)
        engine.memory.shrink(360)
        with pytest.raises(RuntimeError, match="planted"):
            engine.embed(VARIED)
        assert engine.stats().texts == 0, "a call that failed gave no texts"
        np.testing.assert_array_equal(engine.embed(VARIED), fresh()[0].embed(VARIED))


def test_a_failing_part_leaves_a_healthy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 5)
    for number in (1, 2):  # few parts wait at a time, so there are at least two batches
        # The first failure may be that of a batch of three parts, each of which is then tried alone.
        engine = EmbeddingEngine(backend := FailsAt(number, RuntimeError, times=4))
        with pytest.raises(RuntimeError, match="planted"):
            engine.embed(VARIED)
        backend.failing = range(0)
        assert engine.embed(VARIED).shape == (len(VARIED), 32)


@FEW
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sampled_from([np.nan, np.inf, -np.inf, 0.0]))
def test_non_finite_names_exactly_the_bad_texts(good: list[bool], value: float) -> None:
    """Bad texts have two tokens, good ones three; some occur twice."""
    texts = [f"good text {row % 7}" if fine else f"bad {row % 5}" for row, fine in enumerate(good)]
    engine, scripted = fresh(spoil=lambda tokens, _exact: value if len(tokens) == 2 else None)
    bad = [row for row, fine in enumerate(good) if not fine]
    if not bad:
        assert engine.embed(texts).shape[0] == len(texts)
        return
    with pytest.raises(NonFinite) as caught:
        engine.embed(texts)
    assert list(caught.value.indices) == bad
    assert f"{len(bad)} text" in str(caught.value)
    assert scripted.exact_rows == len({texts[row] for row in bad}), "each was tried once more in fp32"


def test_many_bad_texts_make_a_short_message() -> None:
    error = NonFinite(range(5000))
    assert len(str(error)) < 150
    assert str(error).endswith("9 ...")
    assert len(error.indices) == 5000


def test_only_bad_rows_are_recomputed() -> None:
    spoiled = ScriptedBackend()
    spoiled.spoil = lambda tokens, exact: None if exact or len(tokens) != 2 else np.nan
    engine = EmbeddingEngine(spoiled)
    np.testing.assert_array_equal(engine.embed(["a", "b c", "d e f"]), fresh()[0].embed(["a", "b c", "d e f"]))
    assert (spoiled.exact_rows, engine.stats().recomputed) == (1, 1)
    assert [len(batch) for batch in spoiled.batches] == [3, 1]


# ------------------------------------------------------------------------------------------------------ threads and end


def test_threads_with_different_calls_disturb_nobody() -> None:
    engine, scripted = fresh()
    wanted = engine.embed(VARIED)
    counts = engine.count_tokens(VARIED)
    pieces = engine.split(VARIED[22], 5, 2)

    def one(number: int) -> bool:
        kind = number % 4
        if kind == 0:
            return bool((engine.embed(VARIED) == wanted).all())
        if kind == 1:
            return engine.count_tokens(VARIED) == counts
        if kind == 2:
            return engine.split(VARIED[22], 5, 2) == pieces
        part = VARIED[number % 50 : number % 50 + 9]
        return bool((engine.embed(part) == wanted[number % 50 : number % 50 + 9]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(80)))
    assert engine.stats().texts == len(VARIED) * 21 + 9 * 20
    assert engine.stats().batches == len(scripted.batches)


@pytest.mark.proves(19)
def test_threads_that_run_out_of_memory_still_get_their_rows() -> None:
    wanted = fresh()[0].embed(VARIED)
    engine, _ = fresh(most_tokens=70)
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: engine.embed(VARIED), range(12)):
            np.testing.assert_array_equal(found, wanted)
    assert engine.memory.out_of_memory_count >= 1
    assert 64 <= engine.memory.token_budget < 1024, "batches planned before it grew let it grow once more; never back"


def test_closing_waits_for_the_batch_and_ends_the_call() -> None:
    inside, go = threading.Event(), threading.Event()
    engine, scripted = fresh()
    engine.memory.shrink(200)
    forward = scripted.forward

    def slow(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        inside.set()
        assert go.wait(60)
        assert scripted.closed == 0, "the model went away under a batch"
        return forward(batch, exact=exact)

    scripted.forward = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(engine.embed, VARIED)
        assert inside.wait(60)
        closing = pool.submit(engine.close)
        assert not closing.done()
        go.set()
        closing.result(10)
        error = call.exception(10)
    assert error is None or isinstance(error, EngineClosed)  # it may have had its last batch in hand
    assert scripted.closed == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.embed(["oil"]),
        lambda engine: engine.embed([]),
        lambda engine: engine.count_tokens(["oil"]),
        lambda engine: engine.split("oil leak", 1, 0),
    ],
    ids=["embed", "embed nothing", "count_tokens", "split"],
)
def test_every_call_after_closing_is_refused(call: Any) -> None:
    engine, _ = fresh()
    engine.close()
    with pytest.raises(EngineClosed, match="hash:32"):
        call(engine)


def test_leaving_the_block_closes_even_after_an_error() -> None:
    backend = FailsAt(1, RuntimeError)
    with pytest.raises(RuntimeError, match="planted"), EmbeddingEngine(backend) as engine:
        engine.embed(["oil"])
    assert backend.closed == 1


# ------------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "tf32"}, False),
        ({"precision": "int8"}, True),
        ({"precision_reason": "another"}, False),
        ({"path": "padded"}, False),
        ({"name": "hash:33"}, True),
        ({"pooling": "cls"}, True),
        ({"max_tokens": 253}, True),
        ({"weights_sha256": "f" * 64}, True),
        ({"tokenizer_sha256": "f" * 64}, True),
    ],
    ids=str,
)
def test_the_fingerprint_changes_when_vectors_would_and_only_then(changed: dict[str, Any], differs: bool) -> None:
    plain, scripted = fresh()
    other = ScriptedBackend()
    other.info = replace(scripted.info, **changed)
    assert (EmbeddingEngine(other).fingerprint != plain.fingerprint) is differs


def test_use_does_not_change_the_fingerprint(engine: EmbeddingEngine) -> None:
    before = engine.fingerprint
    engine.embed(VARIED)
    engine.memory.shrink(64)
    assert engine.fingerprint == before


def test_retryable_is_only_what_waiting_mends() -> None:
    from app.src.core import backends

    kinds = {
        kind.__name__: kind.retryable for kind in EngineError.__subclasses__() if kind.__module__ == backends.__name__
    }
    assert kinds == {
        "ModelNotFound": False,
        "ModelUnsupported": False,
        "WeightsMismatch": False,
        "OutOfMemory": True,
        "EngineClosed": False,
        "DeviceFailed": False,
        "NonFinite": False,
    }
