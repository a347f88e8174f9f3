"""The metrics of a process without REST: where it listens, and how it ends. As a process: test_on_prometheus.py."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.api.scraping import MetricsListener
from app.src.service import Service
from app.src.settings import Settings
from connector.errors import ConfigurationError


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
        assert "owl_sap_build_info" in httpx.get(listener.url, timeout=60).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(listener.url)
