"""What deploy_t4_optimized.sh runs once the service is ready, on a real one: a search by a client, and figures."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import trustme

from app.src.access.principal import Principal, Scope
from app.src.access.rows import Nothing, visible
from tests.adversity.scene import Scene
from tests.surface.conftest import environment

pytestmark = pytest.mark.xdist_group("deploy_proof")  # one worker makes the outputs

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "scripts/lib/deploy"
KEY = "owl_canary_key"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PARTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "deploy_key"
    path.write_text(f"{KEY}\n")
    return path


def tried(url: str, key_file: Path) -> subprocess.CompletedProcess[str]:
    """As the script hands it to the container: the program as an argument, the key by its file."""
    text = (PARTS / "smoke.py").read_text()
    command = [sys.executable, "-c", text, url, str(key_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert KEY not in done.stdout + done.stderr
    return done


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """As deploy_t4_optimized.sh makes it in the container, by the product itself; only the owner cannot be given."""
    folder, tools = tmp_path / "secrets", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "chown").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    names = ("keys.json", "deploy_key", "metrics_token", "grafana_password")
    command = ["sh", "-c", (PARTS / "make-secrets").read_text(), "make-secrets", str(folder), "10001", "0", *names]
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "OWL_SAP_ACCESS__KEYS": str(folder / "keys.json")}
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in names[1:]:
        assert (folder / name).read_text().strip() not in done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return folder


def test_a_real_service_is_searched_and_embeds_before_the_first_sync(
    make_scene: Callable[..., Scene], secrets: Path, key_file: Path
) -> None:
    scene = make_scene("local", rows=12)
    with scene.spawn("serve", "--port", "0", env={"OWL_SAP_ACCESS__KEYS": str(secrets / "keys.json")}) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            refused = tried(url, key_file)
            unsynced = tried(url, secrets / "deploy_key")
            assert scene.cli("sync", "--all")[0] == 0
            synced = tried(url, secrets / "deploy_key")
            token = (secrets / "metrics_token").read_text().strip()
            watched = [
                httpx.get(f"{url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=60).status_code
                for path in ("/metrics", "/v1/jobs")
            ]
        finally:
            process.kill()
    assert watched == [200, 403], "the token of Prometheus is for /metrics alone"
    assert (refused.returncode, refused.stdout) == (1, "list of collections: HTTP 401\n")
    assert unsynced.returncode == 0, unsynced.stdout
    assert "embed: 64 finite numbers" in unsynced.stdout
    assert synced.returncode == 0, synced.stdout
    assert ": 3 hits in " in synced.stdout


@pytest.fixture
def answers() -> Iterator[Callable[[dict[str, tuple[int, Any]]], str]]:
    """A server with these answers by path; its address."""
    servers = []

    def serve(by_path: dict[str, tuple[int, Any]], tls: ssl.SSLContext | None = None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, document = by_path[self.path]
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *arguments: Any) -> None:
                """Silent."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        servers.append(server)
        return f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


NOTHING = visible({"A": ("mandt",)}, {"A": "A"}, Principal("deploy", frozenset[Scope]({"search"})))
assert isinstance(NOTHING, Nothing)
UNSEEN = NOTHING.why
"""What a search under row rights says to a key without claims, such as the script's own."""
LIST = "/v1/collections"
ONE = [{"collection": "a", "rows": 5}]
SEARCH = "/v1/collections/a/search"


@pytest.mark.parametrize(
    ("by_path", "code", "says"),
    [
        ({LIST: (200, ONE), SEARCH: (200, {"hits": [{}, {}]})}, 0, "search in a: 2 hits"),
        ({LIST: (200, ONE), SEARCH: (403, {})}, 0, "refused to this key by its rights"),
        ({LIST: (200, ONE), SEARCH: (200, {"hits": []})}, 1, "search in a: no hit (HTTP 200)"),
        ({LIST: (200, ONE), SEARCH: (200, {"hits": [], "notes": ["late"]})}, 1, "search in a: no hit (HTTP 200)"),
        ({LIST: (200, ONE), SEARCH: (200, {"hits": [], "notes": [UNSEEN]})}, 0, "no row visible to this key"),
        ({LIST: (200, ONE), SEARCH: (503, {})}, 1, "search in a: no hit (HTTP 503)"),
        ({LIST: (401, {})}, 1, "list of collections: HTTP 401"),
        ({LIST: (200, [{"collection": "a", "rows": 0}]), "/embed": (200, [[0.5, 0.5]])}, 0, "embed: 2 finite numbers"),
        ({LIST: (200, []), "/embed": (200, [[float("nan")]])}, 1, "embed: no vector"),
        ({LIST: (200, []), "/embed": (500, {})}, 1, "embed: no vector (HTTP 500)"),
    ],
)
def test_what_counts_as_an_answer(
    answers: Callable[..., str], capsys: pytest.CaptureFixture[str], by_path: dict[str, Any], code: int, says: str
) -> None:
    assert program("smoke").main(answers(by_path), KEY) == code
    assert says in capsys.readouterr().out


def test_a_service_with_a_certificate_of_its_own(
    answers: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made out for another name, by an authority that nobody knows; another certificate is not believed."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own = authority.issue_cert("search.example")
    own.configure_cert(context)
    for name, certificate in (("own", own), ("other", trustme.CA().issue_cert("search.example"))):
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    url = answers({LIST: (200, ONE), SEARCH: (200, {"hits": [{}]})}, context)
    smoke = program("smoke")
    assert smoke.main(url, KEY, str(tmp_path / "own.pem")) == 0
    assert smoke.main(url, KEY, str(tmp_path / "other.pem")) == 1
    assert "nothing answers" in capsys.readouterr().out


def test_nobody_there(key_file: Path) -> None:
    done = tried("http://127.0.0.1:1", key_file)
    assert done.returncode == 1
    assert done.stdout.startswith("nothing answers at http://127.0.0.1:1")


@pytest.mark.slow
def test_two_lines_of_figures_from_a_real_report() -> None:
    sizes = ["--sizes", "64", "--duration", "0.05", "--model", "hash:16", "--device", "cpu"]
    command = [sys.executable, "-m", "app.src.core.t4_gpu_optimizer", "--json", *sizes]
    report = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT).stdout
    figures = [sys.executable, "-c", (PARTS / "figures.py").read_text()]
    shown = subprocess.run(figures, input=report, capture_output=True, text=True, timeout=60, check=True).stdout
    first, second = shown.splitlines()
    assert " TFLOP/s  THE CONTAINER COMPUTES ON THE CPU" in first
    assert second.startswith("measured: ")


def test_figures_of_a_card_and_of_nothing() -> None:
    card = {
        "device": {"kind": "cuda", "name": "Tesla T4"},
        "matmul": [
            {"dtype": "fp32", "tflops": 4.0},
            {"dtype": "fp16", "tflops": 23.81},
            {"dtype": "bf16", "tflops": None},
        ],
        "embedding": [{"precision": "fp16", "texts_per_second": 5123.4, "tokens_per_second": 163_950.0}],
    }
    figures = program("figures")
    assert figures.lines(card) == [
        "measured: Tesla T4: fp16 products 23.8 TFLOP/s",
        "measured: fp16 embedding 5,123 texts/s, 163,950 tokens/s",
    ]
    nothing = {"device": {"kind": "cuda", "name": "x"}, "matmul": [], "embedding": []}
    assert figures.lines(nothing) == ["measured: x: no product measured", "measured: no text embedded"]
