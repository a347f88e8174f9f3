"""`owl-sap worker --metrics-port`: the metrics of a process without REST, as a process on the stand-in."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.api.scraping import MetricsListener
from app.src.service import Service
from app.src.settings import Settings
from connector.errors import ConfigurationError
from tests.adversity.scene import NAME, Scene

pytest.importorskip("hdbcli")


@pytest.mark.covers("worker", "GET /metrics")
def test_a_worker_tells_its_metrics_and_nothing_else(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("local")
    assert scene.cli("sync", NAME)[0] == 0
    with scene.spawn("worker", "--metrics-port", "0") as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["metrics"]
            assert url.startswith("http://127.0.0.1:")
            told = httpx.get(url).text
            assert f'owl_sap_rows{{collection="{NAME}"}}' in told
            assert 'owl_sap_engine_info{device="' in told
            assert "owl_sap_store_answers 1.0" in told
            for path in ("/", "/health/ready", "/v1/info", "/docs", "/metrics/"):
                assert httpx.get(url.removesuffix("/metrics") + path).status_code != 200, path
            assert httpx.post(url).status_code == 405
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
            assert process.communicate()[1] == ""
        finally:
            process.kill()


@pytest.fixture
def service(tmp_path: Path) -> Any:
    settings = Settings.model_validate(
        {"embedding": {"model": "hash:16"}, "store": {"kind": "local", "path": tmp_path / "vectors"}}
    )
    with closing(Service(settings)) as service:
        yield service


def test_without_authentication_it_listens_on_loopback_only(service: Service) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0.*loopback"):
        MetricsListener(service, "0.0.0.0", 0)


def test_a_port_in_use_is_a_message(service: Service) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match="cannot be bound"),
    ):
        MetricsListener(service, "127.0.0.1", taken.getsockname()[1])


def test_it_ends_when_it_is_closed_also_before_it_began(service: Service) -> None:
    with closing(MetricsListener(service, "127.0.0.1", 0)):
        pass
    with closing(MetricsListener(service, "127.0.0.1", 0)) as listener:
        listener.start()
        assert "owl_sap_build_info" in httpx.get(listener.url).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(listener.url)
