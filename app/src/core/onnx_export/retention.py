"""What the cache holds, and which of it nobody will ask for again: each calibration with other texts leaves a graph,
each new driver an engine. The oldest go; what serves stays. Knows entries by what they were made from; reads no graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from .cache import ArtifactCache, Entry

FLOAT, QUANTISED, JUDGED = "graph", "quantised", "verdict"
"""Float graphs; 8-bit graphs with their reports; what the gate said of them on one machine."""
ENGINES, TIMINGS = "engine", "timing"

KEPT = 4
"""Of each series: calibrations of one model by one algorithm, float graphs of one model in one precision, engines of
one graph on one kind of card, timings of one kind of card."""
MACHINES = 8
"""States of machines (card, driver, versions) whose newest verdict is kept, for each model and algorithm: several
machines may share a folder."""

Series = Callable[[Entry], Hashable]


def superseded(entries: Iterable[Entry]) -> list[Entry]:
    """Those that may go. A verdict is the newest of its machine, or old; a graph stays while a verdict that stays is
    about it; an engine goes with its graph."""
    by_kind: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda each: (each.created, each.key), reverse=True):
        by_kind[entry.kind].append(entry)
    verdicts = _verdicts(by_kind[JUDGED])
    about = [dict(each.facts.get("graph") or {}) for each in verdicts]
    newest = _newest(by_kind[QUANTISED], _series("model", "algorithm"))
    quantised = [each for each in by_kind[QUANTISED] if each in newest or dict(each.dependencies) in about]
    floats = _newest(by_kind[FLOAT], _series("model", "precision"))
    files = {name for graph in (*quantised, *floats) for name in graph.files.values()}
    alive = [each for each in by_kind[ENGINES] if each.dependencies.get("graph") in files]
    engines = _newest(alive, _series("graph", "precision", "gpu"))
    timings = _newest(by_kind[TIMINGS], _series("gpu", "capability"))
    staying = {each.path for each in (*verdicts, *quantised, *floats, *engines, *timings)}
    known = (FLOAT, QUANTISED, JUDGED, ENGINES, TIMINGS)
    return [each for kind in known for each in by_kind[kind] if each.path not in staying]


def tidy(cache: ArtifactCache) -> int:
    """Remove what is superseded; how many entries that were."""
    found = superseded(cache.entries())
    for entry in found:
        cache.remove(entry)
    return len(found)


def _series(*names: str) -> Series:
    return lambda entry: tuple(entry.dependencies.get(name) for name in names)


def _newest(newest_first: Sequence[Entry], series: Series, most: int = KEPT) -> list[Entry]:
    counted: dict[Hashable, int] = defaultdict(int)
    kept: list[Entry] = []
    for entry in newest_first:
        counted[series(entry)] += 1
        if counted[series(entry)] <= most:
            kept.append(entry)
    return kept


def _verdicts(newest_first: Sequence[Entry]) -> list[Entry]:
    """Of each machine the newest, whatever texts it was given on: it alone is asked for."""

    def machine(entry: Entry) -> Hashable:
        return tuple(sorted((name, str(value)) for name, value in entry.dependencies.items() if name != "texts"))

    return _newest(_newest(newest_first, machine, 1), _series("model", "algorithm"), MACHINES)
