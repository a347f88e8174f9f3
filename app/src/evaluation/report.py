"""Asks every labelled query in every mode and makes the report: figures by mode and group, the worst queries, and the
difference to an earlier report. Knows search only as a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.src.evaluation.measures import HIT_RANKS, MEASURES, Figures, figures, mean
from app.src.evaluation.queries import LabelledQuery
from app.src.evaluation.significance import paired
from connector.errors import BadFilter, ConfigurationError

FORMAT = 1
"""Of a saved report."""
WORST = 10

Ask = Callable[[LabelledQuery, Any, int], Sequence[str]]
"""A query, a mode and how many: the ids of the hits, best first."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One query in one mode. `ranks`: of the right rows that were found, from 1."""

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
            "right": len(self.query.right),
            "ranks": list(self.ranks),
            **self.figures.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`subject`: what was measured, for the reader: collection, model, rows. `missing`: rows of the labels that the
    collection does not hold."""

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


def evaluate(
    queries: Sequence[LabelledQuery], modes: Sequence[str], k: int, ask: Ask, progress: Progress = lambda *_: None
) -> dict[str, list[Outcome]]:
    """Every query in every mode, once before the clock runs so that nobody pays for loading. Raises what `ask` does,
    and ConfigurationError naming the line for a filter that search refuses."""
    depth = max(k, *HIT_RANKS)
    total, done = len(modes) * len(queries), 0
    outcomes: dict[str, list[Outcome]] = {}

    def asked(query: LabelledQuery, mode: str) -> Sequence[str]:
        try:
            return ask(query, mode, depth)
        except BadFilter as error:
            raise BadFilter(f"line {query.line}: {error}") from None

    for mode in modes:
        asked(queries[0], mode)
        outcomes[mode] = []
        for query in queries:
            start = time.perf_counter()
            ids = asked(query, mode)
            milliseconds = (time.perf_counter() - start) * 1000
            found = query.found(ids)
            ranks = tuple(rank for rank, right in enumerate(found, 1) if right)
            outcomes[mode].append(Outcome(query, ranks, figures(found, len(query.right), k), milliseconds))
            progress(done := done + 1, total)
    return outcomes


def _mode(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    groups = dict.fromkeys(outcome.query.group for outcome in outcomes)
    took = [outcome.milliseconds for outcome in outcomes]
    return {
        "all": _summary(outcomes),
        "groups": {group: _summary([each for each in outcomes if each.query.group == group]) for group in groups},
        "worst": [each.as_dict() for each in worst(outcomes)],
        "milliseconds": {"median": round(float(np.median(took)), 2), "p95": round(float(np.percentile(took, 95)), 2)},
        "outcomes": [each.as_dict() for each in outcomes],
    }


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"queries": len(outcomes), **mean(each.figures for each in outcomes).as_dict()}


def worst(outcomes: Sequence[Outcome], count: int = WORST) -> list[Outcome]:
    """Those whose first right row is not the first hit, the latest first; then by nDCG."""
    late = [each for each in outcomes if not each.figures.hit_1]
    return sorted(late, key=lambda each: (each.figures.mrr, each.figures.ndcg, each.query.line))[:count]


def check_earlier(earlier: Mapping[str, Any], k: int) -> None:
    """Raises ConfigurationError when it is no whole report, or was made with another k."""
    modes = earlier.get("modes")
    whole = isinstance(modes, dict) and all(isinstance(each, dict) and "outcomes" in each for each in modes.values())
    if earlier.get("format") != FORMAT or not whole:
        raise ConfigurationError("this is no report of `owl-sap evaluate --save` (what --json prints is shorter)")
    if earlier.get("k") != k:
        raise ConfigurationError(f"the earlier report was made with -k {earlier.get('k')}, this one with -k {k}")


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By mode and measure, of the queries that both reports hold: now minus earlier.

    Raises as `check_earlier`, and ConfigurationError when they have nothing in common.
    """
    check_earlier(earlier, now["k"])
    found: dict[str, dict[str, Any]] = {}
    for mode in now["modes"]:
        if mode not in earlier["modes"]:
            continue
        before = {_name(each): each for each in earlier["modes"][mode]["outcomes"]}
        both = [(before[_name(each)], each) for each in now["modes"][mode]["outcomes"] if _name(each) in before]
        if both:
            found[mode] = {
                name: paired([old[name] for old, _ in both], [new[name] for _, new in both]).as_dict()
                for name in MEASURES
            }
    if not found:
        raise ConfigurationError("the earlier report has no mode and query in common with this one")
    return found


def _name(outcome: Mapping[str, Any]) -> tuple[str, str]:
    return outcome["query"], repr(sorted((outcome["filter"] or {}).items(), key=str))
