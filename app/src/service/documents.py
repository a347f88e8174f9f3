"""Collections that clients write: put and delete documents."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from app.src.access.principal import Principal
from app.src.access.rows import Rights
from app.src.observe.metrics import Metrics
from app.src.service.collections import Collections
from app.src.service.generations import Generations
from app.src.service.wiring import Parts
from connector.errors import DatabaseError
from connector.model import CollectionSpec
from connector.sync.documents import Documents, NewDocument, Put, Turn, delete, from_table

_OPTIMISE_EVERY = 60.0  # seconds between checks whether a collection needs an index; each check counts rows
_log = logging.getLogger(__name__)


class ClientDocuments:
    """Thread-safe. Raises UnknownCollection, WrongOrigin for a collection with a source table, and RowsRefused for a
    principal that may not see every row: it could replace hidden rows."""

    def __init__(
        self, parts: Parts, collections: Collections, generations: Generations, rights: Rights, metrics: Metrics
    ) -> None:
        self._parts = parts
        self._collections = collections
        self._generations = generations
        self._rights = rights
        self._metrics = metrics
        self._turns: defaultdict[str, Turn] = defaultdict(Turn)
        self._looked: dict[str, float] = {}

    def put(
        self,
        name: str,
        documents: Sequence[NewDocument],
        *,
        principal: Principal,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Put:
        """Write documents with the model of the active generation, as `Documents.put`. `counted` is called first, with
        the number of tokens of each text; its errors pass through."""
        spec = self._checked(name, principal)
        maker = self._generations.maker(spec)
        if counted is not None:
            counted(maker.embedder.count_tokens([each.text for each in documents]))
        put = Documents(maker.spec, self._parts.store, maker.embedder, self._turns[name]).put(documents)
        if maker.number is None and documents:
            self._generations.record(maker)
        self._collections.changed(name)
        self._metrics.documents.labels(name, "upserted").inc(put.upserted)
        self._metrics.documents.labels(name, "unchanged").inc(put.unchanged)
        self._metrics.embedded_texts.inc(put.embedded_texts)
        now = time.monotonic()
        if put.upserted and now - self._looked.get(name, -_OPTIMISE_EVERY) >= _OPTIMISE_EVERY:
            self._looked[name] = now
            try:
                self._parts.store.optimise(name)
            except DatabaseError as error:
                _log.warning("%s: the documents are stored, but the search index was not built: %s", name, error)
        return put

    def delete(self, name: str, ids: Sequence[str], *, principal: Principal) -> int:
        """Delete documents; return how many existed. Needs no model."""
        spec = self._checked(name, principal)
        deleted = delete(spec, self._parts.store, ids, self._turns[name])
        self._collections.changed(name)
        self._metrics.documents.labels(name, "deleted").inc(deleted)
        return deleted

    def _checked(self, name: str, principal: Principal) -> CollectionSpec:
        spec = self._collections.spec(name)
        if not spec.written_by_clients:
            raise from_table(spec)
        self._rights.check_every_row(principal, name)
        return spec
