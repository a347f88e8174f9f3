"""Every setting with its default, unit and description, as one frozen model."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork, SecretStr, field_validator, model_validator

from app.src.settings.collections import CollectionSettings
from app.src.settings.section import Columns, Duration, Joined, Section, Split, setting
from connector.model import IN_DATABASE

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_OF_FOLDERS = ("revision", "weights_sha256", "query_prompt", "document_prompt")  # settings of models with files
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
    vector_type: Literal["real", "half"] = setting("real", "of new tables in HANA; half: HALF_VECTOR, half the memory")
    scan: Literal["auto", "cpu", "gpu"] = setting("auto", "where a local store searches; auto: on the model's card")

    @model_validator(mode="after")
    def _local_has_path(self) -> StoreSettings:
        if self.kind == "local" and self.path is None:
            raise ValueError('kind = "local" needs path = "<folder>" (created if absent)')
        if self.kind == "local" and self.vector_type == "half":
            raise ValueError('vector_type = "half" needs kind = "hana"')
        return self


class EmbeddingSettings(Section):
    """The model, and its use of the machine."""

    model: str = setting(
        DEFAULT_MODEL, 'packaged name, folder, cached hub id, "hana:MODEL" (HANA embeds), or "hash:384" for tests'
    )
    remote_source: str | None = setting(None, "of hana:MODEL: HANA's remote source to SAP AI Core", min_length=1)
    cache: Path | None = setting(None, "folder of converted packaged models; default: ~/.cache/owl-sap/models")
    revision: str | None = setting(None, "pinned revision of a hub model")
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    query_prompt: str | None = setting(None, 'put before each search text; default: the model\'s own; "" for none')
    document_prompt: str | None = setting(None, 'put before each stored text; default: the model\'s own; "" for none')
    precision: Precision = setting("auto", "auto: the fastest accurate one on the device")
    device: Annotated[str, Joined] = setting(
        "auto",
        'auto, cpu, cuda or cuda:<n>; several cards: ["cuda:0", "cuda:1"] or all',
        pattern=r"^(auto|all|(cpu|cuda)(:\d+)?(, ?(cpu|cuda)(:\d+)?)*)$",
    )
    expect_gpu: bool = setting(False, "a missing GPU is a warning at each start, a metric and a fault in doctor")
    memory_fraction: float = setting(0.8, "share of the card's memory to use", gt=0, le=1)
    reserve_mb: int = setting(512, "MB of the card's memory left free", ge=0)
    experimental_kernels: bool = setting(False, "try fused kernels on a card; no card has run them yet (docs/gpu.md)")
    threads: int | None = setting(None, "CPU threads; default: torch's choice", ge=1)
    tokenizer_workers: int | None = setting(
        None, "processes that tokenise; default: none on a CPU, up to 4 on a card", ge=0, le=64
    )
    max_wait: Duration = setting(10.0, "longest wait (30s, 1m) of a request for the engine; then HTTP 429", gt=0)
    query_cache_mb: int = setting(16, "MB for the vectors of recent search texts", ge=0)

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU, or HANA, computes whatever cards there are."""
        return self.hashing or self.in_hana or self.device.startswith("cpu")

    @property
    def on_named_card(self) -> bool:
        return self.device == "all" or self.device.startswith("cuda")

    @property
    def in_hana(self) -> bool:
        """Whether HANA computes the model, so that torch is not needed."""
        return self.model.startswith(IN_DATABASE)

    @property
    def hashing(self) -> bool:
        """Whether this is the test embedder, which needs no torch."""
        return self.model.startswith("hash:")


class TensorRtSettings(Section):
    """INT8 and fp16 engines on a card, through ONNX Runtime and TensorRT."""

    enabled: bool = setting(False, "compute with TensorRT on a card; auto takes INT8 that passes the gate, CPUs too")
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
    rows_stay: bool = setting(True, "HANA's own models: HANA compares and writes rows that it can render itself")


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


UNLIMITED = "unlimited"
_RATE = re.compile(r"[1-9]\d{0,8}/(second|minute|hour|day)")


def check_rate(rate: str) -> str:
    if rate != UNLIMITED and not _RATE.fullmatch(rate):
        raise ValueError(f'invalid rate {rate!r}: write "600/minute" (second, minute, hour, day), or "{UNLIMITED}"')
    return rate


Rate = Annotated[str, AfterValidator(check_rate)]  # a number per unit of time: "600/minute"

