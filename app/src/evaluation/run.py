"""Evaluate a collection: run each labelled query in each mode, compare the report with an earlier one, and measure the
recall of an approximate vector index."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from app.src.evaluation.measures import HIT_RANKS, MEASURES, figures, mean, paired
from app.src.evaluation.queries import LabelledQuery, read
from connector.errors import BadFilter, ConfigurationError, UnknownCollection
from connector.model import CollectionSpec, CollectionStatus, Filter
from connector.stores.store import VectorStore

FORMAT = 1  # of a saved report
WORST = 10
_NAMED = 3  # unknown rows or lines that a note names
_NOTES = 20  # notes of searches in a report

Mode = Literal["vector", "keyword", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)
Progress = Callable[[int, int], None]
# Collection, text, k, filter, mode, whether to rerank -> ids of the hits, best first, and the notes of the search.
Search = Callable[[str, str, int, Filter | None, Mode, bool | None], tuple[Sequence[str], Sequence[str]]]


class Evaluator:
    """`search` sees every row, as the operator; `spec` returns a collection's settings or raises UnknownCollection."""

    def __init__(self, search: Search, spec: Callable[[str], CollectionSpec], store: Callable[[], VectorStore]) -> None:
        self._search = search
        self._spec = spec
        self._store = store

    def evaluate(
        self,
        name: str,
        file: Path,
        modes: Sequence[Mode] = MODES,
        *,
        k: int = 10,
        rerank: bool | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> dict[str, Any]:
        """Search every labelled query of the file in every mode, and return the report. `k`: cutoff of recall and nDCG;
        `rerank` None: as configured. A first, untimed search per mode loads what is needed. Raises ConfigurationError
        for an invalid file, BadFilter naming the line, and the errors of search."""
        spec, stored = self._spec(name), self._stored(name)
        queries = read(file, stored.key or spec.key)
        noted: dict[str, set[int]] = {}

        def ask(query: LabelledQuery, mode: Mode) -> Sequence[str]:
            try:
                ids, notes = self._search(name, query.text, max(k, *HIT_RANKS), query.where, mode, rerank)
            except BadFilter as error:
                raise BadFilter(f"line {query.line}: {error}") from None
            for each in notes:
                noted.setdefault(each, set()).add(query.line)
            return ids

        rows = {names for query in queries for names in query.relevant}
        held = {chunk.id for page in self._store().stored(name, sorted(set().union(*rows))) for chunk in page}
        missing = sorted((names for names in rows if not names & held), key=sorted)
        found: dict[str, Any] = {}
        done = 0
        for mode in modes:
            outcomes, milliseconds = [], []
            ask(queries[0], mode)
            for query in queries:
                start = time.perf_counter()
                ranks = query.ranks(ask(query, mode))
                milliseconds.append((time.perf_counter() - start) * 1000)
                known = {"line": query.line, "query": query.text, "filter": query.where, "group": query.group}
                known |= {"right": len(query.relevant), "ranks": list(ranks)}
                outcomes.append(known | figures(ranks, len(query.relevant), k))
                progress(done := done + 1, len(modes) * len(queries))
            found[mode] = _report_of_mode(outcomes, milliseconds)

        notes = []
        if missing:
            shown = ", ".join(min(names) for names in missing[:_NAMED]) + ", ..." * (len(missing) > _NAMED)
            notes.append(f"{len(missing)} labelled rows are not in the collection and count as not found: {shown}")
        for note, lines in list(noted.items())[:_NOTES]:
            shown = ", ".join(map(str, sorted(lines)[:_NAMED])) + ", ..." * (len(lines) > _NAMED)
            notes.append(f"line{'s' * (len(lines) > 1)} {shown}: {note}")
        return {
            "format": FORMAT,
            "collection": name,
            "store": stored.store,
            "generation": stored.generation,
            "model": stored.model,
            "rows": stored.rows,
            "k": k,
            "queries": len(queries),
            "missing": len(missing),
            "modes": found,
            "notes": notes,
        }

    def index_recall(
        self, name: str, queries: int = 100, k: int = 10, progress: Progress = lambda _done, _total: None
    ) -> dict[str, Any]:
        """Measure the recall of the collection's index: search with vectors of up to `queries` stored rows, through the
        index and exactly. `recall`: the mean share of the exact best `k` rows that the ordinary search finds, with
        its 95 % interval from `low` to `high`; rows with the score of the k-th count as found. Milliseconds are
        medians. Raises UnknownCollection, ValueError for an empty collection."""
        self._spec(name)
        view = self._store().view(name, self._stored(name).generation)
        sample = view.sample(queries, texts=False).chosen
        vectors = [vector for vector in view.vectors(sample) if vector.any()]
        if not vectors:
            raise ValueError("the collection has no vectors to search with")
        recalls, first, usual, exact = [], [], [], []
        for place, vector in enumerate(vectors):
            start = time.perf_counter()
            found = view.search(vector, k)
            middle = time.perf_counter()
            best = view.search(vector, k, exact=True)
            usual.append(1000 * (middle - start))
            exact.append(1000 * (time.perf_counter() - middle))
            least = best[-1].score - 1e-6 if best else math.inf
            hits = sum(hit.score >= least for hit in found[: len(best)])
            recalls.append(hits / len(best) if best else 1.0)
            first.append(not best or (bool(found) and found[0].score >= best[0].score - 1e-6))
            progress(place + 1, len(vectors))
        interval, index = paired([0.0] * len(recalls), recalls), view.index_use(k)
        return {
            "collection": name,
            "k": k,
            "queries": len(vectors),
            "index_used": index.used,
            "index_detail": index.detail,
            "recall": interval["difference"],
            "low": interval["low"],
            "high": interval["high"],
            "same_first": round(float(np.mean(first)), 4),
            "search_ms": round(float(np.median(usual)), 3),
            "exact_ms": round(float(np.median(exact)), 3),
        }

    def _stored(self, name: str) -> CollectionStatus:
        stored = self._store().status(name)
        if stored is None:
            raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
        return stored


# ------------------------------------------------------------------------------------------------------------- reports


def _report_of_mode(outcomes: Sequence[dict[str, Any]], milliseconds: Sequence[float]) -> dict[str, Any]:
    def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: round(value, 4) if name in MEASURES else value for name, value in values.items()}

    def summary(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"queries": len(some), **rounded(mean(some))}

    groups = dict.fromkeys(each["group"] for each in outcomes)
    late = [each for each in outcomes if not each["hit_1"]]
    worst = sorted(late, key=lambda each: (each["mrr"], each["ndcg"], each["line"]))[:WORST]
    median, p95 = np.percentile(milliseconds, [50, 95])
    return {
        "all": summary(outcomes),
        "groups": {group: summary([each for each in outcomes if each["group"] == group]) for group in groups},
        "worst": [rounded(each) for each in worst],
        "milliseconds": {"median": round(float(median), 2), "p95": round(float(p95), 2)},
        "outcomes": [rounded(each) for each in outcomes],
    }


