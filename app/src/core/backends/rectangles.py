"""Token ids of texts as rectangles, for models that want every text of a batch at one length. Knows arrays only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import TokenIds


def rectangle(
    batch: Sequence[TokenIds], *, width: int | None = None, rows: int | None = None, pad_id: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and mask, both (rows, width). Filled up with `pad_id`, which the mask hides, to the longest or to `width`;
    with whole rows, that mean nothing, to `rows`."""
    shape = (len(batch) if rows is None else rows, max(map(len, batch)) if width is None else width)
    ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask


def width_of(batch: Sequence[TokenIds], multiple: int, most: int) -> int:
    """The longest, rounded up to a multiple, but not above what the model takes for the rounding's sake."""
    longest = max(map(len, batch))
    return min(-(-longest // multiple) * multiple, max(longest, most))
