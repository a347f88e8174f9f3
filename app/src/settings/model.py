"""Every setting: its name, default and unit, as one frozen model. Where the values come from is `sources`'s business.
Knows the connector's vocabulary (names, tables), never a connection, an engine or HTTP.
"""

from __future__ import annotations

import difflib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from app.src.settings import durations
from app.src.settings.access import AccessSettings
from app.src.settings.durations import Duration
from app.src.settings.section import Columns, Networks
from app.src.settings.section import Section as _Section
from connector.model import ChangeSpec, ChunkSpec, CollectionSpec, TableRef

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _claim_path(value: Any) -> Any:
    """One claim may be written as a plain string; it is a name as it stands, with its dots."""
    return (value,) if isinstance(value, str) else value


ClaimPath = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_claim_path)
]


class HanaSettings(_Section):
    """How to reach one HANA. Encryption and certificate validation are on unless switched off by name."""

    host: str | None = Field(default=None, description="host name; an IP address is not matched against certificates")
    port: int = Field(default=443, ge=1, le=65535, description="443 for HANA Cloud, 3NN13 or 3NN15 on-premise")
    user: str | None = None
    password: SecretStr | None = None
    userkey: str | None = Field(
        default=None, description="key of SAP's secure user store, instead of host, user and password"
    )
    schema_name: str | None = Field(default=None, alias="schema", description="current schema of the sessions")
    encrypt: bool = True
    validate_certificate: bool = True
    trust_store: str | None = Field(default=None, description="path of a PEM file, or the PEM itself")
    host_name_in_certificate: str | None = None
    connect_timeout: float = Field(default=10.0, gt=0, description="seconds")
    communication_timeout: float = Field(default=120.0, gt=0, description="seconds a statement may stay unanswered")
    pool_size: int = Field(default=8, ge=1, le=256, description="connections at most, one per thread")

    @property
    def configured(self) -> bool:
        return bool(self.host or self.userkey)


class StoreSettings(_Section):
    """Where the vectors live."""

    kind: Literal["hana", "local"] = "hana"
    path: Path | None = Field(default=None, description="folder of the local store, created if absent")
    schema_name: str | None = Field(default=None, alias="schema", description="default: [hana] schema")
    hana: HanaSettings | None = Field(default=None, description="another HANA for the vectors; default: [hana]")
    scan: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="where a local store searches; auto: on the card that the model computes on, if it does",
    )

    @model_validator(mode="after")
    def _local_has_path(self) -> StoreSettings:
        if self.kind == "local" and self.path is None:
            raise ValueError('kind = "local" needs path = "<folder>" (created if absent)')
        return self


class EmbeddingSettings(_Section):
    """Which model, and what it may use of the machine."""

    model: str = Field(default=DEFAULT_MODEL, description='packaged name, folder, hub id, or "hash:384" for tests')
    revision: str | None = Field(default=None, description="pinned revision of a hub model")
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16", "int8"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:<n>")
    expect_gpu: bool = Field(
        default=False, description="no CUDA device is a warning at each start, a metric and a fault in doctor"
    )
    memory_fraction: float = Field(default=0.8, gt=0, le=1, description="share of the card's memory to use")
    reserve_mb: int = Field(default=512, ge=0, description="MB of the card's memory left alone")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; default: torch's choice")
    max_wait: Duration = Field(
        default=10.0,
        gt=0,
        description="seconds (or 30s, 1m) that a search or a REST request may have to queue for the engine; beyond it "
        "is refused (HTTP 429)",
    )
    overlap: bool = Field(default=True, description="on a card: launch a batch while the one before it computes")
    pinned: bool = Field(default=True, description="on a card: copy by way of pinned memory")
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        default="auto", description="replay small batches from CUDA graphs; auto: where that measures faster"
    )
    query_cache_mb: int = Field(default=16, ge=0, description="MB for the vectors of search texts that came before")
    preallocate: bool = Field(
        default=False, description="compute one largest batch at loading, so that the card's memory is taken then"
    )
    clear_cache: bool = Field(
        default=False, description="give memory back to the card after each large batch; for cards that others share"
    )
    cudnn_benchmark: bool = Field(
        default=False, description="let cuDNN try its convolutions; text encoders have none, so nothing gets faster"
    )
    profiling: bool = Field(default=False, description="NVTX ranges around the engine's steps, for a profiler")

    @property
    def hashing(self) -> bool:
        """Is this the test embedder, which needs no torch?"""
        return self.model.startswith("hash:")


