"""Grounds on the shared emulator, one seed each."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hana_emulator.testing import Emulator
from tests.native import native  # noqa: F401 - the fixture
from tests.proof import worker
from tests.proof.cycles import Cycles
from tests.proof.ground import Ground, Plan, seed_of_the_run
from tests.proof.worker import Choosy

pytest.importorskip("hdbcli")


@pytest.fixture(scope="session")
def seed() -> int:
    return seed_of_the_run()


@pytest.fixture(scope="session")
def choosy() -> Choosy:
    return worker.embedder()


@pytest.fixture
def ground(
    request: pytest.FixtureRequest, emulator: Emulator, hana_schema: str, choosy: Choosy, seed: int, tmp_path: Path
) -> Iterator[Ground]:
    """Its parameter is (kind, method)."""
    kind, method = request.param
    print(f"replay with OWL_SAP_TEST_SEED={seed}")
    if kind == "native":
        emulator = request.getfixturevalue("native")
        with closing(emulator.connect(autocommit=True)) as connection:
            connection.cursor().execute(f'CREATE SCHEMA "{hana_schema}"')
    login = {"host": emulator.host, "port": emulator.port, "user": emulator.user, "password": emulator.password}
    chance = random.Random(seed ^ zlib.crc32(request.node.name.encode()))
    plan = Plan(login, hana_schema, kind, method, str(tmp_path))
    with plan.pool() as pool:
        ground = Ground(emulator, plan, worker.embedder_for(plan, pool) if kind == "native" else choosy, chance)
        yield ground
        ground.close()


@pytest.fixture
def cycles(ground: Ground, tmp_path: Path, seed: int) -> Cycles:
    return Cycles(ground, tmp_path, seed)
