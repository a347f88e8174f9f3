"""Collections that clients write, as every surface offers it: documents put and deleted by whoever may see every row.
Knows the parts, no HTTP and no terminal.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.src.access.principal import Principal
from app.src.access.rows import Rights
from app.src.observe.metrics import Metrics
from app.src.service.generations import Generations
from app.src.service.wiring import Parts
from connector.errors import DatabaseError
from connector.model import CollectionSpec
from connector.sync.documents import Documents, NewDocument, Put, Turn, delete, from_table

_OPTIMISE_EVERY = 60.0
"""Seconds at least between two looks whether a collection has become large enough for an index: that counts it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Writing:
    """What it takes to write: where to, counted how, with which model, and who may."""

    parts: Parts
    metrics: Metrics
    generations: Generations
    rights: Rights


class ClientDocuments:
    """Thread-safe."""

    def __init__(self, writing: Writing, spec: Callable[[str], CollectionSpec], written: Callable[[str], None]) -> None:
        """`spec`: of a collection by its name; raises UnknownCollection. `written` is told after each change."""
        self._spec = spec
        self._written = written
        self._parts = writing.parts
        self._metrics = writing.metrics
        self._generations = writing.generations
        self._rights = writing.rights
        self._turns: defaultdict[str, Turn] = defaultdict(Turn)
        self._looked: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()

    def put(
        self,
        name: str,
        documents: Sequence[NewDocument],
        *,
        principal: Principal,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Put:
        """Put documents with the model of the active generation, as `Documents.put` does. Raises WrongOrigin for
        a collection of a table, UnknownCollection, and RowsRefused for whoever may not see every row: he would replace
        rows unseen. `counted` is told how many tokens each text has before anything is done; what it raises comes
        out."""
        spec = self._checked(name, principal)
        maker = self._generations.maker(spec)
        self._tell_of_model(name, maker.source.name)
        if counted is not None:
            counted(maker.embedder.count_tokens([each.text for each in documents]))
        put = Documents(maker.spec, self._parts.store, maker.embedder, self._turns[name]).put(documents)
        if maker.number is None and documents:
            self._generations.record(maker)
        self._written(name)
        self._count(name, upserted=put.upserted, unchanged=put.unchanged)
        self._metrics.embedded_texts.inc(put.embedded_texts)
        self._metrics.embed_tokens.inc(put.tokens)
        if put.upserted:
            self._optimise(name)
        return put

    def delete(self, name: str, ids: Sequence[str], *, principal: Principal) -> int:
        """How many of them there were. Raises as `put`. Needs no model."""
        spec = self._checked(name, principal)
        deleted = delete(spec, self._parts.store, ids, self._turns[name])
        self._written(name)
        self._count(name, deleted=deleted)
        return deleted

    def _checked(self, name: str, principal: Principal) -> CollectionSpec:
        spec = self._spec(name)
        if not spec.written_by_clients:
            raise from_table(spec)
        self._rights.check_every_row(principal, name)
        return spec

    def _tell_of_model(self, name: str, model: str) -> None:
        """Once: that the model in the settings is not the one that the documents have."""
        wanted = self._parts.settings.embedding_of(name).model
        if model != wanted and (name, wanted) not in self._told:
            self._told.add((name, wanted))
            _log.warning(
                "%s: the documents there were embedded by %s, which goes on embedding what is written and asked for; "
                "the settings name %s, which only a new or an empty collection takes",
                *(name, model, wanted),
            )

    def _count(self, name: str, **outcomes: int) -> None:
        for outcome, count in outcomes.items():
            self._metrics.documents.labels(name, outcome).inc(count)

    def _optimise(self, name: str) -> None:
        """An index only makes searches faster: without one the documents are in all the same."""
        now = time.monotonic()
        if now - self._looked.get(name, -_OPTIMISE_EVERY) < _OPTIMISE_EVERY:
            return
        self._looked[name] = now
        try:
            self._parts.store.optimise(name)
        except DatabaseError as error:
            _log.warning("%s: the documents are stored, but the search index was not built: %s", name, error)
