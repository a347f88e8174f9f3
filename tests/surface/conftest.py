"""The command line as a person meets it: a child process with an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.scene import Scene
from tests.surface import forked

ROOT = Path(__file__).parents[2]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OWL_SAP_", "HANA_", "T4_GPU_")) and name not in ("USE_GPU", "GPU_DEVICE_ID")
}

# A process that sets these is started anew: Python and torch read them before our code runs.
READ_AT_THE_START = ("PYTHON", "LC_", "LANG", "CUDA", "OMP_", "OWL_FAIL")


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


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """`cli("verb", ..., NAME="value")` runs owl-sap in an empty folder; keyword arguments are its environment."""

    def run(*arguments: str, stdin: str = "", traceback: bool = False, **variables: str) -> Run:
        if any(name.startswith(READ_AT_THE_START) for name in variables):
            completed = subprocess.run(
                [sys.executable, "-m", "app", *arguments],
                cwd=tmp_path,
                env=environment(**variables),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        else:
            scratch = tmp_path_factory.mktemp("streams")
            completed = forked.run(
                arguments, folder=tmp_path, environment=environment(**variables), stdin=stdin, scratch=scratch
            )
        assert traceback or "Traceback" not in completed.stderr, completed.stderr
        return Run(completed)

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
