"""Nothing is timed in these tests, so no garbage is collected between two turns: in the process of a whole suite that
takes a second each time.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.src.benchmark import side_by_side


@pytest.fixture(autouse=True)
def _no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "gc", SimpleNamespace(collect=lambda: 0))
