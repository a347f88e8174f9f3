"""Every Prometheus metric of the product, declared once. Base units; never a row, a text or a user in a label."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LONG = (0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0)


GPU_LABELS = ("index", "uuid", "name")


@dataclass(frozen=True, slots=True)
class GpuMetric:
    """One figure of each card. `field`: its name in GET /v1/gpu; `scale`: from the unit there to Prometheus' base unit;
    `more`: labels beside GPU_LABELS."""

    name: str
    documentation: str
    field: str
    scale: float = 1
    more: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        return self.name.endswith("_total")

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        labels = [*GPU_LABELS, *self.more]
        if self.counts:
            return CounterMetricFamily(self.name.removesuffix("_total"), self.documentation, labels=labels)
        return GaugeMetricFamily(self.name, self.documentation, labels=labels)


_PERCENT, _MEGA = 0.01, 1e6
_GPU_INFO = GpuMetric(
    "owl_sap_gpu_info",
    "The card, its compute capability and the driver; always 1",
    "compute_capability",
    more=("compute_capability", "driver_version", "cuda_version"),
)
_GPU_THROTTLE = GpuMetric(
    "owl_sap_gpu_throttle", "1 while the clock is held back for this reason", "throttle_reasons", more=("reason",)
)
_GPU_FIGURES = (
    GpuMetric(
        "owl_sap_gpu_utilization_ratio", "Share of the time in which a kernel ran", "utilization_percent", _PERCENT
    ),
    GpuMetric(
        "owl_sap_gpu_memory_utilization_ratio",
        "Share of the time in which memory was read or written",
        "memory_utilization_percent",
        _PERCENT,
    ),
    GpuMetric("owl_sap_gpu_memory_total_bytes", "Memory of the card", "memory_total_bytes"),
    GpuMetric("owl_sap_gpu_memory_used_bytes", "Memory in use, by all processes", "memory_used_bytes"),
    GpuMetric("owl_sap_gpu_memory_free_bytes", "Memory that is free", "memory_free_bytes"),
    GpuMetric("owl_sap_gpu_temperature_celsius", "Temperature", "temperature_celsius"),
    GpuMetric(
        "owl_sap_gpu_temperature_slowdown_celsius",
        "Temperature from which on the clock is lowered",
        "temperature_slowdown_celsius",
    ),
    GpuMetric("owl_sap_gpu_power_watts", "Power", "power_watts"),
    GpuMetric("owl_sap_gpu_power_limit_watts", "Power limit in force", "power_limit_watts"),
    GpuMetric("owl_sap_gpu_power_limit_default_watts", "Power limit by default", "power_limit_default_watts"),
    GpuMetric("owl_sap_gpu_power_limit_min_watts", "Lowest power limit to be set", "power_limit_min_watts"),
    GpuMetric("owl_sap_gpu_power_limit_max_watts", "Highest power limit to be set", "power_limit_max_watts"),
    GpuMetric("owl_sap_gpu_energy_joules_total", "Energy since the driver was loaded", "energy_joules"),
    GpuMetric("owl_sap_gpu_sm_clock_hertz", "Clock of the multiprocessors", "sm_clock_mhz", _MEGA),
    GpuMetric("owl_sap_gpu_sm_clock_max_hertz", "Highest clock of the multiprocessors", "sm_clock_max_mhz", _MEGA),
    GpuMetric("owl_sap_gpu_memory_clock_hertz", "Clock of the memory", "memory_clock_mhz", _MEGA),
    GpuMetric("owl_sap_gpu_memory_clock_max_hertz", "Highest clock of the memory", "memory_clock_max_mhz", _MEGA),
    GpuMetric("owl_sap_gpu_performance_state", "0 (fastest) to 15", "performance_state"),
    GpuMetric(
        "owl_sap_gpu_throttled_abnormally",
        "1 while heat or the power supply hold the clock back; a power limit does not count",
        "throttled_abnormally",
    ),
    GpuMetric(
        "owl_sap_gpu_pcie_generation", "PCIe generation of the link now; idle links fall back", "pcie_generation"
    ),
    GpuMetric("owl_sap_gpu_pcie_generation_max", "Highest PCIe generation of card and slot", "pcie_generation_max"),
    GpuMetric("owl_sap_gpu_pcie_width", "PCIe lanes in use", "pcie_width"),
    GpuMetric("owl_sap_gpu_pcie_width_max", "PCIe lanes that there are", "pcie_width_max"),
    GpuMetric("owl_sap_gpu_pcie_sent_bytes_per_second", "Sent by the card, over 20 ms", "pcie_sent_bytes_per_second"),
    GpuMetric(
        "owl_sap_gpu_pcie_received_bytes_per_second",
        "Received by the card, over 20 ms",
        "pcie_received_bytes_per_second",
    ),
    GpuMetric("owl_sap_gpu_ecc_enabled", "1 where memory errors are corrected", "ecc_enabled"),
    GpuMetric("owl_sap_gpu_ecc_corrected_errors", "Since the driver was loaded", "ecc_corrected_errors"),
    GpuMetric("owl_sap_gpu_ecc_uncorrected_errors", "Since the driver was loaded", "ecc_uncorrected_errors"),
    GpuMetric("owl_sap_gpu_ecc_corrected_errors_lifetime", "In the life of the card", "ecc_corrected_errors_lifetime"),
    GpuMetric(
        "owl_sap_gpu_ecc_uncorrected_errors_lifetime", "In the life of the card", "ecc_uncorrected_errors_lifetime"
    ),
    GpuMetric("owl_sap_gpu_retired_pages", "Pages of memory out of use (up to Turing)", "retired_pages"),
    GpuMetric("owl_sap_gpu_retired_pages_pending", "1 when some wait for a restart", "retired_pages_pending"),
    GpuMetric("owl_sap_gpu_remapped_rows", "Rows of memory replaced (Ampere and later)", "remapped_rows"),
    GpuMetric("owl_sap_gpu_remapped_rows_pending", "1 when some wait for a restart", "remapped_rows_pending"),
    GpuMetric("owl_sap_gpu_fan_ratio", "Speed of the fan; a T4 has none", "fan_percent", _PERCENT),
    GpuMetric("owl_sap_gpu_persistence_mode", "1 where the driver stays loaded", "persistence_mode"),
    GpuMetric("owl_sap_gpu_processes", "Processes that compute on the card", "compute_processes"),
)
GPU_METRICS = (_GPU_INFO, *_GPU_FIGURES, _GPU_THROTTLE)
"""Present for the cards that there are, and as far as they tell."""
DRIVER_ANSWERS = ("owl_sap_gpu_driver_answers", "0 while the NVIDIA driver hangs; absent without a card")


class _Gpus(Collector):
    """Asks at each scrape. `read` gives what GET /v1/gpu answers, in bounded time."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, Any]] | None = None

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        return [metric.family() for metric in GPU_METRICS]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        nothing: Mapping[str, Any] = {"devices": (), "answered": True}
        found = nothing if self.read is None else self.read()
        if found["devices"] or not found["answered"]:
            yield GaugeMetricFamily(*DRIVER_ANSWERS, value=float(found["answered"]))
        for metric in GPU_METRICS:
            family = metric.family()
            for device in found["devices"]:
                labels = [_label(device[label]) for label in GPU_LABELS]
                for more, value in _figures(metric, device, found):
                    family.add_metric([*labels, *more], value)
            if family.samples:
                yield family


