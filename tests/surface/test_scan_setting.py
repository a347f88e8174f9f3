"""`[store] scan`: where a local store searches, and that nothing is loaded to find out before somebody searches."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import DeviceFailed
from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits, T4MemoryManager
from app.src.observe.checks import Checks
from app.src.service.wiring import EnginesScan, Parts
from app.src.settings import Settings
from connector.errors import ConfigurationError
from connector.stores.scan import Int8Scan


def engine(profile: DeviceProfile) -> Any:
    return SimpleNamespace(profile=profile, memory=T4MemoryManager(profile, MemoryLimits(1.0, 0)))


def test_without_a_card_the_stores_own_scan_is_used_and_found_once() -> None:
    asked: list[int] = []

    def load() -> Any:
        asked.append(1)
        return engine(DeviceProfile.cpu())

    scan = EnginesScan(load, wanted=False)
    assert not asked
    assert type(scan.copy(8)) is type(scan.copy(8)) is type(Int8Scan().copy(8))
    assert len(asked) == 1


def test_a_card_that_is_asked_for_and_missing_is_an_error() -> None:
    scan = EnginesScan(lambda: engine(DeviceProfile.cpu("Some CPU")), wanted=True)
    with pytest.raises(ConfigurationError, match=r'scan = "gpu", but the model computes on Some CPU, which is no GPU'):
        scan.copy(8)


def test_with_a_card_it_searches_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of a card on a CPU's tensors: what is chosen and what is handed on, not how fast it is."""
    from app.src.core import scan as card

    profile = DeviceProfile("cuda", "a card", capability=(7, 5), memory_bytes=1 << 34)
    monkeypatch.setattr(card.torch, "device", lambda _name: card.torch.zeros(0).device)  # type: ignore[attr-defined]
    copy = EnginesScan(lambda: engine(profile), wanted=False).copy(8)
    assert isinstance(copy, card.CardCopy)
    rows = np.eye(8, dtype=np.float32)
    copy.append(rows)
    assert copy.rows_on_card == 8
    found, floor = copy.view().rank(rows[3:4], None)[0].best(1)
    assert (found.tolist(), floor < 1) == ([3], True)


def test_a_card_that_fails_in_a_search_needs_a_new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even where engines on other cards go on: the vectors are on this one."""
    from app.src.core import scan as card

    profile = DeviceProfile("cuda", "a card", capability=(7, 5), memory_bytes=1 << 34)
    monkeypatch.setattr(card.torch, "device", lambda _name: card.torch.zeros(0).device)  # type: ignore[attr-defined]
    store = {"kind": "local", "path": tmp_path, "scan": "gpu"}
    parts = Parts(Settings.model_validate({"store": store, "embedding": {"model": "hash:8"}}))
    monkeypatch.setattr(Parts, "engine", engine(profile))
    with closing(parts):
        parts.store  # noqa: B018 - makes it
        assert parts.failed == ""
        scan = parts._scan
        assert scan is not None
        copy = scan.copy(8)
        assert parts.failed == ""
        copy.append(np.eye(8, dtype=np.float32))

        def broken(*_: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(scan._scan, "product", broken)
        with pytest.raises(DeviceFailed):
            copy.view().rank(np.eye(8, dtype=np.float32)[:1], None)
        assert "illegal memory access" in parts.failed
        assert Checks(parts).beyond_help() == parts.failed
