"""A text that kills each worker that embeds it, on a real cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.src.core.backends import EngineError
from app.src.core.loading import EngineOptions, load_engine
from app.src.scaling.cluster import Cluster
from app.src.scaling.worker import Answer, Block, Worker
from app.src.settings.model import ScaleSettings
from tests.scaling.test_cluster import OPTIONS, synced


class DeadlyWorker(Worker):
    def embed(self, options: EngineOptions, block: Block) -> Answer | EngineError:
        if any("number 5 " in text for text in block.texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().embed(options, block)


@pytest.mark.slow
@pytest.mark.proves(35)
def test_its_row_is_quarantined_alone(tmp_path: Path) -> None:
    cluster = Cluster(ScaleSettings(actors=2, threads=1), worker=DeadlyWorker)
    try:
        report, rows = synced(cluster.engine(OPTIONS), tmp_path / "ray", rows=8)
    finally:
        cluster.close()
    with load_engine(OPTIONS) as engine:
        _, expected = synced(engine, tmp_path / "here", rows=8)
    assert (report.upserted, report.quarantined) == (7, 1)
    assert len(rows) == 7
    assert rows.items() <= expected.items()
