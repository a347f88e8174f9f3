"""Create the parts of a service from Settings on first use: connections, source, store, and engines with metrics and
cached query vectors."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.src.core.backends import DeviceFailed, EngineError, InputType, NonFinite
from app.src.observe.gpu import gpu_message, gpu_missing
from app.src.observe.metrics import Metrics
from app.src.settings import CollectionSettings, EmbeddingSettings, Settings
from connector.document.document import metadata_names
from connector.errors import ConfigurationError, ConnectorError, TextsNotEmbeddable, UnknownTable
from connector.extras import install_command
from connector.model import IN_DATABASE, ModelSource, VectorCache, Vectors
from connector.protocols import Source
from connector.stores.store import VectorStore

if TYPE_CHECKING:
    from app.src.core.engine import Engine
    from app.src.core.onnx_export.serving import GraphOptions
    from app.src.core.queue import Lane
    from app.src.scaling.cluster import Cluster
    from connector.hana.connection import HanaPool
    from connector.stores.scan import ScanCopy, VectorScan

_log = logging.getLogger(__name__)

# The family of vectors in an engine's fingerprint; also a precision that loads it.
FAMILY = re.compile("(?<=/unit/)(float|int8-[0-9a-f]{12})(?=/prompts-|$)")
# `Embedder.least_cosine`. fp16 and bf16 against fp32 stay above the first; in int8, whose rounding depends on the other
# texts of a batch, 645 texts with all-MiniLM-L6-v2 on a CPU with AVX-512 VNNI reached 0.9973 in batches of 1 to 645.
LEAST_COSINE, LEAST_COSINE_INT8 = 0.999, 0.99

Part = TypeVar("Part")


class EngineEmbedder:
    """A `connector.protocols.Embedder` with further methods for services. Thread-safe. `max_wait`: seconds that a
    request with a waiting caller may queue, None: no limit; `cache_bytes`: size of the cache of query vectors."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics | None = None,
        *,
        max_wait: float | None = None,
        cache_bytes: int = 16 << 20,
        source: ModelSource | None = None,
    ) -> None:
        """`source`: where the engine was loaded from."""
        from app.src.core.queue import Watcher

        counters = self._metrics = metrics or Metrics()

        class _QueueMetrics(Watcher):
            def queued(self, lane: Lane, texts: int) -> None:
                counters.embed_queue.labels(lane).inc(texts)

            def began(self, lane: Lane, waited: float) -> None:
                counters.embed_wait_seconds.labels(lane).observe(waited)

            def batch(self, lane: Lane, texts: int, tokens: int) -> None:
                counters.embed_batch_texts.labels(lane).observe(texts)
                counters.embed_batch_tokens.labels(lane).observe(tokens)

            def refused(self) -> None:
                counters.embed_refused.inc()

        self.engine = engine
        engine.configure_queue(max_wait=max_wait, watcher=_QueueMetrics())
        # Pinned by the SHA-256 of the weights, and for int8 of the calibration, so that exactly this model can be
        # loaded again.
        source = replace(source or ModelSource(engine.model), weights_sha256=engine.weights_sha256 or None)
        family = FAMILY.search(engine.fingerprint)
        self.source = replace(source, precision=family[0]) if family and engine.precision == "int8" else source
        self.dimension = engine.dimension
        self.model = engine.model
        self.fingerprint = engine.fingerprint
        self.max_tokens = engine.max_tokens
        self.least_cosine = LEAST_COSINE_INT8 if engine.precision == "int8" else LEAST_COSINE
        self.database_model = source.in_database
        self.count_tokens, self.split = engine.count_tokens, engine.split
        self._queries = VectorCache(cache_bytes)  # of query texts; the texts themselves are not kept
        self._queries_lock = threading.Lock()

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Embed in the bulk lane."""
        with _translated():
            return self.engine.embed(list(texts), lane="bulk")

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Embed as queries in the bulk lane."""
        with _translated():
            return self.engine.embed(list(texts), lane="bulk", input_type="query")

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        with _translated():
            return self.engine.embed_counted(list(texts), lane="bulk")

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed in the interactive lane, or return the cached vector. Raises EngineOverloaded."""
        key, metrics = VectorCache.key(text), self._metrics
        with self._queries_lock:
            known = self._queries.get(key)
        metrics.query_cache.labels("miss" if known is None else "hit").inc()
        if known is not None:
            return known.copy()
        with _translated():
            found = self.engine.embed([text], lane="interactive", input_type="query")
        vector: NDArray[np.float32] = found[0].copy()
        with self._queries_lock:
            self._queries.put(key, vector)
        return vector.copy()

    def check_query(self, text: str) -> None:
        """Raise EngineOverloaded if `embed_query` is certain to raise it now. Returns at once."""
        with self._queries_lock:
            known = self._queries.get(VectorCache.key(text))
        if known is None:
            self.engine.check_room([text])

    def embed(self, texts: Sequence[str], *, input_type: InputType = "document", normalize: bool = True) -> Vectors:
        """Embed for a waiting caller: in the interactive lane, or alternating with bulk if large. Raises the engine's
        errors."""
        return self.embed_later(texts, input_type=input_type, normalize=normalize).result()

    def embed_later(
        self,
        texts: Sequence[str],
        *,
        input_type: InputType = "document",
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """Tokenise and queue; the future may be cancelled. `counted` as in `Engine.submit`."""

        def ended(future: Future[Vectors]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._metrics.embedded_texts.inc(len(texts))

        queued = self.engine.submit(texts, input_type=input_type, normalize=normalize, counted=counted)
        queued.add_done_callback(ended)
        return queued

    def close(self) -> None:
        """Finish the current batch and fail waiting calls with EngineClosed."""
        self.engine.close()
        with self._queries_lock:
            self._queries.clear()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except NonFinite as error:
        raise TextsNotEmbeddable(str(error), indices=error.indices) from error


class EnginesScan:
    """A `VectorScan` for the local store, on the engine's card. Loads nothing before the first vector search."""

    def __init__(self, engine: Callable[[], Engine], *, wanted: bool) -> None:
        """`wanted`: a card is required, so that a missing one is an error."""
        self._engine = engine
        self._wanted = wanted

    @property
    def failed(self) -> str:
        """Return why the card computes nothing more in this process; "" while it works or is not in use."""
        failed: str = getattr(self.__dict__.get("_scan"), "failed", "")
        return failed

    @cached_property
    def _scan(self) -> VectorScan:
        from connector.stores.scan import Int8Scan

        try:
            engine = self._engine()
        except EngineError:
            if self._wanted:  # if not, vectors can be searched without the model
                raise
            return Int8Scan()
        profile = engine.memory.device.profile  # of this process; an engine may also compute elsewhere
        if profile.kind == "cuda":
            from app.src.core.scan import CardScan

            return CardScan(profile, engine.memory, Int8Scan())
        if self._wanted:
            raise ConfigurationError(
                f'[store] scan = "gpu", but the model computes on {profile.name}, which is no GPU: use auto or cpu'
            )
        return Int8Scan()

    def copy(self, dimension: int) -> ScanCopy:
        return self._scan.copy(dimension)


