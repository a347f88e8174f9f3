"""Every setting with its default, unit and description, as one frozen model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, IPvAnyNetwork, SecretStr, field_validator, model_validator

from app.src.settings.access import AccessSettings
from app.src.settings.collections import CollectionSettings
from app.src.settings.section import Duration, Section, Split, setting

DEFAULT_MODEL = "all-MiniLM-L6-v2"
Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16", "int8"]
Networks = Annotated[tuple[IPvAnyNetwork, ...], Split]


class HanaSettings(Section):
    """How to reach one HANA. Encryption and certificate validation are on unless switched off by name."""

    host: str | None = setting(None, "host name; an IP address is not matched against certificates")
    port: int = setting(443, "443 for HANA Cloud, 3NN13 or 3NN15 on-premise", ge=1, le=65535)
    user: str | None = setting(None, "the technical user; docs/hana.md lists its rights")
    password: SecretStr | None = None
    userkey: str | None = setting(None, "key of SAP's secure user store, instead of host, user and password")
    schema_name: str | None = setting(None, "current schema of the sessions", alias="schema")
    encrypt: bool = setting(True, "TLS; false only for a HANA that has none")
    validate_certificate: bool = setting(True, "false accepts any server: only for a trial")
    trust_store: str | None = setting(None, "path of a PEM file, or the PEM itself")
    host_name_in_certificate: str | None = setting(None, "the certificate's name, if not `host`; never `*`")
    connect_timeout: float = setting(10.0, "seconds", gt=0)
    communication_timeout: float = setting(120.0, "seconds a statement may stay unanswered", gt=0)
    pool_size: int = setting(8, "most connections, one per thread", ge=1, le=256)

    @field_validator("host_name_in_certificate")
    @classmethod
    def _names_one_host(cls, name: str | None) -> str | None:
        if name is not None and name.strip() == "*":
            raise ValueError(
                '"*" accepts a certificate for any name; set the name that the certificate carries '
                "(`owl-sap doctor` prints it), or remove the setting where the certificate names `host`"
            )
        return name

    @property
    def configured(self) -> bool:
        return bool(self.host or self.userkey)


class StoreSettings(Section):
    """Where the vectors live."""

    kind: Literal["hana", "local"] = setting("hana", "hana (REAL_VECTOR), or local for a HANA without vector types")
    path: Path | None = setting(None, "folder of the local store, created if absent")
    schema_name: str | None = setting(None, "default: [hana] schema", alias="schema")
    hana: HanaSettings | None = setting(None, "another HANA for the vectors; default: [hana]")
    scan: Literal["auto", "cpu", "gpu"] = setting("auto", "where a local store searches; auto: on the model's card")

    @model_validator(mode="after")
    def _local_has_path(self) -> StoreSettings:
        if self.kind == "local" and self.path is None:
            raise ValueError('kind = "local" needs path = "<folder>" (created if absent)')
        return self


class EmbeddingSettings(Section):
    """The model, and its use of the machine."""

    model: str = setting(DEFAULT_MODEL, 'packaged name, folder, cached hub id, or "hash:384" for tests')
    revision: str | None = setting(None, "pinned revision of a hub model")
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    precision: Precision = setting("auto", "auto: the fastest accurate one on the device")
    device: str = setting("auto", "auto, cpu, cuda or cuda:<n>", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    expect_gpu: bool = setting(False, "a missing GPU is a warning at each start, a metric and a fault in doctor")
    memory_fraction: float = setting(0.8, "share of the card's memory to use", gt=0, le=1)
    reserve_mb: int = setting(512, "MB of the card's memory left free", ge=0)
    threads: int | None = setting(None, "CPU threads; default: torch's choice", ge=1)
    max_wait: Duration = setting(10.0, "longest wait (30s, 1m) of a request for the engine; then HTTP 429", gt=0)
    query_cache_mb: int = setting(16, "MB for the vectors of recent search texts", ge=0)

    @property
    def hashing(self) -> bool:
        """Whether this is the test embedder, which needs no torch."""
        return self.model.startswith("hash:")


class TensorRtSettings(Section):
    """INT8 and fp16 engines on a card, through ONNX Runtime and TensorRT."""

    enabled: bool = setting(False, "compute with TensorRT on a card; in INT8 only if the accuracy gate accepted it")
    workspace_mb: int = setting(4096, "MB of the card that TensorRT may use while it builds an engine", ge=1)
    optimization_level: int = setting(3, "of TensorRT's builder: 0 builds fastest, 5 runs fastest", ge=0, le=5)


class SyncSettings(Section):
    page_rows: int = setting(1000, "rows read at once", ge=1, le=100_000)
    window: int = setting(1000, "changed rows that are embedded together", ge=1, le=100_000)
    readers: int = setting(2, "threads that read a large table in parallel, each a range of keys", ge=1, le=8)
    max_deletes: float = setting(0.2, "largest share of the stored rows one run may delete", ge=0, le=1)
    lease_wait: float = setting(60.0, "seconds to wait for another worker on the collection", ge=0)
    longest_wait: Duration = setting(300.0, "longest time (5m, 1h) between attempts of a job without HANA", gt=0)
    give_up_after: Duration = setting(86_400.0, "time (12h, 2d) after which a job that waits for HANA fails")
    max_attempts: int = setting(6, "attempts at a row in quarantine; then only a change or a retry", ge=1)


class ApiSettings(Section):
    """The REST service and its limits."""

    host: str = setting("127.0.0.1", "another than loopback only with [access]")
    port: int = setting(8000, "0 picks a free one", ge=0, le=65535)
    max_body_bytes: int = Field(default=2 * 1024 * 1024, ge=1024)
    max_bodies_bytes: int = setting(256 * 1024 * 1024, "bytes of all bodies in memory; then HTTP 503", ge=1024)
    max_inputs: int = setting(256, "texts in one /embed call", ge=1, le=65_536)
    max_text_chars: int = setting(100_000, "characters of one text", ge=1)
    max_k: int = setting(1000, "hits of one search", ge=1)
    threads: int = setting(8, "requests that are worked on at once", ge=1, le=128)
    max_wait: Duration = setting(10.0, "longest wait, also expected, for a thread; then HTTP 429", gt=0)
    job_workers: int = setting(2, "jobs that `serve` runs at once; 0: all by `owl-sap worker`", ge=0, le=32)
    run_schedules: bool = setting(True, "`serve` starts the collections' scheduled syncs")
    timeout: Duration = setting(120.0, "seconds (or 2m) until the answer to a request must begin; then HTTP 503", gt=0)
    read_timeout: Duration = setting(30.0, "for a client to send head or body, or to read on", gt=0)
    max_connections: int = setting(1024, "open connections; further ones get HTTP 503 and are closed", ge=1, le=65_536)
    shutdown_seconds: Duration = setting(5.0, "seconds for open requests and jobs to end at shutdown", gt=0)
    docs: bool = setting(True, "serve /docs and /openapi.json")
    console: bool = setting(True, "serve the console at / (docs/console.md)")
    tls_certificate: Path | None = setting(None, "PEM file with the certificate and its chain: serve https")
    tls_key: Path | None = setting(None, "PEM file with its private key, readable by its owner only")
    hsts: bool = setting(False, "tell browsers to use https only for a year, for all ports of this host")
    trusted_proxies: Networks = setting((), "proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted")
    exit_when_stuck: bool = setting(False, "exit with 4 once the engine is stuck; else /health/live turns 503")

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ApiSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be set together")
        return self


class WorkerSettings(Section):
    """`owl-sap worker`, the background part alone."""

    concurrency: int = setting(2, "jobs that `owl-sap worker` runs at once", ge=1, le=32)
    metrics_host: str = setting("127.0.0.1", "where `owl-sap worker` answers GET /metrics")
    metrics_port: int | None = setting(None, "its port; 0 picks a free one; default: none", ge=0, le=65535)
    max_jobs: int = setting(0, "jobs after which `owl-sap worker` exits, to be restarted; 0: never", ge=0)
    heartbeat: Path | None = setting(None, "file that `owl-sap worker` renews, for `owl-sap health worker`")


class StateSettings(Section):
    """The records of jobs."""

    path: Path | None = setting(None, "folder of the job records; default: the local store's, else `.owl-sap`")
    max_attempts: int = setting(5, "a job fails after its process has died so often", ge=1)


class McpSettings(Section):
    """Tools for agents (docs/agents.md). `owl-sap mcp` offers them to the program that starts it, also without
    `http`."""

    http: bool = setting(False, "the service also offers them at POST /mcp, to keys with the scope search")
    write: bool = setting(False, "also offer the tool start_sync, to keys with the scope sync")
    key: SecretStr | None = setting(None, "key or token whose rights `owl-sap mcp` uses; default: every right")
    max_hits: ClassVar[int] = 50  # rows of one search by an agent
    max_chars: ClassVar[int] = 40_000  # characters of texts and metadata in one answer; longer ones are cut with a note


_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class SearchSettings(Section):
    """A reranker (docs/search.md)."""

    rerank: str = setting("off", "off; /folder of a cross-encoder; or package.module:function, your own code")
    rerank_depth: ClassVar[int] = 50  # how many of the best hits are reranked
    rerank_seconds: Duration = setting(2.0, "time limit of the reranker; after that the order stays unchanged", gt=0)

    @field_validator("rerank")
    @classmethod
    def _known(cls, rerank: str) -> str:
        if rerank == "off" or _FUNCTION.fullmatch(rerank) or _is_path(rerank):
            return rerank
        raise ValueError("must be off, a folder that begins with / or ./, or package.module:function")

    @property
    def kind(self) -> Literal["off", "cross-encoder", "function"]:
        if self.rerank == "off":
            return "off"
        return "cross-encoder" if _is_path(self.rerank) else "function"

    @property
    def folder(self) -> Path:
        """Of the cross-encoder."""
        return Path(self.rerank).expanduser()


def _is_path(rerank: str) -> bool:
    return rerank.startswith(("/", "./", "../", "~/"))


class Settings(Section):
    """All settings. Made by `sources.load`, or directly in tests."""

    hana: HanaSettings = HanaSettings()
    store: StoreSettings = StoreSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    tensorrt: TensorRtSettings = TensorRtSettings()
    sync: SyncSettings = SyncSettings()
    api: ApiSettings = ApiSettings()
    access: AccessSettings = AccessSettings()
    search: SearchSettings = SearchSettings()
    mcp: McpSettings = McpSettings()
    worker: WorkerSettings = WorkerSettings()
    state: StateSettings = StateSettings()
    collections: tuple[CollectionSettings, ...] = ()

    @field_validator("collections")
    @classmethod
    def _distinct(cls, collections: tuple[CollectionSettings, ...]) -> tuple[CollectionSettings, ...]:
        names = [collection.name for collection in collections]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two collections are named "{name}"; names must differ')
        return collections

    @property
    def synced(self) -> tuple[CollectionSettings, ...]:
        """The collections with a source table."""
        return tuple(collection for collection in self.collections if not collection.documents)

    def embedding_of(self, collection: str) -> EmbeddingSettings:
        """Return [embedding] with the collection's own model, if it has one; revision and SHA-256 do not apply to
        it."""
        own = next((each.model for each in self.collections if each.name == collection), None)
        if own is None or own == self.embedding.model:
            return self.embedding
        return self.embedding.model_copy(update={"model": own, "revision": None, "weights_sha256": None})

    def state_folder(self, file: Path | None) -> Path:
        """`file`: where the settings were read."""
        if self.state.path is not None:
            return self.state.path
        if self.store.kind == "local" and self.store.path is not None:
            return self.store.path
        return (file.parent if file is not None else Path()) / ".owl-sap"

    def tensorrt_cache(self, file: Path | None) -> Path:
        return self.state_folder(file) / "tensorrt"

    @property
    def store_hana(self) -> HanaSettings:
        """The vectors' HANA: its own, or that of the rows."""
        return self.store.hana or self.hana

    @property
    def store_schema(self) -> str | None:
        return self.store.schema_name or self.store_hana.schema_name
