"""A collection over the emulator, and commands whose Ray is their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.scaling.cluster import _authenticate
from app.src.service.wiring import EngineEmbedder
from app.src.settings.model import ScaleSettings
from hana_emulator.testing import Emulator
from tests.adversity.scene import Scene

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def scene(request: pytest.FixtureRequest, emulator: Emulator, hana_schema: str, tmp_path: Path) -> Iterator[Scene]:
    """A collection. Its parameter is the kind of its store: hana, or local (default)."""
    kind = getattr(request, "param", "local")
    with load_engine(EngineOptions(model="hash:64")) as engine:
        scene = Scene(emulator, hana_schema, kind, tmp_path / "scene", EngineEmbedder(engine), rows=600)
        yield scene
        scene.close()


@pytest.fixture
def start(scene: Scene, tmp_path: Path) -> Iterator[Start]:
    """`start("verb", ..., NAME="value")` runs owl-sap beside the collection, without a token of Ray in its home."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        known = {name: value for name, value in scene.variables().items() if not name.startswith("RAY_")}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "app", *arguments],
                cwd=scene.folder,
                env=known | home | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def ray() -> Any:
    """Ray, imported as a cluster does it: Ray reads some variables only once in a process."""
    _authenticate(ScaleSettings())
    import ray

    return ray


@pytest.fixture
def callbacks(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(ray, "kill", lambda _process: None)
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="owl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def listening() -> Iterator[str]:
    """An address where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Without a token, with the variables put back afterwards."""
    for name in ("AUTH_MODE", "AUTH_TOKEN", "AUTH_TOKEN_PATH", "USAGE_STATS_ENABLED", "ENABLE_AUTO_CONNECT"):
        monkeypatch.setenv(f"RAY_{name}", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch
