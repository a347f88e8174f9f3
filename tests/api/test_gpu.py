"""GET /v1/gpu through HTTP; what the driver says is tests/core/test_nvml.py's matter."""

from __future__ import annotations

import pytest
from httpx import Client

from app.src.core import nvml

STATE = nvml.GpuState(0, "Tesla T4", "GPU-1", 16, 1, 15, 37, 12, 61, 69.5, 70.0, 1_350, 5_000, ["sw_power_cap"], 1)


@pytest.mark.covers("GET /v1/gpu")
def test_a_card(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot((STATE,), "580.95", "13.0"))
    answer = client.get("/v1/gpu").json()
    assert (answer["driver_version"], answer["cuda_version"], answer["reason"]) == ("580.95", "13.0", None)
    assert (answer["devices"][0]["name"], answer["devices"][0]["throttle_reasons"]) == ("Tesla T4", ["sw_power_cap"])
    shapes = client.get("/openapi.json").json()["components"]["schemas"]
    assert set(shapes["GpuBody"]["properties"]) == set(answer)
    assert set(shapes["GpuDevice"]["properties"]) == set(answer["devices"][0])


@pytest.mark.covers("GET /v1/gpu", errors=True)
def test_no_card_is_an_answer_and_no_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot(reason="there is no NVIDIA driver here"))
    response = client.get("/v1/gpu")
    assert response.status_code == 200
    assert response.json()["devices"] == []
    assert "no NVIDIA driver" in response.json()["reason"]


@pytest.mark.covers("GET /v1/gpu")
def test_on_this_machine(client: Client) -> None:
    answer = client.get("/v1/gpu").json()
    assert bool(answer["devices"]) == (answer["reason"] is None)
