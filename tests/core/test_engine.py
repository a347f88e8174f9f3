"""Planning, order, failures and threads of the engine, over a scripted backend without torch."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.core import engine as engine_module
from app.src.core.agreement import usable
from app.src.core.backends import EngineClosed, EngineError, ModelNotFound, NonFinite, OutOfMemory, Pause, TokenBatch
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.tokens import padded
from tests.core.conftest import batches_of

WORDS = [
    *("pump", "valve", "seal", "bearing", "leak", "oil", "filter", "pressure"),
    *("hydraulic", "bolt", "gasket", "screw", "steel", "gear", "housing"),
]


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(length))


TEXTS = [text(number, 1 + number * 5 % 37) for number in range(60)]


# ------------------------------------------------------------------------------------------------------------- planning


@given(st.lists(st.integers(0, 300), max_size=200), st.integers(1, 2000), st.sampled_from([1, 4, 8, 16]))
def test_plan_has_every_text_once_within_the_budget(lengths: list[int], budget: int, multiple: int) -> None:
    plan = batches_of(lengths, budget, multiple)
    assert sorted(position for batch in plan for position in batch) == list(range(len(lengths)))
    for batch in plan:
        cost = padded(max(lengths[position] for position in batch), multiple) * len(batch)
        assert cost <= budget or len(batch) == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=100), st.integers(1, 2000))
def test_plan_is_longest_first(lengths: list[int], budget: int) -> None:
    planned = [lengths[position] for batch in batches_of(lengths, budget) for position in batch]
    assert planned == sorted(lengths, reverse=True)


def test_plan_by_example() -> None:
    assert batches_of([3, 20, 4, 17, 100], 48) == [[4], [1, 3], [2, 0]]
    assert batches_of([3, 20, 4, 17, 100], 48, multiple=1) == [[4], [1, 3], [2, 0]]
    assert batches_of([9, 9, 9], 32, multiple=8) == [[0, 1], [2]]
    assert batches_of([9, 9, 9], 32, multiple=1) == [[0, 1, 2]]
    assert batches_of([], 32) == []


# ------------------------------------------------------------------------------------------------------------ embedding


def test_rows_follow_the_texts(engine: EmbeddingEngine) -> None:
    vectors = engine.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), engine.dimension)
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    for number, single in enumerate(TEXTS):
        np.testing.assert_allclose(engine.embed([single])[0], vectors[number], atol=1e-6)


def test_vectors_are_of_length_one_unless_asked_otherwise(engine: EmbeddingEngine) -> None:
    np.testing.assert_allclose(np.linalg.norm(engine.embed(TEXTS), axis=1), 1, atol=1e-6)
    raw = engine.embed(TEXTS, normalize=False)
    assert (np.linalg.norm(raw, axis=1) > 1.01).any()
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), engine.embed(TEXTS), atol=1e-6)


def test_nothing_in_nothing_out(engine: EmbeddingEngine) -> None:
    assert engine.embed([]).shape == (0, engine.dimension)
    assert engine.count_tokens([]) == []


def test_identical_texts_are_computed_once(engine: EmbeddingEngine, scripted: Any) -> None:
    vectors = engine.embed(["oil leak", "pump", "oil leak", "oil leak"])
    assert Counter(len(batch) for batch in scripted.batches) == {2: 1}
    np.testing.assert_array_equal(vectors[0], vectors[2])
    np.testing.assert_array_equal(vectors[0], vectors[3])
    assert engine.stats().texts == 4
    assert engine.stats().computed_texts == 2


def test_counting_tokenises_once_and_again_only_what_was_cut(engine: EmbeddingEngine, scripted: Any) -> None:
    seen: list[tuple[str, int]] = []

    def watched(name: str) -> None:
        own = getattr(scripted, name)

        def call(texts: Any) -> Any:
            seen.append((name, len(texts)))
            return own(texts)

        setattr(scripted, name, call)

    watched("tokenize")
    watched("count")
    long = "pump " * 300
    texts = [*TEXTS, long, TEXTS[0], "", long]
    vectors, counts = engine.embed_counted(texts)
    assert counts == [len(text.split()) for text in texts]
    assert seen == [("tokenize", len(TEXTS) + 2), ("count", 1)]
    np.testing.assert_array_equal(vectors, engine.embed(texts))


def test_batches_keep_the_budget(engine: EmbeddingEngine, scripted: Any) -> None:
    engine.memory.shrink(256)
    engine.embed(TEXTS)
    assert len(scripted.batches) > 5
    assert all(sum(map(len, batch)) <= 128 for batch in scripted.batches)


@pytest.mark.parametrize("wrong", ["one text", [1], ["a", None], [b"bytes"]])
def test_what_is_no_list_of_texts_is_refused(engine: EmbeddingEngine, wrong: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        engine.embed(wrong)


def test_several_windows_give_the_same_vectors(engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine.embed(TEXTS)
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 7)
    np.testing.assert_allclose(engine.embed(TEXTS), whole, atol=1e-6)


def test_the_next_window_is_tokenised_while_this_one_computes(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 10)
    tokenized = threading.Semaphore(0)
    tokenize, forward = scripted.tokenize, scripted.forward
    overlapped: list[bool] = []

    def counted(texts: list[str]) -> TokenBatch:
        ids: TokenBatch = tokenize(texts)
        tokenized.release()
        return ids

    def waiting(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Any:
        if not overlapped:  # the first batch of the first window: its own tokens, then those of the next window
            overlapped.append(tokenized.acquire(timeout=60) and tokenized.acquire(timeout=60))
        return forward(batch, exact=exact)

    scripted.tokenize, scripted.forward = counted, waiting
    EmbeddingEngine(scripted).embed(TEXTS)
    assert overlapped == [True]


def test_a_failure_in_tokenising_comes_out(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "REQUEST_TEXTS", 10)

    def broken(_texts: list[str]) -> TokenBatch:
        raise ZeroDivisionError("planted")

    scripted.tokenize = broken
    with pytest.raises(ZeroDivisionError, match="planted"):
        EmbeddingEngine(scripted).embed(TEXTS)


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("most_tokens", [40, 64, 300])
@pytest.mark.proves(19)
def test_out_of_memory_halves_and_changes_nothing(engine: EmbeddingEngine, scripted: Any, most_tokens: int) -> None:
    undisturbed = engine.embed(TEXTS)
    scripted.most_tokens = most_tokens
    before = engine.memory.token_budget
    np.testing.assert_allclose(engine.embed(TEXTS), undisturbed, atol=1e-6)
    assert engine.memory.token_budget < before
    assert engine.stats().out_of_memory > 0


@pytest.mark.proves(19)
def test_a_single_text_that_does_not_fit_is_out_of_memory(engine: EmbeddingEngine, scripted: Any) -> None:
    scripted.most_tokens = 5
    with pytest.raises(OutOfMemory) as caught:
        engine.embed([text(1, 9)])
    assert caught.value.retryable
    assert engine.embed(["oil"]).shape == (1, 32)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
@pytest.mark.proves(21)
def test_rows_that_overflow_are_computed_again_exactly(engine: EmbeddingEngine, scripted: Any, value: float) -> None:
    wanted = engine.embed(TEXTS)
    scripted.spoil = lambda tokens, exact: value if len(tokens) == 6 and not exact else None
    np.testing.assert_allclose(engine.embed(TEXTS), wanted, atol=1e-6)
    assert engine.stats().recomputed == scripted.exact_rows > 0


def overflowing(scripted: Any) -> list[int]:
    """Let every row overflow; return the texts of each batch in fp32, as they come."""
    scripted.spoil = lambda _tokens, exact: None if exact else np.nan
    sizes: list[int] = []
    forward = scripted.forward

    def counted(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Any:
        if exact:
            sizes.append(len(batch))
        return forward(batch, exact=exact)

    scripted.forward = counted
    return sizes


@pytest.mark.proves(21)
def test_rows_that_overflow_are_computed_together_within_the_budget_of_fp32(
    engine: EmbeddingEngine, scripted: Any
) -> None:
    texts = [f"{number} b c d" for number in range(100)]
    wanted = engine.embed(texts)
    scripted.info = dataclasses.replace(scripted.info, precision="fp16")
    engine.memory.token_budget = 400
    sizes = overflowing(scripted)
    np.testing.assert_allclose(engine.embed(texts), wanted, atol=1e-6)
    assert sum(sizes) == engine.stats().recomputed == 100
    words = scripted.tokenize(texts[:1]).tokens
    assert max(sizes) == 200 // words, "fp32 takes twice the memory of fp16"


@pytest.mark.proves(21)
def test_rows_in_fp32_that_do_not_fit_are_halved_and_leave_the_budget(engine: EmbeddingEngine, scripted: Any) -> None:
    texts = [f"{number} b c d" for number in range(24)]
    wanted, budget = engine.embed(texts), engine.token_budget
    sizes, counted = overflowing(scripted), scripted.forward

    def full(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Any:
        found = counted(batch, exact=exact)
        if exact and len(batch) > 7:
            raise OutOfMemory("planted")
        return found

    scripted.forward = full
    np.testing.assert_allclose(engine.embed(texts), wanted, atol=1e-6)
    assert sizes == [24, 12, 6, 6, 12, 6, 6]
    assert (engine.token_budget, engine.stats().out_of_memory) == (budget, 0)


@pytest.mark.proves(21)
def test_rows_that_stay_bad_are_named_all_and_only_they(engine: EmbeddingEngine, scripted: Any) -> None:
    scripted.spoil = lambda tokens, _exact: np.nan if len(tokens) == 2 else None
    with pytest.raises(NonFinite) as caught:
        engine.embed(["oil", "oil leak", "pump", "gear screw", "oil leak"])
    assert caught.value.indices == (1, 3, 4)
    assert isinstance(caught.value, EngineError)
    assert "leak" not in str(caught.value)
    assert engine.embed(["oil", "pump"]).shape == (2, 32)


def test_huge_finite_vectors_are_normalised(engine: EmbeddingEngine, scripted: Any) -> None:
    scripted.spoil = lambda _tokens, _exact: 3e38
    np.testing.assert_allclose(np.linalg.norm(engine.embed(["oil"]), axis=1), 1, atol=1e-6)


def test_usable_rows() -> None:
    rows = np.array([[1, 0], [0, 0], [np.nan, 1], [np.inf, 1], [3e38, 3e38], [1e-38, 0]], dtype=np.float32)
    assert usable(rows).tolist() == [True, False, False, False, True, True]


def test_closed_engine_says_so(scripted: Any) -> None:
    engine = EmbeddingEngine(scripted)
    engine.close()
    engine.close()
    assert scripted.closed == 1
    with pytest.raises(EngineClosed, match="hash:32"):
        engine.embed(["oil"])


# -------------------------------------------------------------------------------------------------------------- threads


def test_callers_on_many_threads_get_their_own_rows(engine: EmbeddingEngine) -> None:
    wanted = {number: engine.embed([TEXTS[number]])[0] for number in range(16)}
    wrong: list[int] = []

    def caller(number: int) -> None:
        for _ in range(10):
            found = engine.embed([TEXTS[number], *TEXTS[20:50]])[0]
            if not np.allclose(found, wanted[number], atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert engine.stats().texts == 16 + 16 * 10 * 31


def test_forward_is_never_entered_twice(scripted: Any) -> None:
    inside, most = [0], [0]
    forward = scripted.forward

    def counted(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        found = forward(batch, exact=exact)
        inside[0] -= 1
        return found

    scripted.forward = counted
    engine = EmbeddingEngine(scripted)
    threads = [threading.Thread(target=engine.embed, args=(TEXTS,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]


# ------------------------------------------------------------------------------------------------------------ splitting


texts_to_split = st.text(st.sampled_from("ab é漢🦉.-\n\t "), max_size=200) | st.lists(
    st.sampled_from([*WORDS, "end-to-end", "  ", "🦉", "x" * 60, "Ölpumpe,"]), max_size=60
).map(" ".join)


@given(texts_to_split, st.integers(1, 20), st.integers(0, 19))
def test_pieces_cover_the_text_and_fit(whole: str, most: int, overlap: int) -> None:
    engine = load_engine(EngineOptions("hash:32"))
    overlap = min(overlap, most - 1)
    spans = list(engine.piece_spans(whole, most, overlap))
    pieces = engine.split(whole, most, overlap)
    assert pieces == [whole[begin:stop] for begin, stop in spans]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(whole)
    assert all(one[0] < other[0] <= one[1] <= other[1] for one, other in pairwise(spans))
    assert all(count <= most for count in engine.count_tokens(pieces))
    shared = [whole[other[0] : one[1]] for one, other in pairwise(spans)]
    assert all(count <= overlap for count in engine.count_tokens(shared))


def test_pieces_are_cut_at_blanks_and_overlap(engine: EmbeddingEngine) -> None:
    whole = " ".join(WORDS)
    pieces = engine.split(whole, 6, 2)
    assert pieces[0] == "pump valve seal bearing leak oil "
    assert pieces[1].startswith("leak oil filter")
    assert all(piece.split()[0] in WORDS and piece.split()[-1] in WORDS for piece in pieces)
    for one, other in pairwise(pieces):
        assert one.split()[-2:] == other.split()[:2]


def test_short_text_stays_whole(engine: EmbeddingEngine) -> None:
    assert engine.split("  oil leak ", 2, 1) == ["  oil leak "]
    assert engine.split("", 5, 0) == [""]


def test_cut_prefers_blanks_to_hyphens(engine: EmbeddingEngine) -> None:
    assert engine.split("aa bb end-to-end", 5, 0) == ["aa bb ", "end-to-end"]


@pytest.mark.parametrize(("most", "overlap"), [(0, 0), (5, 5), (5, -1), (-1, 0)])
def test_impossible_splits(engine: EmbeddingEngine, most: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        engine.split("oil", most, overlap)


# ------------------------------------------------------------------------------------------------------------- identity


def test_fingerprint_changes_with_what_changes_vectors(scripted: Any) -> None:
    from dataclasses import replace

    info = scripted.info

    def fingerprint(**changed: Any) -> str:
        scripted.info = replace(info, **changed)
        return EmbeddingEngine(scripted).fingerprint

    same = {fingerprint(), fingerprint(precision="fp16"), fingerprint(path="packed"), fingerprint(precision_reason="x")}
    others = [
        fingerprint(name="other"),
        fingerprint(weights_sha256="0" * 64),
        fingerprint(tokenizer_sha256="0" * 64),
        fingerprint(pooling="cls"),
        fingerprint(max_tokens=17),
        fingerprint(precision="int8"),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 7
    assert all(len(each) < 200 for each in others)


def test_stats_count_tokens_and_padding(engine: EmbeddingEngine, scripted: Any) -> None:
    assert engine.stats().padded_tokens == 0
    engine.embed(["oil leak", "pump"])
    stats = engine.stats()
    assert (stats.tokens, stats.batches, stats.padded_tokens) == (3, 1, 3)
    assert stats.compute_seconds > 0
    assert stats.tokenize_seconds > 0


@pytest.mark.parametrize("model", ["hash:", "hash:x", "hash:7", "hash:5000", "hash:-8"])
def test_impossible_hashing_models(model: str) -> None:
    with pytest.raises(ModelNotFound, match="hash:N with N from 8 to 4096"):
        load_engine(EngineOptions(model))
