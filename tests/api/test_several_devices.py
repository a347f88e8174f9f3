"""A service on several devices: all of them are shown, and one that fails makes a note, a metric and no failed call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from app.src.core import child as child_module
from app.src.core.child import ChildEngine
from app.src.observe import checks
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import TableSource, serving, settings_in


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    plain = settings_in(tmp_path)
    devices = Settings.model_validate({"embedding": {"model": "hash:64", "device": ["cpu:0", "cpu:1"]}})
    return plain.model_copy(update={"embedding": devices.embedding})


def test_a_device_that_hangs_makes_the_service_unready(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(checks, "STALLED_SECONDS", 2.0)  # a child reports every second
    with serving(service) as client:
        assert client.get("/health/ready").status_code == 200
        child = service.parts.engine.members[1]
        assert isinstance(child, ChildEngine)
        os.kill(child._child.process.pid, signal.SIGSTOP)
        try:
            while client.get("/health/ready").status_code == 200:
                time.sleep(0.05)
            assert client.get("/health/live").status_code == 200
        finally:
            os.kill(child._child.process.pid, signal.SIGCONT)


def test_a_service_goes_on_with_the_devices_that_work(service: Service, source: TableSource) -> None:
    service.sync.run("materials")
    with serving(service) as client:
        info = client.get("/v1/info").json()
        assert [device["failed"] for device in info["devices"]] == ["", ""]
        assert info["device"] == info["devices"][0]
        assert "note" not in client.get("/health/ready").json()
        failed = 'owl_sap_engine_failed_devices{model="hash:64",precision="fp32"}'
        assert f"{failed} 0.0" in client.get("/metrics").text

        child = service.parts.engine.members[1]
        assert isinstance(child, ChildEngine)
        child._child.process.kill()
        child._child._reader.join(60)
        ready = client.get("/health/ready")
        assert ready.status_code == 200
        assert "CPU (cpu) computes nothing more until the service is restarted" in ready.json()["note"]
        assert client.get("/health/live").status_code == 200
        assert "exit status -9" in client.get("/v1/info").json()["devices"][1]["failed"]
        assert f"{failed} 1.0" in client.get("/metrics").text
        found = client.post("/v1/collections/materials/search", json={"query": "pump", "mode": "vector"})
        assert found.status_code == 200
        assert found.json()["hits"]
