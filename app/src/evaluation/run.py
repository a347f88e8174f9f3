"""Evaluation of a collection for every surface: reads the labelled queries, asks them, and says what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from app.src.evaluation.queries import LabelledQuery, read
from app.src.evaluation.recall import RecallReport, probe
from app.src.evaluation.report import Evaluation, Progress, evaluate
from app.src.service.wiring import Parts
from connector.errors import UnknownCollection
from connector.model import CollectionSpec, CollectionStatus, Filter

_NAMED = 3
"""Unknown rows, or lines, that a note shows."""
_SAID = 20
"""Notes of searches that a report repeats."""

Mode = Literal["vector", "keyword", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)

Search = Callable[[str, str, int, Filter | None, Mode, bool | None], tuple[Sequence[str], Sequence[str]]]
"""Collection, text, how many, filter, mode, whether to rerank: the ids of the hits, best first, and what the search has
to say of itself."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to evaluate: the file of labelled queries, the modes, how many hits recall and nDCG look at, and whether to
    rerank (None: where that is configured)."""

    file: Path
    modes: tuple[Mode, ...] = MODES
    k: int = 10
    rerank: bool | None = None


def _lines(numbers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:_NAMED]))
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}" + ", ..." * (len(numbers) > _NAMED)


def _silent(done: int, total: int) -> None:
    return


class Evaluating:
    """`search` shows every row, as the operator sees them; `spec` says what is configured (UnknownCollection)."""

    def __init__(self, search: Search, spec: Callable[[str], CollectionSpec], parts: Parts) -> None:
        self._search = search
        self._spec = spec
        self._parts = parts

    def evaluate(self, name: str, wanted: Wanted, progress: Progress = _silent) -> Evaluation:
        """Every query in every mode. Raises ConfigurationError for what is wrong with the file, else as search."""
        spec, stored = self._spec(name), self._stored(name)
        queries = read(wanted.file, stored.key or spec.key)

        said: dict[str, set[int]] = {}

        def ask(query: LabelledQuery, mode: Mode, count: int) -> Sequence[str]:
            ids, told = self._search(name, query.text, count, query.where, mode, wanted.rerank)
            for each in told:
                said.setdefault(each, set()).add(query.line)
            return ids

        missing = self._missing(name, queries)
        notes = []
        if missing:
            shown = ", ".join(min(names) for names in missing[:_NAMED]) + ", ..." * (len(missing) > _NAMED)
            notes.append(
                f"{len(missing)} rows that the labels name are not in the collection; they count as not found: {shown}"
            )
        subject = {
            "collection": name,
            "store": stored.store,
            "generation": stored.generation,
            "model": stored.model,
            "rows": stored.rows,
        }
        outcomes = evaluate(queries, wanted.modes, wanted.k, ask, progress)
        notes += [f"of {_lines(lines)}: {each}" for each, lines in said.items()][:_SAID]
        return Evaluation(subject, wanted.k, outcomes, len(missing), notes)

    def recall(self, name: str, queries: int = 100, k: int = 10, progress: Progress = _silent) -> RecallReport:
        """What the collection's index loses, asked with vectors of up to `queries` stored rows. Raises
        UnknownCollection, ValueError for an empty collection."""
        self._spec(name)
        stored, store = self._stored(name), self._parts.store
        sample = store.view(name, stored.generation).sample(queries, texts=False).chosen
        vectors = [vector for vector in store.view(name, stored.generation).vectors(sample) if vector.any()]
        return probe(store, name, vectors, k, progress)

    def _stored(self, name: str) -> CollectionStatus:
        stored = self._parts.store.status(name)
        if stored is None:
            raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
        return stored

    def _missing(self, name: str, queries: Sequence[LabelledQuery]) -> list[frozenset[str]]:
        rows = {names for query in queries for names in query.right}
        ids = list(dict.fromkeys(id_ for names in rows for id_ in names))
        held = {chunk.id for page in self._parts.store.stored(name, ids) for chunk in page}
        return sorted((names for names in rows if not names & held), key=sorted)