# No algorithm with a shared secret: a service that can verify such a token could also create one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# What a name in a token may grant: a scope, or every row.
Meaning = Literal["embed", "search", "sync", "admin", "metrics", "every_row"]


def _pairs(value: Any) -> Any:
    """Parse a variable such as `Viewer=search, Operator=sync`."""
    if not isinstance(value, str):
        return value
    parts = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(separator for _, separator, _ in parts):
        raise ValueError('write it like "Viewer=search, Operator=sync"')
    return {name.strip(): meaning.strip() for name, _, meaning in parts}


Meanings = Annotated[dict[str, Meaning], BeforeValidator(_pairs)]


@lru_cache(256)
def is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return host is not None and ipaddress.ip_address(host).is_loopback
    return False


def check_address(address: str, danger: str) -> str:
    """Return the address of a server to call. Raises ValueError unless it is plain and encrypted; `danger` says why."""
    parts = urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname)):
        raise ValueError(f"must begin with https:// (http:// only on loopback): {danger}")
    try:
        plain = parts.hostname and parts.port != 0 and not (parts.username or parts.password or parts.fragment)
    except ValueError:
        plain = False
    if not plain:
        raise ValueError("must be a plain address: https://host:443/path, without user, password and #fragment")
    return address


class JwtSettings(Section):
    """Tokens (JWT) of one issuer. Their keys' address is configured here, never taken from a token."""

    preset: Literal["ias", "xsuaa"] | None = setting(None, "SAP's issuers: docs/access.md")
    issuer: str | None = setting(None, "claim iss, exactly; with a preset the address of the tenant")
    jwks_url: str | None = setting(None, "the issuer's keys: https, or http on loopback; default: the preset's")
    jwks_path: Path | None = setting(None, "the same from a file, read again when it changes; nothing is fetched then")
    audience: Columns = setting((), "claim aud must hold one of these; xsuaa: xs_appname by itself")
    algorithms: Annotated[tuple[Algorithm, ...], Split] = setting(("RS256", "ES256"), "signatures", min_length=1)
    scope_claim: str | None = setting(None, "a list or words; a.b looks inside; default: scope (ias: groups)")
    scopes: Meanings = setting({}, 'names there and their scopes: { Viewer = "search" }; default: our own names')
    tenant: str | None = setting(None, "claim zid (xsuaa) or app_tid (ias), exactly")
    tenant_claim: str | None = setting(None, "where the tenant is; default: the preset's")
    xs_appname: str | None = setting(None, 'xsuaa: name of the application, such as "owl!t1234"')
    leeway: ClassVar[float] = 30.0  # allowed clock difference in seconds
    fetch_seconds: ClassVar[float] = 5.0  # for the connection and for each read of the keys

    @field_validator("jwks_url")
    @classmethod
    def _encrypted(cls, address: str | None) -> str | None:
        return None if address is None else check_address(address, "forged keys allow forged tokens")

    @model_validator(mode="after")
    def _complete(self) -> JwtSettings:
        if not self.issuer or self.issuer != self.issuer.strip():
            raise ValueError("issuer is missing, or has blanks around it: name the issuer whose tokens are accepted")
        if self.jwks_url is not None and self.jwks_path is not None:
            raise ValueError("jwks_url and jwks_path are both set; keep one of them")
        if self.preset is None and self.jwks_url is None and self.jwks_path is None:
            raise ValueError("jwks_url or jwks_path is missing: name the issuer's keys")
        if self.preset is not None and not self.issuer.startswith("https://"):
            raise ValueError(f"issuer must begin with https:// with preset {self.preset}")
        if self.preset == "xsuaa":
            if self.xs_appname is None:
                raise ValueError('preset = "xsuaa" needs xs_appname (`xsappname` of the binding)')
            if self.tenant is None:
                raise ValueError('preset = "xsuaa" needs tenant (`tenantid` of the binding): the claim zid')
        elif not self.audience:
            raise ValueError("audience is missing: tokens for other applications must be rejected")
        elif self.xs_appname is not None:
            raise ValueError('xs_appname belongs to preset = "xsuaa"')
        if self.preset == "ias" and not self.scopes:
            raise ValueError(
                'preset = "ias" needs scopes, such as { "Owl Viewers" = "search" }: groups belong to the whole tenant, '
                'and a group named "admin" must not give the scope admin'
            )
        if self.tenant is not None and self.preset is None and self.tenant_claim is None:
            raise ValueError("tenant needs tenant_claim: the name of its claim")
        return self


