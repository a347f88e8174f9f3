"""What fields and maps are computed by: values counted, ranges, principal components, and texts put together again."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.core.tokens import piece_spans
from app.src.service import browse as browsing
from app.src.service.browse import Field, joined, principal_plane


def fields_of(rows: list[dict[str, Any]], *declared: str) -> dict[str, Field]:
    return {name: browsing._field(name, values) for name, values in browsing._values(declared, rows).items()}


def test_types_values_and_ranges() -> None:
    rows: list[dict[str, Any]] = [
        {"T": "b", "N": 3, "F": True, "M": 1, "D": "2024-01-31", "S": "2024-01-31T10:00:00", "L": [1], "O": {"a": 1}},
        {"T": "a", "N": 3.0, "F": False, "M": "1", "D": "2023-12-01", "S": "2023-02-30", "Z": None},
        {"T": "a", "N": -2, "F": True, "M": True, "D": "2024-02-01", "S": ""},
        {"odd.name": 1, "$or": 2, "": 3, "N": float("nan"), "M": float("inf")},
    ]
    found = fields_of(rows, "T", "GONE")
    assert list(found) == ["T", "GONE", "D", "F", "M", "N", "S"], "null, lists, objects are no values"
    assert {name: field.type for name, field in found.items()} == {
        "T": "text", "GONE": "text", "D": "text", "F": "boolean", "M": "mixed", "N": "number", "S": "text",
    }  # fmt: skip
    assert [(value.value, value.count) for value in found["T"].values] == [("a", 2), ("b", 1)]
    assert [(value.value, value.count) for value in found["N"].values] == [(3, 2), (-2, 1)]
    assert [(value.value, value.count) for value in found["F"].values] == [(True, 2), (False, 1)]
    assert sorted((str(value.value), value.count) for value in found["M"].values) == [("1", 1), ("1", 1), ("True", 1)]
    ranges = {name: (field.min, field.max) for name, field in found.items() if field.min is not None}
    assert ranges == {"N": (-2, 3), "D": ("2023-12-01", "2024-02-01")}
    assert found["GONE"] == Field("GONE", "text", [], more=False, min=None, max=None)


def test_many_values_and_long_ones() -> None:
    rows = [{"T": f"value {number % 80}", "L": "x" * 201} for number in range(100)] + [{"L": "short"}]
    found = fields_of(rows)
    assert len(found["T"].values) == 50
    assert found["T"].more
    assert {value.count for value in found["T"].values[:20]} == {2}, "the most frequent"
    assert [value.value for value in found["L"].values] == ["short"]
    assert found["L"].more


# ------------------------------------------------------------------------------------------------ principal components


def against_svd(vectors: np.ndarray) -> None:
    """By the definition: the singular value decomposition of the centred vectors."""
    xy, explained = principal_plane(vectors)
    centred = vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    wanted = (left * values)[:, :2]
    assert np.abs(xy) == pytest.approx(np.abs(wanted), abs=1e-6)
    assert explained == pytest.approx(tuple(values[:2] ** 2 / (values**2).sum()), abs=1e-9)
    assert (xy[np.abs(xy).argmax(axis=0), (0, 1)] > 0).all(), "turned so that the farthest point is positive"


@pytest.mark.parametrize(("count", "dimension"), [(300, 16), (16, 300), (50, 50), (3, 2), (2, 384)])
def test_it_is_the_singular_value_decomposition(count: int, dimension: int) -> None:
    generator = np.random.default_rng(count)
    vectors = generator.standard_normal((count, dimension)) * np.geomspace(1, 0.1, dimension)
    if count > 2:
        against_svd((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    else:
        xy, explained = principal_plane(vectors)
        assert explained == pytest.approx((1, 0), abs=1e-9)
        assert xy[:, 0].sum() == pytest.approx(0, abs=1e-9)


def test_vectors_without_a_plane() -> None:
    for count in (0, 1):
        xy, explained = principal_plane(np.ones((count, 4), np.float32))
        assert (len(xy), explained) == (0, (0.0, 0.0))
    for dimension in (1, 4, 900):
        vectors = np.full((300, dimension), dimension**-0.5, np.float32)
        xy, explained = principal_plane(vectors)
        assert not xy.any()
        assert explained == (0.0, 0.0)
    xy, explained = principal_plane(np.array([[1.0], [-1.0], [1.0]]))
    assert explained == pytest.approx((1.0, 0.0))
    assert not xy[:, 1].any()


@pytest.mark.slow
def test_the_largest_sample_takes_less_than_a_second() -> None:
    vectors = np.random.default_rng(1).standard_normal((browsing.SAMPLE, 384)).astype(np.float32)
    principal_plane(vectors[:500])
    taken = []
    for _ in range(2):
        start = time.thread_time()
        principal_plane(vectors)
        taken.append(time.thread_time() - start)
    assert min(taken) < 1


# ----------------------------------------------------------------------------------------------------- texts of chunks

WORD = st.text(st.sampled_from("ab c\n"), min_size=1, max_size=8)


def cut(text: str, limit: int, overlap: int) -> list[str]:
    """By characters as tokens, so that every kind of border comes."""
    offsets = [(at, at + 1) for at, char in enumerate(text) if not char.isspace()]
    spans = piece_spans(text, offsets, limit, overlap, lambda piece: sum(not char.isspace() for char in piece))
    return [text[start:end] for start, end in spans]


@given(words=st.lists(st.integers(0, 10**6).map(str), min_size=1, max_size=60), limit=st.integers(40, 80))
def test_a_text_is_what_its_chunks_are_put_together_to(words: list[str], limit: int) -> None:
    """Words that no other is like, so that nothing repeats itself at a border."""
    text = " ".join(f"{word}x{place}" for place, word in enumerate(words))
    for overlap in (1, 5, 30):
        assert joined(cut(text, limit, overlap), overlapping=True) == text
    assert joined(cut(text, limit, 0), overlapping=False) == text


@given(words=st.lists(WORD, min_size=1, max_size=60))
def test_a_text_that_repeats_itself_loses_repetitions_at_most(words: list[str]) -> None:
    text = "".join(words)
    whole = joined(pieces := cut(text, 20, 5), overlapping=True)
    assert len(whole) <= len(text)
    assert all(piece in whole for piece in pieces)
    assert joined(cut(text, 20, 0), overlapping=False) == text


def test_long_texts_are_put_together_soon() -> None:
    """Whatever they are made of: a row may be megabytes."""
    for text in ("a" * 300_000, "ab" * 150_000, " ".join(map(str, range(60_000)))):
        pieces = [text[start : start + 3000] for start in range(0, len(text), 2900)]
        start = time.thread_time()
        whole = joined(pieces, overlapping=True)
        assert time.thread_time() - start < 2
        assert len(whole) <= len(text)
        repeated = len(set(text)) <= 2  # and may come out with a repetition less
        assert repeated or whole == text
