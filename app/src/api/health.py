"""The routes for operators: health, metrics, what is served, and the GPU."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.src.api import guard
from app.src.api.errors import RETRY_AFTER, UNAVAILABLE
from app.src.api.executors import Executors, Json
from app.src.observe.metrics import CONTENT_TYPE


class DeviceBody(BaseModel):
    kind: Literal["cpu", "cuda"]
    name: str
    precision: str
    precision_reason: str
    path: str = Field(description="how vectors are computed: packed, padded, sentence-transformers or hashing")
    path_reason: str


class OwnModelBody(BaseModel):
    model: str
    collections: list[str]
    loaded: bool = Field(description="false: nothing has asked for it yet, and the rest is null")
    dimension: int | None
    max_tokens: int | None
    fingerprint: str | None
    device: DeviceBody | None


class SettingBody(BaseModel):
    name: str = Field(examples=["padding_multiple"])
    value: str | int | float | bool | None = Field(description="null: it cannot be had here")
    reason: str


class LimitsBody(BaseModel):
    max_body_bytes: int
    max_inputs: int
    max_text_chars: int
    max_k: int


class InfoBody(BaseModel):
    version: str
    model: str
    dimension: int
    max_tokens: int
    fingerprint: str
    device: DeviceBody
    models: list[OwnModelBody] = Field(description="models that collections have of their own")
    settings: list[SettingBody] = Field(description="what is chosen on this device, and why")
    store: str
    collections: list[str]
    limits: LimitsBody


class HealthBody(BaseModel):
    status: str
    checks: dict[str, bool] = Field(
        description="`gpu` is there where one is asked for (USE_GPU=true); it alone does not make the service unready"
    )
    detail: str | None = Field(default=None, description="why it is not ready")
    note: str | None = Field(default=None, description="why the GPU that is asked for is not used, and what to do")


class GpuProcessBody(BaseModel):
    pid: int
    memory_bytes: int | None


class ThrottleBody(BaseModel):
    reason: str
    words: str
    normal: bool | None = Field(description="no reason for an alarm, as a power limit under load; null: unknown")


class GpuDevice(BaseModel):
    """null: this card does not tell."""

    index: int
    name: str
    uuid: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    memory_free_bytes: int | None
    utilization_percent: int | None = Field(description="share of the time in which a kernel ran")
    memory_utilization_percent: int | None = Field(description="share of the time in which memory was in use")
    temperature_celsius: int | None
    power_watts: float | None
    power_limit_watts: float | None = Field(description="in force now")
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: list[str] | None = Field(description="NVML's names of what `throttle` says in words")
    compute_processes: int | None
    compute_capability: str | None = Field(examples=["7.5"])
    temperature_slowdown_celsius: int | None = Field(description="from here on the clock is lowered")
    power_limit_default_watts: float | None
    power_limit_min_watts: float | None
    power_limit_max_watts: float | None
    sm_clock_max_mhz: int | None
    memory_clock_max_mhz: int | None
    pcie_generation: int | None = Field(description="now: an idle link falls back to 1")
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    pcie_sent_bytes_per_second: int | None = Field(description="by the card, over 20 ms")
    pcie_received_bytes_per_second: int | None
    throttle: list[ThrottleBody] | None = Field(description="what holds the clock back")
    throttled_abnormally: bool | None = Field(description="by heat or by the power supply")
    performance_state: int | None = Field(description="0 is the fastest, 15 the slowest")
    ecc_enabled: bool | None
    ecc_corrected_errors: int | None = Field(description="since the driver was loaded")
    ecc_uncorrected_errors: int | None
    ecc_corrected_errors_lifetime: int | None
    ecc_uncorrected_errors_lifetime: int | None
    retired_pages: int | None = Field(description="up to Turing; later cards remap rows")
    retired_pages_pending: bool | None
    remapped_rows: int | None
    remapped_rows_pending: bool | None
    energy_joules: float | None = Field(description="since the driver was loaded")
    fan_percent: int | None = Field(description="null on a card without a fan, as a T4 is")
    persistence_mode: bool | None
    processes: list[GpuProcessBody] | None = Field(description="those that compute on it")
    reason: str | None = Field(description="why this card tells nothing")


class GpuBody(BaseModel):
    devices: list[GpuDevice]
    driver_version: str | None
    cuda_version: str | None = Field(description="the newest that the driver knows")
    reason: str | None = Field(description="why there are no devices")
    note: str = Field(description="what these figures are not")
    answered: bool = Field(description="false: the driver hangs")


_WHY_UNAVAILABLE = "a check failed; send a credential to see why"


def add(routes: APIRouter, executors: Executors) -> None:
    _add_health(routes, executors)
    _add_engine(routes, executors)


def _add_health(routes: APIRouter, executors: Executors) -> None:
    @routes.get("/health/live", response_model=HealthBody)
    async def live(request: Request) -> Response:
        """200 if the process answers and the engine can work; 503: only a new process helps."""
        stuck = executors.service.readiness.beyond_help()
        if stuck is None:
            return Json({"status": "ok", "checks": {}})
        detail = stuck if guard.known(request.scope) else _WHY_UNAVAILABLE
        return Json({"status": "unavailable", "checks": {"engine": False}, "detail": detail}, UNAVAILABLE)

    @routes.get("/health/ready", response_model=HealthBody)
    async def ready(request: Request) -> Response:
        """200 if the engine answered a probe and the store is usable; otherwise 503, within 5 s. Authenticated callers
        see the reason."""
        readiness = await executors.probe()
        document: dict[str, Any] = {
            "status": "ok" if readiness.ready else "unavailable",
            "checks": readiness.checks,
        }
        known = guard.known(request.scope)
        if readiness.note is not None and known:
            document["note"] = readiness.note
        if readiness.ready:
            return Json(document)
        detail = readiness.unavailable if known else _WHY_UNAVAILABLE
        return Json(document | {"detail": detail}, UNAVAILABLE, {"Retry-After": RETRY_AFTER})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await executors.look(executors.service.metrics.render), headers={"Content-Type": CONTENT_TYPE})


def _add_engine(routes: APIRouter, executors: Executors) -> None:
    @routes.get("/v1/info", response_model=InfoBody)
    async def info() -> Response:
        """Version, model, dimension, limits, device, and the choices made on it."""
        return Json(await executors.run(executors.service.status.info))

    @routes.get("/v1/gpu", response_model=GpuBody)
    async def gpu() -> Response:
        """A snapshot of NVIDIA's driver; without a driver an empty list and the reason."""
        return Json(await executors.run(executors.service.status.gpu))
