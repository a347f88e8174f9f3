"""Recall of an approximate vector index against exact search with the same vectors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from app.src.evaluation.measures import Difference, paired
from connector.model import IndexUse
from connector.stores.store import VectorStore

ENOUGH = 0.95  # below this recall a larger efSearch is proposed
ENOUGH_QUERIES = 30  # with fewer, a perfect recall proves nothing: resamples of equal values have no variance
DEFAULT_EF_SEARCH = 200  # HANA's default


@dataclass(frozen=True, slots=True)
class RecallReport:
    """`recall`: the mean share of the exact best `k` rows that the ordinary search finds, with its 95 % interval from
    `low` to `high`. Milliseconds are medians."""

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


def measure_index_recall(
    store: VectorStore,
    collection: str,
    vectors: Sequence[NDArray[np.float32]],
    k: int,
    progress: Callable[[int, int], None],
) -> RecallReport:
    """Search each vector both ways, alternating. Rows with the score of the k-th count as found. Raises as
    `VectorStore.search`, and ValueError without vectors."""
    if not vectors:
        raise ValueError("the collection has no vectors to search with")
    recalls, first, usual, exact = [], [], [], []
    for place, vector in enumerate(vectors):
        start = time.perf_counter()
        found = store.view(collection).search(vector, k)
        middle = time.perf_counter()
        best = store.view(collection).search(vector, k, exact=True)
        usual.append(middle - start)
        exact.append(time.perf_counter() - middle)
        least = best[-1].score - 1e-6 if best else math.inf
        hits = sum(hit.score >= least for hit in found[: len(best)])
        recalls.append(hits / len(best) if best else 1.0)
        first.append(not best or (bool(found) and found[0].score >= best[0].score - 1e-6))
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
    """Propose a change, if any. efSearch is set when an index is created, so each trial rebuilds it."""
    if index.used is not True:
        return "no index is used: nothing is lost, and there is nothing to set"
    if recall.low >= ENOUGH and recall.queries >= ENOUGH_QUERIES:
        return f"the index finds at least {recall.low:.1%} of the best {k}: keep efSearch"
    if recall.difference >= ENOUGH:
        return (
            f"{recall.queries} queries are too few to decide whether the index finds enough; ask with more (--queries)"
        )
    larger = max(2 * DEFAULT_EF_SEARCH, 4 * k)
    return (
        f"the index finds {recall.difference:.1%} of the best {k}: rebuild it with SEARCH CONFIGURATION "
        f"'{{\"efSearch\":{larger}}}' (HANA's default is {DEFAULT_EF_SEARCH}) and measure again; if that is not "
        "enough, use a larger M and efConstruction"
    )
