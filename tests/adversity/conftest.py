"""A scene for each store, in an emulator that is shared by the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.scene import Scene
from tests.slow import slow

pytest.importorskip("hdbcli")


@pytest.fixture(scope="session")
def hashing() -> Iterator[EngineEmbedder]:
    engine = load_engine(EngineOptions(model="hash:64"))
    yield EngineEmbedder(engine)
    engine.close()


@pytest.fixture(params=[*slow("hana"), "local"])
def scene(
    request: pytest.FixtureRequest, emulator: Emulator, hana_schema: str, hashing: EngineEmbedder, tmp_path: Path
) -> Iterator[Scene]:
    """A test that names no store runs with the local one in the default suite."""
    scene = Scene(emulator, hana_schema, request.param, tmp_path / "scene", hashing)
    yield scene
    scene.close()
