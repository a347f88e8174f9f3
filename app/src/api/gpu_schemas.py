"""What `GET /v1/gpu` answers, as documented. Written straight from the driver's snapshot."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
