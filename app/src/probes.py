"""Short trials of the parts: for readiness (does it work now?) and for doctor (what exactly does not?). Leaves nothing
behind. Knows the parts, no HTTP and no terminal.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from app.src.doctor import Fault
from app.src.parts import Parts
from app.src.settings import CollectionSettings, HanaSettings, Settings
from connector.errors import UnknownCollection, UnknownTable

_NO_COLLECTION = "no collection"
"""Asking for it shows that the store answers, at the cost of one look-up; a blank is in no real name."""
_NO_EPOCH = -1


@dataclass(slots=True)
class Readiness:
    """`unavailable`: why, for people, when a check is False."""

    checks: dict[str, bool] = field(default_factory=dict)
    unavailable: str | None = None

    @property
    def ready(self) -> bool:
        return all(self.checks.values())


class Probes:
    """`doctor.Patient` over the parts, and readiness."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def settings(self) -> Settings:
        return self._parts.settings

    @property
    def expected_errors(self) -> tuple[type[Exception], ...]:
        return self._parts.expected_errors

    def ready(self, failed: Callable[[Exception], None]) -> Readiness:
        """Does the engine answer a probe, and is the store usable? `failed` is told every error."""
        readiness = Readiness()
        for name, probe in (("engine", self._engine_answers), ("store", self._store_answers)):
            try:
                probe()
                readiness.checks[name] = True
            except Exception as error:
                failed(error)
                readiness.checks[name] = False
                readiness.unavailable = str(error) if isinstance(error, self.expected_errors) else type(error).__name__
        return readiness

    def _engine_answers(self) -> None:
        vectors = self._parts.engine.embed(["probe"])
        if not np.isfinite(vectors).all():
            raise RuntimeError("the engine returned numbers that are not finite")

    def _store_answers(self) -> None:
        self._parts.check_schema()
        self._parts.store.status(_NO_COLLECTION)

    # ------------------------------------------------------------------------------------------------------- doctor's

    def probe_model(self) -> str:
        start = time.perf_counter()
        self._engine_answers()
        seconds = time.perf_counter() - start
        engine = self._parts.engine
        return f"{engine.model}: {engine.dimension} finite numbers per text, ready in {seconds:.1f} s"

    def probe_login(self, hana: HanaSettings) -> str:
        from connector.hana import HanaFeatures

        section = "store.hana" if hana is self.settings.store.hana else "hana"
        features = HanaFeatures.probe(self._parts.pool(section))
        return f"logged in; HANA {features.version}".rstrip()

    def probe_vector_types(self) -> str:
        from connector.hana import HanaFeatures

        features = HanaFeatures.probe(self._parts.store_pool)
        if not features.real_vector:
            raise Fault("this HANA has no REAL_VECTOR type", 'use [store] kind = "local"')
        return "REAL_VECTOR" + (" and HALF_VECTOR" if features.half_vector else "")

    def probe_table(self, collection: CollectionSettings) -> str:
        """What a sync does first: names, types and key against the catalogue; then the right to read these columns."""
        from connector.document import Renderer

        spec, source = collection.spec(), self._parts.source
        query = Renderer(spec, source.describe(spec.source), self._parts.embedder).query
        rows = source.count(query)
        next(iter(source.pages(query, 1)), None)
        return f"{spec.source}: {rows} rows readable"

    def probe_store(self) -> str:
        self._store_answers()
        if not self._parts.store_in_hana:
            # Opens a transaction that may write, and finds nothing to do in it.
            with suppress(UnknownCollection), self._parts.store.lease(_NO_COLLECTION, "doctor", 0):
                pass
            return f"the {self.settings.store.kind} store can be written"
        self._write_to_hana(self.settings.store_schema or "")
        return f'tables can be made and written in schema "{self.settings.store_schema}"'

    def _write_to_hana(self, schema: str) -> None:
        """Makes a vector table of a name that no collection has, drops it, and changes no row of the state table."""
        from connector.stores.hana_tables import StateSql, VectorSql

        pool = self._parts.store_pool
        table = VectorSql(schema, f"OWL__DOCTOR_{secrets.token_hex(6).upper()}")
        pool.execute(table.create(3), doing=f'making a table in schema "{schema}"')
        pool.execute(table.drop(), doing="dropping doctor's own table")
        with suppress(UnknownTable):  # nothing was ever synced
            pool.execute(
                StateSql(schema).renew_lease(), (1, _NO_COLLECTION, _NO_EPOCH), doing="writing to the state table"
            )
