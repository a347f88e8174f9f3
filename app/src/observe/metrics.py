"""Every Prometheus metric of the product, declared once. Base units; never a row, a text or a user in a label."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from app.src.observe import scraped
from connector.errors import DatabaseError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SYNC_OUTCOMES = ("succeeded", "stopped", "paused", "failed")
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LATE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_LONG = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0)


class Metrics:
    """One set of metrics with a registry of its own, so that tests and several services do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="owl_sap", registry=self.registry)
        self._declare_syncs(self.registry)
        self._declare_engine(self.registry)
        self._declare_requests(self.registry)
        self._declare_health(self.registry)
        self._declare_asked(self.registry)

    def _declare_syncs(self, registry: CollectorRegistry) -> None:
        self.build_info = Gauge(
            "owl_sap_build_info", "Version and model; always 1", ["version", "model"], registry=registry
        )
        self.rows_synced = Counter(
            "owl_sap_rows_synced", "Source rows by what became of them", ["collection", "outcome"], registry=registry
        )
        self.documents = Counter(
            "owl_sap_documents",
            "Documents that clients wrote, by what became of them (upserted, unchanged, deleted)",
            ["collection", "outcome"],
            registry=registry,
        )
        self.syncs = Counter(
            "owl_sap_syncs", "Sync runs by how they ended", ["collection", "outcome"], registry=registry
        )
        self.sync_seconds = Histogram(
            "owl_sap_sync_seconds", "Duration of a sync run", ["collection"], buckets=_LONG, registry=registry
        )
        self.stage_seconds = Counter(
            "owl_sap_sync_stage_seconds", "Time a stage of sync was busy", ["collection", "stage"], registry=registry
        )

    def _declare_engine(self, registry: CollectorRegistry) -> None:
        self.embedded_texts = Counter("owl_sap_embed_texts", "Texts embedded", registry=registry)
        self.embed_tokens = Counter("owl_sap_embed_tokens", "Tokens embedded by sync", registry=registry)
        self.embed_seconds = Histogram(
            "owl_sap_embed_seconds", "Duration of one embed call", buckets=_FAST, registry=registry
        )
        self.embed_queue = Gauge(
            "owl_sap_embed_queue_texts", "Texts that wait for the engine", ["lane"], registry=registry
        )
        self.embed_wait_seconds = Histogram(
            "owl_sap_embed_wait_seconds",
            "How long a request waited for the engine",
            ["lane"],
            buckets=_FAST,
            registry=registry,
        )
        self.embed_batch_texts = Histogram(
            "owl_sap_embed_batch_texts", "Texts computed together", ["lane"], buckets=_TEXTS, registry=registry
        )
        self.embed_batch_tokens = Histogram(
            "owl_sap_embed_batch_tokens",
            "Tokens of them, without padding",
            ["lane"],
            buckets=_TOKENS,
            registry=registry,
        )
        self.embed_refused = Counter(
            "owl_sap_embed_refused", "Requests refused because they would have waited too long", registry=registry
        )
        self.query_cache = Counter(
            "owl_sap_query_cache", "Search texts looked up in the cache of vectors", ["result"], registry=registry
        )
        self.query_cache_bytes = Gauge(
            "owl_sap_query_cache_bytes", "Memory of the cache of search texts' vectors", registry=registry
        )

    def _declare_requests(self, registry: CollectorRegistry) -> None:
        self.search_seconds = Histogram(
            "owl_sap_search_seconds",
            "Duration of a search by stage (embed, store, rerank, rank, passages)",
            ["collection", "stage"],
            buckets=_FAST,
            registry=registry,
        )
        self.reranks = Counter(
            "owl_sap_reranks",
            "Searches whose hits were to be reranked, by how that ended (done, failed, timeout)",
            ["collection", "outcome"],
            registry=registry,
        )
        self.hana_errors = Counter(
            "owl_sap_hana_errors", "Errors of HANA and its driver by code", ["code"], registry=registry
        )
        self.http_requests = Counter(
            "owl_sap_http_requests", "HTTP requests by route template", ["method", "route", "status"], registry=registry
        )
        self.audit_failures = Counter(
            "owl_sap_audit_failures",
            "Entries of the audit log that could not be written and are lost",
            registry=registry,
        )
        self.http_seconds = Histogram(
            "owl_sap_http_request_seconds", "Duration of HTTP requests", ["route"], buckets=_FAST, registry=registry
        )

        self.access_refused = Counter(
            "owl_sap_access_refused", "Requests refused for who asked, or from where", ["reason"], registry=registry
        )

    def _declare_health(self, registry: CollectorRegistry) -> None:
        self.gpu_missing = Gauge(
            "owl_sap_gpu_wanted_but_missing",
            "1 while a GPU is asked for (USE_GPU=true) and the CPU computes",
            registry=registry,
        )
        self.ready = Gauge(
            "owl_sap_ready",
            "1 where the last look at readiness found it well; absent until somebody has looked",
            ["check"],
            registry=registry,
        )
        self.ready_time = Gauge(
            "owl_sap_ready_timestamp_seconds", "When that look ended, as POSIX time; 0: never", registry=registry
        )

        self.loop_lag = Histogram(
            "owl_sap_event_loop_lag_seconds",
            "How late the service's event loop was, looked at twice a second: so long every request was held up",
            buckets=_LATE,
            registry=registry,
        )

    def _declare_asked(self, registry: CollectorRegistry) -> None:
        self._gpus = scraped.Gpus()
        self.engines = scraped.Asked(scraped.ENGINE_METRICS)
        self.engine_info = scraped.Asked((scraped.ENGINE_INFO,))
        self.collections = scraped.Asked(scraped.COLLECTION_METRICS)
        self.store = scraped.Asked(scraped.STORE_METRICS)
        self.jobs = scraped.Asked(scraped.JOB_METRICS)
        self.job_wait = scraped.Asked((scraped.JOB_WAIT,))
        self.job_progress = scraped.Asked(scraped.JOB_PROGRESS)
        self.certificate = scraped.Asked(scraped.CERTIFICATE_METRICS)
        for collector in (
            *(self._gpus, self.engines, self.engine_info, self.collections, self.store),
            *(self.jobs, self.job_wait, self.job_progress, self.certificate),
        ):
            registry.register(collector)

    def watch_gpus(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Tell of the cards from now on. `read` gives what GET /v1/gpu answers; it must not take long."""
        self._gpus.read = read

    def expect(self, collections: Iterable[str]) -> None:
        """Their syncs are counted from 0 on: no increase tells the first of a series that begins at 1. Alerts know by
        that which collections are synced at all."""
        for collection in collections:
            for outcome in SYNC_OUTCOMES:
                self.syncs.labels(collection, outcome)

    def tell_ready(self, checks: Mapping[str, bool]) -> None:
        """What a look at readiness has found."""
        for check, good in checks.items():
            self.ready.labels(check).set(good)
        self.ready_time.set(time.time())

    def count_error(self, error: BaseException) -> None:
        """Count errors of HANA and its driver by code."""
        if isinstance(error, DatabaseError):
            self.hana_errors.labels(str(error.code)).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
