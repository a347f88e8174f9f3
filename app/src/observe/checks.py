"""Checks of the running system: readiness runs a few; `doctor` runs all in order, each failure with its fix. Prints no
secret. Add a check in `Checks._steps`."""

from __future__ import annotations

import secrets
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography import x509

from app.src.access.authentication import Authentication
from app.src.observe import Fault, gpu
from app.src.observe.grants import own_places, wanted
from app.src.observe.metrics import Metrics
from app.src.observe.network import EXPIRES_SOON, Network, names_of
from app.src.settings import ApiSettings, CollectionSettings, HanaSettings, Settings
from connector.errors import (
    ConnectorError,
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
    from app.src.core.device import Setting
    from app.src.core.engine import Engine
    from app.src.service.wiring import EngineEmbedder, Parts

PROBE_SECONDS = 3.0  # for the engine to answer; after that, the check fails only if a batch has stalled
STALLED_SECONDS = 30.0  # a batch in progress for this long makes the service unready
STUCK_SECONDS = 300.0  # after this time the batch is not expected to end
# Consecutive failures of the probe or of the computing thread after which the engine cannot recover; for the probe only
# after SICK_SECONDS.
MOST_FAILURES = 3
SICK_SECONDS = 60.0
MINIMUM_FREE = 1 << 30  # bytes of disk
_NO_COLLECTION, _NO_EPOCH = "no collection", -1  # a look-up that finds nothing: no real name contains a blank
_STALLED = "the engine has been computing one batch for {:.0f} s and nothing comes of it: see nvidia-smi and dmesg"
NOT_CHECKED = "not checked"
_MUST_CHANGE, _LOCKED = 414, 416  # HANA's codes
_SOME = 5  # excess rights named in a message
_HANA_MODEL_FIX = (
    "check [embedding] model (also of [[collections]]), remote_source for a model of SAP AI Core, and that Natural "
    "Language Processing (NLP) of the instance is switched on in SAP HANA Cloud Central"
)
_RERANKER_FIX = {
    "hana": "switch on Natural Language Processing (NLP) of the instance in SAP HANA Cloud Central (users report that "
    "the free tier lacks it), correct the model's name, or set [search] rerank to another reranker or off",
    "http": 'correct [search] rerank, rerank_key or rerank_model, allow the connection, or set rerank = "off"',
    "cross-encoder": 'correct [search] rerank, or set rerank = "off"',
    "function": 'correct the function that [search] rerank names, or set rerank = "off"',
}


# A check of doctor: its name; a function that returns the detail or raises an error; the checks that must pass first;
# a fix for errors other than Fault, which has its own.
Step = tuple[str, Callable[[], str], tuple[str, ...], str]


@dataclass(slots=True)
class Readiness:
    """`unavailable`: why a check is False, for users. `note`: why a required GPU is missing, or which of several
    devices have failed; the service stays ready, because the CPU or the other devices compute the same."""

    checks: dict[str, bool] = field(default_factory=dict)
    unavailable: str | None = None
    note: str | None = None

    def unanswered(self, seconds: float) -> Readiness:
        """Return the results so far; the unanswered check counts as failed."""
        late = next((name for name in ("engine", "store") if name not in self.checks), None)
        if late is None:
            return self
        why = f"the {late} has not answered within {seconds:g} s"
        return Readiness(self.checks | {late: False}, self.unavailable or why, self.note)

    @property
    def ready(self) -> bool:
        return all(good for name, good in self.checks.items() if name != "gpu")


class Checks:
    """The checks of a service's parts."""

    def __init__(
        self,
        parts: Parts,
        access: Authentication | None = None,
        metrics: Metrics | None = None,
        rerank: Callable[[], float] | None = None,
    ) -> None:
        """`rerank`: use the configured reranker once and return how many seconds it took."""
        self._parts, self._rerank = parts, rerank
        self._access = access or Authentication(parts.settings.access)
        self._metrics = metrics or Metrics()
        self._refused: dict[tuple[object, ...], Fault] = {}
        self._failures, self._failing_since = 0, 0.0  # consecutive failures of readiness' probe of the engine

    @property
    def settings(self) -> Settings:
        return self._parts.settings

    def check(self, readiness: Readiness | None = None) -> Readiness:
        """Check that the engine answers a probe, the store is usable and the access keys are readable. `readiness` is
        filled check by check, so that a caller need not wait for a store that hangs."""
        readiness = readiness or Readiness()
        for name, probe in (("engine", self.probe_engine), ("store", self._store_answers)):
            good = True
            try:
                probe()
            except Exception as error:
                good = False
                self._metrics.count_error(error)
                expected = isinstance(error, self._parts.expected_errors)
                readiness.unavailable = str(error) if expected else type(error).__name__
            readiness.checks[name] = good
        if self.settings.embedding.expect_gpu:
            missing = gpu.gpu_missing(self.settings.embedding, self._parts.engine_if_loaded())
            readiness.checks["gpu"] = missing is None
            readiness.note = None if missing is None else gpu.gpu_message(missing)
        readiness.note = readiness.note or self._parts.half_failed or None
        if self._access.configured:
            fault = self._access.check()
            readiness.checks["access"] = fault is None
            readiness.unavailable = readiness.unavailable or fault
        self._metrics.tell_ready(readiness.checks)
        return readiness

    def beyond_help(self) -> str | None:
        """Return why an engine needs a new process, or None. Returns at once."""
        if failed := self._parts.failed:
            return failed
        for engine in self._parts.engines_loaded:
            if engine.path != "hana" and engine.stalled() > STUCK_SECONDS:  # a new process would meet the same HANA
                return _STALLED.format(engine.stalled())
            if engine.deaths >= MOST_FAILURES:
                return f"the engine's thread ended {engine.deaths} times in a row"
        sick = self._failures >= MOST_FAILURES and time.monotonic() - self._failing_since >= SICK_SECONDS
        if sick and not self.settings.embedding.in_hana:
            return f"the engine failed its self-test {self._failures} times in a row"
        return None

    def probe_engine(self) -> None:
        """Check that the engine answers, and count failures in a row for `beyond_help`. Takes at most PROBE_SECONDS.
        Raises the engine's errors."""
        self._failing_since = self._failing_since if self._failures else time.monotonic()
        self._failures += 1
        self._engine_answers(PROBE_SECONDS)
        self._failures = 0

    def _engine_answers(self, patience: float | None = None, embedder: EngineEmbedder | None = None) -> None:
        from app.src.core.backends import DeviceFailed, EngineError
        from app.src.core.queue import EngineOverloaded

        if failed := self._parts.failed:  # of any model
            raise DeviceFailed(failed)

        engine = (embedder or self._parts.embedder).engine
        if engine.path == "hana" and patience is not None:
            return  # each probe would be a call of HANA's model; the check of the store shows whether HANA answers
        if engine.stalled() > STALLED_SECONDS:  # of several devices, another one might answer
            raise EngineError(_STALLED.format(engine.stalled()))
        try:
            future = engine.submit(["probe"])
        except EngineOverloaded:
            return  # busy, so alive
        try:
            vectors = future.result(patience)
        except TimeoutError:
            future.cancel()
            return  # busy, or about to count as stalled
        if not np.isfinite(vectors).all():
            raise RuntimeError("the engine returned numbers that are not finite")

    def _store_answers(self) -> None:
        self._parts.check_schema()
        self._parts.store.status(_NO_COLLECTION)

    def doctor(self) -> list[dict[str, Any]]:
        """Run every check of `owl-sap doctor` that these settings need, in a fixed order; return records of "check",
        "ok", "detail" and "fix". A failed check skips those that need it, so that a wrong password is tried once."""
        done: dict[str, dict[str, Any]] = {}
        for name, probe, needs, fix in self._steps():
            failed = next((need for need in needs if need in done and not done[need]["ok"]), None)
            ok = False
            try:
                if failed is not None:
                    raise Fault(f'{NOT_CHECKED}: "{failed}" failed', f'Fix "{failed}" first.')
                ok, detail, fix = True, probe(), ""
            except Fault as fault:
                detail, fix = str(fault), fault.fix
            except self._parts.expected_errors as error:
                detail, fix = str(error), fix or "see the message"
            except Exception as error:
                detail, fix = f"unexpected error: {type(error).__name__}", fix or "please report it"
            done[name] = {"check": name, "ok": ok, "detail": detail, "fix": fix}
        return list(done.values())

    def _steps(self) -> Iterator[Step]:
        settings = self.settings
        embedding, store = settings.embedding, settings.store
        # A Python older than 3.11 cannot get this far.
        yield "python", lambda: f"Python {'.'.join(str(part) for part in sys.version_info[:3])}", (), ""
        for name, probe in (("torch", gpu.torch), ("gpu", gpu.gpu), ("kernels", gpu.kernels)):
            yield name, partial(probe, embedding), (), ""
        in_hana = any(settings.embedding_of(each.name).in_hana for each in settings.collections) or embedding.in_hana
        store_login = "store hana login" if store.hana is not None else "hana login"
        needs = ("torch", store_login) if in_hana else ("torch",)
        model: list[Step] = [
            ("model", self.probe_model, needs, _HANA_MODEL_FIX if in_hana else "check [embedding] model"),
            ("settings", self.probe_choices, ("model",), ""),
        ]
        if not in_hana:
            yield from model
        if settings.hana.configured or settings.synced or store.kind == "hana":
            yield from self._hana_steps("hana", settings.hana, "HANA")
        if store.kind == "hana" and store.hana is not None:
            yield from self._hana_steps("store hana", store.hana, "HANA_STORE")
        if in_hana:
            yield from model
        for each in settings.synced:
            probe = partial(self.probe_table, each)
            yield f"table of {each.name}", probe, ("hana login", "model"), f"correct [[collections]] {each.name}"
        if store.kind == "hana":
            yield "vector types", self.probe_vector_types, (store_login,), 'use [store] kind = "local" on this HANA'
            yield "store writable", self.probe_store, ("vector types",), ""
        else:
            yield "store writable", self.probe_store, (), "check [store] path and its rights"
        if self._rerank is not None and settings.search.kind != "off":
            login = (store_login,) if settings.search.kind == "hana" else ()
            yield "reranker", partial(self.probe_reranker, self._rerank), login, _RERANKER_FIX[settings.search.kind]
        yield "disk", partial(disk, store.path or Path()), (), ""
        if settings.api.tls_certificate is not None:
            yield "certificate", partial(certificate, settings.api), (), ""
        if settings.access.configured:
            yield "access", self.probe_access, (), "see the message; docs/access.md"

    def _hana_steps(self, label: str, hana: HanaSettings, prefix: str) -> Iterator[Step]:
        network, before = Network(hana, prefix), ""
        for name, probe in (("dns", network.dns), ("tcp", network.tcp), ("tls", network.tls)):
            if not hana.userkey or hana.host:
                yield f"{label} {name}", probe, (before,), ""
                before = f"{label} {name}"
        yield f"{label} login", partial(self.probe_login, hana), (before,), ""
        yield f"{label} rights", partial(self.probe_rights, hana), (f"{label} login",), ""

    def probe_model(self) -> str:
        """Load the configured model and those of single collections."""
        users = {self._parts.configured(each.name): each.name for each in self.settings.collections}
        users.pop(self._parts.configured(), None)
        lines = []
        for name in ("", *users.values()):
            start = time.perf_counter()
            label = f"collection {name}: " if name else ""
            embedder = self._parts.embedder_for(name) if name else self._parts.embedder
            self._engine_answers(None, embedder)
            engine = embedder.engine
            devices = " and ".join(each.profile.name for each in engine.members)
            lines.append(
                f"{label}{engine.model}: {engine.dimension} dimensions on {devices}; "
                f"ready in {time.perf_counter() - start:.1f} s; precision {engine.precision}: "
                f"{engine.precision_reason}; path {engine.path}: {engine.path_reason}; "
                f"languages {' '.join(engine.languages) or 'unknown'}; licence {engine.licence or 'unknown'}"
            )
            remote = embedder.source.remote_source
            if remote is not None:
                lines[-1] += f"; SENDS TEXTS AWAY: texts of rows and searches go to HANA's remote source {remote}"
        return "; ".join(lines)

    def probe_choices(self) -> str:
        """Return the engine's choices on this device. Raises Fault where a GPU is required and the CPU computes."""
        engine = self._parts.engine
        missing = gpu.gpu_missing(self.settings.embedding, engine)
        if missing is not None:
            raise Fault(f"a GPU is required, but {engine.model} runs on the CPU: {missing}", missing.fix)
        chosen = [each for each in choices(engine) if each.value is not None]
        return "; ".join(f"{each.name} {str(each.value).lower()}: {each.reason}" for each in chosen)

    def probe_login(self, hana: HanaSettings) -> str:
        """Log in once. A refused login is not repeated for the store, because HANA locks users after failures."""
        from connector.hana.connection import HanaFeatures

        who = (hana.host, hana.port, hana.user, hana.userkey)
        if who in self._refused:
            raise self._refused[who]
        pool = self._parts.pool(self._section(hana))
        try:
            with pool.session():  # without the retries of `read`
                pass
        except LoginRefused as error:
            section, user = self._section(hana), _named(hana.user)
            prefix = "HANA_STORE" if section == "store.hana" else "HANA"
            if error.code == _LOCKED:
                fix = f"an administrator runs: ALTER USER {user} RESET CONNECT ATTEMPTS; correct the password first"
            elif error.code == _MUST_CHANGE:
                fix = (
                    f"log in as {user} with SAP's tools (hdbsql, HANA cockpit) and choose a new password, then set "
                    f"{prefix}_PASSWORD; for a technical user: ALTER USER {user} DISABLE PASSWORD LIFETIME"
                )
            elif hana.userkey:
                fix = f"hdbuserstore SET {hana.userkey} HOST:PORT USER PASSWORD with the right password"
            else:
                fix = (
                    f"correct {prefix}_USER or {prefix}_PASSWORD ([{section}] user, password) before the next attempt: "
                    "it was tried once; more wrong attempts lock the user"
                )
            self._refused[who] = Fault(str(error), fix)
            raise self._refused[who] from None
        except DatabaseError as error:
            lookup = f"check the key {hana.userkey}: hdbuserstore LIST" if hana.userkey else "see the lines above"
            raise Fault(str(error), lookup) from None
        features = HanaFeatures.probe(pool)
        return f"logged in; HANA {features.version or 'of unknown version'}"

    def probe_rights(self, hana: HanaSettings) -> str:
        """Compare the user's rights with the required ones. Excess rights are reported, but do not fail."""
        from connector.hana.privileges import Privilege, effective, excess

        system = self._section(hana)
        needed = [each for each in wanted(self.settings, system) if isinstance(each, Privilege)]
        try:
            user, held = effective(self._parts.pool(system))
        except (PermissionRefused, UnknownTable, StatementFailed) as error:
            return f"cannot read this user's rights: {error}"
        beyond = excess(user, held, needed, own_places(self.settings, system))
        if not beyond:
            return f"{_named(user)} has no rights beyond those needed"
        named = "; ".join(beyond[:_SOME]) + (f" and {len(beyond) - _SOME} more" if len(beyond) > _SOME else "")
        return f"MORE THAN NEEDED: {named}; use a technical user with only the rights that `owl-sap grants` prints"

    def probe_vector_types(self) -> str:
        from connector.hana.connection import HanaFeatures

        features = HanaFeatures.probe(self._parts.store_pool)
        if not features.real_vector:
            raise Fault(
                "this HANA has no REAL_VECTOR type (HANA Cloud has it from 2024.2 on, HANA 2.0 has none)",
                'use [store] kind = "local", or [store.hana] for a HANA Cloud that keeps the vectors',
            )
        if features.half_vector:
            return "REAL_VECTOR, HALF_VECTOR"
        if self.settings.store.vector_type == "half":
            raise Fault(
                "this HANA has no HALF_VECTOR type (HANA Cloud has it from 2025.15 on)",
                'use [store] vector_type = "real"',
            )
        return "REAL_VECTOR, no HALF_VECTOR (from 2025.15 on; not needed)"

    def probe_table(self, collection: CollectionSettings) -> str:
        """Check names, types and key against the catalogue as a sync does, then read these columns."""
        from connector.document.document import Renderer
        from connector.hana.privileges import reading
        from connector.model import log_of
        from connector.sync.feeds.choose import check

        spec: CollectionSpec = collection.spec()
        source = self._parts.source
        grants = [each.grant(_named(self.settings.hana.user)) for each in reading(spec)]
        fix = f"correct [[collections]] {spec.name}"
        try:
            table = source.describe(spec.source)
            try:
                check(spec, table, source)
            except UnknownTable as error:  # the table of the change method, whose right is the last
                raise Fault(str(error), f"{fix} changes.table; or, if it is right: {grants[-1]}") from None
            query = Renderer(spec, table, self._parts.embedder_for(collection.name)).query
            if spec.changes.method == "log":
                source.capture.check_log(query, log_of(spec))
            rows = source.count(query)
            next(iter(source.pages(query, 1)), None)
        except PermissionRefused as error:
            raise Fault(str(error), "; ".join(grants)) from None
        except LogMissing as error:
            raise Fault(str(error), f"owl-sap changes install {spec.name} --apply") from None
        except UnknownTable as error:  # HANA's catalogue hides objects without rights
            raise Fault(str(error), f"{fix} source; or, if it is right: {'; '.join(grants)}") from None
        return f"{spec.source}: {rows} rows readable"

    def probe_store(self) -> str:
        if not self._parts.store_in_hana:
            self._store_answers()
            # Opens a writing transaction that changes nothing.
            with suppress(UnknownCollection), self._parts.store.lease(_NO_COLLECTION, "doctor", 0):
                pass
            return f"the {self.settings.store.kind} store can be written"
        from connector.hana.privileges import creating, writing
        from connector.stores.hana.tables import VectorTable, state_tables

        schema, user = self._parts.schema(), _named(self.settings.store_hana.user)
        create = creating(schema).grant(user)
        # A vector table with a name that no collection has, dropped at once.
        table = VectorTable(schema, f"OWL__DOCTOR_{secrets.token_hex(6).upper()}")
        try:
            try:
                self._store_answers()
            except PermissionRefused as error:  # another user created the tables of the state
                raise Fault(str(error), f"{create}; {writing(schema).grant(user)}") from None
            pool = self._parts.store_pool
            pool.execute(table.create(3), doing=f'making a table in schema "{schema}"')
            pool.execute(table.drop(), doing="dropping doctor's own table")
        except UnknownTable as error:  # HANA hides a schema from users without a right in it
            fix = f'CREATE SCHEMA "{schema}" OWNED BY {user}; if it exists: {create}; or correct [store] schema'
            raise Fault(str(error), fix) from None
        except PermissionRefused as error:
            raise Fault(str(error), create) from None
        try:
            with suppress(UnknownTable):  # nothing was ever synced; otherwise this changes no row
                pool.execute(
                    state_tables(schema).renewal, (1, _NO_COLLECTION, _NO_EPOCH), doing="writing to the state table"
                )
        except PermissionRefused as error:
            raise Fault(str(error), writing(schema).grant(user)) from None
        return f'tables can be made and written in schema "{schema}"'

    def probe_reranker(self, rerank: Callable[[], float]) -> str:
        """Rerank two texts of ours."""
        search = self.settings.search
        try:
            seconds = rerank()
        except ConnectorError as error:
            if getattr(error, "outcome", "") != "timeout":
                raise
            fix = 'raise [search] rerank_seconds, name a faster reranker, or set rerank = "off"'
            raise Fault(str(error), fix) from None
        detail = f"{search.kind} {search.name}: two texts in {seconds * 1000:.0f} ms"
        if search.kind == "http":
            detail += f"; SENDS TEXTS AWAY: search texts and the texts of the best hits go to {search.host}"
        return detail

    def probe_access(self) -> str:
        """Read the keys and the issuer's keys as `serve` would."""
        authentication = Authentication(self.settings.access)
        authentication.open()
        fault = authentication.check(everything=True)
        if fault is not None:
            raise Fault(fault, "correct [access]; docs/access.md says how, and what is in force meanwhile")
        return authentication.described()

    def _section(self, hana: HanaSettings) -> str:
        return "store.hana" if hana is self.settings.store.hana else "hana"


def choices(engine: Engine) -> list[Setting]:
    """Return the choices of a loaded engine on its device, with reasons; a value of None: not available here."""
    from app.src.core.device import Setting, settings_of

    path = Setting("path", engine.path, engine.path_reason)
    if engine.path in ("hashing", "hana"):  # both multiply no matrices, so nothing else is chosen
        return [Setting("precision", engine.precision, engine.precision_reason), path]
    return [path, *settings_of(engine.profile, chosen=(engine.precision, engine.precision_reason))]


def _named(user: str | None) -> str:
    from connector.hana.privileges import named

    return named(user) if user else "<USER>"


def disk(path: Path) -> str:
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < MINIMUM_FREE:
        raise Fault(f"{free >> 20} MiB free at {existing}", "free at least 1 GiB, or move to another disk")
    return f"{free >> 30} GiB free at {existing}"


def certificate(api: ApiSettings) -> str:
    """Check the certificate of the REST service, and that only its owner and group can read the key."""
    assert api.tls_certificate is not None
    assert api.tls_key is not None
    try:
        found = x509.load_pem_x509_certificate(api.tls_certificate.read_bytes())
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(api.tls_certificate, api.tls_key, password="")
        readable_by_all = api.tls_key.stat().st_mode & 0o007
    except (OSError, ValueError) as error:  # including ssl.SSLError
        raise Fault(
            f"the certificate cannot be used with its key ({getattr(error, 'strerror', None) or type(error).__name__})",
            f"correct [api] tls_certificate and tls_key ({api.tls_certificate.name} and {api.tls_key.name}): the chain "
            "and its key without a password, both PEM",
        ) from None
    now, begins, ends = datetime.now(UTC), found.not_valid_before_utc, found.not_valid_after_utc
    if now < begins:
        raise Fault(f"the certificate is valid from {begins:%Y-%m-%d} on", "check the clock")
    left = ends - now
    if left < EXPIRES_SOON:
        when = f"ends on {ends:%Y-%m-%d}, in {left.days} days" if left.days >= 0 else f"ended on {ends:%Y-%m-%d}"
        raise Fault(f"the certificate {when}", "renew it in its place: the service takes it up without a restart")
    if readable_by_all:
        raise Fault(f"{api.tls_key} can be read by everybody on this machine", f"chmod o= {api.tls_key}")
    return f"certificate for {', '.join(names_of(found)) or 'no name'} valid until {ends:%Y-%m-%d}"
