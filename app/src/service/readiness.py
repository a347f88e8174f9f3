"""Short trials of the parts: for readiness (does it work now?) and for doctor (what exactly does not?). Leaves nothing
behind. Knows the parts, no HTTP and no terminal.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from app.src.access.authentication import Authentication
from app.src.observe.doctor import Check, Fault, examine
from app.src.observe.gpu import gpu_is_missing as gpu_is_missing
from app.src.observe.gpu import gpu_message, gpu_missing
from app.src.observe.metrics import Metrics
from app.src.service.embedder import EngineEmbedder
from app.src.service.grants import needed, own_places
from app.src.service.wiring import Parts
from app.src.settings import CollectionSettings, HanaSettings, Settings
from connector.errors import (
    DatabaseError,
    LoginRefused,
    LogMissing,
    PermissionRefused,
    StatementFailed,
    UnknownCollection,
    UnknownTable,
)
from connector.model import CollectionSpec

if TYPE_CHECKING:
    from app.src.core.device import Precision, Setting
    from app.src.core.engine import EmbeddingEngine

_NO_COLLECTION = "no collection"
"""Asking for it shows that the store answers, at the cost of one look-up; a blank is in no real name."""
_NO_EPOCH = -1
_ENGINE, _STORE, _GPU = "engine", "store", "gpu"
_STALLED = "the engine has been computing one batch for {:.0f} s and nothing comes of it: see nvidia-smi and dmesg"
_CLOCKS_MAY_DIFFER = 5.0
"""Seconds. Leases and watermarks live by the database's clock, people and logs by this machine's."""
PROBE_SECONDS = 3.0
"""For the engine to answer a probe; a longer wait is for others' batches, which is no fault as long as they end."""
STALLED_SECONDS = 30.0
"""A batch in hand so long makes the service unready; ..."""
STUCK_SECONDS = 300.0
"""... so long, nobody expects it to end."""
MOST_FAILURES = 3
"""In a row, of our own probe or of the thread that computes: then it does not get better by itself; of the probe only
after SICK_SECONDS."""
SICK_SECONDS = 60.0
_MUST_CHANGE, _LOCKED = 414, 416
_SOME = 5
"""So many places where a user has more rights than needed are named."""


@dataclass(slots=True)
class Readiness:
    """`unavailable`: why, for people, when a check is False. A GPU that is asked for and not there is named among the
    checks, and why it is not in `note`; it is no reason to send requests elsewhere, for the CPU computes the same."""

    checks: dict[str, bool] = field(default_factory=dict)
    unavailable: str | None = None
    note: str | None = None

    def unanswered(self, seconds: float) -> Readiness:
        """As far as it is known now; what has not answered counts as unusable."""
        checks = dict(self.checks)
        late = next((name for name in (_ENGINE, _STORE) if name not in checks), None)
        if late is None:
            return self
        why = f"the {late} has not answered within {seconds:g} s"
        return Readiness(checks | {late: False}, self.unavailable or why, self.note)

    @property
    def ready(self) -> bool:
        return all(good for name, good in self.checks.items() if name != _GPU)


