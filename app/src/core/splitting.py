"""A long text cut into pieces of so many tokens that overlap: where each begins and ends, given where its tokens stand.
Knows characters and counts; no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Offsets = Sequence[tuple[int, int]]
"""Of each token of a text its first character and one after its last."""
Count = Callable[[str], int]
"""Tokens of a piece on its own."""


def piece_spans(text: str, offsets: Offsets, limit: int, overlap: int, count: Count) -> Iterator[tuple[int, int]]:
    """First character of each piece, one after its last. Pieces have at most `limit` tokens, together cover the text,
    and each begins up to `overlap` tokens before the end of the one before; cut at blank space where there is any, else
    at words."""
    if len(offsets) <= limit:
        yield 0, len(text)
        return
    first, begin, end = 0, 0, 0
    while end < len(offsets):
        end = _end_of_piece(text, offsets, (first, begin), limit, count)
        stop = _stop(text, offsets, end)
        yield begin, stop
        if end < len(offsets):
            first = max(first + 1, overlap_start(text, offsets, end, overlap))
            begin = min(offsets[first][0], stop)


def _end_of_piece(text: str, offsets: Offsets, start: tuple[int, int], limit: int, count: Count) -> int:
    """A piece cut out of its text can have more tokens than it had inside: then it is cut shorter. `start` is the
    piece's first token and first character."""
    first, begin = start
    allowed = limit
    while True:
        end = cut_position(text, offsets, first, allowed)
        found = count(text[begin : _stop(text, offsets, end)])
        if found <= limit or allowed == 1:
            return end
        allowed = max(1, min(allowed - 1, end - first - (found - limit)))


def cut_position(text: str, offsets: Offsets, first: int, limit: int) -> int:
    """The token before which a piece that begins at token `first` and may have `limit` tokens ends.

    Prefers blank space, then the end of a word, in the second half of the piece; else cuts at the limit.
    """
    last = min(first + limit, len(offsets))
    if last == len(offsets):
        return last
    half = first + max(1, limit // 2)
    for border in (_blank_before, _word_before):
        for token in range(last, half - 1, -1):
            if border(text, offsets, token):
                return token
    return last


def overlap_start(text: str, offsets: Offsets, end: int, overlap: int) -> int:
    """The token at which the piece after `end` begins: up to `overlap` tokens before it, at blank space if there is."""
    for token in range(end - overlap, end):
        if token > 0 and _blank_before(text, offsets, token):
            return token
    return end - overlap


def _blank_before(text: str, offsets: Offsets, token: int) -> bool:
    start = offsets[token][0]
    between = text[offsets[token - 1][1] : start]
    return bool(between and not between.strip()) or text[start : start + 1].isspace()


def _word_before(text: str, offsets: Offsets, token: int) -> bool:
    start = offsets[token][0]
    return start > 0 and not (text[start - 1].isalnum() and text[start : start + 1].isalnum())


def _stop(text: str, offsets: Offsets, end: int) -> int:
    """The character before which a piece ends that ends before token `end`."""
    return len(text) if end == len(offsets) else offsets[end][0]
