"""Whole runs of the product, with every socket of Python's recorded by an audit hook within the process and those of
the driver looked up in the system: nothing is spoken to but what is configured, whatever telemetry is asked for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adversity.scene import NAME, Scene
from tests.ports import free_port

HOOK = """
import json, os, sys

_out = os.open(os.environ["SOCKETS_TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_told = ("socket.", "urllib.", "http.client.", "ftplib.", "smtplib.",
         "webbrowser.", "subprocess.", "os.system", "os.exec")


def _hook(event, arguments):
    if event.startswith(_told) and event not in ("socket.__new__", "socket.gethostname"):
        os.write(_out, (json.dumps([event, arguments], default=lambda one: repr(one)[:300]) + "\\n").encode())


sys.addaudithook(_hook)
"""
SEVERAL = """
import json, sys

from app.src.cli import app

for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments, prog_name="owl-sap")
    except SystemExit as end:
        assert end.code in (0, 1, None), (arguments, end.code)
"""


class Trap:
    """A port that nothing has a reason to connect to. Telemetry and proxies of every kind are sent there."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]

    def variables(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}"
        urls = (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "HF_ENDPOINT",
            "HF_HUB_USER_AGENT_ORIGIN",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
            "http_proxy",
            "https_proxy",
            "LANGCHAIN_ENDPOINT",
            "LANGSMITH_ENDPOINT",
            "POSTHOG_HOST",
            "WANDB_BASE_URL",
            "PYDANTIC_LOGFIRE_BASE_URL",
            "CODECARBON_API_ENDPOINT",
        )
        switches = {
            "SENTRY_DSN": f"http://key@127.0.0.1:{self.port}/1",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true",
            "HF_HUB_DISABLE_TELEMETRY": "0",
            "DISABLE_TELEMETRY": "0",
            "DO_NOT_TRACK": "0",
            "LANGCHAIN_TRACING_V2": "true",
            "LANGSMITH_TRACING": "true",
            "LANGCHAIN_API_KEY": "key",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
        }
        return dict.fromkeys(urls, url) | switches

    def sprung(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._listener.accept()[0].close()
            return True
        return False

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    trap = Trap()
    yield trap
    trap.close()


class Watched:
    """The scene's command line with the hook in every Python process."""

    def __init__(self, scene: Scene, trap: Trap, folder: Path, model: str) -> None:
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        self.told = folder / "told.jsonl"
        path = f"{folder / 'hook'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        own = scene.variables()
        self._environment = own | trap.variables() | {"PYTHONPATH": f"{path}{os.pathsep}{own['PYTHONPATH']}"}
        self._environment |= {"SOCKETS_TOLD": str(self.told), "OWL_SAP_EMBEDDING__MODEL": model}
        # Where doctor looks: at the usual port another program of this machine may listen, and doctor would ask it.
        self.port = free_port()
        self._environment |= {"OWL_SAP_MCP__HTTP": "true", "OWL_SAP_API__PORT": str(self.port)}
        self._folder = scene.folder

    def start(self, *verbs: tuple[str, ...]) -> subprocess.Popen[str]:
        """One after the other in one process: a start takes seconds."""
        return subprocess.Popen(
            [sys.executable, "-c", SEVERAL, json.dumps(verbs)],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def events(self) -> list[tuple[str, list[Any]]]:
        return [(event, shown) for event, shown in map(json.loads, self.told.read_text(encoding="utf-8").splitlines())]


def printed(process: subprocess.Popen[str]) -> Any:
    """The next document that it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=30)[1]
    return json.loads(line)


def spoken_to(process: subprocess.Popen[str]) -> set[tuple[str, int]]:
    """By any code in it, the driver's too: from the tables of Linux."""
    folder = Path(f"/proc/{process.pid}")
    held = {os.readlink(file) for file in (folder / "fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in (folder / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            _, _, peer, _, _, _, _, _, _, inode, *_ = line.split()
            if f"socket:[{inode}]" in held and not peer.endswith(":0000"):
                address, port = peer.split(":")
                found.add((_shown(address), int(port, 16)))
    return found


def _shown(address: str) -> str:
    """Words of the machine's order, in hex."""
    words = [
        bytes.fromhex(address[at : at + 8])[:: -1 if sys.byteorder == "little" else 1]
        for at in range(0, len(address), 8)
    ]
    return str(ipaddress.ip_address(b"".join(words)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks a process's connections up in /proc")
@pytest.mark.parametrize("model", ["hash:64", pytest.param("all-MiniLM-L6-v2", marks=pytest.mark.slow)])
def test_nothing_is_spoken_to_but_what_is_configured(
    make_scene: Callable[..., Scene], trap: Trap, tmp_path: Path, model: str
) -> None:
    scene = make_scene("hana", rows=12)
    watched = Watched(scene, trap, tmp_path, model)
    with watched.start(
        ("sync", NAME, "--json"),
        ("doctor", "--json"),
        ("search", NAME, "pump", "--mode", "hybrid", "--json"),
        ("serve", "--port", "0"),
    ) as serving:
        try:
            assert printed(serving)[0]["upserted"]
            assert printed(serving)
            assert printed(serving)
            url = printed(serving)["url"]
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                assert client.post("/embed", json={"inputs": ["pump", "seal"]}).status_code == 200
                found = client.post(f"/v1/collections/{NAME}/search", json={"query": "pump", "mode": "hybrid"})
                assert found.json()["hits"]
                call = {"name": "search", "arguments": {"collection": NAME, "query": "pump"}}
                message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
                answer = client.post("/mcp", json=message, headers={"Accept": "application/json"}).json()
                assert answer["result"]["structuredContent"]["hits"]
                for path in ("/v1/info", "/metrics", "/v1/gpu", "/health/ready", "/docs", "/v1/tables"):
                    assert client.get(path).status_code == 200
                assert client.post(f"/v1/collections/{NAME}/sync").status_code == 202
                ours = client.get("/health/live").extensions["network_stream"].get_extra_info("client_addr")
                peers = spoken_to(serving)
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=30)
    hana = (scene.emulator.host, scene.emulator.port)
    assert peers == {hana, tuple(ours)}, "the driver's connections to HANA and the one of this test"
    assert not trap.sprung()
    served = int(url.rpartition(":")[2])
    check(watched.events(), hana, {served, watched.port})


def check(events: list[tuple[str, list[Any]]], hana: tuple[str, int], served: set[int]) -> None:
    """`served`: the ports that the service was given."""
    assert {event for event, _ in events} >= {"socket.bind", "socket.connect", "socket.getaddrinfo"}
    bound = [tuple(shown[1][:2]) for event, shown in events if event == "socket.bind"]
    assert set(bound) <= {("127.0.0.1", port) for port in (0, *served)}
    for event, shown in events:
        if event == "socket.connect":
            assert tuple(shown[1][:2]) == hana, "doctor's look at the port"
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            assert shown[0] in (hana[0], "127.0.0.1"), f"{shown[0]} was looked up"
        else:
            assert event == "socket.bind", f"{event}: {shown}"


def test_a_run_that_speaks_to_somebody_else_is_noticed(
    make_scene: Callable[..., Scene], trap: Trap, tmp_path: Path
) -> None:
    """Neither the hook nor the trap sleeps."""
    watched = Watched(make_scene("hana", rows=1), trap, tmp_path, "hash:64")
    code = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{trap.port}', timeout=0.2)"
    subprocess.run([sys.executable, "-c", code], env=watched._environment, check=False, capture_output=True, timeout=60)
    assert trap.sprung()
    told = {event for event, _ in watched.events()}
    assert {"socket.connect", "urllib.Request", "socket.getaddrinfo"} <= told
