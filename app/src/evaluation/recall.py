"""What an approximate index loses: the same vectors searched with it and exactly. Knows the store's protocol only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from app.src.evaluation.significance import Difference, paired
from connector.model import IndexUse
from connector.stores.store import VectorStore

ENOUGH = 0.95
"""Recall below which a larger efSearch is proposed."""
ENOUGH_QUERIES = 30
"""Fewer that find everything say nothing of the next: resamples of equal values do not scatter."""
DEFAULT_EF_SEARCH = 200
"""HANA's own."""


@dataclass(frozen=True, slots=True)
class RecallReport:
    """`recall`: the mean share of the exact best `k` rows that the usual search finds, its 95 % interval in `low` and
    `high` by bootstrap over queries. Milliseconds are medians."""

    collection: str
    k: int
    queries: int
    index_used: bool | None
    index_detail: str
    recall: float
    low: float
    high: float
    same_first: float
    search_ms: float
    exact_ms: float
    proposal: str

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        return asdict(self)


def probe(
    store: VectorStore,
    collection: str,
    vectors: Sequence[NDArray[np.float32]],
    k: int,
    progress: Callable[[int, int], None],
) -> RecallReport:
    """Searches each vector both ways, in turns. Equal scores at the end of the first `k` count as found. Raises as
    `VectorStore.search`, and ValueError for no vectors."""
    if not vectors:
        raise ValueError("there are no vectors to search with")
    recalls, first, usual, exact = [], [], [], []
    for place, vector in enumerate(vectors):
        start = time.perf_counter()
        found = store.view(collection).search(vector, k)
        middle = time.perf_counter()
        right = store.view(collection).search(vector, k, exact=True)
        usual.append(middle - start)
        exact.append(time.perf_counter() - middle)
        least = right[-1].score - 1e-6 if right else math.inf
        hits = sum(hit.score >= least for hit in found[: len(right)])
        recalls.append(hits / len(right) if right else 1.0)
        first.append(not right or (bool(found) and found[0].score >= right[0].score - 1e-6))
        progress(place + 1, len(vectors))
    interval = paired([0.0] * len(recalls), recalls)
    index = store.view(collection).index_use(k)
    return RecallReport(
        collection,
        k,
        len(vectors),
        index.used,
        index.detail,
        round(interval.difference, 4),
        round(interval.low, 4),
        round(interval.high, 4),
        round(float(np.mean(first)), 4),
        round(float(np.median(usual)) * 1000, 3),
        round(float(np.median(exact)) * 1000, 3),
        proposal(index, interval, k),
    )


def proposal(index: IndexUse, recall: Difference, k: int) -> str:
    """What to do; `recall` as a difference to finding nothing. efSearch belongs to the index and is given when it is
    made, so each trial means building it anew."""
    if index.used is not True:
        return "no index is used, so nothing is lost and there is nothing to set"
    if recall.low >= ENOUGH and recall.queries >= ENOUGH_QUERIES:
        return f"the index finds at least {recall.low:.1%} of the best {k}: leave efSearch as it is"
    if recall.difference >= ENOUGH:
        few = f"{recall.queries} are too few to tell whether the index finds enough"
        return f"ask with more queries (--queries): {few}"
    larger = max(2 * DEFAULT_EF_SEARCH, 4 * k)
    return (
        f"the index finds {recall.difference:.1%} of the best {k}: make it anew with SEARCH CONFIGURATION "
        f"'{{\"efSearch\":{larger}}}' (HANA's default is {DEFAULT_EF_SEARCH}), and measure again; if that is not "
        "enough, with a larger M and efConstruction"
    )
