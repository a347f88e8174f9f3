"""An emulator whose VECTOR_EMBEDDING is that of `tests/hana_models.py`, and embedders over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.src.service.hana_engine import HanaEngine
from app.src.service.wiring import EngineEmbedder
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.embedding import HanaModel
from connector.model import DatabaseModel, ModelSource
from hana_emulator.testing import Emulator, running

NEB = DatabaseModel("SAP_NEB.20240715")


@pytest.fixture(scope="session")
def native() -> Iterator[Emulator]:
    with running("--embedder", "tests.hana_models:embed") as emulator:
        yield emulator


def login(emulator: Emulator, schema: str = "") -> ConnectionOptions:
    same = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
    return ConnectionOptions(**same, schema=schema, encrypt=False)


def embedder_of(pool: HanaPool, model: DatabaseModel = NEB) -> EngineEmbedder:
    source = ModelSource(f"hana:{model.name}", remote_source=model.remote_source)
    return EngineEmbedder(HanaEngine(HanaModel(pool, model)), source=source)