class TensorRtSettings(_Section):
    """INT8 and fp16 engines on a card, through ONNX Runtime and TensorRT."""

    enabled: bool = Field(
        default=False,
        description="compute through TensorRT on a card; in INT8 only where the accuracy gate let that through",
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
    least_cosine: float = Field(
        default=0.99, ge=0, le=1, description="the gate: mean cosine to fp32 that INT8 must reach on texts held back"
    )
    least_overlap: float = Field(
        default=0.90, ge=0, le=1, description="the gate: share of fp32's first ten neighbours that INT8 must find too"
    )
    least_int8_share: float = Field(
        default=0.5, ge=0, le=1, description="the gate: share of the linear layers' products that must be in 8 bits"
    )


class SyncSettings(_Section):
    page_rows: int = Field(default=1000, ge=1, le=100_000, description="rows read in one page")
    window: int = Field(default=1000, ge=1, le=100_000, description="changed rows that are embedded together")
    readers: int = Field(
        default=2, ge=1, le=8, description="threads that read a large table at once, each a range of its keys"
    )
    max_deletes: float = Field(
        default=0.2, ge=0, le=1, description="largest share of the stored rows one run may delete"
    )
    lease_wait: float = Field(default=60.0, ge=0, description="seconds to wait for another worker on the collection")
    longest_wait: Duration = Field(
        default=300.0, gt=0, description="seconds (or 5m, 1h) at most between two attempts of a job while HANA is away"
    )
    give_up_after: Duration = Field(
        default=86_400.0, description="seconds (or 12h, 2d) after which a job that waits for HANA fails"
    )
    max_attempts: int = Field(
        default=6, ge=1, description="at a row in quarantine, before it is left alone until it changes or is retried"
    )


class ApiSettings(_Section):
    """The REST service and its limits."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 picks a free one")
    max_body_bytes: int = Field(default=2 * 1024 * 1024, ge=1024)
    max_bodies_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="bytes of all bodies that are being received or worked on; beyond it HTTP 503",
    )
    max_inputs: int = Field(default=256, ge=1, description="texts in one /embed call")
    max_text_chars: int = Field(default=100_000, ge=1, description="characters of one text")
    max_k: int = Field(default=1000, ge=1, description="hits of one search")
    threads: int = Field(default=8, ge=1, le=128, description="requests that may wait for engine or store at once")
    max_wait: Duration = Field(
        default=10.0,
        gt=0,
        description="seconds (or 30s, 1m) that a request may wait for one of these threads; who would wait longer, as "
        "far as can be told, is refused (HTTP 429)",
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
        description="seconds that a client may take for a request's head, for its body, and for reading on where an "
        "answer does not fit into the buffers",
    )
    max_connections: int = Field(
        default=1024, ge=1, le=65_536, description="connections at once; further ones get HTTP 503 and are closed"
    )
    shutdown_seconds: Duration = Field(
        default=5.0, gt=0, description="seconds that open requests and jobs have to end; then the process ends anyway"
    )
    docs: bool = Field(default=True, description="serve /docs and /openapi.json")
    console: bool = Field(default=True, description="serve the console at / (docs/console.md)")
    tls_certificate: Path | None = Field(
        default=None, description="PEM file with the certificate and its chain: serve https, TLS 1.2 or later"
    )
    tls_key: Path | None = Field(default=None, description="PEM file with its private key, for its owner's eyes only")
    hsts: bool = Field(
        default=False, description="tell browsers to come back by https only, for a year; for all ports of this name"
    )
    trusted_proxies: Networks = Field(
        default=(),
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed",
    )
    exit_when_stuck: bool = Field(
        default=False,
        description="end with exit code 4 once the engine is beyond help, for a supervisor that starts it again "
        "(without one: /health/live turns 503)",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ApiSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: the one is no use without the other")
        return self


class WorkerSettings(_Section):
    """`owl-sap worker`, the background part alone."""

    concurrency: int = Field(default=2, ge=1, le=32, description="jobs that `owl-sap worker` runs at once")
    metrics_host: str = Field(default="127.0.0.1", description="where `owl-sap worker` answers GET /metrics")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="the port of that; 0 picks a free one; default: it listens nowhere"
    )
    max_jobs: int = Field(
        default=0,
        ge=0,
        description="jobs after which `owl-sap worker` ends with 0, for whoever supervises it to start a fresh one; "
        "0: it never does",
    )
    heartbeat: Path | None = Field(
        default=None,
        description="file that `owl-sap worker` renews while it works, for `owl-sap health worker`; default: none",
    )


class StateSettings(_Section):
    """Where the records of jobs are kept, and how many."""

    path: Path | None = Field(
        default=None,
        description="folder of the job records, created if absent; default: the local store's folder, else `.owl-sap` "
        "beside owl-sap.toml",
    )
    keep_jobs: int = Field(default=1000, ge=1, description="records kept of jobs that are over")
    keep_days: float = Field(default=30.0, gt=0, description="days they are kept")
    max_queued: int = Field(default=100, ge=1, description="jobs that may wait for a free worker")
    max_attempts: int = Field(
        default=5, ge=1, description="a job is given up after its process has died so often while it ran"
    )


class ChunkSettings(_Section):
    max_tokens: int | None = Field(
        default=None, ge=8, description="without special tokens; default: all the model takes"
    )
    overlap: int = Field(default=32, ge=0, description="tokens that a piece shares with the one before it")

    @model_validator(mode="after")
    def _overlap_fits(self) -> ChunkSettings:
        if self.max_tokens is not None and self.overlap >= self.max_tokens:
            raise ValueError(f"overlap {self.overlap} must be smaller than max_tokens {self.max_tokens}")
        return self


METHODS = ("full", "watermark", "log", "rowid")


class ChangesSettings(_Section):
    """How changes of the source are found."""

    method: Literal["full", "watermark", "log", "rowid"] = Field(
        default="full",
        description="full compares every row; watermark reads what a column says is new; log reads what triggers wrote "
        'down (owl-sap changes install); rowid compares "$rowid$"',
    )
    column: str | None = Field(
        default=None, description="watermark: the column that every change sets: a time in UTC, or a rising number"
    )
    delay: str = Field(
        default="30s",
        description="watermark: longer than the longest transaction that writes; younger changes wait for the next run",
    )
    reconcile: str = Field(
        default="24h", description="longest time between two comparisons of everything, which no method can do without"
    )
    hash: Literal["client", "server"] = Field(
        default="client", description="full: server lets HANA hash the rows, so that unchanged ones are not moved"
    )
    log: str | None = Field(default=None, description="log: SCHEMA.TABLE; default: OWL_LOG_<NAME> beside the source")

    @model_validator(mode="before")
    @classmethod
    def _table_of_keys(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(f'write it as a table: changes = {{ method = "{given}" }}')
        return given

    @field_validator("method", mode="before")
    @classmethod
    def _known(cls, method: Any) -> Any:
        if method not in METHODS:
            near = difflib.get_close_matches(str(method), METHODS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(METHODS)}"
            raise ValueError(f'"{method}" is no method to find changes; {hint}')
        return method

    @field_validator("delay")
    @classmethod
    def _length(cls, delay: str) -> str:
        durations.seconds(delay)
        return delay

    @field_validator("reconcile")
    @classmethod
    def _due(cls, reconcile: str) -> str:
        never = reconcile.strip().lower() in ("0", "never", "off", "none", "")
        if never or durations.seconds(reconcile) <= 0:
            raise ValueError(
                f'reconcile = "{reconcile}" would never compare everything, and every method misses something: '
                'deletions, late commits, triggers that were switched off. Write a length of time: "24h", "7d"'
            )
        return reconcile

    @field_validator("log")
    @classmethod
    def _table(cls, log: str | None) -> str | None:
        if log is not None:
            TableRef.parse(log)
        return log

    @model_validator(mode="after")
    def _fits(self) -> ChangesSettings:
        if self.method == "watermark" and not self.column:
            raise ValueError('method = "watermark" needs column = "...", the column that every change sets')
        for name, given, method in (
            ("column", self.column is not None, "watermark"),
            ("log", self.log is not None, "log"),
            ("hash", self.hash == "server", "full"),
        ):
            if given and self.method != method:
                raise ValueError(f'{name} belongs to method = "{method}", and method is "{self.method}"')
        return self

    def spec(self) -> ChangeSpec:
        return ChangeSpec(
            method=self.method,
            column=self.column,
            delay=durations.seconds(self.delay),
            reconcile=durations.seconds(self.reconcile),
            hash=self.hash,
            log=None if self.log is None else TableRef.parse(self.log),
        )


class ScheduleSettings(_Section):
    """When a collection is synced by itself."""

    every: Duration | None = Field(default=None, description='span from start to start: "5m", "1h30m"')
    cron: str | None = Field(default=None, description='minute hour day month weekday: "15 2 * * *"')
    timezone: str = Field(default="UTC", description="of `cron`: a name such as Europe/Berlin; summer time is observed")
    jitter: Duration = Field(default=0.0, description="start up to so many seconds (or 30s) later, by chance")

    @field_validator("every")
    @classmethod
    def _not_too_often(cls, every: float | None) -> float | None:
        if every is not None and every < 1:
            raise ValueError('every must be at least "1s"')
        return every

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, cron: str | None) -> str | None:
        if cron is None:
            return None
        if len(cron.split()) != 5:
            raise ValueError(f"{cron!r} is no cron line: it has five fields, minute hour day month weekday")
        try:
            next(CronSim(cron, datetime.now(UTC)))
        except CronSimError as error:
            raise ValueError(f"{cron!r} is no cron line: {str(error)[:1].lower()}{str(error)[1:]}") from None
        except StopIteration:
            raise ValueError(f"{cron!r} names a day that never comes") from None
        return cron

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, timezone: str) -> str:
        try:
            ZoneInfo(timezone)
        except (KeyError, OSError, ValueError):
            raise ValueError(_NO_ZONE.format(timezone)) from None
        return timezone

    @model_validator(mode="after")
    def _one_of(self) -> ScheduleSettings:
        if (self.every is None) == (self.cron is None):
            raise ValueError('a schedule has either every = "5m" or cron = "15 2 * * *"')
        if self.every is not None and "timezone" in self.model_fields_set:
            raise ValueError("timezone belongs to cron; every counts seconds and knows none")
        return self


_NO_ZONE = "{!r} is no time zone; names are those of the IANA database, such as Europe/Berlin"


class CollectionSettings(_Section):
    """One `[[collections]]` block."""

    name: str
    source: str = Field(description='SCHEMA.TABLE; parts literal, case kept; quote a part with a dot: S."a.b"')
    template: str = Field(min_length=1, description='"{MAKTX}. {LTEXT}"; {"/BIC/TXT"} for odd names')
    key: Columns = Field(default=(), description="key columns; default: the primary key")
    where: str | None = Field(default=None, description="your own SQL condition, sent as it stands")
    metadata: Columns = ()
    row_rights: dict[str, ClaimPath] = Field(
        default={},
        description="metadata column = claim of who asks: only rows with its value, or one of its values, are found; "
        'a claim inside another is a list: MANDT = ["realm_access", "mandt"]',
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="a model of its own: packaged name, folder or hub id; default: [embedding] model",
    )
    changes: ChangesSettings = ChangesSettings()
    chunk: ChunkSettings = ChunkSettings()
    schedule: ScheduleSettings | None = None
    switch: Literal["manual", "auto"] = Field(
        default="manual",
        description="another model is built beside the one that serves; auto: it serves once it is complete and proved",
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name) or len(name) > 100:
            raise ValueError(f"{name!r} is no collection name: letters, digits, - and _, at most 100 characters")
        return name

    @field_validator("source")
    @classmethod
    def _table(cls, source: str) -> str:
        TableRef.parse(source)
        return source

    @model_validator(mode="after")
    def _rights_are_kept(self) -> CollectionSettings:
        """What rights go by must be in the metadata, under a name that no other column can get or have had."""
        for column in self.row_rights:
            if column not in self.metadata:
                declared = ", ".join((*self.metadata, column))
                raise ValueError(
                    f'row_rights names the column "{column}", which is not declared in metadata: write '
                    f"metadata = [{declared}] and sync"
                )
            alike = [each for each in self.metadata if each != column and _may_meet(each, column)]
            if alike:
                raise ValueError(
                    f'row_rights names the column "{column}", and the metadata column "{alike[0]}" becomes the same '
                    "name without its odd characters: rename one of them in a view"
                )
        return self

    def spec(self) -> CollectionSpec:
        return CollectionSpec(
            name=self.name,
            source=TableRef.parse(self.source),
            template=self.template,
            key=self.key,
            where=self.where,
            metadata=self.metadata,
            chunk=ChunkSpec(self.chunk.max_tokens, self.chunk.overlap),
            changes=self.changes.spec(),
        )


_ODD = re.compile(r"[^A-Za-z0-9_]")


def _may_meet(one: str, other: str) -> bool:
    """Whether two columns may be given the same name in the metadata (`connector.document.metadata_names`)."""
    if not _ODD.search(one) and not _ODD.search(other):
        return False
    first, second = (re.sub(r"(_\d+)+$", "", _ODD.sub("_", name).strip("_")) for name in (one, other))
    return first == second


class Settings(_Section):
    """Everything the operator can set. Made by `sources.load`, or directly in tests."""

    hana: HanaSettings = HanaSettings()
    store: StoreSettings = StoreSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    tensorrt: TensorRtSettings = TensorRtSettings()
    sync: SyncSettings = SyncSettings()
    api: ApiSettings = ApiSettings()
    access: AccessSettings = AccessSettings()
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

    def embedding_of(self, collection: str) -> EmbeddingSettings:
        """The section [embedding], with the collection's own model where it has one; what pins the other does not
        hold for that."""
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
        """The connection of the vectors: its own, or that of the rows."""
        return self.store.hana or self.hana

    @property
    def store_schema(self) -> str | None:
        return self.store.schema_name or self.store_hana.schema_name
