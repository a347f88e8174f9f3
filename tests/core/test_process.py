"""The one thread for torch, and the memory that its heap gives back."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.src.core.backends.torch import process
from app.src.core.backends.torch.process import TRIM_EVERY, give_back, on_compute_thread


def test_all_work_is_done_on_one_thread_also_work_of_work() -> None:
    def nested() -> tuple[str, str]:
        return threading.current_thread().name, on_compute_thread(lambda: threading.current_thread().name)

    with ThreadPoolExecutor(4) as pool:
        names = {name for pair in pool.map(lambda _: on_compute_thread(nested), range(20)) for name in pair}
    assert len(names) == 1


def test_what_work_raises_comes_out() -> None:
    def fail() -> None:
        raise LookupError("planted")

    with pytest.raises(LookupError, match="planted"):
        on_compute_thread(fail)


def test_memory_is_given_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    monkeypatch.setattr(process, "give_back", lambda: where.append(threading.current_thread().name))
    for _ in range(2 * TRIM_EVERY):
        on_compute_thread(lambda: None)
    here = on_compute_thread(lambda: threading.current_thread().name)  # behind the last one
    assert where[:2] == [here, here]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_giving_back_frees_the_midst_of_the_heap() -> None:
    kept = [np.ones(100_000, np.uint8) for _ in range(600)]  # below the size that glibc maps by itself
    kept = kept[::40]
    before = resident_bytes()
    give_back()
    assert resident_bytes() < before - 20_000_000, "45 of 60 MB at least were free"
    assert all(array.all() for array in kept)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