class Probes:
    """`doctor.Patient` over the parts, and readiness."""

    def __init__(self, parts: Parts, access: Authentication | None = None, metrics: Metrics | None = None) -> None:
        self._parts = parts
        self._access = access or Authentication(parts.settings.access)
        self._metrics = metrics or Metrics()
        self._refused: dict[tuple[object, ...], Fault] = {}
        self._failures, self._failing_since = 0, 0.0
        """Of readiness' probe of the engine, in a row."""

    @property
    def settings(self) -> Settings:
        return self._parts.settings

    @property
    def expected_errors(self) -> tuple[type[Exception], ...]:
        return self._parts.expected_errors

    def check(self, readiness: Readiness | None = None) -> Readiness:
        """Check whether the engine answers a probe, the store is usable and the access keys are readable. `readiness`
        is filled check by check, so that a caller need not wait for a store that hangs."""
        readiness = readiness or Readiness()
        for name, probe in ((_ENGINE, self._engine_ready), (_STORE, self._store_answers)):
            try:
                probe()
                readiness.checks[name] = True
            except Exception as error:
                self._metrics.count_error(error)
                readiness.checks[name] = False
                readiness.unavailable = str(error) if isinstance(error, self.expected_errors) else type(error).__name__
        if self.settings.embedding.expect_gpu:
            missing = gpu_missing(self.settings.embedding, self._parts.engine_if_loaded)
            readiness.checks[_GPU] = missing is None
            readiness.note = None if missing is None else gpu_message(missing)
        if self._access.configured:
            fault = self._access.check()
            readiness.checks["access"] = fault is None
            readiness.unavailable = readiness.unavailable or fault
        self._metrics.tell_ready(readiness.checks)
        return readiness

    def _engine_ready(self) -> None:
        try:
            self._engine_answers_soon()
        except Exception:
            self._failing_since = self._failing_since if self._failures else time.monotonic()
            self._failures += 1
            raise
        self._failures = 0

    def _engine_answers_soon(self) -> None:
        from app.src.core.backends import EngineError
        from app.src.core.queue import EngineOverloaded

        embedder = self._parts.embedder
        try:
            future = embedder.engine.submit(["probe"])
        except EngineOverloaded:
            return  # as in `_engine_answers`
        try:
            vectors = future.result(PROBE_SECONDS)
        except TimeoutError:
            future.cancel()
            stalled = embedder.engine.stalled()
            if stalled > STALLED_SECONDS:
                raise EngineError(_STALLED.format(stalled)) from None
            return
        if not np.isfinite(vectors).all():
            raise RuntimeError("the engine returned numbers that are not finite")

    def doctor(self) -> list[Check]:
        """Run every check of `owl-sap doctor`."""
        return examine(self)

    def beyond_help(self) -> str | None:
        """Why only a new process helps the engine; None: it computes, or may yet. Asks nothing and takes no time."""
        embedder = self._parts.embedder_if_loaded
        if embedder is None:
            return None
        if embedder.engine.stalled() > STUCK_SECONDS:
            return _STALLED.format(embedder.engine.stalled())
        if embedder.engine.deaths >= MOST_FAILURES:
            return f"the engine's thread ended {embedder.engine.deaths} times in a row"
        if self._failures >= MOST_FAILURES and time.monotonic() - self._failing_since >= SICK_SECONDS:
            return f"the engine failed its self-test {self._failures} times in a row"
        return None

    def _engine_answers(self, embedder: EngineEmbedder | None = None) -> None:
        from app.src.core.queue import EngineOverloaded

        try:
            vectors = (embedder or self._parts.embedder).engine.embed(["probe"])
        except EngineOverloaded:
            return  # it has too much to do, so it is alive; another probe in its queue would prove nothing more
        if not np.isfinite(vectors).all():
            raise RuntimeError("the engine returned numbers that are not finite")

    def _store_answers(self) -> None:
        self._parts.check_schema()
        self._parts.store.status(_NO_COLLECTION)

    # ------------------------------------------------------------------------------------------------------- doctor's

    def probe_model(self) -> str:
        """The configured model, and those that collections have of their own."""
        told = self._model_answers(lambda: self._parts.embedder)
        own: dict[str, str] = {}
        for each in self.settings.collections:
            if each.model is not None and each.model != self.settings.embedding.model:
                own.setdefault(each.model, each.name)
        others = {name: self._model_answers(partial(self._parts.embedder_for, name)) for name in own.values()}
        return "; ".join([told, *(f"collection {name}: {answer}" for name, answer in others.items())])

    def _model_answers(self, load: Callable[[], EngineEmbedder]) -> str:
        start = time.perf_counter()
        embedder = load()
        self._engine_answers(embedder)
        seconds = time.perf_counter() - start
        engine = embedder.engine
        return (
            f"{engine.model}: {engine.dimension} dimensions on {engine.profile.name}; "
            f"ready in {seconds:.1f} s; precision {engine.precision}: {engine.precision_reason}; "
            f"path {engine.path}: {engine.path_reason}"
        )

    def probe_gpu_use(self) -> str:
        """Does the model compute on the GPU that is asked for?"""
        engine = self._parts.engine
        missing = gpu_missing(self.settings.embedding, engine)
        if missing is not None:
            raise Fault(f"a GPU is required, but {engine.model} runs on the CPU: {missing}", missing.fix)
        return f"{engine.model} computes on {engine.profile.name}"

    def probe_choices(self) -> str:
        """What is chosen on this device; what cannot be had here is in GET /v1/info only."""
        had = [each for each in choices(self._parts.engine) if each.value is not None]
        return "; ".join(f"{each.name} {_shown(each.value)}: {each.reason}" for each in had)

    def probe_login(self, hana: HanaSettings) -> str:
        """Once: HANA locks users. The same user at the same place is not tried again for the store."""
        from connector.hana.connection import HanaFeatures

        who = (hana.host, hana.port, hana.user, hana.userkey)
        if who in self._refused:
            raise self._refused[who]
        pool = self._parts.pool(self._section(hana))
        try:
            with pool.session():  # without the retries of `read`
                pass
        except LoginRefused as error:
            self._refused[who] = Fault(str(error), self._login_fix(hana, error.code))
            raise self._refused[who] from None
        except DatabaseError as error:
            raise Fault(str(error), "see the message and the lines above") from None
        features = HanaFeatures.probe(pool)
        return f"logged in; HANA {features.cloud_version or features.version or 'of unknown version'}"

    def probe_rights(self, hana: HanaSettings) -> str:
        """More than is needed is no fault, but said: who breaks in here has all of it."""
        from connector.hana.privileges import effective, excess

        system = self._section(hana)
        try:
            holder = effective(self._parts.pool(system))
        except (PermissionRefused, UnknownTable, StatementFailed) as error:
            return f"cannot read this user's rights: {error}"
        wanted = needed(self.settings, system)
        beyond = excess(holder, wanted, own_places(self.settings, system))
        if not beyond:
            return f"{_named(holder.user)} has the required rights and no others"
        more = f" and {len(beyond) - _SOME} more" if len(beyond) > _SOME else ""
        return (
            f"MORE THAN NEEDED: {'; '.join(beyond[:_SOME])}{more}; use a technical user with only the rights that "
            "`owl-sap grants` prints"
        )

    def probe_clock(self, hana: HanaSettings) -> str:
        from connector.hana.connection import utc_now

        pool = self._parts.pool(self._section(hana))
        asked = datetime.now(UTC)
        told = utc_now(pool)
        answered = datetime.now(UTC)
        ahead = (told - asked - (answered - asked) / 2).total_seconds()
        if abs(ahead) - (answered - asked).total_seconds() / 2 > _CLOCKS_MAY_DIFFER:
            raise Fault(
                f"HANA's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
                "synchronise both with NTP (here: timedatectl set-ntp true); lag and logged times are wrong until then",
            )
        return f"HANA's clock and this machine's differ by {abs(ahead):.1f} s"

    def _section(self, hana: HanaSettings) -> str:
        return "store.hana" if hana is self.settings.store.hana else "hana"

    def _login_fix(self, hana: HanaSettings, code: int) -> str:
        section = self._section(hana)
        prefix = "HANA_STORE" if section == "store.hana" else "HANA"
        user = _named(hana.user)
        if code == _LOCKED:
            return f"an administrator runs: ALTER USER {user} RESET CONNECT ATTEMPTS; correct the password first"
        if code == _MUST_CHANGE:
            return (
                f"log in as {user} with SAP's tools (hdbsql, HANA cockpit) and choose a new password, then set "
                f"{prefix}_PASSWORD; for a technical user: ALTER USER {user} DISABLE PASSWORD LIFETIME"
            )
        if hana.userkey:
            return f"hdbuserstore SET {hana.userkey} HOST:PORT USER PASSWORD with the right password"
        return (
            f"correct {prefix}_USER or {prefix}_PASSWORD ([{section}] user, password) before the next attempt: "
            "it was tried once; more wrong attempts lock the user"
        )

    def probe_vector_types(self) -> str:
        from connector.hana.connection import HanaFeatures

        features = HanaFeatures.probe(self._parts.store_pool)
        if not features.real_vector:
            raise Fault(
                "this HANA has no REAL_VECTOR type (HANA Cloud has it from 2024.2 on, HANA 2.0 has none)",
                'use [store] kind = "local", or [store.hana] for a HANA Cloud that keeps the vectors',
            )
        return (
            f"REAL_VECTOR, {'HALF_VECTOR' if features.half_vector else 'no HALF_VECTOR (from 2025.15 on; not needed)'}"
        )

    def probe_table(self, collection: CollectionSettings) -> str:
        """What a sync does first: names, types and key against the catalogue; then the right to read these columns."""
        from connector.document.document import Renderer
        from connector.hana.change_log import log_of
        from connector.sync.feeds.choose import check

        spec, source = collection.spec(), self._parts.source
        try:
            table = source.describe(spec.source)
            check(spec, table)
            query = Renderer(spec, table, self._parts.embedder_for(collection.name)).query
            if spec.changes.method == "log":
                source.capture.check_log(query, log_of(spec))
            rows = source.count(query)
            next(iter(source.pages(query, 1)), None)
        except PermissionRefused as error:
            raise Fault(str(error), self._grant(spec)) from None
        except LogMissing as error:
            raise Fault(str(error), f"owl-sap changes install {spec.name} --apply") from None
        except UnknownTable as error:
            # HANA's catalogue hides what a user may not see.
            raise Fault(
                str(error),
                f"correct [[collections]] {spec.name} source; or, if it is right: {self._grant(spec)}",
            ) from None
        return f"{spec.source}: {rows} rows readable"

    def _grant(self, spec: CollectionSpec) -> str:
        from connector.hana.privileges import reading

        return "; ".join(each.grant(_named(self.settings.hana.user)) for each in reading(spec))

    def probe_store(self) -> str:
        if self._parts.store_in_hana:
            return self._probe_store_in_hana(self.settings.store_schema or "")
        self._store_answers()
        # Opens a transaction that may write, and finds nothing to do in it.
        with suppress(UnknownCollection), self._parts.store.lease(_NO_COLLECTION, "doctor", 0):
            pass
        return f"the {self.settings.store.kind} store can be written"

    def probe_access(self) -> str:
        """Keys and the issuer's keys, as `serve` would have them."""
        authentication = Authentication(self.settings.access)
        authentication.open()
        fault = authentication.check(everything=True)
        if fault is not None:
            raise Fault(fault, "correct [access]; docs/access.md says how, and what is in force meanwhile")
        return authentication.described()

    def _probe_store_in_hana(self, schema: str) -> str:
        from connector.hana.privileges import creating, writing

        user = _named(self.settings.store_hana.user)
        create = creating(schema).grant(user)
        try:
            self._store_answers()
            searched = self._make_a_table(schema)
        except UnknownTable as error:
            # HANA hides a schema from users without a right in it.
            raise Fault(
                str(error),
                f'CREATE SCHEMA "{schema}" OWNED BY {user}; if it exists: {create}; or correct [store] schema',
            ) from None
        except PermissionRefused as error:
            raise Fault(str(error), create) from None
        try:
            self._write_to_state(schema)
        except PermissionRefused as error:
            raise Fault(str(error), writing(schema).grant(user)) from None
        return f'tables can be made and written in schema "{schema}"; {searched}'

    def _make_a_table(self, schema: str) -> str:
        """A vector table of a name that no collection has, dropped at once. Says whether it took an HNSW index."""
        from connector.stores.hana.tables import VectorSql

        pool = self._parts.store_pool
        table = VectorSql(schema, f"OWL__DOCTOR_{secrets.token_hex(6).upper()}")
        pool.execute(table.create(3), doing=f'making a table in schema "{schema}"')
        try:
            pool.execute(table.create_hnsw(), doing="making an HNSW index")
            return "HNSW indexes too"
        except DatabaseError as error:
            return f"no HNSW index (code {error.code}): searches stay exact"
        finally:
            pool.execute(table.drop(), doing="dropping doctor's own table")

    def _write_to_state(self, schema: str) -> None:
        """Changes no row."""
        from connector.stores.hana.tables import StateSql

        renew = StateSql(schema).renew_lease()
        with suppress(UnknownTable):  # nothing was ever synced
            self._parts.store_pool.execute(renew, (1, _NO_COLLECTION, _NO_EPOCH), doing="writing to the state table")


def choices(engine: EmbeddingEngine) -> list[Setting]:
    """What a loaded engine has chosen on its device, and why; a value of None: it cannot be had here."""
    from app.src.core.device import Setting, settings_of

    precision = cast("Precision", engine.precision)
    path = Setting("path", engine.path, engine.path_reason)
    if engine.path == "hashing":  # it computes no products, so nothing is chosen for them
        return [Setting("precision", precision, engine.precision_reason), path]
    return [path, *settings_of(engine.profile, chosen=(precision, engine.precision_reason))]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(user: str | None) -> str:
    from connector.hana.privileges import named

    return named(user) if user else "<USER>"