def _figures(
    metric: GpuMetric, device: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Values of one card for a metric, each with what its further labels say."""
    if metric is _GPU_INFO:
        told = {**found, **device}
        yield tuple(_label(told[label]) for label in metric.more), 1.0
    elif metric is _GPU_THROTTLE:
        yield from (((reason,), 1.0) for reason in device[metric.field] or ())
    elif device[metric.field] is not None:
        yield (), device[metric.field] * metric.scale


def _label(value: object) -> str:
    return "" if value is None else str(value)


class Metrics:
    """One set of metrics with a registry of its own, so that tests and several services do not collide."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="owl_sap", registry=registry)
        self.build_info = Gauge(
            "owl_sap_build_info", "Version and model; always 1", ["version", "model"], registry=registry
        )
        self.rows_synced = Counter(
            "owl_sap_rows_synced", "Source rows by what became of them", ["collection", "outcome"], registry=registry
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
        self.sync_lag = Gauge(
            "owl_sap_sync_lag_seconds", "Time since the last complete sync", ["collection"], registry=registry
        )
        self.quarantined = Gauge(
            "owl_sap_quarantined_rows", "Rows set aside at the last look", ["collection"], registry=registry
        )
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
        self.embed_refused = Counter(
            "owl_sap_embed_refused", "Requests refused because they would have waited too long", registry=registry
        )
        self.query_cache = Counter(
            "owl_sap_query_cache", "Search texts looked up in the cache of vectors", ["result"], registry=registry
        )
        self.query_cache_bytes = Gauge(
            "owl_sap_query_cache_bytes", "Memory of the cache of search texts' vectors", registry=registry
        )
        self.search_seconds = Histogram(
            "owl_sap_search_seconds",
            "Duration of a search by stage (embed, store, rank)",
            ["collection", "stage"],
            buckets=_FAST,
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
        self.gpu_missing = Gauge(
            "owl_sap_gpu_wanted_but_missing",
            "1 while a GPU is asked for (USE_GPU=true) and the CPU computes",
            registry=registry,
        )
        self._gpus = _Gpus()
        registry.register(self._gpus)

    def watch_gpus(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Tell of the cards from now on. `read` gives what GET /v1/gpu answers; it must not take long."""
        self._gpus.read = read

    def synced_at(self, collection: str, timestamp: float) -> None:
        """The lag grows by itself from this POSIX time on."""
        self.sync_lag.labels(collection).set_function(lambda: max(0.0, time.time() - timestamp))

    def render(self) -> bytes:
        return generate_latest(self.registry)
