"""Packed token ids; dividing texts into batches by tokens, and a long text into overlapping pieces."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]  # of one text
Vectors = NDArray[np.float32]


class TokenBatch:
    """Token ids of several texts in one int32 array. Text i has `ids[offsets[i]:offsets[i + 1]]`.

    `lengths`: tokens of each text: its number of ids, except for `hash:N`, where a token has several ids.
    """

    __slots__ = ("ids", "lengths", "offsets")

    def __init__(self, ids: TokenIds, offsets: NDArray[np.intp], lengths: NDArray[np.intp] | None = None) -> None:
        self.ids = ids
        self.offsets = offsets
        self.lengths: NDArray[np.intp] = np.diff(offsets) if lengths is None else lengths

    @classmethod
    def of(cls, texts: Iterable[Sequence[int] | TokenIds]) -> TokenBatch:
        """Pack the ids of each text."""
        packed, ends = array("i"), [0]
        for ids in texts:
            packed.fromlist(list(ids))  # faster than an array for each text
            ends.append(len(packed))
        return cls(np.array(packed, dtype=np.int32), np.array(ends, dtype=np.intp))

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Return the texts of all batches, in order."""
        starts = np.cumsum([0, *(len(batch.ids) for batch in batches[:-1])])
        return cls(
            np.concatenate([batch.ids for batch in batches]),
            np.append(
                0, np.concatenate([batch.offsets[1:] for batch in batches]) + np.repeat(starts, list(map(len, batches)))
            ),
            np.concatenate([batch.lengths for batch in batches]),
        )

    def select(self, places: NDArray[np.intp] | Sequence[int]) -> TokenBatch:
        """Copy the texts at these positions, in their order."""
        places = np.asarray(places, dtype=np.intp)
        starts, ends = self.offsets[places], self.offsets[places + 1]
        offsets = np.zeros(len(places) + 1, dtype=np.intp)
        np.cumsum(ends - starts, out=offsets[1:])
        sources = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], ends - starts)
        return TokenBatch(self.ids[sources], offsets, self.lengths[places])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> TokenIds:
        return self.ids[self.offsets[place] : self.offsets[place + 1]]

    def __iter__(self) -> Iterator[TokenIds]:
        return (self.ids[start:end] for start, end in pairwise(self.offsets.tolist()))


def rectangle(batch: TokenBatch, *, width: int, pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ids and mask, both (texts, width), padded with `pad_id`."""
    shape = len(batch), width
    ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask


def width_of(batch: TokenBatch, multiple: int, most: int) -> int:
    """Return the longest length, rounded up to `multiple` but not above the model's maximum `most`."""
    longest = int(batch.lengths.max())
    return min(-(-longest // multiple) * multiple, max(longest, most))


# ------------------------------------------------------------------------------------------------------------- batches

# Padding that costs about as much as launching one more batch of padded layers: 1 to 2 ms, or 2,000 to 4,000 tokens of
# BERT-base on an H100 (an estimate; fewer on smaller cards).
LAUNCH_TOKENS = 2048


def plan_batches(
    lengths: NDArray[np.intp] | Sequence[int], budget: int, multiple: int = 8, *, packed: bool = False
) -> list[NDArray[np.intp]]:
    """Divide the positions of `lengths` into batches of similar length, longest first.

    A batch costs its longest length, rounded up to `multiple`, times its size; if `packed`, the sum of its lengths.
    The cost stays within `budget` unless a single text exceeds it. A padded batch ends earlier if a batch of its own
    saves the shorter texts more than LAUNCH_TOKENS of padding, which needs a larger budget than a CPU's.
    """
    lengths = np.asarray(lengths, dtype=np.intp)
    order = np.argsort(-lengths, kind="stable")
    costs = np.maximum(lengths[order], 1)
    widths = -(-costs // multiple) * multiple
    used = np.cumsum(costs)
    batches: list[NDArray[np.intp]] = []
    start = 0
    while start < len(order):
        if packed:
            end = int(np.searchsorted(used, used[start] - costs[start] + budget, side="right"))
        else:
            end = start + max(1, budget // int(widths[start]))
            while (first := _shorter_from(widths[start:end])) is not None:
                end = start + first
        end = max(end, start + 1)
        batches.append(order[start:end])
        start = end
    return batches


def _shorter_from(widths: NDArray[np.intp]) -> int | None:
    """Return where to cut a padded batch of these widths, longest first, to save most padding; None if not worth it."""
    saved = (widths[0] - widths) * np.arange(len(widths), 0, -1)
    best = int(saved.argmax())
    return best if saved[best] > LAUNCH_TOKENS else None


def padded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple


# -------------------------------------------------------------------------------------------------------------- pieces

Offsets = Sequence[tuple[int, int]]  # first character of each token, and one after its last
CountTokens = Callable[[str], int]


def piece_spans(text: str, offsets: Offsets, limit: int, overlap: int, count: CountTokens) -> Iterator[tuple[int, int]]:
    """Yield the position of each piece's first character, and one after its last.

    Pieces have at most `limit` tokens and together cover the text. Each begins up to `overlap` tokens before the end of
    the previous one. Cuts are at white space if possible, else between words. A piece that exceeds `limit` when
    tokenised alone (`count`) is shortened.
    """
    if len(offsets) <= limit:
        yield 0, len(text)
        return
    first, begin, end = 0, 0, 0
    while end < len(offsets):
        allowed = limit
        while True:
            end = cut_position(text, offsets, first, allowed)
            stop = len(text) if end == len(offsets) else offsets[end][0]
            found = count(text[begin:stop])
            if found <= limit or allowed == 1:
                break
            allowed = max(1, min(allowed - 1, end - first - (found - limit)))
        yield begin, stop
        if end < len(offsets):
            spaces = (at for at in range(end - overlap, end) if at > 0 and _after_space(text, offsets, at))
            first = max(first + 1, next(spaces, end - overlap))
            begin = min(offsets[first][0], stop)


def cut_position(text: str, offsets: Offsets, first: int, limit: int) -> int:
    """Return the token after the end of a piece that begins at token `first` and has at most `limit` tokens.

    Prefers white space, then the end of a word, both in the second half of the piece; else cuts at the limit.
    """
    last = min(first + limit, len(offsets))
    if last == len(offsets):
        return last
    candidates = range(last, first + max(1, limit // 2) - 1, -1)
    for token in candidates:
        if _after_space(text, offsets, token):
            return token
    for token in candidates:
        start = offsets[token][0]
        if start > 0 and not (text[start - 1].isalnum() and text[start : start + 1].isalnum()):
            return token
    return last


def _after_space(text: str, offsets: Offsets, token: int) -> bool:
    start = offsets[token][0]
    between = text[offsets[token - 1][1] : start]
    return bool(between and not between.strip()) or text[start : start + 1].isspace()