def check_earlier(earlier: Mapping[str, Any], k: int) -> None:
    """Raise ConfigurationError for an incomplete report and for one made with another k."""
    modes = earlier.get("modes")
    whole = isinstance(modes, dict) and all(isinstance(each, dict) and "outcomes" in each for each in modes.values())
    if earlier.get("format") != FORMAT or not whole:
        raise ConfigurationError("not a report of `owl-sap evaluate --save` (the output of --json is shorter)")
    if earlier.get("k") != k:
        raise ConfigurationError(f"the earlier report was made with -k {earlier.get('k')}, this one with -k {k}")


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the differences, now minus earlier, by mode and measure, over the queries in both reports. Call
    `check_earlier` before. Raises ConfigurationError when the reports have no query in common."""

    def identity(outcome: Mapping[str, Any]) -> tuple[str, str]:
        return outcome["query"], repr(sorted((outcome["filter"] or {}).items(), key=str))

    found: dict[str, dict[str, Any]] = {}
    for mode in (mode for mode in now["modes"] if mode in earlier["modes"]):
        before = {identity(each): each for each in earlier["modes"][mode]["outcomes"]}
        after = now["modes"][mode]["outcomes"]
        both = [(before[identity(each)], each) for each in after if identity(each) in before]
        if both:
            found[mode] = {
                name: paired([old[name] for old, _ in both], [new[name] for _, new in both]) for name in MEASURES
            }
    if not found:
        raise ConfigurationError("the earlier report has no mode and query in common with this one")
    return found
