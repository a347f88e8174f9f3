"""The routes for operators: health, metrics, what is served, and the GPU."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.src.access.principal import ANONYMOUS
from app.src.api.errors import RETRY_AFTER
from app.src.api.guard import caller
from app.src.api.requests import Executors, Json
from app.src.core.device import Setting
from app.src.core.nvml import GpuSnapshot
from app.src.observe.metrics import CONTENT_TYPE


class DeviceBody(BaseModel):
    kind: Literal["cpu", "cuda"]
    name: str
    precision: str
    precision_reason: str
    path: str = Field(description="how vectors are computed: packed, padded, sentence-transformers or hashing")
    path_reason: str
    failed: str = Field(description="why it computes nothing more until the service is restarted; empty: it works")


class OwnModelBody(BaseModel):
    model: str
    collections: list[str]
    loaded: bool = Field(description="false: nothing has asked for it yet, and the rest is null")
    dimension: int | None
    max_tokens: int | None
    languages: list[str] | None
    licence: str | None
    fingerprint: str | None
    device: DeviceBody | None
    devices: list[DeviceBody] | None


class LimitsBody(BaseModel):
    """By setting of [api]."""

    max_body_bytes: int
    max_inputs: int
    max_text_chars: int
    max_k: int


class InfoBody(BaseModel):
    version: str
    model: str
    dimension: int
    max_tokens: int
    languages: list[str] = Field(description="ISO 639-1 codes of the model's languages; empty: unknown")
    licence: str = Field(description="of the model; empty: unknown")
    fingerprint: str
    device: DeviceBody = Field(description="the first one")
    devices: list[DeviceBody] = Field(description="that compute together (embedding.device)")
    models: list[OwnModelBody] = Field(description="models that collections have of their own")
    settings: list[Setting] = Field(description="what is chosen on this device, and why")
    store: str
    collections: list[str]
    limits: LimitsBody


class HealthBody(BaseModel):
    status: str
    checks: dict[str, bool] = Field(
        description="`gpu` is there where one is asked for (USE_GPU=true); it alone does not make the service unready"
    )
    detail: str | None = Field(default=None, description="why it is not ready")
    note: str | None = Field(
        default=None, description="why the GPU that is asked for is not used, or a device failed, and what to do"
    )


_WHY_UNAVAILABLE = "a check failed; send a credential to see why"


def add(routes: APIRouter, executors: Executors) -> None:
    @routes.get("/health/live", response_model=HealthBody)
    async def live(request: Request) -> Response:
        """200 if the process answers and the engine can work; 503: only a new process helps."""
        stuck = executors.service.readiness.beyond_help()
        if stuck is None:
            return Json({"status": "ok", "checks": {}})
        detail = stuck if caller(request) is not ANONYMOUS else _WHY_UNAVAILABLE
        return Json({"status": "unavailable", "checks": {"engine": False}, "detail": detail}, 503)

    @routes.get("/health/ready", response_model=HealthBody)
    async def ready(request: Request) -> Response:
        """200 if the engine answered a probe and the store is usable; otherwise 503, within 5 s. Authenticated callers
        see the reason."""
        readiness = await executors.probe()
        document: dict[str, Any] = {"status": "ok" if readiness.ready else "unavailable", "checks": readiness.checks}
        known = caller(request) is not ANONYMOUS
        if readiness.note is not None and known:
            document["note"] = readiness.note
        if readiness.ready:
            return Json(document)
        detail = readiness.unavailable if known else _WHY_UNAVAILABLE
        return Json(document | {"detail": detail}, 503, {"Retry-After": RETRY_AFTER})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await executors.look(executors.service.metrics.render), headers={"Content-Type": CONTENT_TYPE})

    @routes.get("/v1/info", response_model=InfoBody)
    async def info() -> Response:
        """Version, model, dimension, limits, device, and the choices made on it."""
        return Json(await executors.run(executors.service.status.info))

    @routes.get("/v1/gpu", response_model=GpuSnapshot)
    async def gpu() -> Response:
        """A snapshot of NVIDIA's driver; without a driver an empty list and the reason."""
        return Json(await executors.run(executors.service.status.gpu))
