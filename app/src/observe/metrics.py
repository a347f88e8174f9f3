"""Every Prometheus metric, declared once, here or in metrics.toml. Base units; labels contain no row, text or user.
Imports prometheus_client late, because it imports an HTTP server, in 50 ms."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from connector.errors import DatabaseError

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SYNC_OUTCOMES = ("succeeded", "stopped", "paused", "failed")
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LATE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)

_TABLES = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))
GPU_FIGURES: dict[str, dict[str, Any]] = _TABLES["gpu"]
_CARD = ("index", "uuid", "name")
# Metrics read at each scrape: name -> documentation, labels. Names that end in _total are counters.
FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (entry["documentation"], tuple(entry["labels"])) for name, entry in _TABLES["figures"].items()},
    **{name: (entry["documentation"], _CARD) for name, entry in GPU_FIGURES.items()},
}
Sample = tuple[str, tuple[str, ...], float | None]
"""Name, label values, and value; a sample with value None is left out."""


class Metrics:
    """Metrics with their own registry, so that tests and several services do not collide. `sources` are called at each
    scrape and must be fast."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        self.registry = CollectorRegistry()
        self.sources: dict[str, Callable[[], Iterable[Sample]]] = {}
        ProcessCollector(namespace="owl_sap", registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        outcome = ("collection", "outcome")
        self.build_info = gauge("owl_sap_build_info", "Version and model; always 1", ["version", "model"])
        self.rows_synced = counter("owl_sap_rows_synced", "Source rows by what became of them", outcome)
        self.documents = counter("owl_sap_documents", "Documents of clients: upserted, unchanged, deleted", outcome)
        self.syncs = counter("owl_sap_syncs", "Sync runs by how they ended", outcome)
        self.stage_seconds = counter("owl_sap_sync_stage_seconds", "Busy time of a stage", ["collection", "stage"])
        self.embedded_texts = counter("owl_sap_embed_texts", "Texts embedded")
        self.embed_queue = gauge("owl_sap_embed_queue_texts", "Texts that wait for the engine", ["lane"])
        self.embed_wait_seconds = histogram("owl_sap_embed_wait_seconds", "Wait for it", ["lane"], buckets=_FAST)
        batch = partial(histogram, labelnames=["lane"])
        self.embed_batch_texts = batch("owl_sap_embed_batch_texts", "Texts computed together", buckets=_TEXTS)
        self.embed_batch_tokens = batch("owl_sap_embed_batch_tokens", "Their tokens, unpadded", buckets=_TOKENS)
        self.embed_refused = counter("owl_sap_embed_refused", "Requests refused: the wait would be too long")
        self.query_cache = counter("owl_sap_query_cache", "Search texts looked up in the cache of vectors", ["result"])
        stages = "Duration of a search by stage (embed, store, rerank, rank, passages)"
        self.search_seconds = histogram("owl_sap_search_seconds", stages, ["collection", "stage"], buckets=_FAST)
        self.reranks = counter("owl_sap_reranks", "Searches to rerank: done, failed, timeout", outcome)
        self.hana_errors = counter("owl_sap_hana_errors", "Errors of HANA and its driver by code", ["code"])
        by_route = ["method", "route", "status"]
        self.http_requests = counter("owl_sap_http_requests", "HTTP requests by route template", by_route)
        self.http_seconds = histogram("owl_sap_http_request_seconds", "Their duration", ["route"], buckets=_FAST)
        self.audit_failures = counter("owl_sap_audit_failures", "Lost entries of the audit log")
        self.access_refused = counter("owl_sap_access_refused", "Requests refused for caller or origin", ["reason"])
        self.gpu_missing = gauge("owl_sap_gpu_wanted_but_missing", "1 while USE_GPU=true and the CPU computes")
        self.ready = gauge("owl_sap_ready", "1 where the last check passed; absent before the first", ["check"])
        self.ready_time = gauge("owl_sap_ready_timestamp_seconds", "When that check ended, as POSIX time; 0: never")
        lag = "Delay of the service's event loop, measured twice a second: it holds up every request"
        self.loop_lag = histogram("owl_sap_event_loop_lag_seconds", lag, buckets=_LATE)
        self.registry.register(self)

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        return list(_families().values())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        families = _families()
        for source in list(self.sources.values()):
            for name, labels, value in source():
                if value is not None:
                    families[name].add_metric(labels, value)
        return (family for family in families.values() if family.samples)

    def expect(self, collections: Iterable[str]) -> None:
        """Start these collections' sync counters at 0: `increase` misses the first count of a series that begins at 1.
        Alerts use the series to know which collections are synced."""
        for collection in collections:
            for outcome in SYNC_OUTCOMES:
                self.syncs.labels(collection, outcome)

    def tell_ready(self, checks: Mapping[str, bool]) -> None:
        for check, good in checks.items():
            self.ready.labels(check).set(good)
        self.ready_time.set(time.time())

    def count_error(self, error: BaseException) -> None:
        """Count errors of HANA and its driver by code."""
        if isinstance(error, DatabaseError):
            self.hana_errors.labels(str(error.code)).inc()

    def render(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class NoMetrics(Metrics):
    """Metrics that count nothing, for a process that serves none."""

    def __init__(self) -> None:
        self.sources = {}

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    return {
        name: CounterMetricFamily(name.removesuffix("_total"), documentation, labels=labels)
        if name.endswith("_total")
        else GaugeMetricFamily(name, documentation, labels=labels)
        for name, (documentation, labels) in FIGURES.items()
    }


def gpu_samples(found: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of the cards. `found`: the answer of GET /v1/gpu."""
    if found["devices"] or not found["answered"]:
        yield "owl_sap_gpu_driver_answers", (), float(found["answered"])
    for device in found["devices"]:
        card = tuple("" if device[label] is None else str(device[label]) for label in _CARD)
        for name, figure in GPU_FIGURES.items():
            value = device[figure["field"]]
            yield name, card, None if value is None else value * figure["factor"]
        for held in device["throttle"] or ():
            yield "owl_sap_gpu_throttle", (*card, held["reason"]), 1.0
