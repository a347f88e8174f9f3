"""`owl-sap serve` as a process: address line, loopback only, and a quick clean end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.api.server import refuse_public
from connector.errors import ConfigurationError
from tests.forked import owl_sap

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "OWL_SAP_EMBEDDING__MODEL": "hash:16",
    "OWL_SAP_STORE__KIND": "local",
    "OWL_SAP_STORE__PATH": "vectors",
    "PYTHONPATH": str(ROOT),
}


@contextmanager
def served(folder: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = owl_sap(
        "serve",
        "--port",
        "0",
        cwd=folder,
        env=VARIABLES | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_serves_and_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with served(tmp_path) as (process, url):
        assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
        assert len(httpx.post(f"{url}/embed", json={"inputs": "steel"}, timeout=60).json()[0]) == 16
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert time.monotonic() - start < 20
        _, errors = process.communicate()
        assert errors.splitlines()[0] == f"Console: {url}/"
        assert "Traceback" not in errors


def test_an_idle_connection_does_not_hold_the_end_up(tmp_path: Path) -> None:
    with served(tmp_path, OWL_SAP_API__SHUTDOWN_SECONDS="1") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half_open:
            half_open.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            process.terminate()
            assert process.wait(60) == 0


def test_an_address_in_use_is_one_message(tmp_path: Path, cli: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = cli("serve", "--port", str(server.getsockname()[1]), OWL_SAP_EMBEDDING__MODEL="hash:16")
    assert (run.code, run.out) == (2, "")
    assert "--port" in run.err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com", ""])
def test_only_loopback_without_authentication(host: str) -> None:
    with pytest.raises(ConfigurationError, match="authentication"):
        refuse_public(host, authenticated=False)
    refuse_public(host, authenticated=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_served(host: str) -> None:
    refuse_public(host, authenticated=False)


def test_a_public_address_is_refused_through_the_command(cli: Callable[..., Any]) -> None:
    run = cli("serve", "--host", "0.0.0.0", OWL_SAP_EMBEDDING__MODEL="hash:16")
    assert (run.code, run.out) == (2, "")
    assert "0.0.0.0" in run.err
    assert "authentication" in run.err


def test_a_wrong_model_ends_the_start(cli: Callable[..., Any]) -> None:
    run = cli("serve", "--port", "0", OWL_SAP_EMBEDDING__MODEL="no/such-model")
    assert (run.code, run.out) == (2, "")
    assert "no/such-model" in run.err
