"""The metrics of a process without REST: where it listens, and how it ends. As a process: test_on_prometheus.py."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.keys import Grant, create
from app.src.access.principal import Scope
from app.src.api.server import metrics_served
from app.src.service.service import Service
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
        metrics_served(service, "0.0.0.0", 0).__enter__()


def test_a_port_in_use_is_a_message(service: Service) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match="cannot be bound"),
    ):
        metrics_served(service, "127.0.0.1", taken.getsockname()[1]).__enter__()


def test_it_ends_when_it_is_closed_also_before_it_began(service: Service) -> None:
    with metrics_served(service, "127.0.0.1", 0):
        pass
    with metrics_served(service, "127.0.0.1", 0) as url:
        assert "owl_sap_build_info" in httpx.get(url, timeout=60).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_it_answers_nothing_else_and_only_who_may_look(tmp_path: Path) -> None:
    scopes: tuple[Scope, ...] = ("metrics", "admin", "search")
    keys = {scope: create(tmp_path / "keys.json", Grant(scope, (scope,)))[1] for scope in scopes}
    settings = Settings.model_validate(
        {
            "embedding": {"model": "hash:16"},
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "access": {"keys": tmp_path / "keys.json"},
        }
    )
    with (
        closing(Service(settings)) as service,
        metrics_served(service, "127.0.0.1", 0) as url,
        httpx.Client(timeout=60) as client,
    ):
        admin = {"X-API-Key": keys["admin"]}
        for path in ("/", "/health/ready", "/v1/info", "/docs", "/metrics/"):
            assert client.get(url.removesuffix("/metrics") + path, headers=admin).status_code == 404, path
        assert client.post(url, headers=admin).status_code == 405
        assert client.get(url).status_code == 401
        assert client.get(url, headers={"X-API-Key": keys["search"]}).status_code == 403
        assert client.get(url, headers={"X-API-Key": keys["metrics"]}).status_code == 200


def test_it_has_the_headers_and_limits_of_rest(tmp_path: Path) -> None:
    key = create(tmp_path / "keys.json", Grant("prometheus", ("metrics",)))[1]
    settings = Settings.model_validate(
        {
            "embedding": {"model": "hash:16"},
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "access": {"keys": tmp_path / "keys.json", "failures": "2/minute", "rate": "3/minute"},
            "api": {"hsts": True},
        }
    )
    with (
        closing(Service(settings)) as service,
        metrics_served(service, "127.0.0.1", 0) as url,
        httpx.Client(timeout=60) as client,
    ):
        tried = [client.get(url, headers={"X-API-Key": "owl_wrong_wrong"}) for _ in range(3)]
        assert [answer.status_code for answer in tried] == [401, 401, 429]
        assert int(tried[-1].headers["Retry-After"]) >= 1
        scraped = [client.get(url, headers={"X-API-Key": key}) for _ in range(4)]
        assert [answer.status_code for answer in scraped] == [200, 200, 200, 429]
        for answer in (*tried, *scraped):
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert "Strict-Transport-Security" not in answer.headers  # this is http
