"""torch's state for the whole process: the thread on which it computes on a CPU, its thread count, TF32. Imports no
torch by itself."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from ...device import DeviceProfile, Precision

Result = TypeVar("Result")

# OpenMP keeps a team of workers for every thread that ever computed in parallel. As soon as two teams are more than the
# cores, idle teams slow down the other one: measured on 2 cores, the same texts take 4 to 8 % longer from a second
# thread. So models are loaded, tried and run on one thread.
_here = threading.local()
_thread = ThreadPoolExecutor(
    1, thread_name_prefix="owl-sap-compute", initializer=lambda: setattr(_here, "computes", True)
)
_works = itertools.count(1)
# Works after which free memory is given back: 6 ms, once in some two seconds of batches. Tensors of ever other sizes
# leave a heap in pieces that glibc keeps.
TRIM_EVERY = 64


def on_compute_thread(work: Callable[[], Result]) -> Result:
    """Return or raise what `work` does; the caller waits for its turn. Work may itself call this."""
    if getattr(_here, "computes", False):
        return work()
    done = _thread.submit(work)
    if next(_works) % TRIM_EVERY == 0:
        _thread.submit(give_back)
    try:
        return done.result()
    finally:
        del done  # an error would keep itself, and all that was computed, by way of this frame


def give_back() -> None:
    """Return free memory of the heap to the system, with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute without torch's other threads, which it waits for after every operation: slow on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Tf32Switch:
    """TF32 for fp32 products: on while some engine has precision tf32 and none has fp32. Thread-safe.

    The switch is written and never read back: torch mixes two names for it, and reading the one after writing the other
    raises RuntimeError from 2.9 on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[Precision] = Counter()
        self._on = False

    def hold(self, profile: DeviceProfile, precision: Precision, by: int = 1) -> bool:
        """Count an engine that begins; return whether TF32 is on now."""
        if not profile.tf32:
            return False
        import torch

        with self._lock:
            self._holders[precision] += by
            wanted = self._holders["tf32"] > 0 and self._holders["fp32"] <= 0
            if wanted is not self._on:
                torch.set_float32_matmul_precision("high" if wanted else "highest")
                self._on = wanted
            return self._on

    def release(self, profile: DeviceProfile, precision: Precision) -> bool:
        return self.hold(profile, precision, -1)


TF32 = Tf32Switch()
