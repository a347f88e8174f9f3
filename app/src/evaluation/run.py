"""Evaluate a collection: each labelled query in each mode, the report, and its difference to an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from app.src.evaluation.index_recall import RecallReport, measure_index_recall
from app.src.evaluation.measures import HIT_RANKS, MEASURES, Figures, figures, mean, paired
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

Search = Callable[[str, str, int, Filter | None, Mode, bool | None], tuple[Sequence[str], Sequence[str]]]
"""Collection, text, k, filter, mode, whether to rerank -> ids of the hits, best first, and the notes of the search."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """`file`: labelled queries. `k`: cutoff of recall and nDCG. `rerank` None: as configured."""

    file: Path
    modes: tuple[Mode, ...] = MODES
    k: int = 10
    rerank: bool | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One query in one mode. `ranks`: of the relevant rows that were found, from 1."""

    query: LabelledQuery
    ranks: tuple[int, ...]
    figures: Figures
    milliseconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "line": self.query.line,
            "query": self.query.text,
            "filter": self.query.where,
            "group": self.query.group,
            "right": len(self.query.relevant),
            "ranks": list(self.ranks),
            **self.figures.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`subject`: the collection, model and rows. `missing`: labelled rows that the collection lacks."""

    subject: Mapping[str, Any]
    k: int
    outcomes: Mapping[str, Sequence[Outcome]]
    missing: int = 0
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.subject,
            "k": self.k,
            "queries": len(next(iter(self.outcomes.values()))),
            "missing": self.missing,
            "modes": {mode: _mode(outcomes) for mode, outcomes in self.outcomes.items()},
            "notes": self.notes,
        }


class Evaluator:
    """`search` sees every row, as the operator does; `spec` returns a collection's settings (UnknownCollection)."""

    def __init__(self, search: Search, spec: Callable[[str], CollectionSpec], store: Callable[[], VectorStore]) -> None:
        self._search = search
        self._spec = spec
        self._store = store

    def evaluate(
        self, name: str, request: EvaluationRequest, progress: Progress = lambda _done, _total: None
    ) -> Evaluation:
        """Search every query in every mode. A first, untimed search per mode loads what is needed. Raises
        ConfigurationError for an invalid file, BadFilter with the line, else as search."""
        spec, stored = self._spec(name), self._stored(name)
        queries = read(request.file, stored.key or spec.key)
        depth = max(request.k, *HIT_RANKS)
        noted: dict[str, set[int]] = {}

        def ask(query: LabelledQuery, mode: Mode) -> Sequence[str]:
            try:
                ids, notes = self._search(name, query.text, depth, query.where, mode, request.rerank)
            except BadFilter as error:
                raise BadFilter(f"line {query.line}: {error}") from None
            for each in notes:
                noted.setdefault(each, set()).add(query.line)
            return ids

        missing = self._missing(name, queries)
        outcomes: dict[str, list[Outcome]] = {mode: [] for mode in request.modes}
        total, done = len(request.modes) * len(queries), 0
        for mode in request.modes:
            ask(queries[0], mode)
            for query in queries:
                start = time.perf_counter()
                ids = ask(query, mode)
                milliseconds = (time.perf_counter() - start) * 1000
                ranks = query.ranks(ids)
                measured = figures(ranks, len(query.relevant), request.k)
                outcomes[mode].append(Outcome(query, ranks, measured, milliseconds))
                progress(done := done + 1, total)

        notes = []
        if missing:
            shown = ", ".join(min(names) for names in missing[:_NAMED]) + ", ..." * (len(missing) > _NAMED)
            notes.append(f"{len(missing)} labelled rows are not in the collection and count as not found: {shown}")
        notes += [f"{_lines(lines)}: {each}" for each, lines in noted.items()][:_NOTES]
        subject = {
            "collection": name,
            "store": stored.store,
            "generation": stored.generation,
            "model": stored.model,
            "rows": stored.rows,
        }
        return Evaluation(subject, request.k, outcomes, len(missing), notes)

    def index_recall(
        self, name: str, queries: int = 100, k: int = 10, progress: Progress = lambda _done, _total: None
    ) -> RecallReport:
        """Measure the recall of the collection's index with vectors of up to `queries` stored rows. Raises
        UnknownCollection, ValueError for an empty collection."""
        self._spec(name)
        stored, store = self._stored(name), self._store()
        sample = store.view(name, stored.generation).sample(queries, texts=False).chosen
        vectors = [vector for vector in store.view(name, stored.generation).vectors(sample) if vector.any()]
        return measure_index_recall(store, name, vectors, k, progress)

    def _stored(self, name: str) -> CollectionStatus:
        stored = self._store().status(name)
        if stored is None:
            raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
        return stored

    def _missing(self, name: str, queries: Sequence[LabelledQuery]) -> list[frozenset[str]]:
        rows = {names for query in queries for names in query.relevant}
        ids = list(dict.fromkeys(id_ for names in rows for id_ in names))
        held = {chunk.id for page in self._store().stored(name, ids) for chunk in page}
        return sorted((names for names in rows if not names & held), key=sorted)


def _lines(numbers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:_NAMED]))
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}" + ", ..." * (len(numbers) > _NAMED)


# ------------------------------------------------------------------------------------------------------------- reports


def _mode(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    groups = dict.fromkeys(outcome.query.group for outcome in outcomes)
    took = [outcome.milliseconds for outcome in outcomes]
    late = [each for each in outcomes if not each.figures.hit_1]
    worst = sorted(late, key=lambda each: (each.figures.mrr, each.figures.ndcg, each.query.line))[:WORST]
    return {
        "all": _summary(outcomes),
        "groups": {group: _summary([each for each in outcomes if each.query.group == group]) for group in groups},
        "worst": [each.as_dict() for each in worst],
        "milliseconds": {"median": round(float(np.median(took)), 2), "p95": round(float(np.percentile(took, 95)), 2)},
        "outcomes": [each.as_dict() for each in outcomes],
    }


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"queries": len(outcomes), **mean(each.figures for each in outcomes).as_dict()}


def check_earlier(earlier: Mapping[str, Any], k: int) -> None:
    """Raise ConfigurationError for an incomplete report and for one made with another k."""
    modes = earlier.get("modes")
    whole = isinstance(modes, dict) and all(isinstance(each, dict) and "outcomes" in each for each in modes.values())
    if earlier.get("format") != FORMAT or not whole:
        raise ConfigurationError("not a report of `owl-sap evaluate --save` (the output of --json is shorter)")
    if earlier.get("k") != k:
        raise ConfigurationError(f"the earlier report was made with -k {earlier.get('k')}, this one with -k {k}")


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the differences, now minus earlier, by mode and measure, over the queries in both reports. Raises as
    `check_earlier`, and ConfigurationError when the reports have no query in common."""
    check_earlier(earlier, now["k"])
    found: dict[str, dict[str, Any]] = {}
    for mode in now["modes"]:
        if mode not in earlier["modes"]:
            continue
        before = {_identity(each): each for each in earlier["modes"][mode]["outcomes"]}
        after = now["modes"][mode]["outcomes"]
        both = [(before[_identity(each)], each) for each in after if _identity(each) in before]
        if both:
            found[mode] = {
                name: paired([old[name] for old, _ in both], [new[name] for _, new in both]).as_dict()
                for name in MEASURES
            }
    if not found:
        raise ConfigurationError("the earlier report has no mode and query in common with this one")
    return found


def _identity(outcome: Mapping[str, Any]) -> tuple[str, str]:
    return outcome["query"], repr(sorted((outcome["filter"] or {}).items(), key=str))
