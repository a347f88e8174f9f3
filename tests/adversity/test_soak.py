"""`serve` on its schedule, rows that change, four clients that search: answers, times and memory, for both stores.

`OWL_SOAK_SECONDS` makes it longer: 600 is the run whose figures stand in docs/limits.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.parts import EngineEmbedder
from tests.adversity.scene import Scene
from tests.adversity.soak import Soak
from tests.emulator.process import Emulator, running

SECONDS = float(os.environ.get("OWL_SOAK_SECONDS", "75"))
ROWS = int(os.environ.get("OWL_SOAK_ROWS", "3000"))
P50_SECONDS = 0.1


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Emulator]:
    """One of its own: what it holds is measured."""
    with running("--data", str(tmp_path / "hana")) as emulator:
        yield emulator


@pytest.fixture(params=["hana", "local"])
def scene(request: pytest.FixtureRequest, emulator: Emulator, hana_schema: str, tmp_path: Path) -> Iterator[Scene]:
    engine = load_engine(EngineOptions(model="hash:384"))
    scene = Scene(emulator, hana_schema, request.param, tmp_path / "scene", EngineEmbedder(engine), rows=ROWS)
    yield scene
    scene.close()
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.covers("serve")
def test_searches_beside_writes_stay_right_and_quick_and_memory_flat(scene: Scene) -> None:
    soak = Soak(scene, SECONDS, idle_seconds=10)
    soak.run()
    print(json.dumps({"store": scene.kind, "seconds": SECONDS, **soak.figures()}))
    print([(s.rows, s.service >> 20, s.emulator >> 20) for s in soak.samples[:: max(1, len(soak.samples) // 40)]])
    assert soak.wrong == []
