"""The command line as a person meets it: a child process with an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.src.cli import app
from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator, running
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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """As `cli`, in this process and five times as fast: for what does not depend on a process of its own."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)

    def run(*arguments: str, **variables: str) -> Run:
        done = CliRunner().invoke(app, arguments, env=environment(**variables), prog_name="owl-sap")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Run(subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr))

    return run


@pytest.fixture(scope="session")
def _sample() -> Iterator[tuple[Emulator, Any]]:
    with running("--sample") as emulator:
        with closing(emulator.connect(autocommit=True)) as connection:
            yield emulator, connection
        assert emulator.stop() == 0


@pytest.fixture
def sample(_sample: tuple[Emulator, Any]) -> Iterator[Emulator]:
    """The emulator with the sample tables: one for all tests here, which run in any order, without their vectors."""
    emulator, connection = _sample
    yield emulator
    with closing(connection.cursor()) as cursor:
        cursor.execute("SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = 'SAPDEMO' AND TABLE_NAME LIKE 'OWL%'")
        for (name,) in cursor.fetchall():
            cursor.execute(f'DROP TABLE SAPDEMO."{name}"')


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