class AccessSettings(Section):
    """Authentication and limits. Without keys and jwt there is no authentication, and `serve` stays on loopback."""

    keys: Path | None = setting(None, "file of API keys, made by `owl-sap keys create`; read again when it changes")
    jwt: JwtSettings | None = None
    open_metrics: bool = setting(False, "GET /metrics without a credential")
    hosts: Columns = setting((), "without authentication: further accepted Host names, for a proxy that keeps them")
    audit: str | None = setting(None, 'file of the audit log, a JSON line for each request; "-": standard error')
    rate: Rate = setting("600/minute", 'requests of one key without its own rate (or "unlimited"); then HTTP 429')
    tokens: Rate = setting(UNLIMITED, 'tokens that one key may embed, such as "1000000/minute"; then HTTP 429')
    concurrency: int = setting(32, "concurrent requests of one key without its own limit; 0: unlimited", ge=0)
    failures: Rate = setting("30/minute", "failed authentications of one address; then HTTP 429 in place of 401")

    @property
    def configured(self) -> bool:
        """Whether requests need a credential."""
        return self.keys is not None or self.jwt is not None


class WorkerSettings(Section):
    """`owl-sap worker`, the background part alone."""

    concurrency: int = setting(2, "jobs that `owl-sap worker` runs at once", ge=1, le=32)
    metrics_host: str = setting("127.0.0.1", "where `owl-sap worker` answers GET /metrics")
    metrics_port: int | None = setting(None, "its port; 0 picks a free one; default: none", ge=0, le=65535)
    max_jobs: int = setting(0, "jobs after which `owl-sap worker` exits, to be restarted; 0: never", ge=0)
    heartbeat: Path | None = setting(None, "file that `owl-sap worker` renews, for `owl-sap health worker`")


class ScaleSettings(Section):
    """Embedding on a Ray cluster (docs/scale.md), by `owl-sap sync` and `generations --build`; never by `serve`."""

    engine: Literal["off", "ray"] = setting("off", "ray: `owl-sap sync` embeds on the workers of a Ray cluster")
    address: str = setting(
        "local",
        "local: a cluster of this machine that ends with the command; else HOST:PORT of a running one",
        pattern=r"^(local|\[[0-9a-fA-F:.]+\]:\d{1,5}|[^\s:/]+:\d{1,5})$",
    )
    token_path: Path | None = setting(None, "the cluster's token, readable by its owner only; default: Ray's own")
    actors: int = setting(0, "workers; 0: all that the GPUs hold, without GPUs one for each node", ge=0)
    gpus_per_actor: float = setting(1.0, "share of a GPU, and of `memory_fraction`, for each worker", gt=0, le=1)
    threads: int | None = setting(None, "CPU threads of a worker; default: a node's CPUs divided by its workers", ge=1)
    in_flight: int = setting(2, "blocks of texts at a worker at once; if it dies, others repeat them", ge=1, le=16)
    ranges: bool = setting(
        False, "workers read, compare and write too, with a store in HANA; each node needs these settings and the login"
    )
    windows: int = setting(3, "windows ([sync] window) that are embedded at once, written in order", ge=1, le=16)


class StateSettings(Section):
    """The records of jobs."""

    records: Literal["file", "store"] = setting(
        "file", "file: for the processes of one machine; store: in the HANA of [store], for several services"
    )
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
_IN_HANA = re.compile(r"hana:([A-Za-z0-9_.-]{1,128})")
_HEADER = re.compile("[!-~]+")


