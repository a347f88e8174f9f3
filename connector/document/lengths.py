"""Histogram texts by their length in tokens, for plans and previews."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = (16, 32, 64, 128, 256, 512)  # upper bounds; one more bucket is open-ended


def counted(tokens: NDArray[np.int32] | Sequence[int]) -> NDArray[np.int64]:
    """Return the number of texts per bucket, shape (len(BUCKETS) + 1,)."""
    found: NDArray[np.int64] = np.bincount(np.searchsorted(BUCKETS, tokens), minlength=len(BUCKETS) + 1)
    return found


def named(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return the counts by bucket name: "0-16", "17-32" ... "513+"."""
    lows = (0, *(end + 1 for end in BUCKETS))
    names = [*(f"{low}-{end}" for low, end in zip(lows, BUCKETS, strict=False)), f"{lows[-1]}+"]
    return dict(zip(names, counts.tolist(), strict=True))
