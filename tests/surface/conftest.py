"""The command line as a person meets it: a child process with an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.scene import Scene
from tests.forked import owl_sap

ROOT = Path(__file__).parents[2]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OWL_SAP_", "HANA_", "T4_GPU_")) and name not in ("USE_GPU", "GPU_DEVICE_ID")
}


class Run:
    """How a command ended."""

    def __init__(self, completed: subprocess.CompletedProcess[str]) -> None:
        self.code = completed.returncode
        self.out = completed.stdout
        self.err = completed.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Run]


def environment(**more: str) -> dict[str, str]:
    return CLEAN | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def completed(
    *arguments: str, cwd: Path, env: dict[str, str], stdin: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `owl-sap ARGUMENTS`."""
    pipe = subprocess.PIPE
    with owl_sap(*arguments, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, errors = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`cli("verb", ..., NAME="value")` runs owl-sap in an empty folder; keyword arguments are its environment."""

    def run(*arguments: str, stdin: str = "", traceback: bool = False, **variables: str) -> Run:
        ended = completed(*arguments, cwd=tmp_path, env=environment(**variables), stdin=stdin)
        assert traceback or "Traceback" not in ended.stderr, ended.stderr
        return Run(ended)

    return run


@pytest.fixture(scope="session")
def hashing() -> Iterator[EngineEmbedder]:
    engine = load_engine(EngineOptions(model="hash:64"))
    yield EngineEmbedder(engine)
    engine.close()


@pytest.fixture
def make_scene(
    emulator: Emulator, hana_schema: str, hashing: EngineEmbedder, tmp_path: Path
) -> Iterator[Callable[..., Scene]]:
    """`make_scene("hana" or "local", rows=n)`: a collection over the emulator, and the command line beside it."""
    made: list[Scene] = []

    def make(kind: str, rows: int = 120) -> Scene:
        made.append(Scene(emulator, hana_schema, kind, tmp_path / "scene", hashing, rows=rows))
        return made[-1]

    yield make
    for scene in made:
        scene.close()