class SearchSettings(Section):
    """A reranker (docs/search.md)."""

    rerank: str = setting(
        "off",
        "off; /folder of a cross-encoder; package.module:function, your own code; hana:MODEL, computed by the store's "
        "HANA; or https://..., which gets search texts and rows",
    )
    rerank_model: str | None = setting(None, "model that an https reranker is asked for", min_length=1)
    rerank_key: SecretStr | None = setting(None, "key that an https reranker gets as Bearer token")
    rerank_depth: ClassVar[int] = 50  # how many of the best hits are reranked
    rerank_seconds: Duration = setting(2.0, "time limit of the reranker; after that the order stays unchanged", gt=0)

    @field_validator("rerank")
    @classmethod
    def _known(cls, rerank: str) -> str:
        if "://" in rerank:
            return check_address(rerank, "it gets search texts, rows and the key")
        if rerank == "off" or _IN_HANA.fullmatch(rerank) or _FUNCTION.fullmatch(rerank) or _is_path(rerank):
            return rerank
        raise ValueError(
            "must be off, a folder that begins with / or ./, package.module:function, hana:MODEL or https://..."
        )

    @field_validator("rerank_key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not _HEADER.fullmatch(key.get_secret_value()):
            raise ValueError("must be printable ASCII without blanks")
        return key

    @property
    def kind(self) -> Literal["off", "cross-encoder", "function", "hana", "http"]:
        if self.rerank == "off":
            return "off"
        if "://" in self.rerank:
            return "http"
        if _is_path(self.rerank):
            return "cross-encoder"
        return "hana" if _IN_HANA.fullmatch(self.rerank) else "function"

    @property
    def name(self) -> str:
        """The name of the reranker, for callers: a model's name, package.module:function, or a host."""
        if self.kind == "cross-encoder":
            return self.folder.name
        if self.kind == "http":
            return self.rerank_model or self.host
        return self.rerank.removeprefix("hana:")

    @property
    def folder(self) -> Path:
        """The folder of the cross-encoder."""
        return Path(self.rerank).expanduser()

    @property
    def host(self) -> str:
        """The host of the https reranker."""
        return urlsplit(self.rerank).hostname or ""


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
    scale: ScaleSettings = ScaleSettings()
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

    @model_validator(mode="after")
    def _records_in_hana(self) -> Settings:
        if self.state.records == "store" and self.store.kind != "hana":
            raise ValueError(
                'state.records = "store" needs a store in HANA ([store] kind = "hana"); with a local store use "file"'
            )
        return self

    @model_validator(mode="after")
    def _models_in_hana(self) -> Settings:
        """Check the models hana:MODEL: where the vectors are, and settings that belong to other models only."""
        named = {"[embedding]": self.embedding}
        named |= {f"[[collections]] {each.name}": self.embedding_of(each.name) for each in self.collections}
        for place, wanted in named.items():
            if not wanted.in_hana:
                if wanted.remote_source is not None:
                    raise ValueError(
                        f'{place}: remote_source belongs to a model "{IN_DATABASE}MODEL", not {wanted.model!r}'
                    )
                continue
            if wanted.model == IN_DATABASE:
                raise ValueError(
                    f'{place}: "hana:" names no model; write "hana:SAP_GXY.20250407" or another of HANA\'s'
                )
            given = [name for name in _OF_FOLDERS if getattr(wanted, name) is not None]
            if given:
                raise ValueError(f"{place}: {', '.join(given)} cannot be set for {wanted.model!r}, which HANA computes")
            if self.store.kind != "hana":
                raise ValueError(
                    f"{place}: {wanted.model!r} embeds in HANA, where the vectors must be too: set "
                    'store.kind = "hana", or name another model'
                )
            if self.scale.engine == "ray":
                raise ValueError(
                    f"{place}: {wanted.model!r} embeds in HANA, so a Ray cluster has nothing to do: set "
                    'scale.engine = "off"'
                )
        return self

    @property
    def synced(self) -> tuple[CollectionSettings, ...]:
        """The collections with a source table."""
        return tuple(collection for collection in self.collections if not collection.documents)

    def embedding_of(self, collection: str) -> EmbeddingSettings:
        """Return [embedding] with the collection's own model and prompts, if it has them; revision, SHA-256 and prompts
        of [embedding] do not apply to another model."""
        own = next((each for each in self.collections if each.name == collection), None)
        if own is None:
            return self.embedding
        changed: dict[str, str | None] = {}
        if own.model is not None and own.model != self.embedding.model:
            changed = {"model": own.model} | dict.fromkeys((*_OF_FOLDERS, "remote_source"))
        own_ones = {name: getattr(own, name) for name in ("query_prompt", "document_prompt", "remote_source")}
        changed |= {name: value for name, value in own_ones.items() if value is not None}
        return self.embedding.model_copy(update=changed) if changed else self.embedding

    def state_folder(self, file: Path | None) -> Path:
        """Return the folder of the job records. `file`: the settings file, None without one."""
        if self.state.path is not None:
            return self.state.path
        if self.store.kind == "local" and self.store.path is not None:
            return self.store.path
        return (file.parent if file is not None else Path()) / ".owl-sap"

    def tensorrt_cache(self, file: Path | None) -> Path:
        return self.state_folder(file) / "tensorrt"

    @property
    def store_hana(self) -> HanaSettings:
        """The HANA for the vectors: [store.hana] if set, else [hana]."""
        return self.store.hana or self.hana

    @property
    def store_schema(self) -> str | None:
        return self.store.schema_name or self.store_hana.schema_name