def model_source(wanted: EmbeddingSettings) -> ModelSource:
    same = ("revision", "weights_sha256", "precision", "query_prompt", "document_prompt", "remote_source")
    return ModelSource(wanted.model, **{name: getattr(wanted, name) for name in same})


def check_computed_here(model: str, doing: str) -> None:
    """Raise ConfigurationError for a model that HANA computes."""
    if model.startswith(IN_DATABASE):
        raise ConfigurationError(f'HANA computes "{model}", so there is nothing to {doing} here: set another model')


class Parts:
    """Thread-safe. Connects and loads on first use; `close` closes what was opened. The messages of `expected_errors`
    may be shown to users."""

    expected_errors: tuple[type[Exception], ...] = (ConnectorError, EngineError)

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        source: Source | None = None,
        store: VectorStore | None = None,
        graphs_folder: Path | None = None,
        scaled: bool = False,
    ) -> None:
        """`source` and `store` replace the configured ones; they are closed too. `graphs_folder`: for calibrations;
        default: the folder used without a settings file. `scaled`: models may be on the cluster of [scale]."""
        self.settings = settings
        # Per collection: column -> its name in the stored metadata. Filters may use either.
        self._metadata_names = {block.name: metadata_names(block.metadata) for block in settings.collections}
        self.graphs_folder = graphs_folder or settings.tensorrt_cache(None)
        self.scaled = scaled and settings.scale.engine == "ray"
        self._warned = False
        self._failed = ""  # why no model can be loaded any more
        self._scan: EnginesScan | None = None
        self._metrics = metrics or Metrics()
        self._lock = threading.RLock()
        given = {"source": source, "store": store}
        self._parts: dict[str, Any] = {name: part for name, part in given.items() if part is not None}
        self._models: dict[ModelSource, EngineEmbedder] = {}  # by their sources without SHA-256
        self._models_lock = threading.Lock()
        self.store_in_hana = store is None and settings.store.kind == "hana"

    def add(self, block: CollectionSettings) -> None:
        """Add a collection to the settings."""
        self._metadata_names[block.name] = metadata_names(block.metadata)
        self.settings = self.settings.model_copy(update={"collections": (*self.settings.collections, block)})

    @property
    def engine(self) -> Engine:
        return self.embedder.engine

    @property
    def engines_loaded(self) -> list[Engine]:
        """Return the loaded engines: that of [embedding], and those of collections with their own model."""
        return [each.engine for each in list(self._models.values())]

    @property
    def failed(self) -> str:
        """Return why a device computes nothing more in this process; "" while all work. Then only a new process helps,
        because the context of a GPU cannot be made again."""
        engines = (engine.failed for engine in self.engines_loaded if engine.failed)
        return next(engines, self._failed or (self._scan.failed if self._scan else ""))

    @property
    def half_failed(self) -> str:
        """Return which devices compute nothing more while others of the same model go on; "" if there are none."""
        return "; ".join(
            f"{member.profile.name} ({member.profile.torch_name}) computes nothing more until the service is "
            f"restarted: {failure}"
            for engine in self.engines_loaded
            for member, failure in zip(engine.members, engine.failures, strict=True)
            if failure and not engine.failed
        )

    def engine_if_loaded(self, collection: str | None = None) -> Engine | None:
        """Return the loaded engine of a collection's configured model (None: of [embedding]), or None."""
        there = self._models.get(replace(self.configured(collection), weights_sha256=None))
        return None if there is None else there.engine

    def configured(self, collection: str | None = None) -> ModelSource:
        """Return the model of a collection; None: of [embedding]."""
        settings = self.settings
        return model_source(settings.embedding if collection is None else settings.embedding_of(collection))

    @property
    def embedder(self) -> EngineEmbedder:
        return self.embedder_of(self.configured())

    def warm(self) -> None:
        """Load the model of [embedding]. Raises the engine's errors, but only warns of a model that HANA does not
        compute now: HANA may be unreachable, and collections may use other models."""
        try:
            self.embedder.embed(["warm"])
        except ConnectorError as error:
            if not self.settings.embedding.in_hana:
                raise
            _log.warning("WARNING: the model of [embedding] cannot be used: %s", error)

    def embedder_for(self, collection: str) -> EngineEmbedder:
        """Return the configured model of a collection. Raises the engine's errors."""
        return self.embedder_of(self.configured(collection))

    def embedder_of(self, model: ModelSource) -> EngineEmbedder:
        """Return a model and keep it in memory. Raises the engine's errors."""
        key = replace(model, weights_sha256=None)
        if (there := self._models.get(key)) is not None:
            return there  # needs no lock, so it returns even while another model loads
        wanted = self.settings.embedding
        with self._models_lock:  # not the parts' own lock: loading takes seconds
            if key not in self._models:
                self._models[key] = EngineEmbedder(
                    self.load(model),
                    self._metrics,
                    max_wait=wanted.max_wait,
                    cache_bytes=wanted.query_cache_mb << 20,
                    source=model,
                )
            return self._models[key]

    @cached_property
    def source(self) -> Source:
        from connector.hana.source import HanaSource

        return self._part("source", lambda: HanaSource(self.pool("hana")))

    @cached_property
    def store(self) -> VectorStore:
        def build() -> VectorStore:
            wanted = self.settings.store
            if wanted.kind == "local":
                from app.src.core.device import torch_build
                from connector.stores.local.store import LocalStore

                scan = None
                if wanted.scan != "cpu":
                    embedding, build = self.settings.embedding, torch_build()
                    # Decide this without loading a model: a search by a vector needs no model.
                    may_have = build is not None and build[1] is not None and not embedding.on_cpu
                    if wanted.scan == "gpu" or (may_have and not embedding.hashing):
                        scan = self._scan = EnginesScan(lambda: self.engine, wanted=wanted.scan == "gpu")
                return LocalStore(wanted.path or Path(), names=self._metadata_names, scan=scan)
            from connector.stores.hana.store import HanaStore

            names, vector_type = self._metadata_names, wanted.vector_type
            return HanaStore(self.store_pool, self.schema(), names=names, vector_type=vector_type)

        return self._part("store", build)

    @contextmanager
    def store_to_read(self) -> Iterator[VectorStore | None]:
        """Yield the store for reading, without creating or migrating it; None if it does not exist yet."""
        wanted = self.settings.store
        if "store" in self._parts or wanted.kind == "hana":
            yield self.store
            return
        from connector.stores.local.store import FILE, LocalStore

        folder = wanted.path or Path()
        if not (folder / FILE).exists():
            yield None
            return
        with closing(LocalStore(folder, names=self._metadata_names, read_only=True)) as store:
            yield store

    def pool(self, section: str) -> HanaPool:
        """Return the connection pool for the HANA of `[section]`: "hana" or "store.hana"."""
        from connector.hana.connection import ConnectionOptions, HanaPool

        hana = self.settings.hana if section == "hana" else self.settings.store_hana
        prefix = "HANA" if section == "hana" else "HANA_STORE"
        if not hana.configured:
            raise ConfigurationError(f"no HANA to connect to: set [{section}] host in owl-sap.toml, or {prefix}_HOST")
        if not hana.userkey and not (hana.user and hana.password and hana.password.get_secret_value()):
            missing = "password" if hana.user else "user"
            raise ConfigurationError(f"[{section}] has no {missing}: set {prefix}_USER and {prefix}_PASSWORD")
        texts = ("host", "user", "userkey", "trust_store", "host_name_in_certificate")
        same = ("port", "encrypt", "validate_certificate", "connect_timeout", "communication_timeout")
        given: dict[str, Any] = {name: getattr(hana, name) or "" for name in texts}
        given |= {name: getattr(hana, name) for name in same}
        password = "" if hana.password is None else hana.password.get_secret_value()
        options = ConnectionOptions(**given, password=password, schema=hana.schema_name or "")
        return self._part(f"pool {section}", lambda: HanaPool(options, size=hana.pool_size))

    @property
    def store_pool(self) -> HanaPool:
        return self.pool("hana" if self.settings.store.hana is None else "store.hana")

    def allow_login(self) -> None:
        """Allow one more login after a refused one."""
        with self._lock:
            pools = [part for name, part in self._parts.items() if name.startswith("pool ")]
        for pool in pools:
            pool.allow_login()

    def check_schema(self) -> None:
        """Raise UnknownTable when the schema for the vectors does not exist. Only a store in HANA has a schema."""
        if not self.store_in_hana:
            return
        from connector.hana.catalog import FIND_SCHEMA, did_you_mean, schemas

        schema = self.schema()
        if not self.store_pool.read(FIND_SCHEMA, (schema,), doing="looking for the store's schema"):
            near = did_you_mean(schema, schemas(self.store_pool))
            raise UnknownTable(
                f'the schema for the vectors, "{schema}", does not exist or cannot be seen by this user; names are '
                f'case-sensitive. CREATE SCHEMA "{schema}", or change [store] schema.{near}'
            )

    def close(self) -> None:
        with self._lock:
            parts, self._parts = self._parts, {}
        for name in ("store", *(name for name in parts if name.startswith("pool "))):
            if name in parts:
                parts[name].close()
        with self._models_lock:
            models, self._models = self._models, {}
        for embedder in models.values():
            embedder.close()
        if "cluster" in parts:
            parts["cluster"].close()

    # ----------------------------------------------------------------------------------------------- building the parts

    def _part(self, name: str, build: Callable[[], Part]) -> Part:
        with self._lock:
            if name not in self._parts:
                self._parts[name] = build()
            part: Part = self._parts[name]
        return part

    @property
    def cluster(self) -> Cluster:
        """The Ray cluster of [scale]. Raises ConfigurationError, Unavailable."""
        from app.src.scaling.cluster import Cluster

        return self._part("cluster", lambda: Cluster(self.settings.scale))

    def graph_options(self) -> GraphOptions:
        from app.src.core.onnx_export.serving import GraphOptions

        return GraphOptions(cache=self.graphs_folder, **self.settings.tensorrt.model_dump())

    def load(self, model: ModelSource | None = None) -> Engine:
        """Load a model (None: the configured one) on the configured device, or in the HANA of the store; the caller
        closes it."""
        model = model or self.configured()
        if (in_database := model.in_database) is not None:
            from app.src.service.hana_engine import HanaEngine
            from connector.hana.embedding import HanaModel

            return HanaEngine(HanaModel(self.store_pool, in_database))
        from app.src.core.backends.hashing import PREFIX as HASHING
        from app.src.core.loading import EngineOptions, load_engine

        load: Callable[[EngineOptions, GraphOptions | None], Engine] = (
            self.cluster.engine if self.scaled else load_engine
        )
        wanted = self.settings.embedding
        same = (
            "cache",
            "device",
            "experimental_kernels",
            "memory_fraction",
            "reserve_mb",
            "threads",
            "tokenizer_workers",
        )
        pinned = ("revision", "weights_sha256", "precision", "query_prompt", "document_prompt")
        options = EngineOptions(
            model=model.name,
            **{name: getattr(model, name) for name in pinned},
            **{name: getattr(wanted, name) for name in same},
        )
        try:
            engine = load(options, None if model.name.startswith(HASHING) else self.graph_options())
        except ImportError as error:
            raise ConfigurationError(
                f'the model "{model.name}" needs the package {error.name or "torch"}, which cannot be imported: '
                f"{install_command('engine')}"
            ) from error
        except DeviceFailed as error:
            self._failed = str(error)
            raise
        missing = None if self._warned else gpu_missing(wanted, engine)
        if missing is not None:
            self._warned = True
            _log.warning("WARNING: %s", gpu_message(missing))
        return engine

    def schema(self) -> str:
        """Return the schema for the vectors. Raises ConfigurationError."""
        if not self.settings.store_schema:
            raise ConfigurationError(
                "no schema for the vectors: set [store] schema (or [hana] schema) in owl-sap.toml, or HANA_SCHEMA"
            )
        return self.settings.store_schema
