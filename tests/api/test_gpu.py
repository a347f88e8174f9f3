"""GET /v1/gpu through HTTP; what the driver says is tests/core/test_nvml.py's matter."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from httpx import Client
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from app.src.core import nvml
from app.src.service import status
from app.src.service.service import Service
from app.src.settings import Settings

STATE = nvml.GpuState(
    0,
    "Tesla T4",
    "GPU-1",
    16,
    1,
    37,
    61,
    69.5,
    70.0,
    1_350,
    memory_utilization_percent=12,
    compute_capability="7.5",
    throttle=nvml.throttles(0x4),
    throttled_abnormally=False,
    pcie_sent_bytes_per_second=1_500,
    processes=[{"pid": 4711, "memory_bytes": None}],
)


def test_a_card(shared: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot((STATE,), "580.95", "13.0"))
    answer = shared.get("/v1/gpu").json()
    assert (answer["driver_version"], answer["cuda_version"], answer["reason"]) == ("580.95", "13.0", None)
    device = answer["devices"][0]
    assert (device["name"], device["throttled_abnormally"]) == ("Tesla T4", False)
    assert (device["throttle"][0]["reason"], device["throttle"][0]["normal"]) == ("sw_power_cap", True)
    assert device["processes"] == [{"pid": 4711, "memory_bytes": None}]
    assert "DCGM" in answer["note"]
    shapes = shared.get("/openapi.json").json()["components"]["schemas"]
    assert set(shapes["GpuSnapshot"]["properties"]) == set(answer)
    assert set(shapes["GpuState"]["properties"]) == set(device)
    assert shapes["GpuState"]["properties"]["throttled_abnormally"]["description"].startswith("Held back by heat")
    TypeAdapter(nvml.GpuSnapshot).validate_python(answer)


def of_gpus(client: Client) -> dict[str, tuple[dict[str, str], float]]:
    """The metrics of cards, by name: the last sample of each."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return {each.name: (each.labels, each.value) for each in samples if each.name.startswith("owl_sap_gpu_")}


def test_a_card_in_metrics(shared: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot((STATE,), "580.95", "13.0"))
    found = of_gpus(shared)
    card = {"index": "0", "uuid": "GPU-1", "name": "Tesla T4"}
    labels, busy = found["owl_sap_gpu_utilization_ratio"]
    assert (labels, round(busy, 6)) == (card, 0.37)
    assert found["owl_sap_gpu_sm_clock_hertz"] == (card, 1.35e9)
    assert found["owl_sap_gpu_throttle"] == (card | {"reason": "sw_power_cap"}, 1)
    assert found["owl_sap_gpu_driver_answers"] == ({}, 1)
    assert "owl_sap_gpu_temperature_slowdown_celsius" not in found, "what a card does not report is absent, not 0"


def test_metrics_without_a_card_and_with_a_driver_that_hangs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot(reason="there is no NVIDIA driver here"))
    assert set(of_gpus(client)) == {"owl_sap_gpu_wanted_but_missing"}
    released = threading.Event()

    def hang() -> nvml.GpuSnapshot:
        released.wait(30)
        return nvml.GpuSnapshot()

    monkeypatch.setattr(nvml, "snapshot", hang)
    monkeypatch.setattr(status, "GPU_WITHIN", 0.05)
    try:
        found = of_gpus(client)
        answer = client.get("/v1/gpu").json()
    finally:
        released.set()
    assert found["owl_sap_gpu_driver_answers"] == ({}, 0)
    assert "owl_sap_gpu_utilization_ratio" not in found
    assert (answer["devices"], answer["answered"]) == ([], False)
    assert "not answered within 0.05 s" in answer["reason"]


def test_a_loaded_engine_says_what_computes_although_the_driver_hangs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(status, "gpu_missing", asked)
    embedding = settings.embedding.model_copy(update={"expect_gpu": True})
    with closing(Service(settings.model_copy(update={"embedding": embedding}))) as service:
        assert service.parts.engine.profile.kind == "cpu"
        assert "owl_sap_gpu_wanted_but_missing 1.0" in service.metrics.render().decode()


def test_no_card_is_an_answer_and_no_error(shared: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "snapshot", lambda: nvml.GpuSnapshot(reason="there is no NVIDIA driver here"))
    response = shared.get("/v1/gpu")
    assert response.status_code == 200
    assert response.json()["devices"] == []
    assert "no NVIDIA driver" in response.json()["reason"]


def test_on_this_machine(shared: Client) -> None:
    answer = shared.get("/v1/gpu").json()
    assert bool(answer["devices"]) == (answer["reason"] is None)
