"""Every setting with its default, unit and description, as one frozen model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from app.src.settings.access import AccessSettings
from app.src.settings.collections import CollectionSettings
from app.src.settings.section import Duration, Networks, Section

DEFAULT_MODEL = "all-MiniLM-L6-v2"


class HanaSettings(Section):
    """How to reach one HANA. Encryption and certificate validation are on unless switched off by name."""

    host: str | None = Field(default=None, description="host name; an IP address is not matched against certificates")
    port: int = Field(default=443, ge=1, le=65535, description="443 for HANA Cloud, 3NN13 or 3NN15 on-premise")
    user: str | None = Field(default=None, description="the technical user; docs/hana.md lists its rights")
    password: SecretStr | None = None
    userkey: str | None = Field(
        default=None, description="key of SAP's secure user store, instead of host, user and password"
    )
    schema_name: str | None = Field(default=None, alias="schema", description="current schema of the sessions")
    encrypt: bool = Field(default=True, description="TLS; false only for a HANA that has none")
    validate_certificate: bool = Field(default=True, description="false accepts any server: only for a trial")
    trust_store: str | None = Field(default=None, description="path of a PEM file, or the PEM itself")
    host_name_in_certificate: str | None = Field(
        default=None, description="the name in the certificate, if it is not `host`; `*` is refused"
    )
    connect_timeout: float = Field(default=10.0, gt=0, description="seconds")
    communication_timeout: float = Field(default=120.0, gt=0, description="seconds a statement may stay unanswered")
    pool_size: int = Field(default=8, ge=1, le=256, description="most connections, one per thread")

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

    kind: Literal["hana", "local"] = Field(
        default="hana", description="hana (REAL_VECTOR), or local for a HANA without vector types"
    )
    path: Path | None = Field(default=None, description="folder of the local store, created if absent")
    schema_name: str | None = Field(default=None, alias="schema", description="default: [hana] schema")
    hana: HanaSettings | None = Field(default=None, description="another HANA for the vectors; default: [hana]")
    scan: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="where a local store searches; auto: on the model's card, if it uses one",
    )

    @model_validator(mode="after")
    def _local_has_path(self) -> StoreSettings:
        if self.kind == "local" and self.path is None:
            raise ValueError('kind = "local" needs path = "<folder>" (created if absent)')
        return self


class EmbeddingSettings(Section):
    """The model, and its use of the machine."""

    model: str = Field(
        default=DEFAULT_MODEL,
        description='packaged name, folder, hub id that is cached here, or "hash:384" for tests; the default: English',
    )
    revision: str | None = Field(default=None, description="pinned revision of a hub model")
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16", "int8"] = Field(
        default="auto", description="auto fp32 tf32 fp16 bf16 int8; auto: the fastest accurate one on the device"
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:<n>")
    expect_gpu: bool = Field(
        default=False, description="a missing GPU is a warning at each start, a metric and a fault in doctor"
    )
    memory_fraction: float = Field(default=0.8, gt=0, le=1, description="share of the card's memory to use")
    reserve_mb: int = Field(default=512, ge=0, description="MB of the card's memory left free")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: torch's choice")
    max_wait: Duration = Field(
        default=10.0,
        gt=0,
        description="seconds (or 30s, 1m) that a search or a REST request may wait for the engine; longer waits are "
        "refused (HTTP 429)",
    )
    overlap: bool = Field(default=True, description="on a card: launch a batch while the previous one computes")
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        default="auto", description="replay small batches from CUDA graphs; auto: where that measures faster"
    )
    query_cache_mb: int = Field(default=16, ge=0, description="MB for the vectors of recent search texts")
    preallocate: bool = Field(
        default=False, description="compute one largest batch at loading, to allocate the card's memory then"
    )
    clear_cache: bool = Field(
        default=False, description="return memory to the card after each large batch; for shared cards"
    )
    cudnn_benchmark: bool = Field(
        default=False, description="let cuDNN tune its convolutions; text encoders have none, so it has no effect"
    )
    profiling: bool = Field(default=False, description="NVTX ranges around the engine's steps, for a profiler")

    @property
    def hashing(self) -> bool:
        """Whether this is the test embedder, which needs no torch."""
        return self.model.startswith("hash:")


class TensorRtSettings(Section):
    """INT8 and fp16 engines on a card, through ONNX Runtime and TensorRT."""

    enabled: bool = Field(
        default=False,
        description="compute with TensorRT on a card; in INT8 only if the accuracy gate accepted it",
    )
    workspace_mb: int = Field(
        default=4096, ge=1, description="MB of the card that TensorRT may use while it builds an engine"
    )
    optimization_level: int = Field(
        default=3, ge=0, le=5, description="of TensorRT's builder: 0 builds fastest, 5 runs fastest"
    )
    cache: Path | None = Field(
        default=None, description="folder of calibrations and engines; default: `tensorrt` in the folder of [state]"
    )
    algorithm: Literal["minmax", "entropy", "percentile"] = Field(
        default="minmax", description="how the ranges of INT8 are found: minmax entropy percentile"
    )
    # The accuracy gate of INT8 on texts held back: mean cosine to fp32, share of fp32's first ten neighbours found too,
    # share of the linear layers' products in 8 bits.
    least_cosine: ClassVar[float] = 0.99
    least_overlap: ClassVar[float] = 0.90
    least_int8_share: ClassVar[float] = 0.5


class SyncSettings(Section):
    page_rows: int = Field(default=1000, ge=1, le=100_000, description="rows read at once")
    window: int = Field(default=1000, ge=1, le=100_000, description="changed rows that are embedded together")
    readers: int = Field(
        default=2, ge=1, le=8, description="threads that read a large table in parallel, each a range of keys"
    )
    max_deletes: float = Field(
        default=0.2, ge=0, le=1, description="largest share of the stored rows one run may delete"
    )
    lease_wait: float = Field(default=60.0, ge=0, description="seconds to wait for another worker on the collection")
    longest_wait: Duration = Field(
        default=300.0, gt=0, description="longest time (5m, 1h) between two attempts of a job while HANA is unavailable"
    )
    give_up_after: Duration = Field(
        default=86_400.0, description="time (12h, 2d) after which a job that waits for HANA fails"
    )
    max_attempts: int = Field(
        default=6,
        ge=1,
        description="attempts at a row in quarantine, before only a change or a retry by request tries it again",
    )


class ApiSettings(Section):
    """The REST service and its limits."""

    host: str = Field(default="127.0.0.1", description="another than loopback only with [access]")
    port: int = Field(default=8000, ge=0, le=65535, description="0 picks a free one")
    max_body_bytes: int = Field(default=2 * 1024 * 1024, ge=1024)
    max_bodies_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="bytes of all request bodies in memory; beyond it HTTP 503",
    )
    max_inputs: int = Field(default=256, ge=1, le=65_536, description="texts in one /embed call")
    max_text_chars: int = Field(default=100_000, ge=1, description="characters of one text")
    max_k: int = Field(default=1000, ge=1, description="hits of one search")
    threads: int = Field(default=8, ge=1, le=128, description="requests that are worked on at once")
    max_wait: Duration = Field(
        default=10.0,
        gt=0,
        description="seconds (or 30s, 1m) that a request may wait for one of these threads; longer or expected longer "
        "waits are refused (HTTP 429)",
    )
    job_workers: int = Field(
        default=2,
        ge=0,
        le=32,
        description="jobs (sync, verify, retry, build) that `serve` runs at once; 0 leaves all to `owl-sap worker`",
    )
    run_schedules: bool = Field(default=True, description="`serve` starts the collections' scheduled syncs")
    timeout: Duration = Field(
        default=120.0, gt=0, description="seconds (or 2m) until the answer to a request must begin; then HTTP 503"
    )
    read_timeout: Duration = Field(
        default=30.0,
        gt=0,
        description="seconds that a client may take to send a request's head, to send its body, and to go on reading "
        "a large answer",
    )
    max_connections: int = Field(
        default=1024, ge=1, le=65_536, description="open connections; further ones get HTTP 503 and are closed"
    )
    shutdown_seconds: Duration = Field(
        default=5.0, gt=0, description="seconds for open requests and jobs to end at shutdown; then the process exits"
    )
    docs: bool = Field(default=True, description="serve /docs and /openapi.json")
    console: bool = Field(default=True, description="serve the console at / (docs/console.md)")
    tls_certificate: Path | None = Field(
        default=None, description="PEM file with the certificate and its chain: serve https, TLS 1.2 or later"
    )
    tls_key: Path | None = Field(default=None, description="PEM file with its private key, readable by its owner only")
    hsts: bool = Field(
        default=False, description="tell browsers to use https only for a year, for all ports of this host"
    )
    trusted_proxies: Networks = Field(
        default=(),
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted",
    )
    exit_when_stuck: bool = Field(
        default=False,
        description="exit with code 4 once the engine cannot recover, for a supervisor that restarts the process; "
        "without one /health/live turns 503",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ApiSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be set together")
        return self


class WorkerSettings(Section):
    """`owl-sap worker`, the background part alone."""

    concurrency: int = Field(default=2, ge=1, le=32, description="jobs that `owl-sap worker` runs at once")
    metrics_host: str = Field(default="127.0.0.1", description="where `owl-sap worker` answers GET /metrics")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="its port; 0 picks a free one; default: none"
    )
    max_jobs: int = Field(
        default=0,
        ge=0,
        description="jobs after which `owl-sap worker` exits with 0, for a supervisor to start a fresh one; 0: never",
    )
    heartbeat: Path | None = Field(
        default=None,
        description="file that `owl-sap worker` renews while it works, for `owl-sap health worker`; default: none",
    )


class StateSettings(Section):
    """The records of jobs."""

    path: Path | None = Field(
        default=None,
        description="folder of the job records, created if absent; default: the local store's folder, else `.owl-sap` "
        "beside owl-sap.toml",
    )
    keep_jobs: ClassVar[int] = 1000  # records of finished jobs
    keep_days: ClassVar[float] = 30.0  # days that records of finished jobs are kept
    max_queued: ClassVar[int] = 100  # jobs that may wait for a worker
    max_attempts: int = Field(default=5, ge=1, description="a job fails after its process has died so often")


class McpSettings(Section):
    """Tools for agents (docs/agents.md). `owl-sap mcp` offers them to the program that starts it, also without
    `http`."""

    http: bool = Field(
        default=False, description="the service also offers them at POST /mcp, to keys with the scope search"
    )
    write: bool = Field(default=False, description="also offer the tool start_sync, to keys with the scope sync")
    key: SecretStr | None = Field(
        default=None,
        description="API key or token whose rights `owl-sap mcp` uses; default: the operator's, who sees every row",
    )
    max_hits: ClassVar[int] = 50  # rows of one search by an agent
    max_chars: ClassVar[int] = 40_000  # characters of texts and metadata in one answer; longer ones are cut with a note


_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class SearchSettings(Section):
    """A reranker (docs/search.md)."""

    rerank: str = Field(
        default="off",
        description="off; /folder of a cross-encoder; or package.module:function, your own code",
    )
    rerank_depth: ClassVar[int] = 50  # how many of the best hits are reranked
    rerank_seconds: Duration = Field(
        default=2.0, gt=0, description="time limit of the reranker; after that the order stays unchanged"
    )

    @field_validator("rerank")
    @classmethod
    def _known(cls, rerank: str) -> str:
        if rerank == "off" or _FUNCTION.fullmatch(rerank) or _is_path(rerank):
            return rerank
        raise ValueError(
            "must be off, a folder or package.module:function; a folder begins with / or ./, a function is module:name"
        )

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
        seen: set[str] = set()
        for collection in collections:
            if collection.name in seen:
                raise ValueError(f'two collections are named "{collection.name}"; names must differ')
            seen.add(collection.name)
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
        """`file`: where the settings were read."""
        return self.tensorrt.cache or self.state_folder(file) / "tensorrt"

    @property
    def store_hana(self) -> HanaSettings:
        """The vectors' HANA: its own, or that of the rows."""
        return self.store.hana or self.hana

    @property
    def store_schema(self) -> str | None:
        return self.store.schema_name or self.store_hana.schema_name
