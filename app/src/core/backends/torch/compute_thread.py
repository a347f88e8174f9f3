"""The one thread of this process on which torch computes on a CPU. Knows no model.

OpenMP keeps a team of workers for every thread that ever computed in parallel. As soon as two teams are more than the
cores, its workers sleep between any two operations instead of waiting at the ready, whichever team is idle: measured on
2 cores, the same texts take 4 to 8 % longer from a second thread. So models are loaded, tried and run on one.

Tensors of ever other sizes also leave a heap in pieces that glibc keeps: free memory is given back now and then.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

TRIM_EVERY = 64
"""Works after which free memory is given back: 6 ms, once in some two seconds of batches."""

Result = TypeVar("Result")
_works = itertools.count(1)
_here = threading.local()


def _enter() -> None:
    _here.computes = True


_thread = ThreadPoolExecutor(1, thread_name_prefix="owl-sap-compute", initializer=_enter)  # started by its first work


def on_compute_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; the caller waits for its turn. Work may itself call this."""
    if getattr(_here, "computes", False):
        return work()
    done = _thread.submit(work)
    if next(_works) % TRIM_EVERY == 0:
        _thread.submit(give_back)
    try:
        return done.result()
    finally:
        del done  # an error would keep itself, and all that was computed, by way of this frame


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes without its other threads. It waits for them after every operation, and on a busy machine that
    takes a turn of the scheduler each time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def give_back() -> None:
    """Free memory of the heap to the system, also from its midst. Nothing where the C library cannot (glibc can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
