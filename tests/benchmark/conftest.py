"""Nothing is timed in these tests, so no garbage is collected between two turns: in the process of a whole suite that
takes a second each time.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.src.benchmark import harness


@pytest.fixture(autouse=True)
def _no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: 0))
