"""The joint of the two halves: what every surface offers, done with the parts: embed, search, sync, plan, verify,
status, readiness, doctor. Knows no HTTP and no terminal, and not how parts are made.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.access.authentication import Authentication
from app.src.access.principal import OPERATOR, Principal
from app.src.access.rows import Nothing, Rights
from app.src.evaluation.run import Evaluator
from app.src.jobs import Job
from app.src.observe import doctor
from app.src.observe.metrics import Metrics
from app.src.service import status as statuses
from app.src.service.background import Background
from app.src.service.background import SyncRequest as SyncRequest
from app.src.service.browse import POINTS, Browsing, Fields, PointMap, ReadRow
from app.src.service.calibration import Calibration, CalibrationRequest
from app.src.service.catalog import Discovery
from app.src.service.change_log import Changes
from app.src.service.documents import ClientDocuments, Writing
from app.src.service.generations import QUERIES, BuildReport, Generations, Switched, Working, shown
from app.src.service.readiness import Probes, Readiness, told
from app.src.service.rerank import Reranker
from app.src.service.search import Asked, Found, Mode, Narrowed, Searching, SearchOptions
from app.src.service.watching import Watch, behind
from app.src.service.wiring import EngineEmbedder, Parts
from app.src.settings import CollectionSettings, Settings, no_collections
from connector.errors import DatabaseError, UnknownCollection
from connector.model import CollectionSpec, CollectionStatus, Filter, ModelSource, Vectors
from connector.protocols import Observer, Source
from connector.stores.store import VectorStore
from connector.sync.documents import nothing_to_sync, stored_ids

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine
    from app.src.training.run import Report as TrainingReport
    from app.src.training.run import Request as TrainingRequest
    from app.src.training.run import TrainingObserver
    from connector.sync.generations import Comparison
    from connector.sync.plan import Plan
    from connector.sync.quarantine import Entry, GivenKey, RetryReport
    from connector.sync.run import SyncOptions, SyncReport
    from connector.sync.verify import VerifyReport

_ACCOUNTED = ("upserted", "unchanged", "empty", "quarantined", "superseded", "deleted")
DISTRIBUTION = "owl-sap-connector"
_AS_USUAL = SearchOptions()
_NO_PLAN = "the store's plan is shown to the scope admin"
_log = logging.getLogger(__name__)
GPU_WITHIN = 2.0
"""Seconds that NVIDIA's driver has to tell of its cards: 50 ms each, but one whose card has died may never answer."""


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Service:
    """Thread-safe. Nothing is connected or loaded before it is needed; `close` ends what was opened."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        source: Source | None = None,
        store: VectorStore | None = None,
        file: Path | None = None,
    ) -> None:
        """`source` and `store` replace what the settings describe; the service closes the store all the same.
        `file`: where the settings were read, for messages."""
        self.settings = settings
        self.file = file
        self.metrics = metrics or Metrics()
        graphs = settings.tensorrt_cache(file)
        self.parts = Parts(
            settings, self.metrics, source=source, store=store, loaded=self._engine_loaded, graphs_folder=graphs
        )
        self.metrics.watch_gpus(self.gpu)
        self.metrics.gpu_missing.set_function(lambda: float(self.probes.gpu_is_missing(self.parts.engine_if_loaded)))
        self.access = Authentication(settings.access)
        self.background = Background(settings, file, self, self.parts.expected_errors)
        self.jobs = self.background.jobs
        synced = [collection.name for collection in settings.synced]
        self._watch = Watch(self.parts, self.background, self.names(), self.metrics, synced)
        self.metrics.build_info.labels(version(), settings.embedding.model).set(1)
        self.probes = Probes(self.parts)
        self._warned = False
        self.discovery = Discovery(self.parts)
        self.changes = Changes(self.parts)
        self._calibration = Calibration(self.parts)
        self.rights = Rights(settings, self._block)
        self._generations = Generations(self.parts, self._block)
        self.documents = ClientDocuments(
            Writing(self.parts, self.metrics, self._generations, self.rights), self.spec, self._written
        )
        self.evaluating = Evaluator(self._found, self.spec, lambda: self.parts.store)
        self._searching = Searching(
            self.parts, self.metrics, self._stored, self._generations.query_embedder, Reranker(settings, self.metrics)
        )
        self._browsing = Browsing(self.parts, self._searching)

    @property
    def expected_errors(self) -> tuple[type[Exception], ...]:
        """Errors whose message is meant for people."""
        return self.parts.expected_errors

    @property
    def engine(self) -> EmbeddingEngine:
        return self.parts.engine

    @property
    def embedder(self) -> EngineEmbedder:
        return self.parts.embedder

    @property
    def source(self) -> Source:
        return self.parts.source

    @property
    def store(self) -> VectorStore:
        return self.parts.store

    def close(self) -> None:
        """Stop jobs and end connections; the service can not be used afterwards."""
        self.background.close()
        self._watch.look.close()
        self.parts.close()

    def allow_login(self) -> None:
        """After a refused login: it may be tried again, once."""
        self.parts.allow_login()

    # ---------------------------------------------------------------------------------------------- collections

    def names(self) -> list[str]:
        return [collection.name for collection in self.settings.collections]

    def spec(self, name: str) -> CollectionSpec:
        return self._block(name).spec()

    def _of_table(self, name: str) -> CollectionSpec:
        """Raises WrongOrigin for a collection that clients write, beside what `spec` raises."""
        spec = self.spec(name)
        if spec.written_by_clients:
            raise nothing_to_sync(name)
        return spec

    def synced_names(self) -> list[str]:
        """Of the collections of tables."""
        return [collection.name for collection in self.settings.synced]

    def _block(self, name: str) -> CollectionSettings:
        for collection in self.settings.collections:
            if collection.name == name:
                return collection
        hint = _choices(name, self.names()) if self.settings.collections else f"; {no_collections(self.file)}"
        raise UnknownCollection(f'no collection is named "{name}"' + hint)

    def sync(
        self,
        name: str,
        request: SyncRequest | None = None,
        observer: Observer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> SyncReport:
        """Bring a collection up to date, and the generation that is built beside it when the settings name another
        model (`Generations.sync`). Raises the errors of the connector and of the engine."""
        return self._synced(self._generations.sync, name, request, observer, stop)

    def build(
        self,
        name: str,
        request: SyncRequest | None = None,
        observer: Observer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> SyncReport:
        """As `sync`, into a new generation beside the one that serves, whatever the settings changed."""
        return self._synced(self._generations.build, name, request, observer, stop)

    def _synced(
        self,
        work: Callable[[CollectionSpec, Working], SyncReport],
        name: str,
        request: SyncRequest | None,
        observer: Observer | None,
        stop: Callable[[], bool],
    ) -> SyncReport:
        request = request or SyncRequest()
        options = self._options(request.owner)
        max_deletes = options.max_deletes if request.max_deletes is None else request.max_deletes
        options = replace(options, full=request.full, max_deletes=max_deletes, accept_schema=request.accept_schema)
        spec = self._of_table(name)
        with self._counted(name):
            report = work(spec, Working(options, observer, stop))
        self._written(name)
        self._count_sync(report)
        return report

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.metrics.syncs.labels(name, "failed").inc()
            self.count_error(error)
            raise

    def count_error(self, error: BaseException) -> None:
        if isinstance(error, DatabaseError):
            self.metrics.hana_errors.labels(str(error.code)).inc()

    def _count_sync(self, report: SyncReport) -> None:
        metrics, name = self.metrics, report.collection
        outcome = "paused" if report.paused else "stopped" if report.stopped else "succeeded"
        metrics.syncs.labels(name, outcome).inc()
        metrics.sync_seconds.labels(name).observe(report.seconds)
        kept_up = report.serving if isinstance(report, BuildReport) else None
        for each in (report, kept_up):  # what was embedded, in both; the rows are the same ones
            metrics.embedded_texts.inc(each.embedded_texts if each else 0)
            metrics.embed_tokens.inc(each.tokens if each else 0)
        for fate in _ACCOUNTED:
            metrics.rows_synced.labels(name, fate).inc(getattr(report, fate))
        for stage, seconds in report.stages.items():
            metrics.stage_seconds.labels(name, stage).inc(seconds)

    def start_sync(self, name: str, request: SyncRequest) -> Job:
        """Sync in the background. Raises UnknownCollection, JobRunning, QueueFull, StateUnusable."""
        self._of_table(name)
        return self.background.start_sync(name, request)

    def start_build(self, name: str, request: SyncRequest) -> Job:
        """Build another generation in the background. Raises as `start_sync`, and UnknownCollection before a first
        sync."""
        self._of_table(name)
        return self.background.start_build(name, request)

    def plan(self, name: str, *, samples: int = 5, estimate: bool = True, observer: Observer | None = None) -> Plan:
        """What a sync would do; writes nothing. Raises as a sync would before it writes."""
        from connector.sync.plan import PlanOptions

        wanted = self.settings.sync
        options = PlanOptions(wanted.page_rows, wanted.max_deletes, samples)
        if not estimate:
            options = replace(options, measure_seconds=None)
        return self.discovery.plan(self._of_table(name), options, observer)

    def calibrate(self, name: str, request: CalibrationRequest | None = None) -> dict[str, Any]:
        """As `Calibration.calibrate`. Raises UnknownCollection beside that."""
        return self._calibration.calibrate(self._of_table(name), request or CalibrationRequest())

    def verify(
        self,
        name: str,
        *,
        repair: bool = False,
        generation: int | None = None,
        observer: Observer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> VerifyReport:
        """`generation`: another one than serves. Each is proved by its own recipe and model."""
        working = Working(self._options("verify"), observer, stop)
        report = self._generations.verify(self._of_table(name), generation, repair=repair, working=working)
        if repair:
            self._watch.look.forget()
        return report

    def start_verify(self, name: str, *, repair: bool, generation: int | None = None) -> Job:
        """Verify in the background. Raises as `start_sync`."""
        self._of_table(name)
        return self.background.start_verify(name, repair=repair, generation=generation)

    def _options(self, owner: str) -> SyncOptions:
        """A run as configured."""
        from connector.sync.run import SyncOptions

        wanted = self.settings.sync
        return SyncOptions(
            page_rows=wanted.page_rows,
            max_deletes=wanted.max_deletes,
            owner=owner,
            lease_wait=wanted.lease_wait,
            window=wanted.window,
            max_attempts=wanted.max_attempts,
            readers=wanted.readers,
        )

    # ------------------------------------------------------------------------------------- rows that were set aside

    def quarantine(self, name: str, wanted: Sequence[GivenKey] | None = None) -> list[Entry]:
        """The rows in quarantine, in the order of their keys; `wanted`: only these. Raises UnknownKey."""
        from connector.sync import quarantine

        self.spec(name)
        rows = [] if self._stored(name) is None else self.store.quarantine(name)
        columns = self.key_columns(name) if rows else ()
        attempts = self.settings.sync.max_attempts
        return quarantine.chosen([quarantine.entry(row, columns, attempts) for row in rows], wanted)

    def retry(
        self,
        name: str,
        wanted: Sequence[GivenKey] | None = None,
        observer: Observer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> RetryReport:
        """Try quarantined rows again; None: all. Raises UnknownKey, and as `sync`."""
        return self.retry_ids(name, self._ids(name, wanted), observer, stop)

    def _ids(self, name: str, wanted: Sequence[GivenKey] | None) -> list[str] | None:
        return None if wanted is None else [entry.id for entry in self.quarantine(name, wanted)]

    def retry_ids(
        self, name: str, ids: list[str] | None, observer: Observer | None, stop: Callable[[], bool]
    ) -> RetryReport:
        """As `retry`, by the ids of the entries."""
        from connector.sync import quarantine
        from connector.sync.run import Ends
        from connector.sync.run import Watch as SyncWatch

        maker = self._generations.maker(self._of_table(name))
        ends = Ends(self.source, self.store, maker.embedder)
        report = quarantine.retry(maker.spec, ends, ids, self._options("retry"), SyncWatch(observer, stop))
        self._written(name)
        return report

    def start_retry(self, name: str, wanted: Sequence[GivenKey] | None) -> Job:
        """Retry in the background. Raises UnknownKey, and as `start_sync`."""
        self._of_table(name)
        return self.background.start_retry(name, self._ids(name, wanted))

    def drop(self, name: str, wanted: Sequence[GivenKey] | None = None, lease_wait: float | None = None) -> int:
        """Forget quarantined rows; None: all; how many there were. The next sync meets them again. Raises UnknownKey,
        and LeaseLost when another worker keeps the collection longer than `lease_wait` seconds."""
        from connector.sync import quarantine

        ids = [entry.id for entry in self.quarantine(name, wanted)]
        if not ids:
            return 0
        options = self._options("drop")
        options = options if lease_wait is None else replace(options, lease_wait=lease_wait)
        dropped = quarantine.drop(self.store, name, ids, options)
        self._watch.look.forget()
        return dropped

    def _written(self, name: str) -> None:
        """Nothing that is remembered of the collection is right any more."""
        self._searching.written(name)
        self._browsing.written(name)
        self._watch.look.forget()

    # -------------------------------------------------------------------------------------------------- generations

    def generations(self, name: str) -> list[dict[str, Any]]:
        """By number; [] when the collection was never synced."""
        self.spec(name)
        return [shown(each) for each in self._generations.all(name)]

    def compare(
        self, name: str, number: int | None = None, queries: Sequence[str] = (), sample: int = QUERIES
    ) -> Comparison:
        """As `Generations.compare`."""
        return self._generations.compare(self.spec(name), number, queries, sample)

    def switch(self, name: str, number: int | None = None, *, force: bool = False) -> Switched:
        """As `Generations.switch`."""
        switched = self._generations.switch(self.spec(name), number, force=force)
        self._written(name)
        return switched

    def rollback(self, name: str) -> Switched:
        """As `Generations.rollback`."""
        switched = self._generations.rollback(self.spec(name))
        self._written(name)
        return switched

    def drop_generation(self, name: str, number: int) -> None:
        """As `Generations.drop`."""
        self._generations.drop(self.spec(name), number)

    # -------------------------------------------------------------------------------------------------- fine-tuning

    def finetune(
        self, name: str, request: TrainingRequest, out: Path | None = None, observer: TrainingObserver | None = None
    ) -> TrainingReport:
        """Train the collection's model on pairs of texts, as `training.run.finetune`. `out`: the folder to come;
        default: the next free one among the models beside the job records."""
        from app.src.training.run import Resources, TrainingObserver, finetune
        from app.src.training.work import Work, next_folder

        spec, wanted = self._of_table(name), self.settings.embedding_of(name)
        source = ModelSource(wanted.model, wanted.revision, wanted.weights_sha256, wanted.precision)
        folder = out or next_folder(self.settings.state_folder(self.file) / "models", name)
        resources = Resources(
            lambda: self.parts.source, self.parts.load, self.settings.embedding.device, self.settings.sync.page_rows
        )
        work = Work(folder.absolute())
        return finetune(spec, source, request, work, resources, observer or TrainingObserver())

    def build_with(
        self,
        name: str,
        model: ModelSource,
        observer: Observer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> BuildReport | None:
        """As `build`, with another model than the settings name. None when the collection was never synced."""
        if self._stored(name) is None:
            return None
        report = self._generations.build(self.spec(name), Working(self._options("finetune"), observer, stop), model)
        self._written(name)
        self._count_sync(report)
        return report

    # ------------------------------------------------------------------------------------------------------- status

    def status(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One entry per collection; one that was never synced has 0 rows and no table.

        Raises UnknownCollection, and UnknownTable when the store's schema is not there.
        """
        return [self._status(name) for name in (self.names() if names is None else names)]

    def _status(self, name: str) -> dict[str, Any]:
        self.spec(name)
        status = self._stored(name)
        shown = (
            statuses.never_synced(name, self.settings) if status is None else statuses.shown(status, behind(status).lag)
        )
        return shown | self.background.shown(name, status)

    def _stored(self, name: str) -> CollectionStatus | None:
        """None when it was never synced; a store that is not there at all is an error and no empty store."""
        status = self.store.status(name)
        if status is None:
            self.parts.check_schema()
        return status

    # --------------------------------------------------------------------------------------------------- search

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> Vectors:
        """Vectors in the order of the texts, shape (n, dimension): soon for a small call, for a large one in turns with
        syncs. Raises the engine's errors."""
        start = time.perf_counter()
        vectors = self.embedder.embed(list(texts), normalize=normalize)
        self.metrics.embedded_texts.inc(len(texts))
        self.metrics.embed_seconds.observe(time.perf_counter() - start)
        return vectors

    def embed_later(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """As `embed`, without waiting: texts are tokenised here and queued, after `counted` was told how many tokens
        each has; what that raises comes out. Cancelled, they leave the queue."""
        start = time.perf_counter()

        def ended(future: Future[Vectors]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.metrics.embedded_texts.inc(len(texts))
                self.metrics.embed_seconds.observe(time.perf_counter() - start)

        queued = self.embedder.embed_later(texts, normalize=normalize, counted=counted)
        queued.add_done_callback(ended)
        return queued

    def search(
        self,
        name: str,
        query: Asked,
        k: int = 10,
        where: Filter | None = None,
        options: SearchOptions = _AS_USUAL,
        *,
        principal: Principal,
    ) -> Found:
        """The `k` best source rows for a text or a vector, or like a row, of those that `principal` may see: others
        take no part. Mode keyword needs no model and loads none. With `explain` the words of the store's plan are for
        administrators: it is that of the whole system.

        Raises UnknownCollection (also when it was never synced), UnknownRow, ModelMismatch, BadFilter, ValueError for a
        blank text, for a vector that is no finite direction and for a vector or a row where words are looked for.
        """
        found = self._searching.search(
            self.spec(name), query, k, Narrowed(where, self._visible(name, principal)), options
        )
        if found.explain is not None and not principal.may("admin"):
            index = found.explain["index"] | {"detail": _NO_PLAN}
            found = replace(found, explain=found.explain | {"index": index})
        return replace(found, stale_since=self.background.stale_since(name, self._stored))

    def check_room(self, name: str, text: str) -> None:
        """As `Searching.check_room`."""
        self._searching.check_room(name, text)

    def rows(self, name: str, ids: Sequence[str], *, principal: Principal) -> list[ReadRow]:
        """The rows with these ids, as search gives them, in that order; those that are not there or that `principal`
        may not see are left out. Raises UnknownCollection, and ValueError for more than 100 ids and for
        several rows whose texts are too long together."""
        return self._browsing.rows(self.spec(name), ids, self._visible(name, principal))

    def fields(self, name: str, *, principal: Principal) -> Fields:
        """The metadata that filters can be made of, of the rows that `principal` may see. Raises UnknownCollection."""
        return self._browsing.fields(self.spec(name), self._visible(name, principal))

    def map(self, name: str, color: str | None = None, limit: int = POINTS, *, principal: Principal) -> PointMap:
        """Rows as points, those alike near each other, with the value of the field `color`. Raises UnknownCollection,
        and ValueError for a field that there is not."""
        return self._browsing.map(self.spec(name), color, limit, self._visible(name, principal))

    def example_id(self, name: str) -> str | None:
        """Return the id of any stored row, None where there is none. For the operator: row rights do not apply."""
        return self._browsing.example_id(self.spec(name))

    def _visible(self, name: str, principal: Principal) -> Filter | Nothing | None:
        return self.rights.visible(name, principal)

    def _found(
        self, name: str, text: str, k: int, where: Filter | None, mode: Mode, rerank: bool | None
    ) -> tuple[list[str], list[str]]:
        found = self.search(name, text, k, where, SearchOptions(mode, rerank=rerank), principal=OPERATOR)
        return stored_ids(self.spec(name), [hit.id for hit in found.hits]), found.notes

    def embedder_of(self, name: str) -> EngineEmbedder:
        """The model of what serves. Raises ModelMismatch when it cannot be had."""
        return self._generations.maker(self.spec(name)).embedder

    def key_columns(self, name: str) -> tuple[str, ...]:
        """Names of the key columns; () while nobody can tell."""
        spec, stored = self.spec(name), self._stored(name)
        return spec.key if stored is None else self._searching.key_columns(spec, stored)

    # ---------------------------------------------------------------------------------------------- how it fares

    def info(self) -> dict[str, Any]:
        """What `/v1/info` says. Loads the engine."""
        return statuses.of_service(version(), self.engine, self.settings, self.parts.engine_if_loaded_for)

    def gpu(self) -> dict[str, Any]:
        """What NVIDIA's driver says now; loads no engine, and takes no longer than GPU_WITHIN."""
        from app.src.core.nvml import snapshot_within

        return snapshot_within(GPU_WITHIN).as_dict()

    def gpu_missing(self) -> doctor.Fault | None:
        """Why the CPU computes although a GPU is asked for, as far as is known now; loads no engine."""
        return self.probes.gpu_missing(self.parts.engine_if_loaded)

    def _engine_loaded(self, engine: EmbeddingEngine) -> None:
        """Whatever process it is: who asks for a GPU and gets the CPU is told, once and in one line, before anything is
        computed."""
        missing = None if self._warned else self.probes.gpu_missing(engine)
        if missing is not None:
            self._warned = True
            _log.warning("WARNING: %s", told(missing))

    def ready(self, readiness: Readiness | None = None) -> Readiness:
        """As `Probes.ready`."""
        readiness = self.probes.ready(self.count_error, readiness)
        if self.access.configured:
            fault = self.access.check()
            readiness.checks["access"] = fault is None
            readiness.unavailable = readiness.unavailable or fault
        self.metrics.tell_ready(readiness.checks)
        return readiness

    def doctor(self) -> list[doctor.Check]:
        return doctor.examine(self.probes)


def _choices(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; there are: {', '.join(names)}"
