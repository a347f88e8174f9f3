"""What is asked of the NVIDIA driver, of the engines, of the store and of the job records at each scrape: the metrics
declared, and their collectors. Each is given what to ask, which must not take long. Knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

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


class Gpus(Collector):
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


# ------------------------------------------------------------------------- engines, collections, the store and the jobs


@dataclass(frozen=True, slots=True)
class Figure:
    """`field`: its name in what is read; what is None there is left out. A name that ends in _total counts."""

    name: str
    documentation: str
    field: str
    labels: tuple[str, ...] = ()

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        if self.name.endswith("_total"):
            return CounterMetricFamily(self.name.removesuffix("_total"), self.documentation, labels=self.labels)
        return GaugeMetricFamily(self.name, self.documentation, labels=self.labels)


Labels = tuple[str, ...]
Reading = Mapping[Labels, Mapping[str, float | None]]
"""By the values of the labels: figures by field."""

_ENGINE = ("model", "precision")
ENGINE_METRICS = (
    Figure("owl_sap_engine_texts_total", "Texts asked for", "texts", _ENGINE),
    Figure("owl_sap_engine_computed_texts_total", "Different ones among them, computed", "computed_texts", _ENGINE),
    Figure("owl_sap_engine_tokens_total", "Tokens computed, special ones included", "tokens", _ENGINE),
    Figure("owl_sap_engine_padded_tokens_total", "The same with padding: what was paid for", "padded_tokens", _ENGINE),
    Figure(
        "owl_sap_engine_padding_ratio",
        "Tokens computed per token that was in a text, since loading; 1 without waste",
        "padding_ratio",
        _ENGINE,
    ),
    Figure("owl_sap_engine_batches_total", "Batches computed", "batches", _ENGINE),
    Figure("owl_sap_engine_tokenize_seconds_total", "Time spent tokenising", "tokenize_seconds", _ENGINE),
    Figure("owl_sap_engine_compute_seconds_total", "Time spent computing", "compute_seconds", _ENGINE),
    Figure(
        "owl_sap_engine_out_of_memory_total",
        "Batches that ran out of memory and were computed again in smaller ones",
        "out_of_memory",
        _ENGINE,
    ),
    Figure(
        "owl_sap_engine_recomputed_rows_total",
        "Texts computed again in fp32, because their vectors were not finite",
        "recomputed",
        _ENGINE,
    ),
    Figure("owl_sap_engine_token_budget", "Tokens that a batch may have now", "token_budget", _ENGINE),
    Figure("owl_sap_engine_planned_tokens", "The same while memory does not run out", "planned_tokens", _ENGINE),
)
"""Present for the models that are loaded."""
ENGINE_INFO = Figure(
    "owl_sap_engine_info", "A model that is loaded, and on what; always 1", "info", (*_ENGINE, "path", "device")
)

_COLLECTION = ("collection",)
COLLECTION_METRICS = (
    Figure("owl_sap_rows", "Source rows that are stored", "rows", _COLLECTION),
    Figure("owl_sap_chunks", "Vectors that are stored, one per piece of text", "chunks", _COLLECTION),
    Figure("owl_sap_empty_rows", "Rows without any text at the last complete sync", "empty", _COLLECTION),
    Figure("owl_sap_quarantined_rows", "Rows in quarantine", "quarantined", _COLLECTION),
    Figure(
        "owl_sap_sync_lag_seconds",
        "How old the answers may be: time since the last complete sync, and what its watermark was behind",
        "lag",
        _COLLECTION,
    ),
    Figure("owl_sap_checkpoint_age_seconds", "Time since a sync last came to its end", "age", _COLLECTION),
    Figure(
        "owl_sap_full_comparison_age_seconds",
        "Time since the last complete comparison of source and store began",
        "full_age",
        _COLLECTION,
    ),
    Figure(
        "owl_sap_sync_overdue_seconds",
        "How long ago a scheduled sync should have begun; 0 in time, absent where nobody keeps its schedule",
        "overdue",
        _COLLECTION,
    ),
)
"""Of the configured collections, from the store itself: the same in every process. No ages before a first sync."""
STORE_METRICS = (
    Figure("owl_sap_store_answers", "0 while the store cannot be asked for its collections", "answers"),
    Figure("owl_sap_store_look_age_seconds", "How old what is told of the collections is", "look_age"),
)
JOB_METRICS = (Figure("owl_sap_jobs", "Records of jobs, as far as they are kept", "jobs", ("kind", "state")),)
JOB_WAIT = Figure(
    "owl_sap_jobs_oldest_queued_seconds", "How long the oldest job has waited for a worker; 0: none does", "oldest"
)
JOB_PROGRESS = (
    Figure("owl_sap_job_rows_done", "Rows that a job which runs has handled so far", "done", ("collection", "kind")),
    Figure("owl_sap_job_rows", "Rows that it has to handle, as far as it knows", "total", ("collection", "kind")),
)
CERTIFICATE_METRICS = (
    Figure(
        "owl_sap_tls_certificate_expiry_timestamp_seconds",
        "When the certificate that is served ends, as POSIX time; absent where the process speaks no TLS",
        "ends",
    ),
    Figure(
        "owl_sap_tls_certificate_refused",
        "1 while what stands in the files cannot be used and the certificate before is served",
        "refused",
    ),
)
FIGURES = (
    *(ENGINE_INFO, *ENGINE_METRICS, *COLLECTION_METRICS, *STORE_METRICS),
    *(*JOB_METRICS, JOB_WAIT, *JOB_PROGRESS, *CERTIFICATE_METRICS),
)


class Asked(Collector):
    """Asks at each scrape for figures that share their labels."""

    def __init__(self, figures: tuple[Figure, ...]) -> None:
        self._figures = figures
        self.read: Callable[[], Reading] = dict

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        return [figure.family() for figure in self._figures]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        found = self.read()
        for figure in self._figures:
            family = figure.family()
            for labels, values in found.items():
                value = values.get(figure.field)
                if value is not None:
                    family.add_metric(labels, value)
            if family.samples:
                yield family
