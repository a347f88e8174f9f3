"""Cutting long texts: exact substrings that cover the text, fit, overlap, and stand where a reader would cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.tokens import cut_position

FEW = settings(max_examples=30, deadline=None)
HASHING = load_engine(EngineOptions("hash:16"))
WORDS = (
    "pump",
    "Dichtung",
    "end-to-end",
    "unbelievably",
    "4711",
    "Öl,",
    "🦉",
    "漢字",
    "a\u0301b",
    "/BIC/AZD",
    "\n\n",
    "x" * 40,
)
prose = st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)
solid = st.text(st.sampled_from("ab漢字é🦉\u200b"), max_size=80)  # nothing to cut at


def check_pieces(engine: Engine, text: str, most: int, overlap: int) -> list[str]:
    """The contract of `split`, said without looking at how it is done."""
    spans = list(engine.piece_spans(text, most, overlap))
    pieces = engine.split(text, most, overlap)
    assert pieces == [text[begin:stop] for begin, stop in spans]
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    for (begin, stop), (following, end) in pairwise(spans):
        assert begin < following <= stop <= end, "no gap, no standing still, no way back"
    assert max(engine.count_tokens(pieces)) <= most
    assert isinstance(engine, EmbeddingEngine)
    tokens = engine._backend.offsets(text)  # tokens of the whole text: half a word alone may have more
    for (_, stop), (following, _) in pairwise(spans):
        assert sum(following <= start < stop for start, _ in tokens) <= overlap
    return pieces


@FEW
@given(prose | solid, st.integers(2, 40), st.integers(0, 8))
def test_the_real_tokenizer_cuts_by_the_contract(minilm: EmbeddingEngine, text: str, most: int, overlap: int) -> None:
    if max(minilm.count_tokens([char for char in text] or [""])) > 1:
        return  # one character of several tokens cannot be cut
    check_pieces(minilm, text, most, min(overlap, most - 1))


@FEW
@given(prose, st.integers(1, 30))
def test_without_overlap_the_pieces_are_the_text(text: str, most: int) -> None:
    assert "".join(HASHING.split(text, most, 0)) == text


@FEW
@given(prose, st.integers(2, 30), st.data())
def test_splitting_a_piece_again_leaves_it_whole(text: str, most: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, most - 1))
    for piece in HASHING.split(text, most, overlap):
        assert HASHING.split(piece, most, overlap) == [piece]


@FEW
@given(prose, st.integers(4, 30))
def test_more_room_never_means_more_pieces_by_much(text: str, most: int) -> None:
    """A piece is at least half full, so twice the room cannot need more pieces."""
    assert len(HASHING.split(text, 2 * most, 0)) <= len(HASHING.split(text, most, 0))


@FEW
@given(prose, st.integers(2, 30), st.data())
def test_pieces_are_about_as_many_as_they_must_be(text: str, most: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, most // 4))
    tokens = HASHING.count_tokens([text])[0]
    least = max(1, most // 2) - overlap
    assert len(HASHING.split(text, most, overlap)) <= max(1, -(-tokens // max(1, least)) + 1)


@pytest.mark.parametrize(
    ("text", "most", "overlap", "pieces"),
    [
        ("", 1, 0, [""]),
        ("   ", 1, 0, ["   "]),
        ("one", 1, 0, ["one"]),
        ("one two", 2, 1, ["one two"]),  # exactly what fits is not cut
        ("one two", 1, 0, ["one ", "two"]),
        ("one two three", 2, 0, ["one two ", "three"]),
        ("one two three", 2, 1, ["one two ", "two three"]),
        ("one two three four five", 3, 1, ["one two three ", "three four five"]),
        ("one two three four five", 3, 2, ["one two three ", "two three four ", "three four five"]),
        ("  one  two  ", 1, 0, ["  one  ", "two  "]),
        ("one\ntwo\nthree", 2, 0, ["one\ntwo\n", "three"]),
        ("a-b c-d", 4, 0, ["a-b ", "c-d"]),  # at the blank, though "c" had fitted
        ("a-b-c-d", 3, 0, ["a-b", "-c-", "d"]),  # no blank: between words
        ("x" * 50, 1, 0, ["x" * 24, "x" * 24, "xx"]),  # one long word: at the limit
        ("🦉🦉🦉", 2, 0, ["🦉🦉", "🦉"]),
        ("漢字", 1, 0, ["漢字"]),
    ],
)
def test_pieces_by_hand(text: str, most: int, overlap: int, pieces: list[str]) -> None:
    assert check_pieces(HASHING, text, most, overlap) == pieces


OFFSETS = [(0, 3), (4, 7), (7, 8), (8, 11), (12, 15)]
"""of "one two-two end\""""


@pytest.mark.parametrize(
    ("first", "limit", "cut"),
    [
        (0, 5, 5),  # all of it
        (0, 9, 5),
        (0, 4, 4),  # the blank before "end"
        (0, 3, 1),  # the blank before "two", for it stands in the second half
        (0, 2, 1),
        (0, 1, 1),
        (1, 2, 3),  # no blank in reach: after the hyphen
        (1, 3, 4),
        (4, 1, 5),
    ],
)
def test_where_a_piece_ends(first: int, limit: int, cut: int) -> None:
    assert cut_position("one two-two end", OFFSETS, first, limit) == cut


def test_a_very_long_text_is_cut_in_time_that_grows_with_it() -> None:
    """Quadratic work would take minutes here."""
    text = "pump seal oil leak " * 10_000
    pieces = HASHING.split(text, 254, 32)
    assert len(pieces) == pytest.approx(40_000 / 222, abs=2)
    assert sum(map(len, pieces)) > len(text)


def test_real_pieces_of_german_prose(minilm: EmbeddingEngine) -> None:
    text = "Die Hydraulikpumpe verliert Öl an der Wellendichtung; der Druck fällt auf 80 bar. " * 12
    pieces = check_pieces(minilm, text, 60, 10)
    assert len(pieces) > 5
    assert all(piece[0] != " " or piece.lstrip() for piece in pieces)
    assert all(piece.strip().split()[0] in text.split() for piece in pieces), "no piece begins inside a word"


@pytest.mark.parametrize("text", ["half \ud83d pair", "\udc00" * 30, "tab\x00nul " * 20])
def test_damaged_text_is_cut_like_any_other(minilm: EmbeddingEngine, text: str) -> None:
    for engine in (HASHING, minilm):
        assert "".join(engine.split(text, 8, 0)) == text
